"""What every format must pass: theirs -> ours -> theirs with the same bits, through files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from noise import fill_with_noise
from torch import Tensor

import vitkit
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.format import Bundle, Format
from vitkit.weights.load import load
from vitkit.weights.rules import write_tensors
from vitkit.weights.sources import open_source

PREPROCESS = vitkit.Preprocess()


def written(form: Format, model: vitkit.ViT, folder: Path, classes: tuple[str, ...] = ()) -> Path:
    """A model as the files of a format, in `folder`."""
    tensors = write_tensors(form.table(model.spec), model.spec, model.state_dict())
    preprocess = PREPROCESS.replace(image_size=model.spec.image_size)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in form.write(Bundle(model.spec, tensors, preprocess, classes)).items():
        (folder / name).write_bytes(content)
    return folder


def noisy(spec: vitkit.ViTSpec) -> vitkit.ViT:
    model = vitkit.ViT(spec).eval()
    fill_with_noise(model, std=0.05)
    return model


def stored(path: Path) -> dict[str, Tensor]:
    """The tensors of a file or folder, by their own names."""
    with open_source(path) as source:
        return {name: source[name].clone() for name in source}


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def round_trip(form: Format, spec: vitkit.ViTSpec, folder: Path, **overrides: object) -> Checkpoint:
    """Write, read, write again: the same spec, the same tensors, the same bits in the files."""
    model = noisy(spec)
    first = written(form, model, folder / "first")
    checkpoint = load(first, **overrides)
    assert checkpoint.format == form.name
    same_bits(model.state_dict(), checkpoint.model.state_dict())
    again = written(form, checkpoint.model, folder / "second")
    same_bits(stored(first), stored(again))
    return checkpoint

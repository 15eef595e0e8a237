"""What every format must pass: theirs -> ours -> theirs with the same bits, through files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from noise import fill_with_noise
from safetensors import safe_open
from torch import Tensor

import vitkit
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.files import open_source
from vitkit.weights.formats.format import FOREIGN_METADATA_KEY, Bundle, Format
from vitkit.weights.formats.key_table import write_tensors
from vitkit.weights.load import load

PREPROCESS = vitkit.Preprocess()


def written(form: Format, model: vitkit.ViT, folder: Path, classes: tuple[str, ...] = ()) -> Path:
    """A model as the files of a format, in `folder`."""
    tensors = write_tensors(form.table(model.spec), model.spec, model.state_dict())
    height, width = model.spec.image_size
    fit = PREPROCESS.fit if height == width else "squash"  # not every format has a crop to oblongs
    preprocess = PREPROCESS.replace(image_size=(height, width), fit=fit)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in form.write(Bundle(model.spec, tensors, preprocess, classes)).items():
        content.write(folder / name)
        if name.endswith(".safetensors"):
            without_our_entry(folder / name)
    return folder


def without_our_entry(file: Path) -> None:
    """Take out what vitkit says of the model beside the format, as files of others are without."""
    with safe_open(file, framework="pt") as opened:
        kept = dict(opened.metadata())
    kept.pop(FOREIGN_METADATA_KEY, None)
    safetensors.torch.save_file(safetensors.torch.load_file(file), file, kept)


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


def same_files(left: Path, right: Path) -> None:
    """The same files in two folders, the same bits in every tensor, the same bytes beside them."""
    assert sorted(file.name for file in left.iterdir()) == sorted(
        file.name for file in right.iterdir()
    )
    same_bits(stored(left), stored(right))
    for file in left.glob("*.json"):
        assert file.read_bytes() == (right / file.name).read_bytes(), file.name


def round_trip(form: Format, spec: vitkit.ViTSpec, folder: Path, **overrides: object) -> Checkpoint:
    """Write, read, write again: the same spec, the same tensors, the same bits in the files."""
    model = noisy(spec)
    checkpoint = reread(model, written(form, model, folder / "first"), **overrides)
    assert checkpoint.format == form.name
    same_files(folder / "first", written(form, checkpoint.model, folder / "second"))
    return checkpoint


def reread(model: vitkit.ViT, place: Path, **overrides: object) -> Checkpoint:
    """What was written of a model, read again with the same bits."""
    checkpoint = load(place, **overrides)
    same_bits(model.state_dict(), checkpoint.model.state_dict())
    return checkpoint

"""The files of a model that the processes of a benchmark read: one in each library's own format."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitkit.benchmarking.inputs import PROBES, unsettle
from vitkit.engines.choosing.sample_images import sample_images
from vitkit.errors import CheckpointError, OutputError
from vitkit.models.presets import table
from vitkit.models.vit import ViT
from vitkit.other_names import usual_name
from vitkit.spec import Preprocess
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.converting.write import write_checkpoint
from vitkit.weights.formats.description import OWN_FORMAT
from vitkit.weights.load import load
from vitkit.weights.pretrained import create_model


class ModelFiles(NamedTuple):
    """The weights of one contender on disk.

    Attributes:
        path: of the files, a folder.
        spec: of the model in them, as JSON.
        changes: what the format could not store exactly, in one line; empty for nothing.
    """

    path: str
    spec: dict[str, Any]
    changes: str = ""


class WrittenFormats(NamedTuple):
    """A model in the formats of the contenders.

    Attributes:
        files: format -> its files; `vitkit` is always there.
        refused: format -> why it cannot hold the model, in one line.
    """

    files: dict[str, ModelFiles]
    refused: dict[str, str]


def open_model(name: str, fields: dict[str, Any]) -> Checkpoint:
    """Return a checkpoint, or an untrained model by its name; speed does not depend on weights.

    Args:
        name: of a model, or the path or address of a checkpoint.
        fields: of `ViTSpec`, such as `image_size`; they change an untrained model.

    Raises:
        CheckpointError: a file that cannot be read, or has no classes.
        SettingError: no model of that name.
        SpecError: a field that does not exist, or a spec that cannot.
    """
    name = name if os.path.exists(name) else usual_name(name, table())
    if os.path.exists(name) or Path(name).suffix or "/" in name:
        checkpoint = load(name, **fields)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = create_model(name, **fields).eval()
        unsettle(model)
        preprocess = Preprocess(image_size=model.spec.image_size)
        classes = tuple(f"class {number}" for number in range(model.spec.num_classes))
        checkpoint = Checkpoint(model, preprocess, classes, path=Path(f"{name}.safetensors"))
    if not checkpoint.model.spec.num_classes:
        raise CheckpointError(
            f"{name}: a model without a head has no logits to compare; choose one with classes"
        )
    return checkpoint


def write_model_files(
    checkpoint: Checkpoint, folder: Path, formats: Iterable[str]
) -> WrittenFormats:
    """Write a model in formats, also where one of them cannot store it exactly: logits decide.

    Args:
        checkpoint: the model.
        folder: empty.
        formats: names of `formats()`, besides vitkit's own.

    Raises:
        OutputError: the folder's disk is full.
    """
    files: dict[str, ModelFiles] = {}
    refused: dict[str, str] = {}
    for form in (OWN_FORMAT, *formats):
        place = folder / form
        try:
            written = write_checkpoint(checkpoint, place, form, allow_lossy=True, before={})
        except OutputError:
            raise
        except CheckpointError as error:
            refused[form] = str(error)
            continue
        inexact = [step.text for step in written.steps if step.kind != "folded"]
        files[form] = ModelFiles(str(place), written.spec.to_json(), "; ".join(inexact))
    return WrittenFormats(files, refused)


@torch.inference_mode()
def reference_logits(model: ViT) -> torch.Tensor:
    """Return our logits (B, K) of the images that every contender gets first, in float32."""
    spec = model.spec
    logits: torch.Tensor = model(sample_images(PROBES, spec.in_channels, spec.image_size))
    return logits

"""A model by its name with weights from elsewhere: published ones, or somebody's own.

What the caller names is what comes out: sizes, channels and classes are adapted, and each step is
logged (logger `vitkit`). What nobody names is as the weights were trained.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.models.presets import preset
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.adapt import adapt
from vitkit.weights.catalogue import find
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.converting.resize import rebuilt
from vitkit.weights.hints import Hints
from vitkit.weights.load import load_with

ADAPTED = {"image_size": "image_size", "patch_size": "patch_size", "in_channels": "in_channels",
           "num_classes": "num_classes", "position_resampling": "resampling"}  # fmt: skip
"""Field of a spec -> the change of `adapt` that brings weights to it."""
ONLY_TRAINING = (
    "position_dropout", "patch_dropout", "attention_dropout", "projection_dropout", "mlp_dropout",
    "head_dropout", "drop_path", "drop_path_schedule", "initialisation", "head_bias",
)  # fmt: skip
"""Fields that say how a model is trained, and nothing of what trained weights compute."""
AS_TRAINED = (
    "num_classes", "activation", "norm_eps", "resnet_variant", "distilled_readout",
    "position_resampling", "positions_cover_prefix",
)  # fmt: skip
"""Fields in which the weights are right and a preset is only a default, unless they are named."""
AS_PUBLISHED = ("image_size", "representation_width", "pooling")
"""Fields in which a checkpoint of the catalogue may differ from its preset."""


def pretrained(
    name: str,
    place: str | Path | bool,
    asked: Mapping[str, Any],
    *,
    trust_pickle: bool = False,
    strict: bool = True,
) -> ViT:
    """A model with weights, in eval mode.

    Args:
        name: a preset's, or with a tag as in the catalogue: `vit_base_patch16_224.augreg_in1k`.
        place: True for the catalogue's weights, or whatever `load` takes.
        asked: spec fields that the caller names.
        trust_pickle: as for `load`.
        strict: as for `load`.

    Raises:
        SettingError: no such model, or no published weights.
        SpecError: an unknown field, or sizes that the model cannot have.
        CheckpointError: weights of another model.
    """
    entry = find(name) if place is True else None
    place = entry.name if entry else str(place)
    wanted = preset(entry.preset if entry else name.partition(".")[0], **asked)
    stored = load_with(place, Hints(asked, wanted), trust_pickle=trust_pickle, strict=strict)
    for line in replace(stored, classes=()).warnings:
        logging.getLogger("vitkit").warning("%s: %s", place, line)
    if entry:
        wanted = as_published(wanted, stored.model.spec, asked)
    stored = brought(stored, wanted, asked, place)
    for line in stored.metadata.get("adapted", ()):
        logging.getLogger("vitkit").info("%s: %s", place, line)
    return stored.model.eval()


def as_published(wanted: ViTSpec, found: ViTSpec, asked: Mapping[str, Any]) -> ViTSpec:
    """The spec of a preset, where a checkpoint of the catalogue may differ from it as it does.

    Args:
        wanted: the preset with what is `asked`.
        found: the checkpoint's.
        asked: spec fields that the caller names.
    """
    free = [field for field in AS_PUBLISHED if field not in asked]
    return wanted.replace(**{field: getattr(found, field) for field in free})


def brought(
    stored: Checkpoint, wanted: ViTSpec, asked: Mapping[str, Any], place: str
) -> Checkpoint:
    """A checkpoint brought to the spec that is wanted, as far as weights can be.

    Args:
        stored: as it was loaded.
        wanted: with what is `asked` in it.
        asked: spec fields that the caller names; in others the weights may be right.
        place: what to call the checkpoint in a message.

    Returns:
        A new one; `.metadata["adapted"]` has a line for every step.

    Raises:
        SpecError: sizes that the model cannot have.
        CheckpointError: weights of another model.
    """
    found = stored.model.spec
    changes = {
        change: getattr(wanted, field)
        for field, change in ADAPTED.items()
        if field in asked and getattr(wanted, field) != getattr(found, field)
    }
    if changes:
        stored = adapt(stored, **changes)
    spec = stored.model.spec
    spec = spec.replace(**{field: getattr(wanted, field) for field in ONLY_TRAINING})
    if bool(spec.layer_scale) == bool(wanted.layer_scale):
        spec = spec.replace(layer_scale=wanted.layer_scale)  # only where it starts
    ours, theirs = wanted.to_json(), spec.to_json()
    differing = [
        f"{field}: {ours[field]!r} asked, {theirs[field]!r} in the file"
        for field in ours
        if ours[field] != theirs[field] and (field in asked or field not in AS_TRAINED)
    ]
    if differing:
        raise CheckpointError(f"{place}: of another model: {'; '.join(differing)}")
    return replace(stored, model=rebuilt(stored.model, spec, stored.model.state_dict()))

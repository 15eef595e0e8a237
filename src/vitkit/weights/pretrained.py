"""A model by its name, with published weights or the user's own.

Fields that the caller names are what the model has: sizes, channels and classes are adapted, and
each step is logged (logger `vitkit`). All others are as the weights were trained.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from vitkit import errors, messages, other_names
from vitkit.models.interface.feature_maps import FeatureMaps
from vitkit.models.presets import preset
from vitkit.models.vit import ViT
from vitkit.spec import RANDOM_RATES, ViTSpec
from vitkit.weights import load, recognise_format, write
from vitkit.weights.adapt import adapt
from vitkit.weights.catalogue import catalogue, find, known
from vitkit.weights.checkpoint import Checkpoint, texts

HUB_NAME = re.compile(r"[\w.-]*\w/[\w-][\w.-]*(?<!\.safetensors)(?<!\.npz)(?<!\.pth)(?<!\.pt)")
"""A name of the Hub without `hf://`, such as google/vit-base-patch16-224."""
ADAPTATIONS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "in_channels": "in_channels",
    "num_classes": "num_classes",
    "position_resampling": "resampling",
}
"""Field of a spec -> the change of `adapt` that adapts weights to it."""
ONLY_TRAINING = (*RANDOM_RATES, "drop_path_schedule", "initialisation", "head_bias")
"""Fields that change training alone, and no output of trained weights."""
AS_TRAINED = (
    "num_classes",
    "activation",
    "norm_eps",
    "resnet_variant",
    "distilled_readout",
    "position_resampling",
    "positions_cover_prefix",
)
"""Fields in which the weights win over the preset, unless the caller names them."""
AS_PUBLISHED = ("image_size", "representation_width", "pooling")
"""Fields in which a checkpoint of the catalogue may differ from its preset."""


@overload
def create_model(
    name: str,
    *,
    features_only: Literal[True],
    out_indices: int | Sequence[int] = ...,
    pretrained: bool | str | Path | None = ...,
    trust_pickle: bool = ...,
    strict: bool = ...,
    **overrides: Any,
) -> FeatureMaps: ...
@overload
def create_model(
    name: str,
    *,
    features_only: Literal[False] = ...,
    pretrained: bool | str | Path | None = ...,
    trust_pickle: bool = ...,
    strict: bool = ...,
    **overrides: Any,
) -> ViT: ...
def create_model(
    name: str,
    *,
    pretrained: bool | str | Path | None = False,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    trust_pickle: bool = False,
    strict: bool = True,
    **overrides: Any,
) -> ViT | FeatureMaps:
    """Create a ViT by name.

    Args:
        name: one of `list_models()`, such as `"vit_base_patch16_224"`; with a tag, such as
            `"vit_base_patch16_224.augreg_in1k"`, with that checkpoint's classes and image size.
        pretrained: False or None for fresh weights (torch's global generator decides them), True
            for the catalogue's (`list_models(pretrained=True)`), or an argument of `load`: a file
            or folder of any known format, `hf://owner/name`.
        features_only: return a `FeatureMaps`, which gives maps of inner blocks (B, D, gh, gw) and
            has neither a head nor the blocks after the last map.
        out_indices: the blocks of these maps: the last n, or the numbers of some; default 3.
        trust_pickle: read weights that are published as a pickle, as `load` does.
        strict: refuse weights with unknown or missing tensors, as `load` does; with False,
            `.origin.left_out` and `.origin.missing` name them.
        **overrides: any `ViTSpec` field, such as `image_size=(192, 256)`, or timm's keyword for it,
            such as `in_chans=1`, `img_size=192` or `drop_path_rate=0.1`.
            With weights, sizes, channels and classes are adapted as `vitkit.adapt` does it and each
            step is logged; other fields stay as the weights were trained. Fields that a file does
            not state (heads, activation, ... of bare weights) follow from the name and these;
            an `image_size` with as many patches as the file has positions is the size it is for.

    Returns:
        The model, with `.spec`; in training mode when fresh, in eval mode when pretrained, with
        its preprocessing and class names in `.origin`.

    Raises:
        SettingError: no model of that name, no published weights of it, or no such block.
        SpecError: an unknown field, a field under two names, or a spec that cannot exist.
        CheckpointError: weights that cannot be read, or of another model.

    >>> create_model("vit_tiny_patch16_224", img_size=32, embed_dim=96, depth=2).spec.mlp_width
    384
    >>> backbone = create_model("vit_tiny_patch16_224", features_only=True, out_indices=[3, 7, 11])
    >>> backbone.feature_info.channels(), backbone.feature_info.reduction()
    ([192, 192, 192], [16, 16, 16])
    """
    if out_indices is not None and not features_only:
        raise errors.SettingError("out_indices needs features_only=True; pass both, or neither")
    errors.check_type(
        name, str, "create_model", "the name of a model, such as 'vit_tiny_patch16_224'"
    )
    if "/" in name and os.path.exists(name):
        raise errors.SettingError(
            f"create_model takes the name of a model, and {name} is a path; write "
            f"vitkit.load({name!r}).model"
        )
    if pretrained is None or pretrained is False:  # None: not set
        model = _fresh_model(name, overrides)
    else:
        model = load_pretrained(
            name, pretrained, overrides, trust_pickle=trust_pickle, strict=strict
        )
    if not features_only:
        return model
    if out_indices is None:
        out_indices = 3  # the last three, as timm has it
    return FeatureMaps(model, out_indices).train(model.training)


def _fresh_model(name: str, overrides: Mapping[str, Any]) -> ViT:
    """Return a model with initial weights; arguments as for `create_model`."""
    # A checkpoint's name without its weights: the classes and the image size of that checkpoint.
    sizes: dict[str, Any] = {}
    if name in catalogue() or "." in name:
        published = find(name)
        name = published.preset
        sizes = {"num_classes": published.classes, "image_size": published.image_size}
    base = preset(name, **sizes)
    return ViT(preset(name, **sizes | other_names.translate_keywords(overrides, vars(base))))


def from_pretrained(
    source: str | Path, *, trust_pickle: bool = False, strict: bool = True, **overrides: Any
) -> ViT:
    """Return a model with weights; `ViT.from_pretrained` has the arguments and errors."""
    path = source
    # owner/name, as transformers takes it
    if isinstance(path, str) and HUB_NAME.fullmatch(path) and known(path) is None:
        path = path if os.path.exists(path) else f"hf://{path}"
    # Fields that the file leaves open, such as the heads of bare weights. The model is not known
    # yet: timm's keywords are read as those of the default one, and again below.
    hints = recognise_format.Hints(other_names.translate_keywords(overrides, vars(ViTSpec())))
    checkpoint = load.load_with(path, hints, trust_pickle=trust_pickle, strict=strict)
    stored = checkpoint.model.spec
    requested = other_names.translate_keywords(overrides, vars(stored))
    return _adapted_model(checkpoint, stored.replace(**requested), requested, str(path))


def load_pretrained(
    name: str,
    weights: str | Path | Literal[True],
    requested: Mapping[str, Any],
    *,
    trust_pickle: bool = False,
    strict: bool = True,
) -> ViT:
    """Return a model with weights, in eval mode.

    Args:
        name: a preset's, or with a tag as in the catalogue: `vit_base_patch16_224.augreg_in1k`.
        weights: True for the catalogue's weights, or any path that `load` takes.
        requested: fields that the caller names, by our names or by timm's.
        trust_pickle: as for `load`.
        strict: as for `load`.

    Raises:
        SettingError: no such model, or no published weights.
        SpecError: an unknown field, or sizes that the model cannot have.
        CheckpointError: weights of another model.
    """
    entry = find(name) if weights is True else catalogue().get(name)
    path = entry.name if entry is not None and weights is True else str(weights)
    # The tag of a name may be the user's own.
    preset_name = name.partition(".")[0] if entry is None else entry.preset
    requested = other_names.translate_keywords(requested, vars(preset(preset_name)))
    # The model that is asked for; the weights may be of another size and are adapted to it.
    spec = preset(preset_name, **requested)
    hints = recognise_format.Hints(requested, spec)
    checkpoint = load.load_with(path, hints, trust_pickle=trust_pickle, strict=strict)
    if weights is True:
        spec = as_published(spec, checkpoint.model.spec, requested)
    return _adapted_model(checkpoint, spec, requested, path)


def _adapted_model(
    checkpoint: Checkpoint, spec: ViTSpec, requested: Mapping[str, Any], path: str
) -> ViT:
    """Return a checkpoint's model, adapted to a spec, in eval mode; each step is logged."""
    log = logging.getLogger("vitkit")
    # Without class names: a warning on assumed ones does not concern the model alone.
    for line in replace(checkpoint, classes=()).warnings:
        log.warning("%s: %s", path, messages.escape(line))
    checkpoint = adapt_to_spec(checkpoint, spec, requested, path)
    for line in texts(checkpoint.metadata, "adapted"):
        log.info("%s: %s", path, line)
    checkpoint.model.origin = checkpoint.origin
    return checkpoint.model.eval()


def as_published(spec: ViTSpec, stored: ViTSpec, requested: Mapping[str, Any]) -> ViTSpec:
    """Return a preset's spec with the fields in which a published checkpoint may differ.

    Args:
        spec: the preset with the `requested` fields.
        stored: the checkpoint's.
        requested: spec fields that the caller names; these stay.
    """
    free = [field for field in AS_PUBLISHED if field not in requested]
    return spec.replace(**{field: getattr(stored, field) for field in free})


def adapt_to_spec(
    checkpoint: Checkpoint, target: ViTSpec, requested: Mapping[str, Any], path: str
) -> Checkpoint:
    """Adapt a checkpoint to a spec, as far as weights can be adapted.

    Args:
        checkpoint: as it was loaded.
        target: the spec, with the `requested` fields.
        requested: spec fields that the caller names; in others the weights may be right.
        path: name of the checkpoint in messages.

    Returns:
        A new one; `.metadata["adapted"]` has a line for every step.

    Raises:
        SpecError: sizes that the model cannot have.
        CheckpointError: weights of another model.
    """
    stored = checkpoint.model.spec
    changes: dict[str, Any] = {}
    for field, change in ADAPTATIONS.items():
        if field in requested and getattr(target, field) != getattr(stored, field):
            changes[change] = getattr(target, field)
    if changes:
        checkpoint = adapt(checkpoint, **changes)
    spec = checkpoint.model.spec
    spec = spec.replace(**{field: getattr(target, field) for field in ONLY_TRAINING})
    # The number is only where training starts; trained weights have their own.
    if bool(spec.layer_scale) == bool(target.layer_scale):
        spec = spec.replace(layer_scale=target.layer_scale)
    # What adapting cannot change must be equal: width, depth, tokens, kind of block.
    differences = _differences(target, spec, requested)
    if differences:
        raise errors.CheckpointError(f"{path}: contains another model: {'; '.join(differences)}")
    model = write.rebuilt(checkpoint.model, spec, checkpoint.model.state_dict())
    return replace(checkpoint, model=model)


def _differences(target: ViTSpec, spec: ViTSpec, requested: Mapping[str, Any]) -> list[str]:
    """Return a line for each field in which weights do not fit the target spec."""
    ours, theirs = target.to_json(), spec.to_json()
    lines: list[str] = []
    for field, value in ours.items():
        decides = field in requested or field not in AS_TRAINED
        if decides and value != theirs[field]:
            lines.append(f"{field}: {value!r} requested, {theirs[field]!r} in the file")
    return lines

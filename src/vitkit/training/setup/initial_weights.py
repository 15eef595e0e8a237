"""Initial weights of a run, the model around them, and the settings that name spec and images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import SettingError
from vitkit.frozen import field_names
from vitkit.messages import plural
from vitkit.models.presets import preset
from vitkit.models.vit import ViT
from vitkit.spec import Channel, Preprocess, ViTSpec
from vitkit.training.config.field_types import Settings
from vitkit.training.config.run_config import RunConfig
from vitkit.training.config.sections.data import DataSettings
from vitkit.training.config.sections.fine_tuning import FineTuningSettings
from vitkit.training.config.sections.model import DEFAULT_MODEL, ModelSettings
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.optimization.freezing import freeze_parts

SAVED_FACTS = ("place", "format", "sha256", "licence")
"""Facts about the initial weights that the checkpoints of the run repeat."""


@dataclass(frozen=True)
class InitialWeights:
    """The spec, preprocessing and weights that a run starts from.

    Attributes:
        spec: spec of the model, its head as wide as there are classes.
        preprocess: the evaluation transform.
        weights: of the whole model; `None` for random ones, or where the state of a stopped run
            has them.
        facts: what config.yaml keeps: `place`, `format`, `sha256` and `licence` of the weights as
            they were found, `spec` and `preprocess` as they are here.
        notes: what was adapted, replaced or kept, a line each.
    """

    spec: ViTSpec
    preprocess: Preprocess
    weights: Mapping[str, Tensor] | None
    facts: Settings
    notes: tuple[str, ...] = ()


def random_weights(
    config: TrainConfig, num_classes: int, *, resumes: bool = False
) -> InitialWeights:
    """Return the start from random weights, or from the state of a resumed run.

    Raises:
        SpecError: a model that cannot exist.
        SettingError: settings that contradict each other.
    """
    spec = preset_spec(config, num_classes)
    # the model of a resumed run cannot be changed
    notes = [] if resumes else _note_on_mlp(config, spec)
    return InitialWeights(spec, _preprocess(config, spec), None, {}, tuple(notes))


def _note_on_mlp(settings: ModelSettings, spec: ViTSpec) -> list[str]:
    """Return at most one line, on an MLP that did not follow another width of the model."""
    if "mlp_width" in settings.spec:
        return []
    usual = preset(settings.model or DEFAULT_MODEL)
    # compared as products: the ratio M / D need not be a whole number
    if usual.width * spec.mlp_width == usual.mlp_width * spec.width:
        return []
    same_ratio = round(usual.mlp_width / usual.width * spec.width)
    return [
        f"--spec.width {spec.width} leaves the MLP width at {spec.mlp_width}, "
        f"{spec.mlp_width / spec.width:.3g} times the width instead of the model's "
        f"{usual.mlp_width / usual.width:.3g}; --spec.mlp-width {same_ratio} keeps the ratio"
    ]


def from_stored(facts: Mapping[str, Any]) -> InitialWeights:
    """Return the start of a resumed run from its config.yaml. Raises `SpecError`."""
    spec, preprocess = ViTSpec.from_json(facts["spec"]), Preprocess.from_json(facts["preprocess"])
    return InitialWeights(spec, preprocess, None, dict(facts))


def started_from(settings: FineTuningSettings) -> Settings:
    """Return the metadata on the initial weights; empty for random weights."""
    if settings.start is None:
        return {}
    # only the facts that the checkpoint has
    facts = {name: settings.start[name] for name in SAVED_FACTS if settings.start.get(name)}
    return {"started_from": facts}


def preset_spec(settings: ModelSettings, num_classes: int) -> ViTSpec:
    """Return the spec of the preset with every override and a head of `num_classes`."""
    name = settings.model or DEFAULT_MODEL
    return preset(name, num_classes=num_classes, **spec_fields(settings))


def spec_fields(settings: ModelSettings) -> dict[str, Any]:
    """Return the fields of `ViTSpec` in the settings; the data decide the number of classes.

    Raises:
        SettingError: two settings name different values of one field.
    """
    fields = {name: value for name, value in settings.spec.items() if name != "num_classes"}
    last = settings.progressive[-1] if settings.progressive else None
    flags = {name: f"--spec.{name.replace('_', '-')}" for name in fields}
    for flag, field, value in (
        ("--img-size", "image_size", settings.img_size),
        ("--progressive", "image_size", last),
        ("--drop-path", "drop_path", settings.drop_path),
    ):
        if value is None:
            continue
        # a side s of the image may be written as s or as (s, s)
        if fields.get(field, value) not in (value, (value, value), [value, value]):
            given = f"{flag} ends with" if flag == "--progressive" else f"{flag} is"
            raise SettingError(
                f"{given} {value}, but {flags[field]} is {fields[field]}; pass only one of them"
            )
        fields[field] = value
        flags[field] = flag
    return fields


def given_preprocess(settings: DataSettings) -> dict[str, Any]:
    """Return the fields of `Preprocess` that the settings name, such as `mean` or `fit`."""
    named = {}
    for name in set(field_names(Preprocess)) & set(field_names(DataSettings)):
        value = getattr(settings, name)
        if value is not None:
            named[name] = value
    return named


def _preprocess(settings: DataSettings, spec: ViTSpec) -> Preprocess:
    channels = spec.in_channels
    half: Channel = (0.5,) if channels == 1 else (0.5, 0.5, 0.5)
    fields = {"mean": half, "std": half} | given_preprocess(settings)
    if len(fields["mean"]) != channels or len(fields["std"]) != channels:
        raise SettingError(
            f"--mean {fields['mean']} and --std {fields['std']} must have "
            f"{plural(channels, 'value')}, one for each channel of the model"
        )
    return Preprocess(image_size=spec.image_size, **fields)


def make_model(
    spec: ViTSpec, weights: Mapping[str, Tensor] | None, config: RunConfig, device: torch.device
) -> ViT:
    """Build the model of a run on its device, and freeze the parts that the settings name.

    Args:
        spec: spec of the model.
        weights: weights of the whole model; `None` for random ones, from torch's global generator.
        config: names the frozen parts and the optimizer.
        device: where the model trains.

    Raises:
        SettingError: parts to freeze that the model does not have, or nothing is left to train.
    """
    # on the CPU first, so that the random numbers are the same for every device
    model = ViT(spec)
    if weights is not None:
        model.load_state_dict(dict(weights))
    freeze_parts(model, config, config.opt)
    return model.to(device)

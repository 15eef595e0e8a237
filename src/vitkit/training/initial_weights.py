"""Initial weights of a run: random, or pretrained and adapted, with a head for the classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit import errors, frozen
from vitkit.data.datasets.splitting import match_classes
from vitkit.messages import plural
from vitkit.models.initialisation import is_of_head
from vitkit.models.presets import preset
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess, ViTSpec
from vitkit.training.config.meaning import Settings
from vitkit.training.config.train_config import (
    CATALOGUE,
    DEFAULT_MODEL,
    DataSettings,
    FineTuningSettings,
    ModelSettings,
    RunConfig,
    TrainConfig,
)
from vitkit.training.optimization.parameters import freeze_parts
from vitkit.weights.checkpoint import Checkpoint, texts
from vitkit.weights.files import weights_fingerprint

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


@dataclass(frozen=True)
class LoadedWeights:
    """A checkpoint that is adapted to the settings, with the head that it has.

    Attributes:
        checkpoint: model, preprocessing and classes.
        facts: where it was found (of a file, the absolute path), its format, and the SHA-256 over
            the weights as they were found.
        notes: on what was found and changed for the settings, a line each.
    """

    checkpoint: Checkpoint
    facts: Settings
    notes: tuple[str, ...]


def load_initial(config: TrainConfig, *, resumes: bool) -> LoadedWeights | None:
    """Load the weights to start from, or refuse an impossible model, before the data are read.

    Returns:
        The checkpoint of `config.pretrained`, adapted to the settings; None for random weights, and
        for a resumed run, whose state has them.

    Raises:
        CheckpointError, SettingError, SpecError: as `_load`; or a model that cannot exist.
    """
    if config.pretrained is None:
        preset_spec(config, num_classes=1)  # the data decide the number of classes
        return None
    if resumes and config.start is not None:
        return None
    return _load(config, spec_fields(config))


def initial_weights(
    config: RunConfig, opened: LoadedWeights | None, classes: Sequence[str], *, resumes: bool
) -> InitialWeights:
    """Return the start of a run for data with these classes.

    Args:
        config: the settings, none of them open.
        opened: as `load_initial` returned it.
        classes: class names of the data.
        resumes: a run is resumed; config.yaml has the facts on its start.

    Raises:
        SpecError: a model that cannot exist.
        SettingError: settings that contradict each other.
    """
    if opened is not None:
        with_head, note = _head_for_classes(opened.checkpoint, tuple(classes))
        spec, preprocess = with_head.model.spec, with_head.preprocess
        facts = opened.facts | {"licence": with_head.metadata.get("licence", "")}
        facts |= {"spec": spec.to_json(), "preprocess": preprocess.to_json()}
        # a probe has no use for a head, or fits one of its own
        noted = [*opened.notes, *([note] if config.probe is None else [])]
        return InitialWeights(spec, preprocess, with_head.model.state_dict(), facts, tuple(noted))
    if config.pretrained is not None and config.start is not None:
        spec = ViTSpec.from_json(config.start["spec"])
        preprocess = Preprocess.from_json(config.start["preprocess"])
        return InitialWeights(spec, preprocess, None, dict(config.start))
    spec = preset_spec(config, len(classes))
    half = (0.5,) * spec.in_channels
    fields = {"image_size": spec.image_size, "mean": half, "std": half} | _given_preprocess(config)
    _check_statistics(fields["mean"], fields["std"], spec.in_channels)
    # the model of a resumed run cannot be changed
    notes = [] if resumes else _note_on_mlp(config, spec)
    return InitialWeights(spec, Preprocess(**fields), None, {}, tuple(notes))


def _check_statistics(mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    """Refuse a mean and a std of another number of channels."""
    if len(mean) != channels or len(std) != channels:
        raise errors.SettingError(
            f"--mean {mean} and --std {std} must have {plural(channels, 'value')}, one for each "
            "channel of the model"
        )


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
            raise errors.SettingError(
                f"{flag} has {value}, but {flags[field]} is {fields[field]}; pass only one of them"
            )
        fields[field] = value
        flags[field] = flag
    return fields


def _given_preprocess(settings: DataSettings) -> dict[str, Any]:
    """Return the fields of `Preprocess` that the settings name, such as `mean` or `fit`."""
    named = {}
    for name in set(frozen.field_names(Preprocess)) & set(frozen.field_names(DataSettings)):
        value = getattr(settings, name)
        if value is not None:
            named[name] = value
    return named


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


# The head of a pretrained model for the classes of the data: kept, reordered or replaced.


def _head_for_classes(stored: Checkpoint, classes: tuple[str, ...]) -> tuple[Checkpoint, str]:
    """Return the checkpoint with a head for these classes, and notes on the changes."""
    from vitkit.weights.adapt import adapt

    old, count = stored.model.spec.num_classes, len(classes)
    if stored.classes == classes:
        return stored, f"the head is kept: its {count} classes are the data's"
    match = match_classes(classes, stored.classes)
    if len(stored.classes) == count and not match.unknown:
        # in the note, so the file has no line on an adapted head
        reordered = replace(adapt(stored, classes=classes), metadata=stored.metadata)
        return reordered, f"the head is kept: its {count} classes are reordered to the data's order"
    change = f"the checkpoint has no head; the new one has {count} classes"
    if old:
        change = f"the head of {old} classes is replaced by one of {count}"
    if stored.model.spec.representation_width:
        change += ", without the tanh layer"
    return _with_fresh_head(stored, count), f"{change}; its initial weights are zero"


def _with_fresh_head(stored: Checkpoint, count: int) -> Checkpoint:
    """Return the checkpoint with a head of zeros for `count` classes."""
    from vitkit.weights.adapt import adapt
    from vitkit.weights.write import rebuilt

    model = stored.model
    if model.spec.representation_width is not None:
        spec = model.spec.replace(representation_width=None, num_classes=0)
        state = {
            name: tensor
            for name, tensor in model.state_dict().items()
            if not name.startswith("pre_logits.") and not is_of_head(name)
        }
        stored = replace(stored, model=rebuilt(model, spec, state), classes=())
    headless = replace(adapt(stored, num_classes=0), classes=())
    fresh = adapt(headless, num_classes=count)
    for name, parameter in fresh.model.named_parameters():
        if is_of_head(name):
            nn.init.constant_(parameter, fresh.model.spec.head_bias if "bias" in name else 0.0)
    return replace(fresh, metadata=stored.metadata)


# Initial weights from a checkpoint: loaded, adapted to the settings, with a head for the data. What
# reads checkpoints is imported in these functions: a run from random weights needs none of it.
#
# Sizes, positions, channels and normalisation are adapted where a setting names others, the head is
# kept where the class names are the same, and each step is logged. The result is written to
# config.yaml, so that a resumed run needs the file no more.


def _load(config: TrainConfig, fields: Mapping[str, Any]) -> LoadedWeights:
    """Load the checkpoint of `config.pretrained` and adapt it to the settings.

    Args:
        config: `pretrained`, `model`, `trust_pickle`, and how images are treated.
        fields: the fields of `ViTSpec` that the settings name.

    Raises:
        CheckpointError: it cannot be read, is of another model than `config.model`, or is not what
            `config.start` says the run began with.
        SettingError: no weights are published for the model.
        SpecError: sizes, channels or normalisation that it cannot be adapted to.
    """
    from vitkit.weights.adapt import adapt
    from vitkit.weights.catalogue import find
    from vitkit.weights.load import load_with
    from vitkit.weights.pretrained import adapt_to_spec, as_published
    from vitkit.weights.recognise_format import Hints

    entry = find(config.model or DEFAULT_MODEL) if config.pretrained == CATALOGUE else None
    place = entry.name if entry else str(config.pretrained)
    # a name may have a tag behind the preset: vit_base_patch16_224.augreg_in21k
    named = config.model and (entry.preset if entry else config.model.partition(".")[0])
    wanted = preset(named, **fields) if named else None
    stored = load_with(
        place,
        Hints(fields, wanted),
        trust_pickle=config.trust_pickle,
        strict=not config.allow_partial,
    )
    # before anything is adapted: it identifies the weights on resume
    sha256 = weights_fingerprint(stored.model.state_dict())
    if config.start is not None and config.start.get("sha256") != sha256:
        raise errors.CheckpointError(
            f"{place}: its weights have the sha256 {sha256[:16]}, but `start` in the settings "
            f"expects {str(config.start.get('sha256'))[:16]}; remove `start` to use this file"
        )
    spec, earlier = stored.model.spec, len(texts(stored.metadata, "adapted"))
    wanted = wanted or spec.replace(**fields)
    if entry and named:
        wanted = as_published(wanted, spec, fields)
    try:
        stored = adapt_to_spec(stored, wanted, fields, place)
    except errors.CheckpointError as error:
        mend = "leave these settings out"
        if config.model:
            mend = "leave --model out to take the file's"
        raise errors.CheckpointError(f"{error}; {mend}") from None
    # folding another mean and std is exact, and leaves the weights alone where nothing changes
    old, given = stored.preprocess, _given_preprocess(config)
    mean, std = given.get("mean", old.mean), given.get("std", old.std)
    _check_statistics(mean, std, old.channels)
    if (mean, std) != (old.mean, old.std):
        stored = adapt(stored, mean=mean, std=std)
    given["image_size"] = stored.model.spec.image_size
    stored = replace(stored, preprocess=stored.preprocess.replace(**given))
    # addresses and names stay as they are
    place = str(Path(place).resolve()) if Path(place).exists() else place
    facts = {"place": place, "format": stored.format, "sha256": sha256}
    notes = [f"weights: {place} ({stored.format}, sha256 {sha256[:16]})"]
    notes += [f"weights: {warning}" for warning in stored.warnings]
    # the file may have been adapted before, which is no news of this run
    notes += texts(stored.metadata, "adapted")[earlier:]
    return LoadedWeights(stored, facts, tuple(notes))

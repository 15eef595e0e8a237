"""Initial weights of a run: loaded and adapted checkpoints, and which parts stay frozen.

Sizes, positions, channels and normalisation are adapted where a setting names others, the head is
kept where the class names are the same, and each step is logged. The result is written to
config.yaml, so that a resumed run needs the file no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.data.datasets.class_names import match_classes
from vitkit.errors import CheckpointError, SettingError
from vitkit.io.digests import weights_fingerprint
from vitkit.models.initialisation import HEADS
from vitkit.models.presets import preset
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess, ViTSpec
from vitkit.training.config.field_types import Settings
from vitkit.training.config.sections.model import DEFAULT_MODEL
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.optimization.parameter_groups import EMBEDDING, freeze
from vitkit.weights.adapt import adapt
from vitkit.weights.catalogue import find
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.converting.resize import rebuilt
from vitkit.weights.hints import Hints
from vitkit.weights.load import load_with
from vitkit.weights.pretrained import adapt_to_spec, as_published

CATALOGUE = "auto"
"""`pretrained` without a value: what the catalogue has for the model."""
IMAGES = ("interpolation", "fit", "crop_ratio")
"""Settings of images that weights know nothing of."""
SAID = ("place", "format", "sha256", "licence")
"""Of a start, what the checkpoints of the run repeat."""


@dataclass(frozen=True)
class Start:
    """The spec, preprocessing and weights that a run starts from.

    Attributes:
        spec: of the model, its head as wide as there are classes.
        preprocess: what images become.
        weights: of the whole model; `None` where the state of a stopped run has them.
        facts: what config.yaml keeps: `place`, `format`, `sha256` and `licence` of the weights as
            they were found, `spec` and `preprocess` as they are here.
        notes: what was adapted, replaced or kept, a line each.
    """

    spec: ViTSpec
    preprocess: Preprocess
    weights: Mapping[str, Tensor] | None
    facts: Settings
    notes: tuple[str, ...] = ()


def opened(config: TrainConfig, asked: Mapping[str, Any]) -> Checkpoint:
    """Load the checkpoint of `config.pretrained` and adapt it to the settings.

    Args:
        config: `pretrained`, `model`, `trust_pickle`, and how images are treated.
        asked: the fields of `ViTSpec` that the settings name.

    Returns:
        The checkpoint with the head that it has. `.metadata` has `place`, `sha256` over the weights
        as they were found, and `probe` as the settings have it.

    Raises:
        CheckpointError: it cannot be read, is of another model than `config.model`, or is not what
            `config.start` says the run began with.
        SettingError: no weights are published for the model.
        SpecError: sizes, channels or normalisation that it cannot be adapted to.
    """
    entry = find(config.model or DEFAULT_MODEL) if config.pretrained == CATALOGUE else None
    place = entry.name if entry else str(config.pretrained)
    named = config.model and (entry.preset if entry else config.model.partition(".")[0])
    wanted = preset(named, **asked) if named else None
    stored = load_with(
        place,
        Hints(asked, wanted),
        trust_pickle=config.trust_pickle,
        strict=not config.allow_partial,
    )
    sha256 = weights_fingerprint(stored.model.state_dict())
    if config.start is not None and config.start.get("sha256") != sha256:
        raise CheckpointError(
            f"{place}: its weights have the sha256 {sha256[:16]}, those that `start` in the "
            f"settings names {str(config.start.get('sha256'))[:16]}; leave `start` out to take them"
        )
    spec, earlier = stored.model.spec, len(stored.metadata.get("adapted", ()))
    wanted = wanted or spec.replace(**asked)
    if entry and named:
        wanted = as_published(wanted, spec, asked)
    try:
        stored = adapt_to_spec(stored, wanted, asked, place)
    except CheckpointError as error:
        mend = (
            "leave --model out to take the file's" if config.model else "leave these settings out"
        )
        raise CheckpointError(f"{error}; {mend}") from None
    stored = _with_images(stored, config)
    about: dict[str, Any] = {"place": _lasting(place), "sha256": sha256, "probe": config.probe}
    about["adapted"] = list(stored.metadata.get("adapted", ()))[earlier:]
    return replace(stored, metadata={**stored.metadata, **about})


def begin(stored: Checkpoint, classes: Sequence[str]) -> Start:
    """Return the start from a loaded checkpoint, for data with these classes.

    A probe has no use for a head, or fits one of its own, so nothing is noted of it.
    """
    kept, note = _with_head(stored, tuple(classes))
    model, about = kept.model, kept.metadata
    found = {
        "place": about["place"],
        "format": stored.format,
        "sha256": about["sha256"],
        "licence": about.get("licence", ""),
    }
    facts = found | {"spec": model.spec.to_json(), "preprocess": kept.preprocess.to_json()}
    first = f"weights: {about['place']} ({stored.format}, sha256 {about['sha256'][:16]})"
    said = [f"weights: {line}" for line in kept.warnings]
    notes = (first, *said, *about["adapted"], *([] if about["probe"] else [note]))
    return Start(model.spec, kept.preprocess, model.state_dict(), facts, notes)


def begun(facts: Mapping[str, Any]) -> Start:
    """Return the start of a resumed run from its config.yaml. Raises `SpecError`."""
    spec, preprocess = ViTSpec.from_json(facts["spec"]), Preprocess.from_json(facts["preprocess"])
    return Start(spec, preprocess, None, dict(facts))


def started_from(config: TrainConfig) -> Settings:
    """Return the metadata on the initial weights; empty for random weights."""
    if config.start is None:
        return {}
    return {"started_from": {name: config.start[name] for name in SAID if config.start.get(name)}}


def make_model(
    spec: ViTSpec, weights: Mapping[str, Tensor] | None, config: TrainConfig, device: torch.device
) -> ViT:
    """Build the model of a run on its device, and freeze the parts that `config` names.

    Initial weights that are not given come from torch's global generator.
    """
    model = ViT(spec)
    if weights is not None:
        model.load_state_dict(dict(weights))
    freeze_parts(model, config)
    return model.to(device)


def freeze_parts(model: ViT, config: TrainConfig) -> list[str]:
    """Freeze the parameters that `config.freeze` and `config.freeze_blocks` name.

    Returns:
        The names of the frozen parameters.

    Raises:
        SettingError: a pattern that fits nothing, more blocks than there are, or nothing is left.
    """
    if not config.freeze and not config.freeze_blocks:
        return []
    names = freeze(model, *config.freeze, blocks=config.freeze_blocks)
    left = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not left:
        raise SettingError(
            f"everything is frozen: freeze {' '.join(config.freeze)}, freeze_blocks "
            f"{config.freeze_blocks}; leave something to train, such as the head: --freeze backbone"
        )
    if config.opt == "muon" and not any(
        n.startswith("blocks.") and p.ndim == 2 for n, p in left.items()
    ):
        raise SettingError("opt muon is for the matrices of blocks, and all are frozen; pass adamw")
    if config.opt == "muon" and all(
        n.startswith("blocks.") and p.ndim == 2 for n, p in left.items()
    ):
        raise SettingError(
            "opt muon has AdamW for what is no matrix of a block, and all of that is frozen; leave "
            "the head or the norms to train"
        )
    return names


def train_mode(model: nn.Module) -> None:
    """Set training mode, and eval mode for frozen parts: no dropout and no drop path in these."""
    model.train()
    for module in model.modules():
        own = list(module.parameters())
        if own and not any(parameter.requires_grad for parameter in own):
            module.eval()
    embedding = [p for name, p in model.named_parameters() if name.partition(".")[0] in EMBEDDING]
    if not any(parameter.requires_grad for parameter in embedding):
        for name in ("embedding", "patch_drop"):  # they work on the tokens and hold none
            model.get_submodule(name).eval()


def with_fresh_head(stored: Checkpoint, count: int) -> Checkpoint:
    """Return the checkpoint with a head of zeros for `count` classes.

    As the ViT paper fine-tunes (arXiv 2010.11929, Sec. 3.2): the whole head of pre-training goes,
    its tanh layer too, and the new one is a D x K matrix of zeros.
    """
    model = stored.model
    if model.spec.representation_width is not None:
        spec = model.spec.replace(representation_width=None, num_classes=0)
        state = {
            name: tensor
            for name, tensor in model.state_dict().items()
            if not name.startswith("pre_logits.") and not _of_head(name)
        }
        stored = replace(stored, model=rebuilt(model, spec, state), classes=())
    made = replace(adapt(stored, num_classes=0), classes=())
    made = adapt(made, num_classes=count)
    for name, parameter in made.model.named_parameters():
        if _of_head(name):
            nn.init.constant_(parameter, made.model.spec.head_bias if "bias" in name else 0.0)
    return replace(made, metadata=stored.metadata)


def _with_head(stored: Checkpoint, classes: tuple[str, ...]) -> tuple[Checkpoint, str]:
    """Return the checkpoint with a head for these classes, and notes on the changes."""
    old, count = stored.model.spec.num_classes, len(classes)
    if stored.classes == classes:
        return stored, f"the head is kept: its {count} classes are those of the data"
    match = match_classes(classes, stored.classes)
    if len(stored.classes) == count and not match.unknown:
        kept = replace(adapt(stored, classes=classes), metadata=stored.metadata)
        return kept, f"the head is kept: its {count} classes are put into the data's order"
    gone = (
        f"the head of {old} classes is replaced by one of {count}"
        if old
        else (f"there was no head; the new one has {count} classes")
    )
    tanh = ", without the tanh layer" if stored.model.spec.representation_width else ""
    return with_fresh_head(stored, count), f"{gone}{tanh}; it starts at zero"


def _with_images(stored: Checkpoint, config: TrainConfig) -> Checkpoint:
    """Fold another mean and std into the patch projection; other changes are only noted."""
    old = stored.preprocess
    mean, std = config.mean or old.mean, config.std or old.std
    if len(mean) != old.channels or len(std) != old.channels:
        raise SettingError(
            f"mean {mean} and std {std} must have {old.channels} values, one a channel of the "
            f"model; leave them out to take the checkpoint's"
        )
    if (mean, std) != (old.mean, old.std):
        stored = adapt(stored, mean=mean, std=std)
    named = {name: getattr(config, name) for name in IMAGES if getattr(config, name) is not None}
    changed = stored.preprocess.replace(image_size=stored.model.spec.image_size, **named)
    return replace(stored, preprocess=changed)


def _lasting(place: str) -> str:
    """Return the absolute path of a file; addresses and names stay as they are."""
    return str(Path(place).resolve()) if Path(place).exists() else place


def _of_head(name: str) -> bool:
    return name.partition(".")[0] in HEADS

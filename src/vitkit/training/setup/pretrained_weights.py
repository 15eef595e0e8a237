"""Initial weights from a checkpoint: loaded, adapted to the settings, with a head for the data.

Sizes, positions, channels and normalisation are adapted where a setting names others, the head is
kept where the class names are the same, and each step is logged. The result is written to
config.yaml, so that a resumed run needs the file no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError, SettingError
from vitkit.io.digests import weights_fingerprint
from vitkit.messages import plural
from vitkit.models.presets import preset
from vitkit.training.config.sections.fine_tuning import CATALOGUE
from vitkit.training.config.sections.model import DEFAULT_MODEL
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.setup.head_for_classes import head_for_classes
from vitkit.training.setup.initial_weights import InitialWeights, given_preprocess
from vitkit.weights.adapt import adapt
from vitkit.weights.catalogue import find
from vitkit.weights.checkpoint import Checkpoint, texts
from vitkit.weights.hints import Hints
from vitkit.weights.load import load_with
from vitkit.weights.pretrained import adapt_to_spec, as_published


@dataclass(frozen=True)
class LoadedWeights:
    """A checkpoint that is adapted to the settings, with the head that it has.

    Attributes:
        checkpoint: model, preprocessing and classes.
        place: where it was found; of a file, the absolute path.
        sha256: over the weights as they were found.
        adapted: what was changed for the settings, a line each.
    """

    checkpoint: Checkpoint
    place: str
    sha256: str
    adapted: tuple[str, ...]


def load_initial(config: TrainConfig, fields: Mapping[str, Any]) -> LoadedWeights:
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
        raise CheckpointError(
            f"{place}: its weights have the sha256 {sha256[:16]}, but `start` in the settings "
            f"expects {str(config.start.get('sha256'))[:16]}; remove `start` to use this file"
        )
    spec, earlier = stored.model.spec, len(texts(stored.metadata, "adapted"))
    wanted = wanted or spec.replace(**fields)
    if entry and named:
        wanted = as_published(wanted, spec, fields)
    try:
        stored = adapt_to_spec(stored, wanted, fields, place)
    except CheckpointError as error:
        mend = "leave these settings out"
        if config.model:
            mend = "leave --model out to take the file's"
        raise CheckpointError(f"{error}; {mend}") from None
    stored = _with_preprocess(stored, given_preprocess(config))
    # the file may have been adapted before, which is no news of this run
    adapted = texts(stored.metadata, "adapted")[earlier:]
    return LoadedWeights(stored, _absolute(place), sha256, adapted)


def from_checkpoint(
    loaded: LoadedWeights, classes: Sequence[str], *, keeps_head: bool = True
) -> InitialWeights:
    """Return the start from a loaded checkpoint, for data with these classes.

    Args:
        loaded: the checkpoint.
        classes: class names of the data.
        keeps_head: False for a probe, which has no use for a head, or fits one of its own: nothing
            is noted of it.
    """
    with_head, note = head_for_classes(loaded.checkpoint, tuple(classes))
    model, preprocess = with_head.model, with_head.preprocess
    facts = {
        "place": loaded.place,
        "format": loaded.checkpoint.format,
        "sha256": loaded.sha256,
        "licence": with_head.metadata.get("licence", ""),
        "spec": model.spec.to_json(),
        "preprocess": preprocess.to_json(),
    }
    notes = [f"weights: {loaded.place} ({facts['format']}, sha256 {loaded.sha256[:16]})"]
    notes += [f"weights: {warning}" for warning in with_head.warnings]
    notes += loaded.adapted
    if keeps_head:
        notes.append(note)
    return InitialWeights(model.spec, preprocess, model.state_dict(), facts, tuple(notes))


def _with_preprocess(stored: Checkpoint, given: dict[str, Any]) -> Checkpoint:
    """Fold another mean and std into the patch projection; other values replace the checkpoint's.

    Args:
        stored: the checkpoint.
        given: the fields of `Preprocess` that the settings name.
    """
    old = stored.preprocess
    mean, std = given.get("mean", old.mean), given.get("std", old.std)
    if len(mean) != old.channels or len(std) != old.channels:
        raise SettingError(
            f"--mean {mean} and --std {std} must have {plural(old.channels, 'value')}, one for "
            "each channel of the model; leave them out to use the checkpoint's"
        )
    # folding is exact, and leaves the weights alone where nothing changes
    if (mean, std) != (old.mean, old.std):
        stored = adapt(stored, mean=mean, std=std)
    image_size = stored.model.spec.image_size
    preprocess = stored.preprocess.replace(**{**given, "image_size": image_size})
    return replace(stored, preprocess=preprocess)


def _absolute(place: str) -> str:
    """Return the absolute path of a file; addresses and names stay as they are."""
    return str(Path(place).resolve()) if Path(place).exists() else place

"""`Meaning`: the facts about one setting, and the types of settings.

A field of a settings section carries one `Meaning` in its annotation. Code that treats settings
alike, such as the comparison on resume, asks `fields_where` and keeps no list of names of its own.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

from pydantic import BeforeValidator, Field, StringConstraints


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Facts about one setting.

    The first three have no default, so that they are decided for each new setting.

    Attributes:
        resume: on resume, a "fixed" setting must have the same value, one that "may change" is
            logged where it differs, and one that is "not compared" is about this machine or this
            call, not about the run.
        changes_result: whether another value may change weights and scores by more than another
            seed does.
        with_probe: with `probe`, which takes no training steps, a setting is "used" as ever,
            "ignored" (common to all recipes; a line in the log names it), or "refused".
        with_auto: with `auto`, a setting is "passed on" to every candidate, "own" to the search,
            or "refused", as the search decides it.
        only_with: settings of which at least one must be on for this one to have an effect.
        optimizers: values of `opt` that use this setting; empty for all.
        several_processes: whether it has an effect in runs of several processes alone.
        for_pretrained: whether it is meant for weights that are trained already.
        changes_images: whether it changes training images at random, unless it is 0 or empty.
    """

    resume: Literal["fixed", "may change", "not compared"]
    changes_result: bool
    with_probe: Literal["used", "ignored", "refused"]
    with_auto: Literal["passed on", "own", "refused"] = "refused"
    only_with: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    several_processes: bool = False
    for_pretrained: bool = False
    changes_images: bool = False


# The usual meanings; `dataclasses.replace` makes another one from the nearest.
OF_DATA = Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on")
OF_IMAGES = Meaning(resume="fixed", changes_result=True, with_probe="used")
OF_TRAINING = Meaning(resume="fixed", changes_result=True, with_probe="refused")
OF_AUGMENTATION = replace(OF_TRAINING, changes_images=True)
OF_STEPS = Meaning(resume="fixed", changes_result=True, with_probe="ignored")
OF_SCHEDULE = Meaning(resume="may change", changes_result=True, with_probe="ignored")
OF_LENGTH = Meaning(resume="may change", changes_result=True, with_probe="refused")
OF_BITS = Meaning(resume="fixed", changes_result=False, with_probe="used", with_auto="passed on")
"""For what changes the result by no more than rounding, or as another seed does."""
OF_LOOP = Meaning(resume="may change", changes_result=False, with_probe="refused")
OF_LOG = Meaning(resume="may change", changes_result=False, with_probe="used")
OF_OUTPUT = replace(OF_LOG, with_auto="passed on")
OF_CALL = Meaning(resume="not compared", changes_result=False, with_probe="used")
OF_MACHINE = replace(OF_CALL, with_auto="passed on")
OF_SEARCH = replace(OF_CALL, with_auto="own")


@dataclass(frozen=True)
class Aliases:
    """Second names of a flag: `Annotated[str, Aliases(("--class",))]`."""

    aliases: tuple[str, ...]


@cache  # reading the type hints of all settings takes 6 ms, and a run asks six times
def meanings(settings: type[Any]) -> Mapping[str, Meaning]:
    """Return name -> `Meaning` of the fields of a settings class, in their order.

    Raises:
        TypeError: a field without a `Meaning`, or with two.
    """
    # a base class in another module is resolved with that module's names
    hints = get_type_hints(settings, include_extras=True)
    by_name = {}
    for field in fields(settings):
        # `Annotated` keeps what follows the type
        metadata = getattr(hints[field.name], "__metadata__", ())
        facts = [entry for entry in metadata if isinstance(entry, Meaning)]
        if len(facts) != 1:
            raise TypeError(f"{settings.__name__}.{field.name} has {len(facts)} Meaning, not 1")
        by_name[field.name] = facts[0]
    return MappingProxyType(by_name)


def fields_where(settings: type[Any], **facts: Any) -> tuple[str, ...]:
    """Return the names of the fields whose `Meaning` has all of these facts, in their order.

    >>> from vitkit.training.config.train_config import TrainConfig
    >>> fields_where(TrainConfig, with_auto="own")
    ('output', 'overwrite', 'auto', 'budget', 'test')

    Args:
        settings: a settings class.
        **facts: attributes of `Meaning` and their values.

    Raises:
        AttributeError: `Meaning` has no such attribute.
    """
    names = []
    for name, meaning in meanings(settings).items():  # type: ignore[arg-type] # a class is hashable
        if all(getattr(meaning, fact) == value for fact, value in facts.items()):
            names.append(name)
    return tuple(names)


# Types of settings: numbers within a range, choices, and values with lenient parsing.

Settings: TypeAlias = dict[str, Any]
"""Some fields of `TrainConfig` by name; `spec` is a dictionary of `ViTSpec` fields."""

# strict: 1.0 or "1" are mistakes here
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
PositiveInt = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Threads = Annotated[int, Field(ge=1, le=1024, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A number in [0, 1)."""
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
"""A number in (0, 1]."""
Probability = Annotated[float, Field(ge=0.0, le=1.0)]

Schedule: TypeAlias = Literal["cosine", "linear", "constant", "rsqrt"]
"""The learning rate over the steps; `training/optimization/parameters.py` has the formulas."""
TrackerName: TypeAlias = Literal["wandb", "mlflow"]
"""Services that record the curves of a run."""


def _weights_source(value: Any) -> Any:
    # "auto" means create_model's pretrained=True
    if isinstance(value, bool):
        if value:
            return "auto"
        return None
    return _path_as_text(value)


WeightsSource = Annotated[str | None, BeforeValidator(_weights_source)]
"""Where weights are; `True` becomes `"auto"`, and a path its text."""


def _expanded(value: Any) -> Any:
    # a shell leaves the tilde of `--output=~/runs` as it is, and Python all of them
    if isinstance(value, str):
        return os.path.expanduser(value)
    return value


RunPath = Annotated[str | None, BeforeValidator(_expanded)]
"""The path of a run folder; `~` at its beginning becomes the home folder."""


def _path_as_text(value: Any) -> Any:
    if value is None or isinstance(value, str | Path):
        return value and str(value)
    raise ValueError(
        f"a {type(value).__name__} cannot be stored in config.yaml for resuming; pass a file, or "
        "the name of a function as package.module:function"
    )


StoredText = Annotated[str, BeforeValidator(_path_as_text)]
"""Text, or a path as its text: what config.yaml can hold of a function or a model."""

PolicyName = Annotated[str | None, Field(coerce_numbers_to_str=True)]
"""Text; a whole number, as `aa: 3` is in YAML, becomes its digits."""
LowerCase = Annotated[str, StringConstraints(to_lower=True)]
"""Text in small letters: `AdamW` becomes `adamw`."""

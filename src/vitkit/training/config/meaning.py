"""`Meaning`: the facts about one setting that the rest of vitkit asks for, written in its type.

A field of a settings section carries one `Meaning` in its annotation. Code that treats settings
alike, such as the comparison on resume, asks `fields_where` and keeps no list of names of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, get_type_hints


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
    """

    resume: Literal["fixed", "may change", "not compared"]
    changes_result: bool
    with_probe: Literal["used", "ignored", "refused"]
    with_auto: Literal["passed on", "own", "refused"] = "refused"
    only_with: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    several_processes: bool = False
    for_pretrained: bool = False


_READ: dict[type[Any], Mapping[str, Meaning]] = {}
"""Reading the type hints of all settings takes 6 ms, and a run asks six times."""


def meanings(settings: type[Any]) -> Mapping[str, Meaning]:
    """Return name -> `Meaning` of the fields of a settings class, in their order.

    Raises:
        TypeError: a field without a `Meaning`, or with two.
    """
    if settings in _READ:
        return _READ[settings]
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
    return _READ.setdefault(settings, MappingProxyType(by_name))


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
    for name, meaning in meanings(settings).items():
        if all(getattr(meaning, fact) == value for fact, value in facts.items()):
            names.append(name)
    return tuple(names)

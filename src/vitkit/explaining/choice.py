"""Choose a method of explanation by its name, and check its options; no method is imported."""

from __future__ import annotations

from collections.abc import Mapping

from vitkit.errors import SettingError
from vitkit.explaining.method import Method, whole_number
from vitkit.explaining.methods import DEFAULTS, METHODS
from vitkit.messages import did_you_mean

_SCRIPT = "examples/research/sanity_checks_of_maps.py has the other tests of maps"
MOVED = {"truth": "is called faithfulness", "parts": _SCRIPT, "mosaics": _SCRIPT, "labels": _SCRIPT}
"""Keyword that was one of `explain` or of a report -> where it went."""


def find_method(name: str) -> Method:
    """Return a method of `METHODS` by its name.

    Raises:
        SettingError: another name; the message lists the methods.
    """
    # one name, and no list of names
    if not isinstance(name, str) or name not in METHODS:
        raise SettingError(
            f"method {name!r} does not exist{did_you_mean(str(name), METHODS)}; "
            f"methods are {', '.join(METHODS)}"
        )
    return METHODS[name]


def choose_method(
    name: str | None, options: Mapping[str, object], *, has_head: bool = True
) -> tuple[Method, tuple[str, ...]]:
    """Return a method by its name, or the default, and lines on why it is not the usual default.

    The default is the first of `DEFAULTS` that has the options which were set; on a model without a
    head the first of them that needs no class.

    Args:
        name: name of the method; None for the default.
        options: options of the method; those that are None were not set.
        has_head: whether the model has classes.

    Raises:
        SettingError: another name; the message lists the methods.
    """
    if name is not None:
        return find_method(name), ()
    wanted = {option for option, value in options.items() if value is not None}
    usual = [METHODS[other] for other in DEFAULTS]
    fitting = [method for method in usual if wanted <= set(method.options)] or usual
    carried = [method for method in fitting if has_head or not method.by_class] or fitting
    chosen = carried[0]
    if chosen is fitting[0]:
        return chosen, ()
    return chosen, (
        f"{chosen.name} instead of {fitting[0].name}: this model has no head, and so no class",
    )


def method_options(method: Method, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that were set, without those that are None; whole numbers as `int`.

    Raises:
        SettingError: one that the method does not have; the message names the methods that do.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        if name not in method.options:
            having = [other.name for other in METHODS.values() if name in other.options]
            expected = f"{method.name} has no such option; "
            if name in MOVED:
                expected = MOVED[name]
            elif having:
                expected += f"methods with it: {', '.join(having)}"
            else:
                expected += f"its options: {', '.join(method.options) or 'none'}"
            raise SettingError.about(name, value, expected)
        # JSON has no numbers of NumPy
        number = whole_number(value)
        chosen[name] = value if number is None else number
    return chosen

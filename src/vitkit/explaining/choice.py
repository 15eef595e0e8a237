"""Choose a method of explanation by its name, and check its options; no method is imported."""

from __future__ import annotations

from collections.abc import Mapping

from vitkit.errors import SettingError
from vitkit.explaining.method import Method
from vitkit.explaining.methods import METHODS
from vitkit.messages import did_you_mean


def find_method(name: str) -> Method:
    """Return a method of `METHODS` by its name.

    Raises:
        SettingError: another name; the message lists the methods.
    """
    if name not in METHODS:
        raise SettingError(
            f"method {name!r} does not exist{did_you_mean(name, METHODS)}; "
            f"methods are {', '.join(METHODS)}"
        )
    return METHODS[name]


def method_options(method: Method, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that were set, without those that are None.

    Raises:
        SettingError: one that the method does not have; the message names the methods that do.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        if name not in method.options:
            having = [other.name for other in METHODS.values() if name in other.options]
            expected = f"{method.name} has no such option; "
            if having:
                expected += f"methods with it: {', '.join(having)}"
            else:
                expected += f"its options: {', '.join(method.options) or 'none'}"
            raise SettingError.about(name, value, expected)
    return chosen

"""Methods of explanation that the tests make: any function of a model and its images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitkit.explaining.methods import METHODS as METHODS
from vitkit.explaining.methods import Method


@dataclass(frozen=True)
class OwnMethod(Method):
    function: Callable[..., Any] | None = None

    @property
    def compute(self):
        return self.function


def own_method(function, *, by_class=False, **facts) -> OwnMethod:
    return OwnMethod("own", "made by a test", "none", by_class=by_class, function=function, **facts)

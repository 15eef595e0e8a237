"""The methods of explanation by name.

A new method is a function in a file of its own and a line of `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxtyping import Float
from torch import Tensor

from vitkit.explaining.attention_maps import attention_grid

ExplainMethod = Callable[..., Float[Tensor, "B gh gw"]]
"""(model, images (B, C, H, W), *, layer, head) -> a value for each patch (B, gh, gw)."""

# read-only, as every caller shares it
METHODS: Mapping[str, ExplainMethod] = MappingProxyType({"attention": attention_grid})
"""Methods of explanation by name; `vitkit.explain` and the command line offer these."""

"""`Record`: what to keep of a forward pass. Attention is asked for, not switched on."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from vitkit.errors import SettingError
from vitkit.shapes import AttentionMaps


class Record:
    """A request for attention maps and tokens of some layers, and afterwards their values.

    Only what was asked for is computed and kept; the forward pass itself is unchanged, fused kernel
    included. Layers are numbered from 0; negative numbers count from the end.

    Args:
        attention: layers whose attention maps are wanted.
        tokens: layers whose output tokens are wanted (before the last norm).
        heads: only these heads of the maps; default all.
        queries: only these rows of the maps (0 is the class token); default all.

    Attributes:
        attention: layer number -> maps (B, k, Q, T); rows sum to 1.
        tokens: layer number -> the block's output (B, T, D).

    >>> record = Record(attention=[0, -1])
    >>> record.begin(depth=12)
    >>> record.wants_attention(11), record.wants_attention(5)
    (True, False)
    """

    def __init__(
        self,
        *,
        attention: Sequence[int] = (),
        tokens: Sequence[int] = (),
        heads: Sequence[int] | None = None,
        queries: Sequence[int] | None = None,
    ) -> None:
        self._asked_attention, self._asked_tokens = tuple(attention), tuple(tokens)
        self._attention_layers: frozenset[int] = frozenset()
        self._token_layers: frozenset[int] = frozenset()
        self.heads, self.queries = heads, queries
        self.attention: dict[int, AttentionMaps] = {}
        self.tokens: dict[int, Float[Tensor, "B T D"]] = {}

    def begin(self, depth: int) -> None:
        """Forget the last pass and number the layers of a model of this depth.

        Raises:
            SettingError: a layer that the model does not have.
        """
        self.attention, self.tokens = {}, {}
        self._attention_layers = _resolve(self._asked_attention, depth)
        self._token_layers = _resolve(self._asked_tokens, depth)

    def check(self, num_heads: int, tokens: int) -> None:
        """Raise `SettingError` for a head or a query row that the model does not have."""
        for query in self.queries or ():
            if not 0 <= query < tokens:
                raise SettingError(
                    f"query row {query} of {tokens} was asked for; rows are 0..{tokens - 1}"
                )
        for head in self.heads or ():
            if not 0 <= head < num_heads:
                raise SettingError(
                    f"head {head} of {num_heads} was asked for; heads are 0..{num_heads - 1}"
                )

    def wants_attention(self, layer: int) -> bool:
        """Whether the maps of this layer were asked for."""
        return layer in self._attention_layers

    def wants_tokens(self, layer: int) -> bool:
        """Whether the output tokens of this layer were asked for."""
        return layer in self._token_layers


def _resolve(layers: Sequence[int], depth: int) -> frozenset[int]:
    for layer in layers:
        if not -depth <= layer < depth:
            raise SettingError(f"layer {layer} of {depth} was asked for; layers are 0..{depth - 1}")
    return frozenset(layer % depth for layer in layers)

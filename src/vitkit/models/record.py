"""`Record`: a request to keep attention maps and tokens of a forward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitkit.errors import SettingError
from vitkit.models.attention import KERNELS, Attend, Heads, Mask, attention_weights
from vitkit.shapes import AttentionMaps, refuse_absent, resolve_layers, whole_numbers

Maps = dict[int, AttentionMaps]


class Record:
    """A request for attention maps and tokens of some layers, and afterwards their values.

    Only what was asked for is computed and kept; the forward pass itself is unchanged, fused kernel
    included. Layers are numbered from 0; negative numbers count from the end.

    Args:
        attention: layers whose attention maps are wanted.
        tokens: layers whose output tokens are wanted (before the last norm).
        cross_attention: decoder layers whose maps over the memory are wanted (`Transformer`).
        pooling: whether the map of a MAP head's query over the patches is wanted.
        heads: only these heads of the maps; default all.
        queries: only these rows of the maps (0 is the class token); default all.
        gradients: make the maps part of the graph and keep their `.grad` after a backward pass, for
            relevance methods. The layers asked for then run without the fused kernel, in full.

    Attributes:
        attention: layer number -> maps (B, k, Q, T), before dropout; rows sum to 1.
        tokens: layer number -> the block's output (B, T, D).
        cross_attention: layer number -> maps (B, k, Q, M).
        pooling: 0 -> the MAP head's map (B, k, 1, N).

    Raises:
        SettingError: `gradients` with `heads` or `queries`, or numbers that are not whole.

    >>> record = Record(attention=[0, -1])
    >>> record.begin(depth=12)
    >>> record.wants(0), record.wants(11), record.wants(5)
    (True, True, False)
    """

    def __init__(
        self,
        *,
        attention: Sequence[int] = (),
        tokens: Sequence[int] = (),
        cross_attention: Sequence[int] = (),
        pooling: bool = False,
        heads: Sequence[int] | None = None,
        queries: Sequence[int] | None = None,
        gradients: bool = False,
    ) -> None:
        if gradients and (heads is not None or queries is not None):
            raise SettingError("gradients=True keeps whole maps: leave out heads and queries")
        # Imported here: it imports torch's compiler, which takes half of vitkit's import time.
        self.outside_graph: Callable[..., Any] = torch.compiler.disable(
            _call, reason="a Record keeps tensors of its own"
        )
        self._asked = (
            whole_numbers("attention", attention),
            whole_numbers("cross_attention", cross_attention),
            whole_numbers("tokens", tokens),
        )
        self._layers: tuple[frozenset[int], ...] = (frozenset(), frozenset(), frozenset())
        self.heads = None if heads is None else whole_numbers("heads", heads)
        self.queries = None if queries is None else whole_numbers("queries", queries)
        self.gradients = gradients
        self.attention: Maps = {}
        self.cross_attention: Maps = {}
        self._asked_pooling = pooling
        self.pooling: Maps = {}
        self.tokens: dict[int, Float[Tensor, "B T D"]] = {}

    def begin(self, depth: int, *, cross: bool = False) -> None:
        """Discard the last pass and number the layers; `SettingError` for layers that do not exist.

        Args:
            depth: number of layers.
            cross: True if the layers attend to a memory too.
        """
        if self._asked[1] and not cross:
            raise SettingError(
                "cross_attention cannot be recorded: only the decoder of a Transformer has it"
            )
        self.attention, self.cross_attention, self.tokens, self.pooling = {}, {}, {}, {}
        self._layers = tuple(resolve_layers(layers, depth) for layers in self._asked)

    def wants(self, layer: int) -> bool:
        """Return True if anything of this layer was requested."""
        return any(layer in layers for layers in self._layers)

    def attend(self, layer: int) -> Attend | None:
        """Return an attention function that keeps this layer's maps, if they were requested."""
        return self._listen(layer, self.attention) if layer in self._layers[0] else None

    def attend_across(self, layer: int) -> Attend | None:
        """Return the same for the layer's attention to the memory."""
        wanted = layer in self._layers[1]
        return self._listen(layer, self.cross_attention) if wanted else None

    def attend_pool(self) -> Attend | None:
        """Return the same for the query of a MAP head."""
        return self._listen(0, self.pooling) if self._asked_pooling else None

    def keep(self, layer: int, tokens: Float[Tensor, "B T D"]) -> None:
        """Keep the layer's output tokens if they were requested."""
        if layer in self._layers[2]:
            self.tokens[layer] = tokens

    def _listen(self, layer: int, maps: Maps) -> Attend:
        def attend(
            q: Heads, k: Heads, v: Heads, mask: Mask | None = None, dropout: float = 0.0
        ) -> Heads:
            if self.gradients:
                weights = maps[layer] = _weights(q, k, mask)
                if weights.requires_grad:
                    weights.retain_grad()  # which no inner node of a graph keeps by itself
                return F.dropout(weights, dropout) @ v
            maps[layer] = self._narrowed(q, k, mask)
            return KERNELS["fused"](q, k, v, mask, dropout)

        return attend

    def _narrowed(self, q: Heads, k: Heads, mask: Mask | None) -> Float[Tensor, "B _ Q M"]:
        """Compute Eq. 6 for the requested heads and query rows, before dropout."""
        if mask is not None:
            mask = mask.expand(q.shape[:-1] + k.shape[-2:-1])  # B k N M
        if self.heads is not None:
            refuse_absent(self.heads, q.shape[1], "head")
            q, k = q[:, list(self.heads)], k[:, list(self.heads)]
            mask = None if mask is None else mask[:, list(self.heads)]
        if self.queries is not None:
            refuse_absent(self.queries, q.shape[2], "query row")
            q = q[:, :, list(self.queries)]
            mask = None if mask is None else mask[:, :, list(self.queries)]
        return _weights(q, k, mask)


def _weights(q: Heads, k: Heads, mask: Mask | None) -> Float[Tensor, "B _ N M"]:
    """Compute Eq. 6, of float16 in float32: products beyond 65,504 would make NaN there."""
    if q.dtype != torch.float16:
        return attention_weights(q, k, mask)
    # autocast would make float16 of the factors again
    with torch.autocast(q.device.type, enabled=False):
        return attention_weights(q.float(), k.float(), mask).to(q.dtype)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)

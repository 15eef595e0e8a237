"""Memory for time: parts of a block's forward pass are computed again in the backward pass.

"Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from vitkit.errors import SettingError, did_you_mean
from vitkit.models.attention import Context
from vitkit.models.encoder import call_block
from vitkit.models.vit import ViT
from vitkit.shapes import Tokens

aten = torch.ops.aten
CHEAP = {
    aten.native_layer_norm.default,
    aten._fused_rms_norm.default,
    aten.gelu.default,
    aten.silu.default,
    aten.relu.default,
    aten.sigmoid.default,
    aten.mul.Tensor,
}
"""Norms, activations and LayerScale: much memory, little arithmetic."""


def checkpoint_gradients(model: ViT, recompute: str | None = "block") -> ViT:
    """Choose what the backward pass computes again instead of keeping it; gradients stay the same.

    Args:
        model: changed in place, and returned.
        recompute: `block`, everything but each block's input: least memory, a third more time;
            `norm_and_activation`, only norms, activations and LayerScale; `None`, nothing.

    Raises:
        SettingError: another name.
    """
    ways = {"block": _again, "norm_and_activation": _again_where_cheap}
    if recompute is not None and recompute not in ways:
        near = did_you_mean(recompute, ways)
        raise SettingError(f"recompute {recompute!r} is none of {', '.join(ways)}{near}")
    if not isinstance(model, ViT):
        raise SettingError(f"gradients of a ViT can be checkpointed, not of {type(model).__name__}")
    model.run_block = ways[recompute] if recompute else call_block
    return model


def _again(block: nn.Module, tokens: Tokens, context: Context) -> Tokens:
    return checkpoint(block, tokens, context, use_reentrant=False)


def _again_where_cheap(block: nn.Module, tokens: Tokens, context: Context) -> Tokens:
    # Dropout and RMSNorm write in place while they run; nothing recomputed reads what was there
    # before, and what draws random numbers is always kept.
    contexts = partial(
        create_selective_checkpoint_contexts, _policy, allow_cache_entry_mutation=True
    )
    return checkpoint(block, tokens, context, use_reentrant=False, context_fn=contexts)


def _policy(context: object, operation: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in CHEAP:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE

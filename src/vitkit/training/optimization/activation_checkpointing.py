"""Activation checkpointing: recompute parts of a block in the backward pass to save memory.

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

from vitkit.errors import MODEL, SettingError, check_type
from vitkit.messages import did_you_mean
from vitkit.models.attention import Context
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
"""Operations that take much memory and little time: norms, activations and LayerScale."""


def checkpoint_gradients(model: ViT, recompute: str | None = "block") -> ViT:
    """Choose which activations are recomputed in the backward pass; the gradients are unchanged.

    Args:
        model: changed in place, and returned.
        recompute: `block` recomputes everything but the input of each block, which takes the
            least memory and a third more time; `norm_and_activation` recomputes only norms,
            activations and LayerScale; `None` recomputes nothing.

    Raises:
        SettingError: an unknown name, or not a ViT.
    """
    modes = {"block": _recompute_block, "norm_and_activation": _recompute_cheap}
    if recompute is not None and recompute not in modes:
        near = did_you_mean(recompute, modes)
        raise SettingError(f"recompute {recompute!r} is none of {', '.join(modes)}{near}")
    check_type(model, ViT, "checkpoint_gradients", MODEL)
    # The encoder runs every block by this function where there is one.
    model.run_block = modes[recompute] if recompute else None
    return model


def _recompute_block(block: nn.Module, tokens: Tokens, context: Context) -> Tokens:
    return checkpoint(block, tokens, context, use_reentrant=False)


def _recompute_cheap(block: nn.Module, tokens: Tokens, context: Context) -> Tokens:
    # Dropout and RMSNorm write in place. This is safe: no recomputed operation reads the value from
    # before, and operations that draw random numbers are never recomputed.
    contexts = partial(
        create_selective_checkpoint_contexts, _policy, allow_cache_entry_mutation=True
    )
    return checkpoint(block, tokens, context, use_reentrant=False, context_fn=contexts)


def _policy(context: object, operation: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in CHEAP:
        return CheckpointPolicy.PREFER_RECOMPUTE
    # Everything unknown is kept: it may be slow, or draw random numbers.
    return CheckpointPolicy.MUST_SAVE

"""Exact changes that depend on a model's values, not only on its spec; see `Format.settle`."""

from __future__ import annotations

import torch

from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import Fitted, State, Step


def double_class_head(state: State) -> tuple[State, Step]:
    """Turn a model that reads its class head alone into the mean of two heads.

    The mean of twice the class head and zero is the class head.
    """
    changed = dict(state)
    # mean(2 h, 0) = h for the logits h of the class head.
    for kind in ("weight", "bias"):
        changed[f"head.{kind}"] = 2 * state[f"head.{kind}"]
        changed[f"head_dist.{kind}"] = torch.zeros_like(state[f"head_dist.{kind}"])
    return changed, Step("folded", "distilled_readout: twice the class head beside one of zeros")


def fold_unread_head(fitted: Fitted) -> Fitted:
    """Fold away a distillation head that the model does not read.

    For classes that hold one head, or the mean of two: a model that reads its class head alone,
    beside another that is not zero, becomes the mean of two heads.
    """
    spec, state, steps = fitted
    if spec.distilled_readout != "cls" or not spec.num_classes:
        return fitted
    if not any(state[f"head_dist.{kind}"].any() for kind in ("weight", "bias")):
        return fitted
    changed, step = double_class_head(state)
    return Fitted(spec.replace(distilled_readout="mean"), changed, [*steps, step])


def fold_register_positions(fitted: Fitted) -> Fitted:
    """Add the position rows of registers to the registers, and set those rows to zero.

    For position tables without rows for registers.
    """
    spec, state, steps = fitted
    if not (spec.num_registers and spec.position_rows and spec.positions_cover_prefix):
        return fitted
    # Token + position is all that the blocks see, so the sum may be split in another way.
    rows = _register_rows(spec)
    if not state["pos_embed"][:, rows].any():
        return fitted
    positions = state["pos_embed"].clone()
    registers = state["reg_token"] + positions[:, rows]
    positions[:, rows] = 0
    step = Step("folded", "pos_embed: the rows of the registers added to the registers")
    changed = {**state, "pos_embed": positions, "reg_token": registers}
    return Fitted(spec, changed, [*steps, step])


def _register_rows(spec: ViTSpec) -> slice:
    """Return the rows of registers in a table that starts with the prefix tokens."""
    return slice(1 + spec.distillation_token, spec.num_prefix_tokens)

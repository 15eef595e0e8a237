"""Parameter groups for an optimizer: weight decay, and a learning rate for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from vitkit.errors import MODEL, SettingError, check_type

EMBEDDING = ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre")
"""Modules and parameters before the blocks."""
NOT_DECAYED = ("cls_token", "dist_token", "reg_token", "pos_embed", "latent")
"""Parameters of two or more dimensions that are not weights of a layer."""


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    only: Iterable[str] | None = None,
) -> list[dict[str, Any]]:
    """Make groups for a torch optimizer, by weight decay and by the learning rate of each layer.

    Matrices and kernels decay; biases, norms, LayerScale, tokens and positions do not. With layer
    decay d, block l of L (from 0) has the learning rate lr * d^(L - l), the embedding
    lr * d^(L + 1), and everything after the blocks lr (BEiT, arXiv 2106.08254, appendix; MAE's
    fine-tuning uses 0.75).

    Args:
        model: a `ViT`, or any module with `blocks`; frozen parameters are left out.
        lr: the learning rate of the head, above 0.
        weight_decay: weight decay of the parameters that decay, 0 or more.
        layer_decay: d in (0, 1]; 1 for the same learning rate everywhere.
        only: names of the parameters to include; all by default.

    Returns:
        Dictionaries with `params`, `lr`, `weight_decay` and `lr_scale`: the power of d by which a
        schedule multiplies its learning rate. There are no empty groups.

    Raises:
        SettingError: not a model, or a layer decay outside (0, 1].
    """
    check_type(model, nn.Module, "parameter_groups", MODEL)
    if not 0.0 < layer_decay <= 1.0:
        raise SettingError(
            f"layer_decay {layer_decay:g} must lie in (0, 1]; 0.75 is usual, and 1 turns it off"
        )
    depth = len(getattr(model, "blocks", ()))
    names = None if only is None else set(only)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (names is not None and name not in names):
            continue
        scale = layer_decay ** (depth + 1 - layer_number(name, depth))
        # biases, norms and LayerScale are vectors
        no_decay = parameter.ndim < 2 or name.rpartition(".")[2] in NOT_DECAYED
        decay = 0.0 if no_decay else weight_decay
        new = {"params": [], "lr": lr * scale, "weight_decay": decay, "lr_scale": scale}
        groups.setdefault((scale, no_decay), new)["params"].append(parameter)
    # Sorted, so that the order of the groups does not depend on the order of the parameters.
    return [groups[key] for key in sorted(groups)]


def layer_number(name: str, depth: int) -> int:
    """Return 0 for the embedding, 1 to L for the blocks, L + 1 for what comes after them.

    >>> [layer_number(name, 12) for name in ("pos_embed", "blocks.3.norm1.bias", "head.weight")]
    [0, 4, 13]
    """
    first, _, rest = name.partition(".")
    if first in EMBEDDING:
        return 0
    return int(rest.partition(".")[0]) + 1 if first == "blocks" else depth + 1

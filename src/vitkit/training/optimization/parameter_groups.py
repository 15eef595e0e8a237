"""Which parameters train, and at what pace: groups for an optimizer, and freezing."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from vitkit.errors import SettingError, did_you_mean, plural
from vitkit.models.initialisation import HEADS

BACKBONE = "backbone"
"""What `freeze` calls everything but the head."""
EMBEDDING = ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre")
NOT_DECAYED = ("cls_token", "dist_token", "reg_token", "pos_embed", "latent")


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    only: Iterable[str] | None = None,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: who decays, and how fast each layer learns.

    Matrices and kernels decay; biases, norms, LayerScale, tokens and positions do not. With layer
    decay d, block l of L (from 0) learns at lr * d^(L - l), the embedding at lr * d^(L + 1), what
    stands after the blocks at lr (BEiT, arXiv 2106.08254, appendix; MAE's fine-tuning takes 0.75).

    Args:
        model: a `ViT`, or any module with `blocks`; frozen parameters are left out.
        lr: the learning rate of the head.
        weight_decay: of the parameters that decay.
        layer_decay: d in (0, 1]; 1 for the same rate everywhere.
        only: parameter names to take; default all.

    Returns:
        Dictionaries with `params`, `lr`, `weight_decay` and `lr_scale`, d to its power, by which a
        schedule multiplies; empty groups are left out.

    Raises:
        SettingError: a layer decay outside (0, 1].
    """
    if not 0.0 < layer_decay <= 1.0:
        raise SettingError(f"layer_decay {layer_decay:g} is outside (0, 1]; 0.75 is usual, 1 none")
    depth = len(getattr(model, "blocks", ()))
    wanted = None if only is None else set(only)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (wanted is not None and name not in wanted):
            continue
        scale = layer_decay ** (depth + 1 - layer_number(name, depth))
        free = parameter.ndim < 2 or name.rpartition(".")[2] in NOT_DECAYED
        decay = 0.0 if free else weight_decay
        new = {"params": [], "lr": lr * scale, "weight_decay": decay, "lr_scale": scale}
        groups.setdefault((scale, free), new)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def layer_number(name: str, depth: int) -> int:
    """0 for the embedding, 1 to L for the blocks, L + 1 for what comes after them.

    >>> [layer_number(name, 12) for name in ("pos_embed", "blocks.3.norm1.bias", "head.weight")]
    [0, 4, 13]
    """
    first, _, rest = name.partition(".")
    if first in EMBEDDING:
        return 0
    return int(rest.partition(".")[0]) + 1 if first == "blocks" else depth + 1


def freeze(model: nn.Module, *patterns: str, blocks: int = 0) -> list[str]:
    """Stop parameters from training, by name.

    Args:
        model: changed in place; `requires_grad` becomes False for what is named.
        patterns: shell-style, for whole names or for what they begin with: `"patch_embed"`,
            `"blocks.*.attn"`, `"*.bias"`; `"backbone"` is everything but the head.
        blocks: also the embedding and the first so many blocks.

    Returns:
        The names that are now frozen by this call, in the model's order.

    Raises:
        SettingError: a pattern that fits nothing, or more blocks than the model has.

    >>> from vitkit.models.presets import build
    >>> freeze(build("vit_tiny_patch16_224", depth=2), "head")
    ['head.weight', 'head.bias']
    """
    depth = len(getattr(model, "blocks", ()))
    if not 0 <= blocks <= depth:
        raise SettingError(
            f"freeze_blocks {blocks}: the model has {plural(depth, 'block')}; take 0..{depth}"
        )
    names = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    if blocks:
        found |= {name for name in names if layer_number(name, depth) <= blocks}
    for pattern in patterns:
        found |= _fitting(pattern, names, depth)
    for name, parameter in model.named_parameters():
        if name in found:
            parameter.requires_grad_(False)
    return [name for name in names if name in found]


def _fitting(pattern: str, names: list[str], depth: int) -> set[str]:
    """The names that a pattern means. Raises `SettingError` where there is none."""
    fits = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
    if not fits and pattern == BACKBONE:
        fits = {n for n in names if n.partition(".")[0] not in HEADS}
    if not fits:
        near = did_you_mean(pattern, _alike(pattern, names))
        blocks = "blocks.0" if depth == 1 else f"blocks.0 to blocks.{depth - 1}"
        parts = [BACKBONE, *dict.fromkeys(name.partition(".")[0] for name in names)]
        listed = ", ".join(blocks if part == "blocks" else part for part in parts)
        raise SettingError(f"no parameter is named {pattern!r}{near}; there are {listed}")
    return fits


def _alike(pattern: str, names: list[str]) -> set[str]:
    """Parts of a model as deep as a pattern, in the same block or, as it may be, in every one."""
    deep = pattern.count(".") + 1
    parts = [BACKBONE.split("."), *(n.split(".")[:deep] for n in names if n.count(".") + 1 >= deep)]
    parts += [["*" if one.isdigit() else one for one in part] for part in parts]
    wanted = _numbers(pattern.split("."))
    return {".".join(part) for part in parts if _numbers(part) == wanted}


def _numbers(parts: list[str]) -> list[str]:
    return [part for part in parts if part.isdigit()]

"""Parameter groups for an optimizer (weight decay, layer decay), and freezing by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from vitkit.errors import SettingError
from vitkit.messages import did_you_mean, plural
from vitkit.models.initialisation import HEADS

BACKBONE = "backbone"
"""The name by which `freeze` selects everything but the head."""
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
        lr: the learning rate of the head.
        weight_decay: weight decay of the parameters that decay.
        layer_decay: d in (0, 1]; 1 for the same learning rate everywhere.
        only: names of the parameters to include; all by default.

    Returns:
        Dictionaries with `params`, `lr`, `weight_decay` and `lr_scale`: the power of d by which a
        schedule multiplies its learning rate. There are no empty groups.

    Raises:
        SettingError: a layer decay outside (0, 1].
    """
    if not 0.0 < layer_decay <= 1.0:
        raise SettingError(f"layer_decay {layer_decay:g} is outside (0, 1]; 0.75 is usual, 1 none")
    depth = len(getattr(model, "blocks", ()))
    names = None if only is None else set(only)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (names is not None and name not in names):
            continue
        scale = layer_decay ** (depth + 1 - layer_number(name, depth))
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


def freeze(model: nn.Module, *patterns: str, blocks: int = 0) -> list[str]:
    """Stop parameters from training, by name.

    Args:
        model: changed in place; `requires_grad` becomes False for what is named.
        patterns: shell-style patterns for whole names or for their beginnings: `"patch_embed"`,
            `"blocks.*.attn"`, `"*.bias"`; `"backbone"` is everything but the head.
        blocks: number of first blocks to freeze, with the embedding.

    Returns:
        The names of the parameters selected by this call, in the model's order.

    Raises:
        SettingError: a pattern matches nothing, or there are fewer blocks.

    >>> from vitkit.models.presets import build
    >>> freeze(build("vit_tiny_patch16_224", depth=2), "head")
    ['head.weight', 'head.bias']
    """
    depth = len(getattr(model, "blocks", ()))
    if not 0 <= blocks <= depth:
        raise SettingError(
            f"freeze_blocks {blocks}: the model has {plural(depth, 'block')}; take 0..{depth}"
        )
    parameters = dict(model.named_parameters())
    # All patterns are checked before the first parameter is changed.
    frozen: set[str] = set()
    for pattern in patterns:
        frozen |= _matching(pattern, list(parameters), depth)
    if blocks:
        frozen |= {name for name in parameters if layer_number(name, depth) <= blocks}
    names = [name for name in parameters if name in frozen]
    for name in names:
        parameters[name].requires_grad_(False)
    return names


def _matching(pattern: str, names: list[str], depth: int) -> set[str]:
    """Return the names that match a pattern. Raises `SettingError` if there is none."""
    matching = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
    # A model may have a module of that name, which then counts.
    if not matching and pattern == BACKBONE:
        matching = {n for n in names if n.partition(".")[0] not in HEADS}
    if not matching:
        near = did_you_mean(pattern, _similar(pattern, names))
        raise SettingError(
            f"no parameter is named {pattern!r}{near}; there are {_list_parts(names, depth)}"
        )
    return matching


def _list_parts(names: list[str], depth: int) -> str:
    """List the parts of a model by which parameters can be selected, for messages."""
    parts = {BACKBONE: None}  # a dictionary keeps the order, and each part once
    for name in names:
        part = name.partition(".")[0]
        if part == "blocks":
            part = "blocks.0" if depth == 1 else f"blocks.0 to blocks.{depth - 1}"
        parts[part] = None
    return ", ".join(parts)


def _similar(pattern: str, names: list[str]) -> set[str]:
    """Return prefixes of names as long as a pattern, for suggestions.

    They have the numbers of the pattern, or `*` in the place of their own.
    """
    length = pattern.count(".") + 1
    numbers = _numbers(pattern.split("."))
    similar = {BACKBONE} if not numbers else set()
    for name in names:
        words = name.split(".")[:length]
        if len(words) < length:
            continue
        if _numbers(words) == numbers:
            similar.add(".".join(words))
        if not numbers:  # such as blocks.*.attn
            similar.add(re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", ".".join(words)))
    return similar


def _numbers(words: list[str]) -> list[str]:
    return [word for word in words if word.isdigit()]

"""Freezing of parameters by name or pattern, and the training mode of frozen parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from vitkit.errors import MODEL, SettingError, check_type
from vitkit.messages import did_you_mean, plural
from vitkit.models.interface.classifier import is_of_head
from vitkit.training.config.sections.fine_tuning import FineTuningSettings
from vitkit.training.optimization.parameter_groups import EMBEDDING, layer_number

BACKBONE = "backbone"
"""The name by which `freeze` selects everything but the head."""


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
        SettingError: not a model, a pattern matches nothing, or there are fewer blocks.

    >>> from vitkit import create_model
    >>> freeze(create_model("vit_tiny_patch16_224", depth=2), "head")
    ['head.weight', 'head.bias']
    """
    check_type(model, nn.Module, "freeze", MODEL)
    depth = len(getattr(model, "blocks", ()))
    if not 0 <= blocks <= depth:
        raise SettingError.about(
            "blocks", blocks, f"the model has {plural(depth, 'block')}; pass 0 to {depth}"
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


def freeze_parts(model: nn.Module, settings: FineTuningSettings, opt: str) -> list[str]:
    """Freeze the parameters that `freeze` and `freeze_blocks` of the settings name.

    Args:
        model: changed in place.
        settings: name the parameters.
        opt: the optimizer; Muon with its AdamW needs parameters of both kinds.

    Returns:
        The names of the frozen parameters.

    Raises:
        SettingError: a pattern that fits nothing, more blocks than there are, or nothing is left.
    """
    if not settings.freeze and not settings.freeze_blocks:
        return []
    try:
        names = freeze(model, *settings.freeze, blocks=settings.freeze_blocks)
    except SettingError as error:
        if error.wrong is None:
            raise
        expected = error.wrong.expected
        raise SettingError(f"--freeze-blocks {settings.freeze_blocks}: {expected}") from None
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise SettingError(
            f"everything is frozen: --freeze {' '.join(settings.freeze)}, --freeze-blocks "
            f"{settings.freeze_blocks}; leave something to train, such as the head: --freeze "
            "backbone"
        )
    if opt == "muon":
        _check_muon(trainable)
    return names


def _check_muon(trainable: Mapping[str, nn.Parameter]) -> None:
    """Refuse Muon where all parameters that it updates are frozen, or all others."""
    # the same rule as in `MuonWithAdamW`
    of_muon = [name.startswith("blocks.") and p.ndim == 2 for name, p in trainable.items()]
    if not any(of_muon):
        raise SettingError(
            "--opt muon trains the matrices of the blocks, and all of them are frozen; pass "
            "--opt adamw"
        )
    if all(of_muon):
        raise SettingError(
            "--opt muon trains everything except the matrices of the blocks by AdamW, and all "
            "of that is frozen; do not freeze the head or the norms"
        )


def train_mode(model: nn.Module) -> None:
    """Set training mode, and eval mode for frozen parts: no dropout and no drop path in these."""
    model.train()
    for module in model.modules():
        own = list(module.parameters())
        if own and not any(parameter.requires_grad for parameter in own):
            module.eval()
    embedding = [p for name, p in model.named_parameters() if name.partition(".")[0] in EMBEDDING]
    if not any(parameter.requires_grad for parameter in embedding):
        for name in ("embedding", "patch_drop"):  # without parameters, but act on the tokens
            model.get_submodule(name).eval()


def _matching(pattern: str, names: list[str], depth: int) -> set[str]:
    """Return the names that match a pattern. Raises `SettingError` if there is none."""
    matching = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
    # A module of that name in the model takes precedence.
    if not matching and pattern == BACKBONE:
        matching = {n for n in names if not is_of_head(n)}
    if not matching:
        near = did_you_mean(pattern, _similar(pattern, names))
        raise SettingError(
            f"no parameter is named {pattern!r}{near}; the model has {_list_parts(names, depth)}"
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

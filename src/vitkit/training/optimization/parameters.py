"""Parameters of the optimizer: frozen ones, groups, the learning rate, their average (EMA)."""

import copy
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from vitkit import distributed, errors
from vitkit.messages import did_you_mean, plural
from vitkit.models.initialisation import is_of_head
from vitkit.training.config import meaning, train_config
from vitkit.training.state.registry import Metadata, ModelPart, Stateful, Tensors

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
    errors.check_type(model, nn.Module, "freeze", errors.MODEL)
    depth = len(getattr(model, "blocks", ()))
    if not 0 <= blocks <= depth:
        raise errors.SettingError(
            f"--freeze-blocks {blocks}: the model has {plural(depth, 'block')}; pass 0 to {depth}"
        )
    parameters = dict(model.named_parameters())
    # All patterns are checked before the first parameter is changed.
    frozen: set[str] = set()
    for pattern in patterns:
        frozen |= _matching(pattern, list(parameters), depth)
    if blocks:
        frozen |= {name for name in parameters if _layer_number(name, depth) <= blocks}
    names = [name for name in parameters if name in frozen]
    for name in names:
        parameters[name].requires_grad_(False)
    return names


def freeze_parts(
    model: nn.Module, settings: train_config.FineTuningSettings, opt: str
) -> list[str]:
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
    names = freeze(model, *settings.freeze, blocks=settings.freeze_blocks)
    # for each parameter to train, whether Muon updates it, by the rule of `MuonWithAdamW`
    of_muon = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            of_muon.append(name.startswith("blocks.") and parameter.ndim == 2)
    if not of_muon:
        raise errors.SettingError(
            f"everything is frozen: --freeze {' '.join(settings.freeze)}, --freeze-blocks "
            f"{settings.freeze_blocks}; leave something to train, such as the head: --freeze "
            "backbone"
        )
    if opt == "muon" and len(set(of_muon)) < 2:
        raise errors.SettingError(
            "--opt muon trains the matrices of the blocks, and everything else by AdamW, and all "
            f"parameters of {'the second' if of_muon[0] else 'the first'} kind are frozen; freeze "
            "less, or pass --opt adamw"
        )
    return names


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
        parts = ", ".join(dict.fromkeys([BACKBONE, *(name.partition(".")[0] for name in names)]))
        if depth:
            parts = parts.replace("blocks", f"blocks.0 to blocks.{depth - 1}")
        length = pattern.count(".") + 1
        similar = {".".join(name.split(".")[:length]) for name in names}
        near = did_you_mean(pattern, {BACKBONE, *similar})
        raise errors.SettingError(f"no parameter is named {pattern!r}{near}; the model has {parts}")
    return matching


# An exponential moving average of the weights, which is evaluated and shared if it is on.

Model = TypeVar("Model", bound=nn.Module)


class EMA(Stateful, Generic[Model]):
    """theta' <- d theta' + (1 - d) theta after every step (Polyak and Juditsky, 1992).

    The decay warms up, d = min(decay, (1 + n) / (10 + n)) after n updates, so that the random
    initial weights are forgotten in short runs too. The updates are counted in the state of the
    average, so a resumed run continues with the same decay.

    Args:
        model: provides the initial average.
        decay: d, in [0, 1).
    """

    def __init__(self, model: Model, decay: float) -> None:
        # A separate model, which can be evaluated directly.
        self.model: Model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self, model: Model) -> None:
        """Add the weights of one more step to the average; buffers are copied."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        # Averaging is elementwise: each process averages its own part of a sharded weight.
        averages: list[Tensor] = [
            distributed.local_tensor(average) for average in self.model.parameters()
        ]
        weights: list[Tensor] = [distributed.local_tensor(weight) for weight in model.parameters()]
        # theta' + (1 - d) (theta - theta'), for all weights in one call
        torch._foreach_lerp_(averages, weights, 1.0 - decay)
        for own, current in zip(self.model.buffers(), model.buffers(), strict=True):
            own.copy_(current)
        self.updates += 1

    # these three make the average a part of the run's state
    def tensors(self) -> Tensors:
        """Return the averages."""
        return ModelPart(self.model).tensors()

    def metadata(self) -> Metadata:
        """Return the decay and the number of updates."""
        return {"decay": self.decay, "updates": self.updates}

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Restore the average; its decay is a setting that a resumed run keeps."""
        ModelPart(self.model).load(tensors, {})
        self.updates = int(metadata["updates"])


# Parameter groups for an optimizer: weight decay, and a learning rate for each layer.

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
    errors.check_type(model, nn.Module, "parameter_groups", errors.MODEL)
    if not 0.0 < layer_decay <= 1.0:
        raise errors.SettingError(
            f"layer_decay {layer_decay:g} must lie in (0, 1]; 0.75 is usual, and 1 turns it off"
        )
    depth = len(getattr(model, "blocks", ()))
    names = None if only is None else set(only)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (names is not None and name not in names):
            continue
        scale = layer_decay ** (depth + 1 - _layer_number(name, depth))
        # biases, norms and LayerScale are vectors
        no_decay = parameter.ndim < 2 or name.rpartition(".")[2] in NOT_DECAYED
        decay = 0.0 if no_decay else weight_decay
        new = {"params": [], "lr": lr * scale, "weight_decay": decay, "lr_scale": scale}
        groups.setdefault((scale, no_decay), new)["params"].append(parameter)
    # Sorted, so that the order of the groups does not depend on the order of the parameters.
    return [groups[key] for key in sorted(groups)]


def _layer_number(name: str, depth: int) -> int:
    """Return 0 for the embedding, 1 to L for the blocks, L + 1 for what comes after them.

    >>> [_layer_number(name, 12) for name in ("pos_embed", "blocks.3.norm1.bias", "head.weight")]
    [0, 4, 13]
    """
    first, _, rest = name.partition(".")
    if first in EMBEDDING:
        return 0
    if first == "blocks":
        return int(rest.partition(".")[0]) + 1
    return depth + 1


# The learning rate as a function of the step.


def learning_rate(
    step: int,
    schedule: meaning.Schedule = "cosine",
    *,
    peak: float,
    low: float,
    warmup: int,
    total: int,
) -> float:
    """Return the learning rate of a step: it rises linearly over `warmup` steps to `peak`.

    Steps are counted from 0. The first step without warm-up has the peak. After that, with t from 0
    at the peak to 1 at step total - 1:

        cosine     low + (peak - low) (1 + cos(pi t)) / 2   SGDR (arXiv 1608.03983), Eq. 5
        linear     peak + (low - peak) t                    ViT (arXiv 2010.11929, Table 3)
        constant   peak
        rsqrt      peak sqrt(warmup / (step + 1))           "Attention Is All You Need", Eq. 3, and
                                                            "Scaling ViTs" (arXiv 2106.04560)

    `rsqrt` does not depend on `total`, so that a run can be extended; it never goes below `low`.

    Args:
        step: from 0.
        schedule: one of the four.
        peak: the highest rate, above 0.
        low: the rate at the end, from 0 to `peak`.
        warmup: steps of warm-up, 0 or more.
        total: steps of the run, with the warm-up.

    >>> rates = [learning_rate(s, peak=1.0, low=0.0, warmup=2, total=7) for s in range(7)]
    >>> [round(rate, 3) for rate in rates]
    [0.5, 1.0, 0.905, 0.655, 0.345, 0.095, 0.0]
    """
    warmup = max(warmup, 1)  # without warm-up, the first step is at the peak
    if step < warmup:
        return peak * (step + 1) / warmup
    # + 1: the last step is number total - 1, and has t = 1.
    progress = min((step - warmup + 1) / max(total - warmup, 1), 1.0)
    if schedule == "linear":
        return peak + (low - peak) * progress
    if schedule == "constant":
        return peak
    if schedule == "rsqrt":
        return max(peak * math.sqrt(warmup / (step + 1)), low)
    return low + (peak - low) * (1 + math.cos(math.pi * progress)) / 2

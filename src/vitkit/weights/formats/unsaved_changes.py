"""Changes to a model that a file of weights cannot store: hooks, other layers, other methods.

A model is compared with a new one of the same spec, layer by layer. Where they differ in more than
their tensors, one image decides: both must give the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from vitkit.distributed import is_sharded
from vitkit.errors import CheckpointError
from vitkit.messages import plural
from vitkit.models.interface.classifier import COMPILED
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.model_tensors import blank_model

SHOWN = 3
"""Most changes that a message names."""
TOLERANCE = 1e-5
"""Largest difference of logits, as a part of the largest logit: compiled layers round otherwise."""


def refuse_unsaved_changes(
    vit: ViT, spec: ViTSpec, state: Mapping[str, Tensor], path: Path
) -> None:
    """Refuse a model that computes other logits than a file of its tensors would.

    Args:
        vit: as it is; hooks that it has are called with one image.
        spec: spec of the file.
        state: the tensors of the file.
        path: the file, for messages.

    Raises:
        CheckpointError: hooks, layers or methods that change the logits; they are named.
    """
    changes = list(_changes(vit, spec))
    # A part of a model cannot be run, and tensors on the meta device have no values.
    if not changes or any(t.is_meta or is_sharded(t) for t in state.values()):
        return
    effect = _effect(vit, spec, state)
    if not effect:
        return
    shown = ", ".join(changes[:SHOWN])
    if len(changes) > SHOWN:
        shown += f" and {plural(len(changes) - SHOWN, 'more change')}"
    raise CheckpointError(
        f"{path}: a file holds tensors alone, and this model has {shown}: loaded again, {effect}; "
        "remove hooks (handle.remove()) and put the layers of its spec back, or save its "
        "state_dict() beside the code that builds it"
    )


def _changes(vit: ViT, spec: ViTSpec) -> Iterator[str]:
    """Yield a text on each difference between a model and a new one that is not in its tensors."""
    expected = dict(blank_model(spec).named_modules(remove_duplicate=False))
    for full_name, module in vit.named_modules(remove_duplicate=False):
        name = full_name.removesuffix(f".{COMPILED}").replace(f"{COMPILED}.", "")
        where = name or "the model"
        if module._forward_hooks or module._forward_pre_hooks:
            yield f"forward hooks on {where}"
        if not isinstance(module._modules.get(COMPILED), nn.Module):
            yield from _changes_of_layer(module, expected.get(name), where)


def _changes_of_layer(module: nn.Module, plain: nn.Module | None, where: str) -> Iterator[str]:
    """Yield a text on each difference between a layer and that of a new model, if it has one."""
    kind = type(module).__name__
    if plain is None:
        yield f"a further layer {where} ({kind})"
    elif type(module) is not type(plain):
        yield f"a {kind} in place of {where} ({type(plain).__name__})"
    elif module.extra_repr() != plain.extra_repr():
        yield f"other settings of {where} ({module.extra_repr()}, not {plain.extra_repr()})"
    for attribute in vars(module):
        if callable(getattr(type(module), attribute, None)):
            yield f"its own {attribute}() of {where}"


@torch.no_grad()
def _effect(vit: ViT, spec: ViTSpec, state: Mapping[str, Tensor]) -> str:
    """Describe how a model differs from a new one with its tensors, or return an empty string."""
    with torch.device("meta"):
        plain = ViT(spec)
    plain.load_state_dict(dict(state), assign=True)  # no copies
    plain.eval()
    like = next(plain.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, spec.in_channels, *spec.image_size, generator=generator).to(like)
    try:
        with eval_mode(vit):
            found = vit(images)
    except Exception as error:  # noqa: BLE001 - layers and hooks of the user's own raise anything
        return f"it would return logits, and now it raises {type(error).__name__}: {error}"
    expected = plain(images).double()
    if not expected.isfinite().all():
        return ""  # tensors that are not finite have a message of their own
    if not isinstance(found, Tensor):
        return f"it would return logits, and now it returns a {type(found).__name__}"
    if found.shape != expected.shape:
        return f"its logits would be {tuple(expected.shape)}, and now are {tuple(found.shape)}"
    scale = float(expected.abs().max().clamp(min=1e-12))
    difference = float((found.double() - expected).abs().max().nan_to_num(nan=1.0)) / scale
    if difference <= TOLERANCE:
        return ""
    return f"its logits would differ by {difference:.1g} of the largest"

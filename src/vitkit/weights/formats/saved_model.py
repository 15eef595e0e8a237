"""Spec and state dict of a model to save: unwrapped, with its current head.

A file that could not be read again must not be written, so every difference between a model and its
spec is found here, or refused with the call that removes it.
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
from vitkit.weights.checkpoint import blank_model, tensor_shapes
from vitkit.weights.tensor_file import WEIGHT_DTYPES, count_not_finite

REMEDIES = {
    "lora_": "merge the adapters first: model = peft_model.merge_and_unload()",
    "weight_orig": "end the pruning first: torch.nn.utils.prune.remove(module, 'weight')",
    "parametrizations.": (
        "end the parametrization first: "
        "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
    ),
}
"""Part of a tensor's name that a spec does not know -> the call that makes it a plain weight."""


def as_saved(model: object, path: Path) -> tuple[ViTSpec, dict[str, Tensor]]:
    """Return the spec of a model as it is now, and its tensors by the names of that spec.

    `torch.compile`, data parallelism and `AveragedModel` are unwrapped. Another linear layer in
    place of `head` changes the number of classes; an `nn.Identity` there means that the model has
    no head.

    Args:
        model: a `ViT`, or one in such a wrapper.
        path: the file to be written, for messages.

    Raises:
        CheckpointError: no ViT, or one whose tensors no spec describes, or one that computes other
            logits than its tensors alone do, such as by a hook.
    """
    vit = unwrapped(model, path)
    if vit.spec.stem == "backbone":
        raise CheckpointError(
            f"{path}: the file cannot describe the model's own backbone; save its state_dict() "
            "beside the code that builds the backbone, or use stem 'resnet'"
        )
    spec, state = present_state(vit)
    _refuse_misfits(vit, spec, state, path)
    _refuse_unsaved_changes(vit, spec, state, path)
    return spec, state


def present_state(vit: ViT) -> tuple[ViTSpec, dict[str, Tensor]]:
    """Return the spec of a model with the head that it has now, and its tensors by its names."""
    spec = vit.spec.replace(num_classes=vit.num_classes)
    # Single blocks may be compiled, too.
    state = {name.replace(f"{COMPILED}.", ""): t for name, t in vit.state_dict().items()}
    if "head.weight" in state and spec.num_classes:  # a linear layer may have no bias
        state.setdefault("head.bias", state["head.weight"].new_zeros(spec.num_classes))
    return spec, state


def refuse_unusable(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse tensors that reading the file would refuse.

    Raises:
        CheckpointError: NaN, infinities, integers, or a tensor on the meta device.
    """
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"{path}: {name} is on the meta device and has no values; expected floats"
            )
        if tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(f"{path}: {name} is {tensor.dtype}; expected floats")
        not_finite = count_not_finite(tensor)
        if not_finite:
            raise CheckpointError(
                f"{path}: {name}: {not_finite} of {tensor.numel()} numbers are NaN or infinite in "
                "float32, and such a file could not be loaded; save an earlier model"
            )


def unwrapped(model: object, path: Path) -> ViT:
    """Return the ViT inside of any wrappers.

    Raises:
        CheckpointError: there is none.
    """
    inner = model
    # Wrappers may be nested: compiled inside of data parallelism, averaged on top.
    while not isinstance(inner, ViT):
        wrapped = getattr(inner, COMPILED, None) or getattr(inner, "module", None)
        if not isinstance(wrapped, nn.Module):
            break
        if isinstance(inner, nn.Module) and (inner._forward_hooks or inner._forward_pre_hooks):
            raise CheckpointError(
                f"{path}: a file cannot hold the forward hooks of the {type(inner).__name__} "
                "around the model; remove them (handle.remove())"
            )
        inner = wrapped
    if isinstance(inner, ViT):
        return inner
    remedy = "pass a vitkit.ViT, such as checkpoint.model"
    if hasattr(model, "merge_and_unload"):
        remedy = REMEDIES["lora_"]
    elif isinstance(getattr(model, "model", None), ViT):  # `FeatureMaps`
        remedy = "pass the ViT in it, its .model"
    raise CheckpointError(f"{path}: {type(model).__name__} is not a ViT; {remedy}")


def _refuse_misfits(vit: ViT, spec: ViTSpec, state: Mapping[str, Tensor], path: Path) -> None:
    """Refuse a model whose tensors are not those of its spec."""
    expected = tensor_shapes(spec)
    unknown = sorted(state.keys() - expected.keys())
    missing = sorted(expected.keys() - state)
    if unknown or missing:
        remedies = [text for part, text in REMEDIES.items() if any(part in n for n in unknown)]
        if not remedies and any(name.startswith("head.") for name in (*unknown, *missing)):
            remedies = [
                f"model.head is a {type(vit.head).__name__}, and a file can hold only a "
                f"torch.nn.Linear({spec.head_inputs}, K) there, without other layers (dropout "
                "before it is the field head_dropout)"
            ]
        remedy = "; or ".join([*remedies, "save its state_dict() beside the code that builds it"])
        raise CheckpointError(
            f"{path}: the model differs from its spec: {plural(len(missing), 'tensor')} missing "
            f"({', '.join(missing[:3]) or 'none'}), {len(unknown)} unknown "
            f"({', '.join(unknown[:3]) or 'none'}); {remedy}"
        )
    for name, tensor in state.items():
        if tuple(tensor.shape) != expected[name]:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the model's spec needs "
                f"{expected[name]}; save its state_dict() beside the code that builds it"
            )


# Changes to a model that a file of weights cannot store: hooks, other layers, other methods.
#
# A model is compared with a new one of the same spec, layer by layer. Where they differ in more
# than their tensors, one image decides: both must give the same logits.

SHOWN = 3
"""Most changes that a message names."""
TOLERANCE = 1e-5
"""Largest difference of logits, as a part of the largest logit: compiled layers round otherwise."""


def _refuse_unsaved_changes(
    vit: ViT, spec: ViTSpec, state: Mapping[str, Tensor], path: Path
) -> None:
    """Refuse a model that computes other logits than a file of its tensors would."""
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

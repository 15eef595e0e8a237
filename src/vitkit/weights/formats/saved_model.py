"""Spec and state dict of a model to save: unwrapped, with its current head.

A file that could not be read again must not be written, so every difference between a model and its
spec is found here, or refused with the call that removes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.messages import plural
from vitkit.models.interface.classifier import COMPILED
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.files.source import WEIGHT_DTYPES, count_not_finite
from vitkit.weights.formats.unsaved_changes import refuse_unsaved_changes
from vitkit.weights.model_tensors import tensor_shapes

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
    refuse_unsaved_changes(vit, spec, state, path)
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

"""A model as a file can hold it: without wrappers, and with the head that it has now.

A file that could not be read again must not be written, so every difference between a model and its
spec is found here, or refused with the call that mends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError, plural
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.files.open import FLOATS
from vitkit.weights.formats.key_table import shapes

COMPILED = "_orig_mod"
"""What `torch.compile` calls the module inside."""
MEND = {
    "lora_": "merge the adapters first: model = peft_model.merge_and_unload()",
    "weight_orig": "end the pruning first: torch.nn.utils.prune.remove(module, 'weight')",
    "parametrizations.": "end the parametrization first: "
                         "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')",
}  # fmt: skip
"""Part of a tensor's name that a spec does not know -> the call that makes it a plain weight."""


def as_saved(model: object, path: Path) -> tuple[ViTSpec, dict[str, Tensor]]:
    """The spec of a model as it is now, and its tensors under the names that the spec gives them.

    A model in `torch.compile`, data parallelism or `AveragedModel` is taken out of it. Another
    linear layer in place of `head` changes the number of classes; an `nn.Identity` there means
    that the model has no head.

    Args:
        model: a `ViT`, or one in such a wrapper.
        path: the file to be written, for messages.

    Raises:
        CheckpointError: no ViT, or one whose tensors no spec describes.
    """
    vit = _unwrapped(model, path)
    if vit.spec.stem == "backbone":
        raise CheckpointError(
            f"{path}: the file could not describe the model's backbone; save its state_dict() "
            "beside the code that makes the backbone, or take stem 'resnet'"
        )
    spec = _spec_with_its_head(vit)
    state = {name.replace(f"{COMPILED}.", ""): t for name, t in vit.state_dict().items()}
    _refuse_misfits(spec, state, path)
    return spec, state


def refuse_unusable(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise `CheckpointError` for numbers that reading a file would refuse: NaN, integers, none."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS or tensor.is_meta:
            what = "has no numbers, on the meta device" if tensor.is_meta else f"is {tensor.dtype}"
            raise CheckpointError(f"{path}: {name} {what}; a file holds floats")
        if not torch.isfinite(tensor.sum(dtype=torch.float32)):  # sums never lose a NaN or infinity
            wrong = int((~torch.isfinite(tensor.float())).sum())
            if wrong:
                raise CheckpointError(
                    f"{path}: {name}: {wrong} of {tensor.numel()} numbers are not finite in "
                    f"float32, and no model can be read from such a file; save a model from before "
                    f"they were"
                )


def _unwrapped(model: object, path: Path) -> ViT:
    inner = model
    while not isinstance(inner, ViT):
        wrapped = getattr(inner, COMPILED, None) or getattr(inner, "module", None)
        if not isinstance(wrapped, nn.Module):
            break
        inner = wrapped
    if isinstance(inner, ViT):
        return inner
    mend = "give a vitkit.ViT, such as checkpoint.model"
    if hasattr(model, "merge_and_unload"):
        mend = MEND["lora_"]
    raise CheckpointError(f"{path}: {type(model).__name__} is not a ViT; {mend}")


def _spec_with_its_head(vit: ViT) -> ViTSpec:
    head = getattr(vit.head, COMPILED, vit.head)
    count = vit.spec.num_classes
    if isinstance(head, nn.Identity):
        count = 0
    elif isinstance(head, nn.Linear) and head.in_features == vit.spec.head_inputs:
        count = head.out_features
    return vit.spec.replace(num_classes=count)


def _refuse_misfits(spec: ViTSpec, state: Mapping[str, Tensor], path: Path) -> None:
    expected = shapes(spec)
    unknown, missing = sorted(state.keys() - expected.keys()), sorted(expected.keys() - state)
    if unknown or missing:
        found = "; ".join(mend for part, mend in MEND.items() if any(part in n for n in unknown))
        raise CheckpointError(
            f"{path}: the model is not what its spec says: {plural(len(missing), 'tensor')} "
            f"missing ({', '.join(missing[:3]) or 'none'}), {len(unknown)} unknown "
            f"({', '.join(unknown[:3]) or 'none'}); "
            f"{found or 'save its state_dict() beside the code that makes it'}"
        )
    for name, tensor in state.items():
        if tuple(tensor.shape) != expected[name]:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, the model's spec needs "
                f"{expected[name]}; save its state_dict() beside the code that makes it"
            )

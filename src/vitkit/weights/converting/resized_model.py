"""A model for another patch or image size: FlexiViT's kernels and resampled positions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitkit.errors import CheckpointError, SpecError
from vitkit.models.positions import resample_positions
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.formats.saved_model import present_state


def resize_kernel(
    kernel: Float[Tensor, "D C P Q"], size: tuple[int, int], mode: str = "bilinear"
) -> Float[Tensor, "D C P2 Q2"]:
    """Resize a patch projection: FlexiViT's PI-resize (arXiv 2212.08013), Eq. 4.

    With B the matrix that resizes a patch, the new kernel is pinv(B^T) w: the token of a resized
    patch is then as near as possible to that of the original one, and equal when it was enlarged.

    Args:
        kernel: w (D, C, P, Q).
        size: (height, width) of the new patches, in pixels.
        mode: mode of B, antialiased: `bilinear` (the paper's) or `bicubic`.

    Returns:
        The new kernel (D, C, P2, Q2), in the dtype of the old one.
    """
    old = tuple(kernel.shape[2:])
    if old == size:
        return kernel
    # Row i of B^T is the i-th unit patch, resized: B is found by resizing every unit patch.
    basis = torch.eye(old[0] * old[1], dtype=torch.float64, device="cpu").reshape(-1, 1, *old)
    resized = F.interpolate(basis, size=size, mode=mode, antialias=True)
    inverse = torch.linalg.pinv(resized.flatten(1))  # rows of B^T, (P Q, P2 Q2) -> (P2 Q2, P Q)
    # The pseudo-inverse is badly conditioned where patches shrink, so it is not applied in float32.
    exact = exact_dtype(kernel.device)
    new_kernel = kernel.flatten(2).to(exact) @ inverse.to(kernel.device, exact).T
    return new_kernel.unflatten(2, size).to(kernel.dtype)


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def resized(
    model: ViT,
    *,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | tuple[int, int] | None = None,
) -> ViT:
    """Return a copy of a model with weights for other images, other patches, or both.

    The patch kernel is resized by `resize_kernel`, learned positions by the spec's
    `position_resampling`; all else is copied. `patch_size=8` on a FlexiViT at 240 pixels gives
    30 x 30 patches.

    Args:
        model: any `ViT`; its weights stay as they are.
        image_size: pixels, one number or (height, width); default the model's.
        patch_size: pixels, likewise; default the model's.

    Raises:
        CheckpointError: no `ViT`, such as a checkpoint or a path.
        SpecError: sizes that do not divide, or another patch for a stem that is no projection of
            pixels.
    """
    if not isinstance(model, ViT):
        raise CheckpointError(
            f"resized takes a vitkit.ViT, such as checkpoint.model, not a {type(model).__name__}; "
            "to change a checkpoint, use vitkit.adapt"
        )
    old, state = present_state(model)
    sizes = {"image_size": image_size, "patch_size": patch_size}
    # Changed at once: each alone might not divide the other.
    spec = old.replace(**{name: size for name, size in sizes.items() if size is not None})
    if spec.patch_size != old.patch_size:
        if old.stem not in ("convolution", "linear"):
            raise SpecError(
                f"the patches of stem {old.stem!r} cannot be resized; keep patch_size "
                f"{old.patch_size}, or use a model with stem 'convolution'"
            )
        name = "patch_embed.proj.weight"
        state[name] = resize_kernel(state[name], spec.patch_size)
    if "pos_embed" in state:
        positions = state["pos_embed"]
        state["pos_embed"] = resample_positions(
            positions, old.grid, spec.grid, old.position_resampling
        )
    return rebuilt(model, spec, state)


def rebuilt(model: ViT, spec: ViTSpec, state: Mapping[str, Tensor]) -> ViT:
    """Return a copy of a model under another spec, with these weights and its own settings.

    Args:
        model: its backbone (if any), mode, checkpointing and frozen parameters are taken over.
        spec: the new one; `state` fits it.
        state: tensors by name; they are copied.
    """
    backbone = None
    if spec.stem == "backbone":
        backbone = copy.deepcopy(model.patch_embed.get_submodule("backbone"))
    # No initial values are drawn: the copies below take the place of the parameters.
    with torch.device("meta"):
        new_model = ViT(spec, backbone=backbone)
    copies = {name: tensor.clone() for name, tensor in state.items()}
    new_model.load_state_dict(copies, assign=True)
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    for name, parameter in new_model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    new_model.run_block = model.run_block
    if model.origin is not None:
        preprocess = model.origin.preprocess.replace(image_size=spec.image_size)
        new_model.origin = replace(model.origin, preprocess=preprocess)
    return new_model.train(model.training)

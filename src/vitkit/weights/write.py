"""Write a checkpoint in any format, or for another patch or image size."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitkit import errors, messages
from vitkit.io import atomic, untrusted
from vitkit.models.embedding import resample_positions
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights import verify
from vitkit.weights.checkpoint import OWN_FORMAT, Checkpoint, refuse_contradictions
from vitkit.weights.files import WEIGHTS_FILES
from vitkit.weights.formats import keys, vitkit
from vitkit.weights.formats.format import WEIGHTS_FILE, Bundle, Fitted, Step
from vitkit.weights.pickles import PICKLE_ENDINGS
from vitkit.weights.recognise_format import FORMATS

FILE_ENDINGS = (".safetensors", ".npz", *PICKLE_ENDINGS)
"""Endings of output paths that are files, not folders."""


class WrittenCheckpoint(NamedTuple):
    """A checkpoint on disk.

    Attributes:
        files: written.
        spec: spec of the model in them.
        steps: the changes that the format needed.
        unchanged: number of tensors with the same bits as before.
    """

    files: tuple[Path, ...]
    spec: ViTSpec
    steps: tuple[Step, ...]
    unchanged: int


def refuse_unknown_format(to: str) -> None:
    """Raise `CheckpointError` if there is no format of this name."""
    if to not in (OWN_FORMAT, *FORMATS):
        near = messages.did_you_mean(to, [OWN_FORMAT, *FORMATS])
        raise errors.CheckpointError(
            f"--to (to=) {to!r} is not a format; pass one of {OWN_FORMAT}, {', '.join(FORMATS)}"
            f"{near}"
        )


def write_checkpoint(
    checkpoint: Checkpoint, out: Path, to: str, allow_lossy: bool, before: Mapping[str, Tensor]
) -> WrittenCheckpoint:
    """Write a checkpoint in a format.

    Args:
        checkpoint: the model with its metadata.
        out: a folder, or a file with the format's ending.
        to: the format.
        allow_lossy: also take steps that approximate or lose something.
        before: the tensors to count unchanged ones against; no copy of them is kept.

    Raises:
        CheckpointError: a model that the format cannot hold, or cannot without loss.
        OutputError: a file exists already, or cannot be written.
    """
    writers, (spec, state, steps) = prepare_files(checkpoint, to, allow_lossy)
    unchanged = sum(name in before and _same(before[name], state[name]) for name in state)
    return WrittenCheckpoint(_write_files(out, writers, to), spec, tuple(steps), unchanged)


def prepare_files(
    checkpoint: Checkpoint, to: str, allow_lossy: bool
) -> tuple[dict[str, atomic.FileWriter], Fitted]:
    """Return the files of the target, name -> writer, and the model in them.

    Raises:
        CheckpointError: as for `write_checkpoint`; nothing is written.
    """
    dtype: torch.dtype = getattr(torch, checkpoint.dtype)
    path = checkpoint.path or Path("checkpoint")
    spec, before = vitkit.as_saved(checkpoint.model, path)
    if to == OWN_FORMAT:
        writer = vitkit.own_file_writer(
            checkpoint.model,
            checkpoint.preprocess,
            checkpoint.classes,
            {**checkpoint.metadata, "source_format": checkpoint.format},
            dtype,
            path=path,
        )
        return {WEIGHTS_FILE: writer}, Fitted(spec, before, [])
    # A file that `load` would refuse is not written; the writer of our own format checks the same.
    refuse_contradictions(path, spec, checkpoint.preprocess, checkpoint.classes)
    form = FORMATS[to]
    with keys.named_errors(path, to):
        fitted = form.settle(verify.fit_to_format(spec, before, *form.capabilities))
    # "folded" is the same function with other numbers.
    lossy = [step.text for step in fitted.steps if step.kind != "folded"]
    if lossy and not allow_lossy:
        raise errors.CheckpointError(
            f"{path}: {to} cannot store: {'; '.join(lossy)}; to write it anyway, "
            "pass --allow-lossy (allow_lossy=True)"
        )
    with keys.named_errors(path, to):
        tensors = keys.write_tensors(form.table(fitted.spec), fitted.spec, fitted.state)
        # Computed numbers keep all their bits; copied ones had no more than `dtype` has.
        if not fitted.steps:
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        # other formats cannot mark names as assumed: who reads the file would take them as stated
        classes = () if checkpoint.classes_assumed else checkpoint.classes
        bundle = Bundle(fitted.spec, tensors, checkpoint.preprocess, classes)
        return form.write(bundle), fitted


def _same(left: Tensor, right: Tensor) -> bool:
    # Most steps rename tensors and do not touch them.
    if left.data_ptr() == right.data_ptr():
        return True  # the same memory, without reading it
    return left.shape == right.shape and torch.equal(left, right)


def _write_files(out: Path, writers: Mapping[str, atomic.FileWriter], to: str) -> tuple[Path, ...]:
    """Write into the folder `out`, or the one file of that name.

    A folder is read by the first of `WEIGHTS_FILES` in it, and weights by the JSON beside them, so
    nothing is written beside files that would be read together with it.

    Raises:
        CheckpointError: a name of another ending, or a single file for a format of several.
        OutputError: another folder must be chosen.
    """
    folder = out
    if out.name.endswith(FILE_ENDINGS):
        (name, writer), *others = writers.items()
        problems = {
            f"{to} writes {len(writers)} files ({', '.join(writers)}); name a folder instead": (
                others
            ),
            f"expected a name that ends in {Path(name).suffix}, as {to} files do": (
                out.suffix != Path(name).suffix
            ),
        }
        untrusted.refuse(out, problems)
        folder, writers = out.parent, {out.name: writer}
    documents = set(untrusted.DOCUMENT_FILES.values())
    company: set[str] = set()
    if folder.is_dir() and not any((folder / name).exists() for name in writers):
        if not writers.keys().isdisjoint(WEIGHTS_FILES):
            company |= {*WEIGHTS_FILES, "config.yaml"}
        if not writers.keys().isdisjoint(documents):
            company |= {file.name for file in folder.iterdir() if file.name.endswith(FILE_ENDINGS)}
        elif to != OWN_FORMAT:
            company |= documents
    present = sorted(name for name in company if (folder / name).is_file())
    if present:
        kind = f"has {present[0]}, which would be read with the new {min(writers)} or instead"
        if "config.yaml" in present:
            kind = "is the folder of a run"
        raise errors.OutputError(f"{folder} {kind}; choose another folder")
    return atomic.write_new(folder, writers)


# A model for another patch or image size: FlexiViT's kernels and resampled positions.


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
    if device.type == "mps":
        return torch.float32
    return torch.float64


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
        raise errors.CheckpointError(
            f"resized takes a vitkit.ViT, such as checkpoint.model, not a {type(model).__name__}; "
            "to change a checkpoint, use vitkit.adapt"
        )
    old, state = vitkit.present_state(model)
    sizes = {"image_size": image_size, "patch_size": patch_size}
    # Changed at once: each alone might not divide the other.
    spec = old.replace(**{name: size for name, size in sizes.items() if size is not None})
    if spec.patch_size != old.patch_size:
        if old.stem not in ("convolution", "linear"):
            raise errors.SpecError(
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

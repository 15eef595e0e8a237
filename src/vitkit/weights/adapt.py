"""Adapting a checkpoint to other image sizes, patches, channels or classes.

Each change is requested and reported; a checkpoint keeps its sizes, its head and its normalisation
otherwise. Steps that change the output name the method that was used.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitkit import errors, messages
from vitkit.data.datasets.splitting import match_classes
from vitkit.frozen import frozen
from vitkit.models.initialisation import fresh_heads, is_of_head
from vitkit.spec import Channel, Count, Fit, Preprocess, Resampling, Size, ViTSpec
from vitkit.weights.checkpoint import Checkpoint, texts
from vitkit.weights.formats.format import Step
from vitkit.weights.write import exact_dtype, rebuilt, resized

# The patch projection x_p E + b, into which channels and normalisation are folded.
KERNEL = "patch_embed.proj.weight"
BIAS = "patch_embed.proj.bias"
LINEAR_STEMS = ("convolution", "linear")
"""Stems whose tokens are linear in the pixels."""
MEASURED = ("metrics", "temperature")
"""Metadata measured on a model's logits, which do not hold after a change of them."""


@frozen(raises=errors.SpecError)
class Adaptation:
    """The changes to make to a checkpoint; fields that are not given stay as they are."""

    image_size: Size | None = None
    """Pixels, (height, width) or one number. Learned positions are resampled, also where the new
    grid has as many patches in another shape."""
    patch_size: Size | None = None
    """Pixels, (height, width) or one number; the kernel is resized as in FlexiViT (arXiv
    2212.08013)."""
    resampling: Resampling | None = None
    """How positions are resampled; default: as in the code that the checkpoint comes from."""
    in_channels: Literal[1, 3] | None = None
    """Colour to grey or back; grey images give the same tokens, both ways."""
    mean: Channel | None = None
    """Per channel, on the scale [0, 1]: images are to be normalised by this one instead, and the
    difference is folded into the patch projection, exactly."""
    std: Channel | None = None
    """Standard deviation, as for `mean`."""
    fit: Fit | None = None
    """`crop` or `squash`, how images are resized to `image_size`; weights stay as they are."""
    num_classes: Count | None = None
    """The size of a fresh head, made as `spec.initialisation` makes one, also where the head has
    that size already; 0 for none."""
    classes: tuple[str, ...] | None = None
    """Class names that the checkpoint has: the head keeps their rows, in this order."""


def adapt(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    """Adapt a checkpoint to other image sizes, patches, channels or classes.

    Args:
        checkpoint: the original, which stays as it is.
        **changes: fields of `Adaptation`: `image_size`, `patch_size`, `resampling`, `in_channels`,
            `mean`, `std`, `fit`, `num_classes`, `classes`.

    Returns:
        A new checkpoint, on the model's device and in its dtype; `.metadata["adapted"]` has a line
        for every step. Metrics and temperature stay only where images give the same logits as
        before, which is so for `mean` and `std`. A fresh head takes its numbers from torch's global
        generator, the same on every device.

    Raises:
        CheckpointError: no checkpoint, such as a model or a path.
        SpecError: an unknown change, a size that does not divide, a stem that cannot be changed so,
            a class that is not known.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise errors.CheckpointError(
            "adapt takes a checkpoint, as vitkit.load returns it, not a "
            f"{type(checkpoint).__name__}; to change only the sizes of a model, use "
            "vitkit.resized"
        )
    request = Adaptation(**changes)
    steps: list[Step] = []
    # In this order: channels and normalisation are folded into the old kernel, then it is resized.
    adapted = _with_preprocess(checkpoint, request, steps)
    if request.image_size or request.patch_size or request.resampling:
        adapted = _with_grid(adapted, request, steps)
    if request.classes is not None:
        adapted = _with_rows(adapted, request.classes, request.num_classes, steps)
    # 0 means no head, which is no change for a model without one.
    elif request.num_classes or request.num_classes not in (None, adapted.num_classes):
        adapted = _with_fresh_head(adapted, request.num_classes or 0, steps)
    # Lines of earlier adaptations are kept.
    lines = [*texts(checkpoint.metadata, "adapted"), *map(str, steps)]
    metadata = {**checkpoint.metadata, "adapted": lines}
    # Folded steps keep the logits; a change of channels keeps them for grey images only.
    exact = all(step.kind == "folded" for step in steps)
    if not exact or adapted.preprocess.channels != checkpoint.preprocess.channels:
        for name in MEASURED:
            metadata.pop(name, None)
    adapted = replace(adapted, metadata=metadata)
    if adapted.model is not checkpoint.model:
        adapted.model.origin = adapted.origin
    return adapted


def _with_preprocess(adapted: Checkpoint, request: Adaptation, steps: list[Step]) -> Checkpoint:
    """Change channels, normalisation and fit."""
    if request.in_channels not in (None, adapted.model.spec.in_channels):
        adapted = _with_channels(adapted, request.in_channels or 3, steps)
    if request.mean or request.std:
        adapted = _with_normalisation(adapted, request.mean, request.std, steps)
    old_fit = adapted.preprocess.fit
    if request.fit not in (None, old_fit):
        steps.append(Step("approximated", f"preprocess: fit {old_fit} -> {request.fit}"))
        adapted = replace(adapted, preprocess=adapted.preprocess.replace(fit=request.fit))
    return adapted


def _with_grid(adapted: Checkpoint, request: Adaptation, steps: list[Step]) -> Checkpoint:
    """Change image size, patch size and the resampling of positions."""
    model = adapted.model
    old = model.spec
    if request.resampling not in (None, old.position_resampling):
        spec = old.replace(position_resampling=request.resampling)
        model = rebuilt(model, spec, model.state_dict())
    model = resized(model, image_size=request.image_size, patch_size=request.patch_size)
    spec = model.spec
    if spec.patch_size != old.patch_size:
        sizes = f"{_by(old.patch_size)} -> {_by(spec.patch_size)}"
        steps.append(Step("approximated", f"{KERNEL}: {sizes} by FlexiViT's pseudo-inverse"))
    # The grid changes with either size, or with both.
    if spec.grid != old.grid:
        text = f"positions {spec.positions!r} for {_by(spec.grid)} patches"
        if spec.positions == "learned":
            sizes = f"{_by(old.grid)} -> {_by(spec.grid)}"
            text = f"pos_embed: {sizes} by {spec.position_resampling}"
        steps.append(Step("approximated", text))
    preprocess = adapted.preprocess.replace(image_size=spec.image_size)
    return replace(adapted, model=model, preprocess=preprocess)


def _with_channels(adapted: Checkpoint, channels: int, steps: list[Step]) -> Checkpoint:
    """Change colour to grey or back, so that grey images give the same tokens."""
    old, spec = adapted.preprocess, adapted.model.spec
    _refuse_stem(spec, "in_channels")
    state = dict(adapted.model.state_dict())
    if channels == 3:  # grey = (r + g + b) / 3 where they are equal
        state[KERNEL] = state[KERNEL].repeat(1, 3, 1, 1) / 3  # D 1 P P -> D 3 P P
        preprocess = old.replace(mean=old.mean * 3, std=old.std * 3)
        method = "repeated and divided by 3"
    else:
        # The three channels must be normalised alike before their kernels are added.
        mean, std = sum(old.mean) / 3, sum(old.std) / 3
        spec, state = _folded(spec, state, old, (mean,) * 3, (std,) * 3)
        state[KERNEL] = state[KERNEL].sum(dim=1, keepdim=True)  # D 3 P P -> D 1 P P
        preprocess = old.replace(mean=(mean,), std=(std,))
        method = "summed over channels"
    model = rebuilt(adapted.model, spec.replace(in_channels=channels), state)
    steps.append(Step("folded", f"{KERNEL}: {method}, the same tokens for grey images"))
    return replace(adapted, model=model, preprocess=preprocess)


def _with_normalisation(
    adapted: Checkpoint, mean: Channel | None, std: Channel | None, steps: list[Step]
) -> Checkpoint:
    """Change mean and standard deviation of the images, with the same tokens."""
    old, spec = adapted.preprocess, adapted.model.spec
    _refuse_stem(spec, "mean and std")
    new = old.replace(mean=mean or old.mean, std=std or old.std)
    if new.channels != spec.in_channels:
        raise errors.SpecError(
            f"mean and std have {new.channels} channels, and the model has {spec.in_channels}"
        )
    spec, state = _folded(spec, adapted.model.state_dict(), old, new.mean, new.std)
    text = f"mean {_spaced(new.mean)} and std {_spaced(new.std)}"
    steps.append(Step("folded", f"{KERNEL}: takes images with {text}"))
    return replace(adapted, model=rebuilt(adapted.model, spec, state), preprocess=new)


def _folded(
    spec: ViTSpec,
    state: Mapping[str, Tensor],
    old: Preprocess,
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[ViTSpec, dict[str, Tensor]]:
    """Fold a change of normalisation into the patch projection.

    For pixels x' = (p - mean) / std instead of x = (p - m) / s: x = x' std / s + (mean - m) / s,
    so the kernel is multiplied by std / s, and the bias grows by the kernel's sum over a patch
    times (mean - m) / s. Float64 inside, where the device has it.
    """
    kernel = state[KERNEL].to(exact_dtype(state[KERNEL].device))
    old_mean, old_std, new_mean, new_std = (
        torch.tensor(values, dtype=kernel.dtype, device=kernel.device)
        for values in (old.mean, old.std, mean, std)
    )
    shift = kernel.sum(dim=(2, 3)) @ ((new_mean - old_mean) / old_std)  # (D, C) @ (C) -> (D)
    bias = state[BIAS] if spec.patch_bias else kernel.new_zeros(len(kernel))
    dtype = state[KERNEL].dtype
    folded = {
        KERNEL: (kernel * (new_std / old_std)[:, None, None]).to(dtype),  # per channel: D C P P
        BIAS: (bias.to(kernel) + shift).to(dtype),
    }
    return spec.replace(patch_bias=True), {**state, **folded}


def _with_rows(
    adapted: Checkpoint, names: Sequence[str], count: int | None, steps: list[Step]
) -> Checkpoint:
    """Keep the rows of some classes in the head, in the order of `names`."""
    like = next(adapted.model.parameters())
    # (K, E) of the head -> the rows of the new classes, (K2, E).
    rows = torch.tensor(_rows_of(names, count, adapted.classes), device=like.device)
    state = dict(adapted.model.state_dict())
    for name in state:
        if is_of_head(name):
            state[name] = state[name][rows]
    spec = adapted.model.spec.replace(num_classes=len(names))
    old_count = len(set(adapted.classes))
    steps.append(Step("lost", f"head: the rows of {old_count - len(names)} of {old_count} classes"))
    return replace(adapted, model=rebuilt(adapted.model, spec, state), classes=tuple(names))


def _rows_of(names: Sequence[str], count: int | None, known: Sequence[str]) -> tuple[int, ...]:
    """Return the rows of a head that class names select.

    Args:
        names: names of the classes to keep.
        count: number of classes if the caller gave one.
        known: the checkpoint's class names.

    Raises:
        SpecError: no names, one twice, another count, or classes that are unknown or ambiguous.
    """
    if not names:
        raise errors.SpecError("classes is empty; to remove the head, pass num_classes=0")
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise errors.SpecError(f"classes names {twice[0]!r} twice; name each class once")
    if count not in (None, len(names)):
        raise errors.SpecError(
            f"num_classes {count} does not match {len(names)} class names; pass only one of them"
        )
    match = match_classes(names, known)
    if match.unknown:
        near = messages.did_you_mean(match.unknown[0], dict.fromkeys(known))
        raise errors.SpecError(
            f"the checkpoint lacks {len(match.unknown)} of the classes: "
            f"{', '.join(match.unknown[:5])}{near}; for a new head, pass num_classes={len(names)}"
        )
    if match.ambiguous:
        raise errors.SpecError(
            f"the checkpoint has several classes called {match.ambiguous[0]!r}; choose others"
        )
    return match.indices


def _with_fresh_head(adapted: Checkpoint, count: int, steps: list[Step]) -> Checkpoint:
    """Replace the head by a fresh one of `count` classes, or by none."""
    old = adapted.model.spec
    spec = old.replace(num_classes=count)
    tensors = adapted.model.state_dict().items()
    # All tensors but those of the old heads.
    state = {name: tensor for name, tensor in tensors if not is_of_head(name)}
    text = f"the head of {old.num_classes} classes is "
    if count:
        like = next(adapted.model.parameters())
        heads = nn.ModuleDict(fresh_heads(spec))
        state |= heads.to(like.device, like.dtype).state_dict()
        text += f"replaced by an untrained one of {count}"
    else:
        text += "left out, so that the model returns features"
    if not old.num_classes:
        text = f"a head of {count} classes is added, untrained"
    steps.append(Step("lost", text))
    return replace(adapted, model=rebuilt(adapted.model, spec, state), classes=())


def _refuse_stem(spec: ViTSpec, change: str) -> None:
    """Raise `SpecError` for a change that needs tokens linear in the pixels."""
    if spec.stem not in LINEAR_STEMS:
        raise errors.SpecError(
            f"{change} cannot be changed with stem {spec.stem!r}, whose tokens are not linear in "
            "the pixels; train a model with the channels and normalisation that you need"
        )


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _spaced(values: Sequence[float]) -> str:
    return " ".join(map("{:g}".format, values))

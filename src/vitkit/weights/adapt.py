"""The same weights for other images, patches, channels or classes: each asked for, and reported.

Nothing here happens by itself: a checkpoint keeps its sizes, its head and its normalisation until
somebody names another. What is only nearly the same says by which mode it was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vitkit.errors import CheckpointError, SpecError, did_you_mean
from vitkit.frozen import frozen
from vitkit.models.initialisation import initialise
from vitkit.models.vit import ViT
from vitkit.spec import Channel, Fit, Preprocess, Resampling, Size, ViTSpec
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.converting.fold import Step
from vitkit.weights.converting.resize import exact_dtype, rebuilt, resized

KERNEL, BIAS = "patch_embed.proj.weight", "patch_embed.proj.bias"
LINEAR_STEMS = ("convolution", "linear")
"""Stems whose tokens are linear in the pixels."""
MEASURED = ("metrics", "temperature")
"""Metadata that were measured on a model's logits."""


@frozen(raises=SpecError)
class Adaptation:
    """What is to be changed in a checkpoint; what is not named stays."""

    image_size: Size | None = None
    """Pixels, (height, width) or one number. Learned positions are resampled, also where the new
    grid has as many patches in another shape."""
    patch_size: Size | None = None
    """Pixels, likewise; the kernel is resized as in FlexiViT (arXiv 2212.08013)."""
    resampling: Resampling | None = None
    """How positions are resampled; by default as the code does that the checkpoint comes from."""
    in_channels: Literal[1, 3] | None = None
    """Colour to grey or back; grey images give the same tokens, both ways."""
    mean: Channel | None = None
    """Per channel, on the scale [0, 1]: images are to be normalised by this one instead, and the
    difference is folded into the patch projection, exactly."""
    std: Channel | None = None
    """Likewise."""
    fit: Fit | None = None
    """`crop` or `squash`, how images are brought to `image_size`; weights stay as they are."""
    num_classes: Annotated[int, Field(ge=0, strict=True)] | None = None
    """The size of a fresh head, made as `spec.initialisation` makes one, also where the head has
    that size already; 0 for none."""
    classes: tuple[str, ...] | None = None
    """Class names that the checkpoint has: the head keeps their rows, in this order."""


@dataclass(frozen=True)
class _Model:
    """What the changes are made to, one after the other."""

    model: ViT
    preprocess: Preprocess
    classes: tuple[str, ...]
    steps: tuple[Step, ...] = ()

    def changed(self, *steps: Step, **parts: Any) -> _Model:
        return replace(self, steps=(*self.steps, *steps), **parts)


def adapt(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    """A checkpoint for other images, other patches, other channels or other classes.

    Args:
        checkpoint: what is adapted; it stays as it is.
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
        raise CheckpointError(
            f"adapt takes a checkpoint, as vitkit.load returns it, not a "
            f"{type(checkpoint).__name__}; vitkit.resized changes the sizes of a model alone"
        )
    asked = Adaptation(**changes)
    made = _Model(checkpoint.model, checkpoint.preprocess, checkpoint.classes)
    if asked.in_channels not in (None, made.model.spec.in_channels):
        made = _with_channels(made, asked.in_channels or 3)
    if asked.mean or asked.std:
        made = _normalised(made, asked.mean, asked.std)
    if asked.fit not in (None, made.preprocess.fit):
        step = Step("approximated", f"preprocess: fit {made.preprocess.fit} -> {asked.fit}")
        made = made.changed(step, preprocess=made.preprocess.replace(fit=asked.fit))
    if asked.image_size or asked.patch_size or asked.resampling:
        made = _with_grid(made, asked)
    if asked.classes is not None:
        made = _with_rows(made, asked.classes, asked.num_classes)
    elif asked.num_classes or asked.num_classes not in (None, made.model.spec.num_classes):
        made = _with_fresh_head(made, asked.num_classes or 0)
    lines = [*checkpoint.metadata.get("adapted", ()), *map(str, made.steps)]
    metadata = {**checkpoint.metadata, "adapted": lines}
    exact = all(step.kind == "folded" for step in made.steps)
    if not exact or made.preprocess.channels != checkpoint.preprocess.channels:
        for name in MEASURED:
            metadata.pop(name, None)
    return replace(
        checkpoint,
        model=made.model,
        preprocess=made.preprocess,
        classes=made.classes,
        metadata=metadata,
    )


def _with_grid(made: _Model, asked: Adaptation) -> _Model:
    model, old = made.model, made.model.spec
    if asked.resampling not in (None, old.position_resampling):
        spec = old.replace(position_resampling=asked.resampling)
        model = rebuilt(model, spec, model.state_dict())
    model = resized(model, image_size=asked.image_size, patch_size=asked.patch_size)
    spec, steps = model.spec, []
    if spec.patch_size != old.patch_size:
        sizes = f"{_by(old.patch_size)} -> {_by(spec.patch_size)}"
        steps.append(Step("approximated", f"{KERNEL}: {sizes} by FlexiViT's pseudo-inverse"))
    if spec.grid != old.grid and spec.positions == "learned":
        sizes, mode = f"{_by(old.grid)} -> {_by(spec.grid)}", spec.position_resampling
        steps.append(Step("approximated", f"pos_embed: {sizes} by {mode}"))
    elif spec.grid != old.grid:
        steps.append(
            Step("approximated", f"positions {spec.positions!r} for {_by(spec.grid)} patches")
        )
    preprocess = made.preprocess.replace(image_size=spec.image_size)
    return made.changed(*steps, model=model, preprocess=preprocess)


def _with_channels(made: _Model, channels: int) -> _Model:
    old, spec = made.preprocess, made.model.spec
    _refuse_stem(spec, "in_channels")
    if spec.in_channels not in (1, 3):
        raise SpecError(f"in_channels {spec.in_channels} -> {channels}: only 1 and 3 are known")
    state = dict(made.model.state_dict())
    if channels == 3:  # grey = (r + g + b) / 3 where they are equal
        state[KERNEL] = state[KERNEL].repeat(1, 3, 1, 1) / 3
        preprocess = old.replace(mean=old.mean * 3, std=old.std * 3)
        how = "repeated and divided by 3"
    else:
        mean, std = (sum(values) / 3 for values in (old.mean, old.std))
        spec, state = _folded(spec, state, old, (mean,) * 3, (std,) * 3)
        state[KERNEL] = state[KERNEL].sum(dim=1, keepdim=True)
        preprocess = old.replace(mean=(mean,), std=(std,))
        how = "summed over channels"
    model = rebuilt(made.model, spec.replace(in_channels=channels), state)
    step = Step("folded", f"{KERNEL}: {how}, the same tokens for grey images")
    return made.changed(step, model=model, preprocess=preprocess)


def _normalised(made: _Model, mean: Channel | None, std: Channel | None) -> _Model:
    old, spec = made.preprocess, made.model.spec
    _refuse_stem(spec, "mean and std")
    new = old.replace(mean=mean or old.mean, std=std or old.std)
    if new.channels != spec.in_channels:
        raise SpecError(f"mean and std of {new.channels} channels for {spec.in_channels}")
    spec, state = _folded(spec, dict(made.model.state_dict()), old, new.mean, new.std)
    text = f"{KERNEL}: takes images of mean {_of(new.mean)} and std {_of(new.std)}"
    return made.changed(
        Step("folded", text), model=rebuilt(made.model, spec, state), preprocess=new
    )


def _folded(
    spec: ViTSpec,
    state: Mapping[str, Tensor],
    old: Preprocess,
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[ViTSpec, dict[str, Tensor]]:
    """The patch projection for pixels x' = (p - mean) / std instead of x = (p - m) / s.

    x = x' std / s + (mean - m) / s, so the kernel is multiplied by std / s, and the bias grows by
    the kernel's sum over a patch times (mean - m) / s. Float64 inside, where the device has it.
    """
    kernel = state[KERNEL].to(exact_dtype(state[KERNEL].device))
    m, s, mean_, std_ = (
        torch.tensor(values, dtype=kernel.dtype, device=kernel.device)
        for values in (old.mean, old.std, mean, std)
    )
    shift = kernel.sum(dim=(2, 3)) @ ((mean_ - m) / s)
    bias = state[BIAS] if spec.patch_bias else kernel.new_zeros(len(kernel))
    made = {
        KERNEL: (kernel * (std_ / s)[:, None, None]).to(state[KERNEL].dtype),
        BIAS: (bias.to(kernel) + shift).to(state[KERNEL].dtype),
    }
    return spec.replace(patch_bias=True), {**state, **made}


def _with_rows(made: _Model, names: Sequence[str], count: int | None) -> _Model:
    if not names:
        raise SpecError("classes is empty; num_classes=0 takes the head off")
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise SpecError(f"classes has {twice[0]!r} twice; name each class once")
    if count not in (None, len(names)):
        raise SpecError(f"num_classes {count} for {len(names)} class names")
    place = {name: row for row, name in enumerate(made.classes)}
    if unknown := [name for name in names if name not in place]:
        near = did_you_mean(unknown[0], place)
        raise SpecError(
            f"{len(unknown)} classes the checkpoint does not know: {', '.join(unknown[:5])}{near}; "
            f"num_classes={len(names)} makes a fresh head"
        )
    if unclear := [name for name in names if made.classes.count(name) > 1]:
        raise SpecError(f"the checkpoint has several classes called {unclear[0]!r}")
    like = next(made.model.parameters())
    rows = torch.tensor([place[name] for name in names], device=like.device)
    state = {n: t[rows] if _of_head(n) else t for n, t in made.model.state_dict().items()}
    spec = made.model.spec.replace(num_classes=len(names))
    step = Step("lost", f"head: the rows of {len(place) - len(set(names))} of {len(place)} classes")
    return made.changed(step, model=rebuilt(made.model, spec, state), classes=tuple(names))


def _with_fresh_head(made: _Model, count: int) -> _Model:
    old, spec = made.model.spec, made.model.spec.replace(num_classes=count)
    state = {n: t for n, t in made.model.state_dict().items() if not _of_head(n)}
    names = ["head", *(["head_dist"] if spec.distillation_token else [])] if count else []
    heads = nn.ModuleDict({
        name: nn.Linear(spec.head_inputs, count, device="cpu", dtype=torch.float32)
        for name in names
    })  # fmt: skip
    if names:
        initialise(heads, spec)
    for name in names:
        nn.init.constant_(heads.get_parameter(f"{name}.bias"), spec.head_bias)
    like = next(made.model.parameters())
    state |= heads.to(like.device, like.dtype).state_dict()
    gone = f"the one of {old.num_classes} classes" if old.num_classes else "there was none"
    made_so = f"a fresh one of {count}, to be trained" if count else "none, features come out"
    step = Step("lost", f"head: {made_so}; {gone}")
    return made.changed(step, model=rebuilt(made.model, spec, state), classes=())


def _refuse_stem(spec: ViTSpec, what: str) -> None:
    if spec.stem not in LINEAR_STEMS:
        raise SpecError(
            f"{what} cannot be changed with stem {spec.stem!r}: its tokens are not linear in the "
            f"pixels; train with the channels and the normalisation that you need"
        )


def _of_head(name: str) -> bool:
    return name.startswith(("head.", "head_dist."))


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _of(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)

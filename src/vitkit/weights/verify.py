"""Fit a model to a format, and verify the written file by the library that reads it.

Each format brings its library (`Format.reference`). A library is imported when it is needed, never
before.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import logging
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.checkpoint import tensor_shapes
from vitkit.weights.fold import change_field
from vitkit.weights.formats.format import (
    BuiltModel,
    Capabilities,
    Fitted,
    Step,
)
from vitkit.weights.recognise_format import FORMATS

# Fitting a model to a format: changes after which the format can store every field.
#
# Each step changes one field of the spec and the tensors with it. Where a format has several
# classes, the one with the lowest cost is taken.


def fit_to_format(
    spec: ViTSpec, state: Mapping[str, Tensor], *capabilities: Capabilities
) -> Fitted:
    """Return a model whose fields can all be stored by one class of a format.

    Args:
        spec: the architecture.
        state: its tensors, by our names; not changed.
        *capabilities: the classes of a format; of those that cost the same, the first is taken.

    Raises:
        CheckpointError: fields that no class can have so; those in the way to the nearest one.
    """
    best: Fitted | None = None
    fewest_obstacles: list[str] = []
    for of_class in capabilities:
        fitted, obstacles = _fit_to_class(spec, state, of_class)
        if obstacles:
            # Reported only if no class can hold the model: those of the nearest class.
            if not fewest_obstacles or len(obstacles) < len(fewest_obstacles):
                fewest_obstacles = obstacles
        elif best is None or fitted.cost < best.cost:
            best = fitted
    if best is None:
        raise CheckpointError(", and ".join(fewest_obstacles))
    expected = tensor_shapes(best.spec).keys()
    assert best.state.keys() == expected, "a change lost a tensor, or left one that is gone"
    return best


def _fit_to_class(
    spec: ViTSpec, state: Mapping[str, Tensor], capabilities: Capabilities
) -> tuple[Fitted, list[str]]:
    """Return the model as close to a class as possible, and a line for each unsupported field."""
    # A shallow copy: steps replace tensors, and never change one in place.
    current = dict(state)
    steps: list[Step] = []
    obstacles: list[str] = []
    for field, wanted in capabilities.items():
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        value = getattr(spec, field)
        # The spec changes on the way, so each field is compared as earlier changes left it.
        if any(_same(field, value, other) for other in allowed) or not _matters(spec, field):
            continue
        for new_value in allowed:
            change = change_field(field, new_value, spec, current)
            if change is not None:
                break
        else:
            obstacles.append(
                f"it cannot hold {field} = {value!r}, only {' or '.join(map(repr, allowed))}"
            )
            continue
        current, step = change
        steps.append(step)
        changes = {field: new_value}
        if field == "distillation_token" and not new_value:
            changes["distilled_readout"] = "mean"  # the only value without the token
        spec = spec.replace(**changes)
    return Fitted(spec, current, steps), obstacles


def _same(field: str, left: Any, right: Any) -> bool:
    """Return True if two values are one architecture."""
    if field == "layer_scale":  # its number is only where training starts
        return (left is None) == (right is None)
    return bool(left == right)


def _matters(spec: ViTSpec, field: str) -> bool:
    """Return True if a field has any effect in combination with the other fields."""
    return {
        "resnet_variant": spec.stem == "resnet",
        "rope_temperature": spec.positions == "rope",
        "positions_cover_prefix": spec.positions == "learned" and spec.num_prefix_tokens > 0,
        "distilled_readout": spec.distillation_token,
        "norm_before_pool": spec.final_norm,
    }.get(field, True)


IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)
"""Exceptions of an import where a library is missing, or does not fit its own dependencies."""
LOAD_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)
"""Exceptions of libraries for a file of another format."""

ModelOutputs: TypeAlias = tuple[list[Tensor], Tensor]
"""Each block's tokens (B, T, D), and logits (B, K) or pooled features (B, E)."""


@dataclass(frozen=True)
class ReferenceModel:
    """Another library's model of a file, in eval mode and float32; call it with images.

    Attributes:
        library: its name and version, such as `timm 1.0.31`.
        built: the model, and how to read its tokens and logits.
    """

    library: str
    built: BuiltModel

    @torch.no_grad()
    def __call__(self, images: Tensor) -> ModelOutputs:
        """Compute each block's tokens (B, T, D), and logits (B, K) or pooled features (B, E).

        Tokens are in our order in all of these libraries: class, distillation, registers, patches
        row by row; before the last norm.

        Args:
            images: (B, C, H, W) float32, normalised, of the size in the spec.
        """
        tokens: list[Tensor] = []

        def keep(block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            tokens.append(self.built.tokens(inputs[0], output))

        # Hooks record what a library does not return: the tokens between its blocks.
        hooks = [block.register_forward_hook(keep) for block in self.built.blocks]
        try:
            with _quiet():
                return tokens, self.built.logits(self.built.model(images))
        finally:
            for hook in hooks:
                hook.remove()


def reference_model(target: str, path: Path, spec: ViTSpec) -> ReferenceModel | str:
    """Return the model that the target's own library builds from written files.

    Weights are mapped from the file where the library's classes allow it; none are drawn first.

    Args:
        target: a format, one of `formats()`.
        path: path of the files: a folder, or one file.
        spec: the model in the files.

    Returns:
        The model; or, in one line, why there is none and how to get one: no package reads the
        format; it is missing, broken or older than the versions that vitkit is tested with; no
        class of it computes such a model (timm's registry has none, torchvision's takes square RGB
        images).

    Raises:
        CheckpointError: the library refuses the file, or leaves out one of its tensors.
    """
    reference = FORMATS[target].reference if target in FORMATS else None
    if reference is None:
        return f"no package that can be installed reads the format {target}"
    name, oldest = reference.distribution, ".".join(map(str, reference.oldest))
    install = f"pip install '{name}>={oldest}'"
    # From cheap checks to expensive ones: installed, importable, new enough, loads the file.
    with _quiet():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed; {install}"
        library = f"{name} {version}"
        try:
            for module in reference.modules:
                importlib.import_module(module)
        except IMPORT_ERRORS as error:
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
            return f"{library} cannot be imported ({reason}); {install}"
        # "1.9.4rc1" -> [1, 9, 4, 1]; only as many numbers count as `oldest` has.
        numbers = list(map(int, re.findall(r"\d+", version)))
        if numbers[: len(reference.oldest)] < [*reference.oldest]:
            return f"{library} is older than the version vitkit is tested with; {install}"
        try:
            built = reference.build(path, spec)
        except LOAD_ERRORS as error:
            reason = textwrap.shorten(str(error), 300, placeholder=" ...")
            raise CheckpointError(
                f"{path}: {library} refuses the converted file: {reason}; do not use it, and "
                "convert to another format"
            ) from None
    if built is None:
        return f"{library} has no class that computes this model"
    return ReferenceModel(library, built._replace(model=built.model.eval().float()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the logs, warnings and progress bars of libraries."""
    # Process-wide, so it is restored: another library may have set it.
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()) as sink:
            warnings.simplefilter("ignore")
            with redirect_stderr(sink):
                yield
    finally:
        logging.disable(level)


def fixed_image(spec: ViTSpec) -> Tensor:
    """Return one image (1, C, H, W) of standard normal numbers, the same in every call."""
    # A generator of its own: neither seed nor state of the caller's is touched.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, spec.in_channels, *spec.image_size, generator=generator)


@torch.no_grad()
def run_model(model: ViT, images: Tensor) -> ModelOutputs:
    """Return tokens and logits of our model for images (B, C, H, W)."""
    record = Record(tokens=range(model.spec.depth))
    logits = model.eval()(images, record)
    return [record.tokens[layer] for layer in range(model.spec.depth)], logits


def largest_differences(
    ours: ModelOutputs, theirs: ModelOutputs
) -> tuple[tuple[float, ...], float]:
    """Return the largest |difference| of each block's tokens, and of the logits."""
    pairs = zip(ours[0], theirs[0], strict=True)
    blocks = tuple(_largest_difference(left, right) for left, right in pairs)
    return blocks, _largest_difference(ours[1], theirs[1])


def _largest_difference(left: Tensor, right: Tensor) -> float:
    """Return NaN where the shapes differ, as when a token was lost."""
    # NaN is neither small nor large, and every comparison with it fails.
    if left.shape != right.shape:
        return float("nan")
    return float((left - right).abs().max())

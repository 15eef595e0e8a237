"""Fit a model to a format, and verify the written file by the library that reads it.

Each format brings its library (`Format.reference`). A library is imported when it is needed, never
before.
"""

import importlib
import importlib.metadata
import io
import logging
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.spec import ViTSpec
from vitkit.weights import checkpoint, fold, recognise_format
from vitkit.weights.formats.format import Capabilities, Fitted, Step

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
    expected = checkpoint.tensor_shapes(best.spec).keys()
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
            change = fold.change_field(field, new_value, spec, current)
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


@torch.no_grad()
def reference_logits(
    target: str, path: Path, spec: ViTSpec, images: Tensor
) -> tuple[Tensor | None, str]:
    """Return what the target's own library computes from written files.

    Args:
        target: a format, one of `formats()`.
        path: path of the files: a folder, or one file.
        spec: the model in the files.
        images: (B, C, H, W) float32, normalised, of the size in the spec.

    Returns:
        Logits (B, K) or pooled features (B, E), and the library with its version, such as
        `timm 1.0.31`; or None, and in one line why and how to get one: no package reads the format;
        it is missing, broken or older than the versions that vitkit is tested with; no class of it
        computes such a model (torchvision's takes square RGB images).

    Raises:
        CheckpointError: the library refuses the file, or leaves out one of its tensors.
    """
    reference = (
        recognise_format.FORMATS[target].reference if target in recognise_format.FORMATS else None
    )
    if reference is None:
        return None, f"no package that can be installed reads the format {target}"
    name, oldest = reference.distribution, ".".join(map(str, reference.oldest))
    install = f"pip install '{name}>={oldest}'"
    # From cheap checks to expensive ones: installed, new enough, importable, loads the file.
    try:
        library = f"{name} {importlib.metadata.version(name)}"
        # "1.9.4rc1" -> [1, 9, 4, 1]; only as many numbers count as `oldest` has.
        numbers = [int(number) for number in re.findall(r"\d+", library)]
        if numbers[: len(reference.oldest)] < [*reference.oldest]:
            return None, f"{library} is older than the version vitkit is tested with; {install}"
        with _quiet():
            importlib.import_module(reference.module)
    except importlib.metadata.PackageNotFoundError:
        return None, f"{name} is not installed; {install}"
    except IMPORT_ERRORS as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        return None, f"{library} cannot be imported ({reason}); {install}"
    try:
        with _quiet():
            model = reference.build(path, spec)
            if model is None:
                return None, f"{library} has no class that computes this model"
            return model.eval().float()(images), library
    except Exception as error:  # noqa: BLE001 - a library raises anything for another file
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise CheckpointError(
            f"{path}: {library} refuses the converted file: {reason}; do not use it, and convert "
            "to another format"
        ) from None


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

"""Fitting a model to a format: changes after which the format can store every field.

Each step changes one field of the spec and the tensors with it. Where a format has several classes,
the one with the lowest cost is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.spec import ViTSpec
from vitkit.weights.converting.fold import change_field
from vitkit.weights.formats.format import Capabilities, Fitted, State, Step
from vitkit.weights.model_tensors import tensor_shapes


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
    for field, allowed in capabilities.items():
        value = getattr(spec, field)
        # The spec changes on the way, so each field is compared as earlier changes left it.
        if any(_same(field, value, other) for other in allowed) or not _matters(spec, field):
            continue
        change = _first_change(field, allowed, spec, current)
        if change is None:
            obstacles.append(
                f"it cannot hold {field} = {value!r}, only {' or '.join(map(repr, allowed))}"
            )
            continue
        new_value, current, step = change
        steps.append(step)
        changes = {field: new_value}
        if field == "distillation_token" and not new_value:
            changes["distilled_readout"] = "mean"  # the only value without the token
        spec = spec.replace(**changes)
    return Fitted(spec, current, steps), obstacles


def _first_change(
    field: str, allowed: tuple[Any, ...], spec: ViTSpec, state: State
) -> tuple[Any, State, Step] | None:
    """Return the first allowed value that can be reached, with the tensors and the step."""
    for value in allowed:
        change = change_field(field, value, spec, state)
        if change is not None:
            return value, *change
    return None


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

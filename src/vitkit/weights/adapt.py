"""Bringing a model to what a format can hold: exactly where that is possible, else by saying so.

Each step changes one field of the spec and the tensors with it. `folded` steps compute the same
function with other numbers, up to rounding; `approximated` and `lost` ones do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.spec import ViTSpec

State: TypeAlias = dict[str, Tensor]
Kind = Literal["folded", "approximated", "lost"]


class Step(NamedTuple):
    """What happened to one field.

    Attributes:
        kind: `folded` exactly, `approximated` or `lost`.
        text: one line.
    """

    kind: Kind
    text: str


Adapted = tuple[State, Step] | None
"""The new tensors and the step, or None where this value cannot be reached."""


def adapt(
    spec: ViTSpec, state: Mapping[str, Tensor], holds: Mapping[str, tuple[Any, ...]]
) -> tuple[ViTSpec, State, list[Step]]:
    """A model of which every field in `holds` has one of the values there.

    Args:
        spec: the architecture.
        state: its tensors, by our names; not changed.
        holds: spec field -> the values that a format can hold, the preferred one first.

    Raises:
        CheckpointError: a field that cannot be brought to any of them.
    """
    made, steps = dict(state), []
    for field, allowed in holds.items():
        value = getattr(spec, field)
        if value in allowed or not _matters(spec, field):
            continue
        for wanted in allowed:
            result = _change(field, value, wanted, spec, made)
            if result is not None:
                made, step = result
                steps.append(step)
                spec = spec.replace(**{field: wanted, **_along(field, wanted)})
                break
        else:
            raise CheckpointError(
                f"{field} = {value!r} has no place in it; it can hold "
                f"{' or '.join(repr(one) for one in allowed)}"
            )
    return spec, made, steps


def _matters(spec: ViTSpec, field: str) -> bool:
    """Whether a field has any effect beside the others."""
    return {
        "resnet_variant": spec.stem == "resnet",
        "rope_temperature": spec.positions == "rope",
        "distilled_readout": spec.distillation_token,
    }.get(field, True)


def _along(field: str, wanted: Any) -> dict[str, Any]:
    """Fields that only mean something beside the one that changes."""
    return {"distilled_readout": "mean"} if field == "distillation_token" and not wanted else {}


def _change(field: str, value: Any, wanted: Any, spec: ViTSpec, state: State) -> Adapted:
    if field == "stem" and {value, wanted} == {"convolution", "linear"}:
        return state, Step("folded", "stem: the same kernel, as a convolution or as a matrix")
    if field == "activation" and {value, wanted} <= {"gelu", "gelu_tanh", "quick_gelu"}:
        return state, Step("approximated", f"activation: {value} will be computed as {wanted}")
    if field == "resnet_variant" and {value, wanted} == {"published", "timm"}:
        return state, Step("approximated", f"resnet_variant: epsilons of {wanted}, not of {value}")
    if field == "norm_eps":
        return state, Step("approximated", f"norm_eps: {value:g} will be computed as {wanted:g}")
    change = CHANGES.get((field, wanted))
    return None if change is None else change(spec, state)


def _fold_layer_scale(spec: ViTSpec, state: State) -> Adapted:
    if spec.block == "res_post_norm":
        return None  # a norm stands between the matrix and the scale
    made = {name: tensor for name, tensor in state.items() if not name.endswith(".gamma")}
    for layer in range(spec.depth):
        for scale, matrix in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
            gamma = state[f"blocks.{layer}.{scale}.gamma"]
            for kind in ("weight", "bias"):
                name = f"blocks.{layer}.{matrix}.{kind}"
                made[name] = (gamma[:, None] if kind == "weight" else gamma) * state[name]
    return made, Step("folded", "layer_scale: multiplied into attn.proj and mlp.fc2")


def _cover_prefix(spec: ViTSpec, state: State) -> Adapted:
    if spec.positions != "learned":
        return state, Step("folded", "positions_cover_prefix: means nothing here")
    zeros = state["pos_embed"].new_zeros(1, spec.num_prefix_tokens, spec.width)
    made = state | {"pos_embed": torch.cat([zeros, state["pos_embed"]], dim=1)}
    return made, Step("folded", "pos_embed: rows of zeros for the prefix tokens")


def _uncover_prefix(spec: ViTSpec, state: State) -> Adapted:
    if spec.positions != "learned":
        return state, Step("folded", "positions_cover_prefix: means nothing here")
    made, row = dict(state), 0
    for name in ("cls_token", "dist_token", "reg_token"):
        if name in made:
            rows = made[name].shape[1]
            made[name] = made[name] + state["pos_embed"][:, row : row + rows]
            row += rows
    made["pos_embed"] = state["pos_embed"][:, row:]
    return made, Step("folded", "pos_embed: the rows of the prefix tokens added to the tokens")


def _with_qkv_bias(spec: ViTSpec, state: State) -> Adapted:
    made = dict(state)
    for layer in range(spec.depth):
        name = f"blocks.{layer}.attn.qkv"
        weight = state[f"{name}.weight"]
        query = made.pop(f"{name}.q_bias", weight.new_zeros(len(weight) // 3))
        value = made.pop(f"{name}.v_bias", torch.zeros_like(query))
        made[f"{name}.bias"] = torch.cat([query, torch.zeros_like(query), value])
    return made, Step("folded", "qkv_bias: zeros where there was none")


def _without_key_bias(spec: ViTSpec, state: State) -> Adapted:
    if spec.qkv_bias is False:
        whole = _with_qkv_bias(spec, state)
        assert whole is not None
        state = whole[0]
    elif spec.qk_norm:
        return None  # after a norm, the key's bias is no constant any more
    made = dict(state)
    for layer in range(spec.depth):
        name = f"blocks.{layer}.attn.qkv"
        made[f"{name}.q_bias"], _, made[f"{name}.v_bias"] = made.pop(f"{name}.bias").chunk(3)
    return made, Step("folded", "qkv_bias: the key's has no effect and was left out")


def _without_qkv_bias(spec: ViTSpec, state: State) -> Adapted:
    biases = ("qkv.bias", "qkv.q_bias", "qkv.v_bias")
    made = {name: tensor for name, tensor in state.items() if not name.endswith(biases)}
    gone = [tensor for name, tensor in state.items() if name not in made]
    if all(not tensor.any() for tensor in gone):
        return made, Step("folded", "qkv_bias: it was all zeros")
    return made, Step("lost", "qkv_bias: the biases of query, key and value")


def _with_patch_bias(spec: ViTSpec, state: State) -> Adapted:
    bias = state["patch_embed.proj.weight"].new_zeros(spec.width)
    return state | {"patch_embed.proj.bias": bias}, Step("folded", "patch_bias: zeros")


def _without_distillation(spec: ViTSpec, state: State) -> Adapted:
    gone = ("dist_token", "head_dist.weight", "head_dist.bias")
    made = {name: tensor for name, tensor in state.items() if name not in gone}
    if spec.positions_cover_prefix and "pos_embed" in made:
        positions = state["pos_embed"]
        made["pos_embed"] = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
    return made, Step("lost", "distillation_token: the token, its position and its head")


def _head_width(spec: ViTSpec, state: State) -> Adapted:
    if spec.num_heads * (spec.head_width or 0) != spec.width:
        return None
    return state, Step("folded", "head_width: it is width / num_heads")


def _packed(spec: ViTSpec, state: State) -> Adapted:
    if spec.mlp != "swiglu_split":
        return None
    made = dict(state)
    for name in [name for name in state if ".fc1_g." in name]:
        value = name.replace("fc1_g", "fc1_x")
        made[name.replace("fc1_g", "fc1")] = torch.cat([made.pop(name), made.pop(value)])
    return made, Step("folded", "mlp: gate and value in one matrix")


def _split(spec: ViTSpec, state: State) -> Adapted:
    if spec.mlp != "swiglu_packed":
        return None
    made = dict(state)
    for name in [name for name in state if ".mlp.fc1." in name]:
        gate, value = made.pop(name).chunk(2)
        made[name.replace("fc1", "fc1_g")], made[name.replace("fc1", "fc1_x")] = gate, value
    return made, Step("folded", "mlp: gate and value in matrices of their own")


def _norm_moved(spec: ViTSpec, state: State) -> Adapted:
    if spec.pooling != "cls" or not spec.final_norm:
        return None  # the norm of a mean is not the mean of norms
    old, new = ("fc_norm.", "norm.") if not spec.norm_before_pool else ("norm.", "fc_norm.")
    made = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in state.items()}
    return made, Step("folded", "norm_before_pool: the same for a class token")


CHANGES: dict[tuple[str, Any], Callable[[ViTSpec, State], Adapted]] = {
    ("layer_scale", None): _fold_layer_scale,
    ("positions_cover_prefix", True): _cover_prefix,
    ("positions_cover_prefix", False): _uncover_prefix,
    ("qkv_bias", True): _with_qkv_bias,
    ("qkv_bias", "no_key"): _without_key_bias,
    ("qkv_bias", False): _without_qkv_bias,
    ("patch_bias", True): _with_patch_bias,
    ("distillation_token", False): _without_distillation,
    ("head_width", None): _head_width,
    ("mlp", "swiglu_packed"): _packed,
    ("mlp", "swiglu_split"): _split,
    ("norm_before_pool", True): _norm_moved,
    ("norm_before_pool", False): _norm_moved,
}
"""(field, value wanted) -> how it is reached."""

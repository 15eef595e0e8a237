"""Bringing a model to what a format can hold: exactly where that is possible, else by saying so.

Each step changes one field of the spec and the tensors with it. `folded` steps compute the same
function with other numbers, up to rounding; `approximated` and `lost` ones do not. Where a format
is several classes, the one that costs a model least is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.models.positions import sincos_1d, sincos_2d
from vitkit.spec import ViTSpec

State: TypeAlias = dict[str, Tensor]
Capabilities: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Spec field -> the values that a class of models can have, the preferred one first."""
Kind = Literal["folded", "approximated", "lost"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""From the least loss to the greatest."""


class Step(NamedTuple):
    """What happened to one field.

    Attributes:
        kind: `folded` exactly, `approximated` or `lost`.
        text: one line.
    """

    kind: Kind
    text: str

    @classmethod
    def of(cls, line: str) -> Step:
        """What `str` wrote."""
        kind, _, text = line.partition(": ")
        return cls(cast(Kind, kind), text)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


Adapted = tuple[State, Step] | None
"""The new tensors and the step, or None where this value cannot be reached."""


class Fitted(NamedTuple):
    """A model that a class of the format holds.

    Attributes:
        spec: its architecture.
        state: its tensors, by our names.
        steps: what led there, in order; none where nothing had to change.
    """

    spec: ViTSpec
    state: State
    steps: list[Step]

    @property
    def cost(self) -> tuple[int, int]:
        """The worst kind of step, then how many there are; less is better."""
        return max((1 + KINDS.index(step.kind) for step in self.steps), default=0), len(self.steps)


def fit(spec: ViTSpec, state: Mapping[str, Tensor], *capabilities: Capabilities) -> Fitted:
    """A model of which every field in one of `capabilities` has one of the values there.

    Args:
        spec: the architecture.
        state: its tensors, by our names; not changed.
        *capabilities: the classes of a format; of those that cost the same, the first is taken.

    Raises:
        CheckpointError: fields that no class can have so; those in the way to the nearest one.
    """
    best: Fitted | None = None
    in_the_way: list[str] = []
    for one in capabilities:
        found, obstacles = _fitted(spec, state, one)
        if obstacles:
            in_the_way = min(in_the_way or obstacles, obstacles, key=len)
        elif best is None or found.cost < best.cost:
            best = found
    if best is None:
        raise CheckpointError(", and ".join(in_the_way))
    return best


def _fitted(
    spec: ViTSpec, state: Mapping[str, Tensor], capabilities: Capabilities
) -> tuple[Fitted, list[str]]:
    """The model as near to one class as it comes, and a line for each field that stays as it is."""
    made, steps, obstacles = dict(state), [], []
    for field, allowed in capabilities.items():
        value = getattr(spec, field)
        if any(_same(field, value, one) for one in allowed) or not _matters(spec, field):
            continue
        for wanted in allowed:
            result = _change(field, value, wanted, spec, made)
            if result is not None:
                made, step = result
                steps.append(step)
                spec = spec.replace(**{field: wanted, **_along(field, wanted)})
                break
        else:
            obstacles.append(
                f"{field} = {value!r} has no place in it; it can hold "
                f"{' or '.join(repr(one) for one in allowed)}"
            )
    return Fitted(spec, made, steps), obstacles


def _same(field: str, left: Any, right: Any) -> bool:
    """Whether two values are one architecture; where LayerScale starts is no part of it."""
    if field == "layer_scale":
        return (left is None) == (right is None)
    return bool(left == right)


def _matters(spec: ViTSpec, field: str) -> bool:
    """Whether a field has any effect beside the others."""
    return {
        "resnet_variant": spec.stem == "resnet",
        "rope_temperature": spec.positions == "rope",
        "positions_cover_prefix": spec.positions == "learned" and spec.num_prefix_tokens > 0,
        "distilled_readout": spec.distillation_token,
        "norm_before_pool": spec.final_norm,
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


def _unit_layer_scale(spec: ViTSpec, state: State) -> Adapted:
    like = state["blocks.0.attn.proj.weight"]
    names = [f"blocks.{layer}.ls{i}.gamma" for layer in range(spec.depth) for i in (1, 2)]
    ones = {name: like.new_ones(spec.width) for name in names}
    return state | ones, Step("folded", "layer_scale: ones")


def _tabled(spec: ViTSpec, state: State) -> Adapted:
    if spec.positions == "rope":
        return None  # it turns queries and keys, and adds nothing
    rows = spec.num_prefix_tokens + spec.num_patches
    table = torch.zeros(rows, spec.width)
    if spec.positions == "sincos_1d":
        table = sincos_1d(rows, spec.width)
    elif spec.positions != "none":
        table[spec.num_prefix_tokens :] = sincos_2d(spec.grid, spec.width, spec.positions)
    made = state | {"pos_embed": table.to(state["patch_embed.proj.weight"])[None]}
    if not spec.positions_cover_prefix:
        made = _tokens_with_rows(made)
    size = " x ".join(map(str, spec.image_size))
    return made, Step("folded", f"positions: {spec.positions} as a table, for {size} pixels")


def _cover_prefix(spec: ViTSpec, state: State) -> Adapted:
    zeros = state["pos_embed"].new_zeros(1, spec.num_prefix_tokens, spec.width)
    made = state | {"pos_embed": torch.cat([zeros, state["pos_embed"]], dim=1)}
    return made, Step("folded", "pos_embed: rows of zeros for the prefix tokens")


def _uncover_prefix(spec: ViTSpec, state: State) -> Adapted:
    made = _tokens_with_rows(state)
    return made, Step("folded", "pos_embed: the rows of the prefix tokens added to the tokens")


def _tokens_with_rows(state: State) -> State:
    made, row = dict(state), 0
    for name in ("cls_token", "dist_token", "reg_token"):
        if name in made:
            rows = made[name].shape[1]
            made[name] = made[name] + state["pos_embed"][:, row : row + rows]
            row += rows
    made["pos_embed"] = state["pos_embed"][:, row:]
    return made


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
    elif spec.qk_norm or spec.positions == "rope":
        return None  # normed or turned, the key's bias is no constant any more
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


def _mean_of_heads(spec: ViTSpec, state: State) -> Adapted:
    if not spec.num_classes:
        return None
    made = dict(state)
    for kind in ("weight", "bias"):
        made[f"head.{kind}"] = 2 * state[f"head.{kind}"]
        made[f"head_dist.{kind}"] = torch.zeros_like(state[f"head_dist.{kind}"])
    return made, Step("folded", "distilled_readout: twice the class head beside one of zeros")


def read_by_both_heads(fitted: Fitted) -> Fitted:
    """For classes that have a place for one head, or for the mean of two: a model that reads its
    class head alone, beside another that is not zero, as the mean of twice that head and zero."""
    spec, state, steps = fitted
    if spec.distilled_readout != "cls" or not spec.num_classes:
        return fitted
    if not any(state[f"head_dist.{kind}"].any() for kind in ("weight", "bias")):
        return fitted
    changed = _mean_of_heads(spec, state)
    assert changed is not None
    return Fitted(spec.replace(distilled_readout="mean"), changed[0], [*steps, changed[1]])


def registers_take_their_rows(fitted: Fitted) -> Fitted:
    """For tables of positions without rows for registers: what was added to them is in them."""
    spec, state, steps = fitted
    rows = slice(1 + spec.distillation_token, spec.num_prefix_tokens)
    if not (spec.num_registers and spec.position_rows and spec.positions_cover_prefix):
        return fitted
    if not state["pos_embed"][:, rows].any():
        return fitted
    positions = state["pos_embed"].clone()
    added = state["reg_token"] + positions[:, rows]
    positions[:, rows] = 0
    step = Step("folded", "pos_embed: the rows of the registers added to the registers")
    return Fitted(spec, {**state, "pos_embed": positions, "reg_token": added}, [*steps, step])


def _class_and_mean(spec: ViTSpec, state: State) -> Adapted:
    reads = _reads_pooled(spec)
    if spec.pooling not in ("cls", "mean") or not (reads and spec.norm_before_pool):
        return None
    if spec.distillation_token or not spec.class_token:
        return None
    weight = state[reads]
    halves = [weight, torch.zeros_like(weight)]
    made = torch.cat(halves if spec.pooling == "cls" else halves[::-1], dim=1)
    other = "mean" if spec.pooling == "cls" else "class token"
    return state | {reads: made}, Step("folded", f"pooling: zeros for the {other}")


def _class_alone(spec: ViTSpec, state: State) -> Adapted:
    reads = _reads_pooled(spec)
    if spec.pooling != "cls_mean" or not reads or not spec.norm_before_pool:
        return None
    token, mean = state[reads].chunk(2, dim=1)
    if mean.any():
        return None
    return state | {reads: token}, Step("folded", "pooling: zeros for the mean left out")


def _reads_pooled(spec: ViTSpec) -> str | None:
    """The matrix that reads what pooling gives."""
    head = "head.weight" if spec.num_classes else None
    return "pre_logits.fc.weight" if spec.representation_width else head


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
    ("layer_scale", 1.0): _unit_layer_scale,
    ("positions", "learned"): _tabled,
    ("positions_cover_prefix", True): _cover_prefix,
    ("positions_cover_prefix", False): _uncover_prefix,
    ("qkv_bias", True): _with_qkv_bias,
    ("qkv_bias", "no_key"): _without_key_bias,
    ("qkv_bias", False): _without_qkv_bias,
    ("patch_bias", True): _with_patch_bias,
    ("distillation_token", False): _without_distillation,
    ("distilled_readout", "mean"): _mean_of_heads,
    ("pooling", "cls_mean"): _class_and_mean,
    ("pooling", "cls"): _class_alone,
    ("head_width", None): _head_width,
    ("mlp", "swiglu_packed"): _packed,
    ("mlp", "swiglu_split"): _split,
    ("norm_before_pool", True): _norm_moved,
    ("norm_before_pool", False): _norm_moved,
}
"""(field, value wanted) -> how it is reached."""

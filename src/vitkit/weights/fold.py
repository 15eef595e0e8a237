"""Change one field of a spec, and the tensors with it: exactly where possible.

`folded` steps compute the same function with other numbers, up to rounding; `approximated` and
`lost` ones do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from vitkit.models.embedding import sincos_1d, sincos_2d
from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import State, Step, double_class_head

QKV_BIASES = ("qkv.bias", "qkv.q_bias", "qkv.v_bias")
Change: TypeAlias = tuple[State, Step] | None
"""The new tensors and the step, or None where this value cannot be reached."""


def change_field(field: str, wanted: Any, spec: ViTSpec, state: State) -> Change:
    """Return the tensors of a model with another value of a field.

    Args:
        field: field of `ViTSpec`.
        wanted: the value.
        spec: the architecture so far.
        state: its tensors, by our names; not changed.

    Returns:
        The new tensors and the step, or None where no change leads to this value.
    """
    value = getattr(spec, field)
    if field == "stem" and {value, wanted} == {"convolution", "linear"}:
        return state, Step("folded", "stem: the same kernel, as a convolution or as a matrix")
    if field == "activation" and {value, wanted} <= {"gelu", "gelu_tanh", "quick_gelu"}:
        return state, Step("approximated", f"activation {value} (becomes {wanted})")
    if field == "resnet_variant" and {value, wanted} == {"published", "timm"}:
        return state, Step("approximated", f"resnet_variant: epsilons of {wanted}, not of {value}")
    if field == "norm_eps":
        return state, Step("approximated", f"norm_eps {value:g} (becomes {wanted:g})")
    change = CHANGES.get((field, wanted))
    if change is None:
        return None
    return change(spec, state)


def _fold_layer_scale(spec: ViTSpec, state: State) -> Change:
    """Multiply LayerScale into the matrix before it: gamma * (W x + b) = (gamma W) x + gamma b."""
    if spec.block == "res_post_norm":
        return None  # a norm is between the matrix and the scale
    folded = {name: tensor for name, tensor in state.items() if not name.endswith(".gamma")}
    for layer in range(spec.depth):
        for scale, matrix in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
            block = f"blocks.{layer}."
            gamma = state[f"{block}{scale}.gamma"]
            weight, bias = f"{block}{matrix}.weight", f"{block}{matrix}.bias"
            folded[weight] = scaled_rows(gamma, state[weight])
            folded[bias] = scaled_rows(gamma, state[bias])
    return folded, Step("folded", "layer_scale: multiplied into attn.proj and mlp.fc2")


def scaled_rows(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight (or the bias) of a layer with a factor for each output: s * (W x + b).

    Args:
        scale: s (D,).
        weight: W (D, E), or b (D,).
    """
    return (scale[:, None] if weight.ndim == 2 else scale) * weight


def _unit_layer_scale(spec: ViTSpec, state: State) -> Change:
    like = state["blocks.0.attn.proj.weight"]  # for dtype and device
    names = [f"blocks.{layer}.ls{i}.gamma" for layer in range(spec.depth) for i in (1, 2)]
    ones = {name: like.new_ones(spec.width) for name in names}
    return state | ones, Step("folded", "layer_scale: ones")


def _tabled(spec: ViTSpec, state: State) -> Change:
    """Write computed positions into a table, as for learned ones."""
    if spec.positions == "rope":
        return None  # rotary positions turn queries and keys, and add nothing
    # Computed positions leave prefix tokens alone, but for sincos_1d, which numbers them too.
    rows = spec.num_prefix_tokens + spec.num_patches
    table = torch.zeros(rows, spec.width)
    if spec.positions == "sincos_1d":
        table = sincos_1d(rows, spec.width)
    elif spec.positions != "none":
        table[spec.num_prefix_tokens :] = sincos_2d(spec.grid, spec.width, spec.positions)
    tabled = state | {"pos_embed": table.to(state["patch_embed.proj.weight"])[None]}
    if not spec.positions_cover_prefix:
        tabled = _tokens_with_rows(tabled)
    size = " x ".join(map(str, spec.image_size))
    return tabled, Step("folded", f"positions: {spec.positions} as a table, for {size} pixels")


def _cover_prefix(spec: ViTSpec, state: State) -> Change:
    zeros = state["pos_embed"].new_zeros(1, spec.num_prefix_tokens, spec.width)
    positions = torch.cat([zeros, state["pos_embed"]], dim=1)
    step = Step("folded", "pos_embed: rows of zeros for the prefix tokens")
    return state | {"pos_embed": positions}, step


def _uncover_prefix(spec: ViTSpec, state: State) -> Change:
    step = Step("folded", "pos_embed: the rows of the prefix tokens added to the tokens")
    return _tokens_with_rows(state), step


def _tokens_with_rows(state: State) -> State:
    """Add the position rows of prefix tokens to the tokens, and remove those rows."""
    changed = dict(state)
    row = 0
    for name in ("cls_token", "dist_token", "reg_token"):
        if name in state:
            count = state[name].shape[1]
            changed[name] = state[name] + state["pos_embed"][:, row : row + count]
            row += count
    changed["pos_embed"] = state["pos_embed"][:, row:]
    return changed


def _change_qkv_bias(wanted: Any, spec: ViTSpec, state: State) -> Change:
    """Give query, key and value one bias, a bias without the key's part, or none.

    The key's part adds one constant to all logits of a softmax, unless keys are normalised or
    rotated.
    """
    changed = {name: tensor for name, tensor in state.items() if not name.endswith(QKV_BIASES)}
    any_bias = False
    for layer in range(spec.depth):
        name = f"blocks.{layer}.attn.qkv"
        zeros = state[f"{name}.weight"].new_zeros(spec.attention_width)
        query = state.get(f"{name}.q_bias", zeros)
        key, value = zeros, state.get(f"{name}.v_bias", zeros)
        if spec.qkv_bias is True:
            query, key, value = state[f"{name}.bias"].chunk(3)
        any_bias = any_bias or any(bool(part.any()) for part in (query, key, value))
        if wanted is True:
            changed[f"{name}.bias"] = torch.cat([query, key, value])
        elif wanted == "no_key":
            changed |= {f"{name}.q_bias": query, f"{name}.v_bias": value}
    if wanted is True:
        return changed, Step("folded", "qkv_bias: zeros where there was none")
    if wanted == "no_key":
        if spec.qkv_bias is True and (spec.qk_norm or spec.positions == "rope"):
            return None
        return changed, Step("folded", "qkv_bias: the key's has no effect and was left out")
    if any_bias:
        return changed, Step("lost", "qkv_bias: the biases of query, key and value")
    return changed, Step("folded", "qkv_bias: it was all zeros")


def _with_patch_bias(spec: ViTSpec, state: State) -> Change:
    bias = state["patch_embed.proj.weight"].new_zeros(spec.width)
    return state | {"patch_embed.proj.bias": bias}, Step("folded", "patch_bias: zeros")


def _without_distillation(spec: ViTSpec, state: State) -> Change:
    removed = ("dist_token", "head_dist.weight", "head_dist.bias")
    changed = {name: tensor for name, tensor in state.items() if name not in removed}
    if spec.positions_cover_prefix and "pos_embed" in changed:
        positions = state["pos_embed"]
        # Row 1 belongs to the distillation token.
        changed["pos_embed"] = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
    return changed, Step("lost", "distillation_token: the token, its position and its head")


def _mean_of_heads(spec: ViTSpec, state: State) -> Change:
    if spec.num_classes:
        return double_class_head(state)
    return None


def _class_and_mean(spec: ViTSpec, state: State) -> Change:
    """Widen the matrix that reads class token or mean, with zeros for the other."""
    name = _reads_pooled(spec)
    if spec.pooling not in ("cls", "mean") or name is None or not spec.norm_before_pool:
        return None
    if spec.distillation_token or not spec.class_token:
        return None  # `cls_mean` needs a class token, and reads one head
    weight = state[name]
    # (K, D) -> (K, 2 D): the pooled vector is class token and mean side by side.
    zeros = torch.zeros_like(weight)
    if spec.pooling == "cls":
        step = Step("folded", "pooling: zeros for the mean")
        return state | {name: torch.cat([weight, zeros], dim=1)}, step
    step = Step("folded", "pooling: zeros for the class token")
    return state | {name: torch.cat([zeros, weight], dim=1)}, step


def _class_alone(spec: ViTSpec, state: State) -> Change:
    """Cut the half that reads the mean off the head, if it is zero."""
    name = _reads_pooled(spec)
    if spec.pooling != "cls_mean" or name is None or not spec.norm_before_pool:
        return None
    # (K, 2 D) -> two of (K, D).
    token, mean = state[name].chunk(2, dim=1)
    if mean.any():
        return None
    return state | {name: token}, Step("folded", "pooling: zeros for the mean left out")


def _reads_pooled(spec: ViTSpec) -> str | None:
    """Return the name of the matrix that reads the pooled token, or None without a head."""
    if spec.representation_width:
        return "pre_logits.fc.weight"
    if spec.num_classes:
        return "head.weight"
    return None


def _head_width(spec: ViTSpec, state: State) -> Change:
    if spec.num_heads * (spec.head_width or 0) != spec.width:
        return None
    return state, Step("folded", "head_width: it is width / num_heads")


def _packed(spec: ViTSpec, state: State) -> Change:
    """Stack gate and value of a SwiGLU into one matrix."""
    if spec.mlp != "swiglu_split":
        return None
    changed = dict(state)
    for gate_name in [name for name in state if ".fc1_g." in name]:
        value = changed.pop(gate_name.replace("fc1_g", "fc1_x"))  # (M, D)
        gate = changed.pop(gate_name)
        changed[gate_name.replace("fc1_g", "fc1")] = torch.cat([gate, value])  # (2 M, D)
    return changed, Step("folded", "mlp: gate and value in one matrix")


def _split(spec: ViTSpec, state: State) -> Change:
    """Split a SwiGLU's matrix into gate and value."""
    if spec.mlp != "swiglu_packed":
        return None
    changed = dict(state)
    for name in [name for name in state if ".mlp.fc1." in name]:
        gate, value = changed.pop(name).chunk(2)
        changed[name.replace("fc1", "fc1_g")] = gate
        changed[name.replace("fc1", "fc1_x")] = value
    return changed, Step("folded", "mlp: gate and value in separate matrices")


def _norm_moved(spec: ViTSpec, state: State) -> Change:
    """Move the last norm to the other side of pooling, where pooling takes one token."""
    if spec.pooling != "cls" or not spec.final_norm:
        return None  # the norm of a mean is not the mean of norms
    old, new = ("norm.", "fc_norm.") if spec.norm_before_pool else ("fc_norm.", "norm.")
    changed: State = {}
    for name, tensor in state.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
        changed[name] = tensor
    return changed, Step("folded", "norm_before_pool: the same for a class token")


CHANGES: dict[tuple[str, Any], Callable[[ViTSpec, State], Change]] = {
    ("layer_scale", None): _fold_layer_scale,
    ("layer_scale", 1.0): _unit_layer_scale,
    ("positions", "learned"): _tabled,
    ("positions_cover_prefix", True): _cover_prefix,
    ("positions_cover_prefix", False): _uncover_prefix,
    ("qkv_bias", True): partial(_change_qkv_bias, True),
    ("qkv_bias", "no_key"): partial(_change_qkv_bias, "no_key"),
    ("qkv_bias", False): partial(_change_qkv_bias, False),
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
"""(field, wanted value) -> the function that changes the tensors."""

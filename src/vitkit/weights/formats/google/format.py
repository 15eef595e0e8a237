"""Google's `.npz` files: the paper's, AugReg's, SAM's and big_vision's, hybrids among them.

Kernels lie as Flax has them: a dense one (in, out), a head's [D, H, h], a convolution's HWIO. The
table has the names of google-research/vision_transformer; `google_layouts` brings others to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.spec import STAGE_STRIDES, ViTSpec
from vitkit.weights.converting.fold import Capabilities
from vitkit.weights.files.open import Header
from vitkit.weights.formats.format import CODE, Bundle, Format, Inferred
from vitkit.weights.formats.google.layouts import (
    BLOCK,
    CONVOLUTION,
    GROUPS,
    OUT,
    PATCH_POSITIONS,
    PATCHES,
    POSITIONS,
    TABLE,
    big_vision_name,
    heads,
    one_layout,
    prefix_of,
)
from vitkit.weights.formats.infer_spec import HALF, depth_of, finish, image_size
from vitkit.weights.formats.key_table import TRANSPOSED, Row, Table, Transform, row

OURS, POOL = "blocks.{i}.", "MAPHead_0/"
ATTENTION, MLP = "MultiHeadDotProductAttention_{n}/", "MlpBlock_{n}/Dense_{m}/"
SQUASHED = HALF.replace(interpolation="bilinear", fit="squash", crop_ratio=1.0)
CROPPED = SQUASHED.replace(fit="crop", crop_ratio=0.875)
"""vit_jax and SigLIP bring images to a square; big_vision's classifiers cut 224 out of 256."""


def detect(header: Header) -> bool:
    """`embedding/kernel` and `Transformer/encoder_norm`, at the root or after a known prefix."""
    return prefix_of(header.shapes) is not None


def infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Shapes say the whole architecture, heads included: a query's kernel is [D, H, h].

    Whether positions cover the class token is in their name; no table at all is big_vision's
    `sincos2d`. Neither class token nor attention pool: the mean of the patches.
    """
    shapes = header.shapes
    block = BLOCK.format(i=0)
    width, num_heads, head_width = shapes[f"{block}{ATTENTION.format(n=1)}query/kernel"]
    if overrides.get("num_heads", num_heads) != num_heads:
        raise CheckpointError(
            f"num_heads {overrides['num_heads']} is asked for; the kernels have {num_heads} heads"
        )
    representation, head = (shapes.get(f"{name}/kernel") for name in ("pre_logits", "head"))
    mapped, token = f"{POOL}probe" in shapes, "cls" in shapes
    fields = {
        **_images(shapes, overrides, token),
        "num_classes": head[-1] if head else 0,
        "width": width,
        "depth": depth_of(shapes, BLOCK.format(i=r"(\d+)")),
        "num_heads": num_heads,
        "head_width": None if num_heads * head_width == width else head_width,
        "mlp_width": shapes[f"{block}{MLP.format(n=3, m=0)}kernel"][-1],
        "class_token": token,
        "pooling": "map" if mapped else "cls" if token else "mean",
        "representation_width": representation[-1] if representation else None,
        "norm_eps": 1e-6,
        "activation": "gelu_tanh",
        "resnet_variant": "published",
    }
    usual = {"norm_eps", "activation", "resnet_variant", "position_resampling", "preprocess"}
    usual |= set() if mapped or token else {"pooling"}
    usual |= set() if fields["positions"] == "learned" else {"positions"}
    usual |= set() if _states_grid(shapes) else {"image_size"}
    squashed = POSITIONS in shapes or mapped or fields["stem"] == "resnet"
    preprocess = SQUASHED if squashed else CROPPED
    return finish(fields, overrides, preprocess, usual=usual)


def _states_grid(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the table of positions has an axis for rows and one for columns, as FlexiViT's."""
    table = shapes.get(PATCH_POSITIONS, (1,))
    return len(shapes["embedding/kernel"]) == 2 and table[0] > 1


def _images(
    shapes: Mapping[str, tuple[int, ...]], overrides: Mapping[str, Any], token: bool
) -> dict[str, Any]:
    """The fields of stem and positions."""
    kernel, covers = shapes["embedding/kernel"], POSITIONS in shapes
    table = shapes.get(POSITIONS if covers else PATCH_POSITIONS)
    root, layers = shapes.get("conv_root/kernel"), _layers(shapes)
    flexible = len(kernel) == 2
    channels = int(overrides.get("in_channels", 3)) if flexible else (root or kernel)[2]
    stride = STAGE_STRIDES[len(layers)] if root else 1
    side = round((kernel[0] / channels) ** 0.5)
    patch = (side, side) if flexible else (kernel[0] * stride, kernel[1] * stride)
    fields = {
        "patch_size": patch,
        "in_channels": channels,
        "stem": "resnet" if root else "convolution",
        "resnet_layers": layers,
        "positions": "learned" if table else "sincos_2d",
        "position_resampling": "bilinear_antialias" if flexible else "bilinear_aligned",
    }
    asked = overrides.get("image_size")
    if table is None:
        usual = tuple(max(224 // pixels, 1) * pixels for pixels in patch)
        return fields | {"image_size": usual if asked is None else asked}
    rows = table[0] * table[1]
    if flexible and table[0] > 1 and asked is None:
        asked = (table[0] * patch[0], table[1] * patch[1])
    size = image_size(rows, int(covers), patch, asked)
    return fields | {"image_size": size} | ({"positions_cover_prefix": covers} if token else {})


def _layers(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The units of each stage of the ResNet, which are numbered from 1."""
    layers: list[int] = []
    while f"block{len(layers) + 1}/unit1/conv1/kernel" in shapes:
        start = f"block{len(layers) + 1}/unit"
        layers.append(sum(n.startswith(start) and n.endswith("/conv1/kernel") for n in shapes))
    return tuple(layers)


def norm(theirs: str, ours: str, how: Transform | None = None) -> list[Row]:
    """`scale` and `bias` of a norm; a GroupNorm's have four axes."""
    names = (("scale", "weight"), ("bias", "bias"))
    return [row(theirs + a, f"{ours}.{b}", *([how] if how else [])) for a, b in names]


def dense(theirs: str, ours: str, how: Transform = TRANSPOSED) -> list[Row]:
    """`kernel` and `bias` of a layer."""
    return [row(f"{theirs}kernel", f"{ours}.weight", how), row(f"{theirs}bias", f"{ours}.bias")]


def attention(theirs: str, ours: str, fused: Mapping[str, tuple[str, ...]]) -> list[Row]:
    """Projections into heads, as our layers fuse them, and the one out of them."""
    rows = [
        row([f"{theirs}{part}/{a}" for part in parts], f"{ours}{name}.{b}", heads(len(parts)))
        for name, parts in fused.items()
        for a, b in (("kernel", "weight"), ("bias", "bias"))
    ]
    return [*rows, *dense(f"{theirs}out/", f"{ours}proj", OUT)]


def mlp(theirs: str, ours: str, number: int) -> list[Row]:
    """The two layers of an MLP."""
    names = [(theirs + MLP.format(n=number, m=m), f"{ours}mlp.fc{m + 1}") for m in (0, 1)]
    return [line for a, b in names for line in dense(a, b)]


def resnet(layers: tuple[int, ...]) -> list[Row]:
    """The stem of a hybrid; without stages its root is the whole."""
    ours = "patch_embed.backbone."
    root = f"{ours}stem." if layers else ours
    rows = [row("conv_root/kernel", f"{root}conv.weight", CONVOLUTION)]
    rows += norm("gn_root/", f"{root}norm", GROUPS)
    for s, depth in enumerate(layers):
        for u in range(depth):
            unit, block = f"block{s + 1}/unit{u + 1}/", f"{ours}stages.{s}.blocks.{u}."
            parts = [(str(n), f"conv{n}", f"norm{n}") for n in (1, 2, 3)]
            for part, conv, group in [*parts, ("_proj", "downsample.conv", "downsample.norm")]:
                rows.append(row(f"{unit}conv{part}/kernel", f"{block}{conv}.weight", CONVOLUTION))
                rows += norm(f"{unit}gn{part}/", block + group, GROUPS)
    return rows


def table(spec: ViTSpec) -> Table:
    """The names of 2021; big_vision's attention pool by its own."""
    covers = spec.class_token and spec.positions_cover_prefix
    first, pool = ATTENTION.format(n=1), POOL + ATTENTION.format(n=0)
    return Table((
        row("cls", "cls_token"),
        row(POSITIONS if covers else PATCH_POSITIONS, "pos_embed", TABLE),
        *(resnet(spec.resnet_layers) if spec.stem == "resnet" else []),
        *dense("embedding/", "patch_embed.proj", PATCHES),
        *norm(f"{BLOCK}LayerNorm_0/", f"{OURS}norm1"),
        *attention(BLOCK + first, f"{OURS}attn.", {"qkv": ("query", "key", "value")}),
        *norm(f"{BLOCK}LayerNorm_2/", f"{OURS}norm2"),
        *mlp(BLOCK, OURS, 3),
        *norm("Transformer/encoder_norm/", "norm"),
        row(f"{POOL}probe", "attn_pool.latent"),
        *attention(pool, "attn_pool.", {"q": ("query",), "kv": ("key", "value")}),
        *norm(f"{POOL}LayerNorm_0/", "attn_pool.norm"),
        *mlp(POOL, "attn_pool.", 0),
        *dense("pre_logits/", "pre_logits.fc"),
        *dense("head/", "head"),
    ))  # fmt: skip


FIXED: dict[str, Any] = {
    "resnet_variant": ("published",),
    "patch_bias": (True,), "distillation_token": (False,), "num_registers": (0,),
    "positions": ("learned", "sincos_2d"), "embedding_norm": (False,), "block": ("pre_norm",),
    "norm": ("layer",), "norm_eps": (1e-6,), "activation": ("gelu_tanh",), "mlp": ("plain",),
    "qkv_bias": (True,), "qk_norm": (False,), "layer_scale": (None,), "head_width": (None,),
    "final_norm": (True,), "norm_before_pool": (True,),
}  # fmt: skip
"""What vit_jax and big_vision compute; any value of the fields that no class names fits."""
HYBRID: dict[str, Any] = {
    **FIXED, "stem": ("resnet",), "positions": ("learned",), "positions_cover_prefix": (True,),
}  # fmt: skip
HOLDS: tuple[Capabilities, ...] = tuple(
    {**kind, "class_token": (token,), "pooling": poolings}
    for kind, token, poolings in (
        ({**FIXED, "stem": ("convolution", "linear")}, True, ("cls",)),
        ({**FIXED, "stem": ("convolution", "linear")}, False, ("mean", "map")),
        (HYBRID, True, ("cls",)),
        (HYBRID, False, ("mean",)),
    )
)
"""With a class token and without; hybrids, which vit_jax alone has, likewise."""


def write(bundle: Bundle) -> dict[str, FileWriter]:
    """`model.npz`, uncompressed: by vit_jax's names, or by big_vision's where it must be.

    big_vision alone has positions that do not cover the class token, sines, and attention pooling;
    vit_jax alone has hybrids.

    Raises:
        CheckpointError: a class token beside another pooling, or a hybrid with big_vision's ways.
    """
    spec = bundle.spec
    if spec.class_token and spec.pooling != "cls":
        raise CheckpointError(f"google: pooling {spec.pooling!r} goes without a class token there")
    covered = spec.class_token and spec.positions_cover_prefix and spec.positions == "learned"
    hybrid = spec.stem == "resnet"
    if hybrid and spec.pooling == "map":
        raise CheckpointError("google: a hybrid has no attention pool there")
    if hybrid and (spec.positions != "learned" or (spec.class_token and not covered)):
        raise CheckpointError("google: a hybrid's positions are learned and cover the class token")
    name_of = _classic if covered or hybrid else big_vision_name
    arrays = {name_of(name): _array(tensor) for name, tensor in bundle.tensors.items()}

    def write_arrays(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, **arrays)

    return {"model.npz": FileWriter(sum(array.nbytes for array in arrays.values()), write_arrays)}


def _array(tensor: Tensor) -> Any:
    """As numpy has it; bfloat16, which it has not, as two bytes without a meaning."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()


def _classic(name: str) -> str:
    return POSITIONS if name == PATCH_POSITIONS else name


FORMAT = Format(
    "google", detect, one_layout, infer, table, HOLDS, write, CODE | {"resnet_variant", "positions"}
)

"""jeonsworld's `ViT-pytorch`: `state_dict()` files such as `cifar10_checkpoint.bin`.

Its classes mirror the first JAX release: query, key and value are three layers, and the hybrid
R50 stem has three stages with padding, epsilons and a shortcut norm of its own.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.spec import STAGE_STRIDES, ViTSpec
from vitkit.weights.formats.format import (
    CLASS_TOKEN_ONLY,
    FIRST_PAPER,
    FIXED_BY_CODE,
    Capabilities,
    Format,
    one_file,
)
from vitkit.weights.formats.infer_spec import (
    HALF_MEAN,
    OPEN_FIELDS,
    Inferred,
    depth_of,
    finish,
    image_size,
    usual_heads,
)
from vitkit.weights.formats.key_table import Row, Table, row, stacked
from vitkit.weights.tensor_file import Header

_EMBEDDINGS = "transformer.embeddings."
_THEIRS = "transformer.encoder.layer.{i}."
_OURS = "blocks.{i}."
_RESNET = f"{_EMBEDDINGS}hybrid_model."
_OUR_RESNET = "patch_embed.backbone."
_STAGES = 3
_PREPROCESS = HALF_MEAN.replace(interpolation="bilinear", fit="squash", crop_ratio=1.0)


def _detect(header: Header) -> bool:
    """Return True if blocks have an `attention_norm`."""
    return f"{_THEIRS.format(i=0)}attention_norm.weight" in header.shapes


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer everything from shapes, except number of heads, epsilon and activation."""
    shapes = header.shapes
    width, channels, *kernel = shapes[f"{_EMBEDDINGS}patch_embeddings.weight"]  # (D, C, P, P)
    stem: dict[str, Any] = {}
    stride = 1
    root = shapes.get(f"{_RESNET}root.conv.weight")
    if root is not None:
        # Every unit of a stage has one `conv1`.
        units = [f"{_RESNET}body.block{stage}.unit*.conv1.weight" for stage in (1, 2, 3)]
        stem = {
            "stem": "resnet",
            "resnet_layers": tuple(len(fnmatch.filter(shapes, pattern)) for pattern in units),
            "resnet_variant": "jeonsworld",
        }
        # The kernel of a hybrid covers cells of the ResNet's output, `stride` pixels each.
        channels = root[1]
        stride = STAGE_STRIDES[_STAGES]
    patch = (kernel[0] * stride, kernel[1] * stride)
    rows = shapes[f"{_EMBEDDINGS}position_embeddings"][1]  # (1, 1 + N, D)
    fields = {
        "image_size": image_size(rows, 1, patch, overrides.get("image_size")),
        "patch_size": patch,
        "in_channels": channels,
        "num_classes": shapes.get("head.weight", (0,))[0],
        "width": width,
        "depth": depth_of(shapes, r"transformer\.encoder\.layer\.(\d+)\."),
        "num_heads": usual_heads(width),
        "mlp_width": shapes[f"{_THEIRS.format(i=0)}ffn.fc1.weight"][0],
        "position_resampling": "bilinear_aligned",
        **stem,
    }
    return finish(fields, overrides, _PREPROCESS, usual=OPEN_FIELDS)


def _table(spec: ViTSpec) -> Table:
    """Return a renaming; query, key and value are stacked into our `qkv`.

    Raises:
        CheckpointError: a ResNet of other than three stages, or of another variant.
    """
    if spec.stem == "resnet" and spec.resnet_variant != "jeonsworld":
        raise CheckpointError(
            f"resnet_variant {spec.resnet_variant!r} cannot be stored: its ResNet pads and "
            "normalises differently ('jeonsworld')"
        )
    if spec.stem == "resnet" and len(spec.resnet_layers) != _STAGES:
        raise CheckpointError(
            f"resnet_layers {spec.resnet_layers} cannot be stored: its ResNet has {_STAGES} stages"
        )
    # Three layers of (D, D) become the rows of one (3 D, D).
    projections = [f"{_THEIRS}attn.{name}.{{p}}" for name in ("query", "key", "value")]
    rows = (
        row(f"{_EMBEDDINGS}cls_token", "cls_token"),
        row(f"{_EMBEDDINGS}position_embeddings", "pos_embed"),
        *_resnet_rows(spec.resnet_layers),
        row(f"{_EMBEDDINGS}patch_embeddings.{{p}}", "patch_embed.proj.{p}"),
        row(_THEIRS + "attention_norm.{p}", _OURS + "norm1.{p}"),
        row(projections, _OURS + "attn.qkv.{p}", stacked(3)),
        row(_THEIRS + "attn.out.{p}", _OURS + "attn.proj.{p}"),
        row(_THEIRS + "ffn_norm.{p}", _OURS + "norm2.{p}"),
        row(_THEIRS + "ffn.fc1.{p}", _OURS + "mlp.fc1.{p}"),
        row(_THEIRS + "ffn.fc2.{p}", _OURS + "mlp.fc2.{p}"),
        row("transformer.encoder.encoder_norm.{p}", "norm.{p}"),
        row("head.{p}", "head.{p}"),
    )
    return Table(rows)


def _resnet_rows(layers: tuple[int, ...]) -> list[Row]:
    """Return the stem's rows; theirs count stages and units from 1. Without a stem none applies."""
    rows = [
        row(f"{_RESNET}root.conv.weight", f"{_OUR_RESNET}stem.conv.weight"),
        row(f"{_RESNET}root.gn.{{p}}", f"{_OUR_RESNET}stem.norm.{{p}}"),
    ]
    for stage, depth in enumerate(layers):
        for unit in range(depth):
            theirs = f"{_RESNET}body.block{stage + 1}.unit{unit + 1}."
            ours = f"{_OUR_RESNET}stages.{stage}.blocks.{unit}."
            rows.append(row(f"{theirs}downsample.weight", f"{ours}downsample.conv.weight"))
            rows.append(row(f"{theirs}gn_proj.{{p}}", f"{ours}downsample.norm.{{p}}"))
            for k in (1, 2, 3):
                rows.append(row(f"{theirs}conv{k}.weight", f"{ours}conv{k}.weight"))
                rows.append(row(f"{theirs}gn{k}.{{p}}", f"{ours}norm{k}.{{p}}"))
    return rows


_CAPABILITIES: Capabilities = {
    **FIRST_PAPER,
    **CLASS_TOKEN_ONLY,
    "stem": ("convolution", "linear", "resnet"),
    "representation_width": (None,),
}
JEONSWORLD = Format(
    name="jeonsworld",
    detect=_detect,
    infer=_infer,
    table=_table,
    capabilities=(_CAPABILITIES,),
    write=one_file,
    fixed=FIXED_BY_CODE,
)

"""jeonsworld's `ViT-pytorch`: `state_dict()` files such as `cifar10_checkpoint.bin`.

Its classes mirror the first JAX release: query, key and value are three layers, and the hybrid
R50 stem has three stages with padding, epsilons and a shortcut norm of its own.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.spec import STAGE_STRIDES, ViTSpec
from vitkit.weights.files.open import Header, Source
from vitkit.weights.formats.format import (
    CODE,
    PLAIN,
    SINGLE,
    Bundle,
    Format,
    Inferred,
    safetensors_file,
)
from vitkit.weights.formats.infer_spec import HALF, depth_of, finish, image_size, usual_heads
from vitkit.weights.formats.key_table import Row, Table, row, stacked

EMBEDDINGS, BLOCK, OURS = (
    "transformer.embeddings.", "transformer.encoder.layer.{i}.", "blocks.{i}.",
)  # fmt: skip
RESNET, STEM = f"{EMBEDDINGS}hybrid_model.", "patch_embed.backbone."
STAGES = 3
PREPROCESS = HALF.replace(interpolation="bilinear", fit="squash", crop_ratio=1.0)


def detect(header: Header) -> bool:
    """Its blocks have an `attention_norm`."""
    return f"{BLOCK.format(i=0)}attention_norm.weight" in header.shapes


def prepare(source: Source) -> Source:
    """There is one version of the names."""
    return source


def infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Everything but heads, epsilon and activation follows from shapes."""
    shapes = header.shapes
    width, channels, *cells = shapes[f"{EMBEDDINGS}patch_embeddings.weight"]
    hybrid: dict[str, Any] = {}
    stride = 1
    if root := shapes.get(f"{RESNET}root.conv.weight"):
        layers = tuple(
            len(fnmatch.filter(shapes, f"{RESNET}body.block{stage}.unit*.conv1.weight"))
            for stage in range(1, STAGES + 1)
        )
        hybrid = {"stem": "resnet", "resnet_layers": layers, "resnet_variant": "jeonsworld"}
        channels, stride = root[1], STAGE_STRIDES[STAGES]
    patch = (cells[0] * stride, cells[1] * stride)
    rows = shapes[f"{EMBEDDINGS}position_embeddings"][1]
    fields = {
        "image_size": image_size(rows, 1, patch, overrides.get("image_size")),
        "patch_size": patch,
        "in_channels": channels,
        "num_classes": shapes.get("head.weight", (0,))[0],
        "width": width,
        "depth": depth_of(shapes, r"transformer\.encoder\.layer\.(\d+)\."),
        "num_heads": usual_heads(width),
        "mlp_width": shapes[f"{BLOCK.format(i=0)}ffn.fc1.weight"][0],
        "position_resampling": "bilinear_aligned",
        **hybrid,
    }
    usual = {"num_heads", "norm_eps", "activation", "image_size", "position_resampling",
             "preprocess"}  # fmt: skip
    return finish(fields, overrides, PREPROCESS, usual=usual)


def table(spec: ViTSpec) -> Table:
    """Query, key and value one under the other are our `qkv`; the rest is a rename.

    Raises:
        CheckpointError: a ResNet of other than three stages, or of another variant.
    """
    if spec.stem == "resnet" and spec.resnet_variant != "jeonsworld":
        raise CheckpointError(
            f"resnet_variant {spec.resnet_variant!r} has no place in it: its ResNet pads and "
            f"normalises otherwise ('jeonsworld')"
        )
    if spec.stem == "resnet" and len(spec.resnet_layers) != STAGES:
        raise CheckpointError(
            f"resnet_layers {spec.resnet_layers} has no place in it: its ResNet has {STAGES} stages"
        )
    return Table((
        row(f"{EMBEDDINGS}cls_token", "cls_token"),
        row(f"{EMBEDDINGS}position_embeddings", "pos_embed"),
        *_resnet_rows(spec.resnet_layers),
        row(f"{EMBEDDINGS}patch_embeddings.{{p}}", "patch_embed.proj.{p}"),
        row(BLOCK + "attention_norm.{p}", OURS + "norm1.{p}"),
        row(
            [f"{BLOCK}attn.{name}.{{p}}" for name in ("query", "key", "value")],
            OURS + "attn.qkv.{p}",
            stacked(3),
        ),
        row(BLOCK + "attn.out.{p}", OURS + "attn.proj.{p}"),
        row(BLOCK + "ffn_norm.{p}", OURS + "norm2.{p}"),
        row(BLOCK + "ffn.fc1.{p}", OURS + "mlp.fc1.{p}"),
        row(BLOCK + "ffn.fc2.{p}", OURS + "mlp.fc2.{p}"),
        row("transformer.encoder.encoder_norm.{p}", "norm.{p}"),
        row("head.{p}", "head.{p}"),
    ))  # fmt: skip


def _resnet_rows(layers: tuple[int, ...]) -> list[Row]:
    """The stem's rows; theirs count stages and units from 1. Without a stem none applies."""
    rows = [
        row(f"{RESNET}root.conv.weight", f"{STEM}stem.conv.weight"),
        row(f"{RESNET}root.gn.{{p}}", f"{STEM}stem.norm.{{p}}"),
    ]
    for stage, depth in enumerate(layers):
        for unit in range(depth):
            theirs = f"{RESNET}body.block{stage + 1}.unit{unit + 1}."
            ours = f"{STEM}stages.{stage}.blocks.{unit}."
            rows.append(row(f"{theirs}downsample.weight", f"{ours}downsample.conv.weight"))
            rows.append(row(f"{theirs}gn_proj.{{p}}", f"{ours}downsample.norm.{{p}}"))
            for k in (1, 2, 3):
                rows.append(row(f"{theirs}conv{k}.weight", f"{ours}conv{k}.weight"))
                rows.append(row(f"{theirs}gn{k}.{{p}}", f"{ours}norm{k}.{{p}}"))
    return rows


FIXED: dict[str, Any] = {
    **PLAIN, **SINGLE, "stem": ("convolution", "linear", "resnet"), "representation_width": (None,),
}  # fmt: skip
"""What its class computes; any value of the other fields fits."""


def write(bundle: Bundle) -> dict[str, FileWriter]:
    """`model.safetensors` with the names of its `VisionTransformer`'s `state_dict()`."""
    return {"model.safetensors": safetensors_file(bundle)}


FORMAT = Format("jeonsworld", detect, prepare, infer, table, (FIXED,), write, CODE)

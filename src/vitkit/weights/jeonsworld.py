"""jeonsworld's `ViT-pytorch`: `state_dict()` files such as `cifar10_checkpoint.bin`.

Its classes mirror the first JAX release: query, key and value are three layers, and the hybrid
R50 stem has three stages with padding, epsilons and a shortcut norm of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.spec import STAGE_STRIDES, ViTSpec
from vitkit.weights.format import Bundle, Format, Inferred, safetensors_file
from vitkit.weights.inference import HALF, depth_of, finish, picture_size, usual_heads
from vitkit.weights.rules import Row, Table, row, stacked
from vitkit.weights.sources import Header, Source

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
            depth_of((n for n in shapes if "unit" in n), _units(stage))
            for stage in range(1, STAGES + 1)
        )
        hybrid = {"stem": "resnet", "resnet_layers": layers, "resnet_variant": "jeonsworld"}
        channels, stride = root[1], STAGE_STRIDES[STAGES]
    patch = (cells[0] * stride, cells[1] * stride)
    rows = shapes[f"{EMBEDDINGS}position_embeddings"][1]
    fields = {
        "image_size": picture_size(rows, 1, patch, overrides.get("image_size")),
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
    usual = ("num_heads", "norm_eps", "activation", "position_resampling", "preprocess")
    return finish(fields, overrides, PREPROCESS, usual=usual)

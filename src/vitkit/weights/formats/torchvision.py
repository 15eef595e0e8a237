"""torchvision's `vision_transformer`: `state_dict()` files of vit_b_16 and its siblings.

Published files may bear the names of the first version of its MLP (`linear_1`, `linear_2`); ours
are written with the second's (`mlp.0`, `mlp.3`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitkit.io.atomic import FileWriter
from vitkit.spec import ViTSpec
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
from vitkit.weights.formats.infer_spec import IMAGENET, depth_of, finish, image_size, usual_heads
from vitkit.weights.formats.key_table import Table, row
from vitkit.weights.formats.unwrapping import plain_head

BLOCK, OURS = "encoder.layers.encoder_layer_{i}.", "blocks.{i}."
PREPROCESS = IMAGENET.replace(interpolation="bilinear", crop_ratio=0.875)


def detect(header: Header) -> bool:
    """Its blocks are called `encoder_layer_0`."""
    return "encoder.layers.encoder_layer_0.ln_1.weight" in header.shapes


def infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Everything but heads, epsilon and activation follows from shapes."""
    shapes = header.shapes
    width, channels, *patch = shapes["conv_proj.weight"]
    representation = shapes.get("heads.pre_logits.weight")
    rows = shapes["encoder.pos_embedding"][1]
    fields = {
        "image_size": image_size(rows, 1, (patch[0], patch[1]), overrides.get("image_size")),
        "patch_size": tuple(patch),
        "in_channels": channels,
        "num_classes": shapes.get("heads.head.weight", (0,))[0],
        "width": width,
        "depth": depth_of(shapes, r"encoder\.layers\.encoder_layer_(\d+)\."),
        "num_heads": usual_heads(width),
        "mlp_width": shapes[f"{BLOCK.format(i=0)}mlp.0.weight"][0],
        "representation_width": representation[0] if representation else None,
        "position_resampling": "bicubic_aligned",
    }
    usual = {"num_heads", "norm_eps", "activation", "image_size", "position_resampling",
             "preprocess"}  # fmt: skip
    return finish(fields, overrides, PREPROCESS, usual=usual)


def prepare(source: Source) -> Source:
    """The first version's names of the MLP become the second's; a head that was replaced, as
    `heads` or in an `nn.Sequential`, gets the usual name."""
    names = {n: n.replace("mlp.linear_1", "mlp.0").replace("mlp.linear_2", "mlp.3") for n in source}
    if any(old != new for old, new in names.items()):
        source = source.renamed(names)
    return plain_head(source, "heads.", "heads.head")


def table(spec: ViTSpec) -> Table:
    """A plain rename; query, key and value lie in one matrix on both sides."""
    return Table((
        row("class_token", "cls_token"),
        row("encoder.pos_embedding", "pos_embed"),
        row("conv_proj.{p}", "patch_embed.proj.{p}"),
        row(BLOCK + "ln_1.{p}", OURS + "norm1.{p}"),
        row(BLOCK + "self_attention.in_proj_{p}", OURS + "attn.qkv.{p}"),
        row(BLOCK + "self_attention.out_proj.{p}", OURS + "attn.proj.{p}"),
        row(BLOCK + "ln_2.{p}", OURS + "norm2.{p}"),
        row(BLOCK + "mlp.0.{p}", OURS + "mlp.fc1.{p}"),
        row(BLOCK + "mlp.3.{p}", OURS + "mlp.fc2.{p}"),
        row("encoder.ln.{p}", "norm.{p}"),
        row("heads.pre_logits.{p}", "pre_logits.fc.{p}"),
        row("heads.head.{p}", "head.{p}"),
    ))  # fmt: skip


FIXED: dict[str, Any] = {**PLAIN, **SINGLE}
"""What its class computes; any value of the other fields fits."""


def write(bundle: Bundle) -> dict[str, FileWriter]:
    """`model.safetensors` with the names of `torchvision.models.vit_b_16().state_dict()`."""
    return {"model.safetensors": safetensors_file(bundle)}


FORMAT = Format("torchvision", detect, prepare, infer, table, (FIXED,), write, CODE)

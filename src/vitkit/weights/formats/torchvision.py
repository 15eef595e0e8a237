"""torchvision's `vision_transformer`: `state_dict()` files of vit_b_16 and its siblings.

Published files may have the names of the first version of its MLP (`linear_1`, `linear_2`); vitkit
writes the second's (`mlp.0`, `mlp.3`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import (
    CLASS_TOKEN_ONLY,
    FIRST_PAPER,
    FIXED_BY_CODE,
    BuiltModel,
    Capabilities,
    Format,
    ReferenceLibrary,
    one_file,
    weights_file,
)
from vitkit.weights.formats.infer_spec import (
    IMAGENET_MEAN,
    OPEN_FIELDS,
    Inferred,
    depth_of,
    finish,
    image_size,
    usual_heads,
)
from vitkit.weights.formats.key_table import Table, row
from vitkit.weights.formats.unwrapping import plain_head
from vitkit.weights.tensor_file import Header, Source

_THEIRS = "encoder.layers.encoder_layer_{i}."
_OURS = "blocks.{i}."
_PREPROCESS = IMAGENET_MEAN.replace(interpolation="bilinear", crop_ratio=0.875)


def _detect(header: Header) -> bool:
    """Return True if the blocks are called `encoder_layer_0` and so on."""
    return "encoder.layers.encoder_layer_0.ln_1.weight" in header.shapes


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer everything from shapes, except number of heads, epsilon and activation."""
    shapes = header.shapes
    width, channels, *patch = shapes["conv_proj.weight"]  # (D, C, P, P)
    representation_width = shapes.get("heads.pre_logits.weight", (0,))[0]
    rows = shapes["encoder.pos_embedding"][1]  # (1, 1 + N, D), a row for the class token
    fields = {
        "image_size": image_size(rows, 1, (patch[0], patch[1]), overrides.get("image_size")),
        "patch_size": tuple(patch),
        "in_channels": channels,
        "num_classes": shapes.get("heads.head.weight", (0,))[0],
        "width": width,
        "depth": depth_of(shapes, r"encoder\.layers\.encoder_layer_(\d+)\."),
        "num_heads": usual_heads(width),
        "mlp_width": shapes[f"{_THEIRS.format(i=0)}mlp.0.weight"][0],
        "representation_width": representation_width or None,
        "position_resampling": "bicubic_aligned",
    }
    return finish(fields, overrides, _PREPROCESS, usual=OPEN_FIELDS)


def _prepare(source: Source) -> Source:
    """Rename the first version's MLP to the second's, and a replaced head to the usual name."""
    return plain_head(source.renamed_by(_second_version), "heads.", "heads.head")


def _second_version(name: str) -> str:
    return name.replace("mlp.linear_1", "mlp.0").replace("mlp.linear_2", "mlp.3")


def _table(spec: ViTSpec) -> Table:
    """Return a plain renaming; query, key and value are one matrix on both sides."""
    rows = (
        row("class_token", "cls_token"),
        row("encoder.pos_embedding", "pos_embed"),
        row("conv_proj.{p}", "patch_embed.proj.{p}"),
        row(_THEIRS + "ln_1.{p}", _OURS + "norm1.{p}"),
        row(_THEIRS + "self_attention.in_proj_{p}", _OURS + "attn.qkv.{p}"),
        row(_THEIRS + "self_attention.out_proj.{p}", _OURS + "attn.proj.{p}"),
        row(_THEIRS + "ln_2.{p}", _OURS + "norm2.{p}"),
        row(_THEIRS + "mlp.0.{p}", _OURS + "mlp.fc1.{p}"),
        row(_THEIRS + "mlp.3.{p}", _OURS + "mlp.fc2.{p}"),
        row("encoder.ln.{p}", "norm.{p}"),
        row("heads.pre_logits.{p}", "pre_logits.fc.{p}"),
        row("heads.head.{p}", "head.{p}"),
    )
    return Table(rows)


def _build(path: Path, spec: ViTSpec) -> BuiltModel | None:
    """Build torchvision's model by the class of `vit_b_16`."""
    library: Any = importlib.import_module("torchvision.models.vision_transformer")
    height, width = spec.image_size
    rows, columns = spec.patch_size
    # Its constructor takes one number for each size, and has no keyword for channels.
    if height != width or rows != columns or spec.in_channels != 3:
        return None
    # On the meta device no weights are drawn that the file replaces anyway.
    with torch.device("meta"):
        model = library.VisionTransformer(
            image_size=height,
            patch_size=rows,
            num_layers=spec.depth,
            num_heads=spec.num_heads,
            hidden_dim=spec.width,
            mlp_dim=spec.mlp_width,
            num_classes=spec.num_classes,
            representation_size=spec.representation_width,
        )
    if not spec.num_classes:  # its constructor always makes a head
        model.heads.head = nn.Identity()
    model.load_state_dict(load_file(weights_file(path)), assign=True)
    return BuiltModel(model, model.encoder.layers)


_CAPABILITIES: Capabilities = {**FIRST_PAPER, **CLASS_TOKEN_ONLY}
TORCHVISION = Format(
    name="torchvision",
    detect=_detect,
    prepare=_prepare,
    infer=_infer,
    table=_table,
    capabilities=(_CAPABILITIES,),
    write=one_file,
    fixed=FIXED_BY_CODE,
    reference=ReferenceLibrary("torchvision", (0, 26), ("torchvision",), _build),
)

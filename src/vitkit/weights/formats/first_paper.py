"""PyTorch code for the ViT of the first paper: torchvision's `state_dict()`, and jeonsworld's.

torchvision's `vit_b_16` and its siblings: published files may have the names of the first version
of its MLP (`linear_1`, `linear_2`); vitkit writes the second's (`mlp.0`, `mlp.3`).

jeonsworld's `ViT-pytorch` (`cifar10_checkpoint.bin`) mirrors the first JAX release: query, key and
value are three layers, and the hybrid R50 stem has three stages with padding, epsilons and a
shortcut norm of its own.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from vitkit.errors import CheckpointError
from vitkit.spec import STAGE_STRIDES, ViTSpec
from vitkit.weights.files import Header, Source
from vitkit.weights.formats import format as shared
from vitkit.weights.formats.format import Format, Inferred, ReferenceLibrary
from vitkit.weights.formats.keys import BLOCK, RESNET_UNIT, Table, renamed, row, stacked
from vitkit.weights.formats.unwrapping import plain_head

# torchvision.

_LAYER = "encoder.layers.encoder_layer_{i}."
_TORCHVISION_IMAGES = shared.IMAGENET_MEAN.replace(interpolation="bilinear", crop_ratio=0.875)


def _detect_torchvision(header: Header) -> bool:
    """Return True if the blocks are called `encoder_layer_0` and so on."""
    return "encoder.layers.encoder_layer_0.ln_1.weight" in header.shapes


def _infer_torchvision(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer everything from shapes, except number of heads, epsilon and activation."""
    shapes = header.shapes
    fields = shared.plain_fields(
        shapes,
        overrides.get("image_size"),
        kernel="conv_proj.weight",
        positions="encoder.pos_embedding",
        block=_LAYER,
        head="heads.head.weight",
        mlp="mlp.0",
    )
    fields |= {
        "representation_width": shapes.get("heads.pre_logits.weight", (None,))[0],
        "position_resampling": "bicubic_aligned",
    }
    return shared.finish(fields, overrides, _TORCHVISION_IMAGES, usual=shared.OPEN_FIELDS)


def _prepare_torchvision(source: Source) -> Source:
    """Rename the first version's MLP to the second's, and a replaced head to the usual name."""
    return plain_head(source.renamed_by(_second_version), "heads.", "heads.head")


def _second_version(name: str) -> str:
    return name.replace("mlp.linear_1", "mlp.0").replace("mlp.linear_2", "mlp.3")


def _torchvision_table(spec: ViTSpec) -> Table:
    """Return a plain renaming; query, key and value are one matrix on both sides."""
    around = {
        "class_token": "cls_token",
        "encoder.pos_embedding": "pos_embed",
        "conv_proj.{p}": "patch_embed.proj.{p}",
        "encoder.ln.{p}": "norm.{p}",
        "heads.pre_logits.{p}": "pre_logits.fc.{p}",
        "heads.head.{p}": "head.{p}",
    }
    inside = {
        "ln_1.{p}": "norm1.{p}",
        "self_attention.in_proj_{p}": "attn.qkv.{p}",
        "self_attention.out_proj.{p}": "attn.proj.{p}",
        "ln_2.{p}": "norm2.{p}",
        "mlp.0.{p}": "mlp.fc1.{p}",
        "mlp.3.{p}": "mlp.fc2.{p}",
    }
    return Table((*renamed(around), *renamed(inside, _LAYER, BLOCK)))


def _build_torchvision(path: Path, spec: ViTSpec) -> nn.Module | None:
    """Build torchvision's model by the class of `vit_b_16`."""
    library: Any = importlib.import_module("torchvision.models.vision_transformer")
    height, width = spec.image_size
    rows, columns = spec.patch_size
    # Its constructor takes one number for each size, and has no keyword for channels.
    if height != width or rows != columns or spec.in_channels != 3:
        return None
    # On the meta device no weights are drawn that the file replaces anyway.
    with torch.device("meta"):
        model: Any = library.VisionTransformer(
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
    model.load_state_dict(load_file(shared.weights_file(path)), assign=True)
    built: nn.Module = model
    return built


TORCHVISION = Format(
    name="torchvision",
    detect=_detect_torchvision,
    prepare=_prepare_torchvision,
    infer=_infer_torchvision,
    table=_torchvision_table,
    capabilities=({**shared.FIRST_PAPER, **shared.CLASS_TOKEN_ONLY},),
    fixed=shared.FIXED_BY_CODE,
    reference=ReferenceLibrary("torchvision", (0, 26), "torchvision", _build_torchvision),
)


# jeonsworld.

_EMBEDDINGS = "transformer.embeddings."
_ENCODER_LAYER = "transformer.encoder.layer.{i}."
_RESNET = f"{_EMBEDDINGS}hybrid_model."
_OUR_RESNET = "patch_embed.backbone."
_STAGES = 3
_JEONSWORLD_IMAGES = shared.HALF_MEAN.replace(
    interpolation="bilinear", fit="squash", crop_ratio=1.0
)


def _detect_jeonsworld(header: Header) -> bool:
    """Return True if blocks have an `attention_norm`."""
    return f"{_ENCODER_LAYER.format(i=0)}attention_norm.weight" in header.shapes


def _infer_jeonsworld(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer everything from shapes, except number of heads, epsilon and activation."""
    shapes = header.shapes
    root = shapes.get(f"{_RESNET}root.conv.weight")
    fields = shared.plain_fields(
        shapes,
        overrides.get("image_size"),
        kernel=f"{_EMBEDDINGS}patch_embeddings.weight",
        positions=f"{_EMBEDDINGS}position_embeddings",
        block=_ENCODER_LAYER,
        head="head.weight",
        mlp="ffn.fc1",
        # The kernel of a hybrid covers cells of the ResNet's output.
        stride=STAGE_STRIDES[_STAGES] if root else 1,
    )
    fields["position_resampling"] = "bilinear_aligned"
    if root:
        units = f"{_RESNET}body.block{{s1}}.*.conv1.weight"
        fields |= {
            "in_channels": root[1],
            "stem": "resnet",
            "resnet_layers": shared.resnet_layers(shapes, units),
            "resnet_variant": "jeonsworld",
        }
    return shared.finish(fields, overrides, _JEONSWORLD_IMAGES, usual=shared.OPEN_FIELDS)


def _jeonsworld_table(spec: ViTSpec) -> Table:
    """Return a renaming; query, key and value are stacked into our `qkv`.

    Raises:
        CheckpointError: a ResNet of other than three stages.
    """
    if spec.stem == "resnet" and len(spec.resnet_layers) != _STAGES:
        raise CheckpointError(
            f"resnet_layers {spec.resnet_layers} cannot be stored: its ResNet has {_STAGES} stages"
        )
    around = {
        "embeddings.cls_token": "cls_token",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.hybrid_model.root.conv.weight": f"{_OUR_RESNET}stem.conv.weight",
        "embeddings.hybrid_model.root.gn.{p}": f"{_OUR_RESNET}stem.norm.{{p}}",
        "embeddings.patch_embeddings.{p}": "patch_embed.proj.{p}",
        "encoder.encoder_norm.{p}": "norm.{p}",
    }
    unit = {"downsample.weight": "downsample.conv.weight", "gn_proj.{p}": "downsample.norm.{p}"}
    for n in (1, 2, 3):
        unit |= {f"conv{n}.weight": f"conv{n}.weight", f"gn{n}.{{p}}": f"norm{n}.{{p}}"}
    inside = {
        "attention_norm.{p}": "norm1.{p}",
        "attn.out.{p}": "attn.proj.{p}",
        "ffn_norm.{p}": "norm2.{p}",
        "ffn.fc1.{p}": "mlp.fc1.{p}",
        "ffn.fc2.{p}": "mlp.fc2.{p}",
    }
    # Three layers of (D, D) become the rows of one (3 D, D).
    projections = [f"{_ENCODER_LAYER}attn.{name}.{{p}}" for name in ("query", "key", "value")]
    rows = (
        *renamed(around, "transformer."),
        *renamed(unit, f"{_RESNET}body.block{{s1}}.unit{{u1}}.", f"{_OUR_RESNET}{RESNET_UNIT}"),
        *renamed(inside, _ENCODER_LAYER, BLOCK),
        row(projections, f"{BLOCK}attn.qkv.{{p}}", stacked(3)),
        row("head.{p}", "head.{p}"),
    )
    return Table(rows)


JEONSWORLD = Format(
    name="jeonsworld",
    detect=_detect_jeonsworld,
    infer=_infer_jeonsworld,
    table=_jeonsworld_table,
    capabilities=(
        {
            **shared.FIRST_PAPER,
            **shared.CLASS_TOKEN_ONLY,
            "stem": ("convolution", "linear", "resnet"),
            "resnet_variant": "jeonsworld",
            "representation_width": None,
        },
    ),
    fixed=shared.FIXED_BY_CODE,
)

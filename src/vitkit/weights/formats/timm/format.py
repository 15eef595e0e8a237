"""timm's `VisionTransformer`, its distilled and hybrid kinds and its `Eva`: files and Hub folders.

Names as in timm 1.0.31, models/{vision_transformer,deit,vision_transformer_hybrid,eva}.py; they
are ours too, except for `Eva`, which computes DINOv3 and EVA. Without its `config.json` a file
contains nothing on epsilon, activation and pooling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from vitkit.io.atomic import FileWriter
from vitkit.spec import ViTSpec
from vitkit.weights.files.source import Header, Source
from vitkit.weights.formats.format import (
    WEIGHTS_FILE,
    Bundle,
    Capabilities,
    Format,
    Inferred,
    bundle_writer,
)
from vitkit.weights.formats.infer_spec import HALF_MEAN
from vitkit.weights.formats.key_table import AS_IS, KeyTransform, Row, Table, TensorParts, row
from vitkit.weights.formats.timm.architecture import config_document, is_eva
from vitkit.weights.formats.timm.infer import (
    FIRST_BLOCK,
    RESNET_NAMES,
    infer_with_defaults,
    is_eva_file,
)
from vitkit.weights.formats.timm.reference import TIMM_LIBRARY
from vitkit.weights.formats.unwrapping import plain_head

_DINO_NAMES = {
    "register_tokens",
    "storage_tokens",
    f"{FIRST_BLOCK}mlp.w12.weight",
    f"{FIRST_BLOCK}mlp.w1.weight",
}
"""Names that DINO's own files have beside timm's."""
_EVA_NAMES = {
    "ls1.gamma": "gamma_1",
    "ls2.gamma": "gamma_2",
    "attn.qkv.q_bias": "attn.q_bias",
    "attn.qkv.v_bias": "attn.v_bias",
}
"""Our name in a block -> that of timm's `Eva`."""
_OLD_SCALE_NAMES = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}


def _detect(header: Header) -> bool:
    """Return True for blocks with a fused `attn.qkv` behind a `patch_embed.proj`."""
    names = header.shapes.keys()
    if "mask_token" in names and "decoder_embed.weight" not in names:
        return False  # pre-training other than MAE's
    # DINO's files have the same names and more; they are a format of their own.
    needed = {"patch_embed.proj.weight", f"{FIRST_BLOCK}norm1.weight"}
    needed.add(f"{FIRST_BLOCK}attn.qkv.weight")
    return needed <= names and names.isdisjoint(_DINO_NAMES)


def _prepare(source: Source) -> Source:
    """Rename LayerScale and split biases to the names of the class in question."""
    changes = _EVA_NAMES if is_eva_file(source.header) else _OLD_SCALE_NAMES

    def rename(name: str) -> str:
        match = re.match(r"(blocks\.\d+\.)(.*)", name)
        if match is None:
            return name
        block, part = match.groups()
        return f"{block}{changes.get(part, part)}"

    return plain_head(source.renamed_by(rename), "head.", "head")


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer from shapes, then from `config.json`, then from usual values."""
    return infer_with_defaults(header, overrides, HALF_MEAN)


def _unfolded(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    """Turn old files' matrix of patches, channels first, into the kernel of a convolution."""
    return tuple(
        part.reshape(len(part), -1, *spec.patch_size) if part.ndim == 2 else part for part in parts
    )


_IN_BLOCK = (
    "attn.qkv.{p}",
    "attn.q_norm.{p}",
    "attn.k_norm.{p}",
    "attn.proj.{p}",
    "norm1.{p}",
    "norm2.{p}",
    "mlp.fc1.{p}",
    "mlp.fc1_g.{p}",
    "mlp.fc1_x.{p}",
    "mlp.fc2.{p}",
)
_IN_POOL = ("latent", "q.{p}", "kv.{p}", "proj.{p}", "norm.{p}", "mlp.fc1.{p}", "mlp.fc2.{p}")
_AROUND_BLOCKS = (
    "cls_token",
    "dist_token",
    "reg_token",
    "pos_embed",
    "norm_pre.{p}",
    "norm.{p}",
    "fc_norm.{p}",
    "pre_logits.fc.{p}",
    "head.{p}",
    "head_dist.{p}",
)
_IGNORED = (
    ("mask_token", "stands for masked patches in MAE's pre-training"),
    ("decoder_*", "restores masked patches in MAE's pre-training"),
)
_IGNORED_POOL = ("attn_pool.*", "attention pooling, which this model does without")


def _table(spec: ViTSpec) -> Table:
    """Return a table of equal names; `Eva` has a few of its own."""
    eva = is_eva(spec)
    same = [*_AROUND_BLOCKS, *(f"blocks.{{i}}.{part}" for part in _IN_BLOCK)]
    ignored: tuple[tuple[str, str], ...] = _IGNORED
    if spec.pooling == "map":
        same += [f"attn_pool.{part}" for part in _IN_POOL]
    else:
        ignored = (*_IGNORED, _IGNORED_POOL)
    kernel = KeyTransform(_unfolded, AS_IS.to_theirs)
    rows = [row("patch_embed.proj.{p}", "patch_embed.proj.{p}", kernel), *_resnet_rows(spec)]
    rows += [row(name, name) for name in same]
    for ours, eva_name in _EVA_NAMES.items():
        rows.append(row(f"blocks.{{i}}.{eva_name if eva else ours}", f"blocks.{{i}}.{ours}"))
    return Table(tuple(rows), ignored)


def _resnet_rows(spec: ViTSpec) -> list[Row]:
    """Return the rows of a hybrid's stem; without stages, its root is the whole of it."""
    if spec.stem != "resnet":
        return []
    names = ["conv.weight", "norm.{p}", "stem.conv.weight", "stem.norm.{p}"]
    parts: list[str] = []
    for n in (1, 2, 3):
        parts += [f"conv{n}.weight", f"norm{n}.{{p}}"]
    parts += ["downsample.conv.weight", "downsample.norm.{p}"]
    for stage, units in enumerate(spec.resnet_layers):
        for unit in range(units):
            names += [f"stages.{stage}.blocks.{unit}.{part}" for part in parts]
    return [row(RESNET_NAMES + name, RESNET_NAMES + name) for name in names]


def _write(bundle: Bundle) -> dict[str, FileWriter]:
    """Return a folder as on the Hub: `model.safetensors` and `config.json`."""
    config = config_document(bundle.spec, bundle.preprocess, bundle.classes)
    return {
        WEIGHTS_FILE: bundle_writer(bundle),
        "config.json": FileWriter.of((json.dumps(config, indent=2) + "\n").encode()),
    }


def _resampling(spec: ViTSpec) -> str:
    return "bicubic_antialias"


_SHARED: dict[str, Any] = {
    "stem": ("convolution", "linear", "resnet"),
    "resnet_variant": ("timm",),
    "distilled_readout": ("mean",),
    "pooling": ("cls", "mean", "mean_all", "map"),
    "block": ("pre_norm", "res_post_norm"),
    "representation_width": (None,),  # its classes drop a `pre_logits` layer
    "head_width": (None,),
}
_CAPABILITIES: tuple[Capabilities, ...] = (
    {**_SHARED, "positions": ("learned", "none"), "qkv_bias": (True, False)},
    {**_SHARED, "positions": ("learned",), "qkv_bias": ("no_key",), "mlp": ("plain",)},
    {**_SHARED, "positions": ("rope",), "qkv_bias": ("no_key", False)},
)
"""`VisionTransformer`; `Eva` as it is for EVA, and for DINOv3."""
TIMM = Format(
    name="timm",
    detect=_detect,
    prepare=_prepare,
    infer=_infer,
    table=_table,
    capabilities=_CAPABILITIES,
    write=_write,
    resampling=_resampling,
    reference=TIMM_LIBRARY,
)

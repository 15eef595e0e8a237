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
from vitkit.weights.formats.format import WEIGHTS_FILE, Bundle, Capabilities, Format, bundle_writer
from vitkit.weights.formats.infer_spec import HALF_MEAN, Inferred
from vitkit.weights.formats.timm.architecture import config_document
from vitkit.weights.formats.timm.infer import infer_with_defaults, is_eva_file
from vitkit.weights.formats.timm.reference import TIMM_LIBRARY
from vitkit.weights.formats.timm.table import EVA_NAMES, has_timm_names, timm_table
from vitkit.weights.formats.unwrapping import plain_head

_OLD_SCALE_NAMES = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}


def _prepare(source: Source) -> Source:
    """Rename LayerScale and split biases to the names of the class in question."""
    changes = _OLD_SCALE_NAMES
    if is_eva_file(source.header):
        changes = EVA_NAMES

    def rename(name: str) -> str:
        # Only inside blocks: other parts of a model may have the same last names.
        match = re.match(r"(blocks\.\d+\.)(.*)", name)
        if match is None:
            return name
        block, part = match.groups()
        return f"{block}{changes.get(part, part)}"

    return plain_head(source.renamed_by(rename), "head.", "head")


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer from shapes, then from `config.json`, then from usual values."""
    return infer_with_defaults(header, overrides, HALF_MEAN)


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
    detect=has_timm_names,
    prepare=_prepare,
    infer=_infer,
    table=timm_table,
    capabilities=_CAPABILITIES,
    write=_write,
    resampling=_resampling,
    reference=TIMM_LIBRARY,
)

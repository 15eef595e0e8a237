"""facebookresearch/deit: training checkpoints of DeiT (2012.12877) and DeiT III (2204.07118).

Names are timm's of that time: main.py saves `{"model": state_dict, ...}`, models.py has the
distilled class and models_v2.py DeiT III's, whose LayerScale is `gamma_1`, `gamma_2` and whose
table of positions has no row for the class token. A plain model differs from timm's by its
container alone; without that, it is read as timm's, which computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.spec import ViTSpec
from vitkit.weights.files.open import Header, Source
from vitkit.weights.formats.format import CODE, PLAIN, Bundle, Format, Inferred, safetensors_file
from vitkit.weights.formats.infer_spec import IMAGENET
from vitkit.weights.formats.key_table import Table
from vitkit.weights.formats.timm import format as timm

BLOCK = timm.BLOCK
ENTRIES = ("'model'", "'model_ema'")
LAYOUT = "facebookresearch/deit"
PREPROCESS = IMAGENET.replace(interpolation="bicubic", crop_ratio=0.875)


def detect(header: Header) -> bool:
    """DeiT III's LayerScale beside a fused bias, or timm's names in the entry `model`."""
    if "architecture" in header.documents.get("config", {}):
        return False
    if f"{BLOCK}norm11.weight" in header.shapes and f"{BLOCK}norm21.weight" in header.shapes:
        return True
    if not timm.detect(header) or "pos_embed" not in header.shapes:
        return False
    scaled = {f"{BLOCK}gamma_1", f"{BLOCK}attn.qkv.bias", "cls_token"} <= header.shapes.keys()
    boxed = any(note.endswith(entry) for note in header.notes for entry in ENTRIES)
    return scaled or boxed or header.metadata.get("layout") == LAYOUT


def infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """As for timm, with ImageNet's mean; DeiT III is evaluated on the whole shorter side."""
    if f"{BLOCK}norm11.weight" in header.shapes:
        raise CheckpointError("DeiT III's parallel blocks are not something that vitkit computes")
    scaled = f"{BLOCK}gamma_1" in header.shapes
    preprocess = PREPROCESS.replace(crop_ratio=1.0) if scaled else PREPROCESS
    return timm.infer_as(header, overrides, preprocess, position_resampling="bicubic")


def prepare(source: Source) -> Source:
    """timm's names of LayerScale become the first ones."""
    names = {name: _scales(name) for name in source}
    return source.renamed(names) if any(old != new for old, new in names.items()) else source


def table(spec: ViTSpec) -> Table:
    """timm's, but for LayerScale."""
    theirs = timm.table(spec)
    rows = tuple(
        line._replace(theirs=tuple(_scales(name) for name in line.theirs)) for line in theirs.rows
    )
    return Table(rows, theirs.aside)


def _scales(name: str) -> str:
    return name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")


FIRST: dict[str, Any] = {
    **PLAIN, "representation_width": (None,), "distilled_readout": ("mean",),
    "positions_cover_prefix": (True,), "layer_scale": (None,),
}  # fmt: skip
"""What models.py computes; any value of the other fields fits."""
THIRD: dict[str, Any] = {
    **PLAIN, "representation_width": (None,), "distillation_token": (False,),
    "positions_cover_prefix": (False,),
}  # fmt: skip
"""What models_v2.py computes, with LayerScale and without."""


def write(bundle: Bundle) -> dict[str, FileWriter]:
    """`model.safetensors` with the names of their `model.state_dict()`; no pickle is written."""
    return {"model.safetensors": safetensors_file(bundle, {"layout": LAYOUT})}


FORMAT = Format("deit", detect, prepare, infer, table, (FIRST, THIRD), write, CODE)

"""facebookresearch/deit: training checkpoints of DeiT (2012.12877) and DeiT III (2204.07118).

Names are those that timm had at the time, so this format extends timm's: main.py saves
`{"model": state_dict, ...}`, models.py has the distilled class and models_v2.py DeiT III's, whose
LayerScale is `gamma_1`, `gamma_2` and whose table of positions has no row for the class token. A
plain model differs from timm's by its container alone; without that, it is read as timm's, which
computes the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import (
    FIRST_PAPER,
    FIXED_BY_CODE,
    WEIGHTS_FILE,
    BuiltModel,
    Bundle,
    Capabilities,
    Format,
    bundle_writer,
)
from vitkit.weights.formats.infer_spec import IMAGENET_MEAN, Inferred
from vitkit.weights.formats.key_table import Row, Table
from vitkit.weights.formats.timm import (
    FIRST_BLOCK,
    TIMM_LIBRARY,
    filled_timm_model,
    has_timm_names,
    infer_with_defaults,
    timm_table,
)
from vitkit.weights.formats.timm_config import timm_architecture
from vitkit.weights.tensor_file import Header, Source

_CONTAINERS = ("'model'", "'model_ema'")
"""Entries of its training checkpoints, as a note on the way in names them."""
_LAYOUT = "facebookresearch/deit"
"""The mark that vitkit writes into the header, where no container shows the origin."""
_PREPROCESS = IMAGENET_MEAN.replace(interpolation="bicubic", crop_ratio=0.875)


def _detect(header: Header) -> bool:
    """Return True for DeiT III's LayerScale beside a fused bias, or timm's names in `model`."""
    shapes = header.shapes
    if "architecture" in header.documents.get("config", {}):
        return False  # timm's own folder
    if f"{FIRST_BLOCK}norm11.weight" in shapes and f"{FIRST_BLOCK}norm21.weight" in shapes:
        return True  # DeiT III's parallel blocks, which `_infer` refuses by name
    if not has_timm_names(header) or "pos_embed" not in shapes:
        return False
    # timm's Eva has gamma_1 beside split biases; DeiT III has it beside a fused one.
    deit3 = {f"{FIRST_BLOCK}gamma_1", f"{FIRST_BLOCK}attn.qkv.bias", "cls_token"}
    if deit3 <= shapes.keys() or header.metadata.get("layout") == _LAYOUT:
        return True
    return any(note.endswith(_CONTAINERS) for note in header.notes)


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer as for timm, with ImageNet's mean; DeiT III is evaluated on the whole shorter side."""
    if f"{FIRST_BLOCK}norm11.weight" in header.shapes:
        raise CheckpointError("DeiT III's parallel blocks are not supported")
    preprocess = _PREPROCESS
    # DeiT III evaluates at crop_ratio 1, and is known by its LayerScale.
    if f"{FIRST_BLOCK}gamma_1" in header.shapes:
        preprocess = _PREPROCESS.replace(crop_ratio=1.0)
    return infer_with_defaults(header, overrides, preprocess, position_resampling="bicubic")


def _prepare(source: Source) -> Source:
    """Rename timm's LayerScale to the first names."""
    return source.renamed_by(_first_scale_names)


def _table(spec: ViTSpec) -> Table:
    """Return timm's table with the first names of LayerScale."""
    table = timm_table(spec)
    rows: list[Row] = []
    for timm_row in table.rows:
        # Our names stay: only theirs differ from timm's.
        theirs = tuple(map(_first_scale_names, timm_row.theirs))
        rows.append(timm_row._replace(theirs=theirs))
    return Table(tuple(rows), table.ignored)


def _first_scale_names(name: str) -> str:
    return name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")


def _write(bundle: Bundle) -> dict[str, FileWriter]:
    """Return one file with the names of their `model.state_dict()`; no pickle is written."""
    return {WEIGHTS_FILE: bundle_writer(bundle, {"layout": _LAYOUT})}


def _build(path: Path, spec: ViTSpec) -> BuiltModel | None:
    """Build the model by timm, whose classes DeiT's own code uses.

    LayerScale has other names there since DeiT III.
    """
    timm: Any = importlib.import_module("timm")
    architecture = timm_architecture(spec)
    if architecture is None or spec.layer_scale is not None:
        return None
    name, arguments = architecture
    return filled_timm_model(
        path, lambda: timm.create_model(name, num_classes=spec.num_classes, **arguments)
    )


_DEIT: Capabilities = {
    **FIRST_PAPER,
    "representation_width": (None,),
    "distilled_readout": ("mean",),
    "positions_cover_prefix": (True,),
    "layer_scale": (None,),
}
"""The models of models.py."""
_DEIT_III: Capabilities = {
    **FIRST_PAPER,
    "representation_width": (None,),
    "distillation_token": (False,),
    "positions_cover_prefix": (False,),
}
"""The models of models_v2.py, with LayerScale and without."""
DEIT = Format(
    name="deit",
    detect=_detect,
    prepare=_prepare,
    infer=_infer,
    table=_table,
    capabilities=(_DEIT, _DEIT_III),
    write=_write,
    fixed=FIXED_BY_CODE,
    reference=TIMM_LIBRARY._replace(build=_build),
)

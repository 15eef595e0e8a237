"""Hugging Face transformers: folders of ViT, DeiT, DINOv2 and DINOv2 with registers.

Written with the names that `save_pretrained` writes and all files on its hub have; read also with
those that transformers 5 gives the parameters in memory (`layers.0.attention.q_proj`). A task model
puts its family before the names of the base model (`vit.encoder.layer.0`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.spec import ViTSpec
from vitkit.weights.files.source import ComputedTensor, Header, Shapes, Source
from vitkit.weights.formats.format import (
    WEIGHTS_FILE,
    Bundle,
    Capabilities,
    Fitted,
    Format,
    bundle_writer,
    with_prefix,
)
from vitkit.weights.formats.huggingface.config import (
    FAMILIES,
    HfConfig,
    config_json,
    config_warnings,
    hf_class,
    hf_class_names,
    is_task_model,
    model_type,
    read_hf_config,
)
from vitkit.weights.formats.huggingface.preprocessor import preprocessor_json, read_preprocessor
from vitkit.weights.formats.huggingface.reference import TRANSFORMERS
from vitkit.weights.formats.huggingface.table import BLOCK_NAMES, hf_table
from vitkit.weights.formats.infer_spec import (
    OPEN_FIELDS,
    Inferred,
    depth_of,
    finish,
    image_size,
    usual_heads,
)
from vitkit.weights.formats.settle import fold_register_positions, fold_unread_head

_FIRST_BLOCK = BLOCK_NAMES.format(i=0)
_FAMILY_PREFIX = re.compile(rf"({'|'.join(FAMILIES)})\.")
_QUERY_NAME = re.compile(
    rf"(?:{_FAMILY_PREFIX.pattern})?"
    r"(encoder\.layer\.0\.attention\.attention\.query"
    r"|(encoder\.layer|layers)\.0\.attention\.q_proj)\.weight"
)
_IN_MEMORY = (
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.down_proj\.", ".mlp.weights_out."),
)
"""transformers 5's names of parameters -> those it saves."""


def _detect(header: Header) -> bool:
    """Return True for `attention.attention.query` or `attention.q_proj` in the first block."""
    # A task model puts `vit.` before the names of the base model.
    names = {_FAMILY_PREFIX.sub("", name, count=1) for name in header.shapes}
    if not {"embeddings.cls_token", "embeddings.position_embeddings"} <= names:
        return False
    return any(map(_QUERY_NAME.fullmatch, header.shapes))


def _prepare(source: Source) -> Source:
    """Rename tensors to the saved names of the base model.

    Raises:
        CheckpointError: two tensors would get one name.
    """
    clash = "it has two generations of names for the same tensors"
    return _joined_gates(source.renamed_by(_saved_name, clash=clash))


def _saved_name(name: str) -> str:
    """Return the name in a saved file, without the family's prefix, of a name in any file."""
    match = _FAMILY_PREFIX.match(name)
    saved = name if match is None else name[match.end() :]
    for pattern, replacement in _IN_MEMORY:
        saved = re.sub(pattern, replacement, saved)
    return saved


def _joined_gates(source: Source) -> Source:
    """Stack `gate_proj` and `up_proj` into one matrix, `weights_in`, as it is saved."""
    header = source.header
    gates = {name: name.replace("gate_proj", "up_proj") for name in source if ".gate_proj." in name}
    missing = [up for up in gates.values() if up not in source]
    if missing:
        raise CheckpointError(f"tensor {missing[0]} is missing")

    def joined(gate: str, up: str) -> Tensor:
        return torch.cat((source[gate], source[up]), dim=0)

    matrices: dict[str, ComputedTensor] = {}
    for gate, up in gates.items():
        rows = header.shapes[gate][0] + header.shapes[up][0]  # (M, D) and (M, D) -> (2 M, D)
        shape = (rows, *header.shapes[gate][1:])
        read = partial(joined, gate, up)
        name = gate.replace("gate_proj", "weights_in")
        matrices[name] = ComputedTensor(shape, header.dtypes[gate], read)
    return source.with_computed(matrices, instead_of={*gates, *gates.values()})


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer sizes from shapes; heads, epsilon, activation and class names from `config.json`."""
    shapes = header.shapes
    family = _family_of(shapes)
    # The family is known by tensors, as a folder may lack its `config.json`.
    config = read_hf_config(header.documents.get("config"), family)
    fields = _fields(shapes, family, config, overrides)
    usual = set(OPEN_FIELDS)
    if family.startswith("dinov2"):
        fields.setdefault("layer_scale", 1.0)
        usual.add("layer_scale")
        fields["num_registers"] = shapes.get("embeddings.register_tokens", (1, 0))[1]
    if fields["mlp"] == "swiglu_packed":
        fields["activation"] = "silu"
    preprocess, stored, warnings = read_preprocessor(header.documents, family, fields["image_size"])
    warnings += config_warnings(config, family, fields, overrides)
    # What the file states is stored; what only its family has is usual.
    stored |= config.fields.keys()
    classes, class_warnings = hf_class_names(config, fields["num_classes"])
    return finish(
        fields,
        overrides,
        preprocess,
        stored=stored,
        usual=usual - stored,
        classes=classes,
        warnings=(*warnings, *class_warnings),
    )


def _fields(
    shapes: Shapes, family: str, config: HfConfig, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the spec fields of shapes and `config.json`; shapes of the head go before it."""
    # The kernel of the patch projection: (D, C, P, P).
    width, channels, *patch = shapes["embeddings.patch_embeddings.projection.weight"]
    rows = shapes["embeddings.position_embeddings"][1]  # (1, prefix + N, D)
    # The class token, and DeiT's distillation token.
    prefix = 2 if family == "deit" else 1
    size = overrides.get("image_size", config.fields.get("image_size"))
    return {
        "patch_size": tuple(patch),
        "in_channels": channels,
        "num_classes": 0,
        "width": width,
        "depth": depth_of(shapes, r"encoder\.layer\.(\d+)\."),
        "num_heads": usual_heads(width),
        **_mlp_fields(shapes),
        "qkv_bias": f"{_FIRST_BLOCK}attention.attention.query.bias" in shapes,
        "distillation_token": family == "deit",
        "position_resampling": FAMILIES[family].resampling,
        "norm_eps": FAMILIES[family].norm_eps,
        # Later entries go before earlier ones: the file's statements before usual values.
        **config.fields,
        **_readout_fields(shapes, width, config),
        "image_size": image_size(rows, prefix, (patch[0], patch[1]), size),
    }


def _mlp_fields(shapes: Shapes) -> dict[str, Any]:
    """Return kind and width of the MLP; a packed SwiGLU has gate and value in one matrix."""
    packed = shapes.get(f"{_FIRST_BLOCK}mlp.weights_in.weight")
    if packed is not None:
        return {"mlp_width": packed[0] // 2, "mlp": "swiglu_packed"}
    name = f"{_FIRST_BLOCK}mlp.fc1.weight"
    if name not in shapes:
        name = f"{_FIRST_BLOCK}intermediate.dense.weight"
    return {"mlp_width": shapes[name][0], "mlp": "plain"}


def _family_of(shapes: Shapes) -> str:
    """Return the `model_type` of a file, by its tensors."""
    if "embeddings.distillation_token" in shapes:
        return "deit"
    if f"{_FIRST_BLOCK}layer_scale1.lambda1" not in shapes:
        return "vit"
    return "dinov2_with_registers" if "embeddings.register_tokens" in shapes else "dinov2"


def _readout_fields(shapes: Shapes, width: int, config: HfConfig) -> dict[str, Any]:
    """Return the fields of the head; without a head, the class that `config.json` names decides."""
    has_two_heads = "cls_classifier.weight" in shapes
    head = shapes.get("cls_classifier.weight" if has_two_heads else "classifier.weight")
    fields: dict[str, Any] = {"num_classes": head[0] if head else 0}
    if not head and "pooler.dense.weight" in shapes:
        if config.pooler_act != "tanh":
            raise CheckpointError(
                f"config.json: pooler_act {config.pooler_act!r} is not tanh, the only function "
                "after a pooler that vitkit supports"
            )
        fields["representation_width"] = shapes["pooler.dense.weight"][0]
    if "embeddings.distillation_token" in shapes:
        with_teacher = not head and config.architecture.endswith("WithTeacher")
        fields["distilled_readout"] = "mean" if has_two_heads or with_teacher else "cls"
    # A head over class token and mean is (K, 2 D).
    if head:
        reads_mean = head[1] == 2 * width
    else:
        is_dinov2 = f"{_FIRST_BLOCK}layer_scale1.lambda1" in shapes
        reads_mean = is_dinov2 and is_task_model(config.architecture)
    return fields | {"pooling": "cls_mean" if reads_mean else "cls"}


def _write(bundle: Bundle) -> dict[str, FileWriter]:
    """Return a folder for `from_pretrained`: weights, config and preprocessor config."""
    spec = bundle.spec
    family = model_type(spec)
    tensors = dict(bundle.tensors)
    if family.startswith("dinov2"):
        # Its classes have the token, which only masked training uses.
        tensors["embeddings.mask_token"] = torch.zeros(1, spec.width)
    # Only the files of a task model name the family of the base model in it.
    if is_task_model(hf_class(spec)):
        tensors = with_prefix(tensors, f"{family}.", but="classifier.")
    return {
        WEIGHTS_FILE: bundle_writer(replace(bundle, tensors=tensors)),
        "config.json": FileWriter.of(config_json(spec, bundle.classes)),
        "preprocessor_config.json": FileWriter.of(preprocessor_json(bundle.preprocess)),
    }


def _settle(fitted: Fitted) -> Fitted:
    """Fold register positions, and a head that the model does not read."""
    return fold_unread_head(fold_register_positions(fitted))


def _resampling(spec: ViTSpec) -> str:
    return FAMILIES[model_type(spec)].resampling


_SHARED: dict[str, Any] = {
    "stem": ("convolution", "linear"),
    "patch_bias": (True,),
    "class_token": (True,),
    "positions": ("learned",),
    "positions_cover_prefix": (True,),
    "embedding_norm": (False,),
    "block": ("pre_norm",),
    "norm": ("layer",),
    "qkv_bias": (True, False),
    "qk_norm": (False,),
    "final_norm": (True,),
    "norm_before_pool": (True,),
    "head_width": (None,),
}
_VIT: dict[str, Any] = {
    **_SHARED,
    "mlp": ("plain",),
    "num_registers": (0,),
    "layer_scale": (None,),
    "pooling": ("cls",),
}
"""ViT and DeiT."""
_DINOV2: dict[str, Any] = {
    **_SHARED,
    "distillation_token": (False,),
    "layer_scale": (1.0,),
    "representation_width": (None,),
    "mlp": ("plain", "swiglu_packed"),
}
_CAPABILITIES: tuple[Capabilities, ...] = (
    _VIT,
    {**_DINOV2, "num_classes": (0,), "pooling": ("cls",)},
    {**_DINOV2, "pooling": ("cls_mean",)},
)
"""ViT and DeiT; DINOv2's base models, with registers and without; its classifiers."""
HUGGINGFACE = Format(
    name="huggingface",
    detect=_detect,
    prepare=_prepare,
    infer=_infer,
    table=hf_table,
    capabilities=_CAPABILITIES,
    write=_write,
    settle=_settle,
    resampling=_resampling,
    reference=TRANSFORMERS,
)

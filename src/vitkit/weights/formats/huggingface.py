"""Hugging Face transformers: folders of ViT, DeiT, DINOv2 and DINOv2 with registers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.io.results import read_json
from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import (
    WEIGHTS_FILE,
    BuiltModel,
    Bundle,
    Capabilities,
    Fitted,
    Format,
    ReferenceLibrary,
    bundle_writer,
    with_prefix,
)
from vitkit.weights.formats.huggingface_config import (
    FAMILIES,
    HfConfig,
    config_json,
    config_warnings,
    hf_class,
    hf_class_names,
    is_task_model,
    model_type,
    preprocessor_json,
    read_hf_config,
    read_preprocessor,
)
from vitkit.weights.formats.infer_spec import (
    OPEN_FIELDS,
    Inferred,
    depth_of,
    finish,
    image_size,
    usual_heads,
)
from vitkit.weights.formats.key_table import KeyTransform, Row, Table, TensorParts, row, stacked
from vitkit.weights.formats.unwrapping import fold_register_positions, fold_unread_head
from vitkit.weights.tensor_file import ComputedTensor, Header, Shapes, Source

# The table between the names of a base model of transformers and ours.

BLOCK_NAMES = "encoder.layer.{i}."
_OURS = "blocks.{i}."
_CLASS_TOKEN = "embeddings.cls_token"
_DISTILLATION_TOKEN = "embeddings.distillation_token"
_REGISTERS = "embeddings.register_tokens"
_POSITIONS = "embeddings.position_embeddings"
_IGNORED = (
    ("embeddings.mask_token", "stands for masked patches in pre-training"),
    ("decoder.*", "restores masked patches in pre-training"),
    ("pooler.*", "the classifier does not read it"),
)


def _hf_table(spec: ViTSpec) -> Table:
    """Return a renaming, with transforms for query, key and value and for registers' positions."""
    is_dinov2 = model_type(spec).startswith("dinov2")
    attention = f"{BLOCK_NAMES}attention.attention."
    projections = [f"{attention}{part}.{{p}}" for part in ("query", "key", "value")]
    rows = (
        *_token_rows(spec),
        row(_DISTILLATION_TOKEN, "dist_token"),
        row("embeddings.patch_embeddings.projection.{p}", "patch_embed.proj.{p}"),
        row(projections, _OURS + "attn.qkv.{p}", stacked(3)),
        row(BLOCK_NAMES + "attention.output.dense.{p}", _OURS + "attn.proj.{p}"),
        *(_dinov2_block_rows(spec) if is_dinov2 else _block_rows()),
        row("layernorm.{p}", "norm.{p}"),
        row("pooler.dense.{p}", "pre_logits.fc.{p}"),
        *_head_rows(spec),
    )
    return Table(rows, _IGNORED)


def _block_rows() -> tuple[Row, ...]:
    """Return the rows of norms and MLP in a block of ViT and DeiT."""
    return (
        row(BLOCK_NAMES + "layernorm_before.{p}", _OURS + "norm1.{p}"),
        row(BLOCK_NAMES + "layernorm_after.{p}", _OURS + "norm2.{p}"),
        row(BLOCK_NAMES + "intermediate.dense.{p}", _OURS + "mlp.fc1.{p}"),
        row(BLOCK_NAMES + "output.dense.{p}", _OURS + "mlp.fc2.{p}"),
    )


def _dinov2_block_rows(spec: ViTSpec) -> tuple[Row, ...]:
    """Return the rows of norms, LayerScale and MLP in a block of DINOv2."""
    first, last = ("fc1", "fc2") if spec.mlp == "plain" else ("weights_in", "weights_out")
    halves = KeyTransform(
        lambda parts, spec: tuple(parts[0].chunk(2, dim=0)),
        lambda parts, spec: (torch.cat(parts, dim=0),),
    )
    # A packed SwiGLU is one matrix there: it becomes our `fc1`, or its halves where ours is split.
    gate_and_value = (_OURS + "mlp.fc1_g.{p}", _OURS + "mlp.fc1_x.{p}")
    return (
        row(BLOCK_NAMES + "norm1.{p}", _OURS + "norm1.{p}"),
        row(BLOCK_NAMES + "norm2.{p}", _OURS + "norm2.{p}"),
        row(BLOCK_NAMES + "layer_scale1.lambda1", _OURS + "ls1.gamma"),
        row(BLOCK_NAMES + "layer_scale2.lambda1", _OURS + "ls2.gamma"),
        row(BLOCK_NAMES + f"mlp.{first}.{{p}}", _OURS + "mlp.fc1.{p}"),
        row(BLOCK_NAMES + f"mlp.{first}.{{p}}", gate_and_value, halves),
        row(BLOCK_NAMES + f"mlp.{last}.{{p}}", _OURS + "mlp.fc2.{p}"),
    )


def _token_rows(spec: ViTSpec) -> tuple[Row, ...]:
    """Return the rows of tokens and positions.

    Their table has a row for the class token (and for distillation), none for registers.
    """
    if spec.positions_cover_prefix and spec.num_registers:
        names = (_CLASS_TOKEN, _REGISTERS, _POSITIONS)
        zeros = KeyTransform(_rows_for_registers, _registers_folded)
        return (row(names, ("cls_token", "reg_token", "pos_embed"), zeros),)
    if spec.positions_cover_prefix:
        return row(_CLASS_TOKEN, "cls_token"), row(_POSITIONS, "pos_embed")
    theirs: tuple[str, ...] = (_CLASS_TOKEN, _POSITIONS)
    ours: tuple[str, ...] = ("cls_token", "pos_embed")
    if spec.distillation_token:
        theirs = (_CLASS_TOKEN, _DISTILLATION_TOKEN, _POSITIONS)
        ours = ("cls_token", "dist_token", "pos_embed")
    fold_prefix = KeyTransform(_prefix_folded, _zero_rows)
    return row(theirs, ours, fold_prefix), row(_REGISTERS, "reg_token")


def _prefix_folded(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    *tokens, positions = parts
    # Row i of the table belongs to token i: class, then distillation.
    folded = [token + positions[:, i : i + 1] for i, token in enumerate(tokens)]
    return *folded, positions[:, len(tokens) :]


def _zero_rows(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    *tokens, positions = parts
    zeros = positions.new_zeros(1, len(tokens), spec.width)  # a row for each token
    return *tokens, torch.cat((zeros, positions), dim=1)


def _rows_for_registers(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    cls, registers, positions = parts
    zeros = torch.zeros_like(registers)  # 1 R D
    return cls, registers, torch.cat((positions[:, :1], zeros, positions[:, 1:]), dim=1)


def _registers_folded(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    cls, registers, positions = parts
    end = 1 + spec.num_registers
    folded = registers + positions[:, 1:end]
    return cls, folded, torch.cat((positions[:, :1], positions[:, end:]), dim=1)


def _head_rows(spec: ViTSpec) -> tuple[Row, ...]:
    """Return the rows of the heads: one, two, or one of two with the other zero."""
    if not spec.distillation_token:
        return (row("classifier.{p}", "head.{p}"),)
    if spec.distilled_readout == "mean":
        return (
            row("cls_classifier.{p}", "head.{p}"),
            row("distillation_classifier.{p}", "head_dist.{p}"),
        )
    # One head there: beside it ours has a distillation head of zeros.
    single = KeyTransform(lambda parts, spec: (parts[0], torch.zeros_like(parts[0])), _class_head)
    return (row("classifier.{p}", ("head.{p}", "head_dist.{p}"), single),)


def _class_head(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    if parts[1].any():
        raise CheckpointError(
            "DeiTForImageClassification cannot store head_dist; vitkit.convert folds it "
            "into the head"
        )
    return parts[:1]


# transformers' own models of its folders, to verify what vitkit writes.


def _logits(output: Any) -> Any:
    return output.logits


def _pooled(output: Any) -> Any:
    return output.pooler_output


def _build(path: Path, spec: ViTSpec) -> BuiltModel:
    """Build the model by the class that `config.json` names, without any network.

    Raises:
        ValueError: tensors that are missing, unknown or of another shape.
    """
    transformers: Any = importlib.import_module("transformers")
    auto_class = transformers.AutoModel
    logits = _pooled
    if is_task_model(read_json(path / "config.json")["architectures"][0]):
        auto_class = transformers.AutoModelForImageClassification
        logits = _logits
    # Mismatched sizes are not raised but reported by name, as missing and unknown tensors are.
    model, report = auto_class.from_pretrained(
        path, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    faults = [f"{kind} {sorted(names)}" for kind, names in report.items() if names]
    if faults:
        raise ValueError("; ".join(faults))
    body = model.base_model
    blocks = body.layers if hasattr(body, "layers") else body.encoder.layer
    return BuiltModel(model, blocks, logits=logits)


TRANSFORMERS = ReferenceLibrary(
    "transformers", (5, 23), ("transformers", "transformers.modeling_utils"), _build
)


# Hugging Face transformers: folders of ViT, DeiT, DINOv2 and DINOv2 with registers.
#
# Written with the names that `save_pretrained` writes and all files on its hub have; read also with
# those that transformers 5 gives the parameters in memory (`layers.0.attention.q_proj`). A task
# model puts its family before the names of the base model (`vit.encoder.layer.0`).

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
    table=_hf_table,
    capabilities=_CAPABILITIES,
    write=_write,
    settle=_settle,
    resampling=_resampling,
    reference=TRANSFORMERS,
)

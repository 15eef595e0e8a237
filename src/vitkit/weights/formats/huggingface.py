"""Hugging Face transformers: folders of ViT, DeiT, DINOv2 and DINOv2 with registers."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitkit.errors import CheckpointError
from vitkit.io import atomic, untrusted
from vitkit.spec import ViTSpec
from vitkit.weights.files import Header, Shapes, Source
from vitkit.weights.formats import format as shared
from vitkit.weights.formats import huggingface_config as configs
from vitkit.weights.formats.format import COMMON, Bundle, Format, Inferred
from vitkit.weights.formats.keys import BLOCK, Table, Transform, renamed, row, stacked, token_rows

# The table between the names of a base model of transformers and ours.

_LAYER = "encoder.layer.{i}."
_AROUND = {
    "embeddings.patch_embeddings.projection.{p}": "patch_embed.proj.{p}",
    "layernorm.{p}": "norm.{p}",
    "pooler.dense.{p}": "pre_logits.fc.{p}",
}
_TOKENS = {
    "cls_token": "embeddings.cls_token",
    "dist_token": "embeddings.distillation_token",
    "reg_token": "embeddings.register_tokens",
}
_TWO_HEADS = {
    "cls_classifier.{p}": "head.{p}",
    "distillation_classifier.{p}": "head_dist.{p}",
}
_VIT_LAYER = {
    "attention.output.dense.{p}": "attn.proj.{p}",
    "layernorm_before.{p}": "norm1.{p}",
    "layernorm_after.{p}": "norm2.{p}",
    "intermediate.dense.{p}": "mlp.fc1.{p}",
    "output.dense.{p}": "mlp.fc2.{p}",
}
"""Names in a block of ViT and DeiT -> ours."""
_DINOV2_LAYER = {
    "attention.output.dense.{p}": "attn.proj.{p}",
    "norm1.{p}": "norm1.{p}",
    "norm2.{p}": "norm2.{p}",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
}
_DINOV2_MLP = {
    "plain": {"mlp.fc1.{p}": "mlp.fc1.{p}", "mlp.fc2.{p}": "mlp.fc2.{p}"},
    "swiglu_packed": {"mlp.weights_in.{p}": "mlp.fc1.{p}", "mlp.weights_out.{p}": "mlp.fc2.{p}"},
    "swiglu_split": {  # as transformers 5 has it in memory
        "mlp.gate_proj.{p}": "mlp.fc1_g.{p}",
        "mlp.up_proj.{p}": "mlp.fc1_x.{p}",
        "mlp.weights_out.{p}": "mlp.fc2.{p}",
    },
}
_IGNORED = (
    ("embeddings.mask_token", "stands for masked patches in pre-training"),
    ("decoder.*", "restores masked patches in pre-training"),
    ("pooler.*", "the classifier does not read it"),
)


def _hf_table(spec: ViTSpec) -> Table:
    """Return a renaming, with transforms for query, key and value and for positions."""
    inside = _VIT_LAYER
    if configs.model_type(spec).startswith("dinov2"):
        inside = _DINOV2_LAYER | _DINOV2_MLP[spec.mlp]
    has_two_heads = spec.distillation_token and spec.distilled_readout == "mean"
    projections = [f"{_LAYER}attention.attention.{x}.{{p}}" for x in ("query", "key", "value")]
    rows = (
        *token_rows(spec, _TOKENS, "embeddings.position_embeddings"),
        *renamed(_AROUND),
        *renamed(inside, _LAYER, BLOCK),
        row(projections, f"{BLOCK}attn.qkv.{{p}}", stacked(3)),
        *renamed(_TWO_HEADS if has_two_heads else {}),
        # One head of a distilled model: beside it ours has a distillation head of zeros.
        row("classifier.{p}", ("head.{p}", "head_dist.{p}"), Transform(_zero_head, _class_head)),
        row("classifier.{p}", "head.{p}"),
    )
    return Table(rows, _IGNORED)


def _zero_head(parts: tuple[torch.Tensor, ...], spec: ViTSpec) -> tuple[torch.Tensor, ...]:
    return parts[0], torch.zeros_like(parts[0])


def _class_head(parts: tuple[torch.Tensor, ...], spec: ViTSpec) -> tuple[torch.Tensor, ...]:
    if parts[1].any():
        raise CheckpointError(
            "DeiTForImageClassification cannot store head_dist, which the model does not read; "
            "set it to zeros"
        )
    return parts[:1]


# transformers' own models of its folders, to verify what vitkit writes.


def _build(path: Path, spec: ViTSpec) -> torch.nn.Module:
    """Build the model by the class that `config.json` names, without any network.

    Raises:
        ValueError: tensors that are missing, unknown or of another shape.
    """
    transformers: Any = importlib.import_module("transformers")
    auto_class, result = transformers.AutoModel, "pooler_output"
    if configs.is_task_model(untrusted.read_json(path / "config.json")["architectures"][0]):
        auto_class, result = transformers.AutoModelForImageClassification, "logits"
    # Mismatched sizes are not raised but reported by name, as missing and unknown tensors are.
    model, report = auto_class.from_pretrained(
        path, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    faults = [f"{kind} {sorted(names)}" for kind, names in report.items() if names]
    if faults:
        raise ValueError("; ".join(faults))
    model.register_forward_hook(lambda module, inputs, output: output[result])
    built: torch.nn.Module = model
    return built


TRANSFORMERS = shared.ReferenceLibrary(
    "transformers", (5, 23), "transformers.modeling_utils", _build
)


# Hugging Face transformers: folders of ViT, DeiT, DINOv2 and DINOv2 with registers.
#
# Written with the names that `save_pretrained` writes and all files on its hub have; read also with
# those that transformers 5 gives the parameters in memory (`layers.0.attention.q_proj`). A task
# model puts its family before the names of the base model (`vit.encoder.layer.0`).

_FIRST_LAYER = _LAYER.format(i=0)
_FAMILY_PREFIX = re.compile(rf"^({'|'.join(configs.FAMILIES)})\.")
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
    needed = {"embeddings.cls_token", "embeddings.position_embeddings"}
    return needed | {f"{_FIRST_LAYER}attention.attention.query.weight"} <= {
        _saved_name(name) for name in header.shapes
    }


def _prepare(source: Source) -> Source:
    """Rename tensors to the saved names of the base model.

    Raises:
        CheckpointError: two tensors would get one name.
    """
    clash = "it has two generations of names for the same tensors"
    return source.renamed_by(_saved_name, clash=clash)


def _saved_name(name: str) -> str:
    """Return the name in a saved file, without the family's prefix, of a name in any file."""
    saved = _FAMILY_PREFIX.sub("", name)
    for pattern, replacement in _IN_MEMORY:
        saved = re.sub(pattern, replacement, saved)
    return saved


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer sizes from shapes; heads, epsilon, activation and class names from `config.json`."""
    shapes = header.shapes
    family = _family_of(shapes)
    # The family is known by tensors, as a folder may lack its `config.json`.
    config = header.documents.get("config", {})
    stated = configs.stated_fields(config, family)
    fields = _fields(shapes, family, stated, overrides) | _readout_fields(shapes, config)
    usual = set(shared.OPEN_FIELDS)
    if family.startswith("dinov2"):
        fields.setdefault("layer_scale", 1.0)
        usual.add("layer_scale")
        fields["num_registers"] = shapes.get(_TOKENS["reg_token"], (1, 0))[1]
    preprocess, stored, warnings = configs.read_preprocessor(
        header.documents, family, fields["image_size"]
    )
    warnings += configs.config_warnings(config, family, fields, {*stated, *overrides})
    # What the file states is stored; what only its family has is usual.
    stored |= stated.keys()
    classes, class_warnings = configs.hf_class_names(config, fields["num_classes"])
    return shared.finish(
        fields,
        overrides,
        preprocess,
        stored=stored,
        usual=usual - stored,
        classes=classes,
        warnings=(*warnings, *class_warnings),
    )


def _fields(
    shapes: Shapes, family: str, stated: dict[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the spec fields of shapes and `config.json`, but for those of the readout."""
    is_dinov2 = f"{_FIRST_LAYER}mlp.fc1.weight" in shapes
    fields = shared.plain_fields(
        shapes,
        overrides.get("image_size", stated.get("image_size")),
        kernel="embeddings.patch_embeddings.projection.weight",
        positions="embeddings.position_embeddings",
        block=_LAYER,
        mlp="mlp.fc1" if is_dinov2 else "intermediate.dense",
        packed="mlp.weights_in",
        gate="mlp.gate_proj",
        # The class token, and DeiT's distillation token.
        prefix=2 if family == "deit" else 1,
    )
    usual = {
        "num_heads": fields.pop("num_heads"),
        "position_resampling": configs.FAMILIES[family].resampling,
        "norm_eps": configs.FAMILIES[family].norm_eps,
    }
    fields |= {
        "qkv_bias": f"{_FIRST_LAYER}attention.attention.query.bias" in shapes,
        "distillation_token": family == "deit",
    }
    # What the file states goes before what is usual, and shapes before both.
    return usual | stated | fields


def _family_of(shapes: Shapes) -> str:
    """Return the `model_type` of a file, by its tensors."""
    if "embeddings.distillation_token" in shapes:
        return "deit"
    if f"{_FIRST_LAYER}layer_scale1.lambda1" not in shapes:
        return "vit"
    if "embeddings.register_tokens" in shapes:
        return "dinov2_with_registers"
    return "dinov2"


def _readout_fields(shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the head; without a head, the class that `config.json` names decides."""
    two_heads = shapes.get("cls_classifier.weight")
    head = two_heads or shapes.get("classifier.weight")
    architecture = str((config.get("architectures") or [""])[0])
    fields: dict[str, Any] = {"num_classes": head[0] if head else 0}
    if not head and "pooler.dense.weight" in shapes:
        if config.get("pooler_act", "tanh") != "tanh":
            raise CheckpointError(
                f"config.json: pooler_act {config['pooler_act']!r} is not tanh, the only function "
                "after a pooler that vitkit supports"
            )
        fields["representation_width"] = shapes["pooler.dense.weight"][0]
    if _TOKENS["dist_token"] in shapes:
        with_teacher = two_heads or (not head and architecture.endswith("WithTeacher"))
        fields["distilled_readout"] = "mean" if with_teacher else "cls"
    # A head over class token and mean is (K, 2 D).
    is_dinov2 = f"{_FIRST_LAYER}layer_scale1.lambda1" in shapes
    reads_mean = is_dinov2 and configs.is_task_model(architecture)
    if head:
        reads_mean = head[1] == 2 * shapes[_TOKENS["cls_token"]][-1]
    return fields | {"pooling": "cls_mean" if reads_mean else "cls"}


def _write(bundle: Bundle) -> dict[str, atomic.FileWriter]:
    """Return a folder for `from_pretrained`: weights, config and preprocessor config."""
    spec = bundle.spec
    family = configs.model_type(spec)
    tensors = dict(bundle.tensors)
    if family.startswith("dinov2"):
        # Its classes have the token, which only masked training uses.
        tensors["embeddings.mask_token"] = torch.zeros(1, spec.width)
    # Only the files of a task model name the family of the base model in it.
    if configs.is_task_model(configs.hf_class(spec)):
        tensors = shared.with_prefix(tensors, f"{family}.", but="classifier.")
    return {
        shared.WEIGHTS_FILE: shared.bundle_writer(replace(bundle, tensors=tensors)),
        "config.json": atomic.FileWriter.of(configs.config_json(spec, bundle.classes)),
        "preprocessor_config.json": atomic.FileWriter.of(
            configs.preprocessor_json(bundle.preprocess)
        ),
    }


_VIT: dict[str, Any] = {
    **COMMON,
    "qkv_bias": (True, False),
    "mlp": "plain",
    "num_registers": 0,
    "layer_scale": None,
    "pooling": "cls",
}
_DINOV2: dict[str, Any] = {
    **COMMON,
    "qkv_bias": (True, False),
    "distillation_token": False,
    "layer_scale": 1.0,
    "representation_width": None,
    "mlp": ("plain", "swiglu_packed"),
}
HUGGINGFACE = Format(
    name="huggingface",
    detect=_detect,
    prepare=_prepare,
    infer=_infer,
    table=_hf_table,
    # ViT and DeiT, and their base models, which have a pooler; DINOv2's base models, with registers
    # and without; its classifiers.
    capabilities=(
        {**_VIT, "representation_width": None},
        {**_VIT, "num_classes": 0, "distilled_readout": "cls"},
        {**_DINOV2, "num_classes": 0, "pooling": "cls"},
        {**_DINOV2, "pooling": "cls_mean"},
    ),
    write=_write,
    settle=shared.fold_register_positions,
    reference=TRANSFORMERS,
)

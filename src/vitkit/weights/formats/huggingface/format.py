"""Hugging Face transformers: folders of ViT, DeiT, DINOv2 and DINOv2 with registers.

Written with the names that `save_pretrained` writes and all files on its hub have; read also with
those that transformers 5 gives the parameters in memory (`layers.0.attention.q_proj`). The table
has the names of a base model; a task model puts its family before them (`vit.encoder.layer.0`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.spec import ViTSpec
from vitkit.weights.converting.fold import (
    Capabilities,
    Fitted,
    read_by_both_heads,
    registers_take_their_rows,
)
from vitkit.weights.files.open import Header, Source
from vitkit.weights.formats.format import Bundle, Format, Inferred, safetensors_file
from vitkit.weights.formats.huggingface import config as config
from vitkit.weights.formats.huggingface.config import FAMILIES, Known, is_task_model
from vitkit.weights.formats.infer_spec import depth_of, finish, image_size, usual_heads
from vitkit.weights.formats.key_table import Parts, Row, Table, Transform, row, stacked

BLOCK, OURS = "encoder.layer.{i}.", "blocks.{i}."
PREFIX = re.compile(rf"({'|'.join(FAMILIES)})\.")
MARK = re.compile(
    rf"(?:{PREFIX.pattern})?"
    r"(encoder\.layer\.0\.attention\.attention\.query"
    r"|(encoder\.layer|layers)\.0\.attention\.q_proj)\.weight"
)
IN_MEMORY = (
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


def detect(header: Header) -> bool:
    """Its blocks have `attention.attention.query` or `attention.q_proj` at one of its places."""
    names = {PREFIX.sub("", name, count=1) for name in header.shapes}
    return {"embeddings.cls_token", "embeddings.position_embeddings"} <= names and any(
        MARK.fullmatch(name) for name in header.shapes
    )


def prepare(source: Source) -> Source:
    """The base model's names as they are saved, without its family's before them."""
    names = {}
    for name in source:
        saved = name[match.end() :] if (match := PREFIX.match(name)) else name
        for pattern, replacement in IN_MEMORY:
            saved = re.sub(pattern, replacement, saved)
        names[name] = saved
    if len(set(names.values())) < len(names):
        raise CheckpointError("two generations of names for the same tensors lie in it")
    return _joined_gates(source.renamed(names))


def _joined_gates(source: Source) -> Source:
    """`gate_proj` over `up_proj` in one matrix, `weights_in`, as it is saved."""
    gates = {name: name.replace("gate_proj", "up_proj") for name in source if ".gate_proj." in name}
    if missing := [up for up in gates.values() if up not in source]:
        raise CheckpointError(f"tensor {missing[0]} is missing")
    parts = {*gates, *gates.values()}
    shapes = {n: shape for n, shape in source.header.shapes.items() if n not in parts}
    dtypes = {n: dtype for n, dtype in source.header.dtypes.items() if n not in parts}
    readers: dict[str, Callable[[], Tensor]] = {n: partial(source.__getitem__, n) for n in shapes}

    def joined(gate: str, up: str) -> Tensor:
        return torch.cat((source[gate], source[up]), dim=0)

    for gate, up in gates.items():
        name, old = gate.replace("gate_proj", "weights_in"), source.header.shapes
        shapes[name] = (old[gate][0] + old[up][0], *old[gate][1:])
        dtypes[name] = source.header.dtypes[gate]
        readers[name] = partial(joined, gate, up)
    return Source(replace(source.header, shapes=shapes, dtypes=dtypes), readers, ExitStack())


def infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Sizes from shapes; heads, epsilon, activation and class names from `config.json`."""
    shapes, first = header.shapes, BLOCK.format(i=0)
    width, channels, *patch = shapes["embeddings.patch_embeddings.projection.weight"]
    family = _family_of(shapes)
    known = config.read_config(header.documents.get("config"), family)
    prefix = 2 if family == "deit" else 1
    rows, packed = shapes["embeddings.position_embeddings"][1], f"{first}mlp.weights_in.weight"
    asked = overrides.get("image_size", known.fields.get("image_size"))
    mlp = packed if packed in shapes else f"{first}mlp.fc1.weight"
    mlp = mlp if mlp in shapes else f"{first}intermediate.dense.weight"
    fields = {
        "patch_size": tuple(patch),
        "in_channels": channels,
        "num_classes": 0,
        "width": width,
        "depth": depth_of(shapes, r"encoder\.layer\.(\d+)\."),
        "num_heads": usual_heads(width),
        "mlp_width": shapes[mlp][0] // (2 if mlp == packed else 1),
        "mlp": "swiglu_packed" if mlp == packed else "plain",
        "qkv_bias": f"{first}attention.attention.query.bias" in shapes,
        "distillation_token": family == "deit",
        "position_resampling": FAMILIES[family].resampling,
        "norm_eps": FAMILIES[family].norm_eps,
        **known.fields,
        **_readout(shapes, width, known),
        "image_size": image_size(rows, prefix, (patch[0], patch[1]), asked),
    }
    usual = {"num_heads", "norm_eps", "activation", "image_size", "position_resampling",
             "preprocess"}  # fmt: skip
    if family.startswith("dinov2"):
        fields.setdefault("layer_scale", 1.0)
        usual.add("layer_scale")
        fields["num_registers"] = shapes.get("embeddings.register_tokens", (1, 0))[1]
    if mlp == packed:
        fields["activation"] = "silu"
    size = fields["image_size"]
    preprocess, stored, warnings = config.read_preprocess(header.documents, family, size)
    warnings += config.doubts(known, family, fields, overrides)
    sure = {*known.fields, *stored}
    classes, doubt = config.class_names(known, fields["num_classes"])
    return finish(
        fields, overrides, preprocess,
        stored=sure, usual=usual - sure, classes=classes, warnings=(*warnings, *doubt),
    )  # fmt: skip


def _family_of(shapes: Mapping[str, tuple[int, ...]]) -> str:
    if "embeddings.distillation_token" in shapes:
        return "deit"
    if f"{BLOCK.format(i=0)}layer_scale1.lambda1" not in shapes:
        return "vit"
    return "dinov2_with_registers" if "embeddings.register_tokens" in shapes else "dinov2"


def _readout(shapes: Mapping[str, tuple[int, ...]], width: int, known: Known) -> dict[str, Any]:
    """What the head reads; without a head, the class that `config.json` names decides."""
    taught = "cls_classifier.weight" in shapes
    head = shapes.get("cls_classifier.weight" if taught else "classifier.weight")
    pooled: dict[str, Any] = {"num_classes": head[0] if head else 0}
    if not head and "pooler.dense.weight" in shapes:
        if known.pooler_act != "tanh":
            raise CheckpointError(
                f"config.json: pooler_act {known.pooler_act!r} is not tanh, the only function that "
                f"vitkit has after a pooler"
            )
        pooled["representation_width"] = shapes["pooler.dense.weight"][0]
    if "embeddings.distillation_token" in shapes:
        taught = taught or (not head and known.architecture.endswith("WithTeacher"))
        pooled["distilled_readout"] = "mean" if taught else "cls"
    dino = f"{BLOCK.format(i=0)}layer_scale1.lambda1" in shapes
    both = head[1] == 2 * width if head else dino and is_task_model(known.architecture)
    return pooled | {"pooling": "cls_mean" if both else "cls"}


def table(spec: ViTSpec) -> Table:
    """Query, key and value lie apart; the rest is a rename, but for registers' positions."""
    family = config.family(spec)
    block = _dino_block(spec) if family.startswith("dinov2") else _block()
    attention = BLOCK + "attention.attention."
    return Table(
        rows=(
            *_tokens(spec),
            row("embeddings.distillation_token", "dist_token"),
            row("embeddings.patch_embeddings.projection.{p}", "patch_embed.proj.{p}"),
            row(
                [f"{attention}{part}.{{p}}" for part in ("query", "key", "value")],
                OURS + "attn.qkv.{p}",
                stacked(3),
            ),
            row(BLOCK + "attention.output.dense.{p}", OURS + "attn.proj.{p}"),
            *block,
            row("layernorm.{p}", "norm.{p}"),
            row("pooler.dense.{p}", "pre_logits.fc.{p}"),
            *_heads(spec),
        ),
        aside=(
            ("embeddings.mask_token", "stands for masked patches in pre-training"),
            ("decoder.*", "restores masked patches in pre-training"),
            ("pooler.*", "the classifier does not read it"),
        ),
    )


def _block() -> tuple[Row, ...]:
    return (
        row(BLOCK + "layernorm_before.{p}", OURS + "norm1.{p}"),
        row(BLOCK + "layernorm_after.{p}", OURS + "norm2.{p}"),
        row(BLOCK + "intermediate.dense.{p}", OURS + "mlp.fc1.{p}"),
        row(BLOCK + "output.dense.{p}", OURS + "mlp.fc2.{p}"),
    )


def _dino_block(spec: ViTSpec) -> tuple[Row, ...]:
    gated = spec.mlp != "plain"
    inner, outer = ("weights_in", "weights_out") if gated else ("fc1", "fc2")
    halves = Transform(
        lambda parts, spec: tuple(parts[0].chunk(2, dim=0)),
        lambda parts, spec: (torch.cat(parts, dim=0),),
    )
    return (
        row(BLOCK + "norm1.{p}", OURS + "norm1.{p}"),
        row(BLOCK + "norm2.{p}", OURS + "norm2.{p}"),
        row(BLOCK + "layer_scale1.lambda1", OURS + "ls1.gamma"),
        row(BLOCK + "layer_scale2.lambda1", OURS + "ls2.gamma"),
        row(BLOCK + f"mlp.{inner}.{{p}}", OURS + "mlp.fc1.{p}"),
        row(BLOCK + f"mlp.{inner}.{{p}}", (OURS + "mlp.fc1_g.{p}", OURS + "mlp.fc1_x.{p}"), halves),
        row(BLOCK + f"mlp.{outer}.{{p}}", OURS + "mlp.fc2.{p}"),
    )


def _tokens(spec: ViTSpec) -> tuple[Row, ...]:
    """Their table of positions has a row for the class token (and distillation), no other."""
    cls, positions = "embeddings.cls_token", "embeddings.position_embeddings"
    registers = "embeddings.register_tokens"
    if spec.positions_cover_prefix and spec.num_registers:
        names = (cls, registers, positions), ("cls_token", "reg_token", "pos_embed")
        return (row(*names, Transform(_rows_for_registers, _registers_folded)),)
    if spec.positions_cover_prefix:
        return row(cls, "cls_token"), row(positions, "pos_embed")
    taken = Transform(_prefix_folded, _zero_rows)
    dist = ("embeddings.distillation_token", "dist_token")
    both = [(cls, "cls_token"), *([dist] if spec.distillation_token else []),
            (positions, "pos_embed")]  # fmt: skip
    theirs, ours = zip(*both, strict=True)
    return row(theirs, ours, taken), row(registers, "reg_token")


def _prefix_folded(parts: Parts, spec: ViTSpec) -> Parts:
    *tokens, positions = parts
    own = [token + positions[:, i : i + 1] for i, token in enumerate(tokens)]
    return *own, positions[:, len(tokens) :]


def _zero_rows(parts: Parts, spec: ViTSpec) -> Parts:
    *tokens, positions = parts
    return *tokens, torch.cat((positions.new_zeros(1, len(tokens), spec.width), positions), dim=1)


def _rows_for_registers(parts: Parts, spec: ViTSpec) -> Parts:
    cls, registers, positions = parts
    zeros = torch.zeros_like(registers)
    return cls, registers, torch.cat((positions[:, :1], zeros, positions[:, 1:]), dim=1)


def _registers_folded(parts: Parts, spec: ViTSpec) -> Parts:
    cls, registers, positions = parts
    end = 1 + spec.num_registers
    folded = registers + positions[:, 1:end]
    return cls, folded, torch.cat((positions[:, :1], positions[:, end:]), dim=1)


def _heads(spec: ViTSpec) -> tuple[Row, ...]:
    if not spec.distillation_token:
        return (row("classifier.{p}", "head.{p}"),)
    if spec.distilled_readout == "mean":
        return (
            row("cls_classifier.{p}", "head.{p}"),
            row("distillation_classifier.{p}", "head_dist.{p}"),
        )
    single = Transform(lambda parts, spec: (parts[0], torch.zeros_like(parts[0])), _class_head)
    return (row("classifier.{p}", ("head.{p}", "head_dist.{p}"), single),)


def _class_head(parts: Parts, spec: ViTSpec) -> Parts:
    if parts[1].any():
        raise CheckpointError(
            "DeiTForImageClassification has no place for head_dist; vitkit.convert folds it away"
        )
    return parts[:1]


FIXED: dict[str, Any] = {
    "stem": ("convolution", "linear"), "patch_bias": (True,), "class_token": (True,),
    "positions": ("learned",), "positions_cover_prefix": (True,), "embedding_norm": (False,),
    "block": ("pre_norm",), "norm": ("layer",), "qkv_bias": (True, False), "qk_norm": (False,),
    "final_norm": (True,), "norm_before_pool": (True,), "head_width": (None,),
}  # fmt: skip
"""What all of its classes compute; any value of the fields that no class names fits."""
DINO: dict[str, Any] = {
    **FIXED, "distillation_token": (False,), "layer_scale": (1.0,), "representation_width": (None,),
    "mlp": ("plain", "swiglu_packed"),
}  # fmt: skip
HOLDS: tuple[Capabilities, ...] = (
    {
        **FIXED, "mlp": ("plain",), "num_registers": (0,), "layer_scale": (None,),
        "pooling": ("cls",),
    },
    {**DINO, "num_classes": (0,), "pooling": ("cls",)},
    {**DINO, "pooling": ("cls_mean",)},
)  # fmt: skip
"""ViT and DeiT; DINOv2's base models, with registers and without; its classifiers."""


def write(bundle: Bundle) -> dict[str, FileWriter]:
    """`model.safetensors`, `config.json` and `preprocessor_config.json`, for `from_pretrained`."""
    spec, tensors = bundle.spec, dict(bundle.tensors)
    family = config.family(spec)
    if family.startswith("dinov2"):
        tensors["embeddings.mask_token"] = torch.zeros(1, spec.width)
    if is_task_model(config.architecture(spec)):
        tensors = {n if "classifier." in n else f"{family}.{n}": t for n, t in tensors.items()}
    return {
        "model.safetensors": safetensors_file(replace(bundle, tensors=tensors)),
        "config.json": FileWriter.of(config.config_json(spec, bundle.classes)),
        "preprocessor_config.json": FileWriter.of(config.preprocessor_json(bundle.preprocess)),
    }


def settle(fitted: Fitted) -> Fitted:
    """What depends on the numbers: rows of registers, and heads of which one is not read."""
    return read_by_both_heads(registers_take_their_rows(fitted))


def resampling(spec: ViTSpec) -> str:
    """Each family has its own way."""
    return FAMILIES[config.family(spec)].resampling


FORMAT = Format(
    "huggingface", detect, prepare, infer, table, HOLDS, write,
    settle=settle, resampling=resampling,
)  # fmt: skip

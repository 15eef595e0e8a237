"""The table between the names of a base model of transformers and ours."""

from __future__ import annotations

import torch

from vitkit.errors import CheckpointError
from vitkit.spec import ViTSpec
from vitkit.weights.formats.huggingface.config import model_type
from vitkit.weights.formats.key_table import KeyTransform, Row, Table, TensorParts, row, stacked

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


def hf_table(spec: ViTSpec) -> Table:
    """Return a renaming, with transforms for query, key and value and for registers' positions.

    Raises:
        CheckpointError: a model that none of their classes computes.
    """
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

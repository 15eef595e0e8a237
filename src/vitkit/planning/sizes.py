"""Counts that the formulas of a plan are made of: tokens, widths and parameters of a spec."""

from __future__ import annotations

from dataclasses import dataclass

from vitkit.errors import SettingError
from vitkit.spec import ViTSpec

PLANNED_STEMS = ("convolution", "linear", "normed_linear")
"""Stems that are one matrix; a network in front of the patches has other formulas."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, by part.

    Attributes:
        embedding: everything before the blocks: patch projection, tokens, positions, norms.
        block: one block.
        readout: everything after the blocks: last norm, pooling, heads.
        block_matrices: those of `block` that are matrices.
        other_matrices: weights of the patch projection, of the pooling and of the heads.
        depth: the number of blocks.
    """

    embedding: int
    block: int
    readout: int
    block_matrices: int
    other_matrices: int
    depth: int

    @property
    def total(self) -> int:
        """All parameters of the model."""
        return self.embedding + self.depth * self.block + self.readout

    @property
    def all_block_matrices(self) -> int:
        """The matrices of all blocks, which Muon trains."""
        return self.depth * self.block_matrices

    @property
    def matrices(self) -> int:
        """The weights of all matrix products, which autocast copies in half precision."""
        return self.all_block_matrices + self.other_matrices


def check_planned(spec: ViTSpec) -> None:
    """Refuse a model that the formulas do not cover.

    Raises:
        SettingError: the patches are cut from the feature map of another network.
    """
    if spec.stem not in PLANNED_STEMS:
        raise SettingError(
            f"the stem {spec.stem!r} has a network before the patches, which the formulas of a "
            f"plan leave out; pass a model with the stem {', '.join(PLANNED_STEMS)}"
        )


def trained_tokens(spec: ViTSpec) -> int:
    """Return T, the tokens of an image in training: fewer than in inference with patch dropout."""
    patches = spec.num_patches
    if spec.patch_dropout:
        patches = max(1, round(patches * (1 - spec.patch_dropout)))
    return patches + spec.num_prefix_tokens


def count_parameters(spec: ViTSpec) -> Parameters:
    """Return the numbers of parameters of a plain ViT, from its spec alone."""
    embedding, patch_matrix = _embedding(spec)
    block, block_matrices = _block(spec)
    readout, readout_matrices = _readout(spec)
    return Parameters(
        embedding=embedding,
        block=block,
        readout=readout,
        block_matrices=block_matrices,
        other_matrices=patch_matrix + readout_matrices,
        depth=spec.depth,
    )


def mlp_matrices(spec: ViTSpec) -> int:
    """Return the number of D x M matrices of a block's MLP: 3 with a gate (SwiGLU), else 2."""
    return 2 if spec.mlp == "plain" else 3


def muon_matrices(spec: ViTSpec) -> list[tuple[int, int]]:
    """Return the rows and columns of the matrices of a block as Muon orthogonalises them.

    Query, key and value are three matrices; gate and value of a packed SwiGLU are one.
    """
    width, inner, hidden = spec.width, spec.attention_width, spec.mlp_width
    first = {"plain": [hidden], "swiglu_packed": [2 * hidden], "swiglu_split": [hidden, hidden]}
    made = [(inner, width)] * 3 + [(width, inner), (width, hidden)]
    return made + [(rows, width) for rows in first[spec.mlp]]


def patch_values(spec: ViTSpec) -> int:
    """Return C P P, the numbers of a patch."""
    return spec.in_channels * spec.patch_size[0] * spec.patch_size[1]


def _norm(spec: ViTSpec, width: int, present: bool = True) -> int:
    """Return the parameters of a norm: a scale, and of LayerNorm a shift."""
    return present * width * (2 if spec.norm == "layer" else 1)


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _embedding(spec: ViTSpec) -> tuple[int, int]:
    """Return the parameters before the blocks, and the patch matrix among them."""
    width, values = spec.width, patch_values(spec)
    matrix = values * width
    count = matrix + spec.patch_bias * width
    if spec.stem == "normed_linear":
        count += 2 * values + 2 * width  # LayerNorm before and after, whatever the blocks have
    count += (spec.num_prefix_tokens + spec.position_rows) * width
    return count + _norm(spec, width, spec.embedding_norm), matrix


def _block(spec: ViTSpec) -> tuple[int, int]:
    """Return the parameters of a block, and its matrices among them."""
    width, inner, hidden = spec.width, spec.attention_width, spec.mlp_width
    matrices = 4 * width * inner + mlp_matrices(spec) * width * hidden
    biases = {True: 3, "no_key": 2, False: 0}[spec.qkv_bias] * inner + width
    biases += (mlp_matrices(spec) - 1) * hidden + width
    norms = 2 * _norm(spec, width)
    norms += 2 * _norm(spec, inner // spec.num_heads, spec.qk_norm)
    scales = 2 * width * (spec.layer_scale is not None)
    return matrices + biases + norms + scales, matrices


def _readout(spec: ViTSpec) -> tuple[int, int]:
    """Return the parameters after the blocks, and the matrices among them."""
    width, inner = spec.width, spec.attention_width
    last = width if spec.norm_before_pool else spec.pooled_width
    count, matrices = _norm(spec, last, spec.final_norm), 0
    if spec.pooling == "map":
        matrices += 4 * width * inner + 2 * width * spec.mlp_width
        count += 2 * width + 3 * inner + spec.mlp_width + width + _norm(spec, width) + matrices
    if spec.representation_width:
        count += _linear(spec.pooled_width, spec.representation_width)
        matrices += spec.pooled_width * spec.representation_width
    heads = (1 + spec.distillation_token) * (spec.num_classes > 0)
    count += heads * _linear(spec.head_inputs, spec.num_classes)
    return count, matrices + heads * spec.head_inputs * spec.num_classes

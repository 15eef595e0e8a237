"""`Format`: a checkpoint format, and what formats share: inference and folds.

A format recognises its files (`detect`), infers the model's spec from one (`infer`), and maps the
names of its tensors to ours and back (`table`). `FORMATS` in `recognise_format` has all of them.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.spec import STAGE_STRIDES, Preprocess, ViTSpec
from vitkit.weights import checkpoint, files
from vitkit.weights.formats.keys import Table


@dataclass(frozen=True)
class Bundle:
    """A model that is being written to a file.

    Attributes:
        spec: the architecture, which the format can hold.
        tensors: under the format's names, float32.
        preprocess: how images are resized and normalised.
        classes: the class names, or none.
    """

    spec: ViTSpec
    tensors: Mapping[str, Tensor]
    preprocess: Preprocess
    classes: tuple[str, ...]


State: TypeAlias = dict[str, Tensor]
"""Tensors by our names."""
Capabilities: TypeAlias = Mapping[str, Any]
"""Spec field -> the value that a class of models has, or a tuple of some, preferred first."""
StepKind = Literal["folded", "approximated", "lost"]
# The order counts: `Fitted.cost` compares by it.
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)
"""From the least loss to the greatest."""


class Step(NamedTuple):
    """One change to a model that is being fitted to a format.

    Attributes:
        kind: `folded` (the same function), `approximated` or `lost`.
        text: one line.
    """

    kind: StepKind
    text: str

    @classmethod
    def from_line(cls, line: str) -> Step:
        """Parse a line that `str` wrote."""
        # Only the first colon: the text may have more.
        kind, _, text = line.partition(": ")
        return cls(cast(StepKind, kind), text)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Fitted(NamedTuple):
    """A model that a class of the format can store.

    Attributes:
        spec: its architecture.
        state: its tensors, by our names.
        steps: the changes made, in order; none where nothing had to change.
    """

    spec: ViTSpec
    state: State
    steps: list[Step]

    @property
    def cost(self) -> tuple[int, int]:
        """The worst kind of step, then the number of steps; less is better."""
        # 0 for no step at all, then 1 to 3 by the worst kind.
        worst = max((1 + STEP_KINDS.index(step.kind) for step in self.steps), default=0)
        return worst, len(self.steps)


Sure = Literal["stored", "shapes", "usual"]
"""How a value is known: the file says it; shapes force it; files of this format usually have it."""


@dataclass(frozen=True)
class Inferred:
    """A model's description, inferred from a file of some format.

    Attributes:
        spec: the architecture.
        preprocess: how images are resized and normalised.
        classes: the K class names in the order of the logits; empty where the file has none.
        sure: spec field, or `preprocess`, -> how it is known.
        warnings: one line each.
        left_out: names of tensors of the file that are not of this model.
    """

    spec: ViTSpec
    preprocess: Preprocess
    classes: tuple[str, ...] = ()
    sure: Mapping[str, Sure] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def _unchanged(value: Any) -> Any:
    return value


class ReferenceLibrary(NamedTuple):
    """The Python package that reads a format.

    Attributes:
        distribution: its name on the package index.
        oldest: the first version that vitkit is tested with.
        module: a module that must be importable.
        build: makes the library's model of files: a folder or one file, and the spec of the model
            in them. It maps images (B, C, H, W) to logits (B, K). Returns None where none of the
            library's classes computes that model.
    """

    distribution: str
    oldest: tuple[int, ...]
    module: str
    build: Callable[[Path, ViTSpec], nn.Module | None]


def one_file(bundle: Bundle) -> dict[str, FileWriter]:
    """Return the single file of a format whose files hold tensors alone."""
    return {WEIGHTS_FILE: bundle_writer(bundle)}


@dataclass(frozen=True)
class Format:
    """One published way to store a ViT.

    Attributes:
        name: as used on the command line, such as `huggingface`.
        detect: returns True for a file of this format, by names and shapes alone.
        infer: infers the model of a prepared file; overrides are spec fields that the user gives.
        table: the rows between its names and ours, for a spec.
        capabilities: for each of its classes, spec field -> the values its models can have; a field
            that is not in it may have any.
        write: makes the files of a folder, name -> writer; by default one of tensors alone.
        prepare: renames older or other names of the format to those of its table, if it has any.
        fixed: fields that the code of the format decides, whatever model a file is of.
        settle: exact changes that depend on the numbers, after those that the spec asks for.
        reference: the package that reads the format, or `None`.
    """

    name: str
    detect: Callable[[files.Header], bool]
    infer: Callable[[files.Header, Mapping[str, Any]], Inferred]
    table: Callable[[ViTSpec], Table]
    capabilities: tuple[Capabilities, ...]
    write: Callable[[Bundle], dict[str, FileWriter]] = one_file
    prepare: Callable[[files.Source], files.Source] = _unchanged
    fixed: frozenset[str] = frozenset()
    settle: Callable[[Fitted], Fitted] = _unchanged
    reference: ReferenceLibrary | None = None


FIXED_BY_CODE = frozenset(("activation", "norm_eps", "position_resampling"))
"""Fields whose values are fixed in code for one kind of model."""
# Their order is the order of changes: earlier fields are fitted first (`weights/verify.py`).
COMMON: dict[str, Any] = {
    "stem": ("convolution", "linear"),
    "patch_bias": True,
    "class_token": True,
    "positions": "learned",
    "positions_cover_prefix": True,
    "embedding_norm": False,
    "block": "pre_norm",
    "norm": "layer",
    "qk_norm": False,
    "final_norm": True,
    "norm_before_pool": True,
    "head_width": None,
}
"""Capabilities of most formats: those of code for the ViT of the first paper, and for DINOv2."""
FIRST_PAPER: dict[str, Any] = {
    **COMMON,
    "num_registers": 0,
    "norm_eps": 1e-6,
    "activation": "gelu",
    "mlp": "plain",
    "qkv_bias": True,
    "pooling": "cls",
}
"""Capabilities of PyTorch code for the ViT of the first paper."""
CLASS_TOKEN_ONLY: dict[str, Any] = {"distillation_token": False, "layer_scale": None}
"""Capabilities of code with a class token alone, and without LayerScale."""
WEIGHTS_FILE = "model.safetensors"


def bundle_writer(bundle: Bundle, metadata: Mapping[str, str] | None = None) -> FileWriter:
    """Return the writer of a bundle's tensors as one safetensors file.

    Args:
        bundle: its spec, preprocessing and classes go into the header, where the format itself may
            have no place for them.
        metadata: further text entries of the header.
    """
    description = checkpoint.model_description(bundle.spec, bundle.preprocess, bundle.classes)
    header = {checkpoint.FOREIGN_METADATA_KEY: json.dumps(description), **(metadata or {})}
    return files.safetensors_writer(bundle.tensors, header)


def with_prefix(tensors: Mapping[str, Tensor], prefix: str, *, but: str) -> dict[str, Tensor]:
    """Return tensors with a prefix before all names that do not contain `but`."""
    prefixed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # Such as the head of a task model, which lies beside the base model.
        prefixed[name if but in name else prefix + name] = tensor
    return prefixed


def weights_file(path: Path) -> Path:
    """Return the file of weights in a folder written by vitkit, or `path` if it is a file."""
    if path.is_dir():
        return path / WEIGHTS_FILE
    return path


# Inference of a spec from shapes: the parts that formats share.

HALF_MEAN = Preprocess(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
IMAGENET_MEAN = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
OPEN_FIELDS = (
    "num_heads",
    "norm_eps",
    "activation",
    "image_size",
    "position_resampling",
    "preprocess",
)
"""Spec fields, and the preprocessing, that the tensors of a ViT's first paper leave open."""
HEADS_BY_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}
"""Widths whose published models have heads that are not 64 wide; 1536 has 24 in DINOv2."""


def how_to_state(field: str, value: int | tuple[int, int] | str = "N") -> str:
    """Return the end of a message: how to state a field of the spec that a file leaves open."""
    if isinstance(value, tuple) and value[0] == value[1]:
        value = value[0]
    words = str(list(value)).replace(" ", "") if isinstance(value, tuple) else value
    flag = f"--spec.{field.replace('_', '-')} {words}"
    return (
        f"pass {field}={value} ({flag}); for a command without that flag, convert it first: "
        f"vitkit convert FILE OUT --to vitkit {flag}"
    )


def usual_heads(width: int) -> int:
    """Return the number of heads that published models of this width have."""
    return HEADS_BY_WIDTH.get(width, max(1, width // 64))


def as_pair(size: Any) -> tuple[int, int]:
    """Return (height, width) of a size that may be one number."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def depth_of(names: Iterable[str], block: str) -> int:
    """Return the number of blocks that the names count.

    Args:
        names: names of tensors.
        block: start of the names in a block, with `{i}` for its number.

    Raises:
        CheckpointError: a number that is left out, or no block.
    """
    pattern = re.compile(re.escape(block.partition("{i}")[0]) + r"(\d+)")
    # A set, as each block has several tensors.
    numbers = {match[1] for match in map(pattern.match, names) if match}
    for number in range(max(len(numbers), 1)):
        if str(number) not in numbers:
            raise CheckpointError(f"block {number} is missing; the file has {len(numbers)} others")
    return len(numbers)


def image_size(rows: int, prefix: int, patch: Sequence[int], requested: Any) -> tuple[int, int]:
    """Return the image size (H, W) in pixels that a position table is for.

    Args:
        rows: rows of the table.
        prefix: those of them that belong to prefix tokens.
        patch: (height, width) in pixels.
        requested: one number, (H, W), or None for a square of the grid in the table.

    Raises:
        CheckpointError: a requested size with another number of patches, or that patches do not
            divide; a table that is for no square.
    """
    count = rows - prefix
    problem = ""
    if requested is None:
        side = math.isqrt(max(count, 0))
        if side * side != count or side == 0:
            problem = (
                f"{rows} rows of positions minus {prefix} for prefix tokens are not a square grid; "
                f"{how_to_state('image_size', '[H,W]')}"
            )
        height, width = side * patch[0], side * patch[1]
    else:
        height, width = as_pair(requested)
        grid = (height // patch[0], width // patch[1])
        covered = (grid[0] * patch[0], grid[1] * patch[1])
        # The number of patches is checked first: it tells more of the mistake than a remainder.
        if grid[0] * grid[1] != count:
            problem = (
                f"image_size {height} x {width} gives {grid[0]} x {grid[1]} patches; the file has "
                f"positions for {count}"
            )
        elif covered != (height, width):
            problem = (
                f"image_size {height} x {width} is not divisible by its patches, {patch[0]} x "
                f"{patch[1]}; they cover {covered[0]} x {covered[1]} pixels: "
                f"{how_to_state('image_size', covered)}"
            )
    if problem:
        raise CheckpointError(problem)
    return height, width


def plain_fields(
    shapes: files.Shapes,
    requested: Any,
    *,
    kernel: str,
    positions: str,
    block: str,
    head: str = "",
    mlp: str = "",
    packed: str = "",
    gate: str = "",
    prefix: int = 1,
    stride: int = 1,
) -> dict[str, Any]:
    """Return the sizes of a ViT with a convolution and a learned table, and the usual heads.

    Args:
        shapes: those of the file.
        requested: the image size, or None, as for `image_size`.
        kernel: name of the patch projection (D, C, P, Q).
        positions: name of the position table (1, prefix + N, D).
        block: start of the names in a block, with `{i}`.
        head: name of the head's matrix, if there is one.
        mlp: name in a block of the MLP's first layer.
        packed: likewise, where that has the gate and the value of a SwiGLU.
        gate: likewise, where a SwiGLU's gate is apart.
        prefix: prefix tokens with a row in the table.
        stride: pixels of a cell of the map that the kernel covers; 1 for the image itself.
    """
    width, channels, *sides = shapes[kernel]
    patch = [side * stride for side in sides]
    first = f"{block.format(i=0)}%s.weight"
    return {
        "image_size": image_size(shapes[positions][1], prefix, patch, requested),
        "patch_size": tuple(patch),
        "in_channels": channels,
        "width": width,
        "num_classes": shapes.get(head, (0,))[0],
        "depth": depth_of(shapes, block),
        "num_heads": usual_heads(width),
        **mlp_fields(shapes, first % mlp, first % packed, first % gate),
    }


def mlp_fields(
    shapes: files.Shapes, plain: str, packed: str = "", gate: str = ""
) -> dict[str, Any]:
    """Return kind and width of the MLP, by the names of matrices, of which the file has one.

    Args:
        shapes: those of the file.
        plain: the first of two.
        packed: gate and value of a SwiGLU.
        gate: the gate of a SwiGLU alone.
    """
    if packed in shapes:
        return {
            "mlp": "swiglu_packed",
            "activation": "silu",
            "mlp_width": shapes[packed][0] // 2,
        }
    if gate in shapes:
        return {"mlp": "swiglu_split", "activation": "silu", "mlp_width": shapes[gate][0]}
    return {"mlp": "plain", "mlp_width": shapes[plain][0]}


def resnet_layers(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    """Return the number of units of each stage of a ResNet stem.

    Args:
        names: names of tensors.
        pattern: matches one tensor of each unit of a stage, `{s}`, or `{s1}` where they start at 1.
    """
    stages = range(len(STAGE_STRIDES))
    counts = [len(fnmatch.filter(names, pattern.format(s=s, s1=s + 1))) for s in stages]
    return tuple(itertools.takewhile(bool, counts))


def finish(
    fields: Mapping[str, Any],
    overrides: Mapping[str, Any],
    preprocess: Preprocess,
    *,
    stored: Iterable[str] = (),
    usual: Iterable[str] = (),
    classes: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
) -> Inferred:
    """Return an `Inferred` of fields that are known in different ways.

    Args:
        fields: fields of `ViTSpec`; those that are neither `stored` nor `usual` follow from shapes.
        overrides: fields that the user gives; they count as stored.
        preprocess: its `image_size` becomes the spec's; for another number of channels, mean and
            std become the means of theirs, as many formats state three for grey images too.
        stored: fields (or `preprocess`) that the file itself states.
        usual: fields (or `preprocess`) that are only usual for files of this format.
        classes: class names, if the file has them.
        warnings: one line each.
    """
    spec = ViTSpec(**{**fields, **overrides})
    # In this order: a value that is stated is no longer only usual.
    sure: dict[str, Sure] = dict.fromkeys(fields, "shapes")
    sure |= dict.fromkeys(usual, "usual")
    sure |= dict.fromkeys((*stored, *overrides), "stored")
    # A grey model whose file states three means, or the reverse: all channels get their average.
    count = spec.in_channels
    if count != preprocess.channels:
        mean = sum(preprocess.mean) / len(preprocess.mean)
        std = sum(preprocess.std) / len(preprocess.std)
        preprocess = preprocess.replace(mean=(mean,) * count, std=(std,) * count)
    return Inferred(spec, preprocess.replace(image_size=spec.image_size), classes, sure, warnings)


# Exact changes that depend on a model's values, not only on its spec; see `Format.settle`.


def double_class_head(state: State) -> tuple[State, Step]:
    """Turn a model that reads its class head alone into the mean of two heads.

    The mean of twice the class head and zero is the class head.
    """
    changed = dict(state)
    # mean(2 h, 0) = h for the logits h of the class head.
    for kind in ("weight", "bias"):
        changed[f"head.{kind}"] = 2 * state[f"head.{kind}"]
        changed[f"head_dist.{kind}"] = torch.zeros_like(state[f"head_dist.{kind}"])
    return changed, Step("folded", "distilled_readout: twice the class head beside one of zeros")


def fold_register_positions(fitted: Fitted) -> Fitted:
    """Add the position rows of registers to the registers, and set those rows to zero.

    For position tables without rows for registers.
    """
    spec, state, steps = fitted
    if not (spec.num_registers and spec.position_rows and spec.positions_cover_prefix):
        return fitted
    # Token + position is all that the blocks see, so the sum may be split in another way.
    # The table starts with the rows of the prefix tokens, registers last of these.
    rows = slice(1 + spec.distillation_token, spec.num_prefix_tokens)
    if not state["pos_embed"][:, rows].any():
        return fitted
    positions = state["pos_embed"].clone()
    registers = state["reg_token"] + positions[:, rows]
    positions[:, rows] = 0
    step = Step("folded", "pos_embed: the rows of the registers added to the registers")
    changed = {**state, "pos_embed": positions, "reg_token": registers}
    return Fitted(spec, changed, [*steps, step])

"""`Format`: a checkpoint format, the data that pass through it, and their description.

A format recognises its files (`detect`), infers the model's spec from one (`infer`), and maps the
names of its tensors to ours and back (`table`). `FORMATS` in `registry` has all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

from torch import Tensor, nn

from vitkit.errors import CheckpointError, SpecError
from vitkit.io.atomic import FileWriter
from vitkit.io.results import parse_json
from vitkit.messages import plural
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.array_files import safetensors_writer
from vitkit.weights.formats.infer_spec import Inferred
from vitkit.weights.formats.key_table import Table
from vitkit.weights.tensor_file import Header, Source


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
Capabilities: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Spec field -> the values that a class of models can have, the preferred one first."""
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


# In most libraries a block returns its tokens, and a model its logits.
def _block_output(inputs: Any, output: Any) -> Any:
    return output


def _as_logits(output: Any) -> Any:
    return output


class BuiltModel(NamedTuple):
    """A model of another library, with its weights.

    Attributes:
        model: maps images (B, C, H, W) to the argument of `logits`.
        blocks: the module at the end of each block.
        tokens: maps that module's input and output to the block's tokens (B, T, D).
        logits: maps the model's output to logits (B, K).
    """

    model: nn.Module
    blocks: Iterable[nn.Module]
    tokens: Callable[[Any, Any], Any] = _block_output
    logits: Callable[[Any], Any] = _as_logits


class ReferenceLibrary(NamedTuple):
    """The Python package that reads a format.

    Attributes:
        distribution: its name on the package index.
        oldest: the first version that vitkit is tested with.
        modules: modules that must be importable.
        build: makes the library's model of files: a folder or one file, and the spec of the model
            in them. Returns None where none of its classes computes that model.
    """

    distribution: str
    oldest: tuple[int, ...]
    modules: tuple[str, ...]
    build: Callable[[Path, ViTSpec], BuiltModel | None]


Writer = Callable[[Bundle], dict[str, FileWriter]]
"""Makes the files of a folder: name -> writer; a single one where the format is one file."""


def _with_these_names(source: Source) -> Source:
    return source


def _unchanged(fitted: Fitted) -> Fitted:
    return fitted


def _no_resampling(spec: ViTSpec) -> str | None:
    return None


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
        write: makes the files of a folder in this format.
        prepare: renames older or other names of the format to those of its table, if it has any.
        fixed: fields that the code of the format decides, whatever model a file is of.
        settle: exact changes that depend on the numbers, after those that the spec asks for.
        resampling: how its library resamples learned positions for another image size; `None` where
            it takes one size only.
        reference: the package that reads the format, or `None`.
    """

    name: str
    detect: Callable[[Header], bool]
    infer: Callable[[Header, Mapping[str, Any]], Inferred]
    table: Callable[[ViTSpec], Table]
    capabilities: tuple[Capabilities, ...]
    write: Writer
    prepare: Callable[[Source], Source] = _with_these_names
    fixed: frozenset[str] = frozenset()
    settle: Callable[[Fitted], Fitted] = _unchanged
    resampling: Callable[[ViTSpec], str | None] = _no_resampling
    reference: ReferenceLibrary | None = None


FIXED_BY_CODE = frozenset(("activation", "norm_eps", "position_resampling"))
"""Fields whose values are fixed in code for one kind of model."""
# Their order is the order of changes: earlier fields are fitted first (`weights/verify.py`).
FIRST_PAPER: dict[str, tuple[Any, ...]] = {
    "stem": ("convolution", "linear"),
    "patch_bias": (True,),
    "class_token": (True,),
    "num_registers": (0,),
    "positions": ("learned",),
    "embedding_norm": (False,),
    "block": ("pre_norm",),
    "norm": ("layer",),
    "norm_eps": (1e-6,),
    "activation": ("gelu",),
    "mlp": ("plain",),
    "qkv_bias": (True,),
    "qk_norm": (False,),
    "pooling": ("cls",),
    "final_norm": (True,),
    "norm_before_pool": (True,),
    "head_width": (None,),
}
"""Capabilities of PyTorch code for the ViT of the first paper: those that all such code shares."""
CLASS_TOKEN_ONLY: dict[str, tuple[Any, ...]] = {
    "distillation_token": (False,),
    "positions_cover_prefix": (True,),
    "layer_scale": (None,),
}
"""Capabilities of code with a class token alone, with a position, and without LayerScale."""
WEIGHTS_FILE = "model.safetensors"


def bundle_writer(bundle: Bundle, metadata: Mapping[str, str] | None = None) -> FileWriter:
    """Return the writer of a bundle's tensors as one safetensors file.

    Args:
        bundle: its spec, preprocessing and classes go into the header, where the format itself may
            have no place for them.
        metadata: further text entries of the header.
    """
    description = model_description(bundle.spec, bundle.preprocess, bundle.classes)
    header = {FOREIGN_METADATA_KEY: json.dumps(description), **(metadata or {})}
    return safetensors_writer(bundle.tensors, header)


def one_file(bundle: Bundle) -> dict[str, FileWriter]:
    """Return the single file of a format whose files hold tensors alone."""
    return {WEIGHTS_FILE: bundle_writer(bundle)}


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


# The description of a model in the header of a file that vitkit wrote.
#
# One JSON document: spec, preprocessing and class names. In vitkit's own files it has more entries,
# which `formats.vitkit` writes; in other formats it has what the format cannot store.

OWN_FORMAT = "vitkit"
METADATA_KEY = "vitkit"
"""The entry of the header's metadata with the description."""
FOREIGN_METADATA_KEY = "vitkit_about"
"""That entry in files of another format: everything that the format cannot store."""
LONGEST_REASON = 300
"""Characters of an error about a description, as that error may quote all of it."""


def model_description(
    spec: ViTSpec, preprocess: Preprocess, classes: Sequence[str]
) -> dict[str, Any]:
    """Return spec, preprocessing and class names as JSON values."""
    return {
        "spec": spec.to_json(),
        "preprocess": preprocess.to_json(),
        "classes": list(classes),
    }


@dataclass(frozen=True)
class Description:
    """The description in vitkit's own file, or in one that vitkit wrote in another format.

    Attributes:
        spec: the architecture.
        preprocess: how images are resized and normalised.
        classes: the class names, or none.
        document: all of the JSON.
    """

    spec: ViTSpec
    preprocess: Preprocess
    classes: tuple[str, ...]
    document: dict[str, Any]


def read_description(header: Header, entry: str = METADATA_KEY) -> Description | None:
    """Return the description in a header, or None where it has none.

    Args:
        header: header of the file.
        entry: key of the header's metadata: `METADATA_KEY` or `FOREIGN_METADATA_KEY`.

    Raises:
        CheckpointError: a description that cannot be read, or that contradicts itself.
    """
    if entry not in header.metadata:
        return None  # a file of another program
    try:
        document = parse_json(header.metadata[entry])
        spec = ViTSpec.from_json(document["spec"])
        preprocess = Preprocess.from_json(document["preprocess"])
        # Optional, unlike spec and preprocessing: a head may have no names.
        classes = document.get("classes", [])
    # The header may come from anyone: each of these is a document of another form.
    except (SpecError, LookupError, TypeError, ValueError, RecursionError, AttributeError) as error:
        reason = " ".join(str(error)[:LONGEST_REASON].split())
        raise CheckpointError(f"{header.path}: its description cannot be read: {reason}") from None
    if not isinstance(classes, list):
        raise CheckpointError(f"{header.path}: its class names are not a list of strings")
    refuse_contradictions(header.path, spec, preprocess, classes)
    return Description(spec, preprocess, tuple(classes), document)


def refuse_contradictions(
    path: Path, spec: ViTSpec, preprocess: Preprocess, classes: Sequence[str]
) -> None:
    """Refuse preprocessing and class names that contradict the model in the same file.

    Raises:
        CheckpointError: names that are no texts, another number of them than the head has classes,
            or images of other channels than the model's.
    """
    if not all(isinstance(name, str) for name in classes):
        raise CheckpointError(f"{path}: its class names are not a list of strings")
    if classes and len(classes) != spec.num_classes:
        raise CheckpointError(
            f"{path}: {len(classes)} class names do not match a head of {spec.num_classes}"
        )
    if preprocess.channels != spec.in_channels:
        raise CheckpointError(
            f"{path}: its preprocessing has {plural(preprocess.channels, 'channel')}, its model "
            f"{spec.in_channels}"
        )

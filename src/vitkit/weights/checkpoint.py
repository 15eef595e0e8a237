"""`Checkpoint`: a model with its preprocessing, class names and metadata; and vitkit's own file.

The file is one `.safetensors` with the weights and everything needed to use them. The tensors have
timm's names. The header's metadata has one JSON document under the key `vitkit`: format version,
spec, preprocessing, class names, versions, a sha256 for each group of tensors, and whatever the
writer adds (recipe, metrics, data fingerprint, licence). Reading checks all of it against the
header's shapes before any tensor is read. `formats.vitkit` writes it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vitkit.errors import CheckpointError, SpecError
from vitkit.io.untrusted import parse_json, refuse
from vitkit.messages import plural
from vitkit.models.interface.pretrained import Origin
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.files import Header, Shapes, Source, tensor_digests

PUBLISHER = "vitkit.weights.publish:publish"
"""The function behind `Checkpoint.push_to_hub`, imported when it is called."""


@runtime_checkable
class LabelledModel(Protocol):
    """A model with the facts needed to open labelled images for it and to count its predictions.

    Attributes:
        classes: the K class names; empty where they are not known.
        classes_assumed: True if they are assumed to be those of ImageNet-1k.
        num_classes: K.
        metadata: any JSON, such as the settings of the training.
        temperature: divides the logits before the softmax.
    """

    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def classes_assumed(self) -> bool: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A model with everything it needs to be used.

    Attributes:
        model: the ViT in eval mode, weights as stored.
        preprocess: how images are resized, cropped and normalised for it.
        classes: the K class names in the order of the logits; empty where they are not known.
        format: name of the file's format; `vitkit` for our own.
        metadata: the whole JSON document of the file.
        path: the file it was read from, or `None`.
        dtype: of the numbers in the file, `float32` or a half precision; the model has float32,
            to which float64 is rounded.
    """

    model: ViT
    preprocess: Preprocess
    classes: tuple[str, ...]
    format: str = "vitkit"
    metadata: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    dtype: str = "float32"

    def __repr__(self) -> str:
        """Return one line: the format, the model's size, its images and the number of classes."""
        spec = self.model.spec
        millions = sum(weight.numel() for weight in self.model.parameters()) / 1e6
        height, width = self.preprocess.image_size
        return (
            f"Checkpoint({self.format}, {millions:.1f} M parameters, {spec.depth} blocks of width "
            f"{spec.width}, {height} x {width} pixels, {spec.num_classes} classes)"
        )

    @property
    def num_classes(self) -> int:
        """K, the number of logits; 0 without a head."""
        return self.model.spec.num_classes

    @property
    def classes_assumed(self) -> bool:
        """True if no file names the classes and they are assumed to be those of ImageNet-1k."""
        return names_are_assumed(self.classes, self.metadata)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each part of the model that is guessed, random or left out."""
        lines = texts(self.metadata, "warnings")
        return tuple(line for line in lines if line != ASSUMED or self.classes_assumed)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the file's tensors that are not in the model, as `strict=False` allows."""
        return texts(self.metadata, "left_out")

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the model's tensors that the file lacks; they have random initial values."""
        return texts(self.metadata, "fresh")

    @property
    def origin(self) -> Origin:
        """The facts stored in the model as `model.origin`."""
        licence = self.metadata.get("licence")
        if not isinstance(licence, str):  # a file may have anything there
            licence = ""
        return Origin(
            source=str(self.metadata.get("catalogue") or self.path or ""),
            format=self.format,
            preprocess=self.preprocess,
            classes=self.classes,
            licence=licence,
            left_out=self.left_out,
            missing=self.missing,
            classes_assumed=self.classes_assumed,
        )

    @property
    def temperature(self) -> float:
        """Divisor of the logits before the softmax; 1 where none was fitted.

        Raises:
            CheckpointError: a stored value that is no positive number.
        """
        # From a file: it may be any JSON value, and True is an int in Python.
        stored = self.metadata.get("temperature", 1.0)
        if type(stored) not in (int, float) or not 0 < stored < math.inf:
            raise CheckpointError(
                f"{self.path or 'checkpoint'}: its temperature is {stored!r}, not a positive "
                "number; download or save the file again"
            )
        return float(stored)

    def push_to_hub(
        self,
        name: str,
        *,
        to: str = "huggingface",
        private: bool = False,
        allow_lossy: bool = False,
        message: str = "Upload weights",
        hub: Any = None,
    ) -> str:
        """Upload it to the Hugging Face Hub, as a folder with a model card.

        Args:
            name: `owner/name`; created if it does not exist.
            to: the format: `huggingface` loads by `transformers` too, `timm` by timm, `vitkit`
                keeps all metadata of the checkpoint.
            private: make a new repository private.
            allow_lossy: as for `vitkit.convert`.
            message: message of the commit.
            hub: the client to upload with, such as `huggingface_hub.HfApi(token=...)`; default
                one with your login.

        Returns:
            The address of the repository, which `vitkit.load` takes.

        Raises:
            CheckpointError: a model that the format cannot hold.
            OutputError: the Hub refuses, or cannot be reached.
        """
        # By its name, so that a reader of checkpoints does not import the writers of all formats.
        address: str = resolve_name(PUBLISHER)(
            self, name, to=to, private=private, allow_lossy=allow_lossy, message=message, hub=hub
        )
        return address


def texts(metadata: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the texts of a list in a file's metadata; none where a file has another value there.

    Args:
        metadata: metadata of a checkpoint.
        key: such as `adapted`, `notes` or `warnings`.
    """
    values = metadata.get(key)
    if not isinstance(values, list):
        return ()
    return tuple(map(str, values))


def names_for_data(checkpoint: LabelledModel, names: Sequence[str]) -> tuple[str, ...]:
    """Return a checkpoint's K class names in the spelling of a dataset.

    Args:
        checkpoint: if its names are assumed, they also match WordNet ids, such as folders called
            n01440764.
        names: the classes of the dataset.

    Returns:
        K names; none where the checkpoint's are only assumed and the dataset has others.
    """
    if not checkpoint.classes_assumed or set(names) <= set(checkpoint.classes):
        return checkpoint.classes
    # Folders of ImageNet are often named by WordNet ids, in the order of the logits.
    ids = tuple(imagenet())
    if set(names) <= set(ids):
        return ids
    return ()


def stored_object(checkpoint: LabelledModel, name: str) -> dict[str, Any]:
    """Return an object of a checkpoint's metadata; an empty one if there is none.

    Args:
        checkpoint: checkpoint of any origin, so that its metadata may be any JSON.
        name: name of the object, such as `recipe`.
    """
    value = checkpoint.metadata.get(name)
    if not isinstance(value, dict):
        return {}
    return value


# A model's tensors by its spec: names, shapes, initial values, and a model filled with them.


@lru_cache(maxsize=4)
def blank_model(spec: ViTSpec) -> ViT:
    """Return a model on the meta device, which has shapes but no values; it must not be changed."""
    with torch.device("meta"):
        return ViT(spec)


@lru_cache(maxsize=4)
def tensor_shapes(spec: ViTSpec) -> Mapping[str, tuple[int, ...]]:
    """Return names and shapes of a model's tensors, without allocating them."""
    return {name: tuple(t.shape) for name, t in blank_model(spec).state_dict().items()}


def initial_values(spec: ViTSpec, names: Iterable[str]) -> dict[str, Tensor]:
    """Return initial values of some tensors, the same in every call; no generator is advanced."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed every GPU
        state = ViT(spec).state_dict()
    return {name: state[name].float() for name in names}


def filled_model(spec: ViTSpec, tensors: dict[str, Tensor]) -> tuple[ViT, str, list[str]]:
    """Return a model in eval mode with these weights as float32.

    It takes the tensors out of the dictionary, so that the model is the only copy of them.

    Returns:
        The model, the dtype that the weights had, and a note on rounding if there was any.
    """
    # No memory is allocated for initial values: assign=True puts the tensors in their place.
    with torch.device("meta"):
        model = ViT(spec)
    # Remembered, so that a file of half precision is written as one again.
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    floats: dict[str, Tensor] = {}
    rounded = 0
    for name in list(tensors):
        stored = tensors.pop(name)
        floats[name] = stored.float()
        # float32 may hold the same numbers: only those that change are worth a note.
        if stored.dtype == torch.float64:
            rounded += not torch.equal(floats[name].double(), stored)
    model.load_state_dict(floats, assign=True)
    notes = []
    if rounded:
        notes.append(f"rounded from float64 to float32: {plural(rounded, 'tensor')}")
    dtype = "float32"
    if len(dtypes) == 1 and dtypes != {"float64"}:
        dtype = dtypes.pop()
    return model.eval(), dtype, notes


# The description of a model in the header of a file that vitkit wrote: spec, preprocessing, class
# names. In files of other formats it has what the format cannot store.

OWN_FORMAT = "vitkit"
OWN_VERSION = 1
"""Version of the format, written into every file."""
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
    names = list(classes) if isinstance(classes, list | tuple) else [None]
    problems = {
        "its class names are not a list of strings": any(not isinstance(n, str) for n in names),
        f"{len(names)} class names do not match a head of {spec.num_classes}": (
            len(names) not in (0, spec.num_classes)
        ),
        f"its preprocessing has channels: {preprocess.channels}, its model: {spec.in_channels}": (
            preprocess.channels != spec.in_channels
        ),
    }
    refuse(path, problems)


def read_own(source: Source, description: Description) -> dict[str, Tensor]:
    """Read the tensors of a file of ours, checked against its description and its digests.

    Raises:
        CheckpointError: weights that do not fit the spec in the file, or are damaged.
    """
    check_description(source.header, description)
    tensors = dict(source)
    # A file without digests is read, too; where there are some, each group must have its own.
    expected = description.document.get("sha256")
    if expected is not None:
        actual = tensor_digests(tensors)
        stated = expected if isinstance(expected, dict) else {}
        damaged = [group for group, digest in actual.items() if stated.get(group) != digest]
        problem = (
            f"{', '.join(damaged[:1])} is damaged: its sha256 is not the one that the header "
            "states; download or copy the file again"
        )
        refuse(source.header.path, {problem: damaged})
    return tensors


def check_description(header: Header, description: Description) -> None:
    """Check a description against the header: version, names and shapes; no tensor is read.

    Raises:
        CheckpointError: a newer version; tensors missing, unknown, or of another shape.
    """
    version = description.document.get("format_version")
    # Checked before `tensor_shapes` builds the model: a file may declare a million blocks.
    blocks = description.spec.depth + sum(description.spec.resnet_layers)
    difference = f"{blocks} blocks in {len(header.shapes)} tensors"
    if blocks <= len(header.shapes):
        difference = difference_of(tensor_shapes(description.spec), header.shapes)
    problems = {
        f"format version {version!r}; this vitkit reads 1 to {OWN_VERSION}; upgrade vitkit": (
            type(version) is not int or not 1 <= version <= OWN_VERSION
        ),
        f"contradicts the spec in the file: {difference}": difference,
    }
    refuse(header.path, problems)


def difference_of(expected: Shapes, actual: Shapes) -> str:
    """Describe how tensors differ from those of a spec, or return an empty text."""
    missing = sorted(expected.keys() - actual.keys())
    unknown = sorted(actual.keys() - expected.keys())
    if missing or unknown:
        return (
            f"{plural(len(missing), 'tensor')} missing ({', '.join(missing[:5]) or 'none'}), "
            f"{len(unknown)} unknown ({', '.join(unknown[:5]) or 'none'})"
        )
    for name, shape in actual.items():
        if shape != expected[name]:
            return f"{name} has shape {shape}, the spec needs {expected[name]}"
    return ""


# ImageNet-1k's class names, for a head of 1,000 rows whose file names none.
#
# The order is that of the sorted WordNet ids (n01440764, n01443537, ...). All published heads of
# 1,000 classes have it: Google's and jeonsworld's (TensorFlow Datasets' `imagenet2012`), timm's,
# torchvision's, DeiT's and DINOv2's (folders of images in sorted order), and those on the Hugging
# Face Hub, which name their classes themselves. Heads of 11,821 or 21,843 rows get no names.

ASSUMED = (
    "the file has no class names; its 1,000 classes are assumed to be those of ImageNet-1k, in "
    "order"
)
"""The warning in the metadata of a checkpoint whose class names are assumed."""


@cache
def imagenet() -> Mapping[str, str]:
    """Return WordNet id -> short name of the 1,000 classes, in the order of the logits.

    The table is read at the first call.
    """
    text = resources.files("vitkit.weights").joinpath("imagenet.tsv").read_text(encoding="utf-8")
    lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return MappingProxyType(dict(lines))


def assumed_names(spec: ViTSpec, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return ImageNet-1k's names for a model of colour images with 1,000 classes and no names.

    Args:
        spec: the model.
        classes: the names in its file.

    Returns:
        1,000 names, or none for any other model.
    """
    # A grey model of 1,000 classes is no ImageNet model.
    if classes or spec.num_classes != 1000 or spec.in_channels != 3:
        return ()
    return tuple(imagenet().values())


def with_assumption(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's metadata with the warning that its class names are assumed."""
    sure = metadata.get("sure")
    if not isinstance(sure, Mapping):
        sure = {}
    warnings = metadata.get("warnings")
    if not isinstance(warnings, list):
        warnings = []
    return {
        **metadata,
        "sure": {**sure, "classes": "usual"},
        "warnings": [*(line for line in warnings if line != ASSUMED), ASSUMED],
    }


def names_are_assumed(classes: Sequence[str], metadata: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint's metadata mark its class names as assumed.

    Args:
        classes: its class names.
        metadata: may be older than the names, as of a model that got another head since.
    """
    sure = metadata.get("sure")
    if not isinstance(sure, Mapping) or sure.get("classes") != "usual":
        return False
    # A head of other classes may carry the metadata of the checkpoint that it began with.
    return bool(classes) and set(classes) <= set(imagenet().values())

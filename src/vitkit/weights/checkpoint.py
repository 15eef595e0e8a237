"""`Checkpoint`: a model with its preprocessing, class names and metadata.

The class does not import readers or writers of files, so neither does code that uses a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vitkit.data.images.preprocess import Preprocess
from vitkit.errors import CheckpointError
from vitkit.messages import plural
from vitkit.models.interface.pretrained import Origin
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.catalogue import ASSUMED, imagenet, names_are_assumed

PUBLISHER = "vitkit.weights.publish:publish"
"""The function behind `Checkpoint.push_to_hub`, imported when it is called."""


@runtime_checkable
class Hub(Protocol):
    """The methods of `huggingface_hub.HfApi` that an upload calls."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> object:
        """Create the repository if it does not exist."""

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> object:
        """Upload all files of a folder in one commit."""


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
        hub: Hub | None = None,
    ) -> str:
        """Upload it to the Hugging Face Hub, as a folder with a model card.

        Args:
            name: `owner/name`; created if it does not exist.
            to: the format: `huggingface` loads by `transformers` too, `timm` by timm, `vitkit`
                keeps all metadata of the checkpoint.
            private: make a new repository private.
            allow_lossy: as for `vitkit.convert`.
            message: message of the commit.
            hub: the client to upload with; default `huggingface_hub.HfApi()`, which has your
                login.

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
    notes: list[str] = []
    if rounded == 1:
        notes = ["1 tensor of float64 is rounded to float32"]
    elif rounded:
        notes = [f"{plural(rounded, 'tensor')} of float64 are rounded to float32"]
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    if dtype == "float64":
        dtype = "float32"
    return model.eval(), dtype, notes

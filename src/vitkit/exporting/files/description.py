"""The description inside an exported model: preprocessing, classes, temperature, figures.

The description is one JSON document inside the artefact: in the metadata of an ONNX file, in the
`rt_info` of an OpenVINO model, and in an extra file of a `.pt2` archive.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError, SpecError
from vitkit.exporting.files.endings import ENDINGS
from vitkit.io.strict_json import parse_json
from vitkit.messages import escape
from vitkit.spec import Preprocess
from vitkit.weights.imagenet_classes import names_are_assumed

ARTEFACT_KEY = "vitkit"
"""Key of the description in the metadata of each format."""
ARTEFACT_VERSION = 1
"""Version of the description, written into every artefact."""
MAX_DESCRIPTION_BYTES = 8_000_000
"""Size of a description; 20,000 class names have some 400,000."""
FORMATS = tuple(ENDINGS)
CLASSES_SHOWN = 5


@dataclass(frozen=True)
class ArtefactDescription:
    """The description of an exported model.

    Attributes:
        format: `onnx`, `openvino`, `torch` or `aoti`.
        preprocess: how images are resized and normalised for it.
        classes: the K class names in the order of the logits; empty means numbers.
        num_classes: K.
        temperature: divides the logits before the softmax.
        precision: precision of the numbers: `float32`, `bfloat16` or `float16`.
        int8: True if the linear layers of the blocks are quantised.
        with_preprocessing: True if the graph takes uint8 images (B, H, W, 3) of any size and
            returns probabilities and logits; else it takes (B, C, h, w) float32 and returns logits.
        versions: versions of the libraries that wrote it.
        source: the checkpoint's name, its sha256, if it is a file, and `metadata`, the part of its
            metadata that says how its data were opened and split.
        figures: figures of the check after writing, as `OUT.json` has them.
    """

    format: str
    preprocess: Preprocess
    classes: tuple[str, ...]
    num_classes: int
    temperature: float
    precision: str = "float32"
    int8: bool = False
    with_preprocessing: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, Any]:
        """How the checkpoint's data were opened and split, by the names of its own metadata."""
        stored = self.source.get("metadata")
        return stored if isinstance(stored, dict) else {}

    @property
    def classes_assumed(self) -> bool:
        """True if no file names the classes and they are assumed to be those of ImageNet-1k."""
        return names_are_assumed(self.classes, self.metadata)

    def to_text(self) -> str:
        """Return the JSON document."""
        document = {
            "format_version": ARTEFACT_VERSION,
            **vars(self),
            "preprocess": self.preprocess.to_json(),
            "classes": list(self.classes),
        }
        return json.dumps(document, allow_nan=False)

    def lines(self) -> list[str]:
        """Return lines that describe the exported model for a person."""
        size = " x ".join(map(str, self.preprocess.image_size))
        inputs = f"(B, {self.preprocess.channels}, {size}) float32, normalised"
        if self.with_preprocessing:
            inputs = "(B, H, W, 3) uint8 RGB of any size; resizes and normalises them itself"
        precision = f"{self.precision}, linear layers of the blocks in int8"
        lines = [
            f"format: {self.format}, exported by vitkit "
            f"{escape(str(self.versions.get('vitkit', '')))}",
            f"source: {escape(str(self.source.get('name', 'a model in memory')))}",
            f"precision: {escape(precision if self.int8 else self.precision)}",
            f"input: {inputs}",
            f"classes: {self.num_classes:,}{_few(self.classes)}",
            f"temperature: {self.temperature:g}",
        ]
        agreement, images = self.figures.get("agreement"), self.figures.get("images")
        if isinstance(agreement, float) and isinstance(images, int):
            lines.append(f"same class as torch: {agreement:.2%} of {images:,} images")
        return lines

    @classmethod
    def from_text(cls, text: str | None, path: Path) -> ArtefactDescription:
        """Parse the JSON document of an artefact.

        Args:
            text: the document; None where the artefact has none.
            path: path of the artefact, for messages.

        Raises:
            CheckpointError: no description, a damaged one, or one of a newer version.
        """
        if text is None:
            raise CheckpointError(
                f"{path}: has no description of vitkit, so its preprocessing and classes are "
                "unknown; write it with vitkit export, or pass vitkit.Predictor a function"
            )
        if len(text) > MAX_DESCRIPTION_BYTES:
            raise CheckpointError(f"{path}: a description of {len(text)} bytes is too long")
        try:
            document = parse_json(text)
        except ValueError as error:
            raise _damaged(path, f"not valid JSON: {error}") from None
        if not isinstance(document, dict):
            raise _damaged(path, "expected a JSON object")
        version = document.get("format_version")
        if type(version) is not int or not 1 <= version <= ARTEFACT_VERSION:
            raise CheckpointError(
                f"{path}: an exported model of version {version!r}; this vitkit reads 1 to "
                f"{ARTEFACT_VERSION}; upgrade vitkit, or export the checkpoint again"
            )
        return cls._from_document(document, path)

    @classmethod
    def _from_document(cls, document: dict[str, Any], path: Path) -> ArtefactDescription:
        try:
            preprocess = Preprocess.from_json(document.get("preprocess", {}))
        except SpecError as error:
            raise _damaged(path, str(error)) from None
        _check_values(document, path)
        return cls(
            format=document["format"],
            preprocess=preprocess,
            classes=tuple(document["classes"]),
            num_classes=document["num_classes"],
            temperature=float(document["temperature"]),
            precision=document["precision"],
            int8=document["int8"],
            with_preprocessing=document["with_preprocessing"],
            versions=document["versions"],
            source=document["source"],
            figures=document["figures"],
        )


LARGEST_TEMPERATURE = 1e30
"""Larger numbers mean a damaged file; JSON integers may exceed the range of a float."""
FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "format": (str,),
    "classes": (list,),
    "num_classes": (int,),
    "temperature": (int, float),
    "precision": (str,),
    "int8": (bool,),
    "with_preprocessing": (bool,),
    "versions": (dict,),
    "source": (dict,),
    "figures": (dict,),
}
"""Field of the document -> the types that its value may have."""


def _check_values(document: dict[str, Any], path: Path) -> None:
    for name, types in FIELD_TYPES.items():
        if type(document.get(name)) not in types:
            raise _damaged(path, f"{name} is {document.get(name)!r}")
    if document["format"] not in FORMATS:
        raise _damaged(path, f"format is {document['format']!r}")
    if not 0 < document["temperature"] < LARGEST_TEMPERATURE:
        raise _damaged(path, f"temperature is {document['temperature']!r}")
    classes = document["classes"]
    if any(not isinstance(name, str) for name in classes):
        raise _damaged(path, "classes are not strings")
    if classes and len(classes) != document["num_classes"]:
        raise _damaged(path, f"{len(classes)} class names for {document['num_classes']} logits")


def _few(classes: tuple[str, ...]) -> str:
    """Return the first class names in brackets."""
    if not classes:
        return ""
    more = ", ..." if len(classes) > CLASSES_SHOWN else ""
    return f" ({', '.join(map(escape, classes[:CLASSES_SHOWN]))}{more})"


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: its description is damaged: {reason}; copy or export the model again"
    )

"""The description of an exported model, and what its name tells.

The description is one JSON document inside the file: in the metadata of an ONNX file, in the
`rt_info` of an OpenVINO model, and in an extra file of a `.pt2` archive.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from vitkit import errors, messages, spec
from vitkit.io.untrusted import parse_json

ENDINGS = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2", "aoti": ".pt2"}
"""Format -> ending of the file's name."""


def is_artefact(path: str | PathLike[str]) -> bool:
    """Return True for a name that ends like an exported model's."""
    return fspath(path).lower().endswith(tuple(ENDINGS.values()))


def opens_artefact(model: object, *, plain: bool, trust_code: bool) -> bool:
    """Return True for the path of an exported model; refuse flags that do not apply to a model.

    Args:
        model: a path; anything else has been opened already.
        plain: no engine, precision, images to calibrate with, device or partial weights are asked
            for; an exported model has its own.
        trust_code: the flag `--trust-code`.

    Raises:
        SettingError: `--trust-code` with a file that runs no code, or flags of a checkpoint.
    """
    if not isinstance(model, str | PathLike):
        return False
    path = fspath(model)
    if trust_code and not path.lower().endswith(ENDINGS["torch"]):
        raise errors.SettingError(
            f"--trust-code has no effect: {path} is not a .pt2 file and runs no code; leave it out"
        )
    if is_artefact(path) and not plain:
        raise errors.SettingError(
            f"{path} is an exported model, which is whole, has its runtime and precision and runs "
            "on the CPU; leave out --engine, --precision, --calibrate, --device and --allow-partial"
        )
    return is_artefact(path)


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
        weights: SHA-256 of the weights as the format holds them; empty where it is not known.
    """

    format: str
    preprocess: spec.Preprocess
    classes: tuple[str, ...]
    num_classes: int
    temperature: float
    precision: str = "float32"
    int8: bool = False
    with_preprocessing: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    weights: str = ""

    @property
    def metadata(self) -> dict[str, Any]:
        """How the checkpoint's data were opened and split, by the names of its own metadata."""
        stored = self.source.get("metadata")
        if isinstance(stored, dict):
            return stored
        return {}

    @property
    def classes_assumed(self) -> bool:
        """True if no file names the classes and they are assumed to be those of ImageNet-1k."""
        from vitkit.weights.checkpoint import names_are_assumed  # brings torch

        return names_are_assumed(self.classes, self.metadata)

    def to_text(self) -> str:
        """Return the JSON document."""
        document = {
            "format_version": ARTEFACT_VERSION,
            **vars(self),
            "preprocess": self.preprocess.to_json(),
            "classes": list(self.classes),
            "figures": {},  # of the check, which earlier versions wrote here
        }
        return json.dumps(document, allow_nan=False)

    def lines(self) -> list[str]:
        """Return lines that describe the exported model for a person."""
        size = " x ".join(map(str, self.preprocess.image_size))
        inputs = f"(B, {self.preprocess.channels}, {size}) float32, normalised"
        if self.with_preprocessing:
            inputs = "(B, H, W, 3) uint8 RGB of any size; resizes and normalises them itself"
        precision = f"{self.precision}, linear layers of the blocks in int8"
        return [
            f"format: {self.format}, exported by vitkit "
            f"{messages.escape(str(self.versions.get('vitkit', '')))}",
            f"source: {messages.escape(str(self.source.get('name', 'a model in memory')))}",
            f"precision: {messages.escape(precision if self.int8 else self.precision)}",
            f"input: {inputs}",
            f"classes: {self.num_classes:,}{_few(self.classes)}",
            f"temperature: {self.temperature:g}",
        ]

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
            raise errors.CheckpointError(
                f"{path}: has no description of vitkit, so its preprocessing and classes are "
                "unknown; write it with vitkit export, or pass vitkit.Predictor a function"
            )
        try:
            document = parse_json(text[: MAX_DESCRIPTION_BYTES + 1])
            version = document["format_version"]
            if type(version) is int and version > ARTEFACT_VERSION:
                raise errors.CheckpointError(
                    f"{path}: an exported model of version {version}; this vitkit reads up to "
                    f"{ARTEFACT_VERSION}; upgrade vitkit, or export the checkpoint again"
                )
            _check_values(document)
            values = {name: document[name] for name in FIELD_TYPES}
            preprocess = spec.Preprocess.from_json(document["preprocess"])
        except (ValueError, TypeError, KeyError, errors.SpecError) as error:
            raise errors.CheckpointError(
                f"{path}: its description is damaged: {error}; copy or export the model again"
            ) from None
        values |= {
            "preprocess": preprocess,
            "classes": tuple(values["classes"]),
            "temperature": float(values["temperature"]),
            "weights": str(document.get("weights", "")),
        }
        return cls(**values)


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
}
"""Field of the document -> the types that its value may have."""


def _check_values(document: dict[str, Any]) -> None:
    """Raise `ValueError` for the first value that no description has."""
    wrong = ""
    for name, types in FIELD_TYPES.items():
        if type(document[name]) not in types:
            wrong = name
            break
    else:
        classes = document["classes"]
        if document["format"] not in FORMATS:
            wrong = "format"
        elif not 0 < document["temperature"] < LARGEST_TEMPERATURE:
            wrong = "temperature"
        elif not all(isinstance(name, str) for name in classes):
            wrong = "classes"
        elif classes and len(classes) != document["num_classes"]:
            wrong = "num_classes"
    if wrong:
        raise ValueError(f"{wrong} is {document[wrong]!r}")


def _few(classes: tuple[str, ...]) -> str:
    """Return the first class names in brackets."""
    if not classes:
        return ""
    more = ", ..." if len(classes) > CLASSES_SHOWN else ""
    return f" ({', '.join(map(messages.escape, classes[:CLASSES_SHOWN]))}{more})"

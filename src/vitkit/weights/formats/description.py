"""The description of a model in the header of a file that vitkit wrote.

One JSON document: spec, preprocessing and class names. In vitkit's own files it has more entries,
which `formats.vitkit` writes; in other formats it has what the format cannot store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError, SpecError
from vitkit.io.strict_json import parse_json
from vitkit.messages import plural
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.files.source import Header

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

"""Open an exported model of any format: checked first, then by its runtime."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from vitkit.errors import CheckpointError
from vitkit.exporting.files.description import ArtefactDescription
from vitkit.exporting.files.endings import ENDINGS
from vitkit.exporting.files.onnx_file import open_onnx, read_onnx_description
from vitkit.exporting.files.openvino_file import open_openvino, read_openvino_description
from vitkit.exporting.files.session import Session
from vitkit.exporting.files.torch_file import open_torch, read_torch_description, refuse_untrusted


@dataclass(frozen=True)
class Artefact:
    """An exported model that is open.

    Attributes:
        path: path of the file.
        description: its preprocessing, class names and temperature.
        session: runs it.
    """

    path: Path
    description: ArtefactDescription
    session: Session


def read_artefact_description(path: Path) -> ArtefactDescription:
    """Read the description of an exported model; nothing of it is run.

    Raises:
        CheckpointError: missing, damaged, hostile, of a newer version, or without a description.
        MissingExtraError: a library that reads the format is not installed.
    """
    readers = {
        ".onnx": read_onnx_description,
        ".xml": read_openvino_description,
        ".pt2": read_torch_description,
    }
    ending = path.suffix.lower()
    if ending not in readers:
        raise CheckpointError(f"{path}: expected a name that ends in {', '.join(readers)}")
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    description = ArtefactDescription.from_text(readers[ending](path), path)
    if ENDINGS[description.format] != ending:
        raise CheckpointError(
            f"{path}: its description is of the format {description.format}, whose names end in "
            f"{ENDINGS[description.format]}"
        )
    return description


def open_artefact(path: str | PathLike[str], *, trust_code: bool = False) -> Artefact:
    """Open an exported model on the CPU.

    Args:
        path: as `vitkit export` has written it.
        trust_code: open a `.pt2` file, which can run code that is in it.

    Raises:
        CheckpointError: as for `read_artefact_description`; a `.pt2` file without `trust_code`; a
            runtime that cannot open it.
        DeviceError: the CPU lacks the instructions of its precision.
        MissingExtraError: the runtime is not installed.
    """
    path = Path(fspath(path))
    description = read_artefact_description(path)
    if description.format == "onnx":
        session = open_onnx(path)
    elif description.format == "openvino":
        session = open_openvino(path, description.precision)
    else:
        refuse_untrusted(path, trust_code=trust_code)
        session = open_torch(path, description.format)
    return Artefact(path, description, session)

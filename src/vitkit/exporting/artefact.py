"""The file of an exported model: its endings, its description, and torch's own format.

The description is one JSON document inside the artefact: in the metadata of an ONNX file, in the
`rt_info` of an OpenVINO model, and in an extra file of a `.pt2` archive.
"""

from __future__ import annotations

import json
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from vitkit.engines.registry import compiler_name, has_compiler, import_runtime
from vitkit.errors import CheckpointError, MissingExtraError, SettingError, SpecError, VitkitError
from vitkit.io.untrusted import READ_ERRORS, checked_entries, parse_json
from vitkit.messages import escape
from vitkit.spec import Preprocess
from vitkit.weights.catalogue import names_are_assumed

# The endings of exported models' names.

ENDINGS = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2", "aoti": ".pt2"}
"""Format -> ending of the file's name."""


def is_artefact(path: str | PathLike[str]) -> bool:
    """Return True for a name that ends like an exported model's."""
    return fspath(path).lower().endswith(tuple(ENDINGS.values()))


def engine_refused(path: str | PathLike[str]) -> SettingError:
    """Return the error for engine flags, which do not apply to an exported model."""
    return SettingError(
        f"{fspath(path)} is an exported model, which has its runtime and precision and runs on the "
        "CPU; leave out --engine, --precision, --calibrate and --device"
    )


def refuse_needless_trust(model: object, *, trust_code: bool) -> None:
    """Raise `SettingError` for `--trust-code` with a file that runs no code.

    Args:
        model: a path; anything else has been opened already.
        trust_code: the flag.
    """
    if not trust_code or not isinstance(model, str | PathLike):
        return
    if not fspath(model).lower().endswith(ENDINGS["torch"]):
        raise SettingError(
            f"--trust-code has no effect: {fspath(model)} is not a .pt2 file and runs no code; "
            "leave it out"
        )


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


# An exported model that a runtime has opened.


@dataclass(frozen=True)
class Session:
    """An exported model that can be run.

    Attributes:
        run: a batch of images, uint8 (B, H, W, 3) or float32 (B, C, h, w) -> the outputs of the
            graph, of which the logits (B, K) are the last.
        layers: layer type -> how many of them the runtime executes in int8; empty where it cannot
            tell.
    """

    run: Callable[[np.ndarray], list[np.ndarray]]
    layers: Mapping[str, int] = field(default_factory=dict)

    def logits(self, images: np.ndarray) -> Float[np.ndarray, "B K"]:
        """Return the logits (B, K) float32 of a batch of images."""
        return np.asarray(self.run(images)[-1], dtype=np.float32)


# Errors of other runtimes as one line: a missing package, an operator, a damaged file.

LONGEST_REASON = 300
"""Characters of a runtime's message that are quoted; some quote a whole graph."""


def runtime_module(name: str) -> Any:
    """Import the library of a runtime, with its telemetry switched off.

    Args:
        name: name of the module, such as `onnxruntime`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_runtime(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{name} cannot be imported ({first_line(error)}); install it with: "
            "pip install 'vitkit[export]'"
        ) from None


class RuntimeFailure(CheckpointError):
    """A runtime cannot write, open or run a model."""


@contextmanager
def one_line_errors(path: Path, runtime: str, action: str) -> Iterator[None]:
    """Turn any error of a runtime into a `RuntimeFailure` of one line, and hide its warnings.

    Errors of the system stay as they are where a file is written. Warnings are not hidden while a
    model runs: their filters are those of the whole process, whose threads may run models, too.

    Args:
        path: the artefact.
        runtime: its name.
        action: what it was to do: `open`, `run`, or `write` and more words.
    """
    try:
        with nullcontext() if action == "run" else _hidden_warnings():
            yield
    except VitkitError:
        raise
    except Exception as error:  # runtimes have their own exceptions
        if isinstance(error, OSError) and action.startswith("write"):
            raise
        message = f"{path}: {runtime} cannot {action} it: {first_line(error)}"
        raise RuntimeFailure(message) from error


@contextmanager
def _hidden_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that has letters, shortened."""
    for line in str(error).splitlines():
        if any(character.isalpha() for character in line):
            return line.strip()[:LONGEST_REASON]
    return type(error).__name__


# `.pt2` archives of torch: an exported program (`torch`), or compiled machine code (`aoti`).
#
# Loading either can run code that is in the file: torch reads pickles and formulas of a program,
# and machine code is code. So a file is opened only where its maker is trusted.

ENTRY = "extra/vitkit.json"
"""Name of the description in the archive, after the archive's root folder."""


def write_torch(program: Any, path: Path) -> None:
    """Write an exported program, without a description."""
    with one_line_errors(path, "torch", "write"):
        runtime_module("torch.export").save(program, path)


def write_aoti(program: Any, path: Path) -> None:
    """Compile a program for this machine's CPU and write the machine code.

    Raises:
        MissingExtraError: there is no C++ compiler.
    """
    refuse_missing_compiler()
    inductor = runtime_module("torch._inductor")
    with one_line_errors(path, "torch's inductor", "compile"):
        inductor.aoti_compile_and_package(program, package_path=str(path))


def refuse_missing_compiler() -> None:
    """Raise `MissingExtraError` if there is no C++ compiler."""
    if not has_compiler():
        raise MissingExtraError(
            f"--to aoti needs a C++ compiler, and {compiler_name()} is not on the PATH; install "
            "it, name another one in the variable CXX, or export with --to torch"
        )


def describe_torch(path: Path, description: str) -> None:
    """Add the description to an archive that vitkit has written, or replace it."""
    temporary = path.with_name(f"{path.name}.described")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(temporary, "w") as described:
        entries = archive.infolist()
        root = entries[0].filename.partition("/")[0]
        for entry in entries:
            if entry.filename != f"{root}/{ENTRY}":
                _copy(archive, entry, described)
        described.writestr(f"{root}/{ENTRY}", description)
    temporary.replace(path)


ALIGNMENT = 64
"""Alignment of tensors in an archive in bytes, so that they can be memory-mapped."""
LOCAL_HEADER = 30
"""Bytes of an entry's header before its name and extra field (PKWARE APPNOTE 4.3.7)."""


def _copy(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, described: zipfile.ZipFile) -> None:
    """Copy an entry, aligned as torch aligns it."""
    assert described.fp is not None, "open for writing"
    copied = zipfile.ZipInfo(entry.filename, entry.date_time)
    header = described.fp.tell() + LOCAL_HEADER + len(entry.filename.encode())
    padding = -(header + 4) % ALIGNMENT  # 4 bytes are the extra field's own header
    copied.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    copied.file_size = entry.file_size  # decides whether its sizes need 64 bits
    with archive.open(entry) as source, described.open(copied, "w") as target:
        shutil.copyfileobj(source, target)


def read_torch_description(path: Path) -> str | None:
    """Return the description in an archive; nothing of it is run.

    Raises:
        CheckpointError: truncated, not an archive, or one with a hostile directory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in checked_entries(path, archive):
                if entry.filename.partition("/")[2] == ENTRY:
                    if entry.file_size > MAX_DESCRIPTION_BYTES:
                        raise CheckpointError(
                            f"{path}: its description has {entry.file_size:,} bytes; expected at "
                            f"most {MAX_DESCRIPTION_BYTES:,}"
                        )
                    return archive.read(entry).decode("utf-8")
            return None
    except CheckpointError:
        raise
    except READ_ERRORS as error:
        raise CheckpointError(
            f"{path}: truncated, damaged, or not a .pt2 archive ({first_line(error)}); copy or "
            "export it again"
        ) from None


def refuse_untrusted(path: Path, *, trust_code: bool) -> None:
    """Raise `CheckpointError` for an archive whose maker is not trusted."""
    if not trust_code:
        raise CheckpointError(
            f"{path}: opening a .pt2 file can run code that is in it; pass --trust-code "
            "(trust_code=True) if you know who made it, or export with --to onnx or openvino"
        )


def open_torch(path: Path, format: str) -> Session:
    """Open an archive that `read_torch_description` has checked and that is trusted.

    Args:
        path: path of the file.
        format: `torch` or `aoti`.

    Raises:
        CheckpointError: torch cannot read it, or it was compiled for another machine.
    """
    torch = runtime_module("torch")
    with one_line_errors(path, "torch", "open"):
        if format == "aoti":
            module = runtime_module("torch._inductor").aoti_load_package(str(path))
        else:
            module = runtime_module("torch.export").load(str(path)).module()

    def run(images: np.ndarray) -> list[np.ndarray]:
        with one_line_errors(path, "torch", "run"), torch.inference_mode():
            outputs = module(torch.from_numpy(images))
        if not isinstance(outputs, tuple | list):
            outputs = (outputs,)
        return [output.numpy() for output in outputs]

    return Session(run)

"""`.pt2` archives of torch: an exported program (`torch`), or compiled machine code (`aoti`).

Loading either can run code that is in the file: torch reads pickles and formulas of a program, and
machine code is code. So a file is opened only where its maker is trusted.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.engines.registry import compiler_name, has_compiler
from vitkit.errors import CheckpointError, MissingExtraError
from vitkit.exporting.files.description import MAX_DESCRIPTION_BYTES
from vitkit.exporting.files.runtime_errors import first_line, one_line_errors, runtime_module
from vitkit.exporting.files.session import Session
from vitkit.weights.files.zip_checks import READ_ERRORS, checked_entries

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

"""Checks of zip archives (`.npz` files, those of `torch.save`) before anything is unpacked.

An archive's directory may be forged: declare more than the file can hold, name an entry twice, or
point to the same bytes a thousand times. Entries that are refused here are never unpacked.
"""

from __future__ import annotations

import stat
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError

from vitkit.errors import CheckpointError

MAX_TENSORS = 50_000
"""Tensors of a file; the largest published model and its optimiser's state have some 5000."""
INFLATION = 20
"""Largest compression ratio of an array; real weights hardly compress."""
ZIP_SLACK = 16_000_000
"""Bytes that an archive may declare beyond that ratio, so that small files of zeros pass."""
READ_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    TypeError,
    LookupError,
    OverflowError,
    UserWarning,
    SafetensorError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    tokenize.TokenError,
)
"""Exceptions that the readers of all containers raise for damaged bytes."""


def checked_entries(path: Path, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the entries of an archive, if its file can hold them.

    Raises:
        CheckpointError: too many entries, one twice, links, names that lead elsewhere, encryption,
            a compression that no writer of weights uses, or sizes that the file cannot hold.
    """
    # All of this comes from the directory at the end of the archive: nothing is unpacked yet.
    entries = archive.infolist()
    size = path.stat().st_size
    if len(entries) > MAX_TENSORS:
        raise CheckpointError(
            f"{path}: {len(entries)} entries are too many; at most {MAX_TENSORS} are read"
        )
    names: set[str] = set()
    for entry in entries:
        _check_entry(path, entry, names)
        names.add(entry.filename)
    # Entries that share bytes (a zip bomb) declare more than the file size in total.
    packed = sum(entry.compress_size for entry in entries)
    if packed > size:
        raise CheckpointError(
            f"{path}: its entries need {packed} bytes of a file of {size}, so they overlap"
        )
    declared = sum(entry.file_size for entry in entries)
    if declared > INFLATION * size + ZIP_SLACK:
        raise CheckpointError(
            f"{path}: {size} bytes declare {declared} bytes of arrays, more than weights can "
            "be compressed"
        )
    return entries


def _check_entry(path: Path, entry: zipfile.ZipInfo, earlier: set[str]) -> None:
    """Refuse an entry by its name, its flags and its compression."""
    name = entry.filename
    if name in earlier:
        raise CheckpointError(f"{path}: the array {name.removesuffix('.npy')!r} occurs twice")
    location = PurePosixPath(name.replace("\\", "/"))
    # The upper half of the attributes is the Unix mode of the file.
    is_link = stat.S_ISLNK(entry.external_attr >> 16)
    if location.is_absolute() or ".." in location.parts or is_link:
        raise CheckpointError(f"{path}: its entry {name!r} leads out of the archive")
    if entry.flag_bits & 1:  # bit 0: encrypted
        raise CheckpointError(f"{path}: {name} is encrypted; save it without a password")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CheckpointError(f"{path}: {name} is compressed by a method other than deflate")

"""Damaged and hostile tars: read whole, or refused; never read for ever, and no sample is lost."""

import signal
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import refusal
from shards import image, write_tar

from vitkit import DataError, open_dataset

END = bytes(1024)
REFUSED = "train.tar: damaged, or not an uncompressed tar: "
LONGEST_WAIT = 30
"""Seconds after which reading a tar of a few kilobytes hangs, on a busy machine too."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))


def opened(folder: Path, content: bytes) -> Any:
    (folder / "train.tar").write_bytes(content)
    return open_dataset(f"wds:{folder}/train.tar")


def names(dataset: Any) -> list[str]:
    split = dataset.splits["train"]
    return [split.name(index).removeprefix("train.tar/") for index in range(len(split))]


def checked(header: bytes) -> bytes:
    """The header with a right checksum, which counts its own bytes as spaces."""
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:]


def binary(number: int) -> bytes:
    """A number of any size, as GNU tar writes those that octal digits cannot hold."""
    return b"\x80" + number.to_bytes(11, "big")


def changed(header: bytes, size: bytes = b"", kind: bytes = b"") -> bytes:
    """A header with another size or type, and a right checksum."""
    raw = bytearray(header)
    raw[124 : 124 + len(size)] = size
    raw[156 : 156 + len(kind)] = kind
    return checked(bytes(raw))


def pax(record: bytes, size: bytes = b"") -> bytes:
    """An extended header of POSIX for the next entry."""
    about = tarfile.TarInfo("pax")
    about.type, about.size = tarfile.XHDTYPE, len(record)
    return changed(about.tobuf(), size) + record + bytes(-len(record) % 512)


def tar_of(folder: Path, form: int) -> bytes:
    """Four samples of short and long names, a link and a folder, without the end."""
    entries = []
    for number, name in enumerate(("0", "1", "d" * 90 + "/" + "e" * 60 + "/2", "f/3")):
        entries += [(f"{name}.png", image(number)), (f"{name}.cls", b"ab"[number % 2 :][:1])]
    path = write_tar(folder / "made.tar", entries, format=form)
    with tarfile.open(path, "a", format=form) as tar:
        for kind, name in ((tarfile.SYMTYPE, "l.png"), (tarfile.DIRTYPE, "folder")):
            about = tarfile.TarInfo(name)
            about.type, about.linkname = kind, "/etc/hostname"
            tar.addfile(about)
        end = tar.offset
    return path.read_bytes()[:end]


FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
HEADER = tarfile.TarInfo("x.bin").tobuf()
SPARSE = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"


@pytest.mark.parametrize(
    "entry",
    [changed(HEADER, binary(2**80)), changed(HEADER, binary(2**63 - 1)),
     changed(HEADER, b"77777777777\0"), changed(HEADER, b"\xff" * 12),
     changed(HEADER, b"-0000001000\0"), changed(HEADER, b"garbage!!!!\0"),
     changed(HEADER, binary(2**80), b"S"), changed(HEADER, binary(2**80), b"x"),
     changed(HEADER, b"\xff" * 12, b"x"), changed(HEADER, kind=b"x"),
     HEADER.replace(b"x.bin", b"y.bin"), pax(b"14 size=-1536\n") + HEADER,
     pax(b"5011 size=%s\n" % (b"9" * 5000)) + changed(HEADER, b"00000001000\0") + b"c" * 512,
     pax(SPARSE) + HEADER, pax(b"12 path=a.b\n"), pax(b"12 path=a.b\n") * 2000, HEADER[:300],
     bytes(512) + HEADER, b"\x1f\x8b" + HEADER[2:]],
)  # fmt: skip
def test_what_could_lose_a_sample_is_refused(tmp_path: Path, entry: bytes) -> None:
    good = tar_of(tmp_path, tarfile.USTAR_FORMAT)
    (tmp_path / "train.tar").write_bytes(good + entry + (b"" if len(entry) % 512 else END))
    assert REFUSED in refusal(f"wds:{tmp_path}/train.tar")


def test_a_tar_has_an_end_and_nothing_after_it(tmp_path: Path) -> None:
    good = tar_of(tmp_path, tarfile.USTAR_FORMAT)
    assert len(names(opened(tmp_path, good + END + bytes(3_000_000)))) == 4
    for content in (b"", good[:100], good[:560], good, good + END + good + END):
        (tmp_path / "train.tar").write_bytes(content)
        assert REFUSED in refusal(f"wds:{tmp_path}/train.tar")
    assert "joined by cat, join them by tar --concatenate" in refusal(f"wds:{tmp_path}/train.tar")


def test_extended_headers_may_be_long_but_not_fill_the_memory(tmp_path: Path) -> None:
    good = tar_of(tmp_path, tarfile.USTAR_FORMAT)
    attribute = b"SCHILY.xattr.user.x=" + b"v" * 9000 + b"\n"
    assert len(names(opened(tmp_path, pax(b"9025 " + attribute) + good + END))) == 4
    (tmp_path / "train.tar").write_bytes(pax(b"v" * (2 << 20)) + good + END)
    assert "an extended header of 2097152 bytes" in refusal(f"wds:{tmp_path}/train.tar")


SIZES = (binary(2**80), binary(2**63), binary(512), b"\xff" * 12, b"-0000000777\0", b"9" * 12,
         b"%011o\0" % 0, b"%011o\0" % 512, b"7" * 11 + b"\0", b" " * 12, b"\0" * 12)  # fmt: skip
RECORDS = (b"11 size=-1\n", b"13 size=-512\n", b"28 size=" + b"9" * 19 + b"\n", SPARSE,
           b"12 path=\0\0\0\n", b"9 path=\n", b"0 a=b\n", b"7 path=")  # fmt: skip


def mutated(tar: bytes, draw: np.random.Generator) -> bytes:
    """The tar with one to three changes, of bytes, fields, records or whole blocks."""
    raw = bytearray(tar)
    for _ in range(draw.integers(1, 4)):
        block = 512 * int(draw.integers(len(raw) // 512))
        at = block + int(draw.choice([*range(0, 512, 7), 124, 135, 148, 156, 257, 345, 482, 504]))
        change = draw.integers(8)
        if change == 0:
            raw[at] = draw.integers(256)
        elif change == 1:
            raw[block + 156] = draw.choice([*b"0123456789xgXLKSDMVN\0"])
        elif change == 2:
            raw[block + 124 : block + 136] = SIZES[draw.integers(len(SIZES))]
        elif change == 3:
            some = RECORDS[draw.integers(len(RECORDS))]
            raw[block : block + len(some)] = some
        elif change == 4:
            raw[block : block + 512] = bytes(512)
        elif change == 5:
            other = 512 * int(draw.integers(len(raw) // 512))
            raw[other:other] = raw[block : block + 512]
        elif change == 6 and len(raw) > 1024:
            del raw[block : block + 512]
        elif change == 7 and len(raw) > 1024:
            del raw[max(at, 512) :]
            raw += bytes(-len(raw) % 512) if draw.integers(2) else b""
        if draw.integers(2) and len(raw) >= block + 512:
            raw[block : block + 512] = checked(bytes(raw[block : block + 512]))
    return bytes(raw)


@contextmanager
def time_limit() -> Iterator[None]:
    """End what hangs in a loop of Python."""

    def stop(*_: object) -> None:
        pytest.fail("a small tar takes too long")  # `TimeoutError` would count as a refusal

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST_WAIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("form", FORMS)
def test_mutated_tars_are_read_or_refused(tmp_path: Path, form: str) -> None:
    tar = tar_of(tmp_path, FORMS[form]) + END
    draw = np.random.default_rng([*form.encode()])
    read = 0
    for _ in range(100):
        content = mutated(tar, draw)
        with time_limit():
            try:
                read += len(opened(tmp_path, content).splits) > 0
            except DataError:
                continue
    assert 0 < read < 100


@pytest.mark.parametrize("form", FORMS)
def test_one_wrong_byte_loses_no_sample(tmp_path: Path, form: str) -> None:
    """It is refused, or all samples are there, or what is left out is counted in a note."""
    tar = tar_of(tmp_path, FORMS[form]) + END
    assert len(names(opened(tmp_path, tar))) == 4
    draw = np.random.default_rng([*form.encode()])
    blocks = [at for at in range(0, len(tar), 512) if tar[at : at + 512].count(0) < 510]
    for _ in range(100):
        raw = bytearray(tar)
        at = int(draw.choice(blocks)) + int(draw.integers(512))
        raw[at] ^= 1 << int(draw.integers(8))
        try:
            dataset = opened(tmp_path, bytes(raw))
        except DataError:
            continue
        assert len(names(dataset)) == 4, at

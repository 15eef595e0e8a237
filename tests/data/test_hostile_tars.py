"""Damaged and hostile tars: read whole, or refused; never read for ever, and no sample is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import refusal
from tar_headers import (
    END,
    OLD_GNU,
    V7,
    binary,
    checked,
    entry,
    header,
    image,
    long_name,
    named_by,
    octal,
    pax,
    record,
    sample,
)

from vitkit import DataError, open_dataset

LONG = b"d" * 110
GOOD = sample(0) + sample(1)
LONGEST_WAIT = 30
"""Seconds after which reading a tar of a few kilobytes hangs, on a busy machine too."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))


def opened(folder: Path, content: bytes) -> Any:
    (folder / "train.tar").write_bytes(content)
    return open_dataset(f"wds:{folder}/train.tar")


def refused(folder: Path, content: bytes) -> str:
    (folder / "train.tar").write_bytes(content)
    return refusal(f"wds:{folder}/train.tar")


def names(dataset: Any) -> list[str]:
    split = dataset.splits["train"]
    return [split.name(index).removeprefix("train.tar/") for index in range(len(split))]


@pytest.mark.parametrize(
    ("extension", "size", "kind", "expected"),
    [
        (pax((b"size", b"-1536")), octal(0), b"9", "no size, '-1536'"),
        (pax((b"size", b"-1536")), octal(0), b"0", "no size, '-1536'"),
        (pax((b"size", b"9" * 30)), octal(0), b"9", f"no size, '{'9' * 30}'"),
        (pax((b"size", b"9" * 19)), octal(0), b"9", "claims 9,999,999,999,999,999,999 bytes"),
        (pax((b"size", "٣".encode())), octal(0), b"0", "no size, '٣'"),
        (b"", binary(2**80), b"9", "claims 1,208,925,819,614,629,174,706,176 bytes, but only"),
        (b"", binary(2**63 - 1), b"9", "claims 9,223,372,036,854,775,807 bytes, but only"),
        (b"", binary(2**80), b"S", "a sparse file"),
        (b"", b"\xff" * 12, b"9", "a size of -1 bytes"),
        (b"", binary(2**80), b"x", "claims 1,208,925,819,614,629,174,706,176 bytes, but only"),
    ],
)
def test_sizes_that_lead_out_of_the_tar_or_back(
    tmp_path: Path, extension: bytes, size: bytes, kind: bytes, expected: str
) -> None:
    message = refused(tmp_path, GOOD + extension + header(b"x.bin", size, kind) + END)
    assert expected in message
    assert f"byte {len(GOOD) + len(extension):,}" in message


@pytest.mark.parametrize(
    "damage",
    [
        b"x" + record(b"path", LONG + b".png")[1:],
        record(b"path", LONG + b".png").replace(b"=", b"_"),
        record(b"path", LONG + b".png")[:-1] + b" ",
        record(b"path", LONG + b".png").replace(b" ", b"_"),
        b"999" + record(b"path", LONG + b".png")[3:],
        record(b"path", LONG + b"\0.png"),
        b"0 a=\n",
    ],
)
def test_a_damaged_record_is_no_reason_to_lose_a_sample(tmp_path: Path, damage: bytes) -> None:
    """Nothing has a checksum of it, and the name in the header is cut, without its ending."""
    whole = b"".join(
        named_by(entry(b"pax", record(b"path", LONG + ending), b"x"), content)
        for ending, content in ((b".png", image(2)), (b".cls", b"a"))
    )
    assert names(opened(tmp_path, GOOD + whole + END)) == ["0", "1", LONG.decode()]
    both = b"".join(
        named_by(entry(b"pax", damage.replace(b".png", ending), b"x"), content)
        for ending, content in ((b".png", image(2)), (b".cls", b"a"))
    )
    message = refused(tmp_path, GOOD + both + END)
    assert f"damaged at byte {len(GOOD):,}: " in message


@pytest.mark.parametrize("name", [b"", b"\0\0", LONG + b"\0.png"])
def test_a_long_name_that_is_not_whole_is_damage(tmp_path: Path, name: bytes) -> None:
    content = GOOD + named_by(long_name(name), image(2), OLD_GNU) + sample(3) + END
    assert f"damaged at byte {len(GOOD):,}: " in refused(tmp_path, content)


@pytest.mark.parametrize("extension", [long_name(LONG), pax((b"path", LONG))])
def test_an_extended_header_before_the_end_lost_its_entry(tmp_path: Path, extension: bytes) -> None:
    message = refused(tmp_path, GOOD + extension + END)
    assert f"damaged at byte {len(GOOD + extension):,}: no entry after an extended" in message


@pytest.mark.parametrize(
    "sparse",
    [
        header(b"hole.png", octal(512), b"S", magic=OLD_GNU) + b"s" * 512,
        pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.name", b"a")) + entry(b"a", b"s" * 512),
        pax((b"GNU.sparse.size", b"1048576"), (b"GNU.sparse.map", b"0,512")) + entry(b"a", b"s"),
    ],
)
def test_sparse_files_are_refused(tmp_path: Path, sparse: bytes) -> None:
    message = refused(tmp_path, sample(0) + sparse + sample(1) + END)
    assert "a sparse file; write the tar without --sparse" in message


def test_extended_headers_may_be_long(tmp_path: Path) -> None:
    attributes = pax((b"SCHILY.xattr.user.x", b"v\0=" * 9000), (b"path", b"a/9.png"))
    content = attributes + entry(b"9.png", image(9)) + entry(b"a/9.cls", b"a") + sample(1) + END
    assert names(opened(tmp_path, content)) == ["a/9", "1"]
    huge = entry(b"pax", record(b"comment", b"v" * (1 << 20)), b"x")
    message = refused(tmp_path, GOOD + huge + END)
    assert "an extended header of 1,048,593 bytes; 1,048,576 are the most" in message


def test_global_headers_hold_for_all_entries_after_them(tmp_path: Path) -> None:
    comment = pax((b"comment", b"0" * 40), kind=b"g")  # as `git archive` writes it
    assert names(opened(tmp_path, comment + GOOD + END)) == ["0", "1"]
    size = pax((b"size", b"1"), kind=b"g")
    labels = entry(b"0.png", image(0)) + size + header(b"0.cls", octal(0)) + b"a".ljust(512, b"\0")
    labels += pax((b"size", b"%d" % len(image(1)))) + entry(b"1.png", image(1))
    labels += entry(b"1.cls", b"b") + END
    dataset = opened(tmp_path, labels)
    assert names(dataset) == ["0", "1"]
    assert dataset.classes == ("a", "b")


def test_names_of_incremental_archives(tmp_path: Path) -> None:
    """GNU tar keeps the times of access and change where POSIX has the first part of a name."""
    times = [octal(1_700_000_000 + second) for second in range(4)]
    parts = [(b"0.png", image(0)), (b"0.cls", b"a"), (b"1.png", image(1)), (b"1.cls", b"b")]
    content = b"".join(
        entry(name, part, magic=OLD_GNU, prefix=time + time)
        for (name, part), time in zip(parts, times, strict=True)
    )
    assert names(opened(tmp_path, content + END)) == ["0", "1"]
    content = sample(0, prefix=b"first/part") + sample(1, magic=V7) + END
    assert names(opened(tmp_path, content)) == ["first/part/0", "1"]


def kinds() -> dict[str, bytes]:
    """One small tar of each kind."""
    gnu, posix = b"", b""
    for number in range(2, 4):
        for ending, content in ((b".png", image(number)), (b".cls", b"a")):
            name = LONG + b"/%d" % number + ending
            gnu += named_by(long_name(name), content, OLD_GNU)
            posix += named_by(pax((b"mtime", b"1.5"), (b"path", name)), content)
    links = header(b"l.png", octal(0), b"2") + header(b"folder/", octal(0), b"5")
    return {
        "ustar": sample(0, prefix=b"folder") + links + sample(1),
        "v7": sample(0, magic=V7) + sample(1, magic=V7),
        "gnu": sample(0, magic=OLD_GNU) + sample(1, magic=OLD_GNU) + gnu,
        "pax": pax((b"comment", b"c"), kind=b"g") + GOOD + posix,
    }


SIZES = (binary(2**80), binary(2**63), binary(512), b"\xff" * 12, b"-0000000777\0", b"9" * 12,
         octal(0), octal(512), octal(8**11 - 1), b" " * 12, b"\0" * 12)  # fmt: skip
RECORDS = (
    *(record(b"size", size) for size in (b"-1", b"-512", b"9" * 19)),
    *(record(b"GNU.sparse." + key, value) for key, value in ((b"major", b"1"), (b"map", b"1,2,3"))),
    record(b"path", b"\0\0\0"), record(b"path", b""), b"0 a=b\n", b"7 path=",
)  # fmt: skip


def mutated(tar: bytes, draw: np.random.Generator) -> bytes:
    """The tar with one to three changes, of bytes, fields, records or whole blocks."""
    raw = bytearray(tar)
    for _ in range(draw.integers(1, 4)):
        block = 512 * int(draw.integers(len(raw) // 512))
        at = block + int(draw.choice([*range(0, 512, 7), 124, 135, 148, 156, 257, 345, 482, 504]))
        change = draw.integers(9)
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
        elif change == 7:
            raw[block + 345 : block + 500] = draw.bytes(155)
        elif change == 8 and len(raw) > 1024:
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


def outcomes(folder: Path, kind: str, count: int) -> tuple[int, int]:
    """How many mutated tars are read and how many refused; there is no third."""
    tar = kinds()[kind] + END
    assert len(opened(folder, tar).splits["train"]) >= 2
    draw = np.random.default_rng([*kind.encode()])
    read = 0
    for _ in range(count):
        content = mutated(tar, draw)
        with time_limit():
            try:
                read += len(opened(folder, content).splits) > 0
            except DataError:
                continue
    return read, count - read


@pytest.mark.parametrize("kind", kinds())
def test_mutated_tars_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    assert min(outcomes(tmp_path, kind, 100)) > 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", kinds())
def test_many_mutated_tars_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    assert min(outcomes(tmp_path, kind, 2000)) > 0


@pytest.mark.parametrize("kind", kinds())
def test_one_wrong_byte_loses_no_sample(tmp_path: Path, kind: str) -> None:
    """It is refused, or all samples are there, or what is left out is counted in a note."""
    tar = kinds()[kind] + END
    whole = opened(tmp_path, tar)
    draw = np.random.default_rng([*kind.encode()])
    blocks = [at for at in range(0, len(tar), 512) if tar[at : at + 512].count(0) < 510]
    for _ in range(100):
        raw = bytearray(tar)
        at = int(draw.choice(blocks)) + int(draw.integers(512))
        raw[at] ^= 1 << int(draw.integers(8))
        try:
            dataset = opened(tmp_path, bytes(raw))
        except DataError:
            continue
        assert len(names(dataset)) == len(names(whole)), at

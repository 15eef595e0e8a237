"""Shards of tars: found, indexed once, read by place; hostile ones are only read, and refused."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from image_files import refusal
from PIL import Image
from shards import as_tars, samples, write_tar

from vitkit.data.sources import shard_patterns, webdataset
from vitkit.data.sources.open import open_dataset
from vitkit.data.sources.shard_patterns import expand, find_shards
from vitkit.data.sources.webdataset import read_members
from vitkit.errors import ImageError


def image(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 9)).save(stream, "PNG")
    return stream.getvalue()


PAIR = [("0.png", image(1)), ("0.cls", b"a"), ("1.png", image(2)), ("1.cls", b"b")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))


def test_braces_and_wildcards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_patterns, "MOST_SHARDS", 50)
    for name in ("a-08", "a-09", "a-10", "a-11", "b-09"):
        write_tar(tmp_path / f"{name}.tar", PAIR)
    shards = find_shards(f"{tmp_path}/{{a,b}}-{{09..09}}.tar")
    assert [path.name for path in shards] == ["a-09.tar", "b-09.tar"]
    shards = find_shards(f"{tmp_path}/a-{{08..11}}.tar")
    assert [path.name for path in shards] == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    shards = find_shards(f"{tmp_path}/?-09.tar")
    assert [path.name for path in shards] == ["a-09.tar", "b-09.tar"]
    missing = refusal(f"wds:{tmp_path}/a-{{09..12}}.tar")
    assert "a-12.tar: no such file, and 1 of 4 shards are not there" in missing
    assert "the nearest folder that exists" in refusal(f"wds:{tmp_path}/c-*.tar")
    assert "~nobody-here/a.tar: no such file; the nearest" in refusal("wds:~nobody-here/a.tar")
    assert f"name the shards in it, such as wds:{tmp_path}/*.tar" in refusal(f"wds:{tmp_path}")
    assert "more than 50 shards" in refusal(f"wds:{tmp_path}/c-{{1..7}}-{{0..999999999}}.tar")


def test_braces_in_braces_and_in_the_names_of_folders(tmp_path: Path) -> None:
    folder = tmp_path / "old [1] {a,b}"
    folder.mkdir()
    names = ["train-0", "train-1", "val-7", "x[2]"]
    for name in names:
        write_tar(folder / f"{name}.tar", PAIR)
    shards = find_shards(f"{folder}/{{train-{{0..1}},val-7}}.tar")
    assert [path.stem for path in shards] == names[:3]
    assert [path.stem for path in find_shards(f"{folder}/t*.tar")] == names[:2]
    assert [path.stem for path in find_shards(f"{folder}/x[2].tar")] == names[3:]
    assert expand("a{b,c{1..2}{x,y}}d") == ["abd", "ac1xd", "ac1yd", "ac2xd", "ac2yd"]
    assert expand("a{b-{0..1}") == ["a{b-0", "a{b-1"]


@pytest.mark.parametrize("label", ["cls", "txt", "json"])
def test_labels_of_each_kind(tmp_path: Path, label: str) -> None:
    written = samples(4)
    if label == "json":
        written = [(s, json.dumps({"label": int(n), "other": [1]}), f, c) for s, n, f, c in written]
    dataset = open_dataset(as_tars(tmp_path, written, label))
    assert dataset.classes == ("1", "2", "10")
    assert Counter(dataset.splits["train"].labels.tolist()) == {0: 4, 1: 4, 2: 4}


def test_the_class_member_wins_over_the_others(tmp_path: Path) -> None:
    entries = [*PAIR, ("0.txt", b"a caption"), ("2.txt", b"c"), ("2.json", b'"d"'),
               ("2.webp", image(3)), ("._2.png", b"Mac"), ("dir/README", b"text")]  # fmt: skip
    entries.insert(2, entries.pop(4))
    dataset = open_dataset(f"wds:{write_tar(tmp_path / 'train.tar', entries)}")
    assert dataset.classes == ("a", "b", "d")


def test_names_without_a_split_are_cut(tmp_path: Path) -> None:
    pairs = [(f"{i}.{e}", c) for i in range(40)
             for e, c in (("png", image(i)), ("cls", b"ab"[i % 2 : i % 2 + 1]))]  # fmt: skip
    write_tar(tmp_path / "s-0.tar", pairs[:40])
    write_tar(tmp_path / "s-1.tar", pairs[40:])
    dataset = open_dataset(f"wds:{tmp_path}/s-{{0..1}}.tar")
    assert dataset.cut
    assert [len(split) for split in dataset.splits.values()] == [28, 4, 8]
    assert dataset.name == "s"
    write_tar(tmp_path / "train.tar", PAIR)
    assert "s-0.tar has none of train, val and test" in refusal(f"wds:{tmp_path}/*.tar")


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_in_every_format(tmp_path: Path, form: int) -> None:
    long = "/".join(["folder" * 8] * (3 if form == tarfile.USTAR_FORMAT else 9))
    entries = [(f"{long}/{name}", content) for name, content in PAIR]
    path = write_tar(tmp_path / "train.tar", entries, format=form)
    with path.open("rb") as file:
        members = [(m.name, m.offset, m.size) for m in read_members(file, path.name).files]
    with tarfile.open(path) as tar:
        assert members == [(m.name, m.offset_data, m.size) for m in tar.getmembers()]
    dataset = open_dataset(f"wds:{path}")
    assert dataset.splits["train"].name(1) == f"train.tar/{long}/1"
    assert dataset.splits["train"].read(1)[0, 0].tolist() == [2, 0, 9]


def hostile(path: Path) -> Path:
    """Links, devices and folders between good samples, and names that lead out."""
    with tarfile.open(path, "w") as tar:
        for kind, name in ((tarfile.SYMTYPE, "x.png"), (tarfile.LNKTYPE, "y.png"),
                           (tarfile.CHRTYPE, "z.png"), (tarfile.DIRTYPE, "w.png")):  # fmt: skip
            about = tarfile.TarInfo(name)
            about.type, about.linkname, about.size = kind, "/etc/hostname", 5000
            tar.addfile(about)
        for name, content in PAIR:
            about = tarfile.TarInfo(f"../../{name}")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return path


def test_links_and_names_that_lead_out_are_only_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "deeper"
    path.mkdir(parents=True)
    before = {p for p in tmp_path.rglob("*") if "cache" not in p.parts}
    dataset = open_dataset(f"wds:{hostile(path / 'train.tar')}")
    assert dataset.splits["train"].name(0) == "train.tar/../../0"
    assert dataset.splits["train"].read(0)[0, 0].tolist() == [1, 0, 9]
    (note,) = dataset.notes
    assert note == "skipped in the shards: 1 symbolic links, 1 hard links, 1 devices"
    after = {p for p in tmp_path.rglob("*") if "cache" not in p.parts}
    assert after - before == {path / "train.tar"}


def changed(path: Path, at: int, content: bytes, fix: bool = True) -> Path:
    """A tar with some bytes of its first header changed, and its checksum made right again."""
    raw = bytearray(path.read_bytes())
    raw[at : at + len(content)] = content
    if fix:
        raw[148:156] = b" " * 8
        raw[148:156] = b"%06o\0 " % sum(raw[:512])
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("at", "content", "expected"),
    [
        (124, b"77777777777\0", "claims 8,589,934,591 bytes, but only"),
        (124, b"\x80" + b"\0" * 3 + b"\xff" * 8, "claims 18,446,744,073,709,551,615 bytes"),
        (124, b"\xff" * 12, "damaged one (byte 0): a size of -1 bytes"),
        (124, b"-0000000001\0", "damaged one (byte 0): a size of -1 bytes"),
        (124, b"garbage!!!!\0", "damaged one (byte 0): invalid header"),
        (156, b"x", "damaged one (byte 0): no pax record"),
        (156, b"D", "sample '0': expected one image, got 0 among cls"),
    ],
)
def test_sizes_that_lie(tmp_path: Path, at: int, content: bytes, expected: str) -> None:
    path = changed(write_tar(tmp_path / "train.tar", PAIR), at, content)
    assert expected in refusal(f"wds:{path}")


def test_what_follows_the_end_is_never_lost_in_silence(tmp_path: Path) -> None:
    """A header of zeros looks like the end of a tar; so does the end of the first of two."""
    path = write_tar(tmp_path / "train.tar", PAIR)
    assert len(open_dataset(f"wds:{path}").splits["train"]) == 2
    whole = path.read_bytes()
    hole = 2 * 1024  # of the third entry
    path.write_bytes(whole[:hole] + bytes(512) + whole[hole + 512 :])
    assert f"zeros at byte {hole:,}, but there is more at byte {hole + 512:,}" in refusal(
        f"wds:{path}"
    )
    path.write_bytes(whole + whole)
    assert "joined by cat: join them by tar --concatenate" in refusal(f"wds:{path}")
    path.write_bytes(whole + bytes(3_000_000))  # padding is no entry
    assert len(open_dataset(f"wds:{path}").splits["train"]) == 2


def test_numbers_of_thousands_of_digits(tmp_path: Path) -> None:
    """Python's `int` refuses more than 4,300 digits."""
    many = "9" * 5000
    entries = [("2.png", image(3)), ("2.cls", many.encode()), ("3.png", image(4)),
               ("3.cls", b"10"), *PAIR]  # fmt: skip
    dataset = open_dataset(f"wds:{write_tar(tmp_path / 'train.tar', entries)}")
    assert dataset.classes == ("10", many, "a", "b")
    for record, expected in (
        (f"{many} path=x\n", "no pax record"),
        (f"{len(many) + 11} size={many}\n", "damaged at byte 5,632: no size"),
        ("1" * 60_000, "no pax record"),
    ):
        about = tarfile.TarInfo("long")
        about.type, about.size = tarfile.XHDTYPE, len(record)
        with tarfile.open(tmp_path / "pax.tar", "w") as tar:
            tar.addfile(about, io.BytesIO(record.encode()))
            tar.addfile(tarfile.TarInfo("0.png"))
        assert expected in refusal(f"wds:{tmp_path}/pax.tar")


def test_files_that_are_no_tars(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "train.tar", PAIR)
    raw = path.read_bytes()
    changed(path, 0, b"other", fix=False)
    assert "not a tar file, or a damaged one (byte 0): bad checksum" in refusal(f"wds:{path}")
    path.write_bytes(raw[:560])
    assert "bytes, but only 48 follow" in refusal(f"wds:{path}")
    path.write_bytes(raw[: 4 * 1024])
    assert "ends without the empty block" in refusal(f"wds:{path}")
    path.write_bytes(raw[:1030])
    assert "damaged at byte 1,024: truncated header" in refusal(f"wds:{path}")
    flipped = bytearray(raw)
    flipped[2 * 1024] ^= 1
    path.write_bytes(flipped)
    assert "damaged at byte 2,048: bad checksum" in refusal(f"wds:{path}")
    path.write_bytes(raw[:100])
    assert "not a tar file" in refusal(f"wds:{path}")
    path.write_bytes(b"")
    assert "truncated" in refusal(f"wds:{path}")
    path.write_bytes(bytes(1024))
    assert "no images" in refusal(f"wds:{path}")
    write_tar(path.with_suffix(".gz"), PAIR).rename(path)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(__file__)
    assert "compressed; expected a plain tar" in refusal(f"wds:{path}")
    assert f"open shards as wds:{path}" in refusal(path)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([("0.png", b"p"), ("1.png", b"p"), ("1.cls", b"a")], "sample '0': no label"),
        ([("0.cls", b"a"), ("0.xyz", b"p")], "'0': expected one image, got 0 among cls, xyz"),
        ([("0.png", b"p"), ("0.jpg", b"p"), ("0.cls", b"a")], "expected one image, got 2"),
        ([("0.png", b"p"), ("0.cls", b" ")], "0.cls: expected a class name or number, got ''"),
        ([("0.png", b"p"), ("0.cls", b"\xff")], "0.cls: cannot be read"),
        ([("0.png", b"p"), ("0.json", b"{")], "0.json: cannot be read"),
        ([("0.png", b"p"), ("0.json", b'{"label": null}')], "or number, got None"),
        ([("0.png", b"p"), ("0.json", b'{"label": [1]}')], "or number, got [1]"),
        ([("0.png", b"p"), ("0.json", b"[" * 99_999)], "0.json: cannot be read"),
        (
            [("0.png", b"p"), ("0.txt", b"x" * 2_000_000)],
            "sample '0': .txt has 2,000,000 bytes, too many",
        ),
    ],
)
def test_samples_that_are_not_whole(
    tmp_path: Path, entries: list[tuple[str, bytes]], expected: str
) -> None:
    path = write_tar(tmp_path / "train.tar", entries)
    assert expected in refusal(f"wds:{path}")


def test_a_shard_is_indexed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "train.tar", PAIR)
    first = open_dataset(f"wds:{path}")
    looked: list[Path] = []

    def count(shard: Path) -> object:
        looked.append(shard)
        return index(shard)

    index = webdataset.index_shard
    monkeypatch.setattr(webdataset, "index_shard", count)
    assert open_dataset(f"wds:{path}").fingerprint == first.fingerprint
    assert looked == []
    stamp = path.stat()
    other = [(name, content.replace(b"b", b"c")) for name, content in PAIR]
    os.utime(write_tar(path, other), ns=(0, stamp.st_mtime_ns + 1))
    assert open_dataset(f"wds:{path}").classes == ("a", "c")
    assert looked == [path]
    (damaged,) = (tmp_path / "cache" / "indexes").glob("*.npz")
    damaged.write_bytes(damaged.read_bytes()[:-40])
    assert open_dataset(f"wds:{path}").classes == ("a", "c")
    assert looked == [path, path]


def test_a_shard_that_changes_while_in_use_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "train.tar", PAIR)
    split = open_dataset(f"wds:{path}").splits["train"]
    split.read(0)
    write_tar(path, PAIR[2:])
    with pytest.raises(ImageError, match="the shard was changed after it was opened"):
        split.read(0)
    path.unlink()
    with pytest.raises(ImageError, match=r"train\.tar/0: missing"):
        split.read(0)


def test_a_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "file" / "below"))
    dataset = open_dataset(f"wds:{write_tar(tmp_path / 'train.tar', PAIR)}")
    np.testing.assert_array_equal(dataset.splits["train"].labels, [0, 1])

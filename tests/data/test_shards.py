"""Tar shards, local and remote: found, indexed once, read in place; hostile ones are refused."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import refusal
from local_server import listening
from PIL import Image
from shards import CLASSES, as_tars, samples, train_briefly, write_tar

import vitkit
from vitkit import open_dataset
from vitkit.data.sources import shards as source

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])


def image(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 9)).save(stream, "PNG")
    return stream.getvalue()


PAIR = [("0.png", image(1)), ("0.cls", b"a"), ("1.png", image(2)), ("1.cls", b"b")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))


def names(address: str) -> list[str]:
    """The shards that are read, each of one pair of images."""
    split = next(iter(open_dataset(address).splits.values()))
    return [split.name(index).removesuffix("/0") for index in range(0, len(split), 2)]


def test_braces_and_wildcards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_SHARDS", 50)
    for name in ("a-08", "a-09", "a-10", "a-11", "b-09"):
        write_tar(tmp_path / f"train-{name}.tar", PAIR)
    for pattern, found in {
        "train-{a,b}-{09..09}": ["a-09", "b-09"],
        "train-a-{08..11}": ["a-08", "a-09", "a-10", "a-11"],
        "train-?-09": ["a-09", "b-09"],
        "train-{b-09,a-1{0..1}}": ["b-09", "a-10", "a-11"],
    }.items():
        assert names(f"wds:{tmp_path}/{pattern}.tar") == [f"train-{name}.tar" for name in found]
    for pattern, message in {
        "/train-a-{09..12}.tar": "a-12.tar: no such file, and 1 of 4 shards are not there",
        "/c-*.tar": "the nearest folder that exists",
        "": f"name the shards in it, such as wds:{tmp_path}/*.tar",
        "/c-{1..7}-{0..999999999}.tar": "more than 50 shards",
        "/c-{2..1}.tar": "{2..1} names no shard; the first number comes first: {1..2}",
    }.items():
        assert message in refusal(f"wds:{tmp_path}{pattern}")
    assert "~nobody-here/a.tar: no such file; the nearest" in refusal("wds:~nobody-here/a.tar")


def test_braces_in_the_names_of_folders(tmp_path: Path) -> None:
    folder = tmp_path / "old [1] {a,b}"
    folder.mkdir()
    for name in ("train-0", "train-1", "train-x[2]"):
        write_tar(folder / f"{name}.tar", PAIR)
    assert names(f"wds:{folder}/train-{{0..1}}.tar") == ["train-0.tar", "train-1.tar"]
    assert names(f"wds:{folder}/train-x[2].tar") == ["train-x[2].tar"]


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
        members = [tuple(member) for member in source.read_members(file, path.name)[0]]
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
        (124, b"\xff" * 12, "damaged one: a size of -1 bytes"),
        (124, b"-0000000001\0", "damaged one: a size of -1 bytes"),
        (124, b"garbage!!!!\0", "damaged one: invalid header"),
        (156, b"x", "damaged one: no pax record"),
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
    expected = f"byte {hole:,}: zeros, but there is more at byte {hole + 512:,}"
    assert expected in refusal(f"wds:{path}")
    path.write_bytes(whole + whole)
    assert "joined by cat, join them by tar --concatenate" in refusal(f"wds:{path}")
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
    assert "not a tar file, or a damaged one: bad checksum" in refusal(f"wds:{path}")
    path.write_bytes(raw[:560])
    assert "bytes, but only 48 follow" in refusal(f"wds:{path}")
    path.write_bytes(raw[: 4 * 1024])
    assert "no empty block closes the tar" in refusal(f"wds:{path}")
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
            "sample '0': a member has 2,000,000 bytes; expected at most 1,048,576",
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
    indexed: list[str] = []

    def count(file: Any, where: str) -> Any:
        indexed.append(where)
        return read(file, where)

    read = source.read_members
    monkeypatch.setattr(source, "read_members", count)
    assert open_dataset(f"wds:{path}").fingerprint == first.fingerprint
    assert indexed == []
    stamp = path.stat()
    other = [(name, content.replace(b"b", b"c")) for name, content in PAIR]
    os.utime(write_tar(path, other), ns=(0, stamp.st_mtime_ns + 1))
    assert open_dataset(f"wds:{path}").classes == ("a", "c")
    assert indexed == [str(path)]


def test_a_shard_that_changes_while_in_use_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "train.tar", PAIR)
    split = open_dataset(f"wds:{path}").splits["train"]
    split.read(0)
    write_tar(path, PAIR[2:])
    with pytest.raises(vitkit.ImageError, match="the shard was changed after it was opened"):
        split.read(0)
    path.unlink()
    with pytest.raises(vitkit.ImageError, match=r"train\.tar/0: missing"):
        split.read(0)


def test_a_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "file" / "below"))
    dataset = open_dataset(f"wds:{write_tar(tmp_path / 'train.tar', PAIR)}")
    np.testing.assert_array_equal(dataset.splits["train"].labels, [0, 1])


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The files of a web server; `address` is where they are, `asked` has its requests."""
    as_tars(tmp_path / "here", samples())
    files = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def answer(request: Any) -> None:
        name = request.path.rpartition("/")[2]
        files["asked"] += f"{name} ".encode()
        request.send_response(200 if name in files else 404)
        request.send_header("Content-Length", str(len(files.get(name, b""))))
        request.end_headers()
        request.wfile.write(files.get(name, b""))

    with listening(answer) as address:
        files |= {"address": f"wds:{address}/set".encode(), "asked": b""}
        yield files


ASKED = ("train-0000.tar", "train-0001.tar", "val-0000.tar", "test-0000.tar")
NAMES = "{train-0000,train-0001,val-0000,test-0000}.tar"


def test_remote_shards_are_downloaded_once_and_are_the_same_data(
    remote: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"{remote['address'].decode()}/{NAMES}"
    here, there = open_dataset(f"wds:{tmp_path}/here/{NAMES}"), open_dataset(address)
    assert there.classes == CLASSES
    assert there.fingerprint == here.fingerprint
    assert there.splits["val"].name(2) == here.splits["val"].name(2) == "val-0000.tar/val/0-2"
    np.testing.assert_array_equal(there.splits["val"].read(2), here.splits["val"].read(2))
    assert "4 remote shards of" in there.notes[-1]
    assert str(tmp_path / "cache") in there.notes[-1]
    assert remote["asked"].decode().split() == [*ASKED]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runs = [train_briefly(data, tmp_path / name) for name, data in
            (("a", address), ("b", f"wds:{tmp_path}/here/{NAMES}"))]  # fmt: skip
    one, other = (vitkit.load(run.last).model.state_dict() for run in runs)
    assert all((other[key] == value).all() for key, value in one.items())
    assert len(remote["asked"].split()) == 4


def test_a_download_that_is_no_shard_is_not_kept(remote: dict[str, bytes]) -> None:
    address = f"{remote['address'].decode()}/train-0000.tar"
    good, remote["train-0000.tar"] = remote["train-0000.tar"], b"<html>sign in</html>"
    message = refusal(address)
    assert "set/train-0000.tar: not a tar file" in message
    assert message.endswith("; the next run downloads it again")
    remote["train-0000.tar"] = good
    assert len(open_dataset(address).splits["train"]) == 9


def test_what_cannot_be_fetched_is_named(
    remote: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = remote["address"].decode()
    assert "set/train-0002.tar: the server answered 404" in refusal(
        f"{base}/train-{{0001..0002}}.tar"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids downloading it" in refusal(f"{base}/val-0000.tar")
    for address, message in {
        "pipe:curl https://host/train-{0..9}.tar": "commands are not run",
        "s3://bucket/train-{0..9}.tar": "expected an https:// address",
        "http://host/train-{0..9}.tar": "expected an https:// address",
        "file:///etc/train-{0..9}.tar": "expected an https:// address",
        "https://[host/train-{0..9}.tar": "not a valid address",
        "https://host/train-*.tar": "a web server does not list its files",
    }.items():
        assert message in refusal(f"wds:{address}")

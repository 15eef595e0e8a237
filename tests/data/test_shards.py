"""Tar shards, local and remote: found, indexed once, read in place; hostile ones are refused."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import refusal
from local_server import listening
from shards import CLASSES, as_tars, image, samples, train_briefly, write_tar

import vitkit
from vitkit import open_dataset
from vitkit.data.sources import shards as source

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])


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
    tmp_path /= "old [1] {a,b}"
    tmp_path.mkdir()
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
        "/train-a-{09..12}.tar": "(1 of 4 shards missing)",
        f"/{'c' * 300}.tar": "no such file",
        "/c-*.tar": "the nearest folder that exists",
        "": f"name the shards in it, such as wds:{tmp_path}/*.tar",
        "/c-{1..7}-{0..999999999}.tar": "expected 1 to 50 shards",
        "/c-{2..1}.tar": "expected 1 to 50 shards; in a range such as {0000..0099} the first",
    }.items():
        assert message in refusal(f"wds:{tmp_path}{pattern}")
    assert "~nobody-here/a.tar: no such file; the nearest" in refusal("wds:~nobody-here/a.tar")


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


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([("0.png", b"p"), ("1.png", b"p"), ("1.cls", b"a")], "sample '0': expected one image and"),
        ([("0.cls", b"a"), ("0.xyz", b"p")], "label (.cls, .json or .txt), got cls, xyz"),
        ([("0.png", b"p"), ("0.jpg", b"p"), ("0.cls", b"a")], "or .txt), got png, jpg, cls"),
        ([("0.png", b"p"), ("0.cls", b" ")], "0.cls: expected a class name or number, got ''"),
        ([("0.png", b"p"), ("0.cls", b"\xff")], "0.cls: cannot be read"),
        ([("0.png", b"p"), ("0.json", b"{")], "0.json: cannot be read"),
        ([("0.png", b"p"), ("0.json", b'{"label": null}')], "or number, got None"),
        ([("0.png", b"p"), ("0.json", b'{"label": [1]}')], "or number, got [1]"),
        ([("0.png", b"p"), ("0.json", b"[" * 99_999)], "0.json: cannot be read"),
        ([("0.png", b"p"), ("0.txt", b"x" * 2_000_000)],
         "sample '0': a member of 2,000,000 bytes; at most 1,048,576"),
    ],
)  # fmt: skip
def test_samples_that_are_not_whole(tmp_path, entries, expected):
    path = write_tar(tmp_path / "train.tar", entries)
    assert expected in refusal(f"wds:{path}")


def test_a_shard_is_indexed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "train.tar", PAIR)
    first = open_dataset(f"wds:{path}")
    indexed: list[str] = []

    def count(path: Path, where: str) -> Any:
        indexed.append(where)
        return read(path, where)

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


def test_remote_shards_are_downloaded_once_and_are_the_same_data(remote, tmp_path, monkeypatch):
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


def test_a_download_that_is_no_tar_is_not_kept(remote: dict[str, bytes]) -> None:
    address = f"{remote['address'].decode()}/train-0000.tar"
    good, remote["train-0000.tar"] = remote["train-0000.tar"], b"<html>sign in</html>"
    message = refusal(address)
    assert "set/train-0000.tar: damaged, or not an uncompressed tar" in message
    assert message.endswith("; the next run downloads it again")
    remote["train-0000.tar"] = good
    assert len(open_dataset(address).splits["train"]) == 9


def test_a_whole_shard_with_wrong_content_is_kept(remote: dict[str, bytes], tmp_path: Path) -> None:
    remote["wrong.tar"] = write_tar(tmp_path / "wrong.tar", PAIR[:1]).read_bytes()
    for _ in range(2):
        assert "expected one image and a label" in refusal(
            f"{remote['address'].decode()}/wrong.tar"
        )
    assert remote["asked"].decode().split() == ["wrong.tar"]


def test_what_cannot_be_fetched_is_named(remote, monkeypatch):
    base = remote["address"].decode()
    assert "set/train-0002.tar: the server answered 404" in refusal(
        f"{base}/train-{{0001..0002}}.tar"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids downloading it" in refusal(f"{base}/val-0000.tar")
    for address, message in {
        "pipe:curl https://host/train-{0..9}.tar": "expected an https:// address",
        "s3://bucket/train-{0..9}.tar": "expected an https:// address",
        "http://host/train-{0..9}.tar": "expected an https:// address",
        "file:///etc/train-{0..9}.tar": "expected an https:// address",
        "https://[host/train-{0..9}.tar": "not a valid address",
        "https://host/train-*.tar": "a web server does not list its files",
    }.items():
        assert message in refusal(f"wds:{address}")

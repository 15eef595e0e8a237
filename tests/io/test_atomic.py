"""Files in the cache and folders are replaced whole or not at all; digests."""

import hashlib
from pathlib import Path

import pytest

from vitkit import OutputError
from vitkit.io.atomic import write_bytes
from vitkit.io.caches import caching, file_sha256, is_whole


def test_a_file_of_the_cache_is_whole_once_it_is_complete(tmp_path: Path):
    path = tmp_path / "new" / "rows"
    with caching(path.parent) as folder:
        (folder / "rows").write_bytes(b"first")
        assert not path.exists()
    assert path.read_bytes() == b"first"
    assert is_whole(path)
    for damaged in (b"firs", b"fir\0t", b""):
        path.write_bytes(damaged)
        assert not is_whole(path)
    assert not is_whole(path.parent / "other")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    def write(content: bytes, error: type[BaseException] | None = None) -> None:
        with caching(tmp_path) as folder:
            (folder / "rows").write_bytes(content)
            if error is not None:
                raise error

    write(b"old")
    with pytest.raises(KeyboardInterrupt):
        write(b"new", KeyboardInterrupt)
    assert (tmp_path / "rows").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "rows.sha256"]


def test_too_long_a_name_is_one_line(tmp_path: Path):
    with pytest.raises(OutputError, match=r"cannot write .* File name too long \("):
        write_bytes(tmp_path / ("a" * 300), b"content")
    with pytest.raises(OutputError, match="File name too long"):
        write_bytes(tmp_path / ("a" * 300) / "b", b"content")
    assert not [*tmp_path.iterdir()]


def test_a_file_has_one_digest_however_it_is_given(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb") as file, path.open("rb", buffering=0) as raw:
        digests = {file_sha256(path), file_sha256(file), file_sha256(raw)}
    assert digests == {hashlib.sha256(b"content").hexdigest()}


def test_who_reads_while_a_file_is_replaced_has_the_old_one_whole(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with path.open() as reader:
        write_bytes(path, b"new, and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new, and longer"

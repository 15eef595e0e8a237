"""Files in the cache and folders are replaced whole or not at all; digests; a bar."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from vitkit.errors import OutputError
from vitkit.io.atomic import replacing_folder, replacing_in_cache, write_bytes
from vitkit.io.caches import file_sha256
from vitkit.messages import progress_bar


def test_a_file_of_the_cache_appears_when_it_is_complete(tmp_path: Path):
    path = tmp_path / "new" / "rows"
    with replacing_in_cache(path) as file:
        file.write(b"first")
        assert not path.exists()
    assert path.read_bytes() == b"first"
    assert [*path.parent.iterdir()] == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "rows"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with replacing_in_cache(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_too_long_a_name_is_one_line(tmp_path: Path):
    with pytest.raises(OutputError, match=r"cannot write .* File name too long \("):
        write_bytes(tmp_path / ("a" * 300), b"content")
    with pytest.raises(OutputError, match="File name too long"):
        write_bytes(tmp_path / ("a" * 300) / "b", b"content")
    assert not [*tmp_path.iterdir()]


def test_two_writers_at_once_do_not_mix(tmp_path: Path):
    path = tmp_path / "rows"
    with replacing_in_cache(path) as first, replacing_in_cache(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first"  # its block ends last


def test_a_folder_is_replaced_whole(tmp_path: Path):
    path, temporary = tmp_path / "cache", tmp_path / "cache.making"
    temporary.mkdir()
    (temporary / "left").touch()  # by a killed process
    with replacing_folder(path, temporary) as folder:
        (folder / "pixels").write_bytes(b"1")
        assert not path.exists()
    assert [file.name for file in path.iterdir()] == ["pixels"]
    with pytest.raises(ValueError, match="no"), replacing_folder(path, temporary):
        raise ValueError("no")
    assert not temporary.exists()


def test_a_file_has_one_digest_however_it_is_given(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb") as file, path.open("rb", buffering=0) as raw:
        digests = {file_sha256(path), file_sha256(file), file_sha256(raw)}
    assert digests == {hashlib.sha256(b"content").hexdigest()}


def test_without_a_terminal_there_is_no_bar(capsys):
    with progress_bar(3, "images") as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")

"""IDX files: what is written is read back, and what lies about its size is refused."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from vitkit.data.sources.benchmarks import read_idx, write_idx
from vitkit.errors import DataError

ARRAY = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5)
CONTENT = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 3, 5) + bytes(range(30))


def written(tmp_path: Path, content: bytes, name: str = "a-idx3-ubyte") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [CONTENT, gzip.compress(CONTENT)], ids=["plain", "gzip"])
def test_bytes_decide_whether_it_is_gzipped(tmp_path: Path, content: bytes) -> None:
    for name in ("a", "a.gz"):
        np.testing.assert_array_equal(read_idx(written(tmp_path, content, name)), ARRAY)


def test_write_gives_the_very_bytes_of_the_format(tmp_path: Path) -> None:
    write_idx(tmp_path / "a", ARRAY)
    assert (tmp_path / "a").read_bytes() == CONTENT
    write_idx(tmp_path / "b.gz", ARRAY)
    zipped = (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress(zipped) == CONTENT
    assert zipped[4:8] == bytes(4)  # no time stamp: the same array, the same bytes


@pytest.mark.parametrize("shape", [(7,), (0, 3, 3), (1, 1, 1, 1)])
def test_round_trip_of_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for name in ("a", "a.gz"):
        write_idx(tmp_path / name, array)
        again = read_idx(tmp_path / name)
        assert again.shape == shape
        assert again.dtype == np.uint8
        np.testing.assert_array_equal(again, array)


def test_a_transposed_array_is_written_in_c_order(tmp_path: Path) -> None:
    write_idx(tmp_path / "a", ARRAY.T)
    np.testing.assert_array_equal(read_idx(tmp_path / "a"), ARRAY.T)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"\0\0", "expected 00 00 <type> <dimensions>, got 00 00"),
        (b"<html>no</html>", "not an IDX file"),
        (bytes([0, 0, 8, 0]), "not an IDX file"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]), "type 8 (uint8), got 13 (float32)"),
        (bytes([0, 0, 8, 3, 0, 0]), "3 dimensions"),
        (CONTENT[:-1], "2 x 3 x 5 = 30 values"),
        (CONTENT + b"\0", "found more"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 2**31, 2**31), "can hold at most"),
        (bytes([0, 0, 8, 90]) + bytes(4 * 90), "cannot be read"),
    ],
)
def test_files_that_are_not_what_they_declare(
    tmp_path: Path, content: bytes, message: str, zipped: bool
) -> None:
    path = written(tmp_path, gzip.compress(content) if zipped else content)
    with pytest.raises(DataError) as caught:
        read_idx(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_short_gzip_names_what_was_declared_and_found(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(CONTENT[:-4]))
    with pytest.raises(DataError, match=r"declares 2 x 3 x 5 = 30 values, found 26"):
        read_idx(path)


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_gzip_is_a_data_error(tmp_path: Path, damage: str) -> None:
    content = bytearray(gzip.compress(CONTENT))
    if damage == "cut":
        del content[-10:]
    else:
        content[-6] ^= 1
    with pytest.raises(DataError, match="cannot be read as an IDX file"):
        read_idx(written(tmp_path, bytes(content)))


def test_a_file_that_declares_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    lie = bytes([0, 0, 8, 1]) + struct.pack(">I", 2**32 - 1) + bytes(1000)
    for path in (written(tmp_path, lie, "a"), written(tmp_path, gzip.compress(lie), "a.gz")):
        tracemalloc.start()
        with pytest.raises(DataError, match="can hold at most"):
            read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
        tracemalloc.stop()


def test_a_missing_file_names_the_nearest_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file; the nearest folder that exists"):
        read_idx(tmp_path / "no" / "train-images-idx3-ubyte")
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path)


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((), np.uint8)])
def test_only_uint8_arrays_are_written(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(DataError, match="expected a uint8 array"):
        write_idx(tmp_path / "a", array)
    assert not (tmp_path / "a").exists()

"""Datasets by name: digits, MNIST, Fashion-MNIST and CIFAR, from local files and from a server."""

import gzip
import hashlib
import json
import runpy
import struct
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import refusal
from local_server import listening
from PIL import Image

import vitkit
from vitkit import DataError, open_dataset
from vitkit.data.sources import benchmarks
from vitkit.data.sources.benchmarks import read_idx, write_idx

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])
CONVERT = runpy.run_path(str(Path(vitkit.__file__).parents[2] / "scripts" / "convert_cifar10.py"))
GENERATOR = np.random.default_rng(0)
TRAIN = GENERATOR.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
TEST = GENERATOR.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
TRAIN_LABELS, TEST_LABELS = np.arange(20) % 10, np.arange(6) + 3


@pytest.fixture(autouse=True)
def _nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, no files of other programs, and no network."""
    known = benchmarks.known_folders
    monkeypatch.setattr(
        benchmarks,
        "known_folders",
        lambda name, root: [p for p in known(name, root) if not str(p).startswith("/usr/share")],
    )
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The files of a web server that all datasets come from, with their digests."""
    files: dict[str, bytes] = {}

    def answer(request: Any) -> None:
        content = files.get(request.path.rpartition("/")[2])
        request.send_response(404 if content is None else 200)
        request.send_header("Content-Length", str(len(content or b"")))
        request.end_headers()
        request.wfile.write(content or b"")

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with listening(answer) as address:
        addresses = {name: f"{address}/{name}/" for name in benchmarks.ADDRESSES}
        monkeypatch.setattr(benchmarks, "ADDRESSES", addresses)
        yield files


def test_unknown_names_and_missing_paths(tmp_path: Path) -> None:
    assert "did you mean 'fashion-mnist'?" in refusal("fashion_mnist")
    (tmp_path / "flowers").mkdir()
    message = refusal(tmp_path / "flower" / "deep")
    assert f"the nearest folder that exists is {tmp_path}, with: flowers/" in message
    refusal("null\0byte")
    assert "'': no such file or folder" in refusal("")
    # a path object is never a known name
    assert "no such file or folder" in refusal(Path("digits"))


def test_digits_are_scikit_learns() -> None:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    theirs, ours = load_digits(), open_dataset("digits")
    assert ours.classes == tuple("0123456789")
    assert [len(ours.splits[name]) for name in ("train", "test")] == [1438, 359]
    seen = set()
    for split in ours.splits.values():
        for i in range(len(split)):
            number = int(split.name(i).removeprefix("digits[").removesuffix("]"))
            seen.add(number)
            assert split.labels[i] == theirs.target[number]
            expected = np.floor(theirs.images[number] * 255 / 16 + 0.5)
            np.testing.assert_array_equal(split.read(i)[:, :, 0], expected)
    assert seen == set(range(1797))
    counts = np.bincount(ours.splits["test"].labels)
    np.testing.assert_allclose(counts, np.bincount(theirs.target) / 5, atol=1)
    fingerprint = "ccdf5ef39534c9e3edada7e991b055fedc9580ffa3597a8fbc71abeeba0a4bf3"
    assert ours.fingerprint == fingerprint  # must not change


def idx_set(root: Path, dot: str = "-", gz: str = "") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 30), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(root / f"{prefix}-images{dot}idx3-ubyte{gz}", images)
        labels = (np.arange(count) % 10).astype(np.uint8)
        write_idx(root / f"{prefix}-labels{dot}idx1-ubyte{gz}", labels)
    return root


@pytest.mark.parametrize(("dot", "gz"), [("-", ""), (".", ""), ("-", ".gz")])
@pytest.mark.parametrize("below", [False, True])
def test_idx_sets_under_their_usual_names(tmp_path: Path, dot: str, gz: str, below: bool) -> None:
    place = idx_set(tmp_path / "fashion-mnist" if below else tmp_path, dot, gz)
    dataset = open_dataset("fashion-mnist", data_root=tmp_path)
    assert dataset.classes[0] == "T-shirt/top"
    assert dataset.classes[9] == "Ankle boot"
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 30, "test": 20}
    train = dataset.splits["train"]
    assert train.read(7).shape == (28, 28, 1)
    assert train.labels[7] == 7
    assert train.subset(np.array([7, 3])).name(0) == "fashion-mnist/train[7]"
    mnist = open_dataset("mnist", data_root=str(place))
    assert mnist.fingerprint != dataset.fingerprint


def test_idx_sets_that_do_not_fit_together(tmp_path: Path) -> None:
    root = idx_set(tmp_path)
    labels = root / "t10k-labels-idx1-ubyte"
    labels.unlink()
    message = refusal("mnist", data_root=root)
    assert "t10k-labels-idx1-ubyte of mnist is missing; download it from https://" in message
    write_idx(labels, np.zeros(19, np.uint8))
    assert "got (20, 28, 28) and (19,)" in refusal("mnist", data_root=root)
    write_idx(labels, np.array([3] * 12 + [10] + [3] * 7, np.uint8))
    message = refusal("mnist", data_root=root)
    assert "labels (N,) below 10 of test, got (20, 28, 28) and (20,) up to 10" in message


def test_files_in_no_folder_are_downloaded_and_checked(server, tmp_path, monkeypatch):
    files = {path.name: path.read_bytes() for path in idx_set(tmp_path / "it", gz=".gz").iterdir()}
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(binary_ten(tmp_path / "bin"), "cifar-10-batches-bin")
    server |= files | {archive.name: archive.read_bytes()}
    digests = [f"{stem}-ubyte.gz" for stem in benchmarks.IDX_STEMS]
    sha256 = {name: hashlib.sha256(content).hexdigest() for name, content in server.items()}
    ours = {"mnist": " ".join(sha256[name] for name in digests), "cifar10": sha256[archive.name]}
    monkeypatch.setattr(benchmarks, "SHA256", benchmarks.SHA256 | ours)
    for name, place in (("mnist", tmp_path / "it"), ("cifar10", tmp_path / "bin")):
        assert open_dataset(name).fingerprint == open_dataset(name, data_root=place).fingerprint
    assert "expected SHA-256 3aede38d" in refusal("fashion-mnist")  # the files are those of mnist
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(open_dataset("mnist").splits["test"]) == 20
    message = refusal("cifar100", data_root=tmp_path)
    assert message.startswith("cifar100 not found; http://127.0.0.1:")
    assert "HF_HUB_OFFLINE forbids downloading it; or pass the folder of its files as" in message
    assert f"searched {tmp_path}/cifar100, {tmp_path}, " in message


def binary(root: Path, images: np.ndarray, labels: np.ndarray, coarse: bool = False) -> None:
    """As the format's own page has it: label bytes, then the red, green and blue planes."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.open("wb") as file:
        for image, label in zip(images, labels, strict=True):
            file.write(bytes([19, label] if coarse else [label]))
            for channel in range(3):
                file.write(image[:, :, channel].tobytes())


def binary_ten(root: Path) -> Path:
    for number in range(5):
        part = slice(4 * number, 4 * number + 4)
        binary(root / f"data_batch_{number + 1}.bin", TRAIN[part], TRAIN_LABELS[part])
    binary(root / "test_batch.bin", TEST, TEST_LABELS)
    return root


@pytest.mark.parametrize("below", [".", "cifar10/cifar-10-batches-bin", "cifar-10-binary.tar.gz"])
def test_the_binary_version_of_cifar(tmp_path: Path, below: str) -> None:
    if below.endswith(".gz"):
        with tarfile.open(tmp_path / below, "w:gz") as tar:
            tar.add(binary_ten(tmp_path / "unpacked"), "cifar-10-batches-bin")
    else:
        binary_ten(tmp_path / below)
    dataset = open_dataset("cifar10", data_root=tmp_path)
    assert dataset.classes[3] == "cat"
    assert len(dataset.classes) == 10
    for split, images, labels in (("train", TRAIN, TRAIN_LABELS), ("test", TEST, TEST_LABELS)):
        part = dataset.splits[split]
        assert part.labels.tolist() == labels.tolist()
        for index, image in enumerate(images):
            np.testing.assert_array_equal(part.read(index), image)
    assert "train has 20 images; the complete dataset has 50,000" in dataset.notes
    assert dataset.splits["test"].name(4) == "cifar10/test[4]"


def test_the_script_writes_the_binary_version_from_rows_of_pixels(tmp_path: Path) -> None:
    source = tmp_path / "package"
    source.mkdir()
    for number in range(5):
        part = TRAIN[4 * number : 4 * number + 4]
        Image.fromarray(part.reshape(4, 1024, 3)).save(source / f"data_batch_{number + 1}.png")
    Image.fromarray(TEST.reshape(6, 1024, 3)).save(source / "test_batch.png")
    (source / "train_lables.json").write_text(json.dumps(TRAIN_LABELS.tolist()))
    (source / "test_lables.json").write_text(json.dumps(TEST_LABELS.tolist()))
    CONVERT["convert"](source, tmp_path / "written")
    for file in binary_ten(tmp_path / "published").iterdir():
        assert (tmp_path / "written" / file.name).read_bytes() == file.read_bytes()
    (source / "test_lables.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"test_lables\.json: 2 labels are too few"):
        CONVERT["convert"](source, tmp_path / "one")
    Image.new("RGB", (1000, 4)).save(source / "data_batch_2.png")
    with pytest.raises(ValueError, match=r"data_batch_2\.png: expected rows of 1024 pixels"):
        CONVERT["convert"](source, tmp_path / "two")


def test_a_hundred_classes_by_their_fine_label(tmp_path: Path) -> None:
    fine = np.arange(20) * 5
    binary(tmp_path / "cifar-100-binary" / "train.bin", TRAIN, fine, coarse=True)
    binary(tmp_path / "cifar-100-binary" / "test.bin", TEST, fine[:6], coarse=True)
    dataset = open_dataset("cifar100", data_root=tmp_path)
    assert list(dataset.classes) == sorted({*dataset.classes})
    assert (dataset.classes[0], dataset.classes[95]) == ("apple", "whale")
    assert dataset.splits["train"].labels.tolist() == fine.tolist()
    np.testing.assert_array_equal(dataset.splits["test"].read(5), TEST[5])


def test_files_of_cifar_that_are_not_whole(tmp_path: Path) -> None:
    root = binary_ten(tmp_path)
    (root / "data_batch_3.bin").write_bytes(b"\0" * 3072)
    message = refusal("cifar10", data_root=root)
    assert "data_batch_3.bin: expected images of 3,073 bytes each, got 3,072" in message
    binary(root / "data_batch_3.bin", TRAIN[:4], np.array([1, 2, 10, 3]))
    message = refusal("cifar10", data_root=root)
    assert "labels (N,) below 10 of train, got (20, 32, 32) and (20,) up to 10" in message
    (binary_ten(root) / "test_batch.bin").unlink()
    assert "test_batch.bin: expected images of 3,073" in refusal("cifar10", data_root=root)
    (root / "data_batch_1.bin").unlink()
    with tarfile.open(root / "cifar-10-binary.tar.gz", "w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "gone.bin"
        tar.addfile(link)
    assert "expected images of 3,073 bytes each, got 0" in refusal("cifar10", data_root=root)
    (root / "cifar-10-binary.tar.gz").write_bytes(b"\x1f\x8b no archive")
    assert "cifar-10-binary.tar.gz: cannot be read: " in refusal("cifar10", data_root=root)


ARRAY = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5)
CONTENT = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 3, 5) + bytes(range(30))


def written(tmp_path: Path, content: bytes, name: str = "a-idx3-ubyte") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_idx_files_are_the_very_bytes_of_the_format(tmp_path: Path) -> None:
    write_idx(tmp_path / "a", ARRAY)
    assert (tmp_path / "a").read_bytes() == CONTENT
    write_idx(tmp_path / "b.gz", ARRAY)
    zipped = (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress(zipped) == CONTENT
    assert zipped[4:8] == bytes(4)  # no time stamp: the same array, the same bytes
    for content in (CONTENT, zipped):  # the bytes decide whether it is gzipped
        np.testing.assert_array_equal(read_idx(written(tmp_path, content, "c.gz")), ARRAY)
    for array in (ARRAY.T, ARRAY[0, 0], ARRAY[:0], ARRAY[None]):
        write_idx(tmp_path / "a", array)
        again = read_idx(tmp_path / "a")
        assert (again.shape, again.dtype) == (array.shape, np.uint8)
        np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "index out of range"), (b"<html>no</html>", "requires a buffer of"),
     (bytes([0, 0, 8, 0]), "expected 00 00 08 <dimensions>, the sizes, and as many values"),
     (bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]), "after 00 00 0d 01; expected 00 00 08"),
     (bytes([0, 0, 8, 3, 0, 0]), "requires a buffer of"),
     (CONTENT[:-4], "the sizes (2, 3, 5) and 26 bytes"),
     (CONTENT + b"\0", "the sizes (2, 3, 5) and 31 bytes"),
     (bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 2**31, 2**31), "and 0 bytes after"),
     (bytes([0, 0, 8, 90]) + bytes(4 * 90), "dimension")],
)  # fmt: skip
def test_idx_files_that_are_not_what_they_declare(tmp_path, content, message, zipped):
    path = written(tmp_path, gzip.compress(content) if zipped else content)
    with pytest.raises(DataError) as caught:
        read_idx(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_declares_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    lie = bytes([0, 0, 8, 1]) + struct.pack(">I", 2**32 - 1) + bytes(1000)
    for path in (written(tmp_path, lie, "a"), written(tmp_path, gzip.compress(lie), "a.gz")):
        tracemalloc.start()
        with pytest.raises(DataError, match="and 1,000 bytes"):
            read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 250_000_000
        tracemalloc.stop()

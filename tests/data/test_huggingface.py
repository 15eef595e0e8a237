"""Tables of images: Parquet files, folders of `datasets`, and sets of the Hub from its cache."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import folder, refusal
from PIL import Image

from vitkit import ImageError, open_dataset
from vitkit.data.sources import huggingface

datasets = pytest.importorskip("datasets")
constants = pytest.importorskip("huggingface_hub.constants")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no Hub."""
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / ".vitkit"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".datasets")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / ".modules"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / ".hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".datasets"


def image(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 9)).save(stream, "PNG")
    return stream.getvalue()


IMAGES = [image(value) for value in range(8)]
NAMES = ["tulip", "daisy", "rose"]


def table(
    path: Path, labels: Any, images: Any = None, names: Sequence[Any] | None = None, **more: Any
) -> Path:
    """A Parquet file, with the features that `datasets` would write where `names` are given."""
    images = IMAGES[: len(labels)] if images is None else images
    columns = pa.table({"image": images, "label": labels, **more})
    if names is not None:
        features = {"image": {"_type": "Value", "dtype": "binary"},
                    "label": {"_type": "ClassLabel", "names": names}}  # fmt: skip
        metadata = json.dumps({"info": {"features": features}})
        columns = columns.replace_schema_metadata({"huggingface": metadata})
    parquet.write_table(columns, path)
    return path


@pytest.mark.parametrize("several", [False, True])
def test_a_folder_of_save_to_disk(tmp_path: Path, several: bool) -> None:
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=["ape", "cat"])}
    )
    rows = {"image": [{"bytes": p, "path": None} for p in IMAGES], "label": [0, 1] * 4}
    whole = datasets.Dataset.from_dict(rows, features=features)
    saved = tmp_path / "saved"
    if several:
        parts = {"train": whole, "validation": whole.select(range(2)), "extra": whole}
        datasets.DatasetDict(parts).save_to_disk(str(saved))
    else:
        whole.save_to_disk(str(saved))
    dataset = open_dataset(saved)
    assert (dataset.name, dataset.classes, dataset.cut) == ("saved", ("ape", "cat"), not several)
    sizes = {name: len(split) for name, split in dataset.splits.items()}
    assert sizes == ({"train": 8, "val": 2} if several else {"train": 5, "val": 1, "test": 2})
    assert ("splits not read: 'extra'" in dataset.notes) == several
    assert dataset.splits["train"].read(0).shape == (4, 5, 3)
    state = saved / "train" / "state.json" if several else saved / "state.json"
    state.write_text(state.read_text().replace("data-00000", "gone-00000"))
    message = refusal(saved)
    assert message.startswith(f"{saved}: cannot be read by `datasets`: ")
    assert "gone-00000-of-00001.arrow" in message


@pytest.mark.parametrize("kind", ["int8", "int64", "string", "large_string", "dictionary"])
def test_labels_of_each_type(tmp_path: Path, kind: str) -> None:
    labels: Any = pa.array(["10", "9", "10"])
    labels = labels.dictionary_encode() if kind == "dictionary" else labels.cast(kind)
    dataset = open_dataset(table(tmp_path / "train.parquet", labels))
    assert dataset.classes == ("9", "10")
    assert dataset.splits["train"].labels.tolist() == [1, 0, 1]


def test_one_file_without_splits_is_cut(tmp_path: Path) -> None:
    place = tmp_path / "old [1] {a,b}"  # no pattern
    place.mkdir()
    images = [image(i) for i in range(40)]
    dataset = open_dataset(table(place / "data*.parquet", [i % 2 for i in range(40)], images))
    assert dataset.cut
    assert dataset.name == "data*"
    assert [len(split) for split in dataset.splits.values()] == [28, 4, 8]
    assert dataset.splits["test"].name(0).startswith("data*[")


def test_tables_beside_folders_of_images_are_not_read(tmp_path: Path) -> None:
    folder(tmp_path, {"train/a": 2, "train/b": 2})
    table(tmp_path / "about.parquet", [0, 1])
    assert open_dataset(tmp_path).classes == ("a", "b")


def test_files_with_other_class_names_are_refused(tmp_path: Path) -> None:
    table(tmp_path / "train-0.parquet", [0, 1], names=["a", "b"])
    for other in ("train-1", "val"):
        path = table(tmp_path / f"{other}.parquet", [0, 1], names=["b", "a"])
        assert f"{other}.parquet: its columns or class names differ from" in refusal(tmp_path)
        path.unlink()


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [([0, 1, 2], ["a", "b"], "train[2] has the label 2; expected 0 to 1"),
     ([0, -7, 1], ["a", "b"], "train[1] has the label -7; expected a class number from 0"),
     ([0, 1, -2], None, "train[2] has the label -2; expected a class number from 0"),
     ([0, None, 1], ["a", "b"], "train[1] has no label"),
     ([-1, 0, -1], ["a", "b"], "train[0] has no label"),
     (["a", "", "b"], None, "train[1] has no label"),
     ([0, 0, 0], ["a", "b"], "only one class has images, 'a'"),
     ([0, 1, 0], ["a", "a"], "cannot be read by `datasets`: "),
     ([0.5, 1.0, 0.0], None, "one column of labels, found none; the columns are image: binary")],
)  # fmt: skip
def test_labels_are_refused_by_their_row(tmp_path, labels, names, expected):
    assert expected in refusal(table(tmp_path / "train.parquet", labels, names=names))


def test_columns_are_recognised_by_type_then_by_name(tmp_path: Path) -> None:
    path = table(tmp_path / "train.parquet", [0, 1], mask=IMAGES[:2], fine_label=["x", "y"])
    assert open_dataset(path).classes == ("0", "1")
    for columns, message in (
        (
            {"left": IMAGES[:2], "right": IMAGES[:2], "label": [0, 1]},
            "expected one column of images, found 'left', 'right'; the columns are left: binary",
        ),
        (
            {"image": IMAGES[:2], "caption": ["x", "y"]},
            "one column of labels, found none; the columns are image: binary, caption: string",
        ),
        ({"image": ["a.png", "b.png"], "label": [0, 1]}, "one column of images, found none"),
    ):
        parquet.write_table(pa.table(columns), path)
        assert message in refusal(path)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    path = table(tmp_path / "train.parquet", [0, 1])
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[:-9], whole[:4] + bytes(60) + whole[64:]):
        path.write_bytes(content)
        assert "train.parquet: cannot be read by `datasets`: " in refusal(path)


def test_rows_without_an_image_are_bad_images(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(IMAGES[0])
    paths = [None, "x.png", str(tmp_path / "secret.png"), "y.png"]
    contents = [IMAGES[1], None, None, b""]
    rows = [{"bytes": b, "path": p} for b, p in zip(contents, paths, strict=True)] + [None]
    split = open_dataset(table(tmp_path / "train.parquet", [0, 1, 0, 1, 0], rows)).splits["train"]
    assert split.read(0)[0, 0].tolist() == [1, 0, 9]
    for index in (1, 2, 3, 4):
        with pytest.raises(ImageError, match=rf"train/train\[{index}\]: empty"):
            split.read(index)


def test_a_file_is_hashed_once_until_it_changes(tmp_path, monkeypatch):
    path = table(tmp_path / "train.parquet", ["a", "b"])
    first = open_dataset(path)
    with monkeypatch.context() as patch:
        patch.setattr(huggingface.RowStore, "digests", lambda _: pytest.fail("again"))
        again = open_dataset(path)
    assert (again.fingerprint, again.classes) == (first.fingerprint, first.classes)
    np.testing.assert_array_equal(again.splits["train"].read(1), first.splits["train"].read(1))
    table(path, ["a", "b"], IMAGES[2:4])
    assert open_dataset(path).splits["train"].read(0)[0, 0].tolist() == [2, 0, 9]
    assert open_dataset(path).fingerprint != first.fingerprint


def build(cache: Path, splits: dict[str, list[int]], address: str = "owner/flowers") -> None:
    """A set in the cache, as `datasets` leaves it after a download."""
    owner, name = address.split("/")
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=NAMES)}
    )
    sources = cache.parent / "sources"
    sources.mkdir(exist_ok=True)
    for split, labels in splits.items():
        images = [{"bytes": image(number), "path": None} for number in range(len(labels))]
        made = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
        made.to_parquet(str(sources / f"{split}.parquet"))
    from datasets.packaged_modules.parquet.parquet import Parquet

    files = {split: str(sources / f"{split}.parquet") for split in splits}
    builder = Parquet(cache_dir=str(cache), dataset_name=name, hash=COMMIT, data_files=files)
    builder.download_and_prepare()
    # A set of the Hub is kept under its owner's name, and that of its configuration.
    (written,) = cache.glob(f"{name}/*/*/{COMMIT}")
    path = cache / f"{owner}___{name}" / "default" / "0.0.0" / COMMIT
    path.parent.mkdir(parents=True)
    written.rename(path)


def test_a_set_in_the_cache(cache: Path) -> None:
    build(cache, {"train": [2, 0, 1, 2], "validation": [0, 1], "test": [1, 1], "extra": [0]})
    for revision in ("", f"@{COMMIT}", f"@{COMMIT[:9]}"):
        dataset = open_dataset(f"hf://owner/flowers{revision}")
        assert dataset.name == "flowers"
        assert dataset.classes == ("tulip", "daisy", "rose")
        assert list(dataset.splits) == ["train", "val", "test"]
        assert dataset.splits["train"].labels.tolist() == [2, 0, 1, 2]
        assert dataset.splits["train"].read(3)[0, 0].tolist() == [3, 0, 9]
        assert dataset.splits["train"].name(3) == "flowers/train[3]"
        assert "splits not read: 'extra'" in dataset.notes
    assert "cannot be read by `datasets`: " in refusal("hf://owner/flowers:no")
    assert f"the cache has {COMMIT} of it" in refusal("hf://owner/flowers@ffffffff")
    (cache.parent / "other" / "flowers").mkdir(parents=True)
    assert "the working folder has other/flowers" in refusal("hf://other/flowers")
    (arrow,) = cache.rglob("flowers-train.arrow")
    arrow.write_bytes(b"not a table")
    assert "cannot be read by `datasets`: " in refusal("hf://owner/flowers")


def test_sets_that_cannot_be_opened(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(cache, {"extra": [0, 1]})
    assert "its splits are 'extra'; expected train, val or test" in refusal("hf://owner/flowers")
    message = refusal("hf://owner/nothing")
    assert "not in the cache, and the Hub cannot be reached" in message
    assert "HF_HUB_OFFLINE" in message
    for address in ("hf://", "hf://name", "hf://a/b/c", "hf://a/../b", "hf://a/b@"):
        assert "expected hf://owner/name" in refusal(address)

    def script(*_: object, **__: object) -> None:
        raise RuntimeError("Dataset scripts are no longer supported, but found flowers.py")

    monkeypatch.setattr(datasets, "load_dataset", script)
    assert "scripts are no longer supported, but found flowers.py" in refusal("hf://owner/flowers")


def test_rows_that_name_files(cache: Path, tmp_path: Path) -> None:
    """As sets of plain images are kept: their files lie in the Hub's cache, and nowhere else."""
    places = [tmp_path / ".hub" / "a.png", tmp_path / ".hub" / "b.png", tmp_path / "outside.png"]
    (tmp_path / ".hub").mkdir()
    for value, path in enumerate(places):
        path.write_bytes(image(value))
    # `datasets` takes the files in when it writes Parquet, not into an Arrow file.
    rows = {"image": [{"bytes": None, "path": str(p)} for p in places], "label": [0, 1, 0]}
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=NAMES)}
    )
    build(cache, {"train": [0, 1, 0]})
    (arrow,) = cache.rglob("flowers-train.arrow")
    with datasets.arrow_writer.ArrowWriter(path=str(arrow), features=features) as writer:
        writer.write_batch(rows)
        writer.finalize()
    split = open_dataset("hf://owner/flowers").splits["train"]
    np.testing.assert_array_equal(split.read(1)[0, 0], [1, 0, 9])
    with pytest.raises(ImageError, match=r"flowers/train\[2\]: empty"):
        split.read(2)

"""Parquet files: columns by their types, labels by name, damaged ones refused, memory bounded."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import folder, refusal
from PIL import Image
from shards import as_parquet, samples

from vitkit.data.datasets.dataset import StoredSplit
from vitkit.data.sources import tables as table_store
from vitkit.data.sources.open import open_dataset
from vitkit.data.sources.tables import TableStore
from vitkit.errors import ImageError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / ".cache"))


def image(value: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 9)).save(stream, "PNG")
    return stream.getvalue()


IMAGES = [image(value) for value in range(8)]


def table(
    path: Path, labels: Any, images: Any = None, names: Sequence[Any] | None = None, **more: Any
) -> Path:
    """A Parquet file, with the features that `datasets` would write where `names` are given."""
    images = IMAGES[: len(labels)] if images is None else images
    columns = pa.table({"image": images, "label": labels, **more})
    if names is not None:
        features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
        metadata = json.dumps({"info": {"features": features}})
        columns = columns.replace_schema_metadata({"huggingface": metadata})
    parquet.write_table(columns, path)
    return path


def test_labels_that_are_true_or_false_in_a_column_y(tmp_path: Path) -> None:
    columns = pa.table({"image": IMAGES, "y": [True, False] * 4})
    parquet.write_table(columns, tmp_path / "train.parquet")
    dataset = open_dataset(tmp_path)
    assert dataset.classes == ("False", "True")
    assert dataset.splits["train"].labels.tolist() == [1, 0] * 4
    parquet.write_table(columns.rename_columns(["image", "kind"]), tmp_path / "train.parquet")
    assert "column called label, labels, fine_label" in refusal(tmp_path)


@pytest.mark.parametrize("several", [False, True])
def test_a_folder_of_save_to_disk(tmp_path: Path, several: bool) -> None:
    datasets = pytest.importorskip("datasets")
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
    state.write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    assert "gone.arrow: no such Arrow file" in refusal(saved)
    (saved / "dataset_dict.json").write_text('{"splits": []}')
    assert "its splits are none; expected train, val or test" in refusal(saved)


def test_class_names_of_the_schema_keep_their_order(tmp_path: Path) -> None:
    table(tmp_path / "train.parquet", [1, 0, 1], names=["zebra", "ape", "cat"])
    dataset = open_dataset(tmp_path)
    assert dataset.classes == ("zebra", "ape", "cat")
    assert dataset.splits["train"].labels.tolist() == [1, 0, 1]
    assert "train has no images of class 'cat'" in dataset.notes


@pytest.mark.parametrize("kind", ["int8", "int64", "string", "large_string", "dictionary"])
def test_labels_of_each_type(tmp_path: Path, kind: str) -> None:
    labels: Any = pa.array(["10", "9", "10"])
    labels = labels.dictionary_encode() if kind == "dictionary" else labels.cast(kind)
    dataset = open_dataset(table(tmp_path / "train.parquet", labels))
    assert dataset.classes == ("9", "10")
    assert dataset.splits["train"].labels.tolist() == [1, 0, 1]


def test_one_file_without_splits_is_cut(tmp_path: Path) -> None:
    path = table(
        tmp_path / "data.parquet", [i % 2 for i in range(40)], [image(i) for i in range(40)]
    )
    dataset = open_dataset(path)
    assert dataset.cut
    assert dataset.name == "data"
    assert [len(split) for split in dataset.splits.values()] == [28, 4, 8]
    assert dataset.splits["test"].name(0).startswith("data.parquet row ")


def test_a_folder_as_the_hub_has_it(tmp_path: Path) -> None:
    as_parquet(tmp_path / "repository" / "data", samples())
    dataset = open_dataset(tmp_path / "repository")
    assert {name: len(split) for name, split in dataset.splits.items()} == {
        "train": 18, "val": 6, "test": 6
    }  # fmt: skip
    assert dataset.splits["train"].name(9) == "train-00001-of-00002.parquet row 0"


def test_tables_beside_folders_of_images_are_not_read(tmp_path: Path) -> None:
    folder(tmp_path, {"train/a": 2, "train/b": 2})
    table(tmp_path / "about.parquet", [0, 1])
    assert open_dataset(tmp_path).classes == ("a", "b")


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        ([0, 1, 2], ["a", "b"], "train.parquet: expected labels below 2, got 2 in row 2"),
        ([0, -7, 1], ["a", "b"], "expected labels below 2, got -7 in row 1"),
        ([0, 1, -2], None, "expected labels of 0 or more, got -2 in row 2"),
        ([0, None, 1], ["a", "b"], "row 1 has no label (None, -1 or empty), 1 rows in all"),
        ([-1, 0, -1], ["a", "b"], "row 0 has no label (None, -1 or empty), 2 rows in all"),
        (["a", "", "b"], None, "row 1 has no label"),
        ([0, 0, 0], ["a", "b"], "only one class has images, 'a'"),
        ([0, 1, 0], ["a", "a"], "'label' has the same class name twice"),
        ([0, 1, 0], ["a", 3], "not a list of class names"),
        ([0.5, 1.0, 0.0], None, "one column of labels, found none; the columns are image: binary"),
    ],
)
def test_labels_are_refused_by_their_row(
    tmp_path: Path, labels: list[Any], names: list[Any] | None, expected: str
) -> None:
    assert expected in refusal(table(tmp_path / "train.parquet", labels, names=names))


def test_rows_are_counted_over_row_groups_and_by_file(tmp_path: Path) -> None:
    columns = pa.table({"image": IMAGES, "label": [0, 1, 0, 1, 0, 1, 0, 5]})
    metadata = {"label": {"_type": "ClassLabel", "names": ["a", "b"]}}
    columns = columns.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": metadata}})}
    )
    parquet.write_table(columns, tmp_path / "train-1.parquet", row_group_size=3)
    parquet.write_table(columns.slice(0, 2), tmp_path / "train-0.parquet")
    assert "train-1.parquet: expected labels below 2, got 5 in row 7" in refusal(tmp_path)


def test_a_test_split_without_labels_is_left_out(tmp_path: Path) -> None:
    table(tmp_path / "train.parquet", [0, 1], names=["a", "b"])
    table(tmp_path / "test.parquet", [-1, -1], names=["a", "b"])
    dataset = open_dataset(tmp_path)
    assert list(dataset.splits) == ["train"]
    assert "test has no labels and is left out" in dataset.notes
    table(tmp_path / "train.parquet", [-1, -1], names=["a", "b"])
    assert "train.parquet: row 0 has no label" in refusal(tmp_path)


def test_columns_are_recognised_by_type_then_by_name(tmp_path: Path) -> None:
    path = table(tmp_path / "train.parquet", [0, 1], mask=IMAGES[:2], fine_label=["x", "y"])
    assert open_dataset(path).classes == ("0", "1")
    columns = pa.table({"left": IMAGES[:2], "right": IMAGES[:2], "label": [0, 1]})
    parquet.write_table(columns, path)
    assert "expected one column of images, found 'left', 'right'; the columns are left" in refusal(
        path
    )
    parquet.write_table(pa.table({"image": IMAGES[:2], "caption": ["x", "y"]}), path)
    assert (
        "one column of labels, found none; the columns are image: binary, caption: string"
        in refusal(path)
    )
    parquet.write_table(pa.table({"image": ["a.png", "b.png"], "label": [0, 1]}), path)
    assert "one column of images, found none" in refusal(path)


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    table(tmp_path / "train.parquet", [0, 1], names=["a", "b"])
    table(tmp_path / "val.parquet", [0, 1], names=["b", "a"])
    assert "val.parquet: its columns or class names differ from those of train" in refusal(tmp_path)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    path = table(tmp_path / "train.parquet", [0, 1])
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[:-9], whole[:4] + bytes(60) + whole[64:]):
        path.write_bytes(content)
        assert "train.parquet: cannot be read as a Parquet file" in refusal(path)


def test_rows_without_an_image_are_bad_images(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(IMAGES[0])
    paths = [None, "x.png", str(tmp_path / "secret.png"), "y.png"]
    contents = [IMAGES[1], None, None, b""]
    rows = [{"bytes": b, "path": p} for b, p in zip(contents, paths, strict=True)] + [None]
    split = open_dataset(table(tmp_path / "train.parquet", [0, 1, 0, 1, 0], rows)).splits["train"]
    assert split.read(0)[0, 0].tolist() == [1, 0, 9]
    for index in (1, 2, 3, 4):
        with pytest.raises(ImageError, match=f"train.parquet row {index}: empty"):
            split.read(index)


def test_a_file_that_changes_while_in_use_is_named(tmp_path: Path) -> None:
    path = table(tmp_path / "train.parquet", [0, 1])
    split = open_dataset(path).splits["train"]
    table(path, [0, 1, 0])
    with pytest.raises(ImageError, match="the file was changed after it was opened"):
        split.read(0)
    path.unlink()
    with pytest.raises(ImageError, match=r"train\.parquet row 0"):
        split.read(0)


def test_only_so_many_row_groups_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(
        pa.table({"image": IMAGES, "label": [0, 1] * 4}), tmp_path / "train.parquet",
        row_group_size=2,
    )  # fmt: skip
    split = open_dataset(tmp_path).splits["train"]
    assert isinstance(split, StoredSplit)
    assert isinstance(split.store, TableStore)
    opened: list[int] = []
    read = parquet.ParquetFile.read_row_group

    def count(file: parquet.ParquetFile, group: int, **options: object) -> pa.Table:
        opened.append(group)
        return read(file, group, **options)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", count)
    for index in (0, 1, 7, 0, 6):
        assert split.read(index)[0, 0, 0] == index
    assert opened == [0, 3]
    monkeypatch.setattr(table_store, "MOST_CACHED", 2 * len(IMAGES[0]) + 100)
    for index in (2, 3, 4, 2, 6):
        assert split.read(index)[0, 0, 0] == index
    assert opened == [0, 3, 1, 2, 1, 3]


def test_a_file_is_read_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path / "train.parquet", ["a", "b"])
    first = open_dataset(path)
    with monkeypatch.context() as patch:
        patch.setattr(parquet.ParquetFile, "read_row_group", lambda *_, **__: pytest.fail("again"))
        again = open_dataset(path)
    assert (again.fingerprint, again.classes) == (first.fingerprint, first.classes)
    np.testing.assert_array_equal(again.splits["train"].read(1), first.splits["train"].read(1))

"""CSV lists: columns and classes by name, rows refused by their line, nothing outside read."""

from pathlib import Path

import numpy as np
import pytest
from image_files import contents, folder, refusal

from vitkit import DataError, ImageError, open_dataset


def listing(root: Path, text: str, name: str = "data.csv") -> Path:
    (root / name).write_text(text, encoding="utf-8")
    return root / name


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """20 images in folders that say nothing about their class."""
    return folder(tmp_path / "data", {"x": 12, "y": 8})


ROWS = "".join(f"x/{i}.png,{'10' if i % 2 else '9'}\n" for i in range(12))


def test_classes_are_what_the_list_says(images: Path) -> None:
    dataset = open_dataset(listing(images, "path,label\n" + ROWS))
    assert dataset.classes == ("9", "10")
    assert dataset.name == "data"
    union = set.union(*contents(dataset).values())
    assert union == {("10" if i % 2 else "9", i) for i in range(12)}


def test_a_list_beside_the_folder_of_its_images(images: Path, tmp_path: Path) -> None:
    text = "path,label\n" + ROWS
    beside = listing(tmp_path, text)
    inside = open_dataset(listing(images, text))
    dataset = open_dataset(beside, data_root=images)
    assert dataset.fingerprint == inside.fingerprint
    assert contents(dataset) == contents(inside)
    out = refusal(listing(tmp_path, "path,label\n../elsewhere.png,a\n"), data_root=images)
    assert f"leads out of the folder {images}" in out


def test_the_unicode_text_of_excel(images: Path) -> None:
    plain = open_dataset(listing(images, "path\tlabel\n" + ROWS.replace(",", "\t")))
    for encoding in ("utf-16", "utf-16-be"):
        mark = b"\xfe\xff" if encoding.endswith("be") else b""
        text = "path\tlabel\r\n" + ROWS.replace(",", "\t")
        (images / "excel.csv").write_bytes(mark + text.encode(encoding))
        assert open_dataset(images / "excel.csv").fingerprint == plain.fingerprint


def test_without_splits_it_is_cut_as_a_flat_folder_is(tmp_path: Path) -> None:
    flat = folder(tmp_path / "flat", {"cat": 30, "dog": 20})
    whole = open_dataset(flat)
    rows = [f"{p.relative_to(flat)},{p.parent.name}" for p in sorted(flat.rglob("*.png"))]
    listed = open_dataset(listing(flat, "path,label\n" + "\n".join(reversed(rows))))
    assert listed.cut
    assert contents(listed) == contents(whole)
    assert [len(split) for split in listed.splits.values()] == [35, 5, 10]
    assert "divided 70/10/20" in listed.notes[-1]


@pytest.mark.parametrize(
    "text",
    ["filename,label\n{}", "file_name,class\n{}", "filepath,Target\n{}", "image,label\n{}",
     "id,class_name\n{}", "\ufeffimage_path,label\n{}", "Label,PATH\n{swapped}",
     "id;path;label\n{semicolons}", "path\tlabel\n{tabs}", 'path,label\r\n"{quoted}"\r\n\r\n'],
)  # fmt: skip
def test_columns_by_their_names(images: Path, text: str) -> None:
    rows = [("x/0.png", "a b"), ("x/1.png", "a b"), ("x/2.png", "c"), ("x/3.png", "c")]
    forms = {
        "swapped": "\n".join(f"{label},{path}" for path, label in rows),
        "semicolons": "\n".join(f"7;{path};{label}" for path, label in rows),
        "tabs": "\n".join(f"{path}\t{label}" for path, label in rows),
        "quoted": '"\r\n"'.join(f'{path}","{label}' for path, label in rows),
    }
    plain = "\n".join(f"{path}, {label} " for path, label in rows)
    dataset = open_dataset(listing(images, text.format(plain, **forms)))
    assert dataset.classes == ("a b", "c")
    assert sum(map(len, dataset.splits.values())) == 4


def test_a_split_column(images: Path) -> None:
    names = ["train"] * 6 + ["Validation"] * 2 + ["test"] * 2
    rows = [f"x/{i}.png,{'ab'[i % 2]},{name}" for i, name in enumerate(names)]
    dataset = open_dataset(listing(images, "path,label,split\n" + "\n".join(rows)))
    assert {name: len(split) for name, split in dataset.splits.items()} == {
        "train": 6, "val": 2, "test": 2
    }  # fmt: skip
    assert not dataset.cut
    again = listing(images, "path,label,split\n" + "\n".join(reversed(rows)))
    assert contents(open_dataset(again)) == contents(dataset)


BAD_ROWS = {
    "x/1.png": "line 3: no label",
    "x/1.png,": "line 3: no label",
    ",b": "line 3: no path",
    "../outside.png,b": "line 3: path '../outside.png' leads out of the folder",
    "x/../../data2/o.png,b": "line 3: path 'x/../../data2/o.png' leads out",
    "/etc/hostname,b": "line 3: path '/etc/hostname' leads out of the folder",
    ".,b": "line 3: path '.' leads out",
    "x/0.png,b": "line 3: 'x/0.png' has another class or split in line 2",
    "./x//0.png,b": "line 3: 'x/0.png' has another class or split in line 2",
    "x/1.png,A": "class names 'A' and 'a' differ only in case",
    'x/1.png,"b': "not a CSV file in UTF-8 or UTF-16 from line 3 on",
    'x/1.png,b,"two\nlines"\n\nx/2.png,': "line 6: no label",
    "x/1.png,a": "only one class has images, 'a'",
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_are_refused_with_their_line(images: Path, row: str) -> None:
    assert BAD_ROWS[row] in refusal(listing(images, f"path,label\nx/0.png,a\n{row}\n"))


def test_a_list_whose_files_are_all_elsewhere_asks_for_their_folder(images: Path) -> None:
    table = listing(images, "path,label\nx/no.png,a\nx/none.png,b\n")
    message = refusal(table)
    assert f"none of its 2 paths exists below {images}; pass the folder that they are" in message
    assert "as --data-root" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("path,name\nx/0.png,a\n", "expected one column 'label', found 0"),
        ("path,filename,label\n", "expected one column 'path', found 2"),
        ("day,note,size,path,label\nx/0.png\n", "line 2: no path"),
        ("path,label,split\nx/0.png,a,\n", "line 2: split ''; expected"),
        ("path,label,split\nx/0.png,a,train\nx/0.png,a,val\n",
         "has another class or split in line 2"),
    ],
)  # fmt: skip
def test_lists_that_cannot_be_used(images: Path, text: str, expected: str) -> None:
    assert expected in refusal(listing(images, text))


def test_a_list_that_is_no_text(images: Path) -> None:
    (images / "data.csv").write_bytes(b"path,label\nx/\xff.png,a\n")
    assert "not a CSV file in UTF-8 or UTF-16 from" in refusal(images / "data.csv")
    (images / "data.csv").write_bytes("path,label\nx/0.png,a\n".encode("utf-16")[:-1])
    assert "not a CSV file in UTF-8 or UTF-16 from" in refusal(images / "data.csv")
    (images / "data.csv").write_bytes(b"path,label\nx/0.png," + b"a" * 200_000)
    assert "UTF-16 from line 2 on" in refusal(images / "data.csv")
    (images / "data.csv").write_text("x" * 140_000)
    assert "UTF-16 from line 1 on: field larger than" in refusal(images / "data.csv")


def test_links_out_of_the_folder(images: Path, tmp_path: Path) -> None:
    outside = folder(tmp_path / "elsewhere", {"z": 3})
    (images / "linked.png").symlink_to(outside / "z" / "0.png")
    (images / "through").symlink_to(outside / "z")
    (images / "inner.png").symlink_to(images / "x" / "5.png")
    rows = "x/0.png,a\nx/1.png,b\ninner.png,a\nlinked.png,b\nthrough/1.png,a\n"
    data = listing(images, "path,label\n" + rows)
    message = refusal(data)
    assert "line 5: path 'linked.png' leads out of the folder by a symbolic link" in message
    assert message.endswith("(and 1 more lines)")
    assert "--follow-links" in message
    followed = open_dataset(data, follow_links=True)
    assert sum(map(len, followed.splits.values())) == 5
    data = listing(images, "path,label\nx/0.png,a\nthrough/../../data2/x.png,b\n")
    assert "leads out of the folder" in refusal(data, follow_links=True)


def test_a_file_that_is_not_there_is_a_bad_image_with_its_line(images: Path) -> None:
    rows = "x/0.png,a,train\nx/1.png,b,train\nx/none.png,b,train\n"
    dataset = open_dataset(listing(images, "path,label,split\n" + rows))
    with pytest.raises(ImageError, match=r"x/none.png \(line 4\): missing"):
        dataset.splits["train"].read(2)
    np.testing.assert_array_equal(dataset.splits["train"].read(0)[0, 0], (0, 0, 7))


def test_rows_that_repeat_are_counted(images: Path) -> None:
    dataset = open_dataset(listing(images, "path,label\n" + ROWS + ROWS))
    assert "12 rows of an image listed before" in dataset.notes
    dataset = open_dataset(listing(images, "path,label\n" + ROWS + ROWS.splitlines()[0]))
    assert "1 row of an image listed before" in dataset.notes
    with pytest.raises(DataError, match=r"other\.csv: no such file or folder, .*; the nearest"):
        open_dataset(images / "other.csv")

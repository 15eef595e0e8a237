"""`find_images`: files, folders, patterns, addresses, lists, datasets, and lines."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitkit

PREPROCESS = vitkit.Preprocess(image_size=8)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Images of nine values in folders, and a list of some of them."""
    places = [
        "photos/1.png", "photos/2.jpg", "photos/cats/3.png", "photos/cats/old/4.png",
        "photos/dogs/5.PNG", "photos/.hidden/6.png", "photos/[odd]/7.png",
    ]  # fmt: skip
    for number, place in enumerate(places):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number * 20, 50, 7)).save(path)
    (tmp_path / "photos" / "notes.txt").write_text("words")
    (tmp_path / "photos" / "cats" / "again").symlink_to("..")
    (tmp_path / "list.csv").write_text(
        "path,label\nphotos/2.jpg,dog\nphotos/1.png,cat\nphotos/2.jpg,dog\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(*given: str, **options: object) -> list[str]:
    return [image.name for image in vitkit.find_images(*given, **options)]


@pytest.fixture
def predictor() -> vitkit.Predictor:
    return vitkit.Predictor(lambda images: images.mean(dim=(2, 3)), PREPROCESS, batch_size=2)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("photos/*.png", ["1.png"]), ("photos/?.*", ["1.png", "2.jpg"]),
     ("photos/[12].jpg", ["2.jpg"]), ("photos/[odd]/[7]*", ["[odd]/7.png"]),
     ("photos/[[]odd]/*", ["[odd]/7.png"]), ("photos/dogs/*", ["dogs/5.PNG"]),
     ("photos/ca*", ["cats/3.png", "cats/again/1.png", "cats/again/2.jpg"]),
     ("photos/*/old/**", ["cats/old/4.png"]), ("photos/**/old/*.png", ["cats/old/4.png"]),
     ("photos/**/o*d/**/*.png", ["cats/old/4.png"]), ("**/ol*/**", ["cats/old/4.png"])],
)  # fmt: skip
def test_patterns_match_images_as_in_a_shell(root, pattern, expected):
    assert names(pattern)[: len(expected)] == [f"photos/{name}" for name in expected]


def test_two_stars_are_any_folders_and_links_that_lead_in_circles_end(root):
    found = names("photos/**/*.png")
    assert [name for name in found if "again" not in name] == [
        "photos/1.png", "photos/[odd]/7.png", "photos/cats/3.png", "photos/cats/old/4.png"
    ]  # fmt: skip
    assert set(names("**")) == set(names("photos/**")) == set(names("photos"))


def test_an_order_that_is_fixed_and_images_named_twice(root):
    assert names("photos/2.jpg", "photos/1.png", "photos/2.jpg") == [
        "photos/2.jpg", "photos/1.png", "photos/2.jpg"
    ]  # fmt: skip
    assert names("photos") == sorted(names("photos"), key=lambda name: name.split("/"))
    assert vitkit.find_images("photos", "photos/1.png").total == len(names("photos")) + 1


@pytest.mark.parametrize(
    ("given", "message"),
    [(("photos/*.gif",), r"photos/\*\.gif: no image matches; expected files ending in \.jpg"),
     (("nowhere/*.png",), r"no image matches; .*; the nearest folder that exists is"),
     (("photos/cat",), r"photos/cat: no such image; the nearest folder .*, with: cats/"),
     (("mnits",), r"no such image \(did you mean 'mnist'\?\)"),
     (("s3://bucket/a.png",), "expected an http:// or https:// address"), ((), "no images given"),
     (("photos/cats", ""), "a name of images is empty; '.' is the working folder"),
     (("digits", "--"), "--: no such image"),
     (("photos/notes.txt",), r"notes\.txt: not an image; .* send the file: - < photos/notes")],
)  # fmt: skip
def test_what_is_not_found_is_named(root, given, message):
    with pytest.raises(vitkit.DataError, match=message):
        vitkit.find_images(*given)


def test_a_name_among_others_keeps_its_hint(root):
    for name, hint in (("photos/notes.txt", "not an image: if it is a list of paths"),
                       ("photos/9.png", "missing: no such image; the nearest folder")):  # fmt: skip
        *_, odd = vitkit.find_images("photos/1.png", name, missing_ok=True)
        with pytest.raises(vitkit.ImageError, match=f"^{name}: {hint}"):
            odd.pixels()


def test_a_list_needs_no_labels_and_no_second_class(root):
    (root / "names.csv").write_text("path\nphotos/2.jpg\nphotos/9.png\n")
    assert [(i.name, i.label) for i in vitkit.find_images("names.csv")] == [
        ("photos/2.jpg", ""), ("photos/9.png", "")
    ]  # fmt: skip
    (root / "one.csv").write_text("path,label,split\n2.jpg,dog,test\n1.png,dog,train\n")
    images = list(vitkit.find_images("one.csv", data_root="photos"))
    assert [(i.name, i.label, i.split) for i in images] == [
        ("photos/2.jpg", "dog", "test"), ("photos/1.png", "dog", "train")
    ]  # fmt: skip
    (root / "some.csv").write_text("path,label\nphotos/2.jpg,\nphotos/1.png,cat\n")
    assert [image.label for image in vitkit.find_images("some.csv")] == ["", "cat"]
    (root / "none.csv").write_text("path,label\n")
    with pytest.raises(vitkit.DataError, match=r"none\.csv: no images"):
        vitkit.find_images("none.csv")


def test_a_dataset_gives_labels_and_its_pixels(predictor):
    found = vitkit.find_images("digits", split="test")
    dataset = vitkit.open_dataset("digits")
    test = dataset.splits["test"]
    assert found.total == len(test)
    images = list(found)[:5]
    assert [image.label for image in images] == [dataset.classes[n] for n in test.labels[:5]]
    assert {image.split for image in images} == {"test"}
    grey = [np.repeat(test.read(n), 3, axis=2) for n in range(5)]
    assert (predictor.logits(images) == predictor.logits(grey)).all()


def test_a_folder_is_a_dataset_with_a_split(tmp_path):
    for place in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / place / "1.png")
    found = [*vitkit.find_images(tmp_path, split="test")]
    assert [(image.name, image.label) for image in found] == [
        (str(tmp_path / "test" / label / "1.png"), label) for label in "ab"
    ]
    assert {image.label for image in vitkit.find_images(tmp_path)} == {""}


def test_splits_that_were_cut_are_not_those_of_an_image(tmp_path):
    for number in range(20):
        path = tmp_path / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (9, 9), (number, 0, 0)).save(path)
    dataset = vitkit.open_dataset(tmp_path)
    assert {image.split for image in vitkit.find_images(dataset)} == {""}
    assert {image.split for image in vitkit.find_images(dataset, split="test")} == {"test"}


def test_a_damaged_image_of_shards_is_named(tmp_path, predictor):
    import io
    import tarfile

    good = io.BytesIO()
    Image.new("RGB", (9, 9)).save(good, "PNG")
    with tarfile.open(tmp_path / "test-0.tar", "w") as tar:
        for key, content in (("x", good.getvalue()), ("y", good.getvalue()[:60])):
            for ending, data in (("png", content), ("cls", key.encode())):
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    first, second = predictor.stream(vitkit.find_images(f"wds:{tmp_path}/test-0.tar"))
    assert first.image == "test-0.tar/x"
    assert isinstance(second, vitkit.ImageError)
    assert str(second).startswith("test-0.tar/y: truncated")


def test_one_name_stands_for_its_images(root, predictor):
    assert [p.image for p in predictor("photos/?.*")] == ["photos/1.png", "photos/2.jpg"]
    assert [p.image for p in predictor.stream(root / "photos" / "dogs")] == [
        str(root / "photos" / "dogs" / "5.PNG")
    ]
    assert [p.image for p in predictor([np.zeros((4, 4, 3), np.uint8), "photos/1.png"])] == [
        "image 0", "photos/1.png"
    ]  # fmt: skip
    assert predictor.logits("photos").shape[0] == len(names("photos"))


@pytest.mark.parametrize(
    "sent", [b"photos/1.png\nphotos/2.jpg", b"\r\nphotos/1.png\r\n\n  \nphotos/2.jpg\r\n",
             b"photos/1.png\0photos/2.jpg\0"]
)  # fmt: skip
def test_lines_of_a_stream(root, sent):
    reading, writing = os.pipe()
    os.write(writing, sent)
    os.close(writing)
    found = vitkit.find_images("-", "photos/1.png", stdin=reading)
    assert found.total == 3
    assert [image.name for image in found] == ["photos/1.png", "photos/2.jpg", "photos/1.png"]
    os.close(reading)

"""Datasets that are Python objects: what they open to, and every item that cannot be used."""

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import vitkit
from vitkit import DataError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (40, 6, 7, 3), np.uint8)
LABELS = np.arange(40) % 3


class Items(TorchDataset):
    """A dataset whose items are made by a function."""

    def __init__(self, make, length=40, classes=None):
        self.make, self.length = make, length
        if classes:
            self.classes = classes

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)


def pixels_of(dataset):
    return {
        split: [part.read(index).tobytes() for index in range(len(part))]
        for split, part in dataset.splits.items()
    }


@pytest.fixture
def pairs(tmp_path):
    for number, image in enumerate(IMAGES):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    return [(tmp_path / f"{number}.png", int(label)) for number, label in enumerate(LABELS)]


def as_tensor(index):
    return torch.from_numpy(IMAGES[index]).permute(2, 0, 1)


KINDS = {
    "arrays": lambda: (IMAGES, LABELS),
    "list of labels": lambda: (IMAGES, LABELS.tolist()),
    "tensors": lambda: (torch.from_numpy(IMAGES).permute(0, 3, 1, 2), torch.from_numpy(LABELS)),
    "float arrays": lambda: (IMAGES / 255.0, LABELS),
    "list of arrays": lambda: [*zip(IMAGES, LABELS, strict=True)],
    "PIL": lambda: Items(lambda i: (Image.fromarray(IMAGES[i]), LABELS[i])),
    "uint8": lambda: Items(lambda i: (IMAGES[i], int(LABELS[i]))),
    "uint8 tensor": lambda: Items(lambda i: (as_tensor(i), torch.tensor(LABELS[i]))),
    "float tensor": lambda: Items(lambda i: (as_tensor(i).float() / 255, LABELS[i])),
    "half tensor": lambda: Items(lambda i: (as_tensor(i).double() / 255, LABELS[i])),
    "mapping": lambda: Items(lambda i: {"image": IMAGES[i], "label": LABELS[i]}),
    "TensorDataset": lambda: TensorDataset(
        torch.from_numpy(IMAGES).permute(0, 3, 1, 2) / 255, torch.from_numpy(LABELS)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_holds_the_same_pixels_and_labels(kind):
    parts = {"train": KINDS[kind](), "test": KINDS[kind]()}
    dataset = vitkit.open_dataset(parts)
    assert dataset.classes == ("0", "1", "2")
    assert [*dataset.splits] == ["train", "test"]
    train = dataset.splits["train"]
    assert np.array_equal(train.labels, LABELS)
    assert [train.read(i).tobytes() for i in range(40)] == [i.tobytes() for i in IMAGES]


def test_a_list_of_paths_is_read_from_its_files(pairs):
    dataset = vitkit.open_dataset({"training": pairs, "validation": pairs[:9]})
    assert [*dataset.splits] == ["train", "val"]
    assert np.array_equal(dataset.splits["train"].labels, LABELS)
    assert dataset.splits["train"].read(3).tobytes() == IMAGES[3].tobytes()
    assert dataset.splits["train"].name(3) == "3.png"
    named = vitkit.open_dataset([(path, "abc"[label]) for path, label in pairs])
    assert named.classes == ("a", "b", "c")


def test_decoded_images_of_a_list_are_in_memory_and_others_are_not(pairs):
    opened = {
        "arrays": [*zip(IMAGES, LABELS, strict=True)],
        "paths": [{"image": path, "label": label} for path, label in pairs],
        "bytes": [(path.read_bytes(), label) for path, label in pairs],
        "made": Items(lambda i: (IMAGES[i], LABELS[i])),
    }
    splits = {
        kind: vitkit.open_dataset({"train": data}).splits["train"] for kind, data in opened.items()
    }
    assert {kind for kind, split in splits.items() if split.in_memory} == {"arrays"}


def test_a_path_that_no_file_can_have_is_missing(pairs):
    problems = vitkit.check({"train": [*pairs, ("a\0b.png", 1)]}).problems["train"]
    assert [(problem.index, problem.reason) for problem in problems] == [(40, "missing")]


def test_images_without_a_split_are_divided_like_those_of_a_folder():
    dataset = vitkit.open_dataset((IMAGES, LABELS))
    assert {name: len(part) for name, part in dataset.splits.items()} == {
        "train": 28, "val": 4, "test": 8,
    }  # fmt: skip
    assert dataset.cut
    order = RNG.permutation(40)
    again = vitkit.open_dataset((IMAGES[order], LABELS[order]))
    for name, images in pixels_of(dataset).items():
        assert sorted(images) == sorted(pixels_of(again)[name])
    assert again.fingerprint != dataset.fingerprint


def test_class_names_are_those_of_the_dataset():
    dataset = Items(lambda i: (IMAGES[i], LABELS[i]), classes=["ant", "bee", "cat", "dog"])
    assert vitkit.open_dataset({"train": dataset}).classes == ("ant", "bee", "cat", "dog")
    subset = Subset(dataset, [*range(0, 40, 2)])
    opened = vitkit.open_dataset({"train": subset})
    assert opened.classes == ("ant", "bee", "cat", "dog")
    assert np.array_equal(opened.splits["train"].labels, LABELS[::2])


def test_a_dataset_of_hugging_face_is_opened_by_its_features(tmp_path):
    hub = pytest.importorskip("datasets")
    hub.disable_progress_bars()
    features = hub.Features({
        "y": hub.ClassLabel(names=["ant", "bee", "cat"]), "photo": hub.Image(),
        "note": hub.Value("string"),
    })  # fmt: skip
    rows = {"y": LABELS.tolist(), "photo": [Image.fromarray(i) for i in IMAGES], "note": ["n"] * 40}
    whole = hub.Dataset.from_dict(rows, features=features)
    both = hub.DatasetDict({"train": whole, "validation": whole.select(range(9))})
    opened = vitkit.open_dataset(both)
    assert opened.classes == ("ant", "bee", "cat")
    assert {name: len(part) for name, part in opened.splits.items()} == {"train": 40, "val": 9}
    assert np.array_equal(opened.splits["train"].labels, LABELS)
    assert opened.splits["train"].read(11).tobytes() == IMAGES[11].tobytes()
    shuffled = vitkit.open_dataset({"train": whole.shuffle(seed=1).with_format("torch")})
    order = whole.add_column("n", range(40)).shuffle(seed=1)["n"]
    assert np.array_equal(shuffled.splits["train"].labels, LABELS[[*order]])
    # files named by a path, and a transform of the user's own
    Image.fromarray(IMAGES[0]).save(tmp_path / "0.png")
    named = hub.Dataset.from_dict({"image": [str(tmp_path / "0.png")] * 2, "label": ["x", "y"]})
    named = named.cast_column("image", hub.Image())
    part = vitkit.open_dataset({"train": named}).splits["train"]
    assert part.read(1).tobytes() == IMAGES[0].tobytes()
    inverted = whole.with_transform(
        lambda rows: {"image": [255 - np.asarray(i) for i in rows["photo"]], "label": rows["y"]}
    )
    part = vitkit.open_dataset({"train": inverted}).splits["train"]
    assert part.read(7).tobytes() == (255 - IMAGES[7]).tobytes()


@pytest.mark.parametrize("unknown", [-1, None])
def test_a_test_split_without_labels_is_left_out(unknown):
    hub = pytest.importorskip("datasets")
    hub.disable_progress_bars()
    names = hub.ClassLabel(names=["ant", "bee", "cat"])
    features = hub.Features({"image": hub.Image(), "label": names})
    rows = {"image": [*map(Image.fromarray, IMAGES)], "label": LABELS.tolist()}
    known = hub.Dataset.from_dict(rows, features=features)
    test = hub.Dataset.from_dict(rows | {"label": [unknown] * 40}, features=features)
    data = hub.DatasetDict({"train": known, "validation": known.select(range(9)), "test": test})
    opened = vitkit.open_dataset(data)
    assert {name: len(part) for name, part in opened.splits.items()} == {"train": 40, "val": 9}
    assert opened.notes == ("test has no labels and is left out",)
    # alone there is nothing to take, and one label that is missing is a mistake
    with pytest.raises(DataError, match=r"datasets/test\[0\] has no label"):
        vitkit.open_dataset({"test": test})
    mixed = rows | {"label": [*LABELS[:39].tolist(), unknown]}
    data["test"] = hub.Dataset.from_dict(mixed, features=features)
    with pytest.raises(DataError, match=r"datasets/test\[39\] has no label"):
        vitkit.open_dataset(data)


def test_an_opened_dataset_is_accepted_again():
    dataset = vitkit.open_dataset((IMAGES, LABELS))
    assert vitkit.open_dataset(dataset) is dataset
    assert vitkit.check(dataset).total == 40
    assert vitkit.check((IMAGES, LABELS)).total == 40


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(IMAGES[0], 0)])


def replaced(index, value):
    """A dataset in which one item is another one."""
    return Items(lambda i: value if i == index else (IMAGES[i], int(LABELS[i])))


OBJECTS = np.empty(40, object)
OBJECTS[:] = [*IMAGES]
BAD = {
    "a label outside the classes": (
        Items(lambda i: (IMAGES[i], 3 if i == 7 else 1), classes=["a", "b", "c"]),
        r"Items\[7\] has the label 3; expected 0 to 2, or one of the 3",
    ),
    "an unknown class name": (Items(lambda i: (IMAGES[i], "bew"), classes=["ant", "bee"]),
                              r"Items\[0\] has the label 'bew'; expected .* .did you mean 'bee'"),
    "a negative label": (replaced(5, (IMAGES[5], -1)), r"Items\[5\] has the label -1; expected"),
    "a float label": (replaced(5, (IMAGES[5], 1.0)), r"Items\[5\] has the label 1\.0; expected"),
    "no label": (replaced(5, (IMAGES[5], None)), r"Items\[5\] has no label"),
    "an empty name": (replaced(5, (IMAGES[5], " ")), r"Items\[5\] has the label ' '"),
    "a float tensor as label": (replaced(4, (IMAGES[4], torch.tensor(1.0))), "has the label 1.0"),
    "a one-hot label": (replaced(4, (IMAGES[4], torch.eye(3)[0])),
                        r"Items\[4\] has a label of the shape \(3,\).*argmax"),
    "a shape that is no image": (
        Items(lambda i: (IMAGES[i].transpose(2, 0, 1), 0)),
        r"Items\[0\]: the array has the shape \(3, 6, 7\); expected \(H, W\), \(H, W, 1\)",
    ),
    "an item that raises": (Items(lambda i: 1 // (i - 9) and (IMAGES[i], 0)),
                            r"Items\[9\] raised ZeroDivisionError"),
    "an item of three": (replaced(2, (IMAGES[2], 0, 2)), r"Items\[2\] is a tuple; expected"),
    "an item without an image": (
        Items(lambda i: {"pixels": IMAGES[i], "label": 0}),
        r"Items\[0\] is a mapping of .*pixels.*; expected one of the keys image, img",
    ),
    "normalised floats": (
        Items(lambda i: (as_tensor(i) / 255 * 4 - 2, 0)),
        r"Items\[0\]: float values from -.* expected 0 to 1; leave out a Normalize",
    ),
    "NaN": (Items(lambda i: (as_tensor(i) * float("nan"), 0)),
            r"Items\[0\]: float values from nan to nan"),
    "an int64 image": (Items(lambda i: (IMAGES[i].astype(np.int64), 0)),
                       r"Items\[0\]: values of type int64; expected uint8"),
    "an object that is no image": (Items(lambda i: ({}, 0)),
                                   r"Items\[0\]: the image is a dict; expected a PIL image"),
    "a missing file": (Items(lambda i: ("nowhere.png", 0)),
                       r"Items\[0\]: missing: nowhere.png: no such file"),
    "no items": (Items(None, length=0), "Items: no images"),
    "one class": ((IMAGES, LABELS * 0), "only one class has images"),
    "other lengths": ((IMAGES, LABELS[:-1]),
                      r"images of the shape .40, .* and labels of the shape \(39,\); expected"),
    "an array of objects": (
        (OBJECTS, LABELS),
        r"arrays: images of the shape \(40,\) .*of several sizes pass a list of \(image",
    ),
    "channels first": ((IMAGES.transpose(0, 3, 1, 2), LABELS),
                       r"arrays: images of the shape \(40, 3, 6, 7\) .* expected \(N, H, W\)"),
    "a tensor that numpy cannot hold": (
        (as_tensor(0)[None].bfloat16().expand(40, -1, -1, -1), LABELS),
        "arrays: a Tensor that cannot be read as an array: ",
    ),
    "no pixels": ((IMAGES[:, :0], LABELS), r"shape \(40, 0, 7, 3\) .*, none of them 0"),
    "one-hot labels": ((IMAGES, np.eye(40)), r"labels of the shape \(40, 40\).* the argmax"),
    "several labels an image": ((IMAGES, [[0]] * 39 + [[0, 1]]), r"has the label \[0\]"),
    "no labels": ((IMAGES, None), r"labels of the shape \(\); expected .*, and labels \(N,\)"),
    "a number as labels": ((IMAGES, torch.tensor(3)), r"labels of the shape \(\)"),
    "a table of pixels": ((pandas.DataFrame(np.zeros((40, 64))), LABELS), "a DataFrame that"),
    "a split twice": ({"val": (IMAGES, LABELS), "valid": (IMAGES, LABELS)}, "each at most once"),
    "float labels": ((IMAGES, LABELS + 0.5), r"arrays\[0\] has the label 0.5"),
    "floats above 1": ((IMAGES * 1.0, LABELS), "arrays: float values from 0 to 255"),
    "no pair": ([("a.png", 0), ("b.png",)], r"pairs\[1\] is \('b.png',\); expected \(path, label"),
    "a stream": (Stream(), "data is a Stream; it can only be read in one order"),
    "a loader": (DataLoader(Items(None)), "data is a DataLoader; pass its dataset"),
    "a bare array": (IMAGES, r"a ndarray; it has the shape \(40, 6, 7, 3\); pass \(images"),
    "a generator": ((x for x in ()), "data is a generator; it can only be read in one order"),
    "a table": (pandas.DataFrame({"path": ["a"], "label": [0]}), r"a DataFrame; pass pairs: list"),
    "bytes": (b"photos", "data is a bytes; expected a path"),
    "an unknown split": ({"trian": (IMAGES, LABELS)}, "a dict of .'trian'. .did you mean 'train'"),
    "no splits": ({}, "expected train, val and test, each at most once"),
    "a dict in a dict": ({"train": {"a": 1}}, "data is a dict; expected a path"),
    "other classes": (
        {"train": Items(lambda i: (IMAGES[i], 0), classes=["a", "b"]),
         "test": Items(lambda i: (IMAGES[i], 0), classes=["a", "c"])},
        "expected different names, .* the same in all splits",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_named(name):
    data, words = BAD[name]
    with pytest.raises(vitkit.UserError, match=words) as error:
        vitkit.open_dataset(data)
    assert len(str(error.value)) < 330


def test_classes_are_for_objects_alone():
    for data in ("digits", vitkit.open_dataset((IMAGES, LABELS))):
        with pytest.raises(DataError, match="classes are for data passed as an object"):
            vitkit.open_dataset(data, classes=["a"])


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize("classes", ["cat", [0, 1, 2], ["a", "b", "a"]])
def test_classes_are_names(classes):
    with pytest.raises(DataError, match=r"classes = .*: expected different names, such as"):
        vitkit.open_dataset((IMAGES, LABELS), classes=classes)


@pytest.mark.usefixtures("wrong_types_come_in")
def test_a_stream_of_hugging_face_is_refused_with_what_to_pass():
    hub = pytest.importorskip("datasets")
    rows = {"image": [*map(Image.fromarray, IMAGES)], "label": LABELS.tolist()}
    features = hub.Features({"image": hub.Image(), "label": hub.Value("int64")})
    stream = hub.Dataset.from_dict(rows, features=features).to_iterable_dataset()
    with pytest.raises(DataError, match=r"IterableDataset; it .* one order; pass list\(data\)"):
        vitkit.open_dataset(stream)
    dataset = vitkit.open_dataset(list(stream))
    assert sum(map(len, dataset.splits.values())) == 40


def test_a_dataset_that_changes_its_images_is_refused():
    random = Items(lambda i: (RNG.integers(0, 256, (6, 7, 3), np.uint8), i % 2))
    dataset = vitkit.open_dataset({"train": random})
    with pytest.raises(DataError, match=r"train\[3\] is another image than when .* transform"):
        dataset.splits["train"].read(3)

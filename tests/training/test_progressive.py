"""Images that grow over the epochs, and classes that are drawn as often as each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from PIL import Image
from training.faulty import stopping_at
from training.starts import DIGITS, a_checkpoint, bits, log_of, train

import vitkit
from vitkit.data.loading.loader import balanced_order

GROWING = {"progressive": (4, 8), "epochs": 3}


class Watched(vitkit.Callback):
    """Notes the size of every batch."""

    sizes: list[tuple[int, ...]]

    def before_step(self, trainer, batch):
        type(self).sizes.append(tuple(batch.pixels.shape[1:3]))


def test_sizes_grow_over_equal_parts_of_the_epochs_to_that_of_evaluation(tmp_path):
    a_checkpoint(tmp_path / "a.safetensors", classes=DIGITS, image_size=12)
    Watched.sizes = []
    result = train(tmp_path / "run", Watched, pretrained=tmp_path / "a.safetensors", **GROWING)
    assert Watched.sizes == [(4, 4)] * 10 + [(8, 8)] * 5
    stored = vitkit.load(result.best)
    assert stored.preprocess.image_size == stored.model.spec.image_size == (8, 8)


def test_a_run_that_grows_goes_on_with_the_same_bits_with_any_number_of_workers(tmp_path):
    a_checkpoint(tmp_path / "a.safetensors", classes=DIGITS)
    asked = GROWING | {"pretrained": str(tmp_path / "a.safetensors"), "crop_scale": 0.5}
    straight = train(tmp_path / "straight", **asked)
    with pytest.raises(vitkit.Interrupted):
        train(tmp_path / "run", stopping_at(8), **asked)
    resumed = train(tmp_path / "run", resume=str(tmp_path / "run"), workers=2)
    assert bits(resumed.last) == bits(straight.last)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"progressive": (6, 8)},
         "--progressive 6: image_size 6 .* nearest sizes that are: 4 or 8"),
        ({"progressive": (4, 8), "img_size": 12}, "--progressive has 8, but --img-size is 12"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused(tmp_path, asked, words):
    a_checkpoint(tmp_path / "a.safetensors", classes=DIGITS)
    with pytest.raises(vitkit.SettingError, match=words):
        train(tmp_path / "run", pretrained=tmp_path / "a.safetensors", **asked)


@settings(max_examples=50, deadline=None)
@given(
    some.lists(some.integers(1, 40), min_size=1, max_size=5), some.integers(0, 9),
    some.integers(0, 5),
)  # fmt: skip
def test_a_balanced_order_draws_classes_and_their_images_alike(counts, seed, epoch):
    labels = np.repeat(np.arange(len(counts)) * 2, counts)  # of every second class there are none
    labels = labels[np.random.default_rng(0).permutation(len(labels))]
    order = balanced_order(seed, epoch, labels)
    assert order.shape == labels.shape
    drawn = np.bincount(labels[order], minlength=2 * len(counts))[::2]
    assert drawn.max() - drawn.min() <= 1
    times = np.bincount(order, minlength=len(labels))
    for label in np.unique(labels):
        of_class = times[labels == label]
        assert of_class.max() - of_class.min() <= 1
    assert np.array_equal(order, balanced_order(seed, epoch, labels))


def test_epochs_differ_and_the_order_has_no_runs_of_a_class():
    labels = np.repeat([0, 1], [900, 100])
    first, second = (balanced_order(0, epoch, labels) for epoch in (0, 1))
    assert len(set(first[labels[first] == 0]) ^ set(second[labels[second] == 0])) > 300
    halves = labels[first].reshape(2, -1).mean(1)
    assert np.abs(halves - 0.5).max() < 0.06


class Counted(vitkit.Callback):
    """Notes the labels of every batch, and which view of which image it has."""

    labels: list[int]
    seen: list[tuple[int, int, int]]

    def before_step(self, trainer, batch):
        type(self).labels += batch.labels.tolist()
        images = zip(batch.indices.tolist(), batch.views.tolist(), strict=True)
        type(self).seen += [(batch.epoch, index, view) for index, view in images]


def test_uneven_classes_are_balanced_and_counted_in_words(tmp_path):
    for label, count in (("dog", 27), ("cat", 5)):
        for number in range(count):
            (tmp_path / "data" / "train" / label).mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(np.full((8, 8), number * 7 + count, np.uint8))
            image.save(tmp_path / "data" / "train" / label / f"{number}.png")
    a_checkpoint(tmp_path / "a.safetensors", classes=("cat", "dog"), num_classes=2)
    asked = {"data": str(tmp_path / "data"), "pretrained": str(tmp_path / "a.safetensors"),
             "val_fraction": 0.0, "batch_size": 16, "balance": True}  # fmt: skip
    Counted.labels, Counted.seen = [], []
    straight = train(tmp_path / "run", Counted, **asked)
    assert np.bincount(Counted.labels).tolist() == [32, 32]
    assert len({*Counted.seen}) == 64  # an image that comes again is changed in another way
    assert (
        "balance: 5 (cat) to 27 (dog) images per class; each class is drawn 16 times per epoch"
        in log_of(straight.run)
    )
    with pytest.raises(vitkit.Interrupted):
        train(tmp_path / "stopped", stopping_at(3), **asked)
    resumed = train(tmp_path / "stopped", resume=str(tmp_path / "stopped"))
    assert bits(resumed.last) == bits(straight.last)

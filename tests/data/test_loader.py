"""Order and augmentation are functions of (seed, epoch, index), whoever makes the batch."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vitkit import DataError, ImageError, LoaderError, Preprocess, open_dataset
from vitkit.data.datasets.dataset import ArraySplit
from vitkit.data.images.preprocess import fit
from vitkit.data.loading.crop_flip import Augmentation
from vitkit.data.loading.loader import EvaluationBatches, TrainingSteps, batches

SMALL = Preprocess(image_size=16, fit="squash")
EVERYTHING = Augmentation(flip=0.5, shift=2, crop_scale=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of photographs of many sizes, as JPEG and PNG."""
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number in range(40):
        parent = root / "train" / ("cat", "dog")[number % 2]
        parent.mkdir(parents=True, exist_ok=True)
        height, width = generator.integers(20, 60, 2)
        noise = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(parent / f"{number}.{('jpg', 'png')[number % 3 == 0]}")
    return open_dataset(root)


def steps(split, seed=0, batch_size=8):
    return TrainingSteps(split, SMALL, EVERYTHING, batch_size=batch_size, seed=seed)


def digests(source, numbers, workers):
    """Return (epoch, index) -> hash of its pixels for every image of some steps."""
    seen = {}
    for batch in batches(source, numbers, workers=workers):
        for index, pixels in zip(batch.indices.tolist(), batch.pixels.numpy(), strict=True):
            seen[(batch.epoch, index)] = hashlib.sha256(pixels.tobytes()).hexdigest()
    return seen


def test_the_same_images_with_any_number_of_workers(folder):
    source = steps(folder.splits["train"])
    here = digests(source, range(10), workers=0)
    assert len(here) == 2 * 40
    assert digests(source, range(10), workers=1) == here
    assert digests(source, range(10), workers=4) == here


def test_a_run_that_goes_on_sees_what_it_would_have_seen(folder):
    source = steps(folder.splits["train"])
    whole = digests(source, range(10), workers=0)
    later = digests(source, range(7, 10), workers=2)
    assert later.items() <= whole.items()
    assert len(later) == 3 * 8


def test_every_epoch_has_every_image_once_in_another_order_and_shape(folder):
    source = steps(folder.splits["train"])
    orders = [np.concatenate([source.indices(e * 5 + s) for s in range(5)]) for e in range(3)]
    for order in orders:
        assert sorted(order) == list(range(40))
    assert not np.array_equal(orders[0], orders[1])
    seen = digests(source, range(10), workers=0)
    changed = sum(seen[(0, i)] != seen[(1, i)] for i in range(40))
    assert changed == 40
    other_seed = digests(steps(folder.splits["train"], seed=1), range(5), workers=0)
    assert sum(seen[(0, i)] != other_seed[(0, i)] for i in range(40)) == 40


def test_evaluation_has_every_image_once_in_its_own_order(folder):
    source = EvaluationBatches(folder.splits["train"], SMALL, batch_size=16)
    loaded = list(batches(source, range(len(source)), workers=2))
    assert [len(batch.labels) for batch in loaded] == [16, 16, 8]
    split = folder.splits["train"]
    for number, pixels in enumerate(np.concatenate([b.pixels.numpy() for b in loaded])):
        np.testing.assert_array_equal(pixels, fit(split.read(number), SMALL))
    assert np.concatenate([b.labels.numpy() for b in loaded]).tolist() == split.labels.tolist()


def test_too_few_images_for_one_batch_say_so(folder):
    with pytest.raises(
        DataError, match=r"40 training images do not fill .* of 41; pass --batch-size 40"
    ):
        steps(folder.splits["train"], batch_size=41)


def test_a_loader_does_not_touch_the_global_generator(folder):
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    next(batches(steps(folder.splits["train"]), range(3), workers=1))
    assert torch.equal(torch.rand(3), expected)


def test_images_in_memory_and_in_files_are_treated_alike(folder):
    files = folder.splits["train"].subset(np.arange(8))
    images = np.stack([fit(files.read(i), SMALL) for i in range(8)])
    memory = ArraySplit(images, files.labels, "memory")
    plain = Augmentation(flip=0.5, shift=1)
    a = TrainingSteps(files, SMALL, plain, batch_size=8, seed=0)[3]
    b = TrainingSteps(memory, SMALL, plain, batch_size=8, seed=0)[3]
    assert (a.pixels == b.pixels).all()
    assert (a.labels == b.labels).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_vanishes_during_a_run_is_named(folder, tmp_path, workers):
    files = folder.splits["train"].subset(np.arange(8))
    paths = [*files.paths[:-1], str(tmp_path / "gone.png")]
    lost = type(files)(paths, files.labels, tmp_path.parent)
    source = TrainingSteps(lost, SMALL, Augmentation(), batch_size=8, seed=0)
    with pytest.raises(ImageError, match=r"gone\.png: missing"):
        list(batches(source, range(1), workers=workers))


ABANDONED = """
from vitkit import open_dataset
from vitkit.data.loading.crop_flip import Augmentation
from vitkit.data.loading.loader import TrainingSteps, batches
from vitkit.spec import Preprocess
train = open_dataset("digits").splits["train"]
small = Preprocess(image_size=8, fit="squash")
source = TrainingSteps(train, small, Augmentation(), batch_size=8, seed=0)
kept = batches(source, range(100), workers=2)
if {started}:
    next(kept)
raise ValueError("the consumer fails")
"""


@pytest.mark.parametrize("started", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_process_that_fails_does_not_wait_for_its_workers(started):
    done = subprocess.run(
        [sys.executable, "-c", ABANDONED.format(started=started)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "JAXTYPING_DISABLE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: the consumer fails")


def test_the_workers_end_when_an_image_is_lost_though_the_error_is_kept(folder, tmp_path):
    files = folder.splits["train"].subset(np.arange(8))
    paths = [*files.paths[:-1], str(tmp_path / "gone.png")]
    lost = type(files)(paths, files.labels, tmp_path.parent)
    source = TrainingSteps(lost, SMALL, Augmentation(), batch_size=8, seed=0)
    with pytest.raises(ImageError) as caught:
        list(batches(source, range(1), workers=1))
    assert caught.value.__traceback__ is not None
    assert multiprocessing.active_children() == []


def test_other_labels_leave_the_images_alone(folder):
    for split in (folder.splits["train"], open_dataset("digits").splits["test"]):
        turned = split.relabelled(1 - split.labels)
        assert (turned.labels == 1 - split.labels).all()
        assert (turned.read(3) == split.read(3)).all()
        assert turned.name(3) == split.name(3)


def test_a_loader_process_that_is_gone_is_named_and_all_are_ended(folder):
    arriving = batches(steps(folder.splits["train"]), range(100), workers=2)
    next(arriving)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    problem = r"ended with exit code -9; if memory ran out, pass fewer --workers; the run waited"
    with pytest.raises(LoaderError, match=rf"^loader process \d+ {problem} for batch \d+$"):
        list(arriving)
    assert multiprocessing.active_children() == []

"""Order and augmentation are functions of (seed, epoch, index), whoever makes the batch."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from vitkit.data.augmentation.pipeline import Augmentation
from vitkit.data.datasets.dataset import ArraySplit
from vitkit.data.datasets.path_list import Paths
from vitkit.data.datasets.split import LONGEST_PAUSE
from vitkit.data.images.preprocess import fit
from vitkit.data.loading import worker_watch
from vitkit.data.loading.loader import EvaluationBatches, TrainingSteps, batches
from vitkit.data.sources.open import open_dataset
from vitkit.errors import DataError, ImageError, LoaderError
from vitkit.spec import Preprocess

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
    lost = type(files)(
        Paths([*[*files.paths][:-1], tmp_path / "gone.png"]), files.labels, tmp_path.parent
    )
    source = TrainingSteps(lost, SMALL, Augmentation(), batch_size=8, seed=0)
    with pytest.raises(ImageError, match=r"gone\.png: missing"):
        list(batches(source, range(1), workers=workers))


ABANDONED = """
from vitkit.data.augmentation.pipeline import Augmentation
from vitkit.data.loading.loader import TrainingSteps, batches
from vitkit.data.sources.open import open_dataset
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
    lost = type(files)(
        Paths([*[*files.paths][:-1], tmp_path / "gone.png"]), files.labels, tmp_path.parent
    )
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


@pytest.fixture
def impatient(monkeypatch):
    """Half a second without a sign of life is too long."""
    monkeypatch.setattr(worker_watch, "LOOK_EVERY", 0.1)
    monkeypatch.setattr(worker_watch, "LOOKS", 5)


@pytest.mark.parametrize(
    ("happens", "problem"),
    [
        (lambda pid: os.kill(pid, signal.SIGKILL), r"was killed by signal 9; .* fewer --workers"),
        (lambda pid: os.kill(pid, signal.SIGSTOP), r"has not run for 0.5 s; check that the disk"),
    ],
    ids=["killed", "stopped"],
)
def test_a_loader_process_that_is_gone_or_hangs_is_named_and_all_are_ended(
    folder, impatient, happens, problem
):
    arriving = batches(steps(folder.splits["train"]), range(100), workers=2)
    next(arriving)
    happens(multiprocessing.active_children()[0].pid)
    with pytest.raises(
        LoaderError, match=rf"^loader process \d+ {problem}.* the batch of step \d+ \("
    ):
        list(arriving)
    assert multiprocessing.active_children() == []


class Slow(ArraySplit):
    """Reads an image for longer than a process may be silent, a piece at a time; or hangs."""

    pieces = 20

    def read(self, index):
        for _ in range(self.pieces):
            time.sleep(0.05)
        time.sleep(0 if self.pieces else 1000)
        return super().read(index)


def test_slow_data_that_live_are_waited_for_and_those_that_hang_are_not(impatient, monkeypatch):
    images = np.zeros((8, 16, 16, 3), np.uint8)
    living = TrainingSteps(Slow(images, np.zeros(8, int), "slow"), SMALL, Augmentation(),
                           batch_size=1, seed=0)  # fmt: skip
    assert len(list(batches(living, range(1), workers=1))) == 1
    monkeypatch.setattr(Slow, "pieces", 0)
    with pytest.raises(LoaderError, match=r"not run for 0.5 s.* the batch of step 0 \(slow\[\d\]"):
        list(batches(living, range(1), workers=1))


class Blocked(ArraySplit):
    """Reads an image once a FIFO is opened, and waits for that as for a slow disk (state D)."""

    def read(self, index):
        self.fifo.with_name("waits").touch()
        opens = [(os.POSIX_SPAWN_OPEN, 9, str(self.fifo), os.O_RDONLY, 0)]
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=opens), 0)
        return super().read(index)


@pytest.fixture
def busy(monkeypatch, tmp_path):
    """One batch of a disk that answers when its FIFO is opened for writing."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setattr(Blocked, "fifo", fifo, raising=False)
    images = np.zeros((8, 16, 16, 3), np.uint8)
    split = Blocked(images, np.zeros(8, int), "busy")
    yield TrainingSteps(split, SMALL, Augmentation(), batch_size=1, seed=0)
    os.close(os.open(fifo, os.O_RDWR))  # lets go whoever still waits


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process waits for")
def test_one_read_of_a_busy_disk_may_take_longer(impatient, busy, monkeypatch):
    def answer_late():
        while not Blocked.fifo.with_name("waits").exists():
            time.sleep(0.05)
        time.sleep(1.5)  # three times what a process may be silent
        os.close(os.open(Blocked.fifo, os.O_RDWR))

    threading.Thread(target=answer_late, daemon=True).start()
    assert len(list(batches(busy, range(1), workers=1))) == 1
    monkeypatch.setattr(worker_watch, "LOOKS_LONG", 10)
    with pytest.raises(LoaderError, match="has not run for 1 s"):
        list(batches(busy, range(1), workers=1))


def test_a_process_that_waits_as_long_as_a_server_asks_it_to_does_not_hang():
    assert worker_watch.LOOKS_LONG * worker_watch.LOOK_EVERY > LONGEST_PAUSE


def test_a_batch_that_is_not_wanted_any_more_is_not_waited_for(impatient, monkeypatch):
    monkeypatch.setattr(Slow, "pieces", 0)
    hanging = TrainingSteps(Slow(np.zeros((8, 16, 16, 3), np.uint8), np.zeros(8, int), "slow"),
                            SMALL, Augmentation(), batch_size=1, seed=0)  # fmt: skip
    with pytest.raises(LoaderError, match="stopped"):
        list(batches(hanging, range(1), workers=1, stopped=lambda: True))

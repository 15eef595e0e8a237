"""Order and augmentation of batches are functions of (seed, epoch, index), whoever makes them."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit import ImageError, LoaderError, Preprocess, open_dataset
from vitkit.data.augmentation.pipeline import BatchTransform
from vitkit.data.datasets.dataset import ArraySplit
from vitkit.data.images.preprocess import fit
from vitkit.data.loading.crop_flip import Augmentation, crop_box
from vitkit.data.loading.loader import EvaluationBatches, TrainingSteps, batches
from vitkit.randomness import Draw, uniform

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


def test_images_in_memory_and_in_files_are_treated_alike(folder):
    files = folder.splits["train"].subset(np.arange(8))
    images = np.stack([fit(files.read(i), SMALL) for i in range(8)])
    memory = ArraySplit(images, files.labels, "memory")
    plain = Augmentation(flip=0.5, shift=1)
    a = TrainingSteps(files, SMALL, plain, batch_size=8, seed=0)[3]
    b = TrainingSteps(memory, SMALL, plain, batch_size=8, seed=0)[3]
    assert (a.pixels == b.pixels).all()
    assert (a.labels == b.labels).all()


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
    assert "gone.png: missing" in str(caught.value)
    assert caught.value.__traceback__ is not None
    assert multiprocessing.active_children() == []


def test_a_loader_process_that_is_gone_is_named_and_all_are_ended(folder):
    arriving = batches(steps(folder.splits["train"]), range(100), workers=2)
    next(arriving)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    problem = r"ended with exit code -9; if memory ran out, pass fewer --workers; the run waited"
    with pytest.raises(LoaderError, match=rf"^loader process \d+ {problem} for batch \d+$"):
        list(arriving)
    assert multiprocessing.active_children() == []


SQUARE = Preprocess(image_size=12, fit="squash")
CHANGED = Augmentation(flip=0.5, shift=1, crop_scale=0.5, aa="trivial", reprob=0.3)


def repeated_steps(repeats: int, **settings: int) -> TrainingSteps:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    split = ArraySplit(pixels, np.arange(40) % 4, "noise")
    return TrainingSteps(split, SQUARE, CHANGED, batch_size=8, seed=0, repeats=repeats, **settings)


def epoch_of(source: TrainingSteps, epoch: int = 0) -> list[tuple[int, int]]:
    """(index, view) of every place of an epoch."""
    each = source.steps_per_epoch
    shown = [source[step] for step in range(epoch * each, (epoch + 1) * each)]
    assert {batch.epoch for batch in shown} == {epoch}
    return [(int(i), int(v)) for b in shown for i, v in zip(b.indices, b.views, strict=True)]


def test_every_image_comes_so_many_times_in_an_epoch_of_the_same_length():
    once, thrice = repeated_steps(1), repeated_steps(3)
    assert thrice.steps_per_epoch == once.steps_per_epoch == 5
    order = [index for index, _ in epoch_of(once)]
    assert epoch_of(once) == [(index, 0) for index in order]
    assert epoch_of(thrice) == [(order[position // 3], position % 3) for position in range(40)]
    others = {index for index, _ in epoch_of(thrice, 1)}
    assert others != {index for index, _ in epoch_of(thrice)}


def test_views_differ_and_the_first_is_the_one_of_old():
    once, thrice = repeated_steps(1), repeated_steps(3)
    feed = BatchTransform(SQUARE, torch.device("cpu"), CHANGED, seed=0)
    seen = {}
    for source in (once, thrice):
        for step in range(5):
            batch = source[step]
            images = feed(batch, step).images
            keys = zip(batch.indices.tolist(), batch.views.tolist(), strict=True)
            for position, key in enumerate(keys):
                known = seen.setdefault(key, (batch.pixels[position], images[position]))
                assert torch.equal(known[0], batch.pixels[position])
                torch.testing.assert_close(known[1], images[position], rtol=0, atol=1e-6)
    differ = [
        not torch.equal(seen[index, 0][0], seen[index, view][0]) for index, view in seen if view > 0
    ]
    assert np.mean(differ) > 0.95


def test_workers_processes_and_parts_see_the_same_images():
    source = repeated_steps(3)
    here = [source[step] for step in range(4)]
    for batch, same in zip(here, batches(source, range(4), workers=2), strict=True):
        for name in ("pixels", "indices", "views"):
            assert torch.equal(getattr(batch, name), getattr(same, name))
    shares = [repeated_steps(3, rank=rank, world_size=2)[1] for rank in range(2)]
    for rank, share in enumerate(shares):
        assert torch.equal(share.views, here[1].views[rank::2])
        assert torch.equal(share.pixels, here[1].pixels[rank::2])
    parts = list(here[0].parts(2))
    assert torch.equal(torch.stack([part.views for part in parts], 1).flatten(), here[0].views)
    assert torch.equal(here[0].first(3).views, here[0].views[:3])


@pytest.mark.parametrize("shape", [(40, 7, 9, 3), (40, 9, 7, 1), (40, 1, 2, 3)])
@pytest.mark.parametrize("most", [0, 1, 4, 12])
def test_flips_and_shifts_are_what_indexing_gives(shape: tuple[int, ...], most: int):
    """Pixel by pixel, written the slow way; shifts of more than the size, too."""
    batch, height, width, _ = shape
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    indices, given = np.arange(batch) * 7, pixels.copy()
    out = Augmentation(flip=0.5, shift=most).flip_and_shift(pixels.copy(), 3, 2, indices)
    flipped = uniform(3, 2, indices, Draw.FLIP) < 0.5
    draws = uniform(3, 2, indices[None, :], Draw.SHIFT, np.arange(2)[:, None])
    down, across = (draws * (2 * most + 1)).astype(int) - most
    for n in range(batch):
        rows = np.clip(np.arange(height) + down[n], 0, height - 1)
        columns = np.clip(np.arange(width) + across[n], 0, width - 1)
        image = given[n, :, ::-1] if flipped[n] else given[n]
        np.testing.assert_array_equal(out[n], image[rows][:, columns])


def test_crops_keep_the_asked_area_and_shape_and_lie_inside():
    for index in range(500):
        left, top, right, bottom = crop_box((50, 80), 0.35, 0, 0, index)
        assert 0 <= left < right <= 80
        assert 0 <= top < bottom <= 50
        width, height = right - left, bottom - top
        assert 0.34 <= width * height / (50 * 80) <= 1.0 or (width, height) == (67, 50)
        assert 0.72 <= width / height <= 1.38
    boxes = {crop_box((50, 80), 0.35, 0, 0, index) for index in range(500)}
    assert len(boxes) > 480


def test_a_crop_that_fits_nowhere_is_the_middle_at_the_nearest_ratio():
    assert crop_box((2, 1000), 0.9, 0, 0, 0) == (498, 0, 501, 2)  # 3 x 2, the nearest to 4:3
    assert crop_box((1000, 300), 0.9, 0, 0, 0) == (0, 300, 300, 700)
    assert crop_box((1, 1), 0.9, 0, 0, 0) == (0, 0, 1, 1)
    for index in range(50):
        left, top, right, bottom = crop_box((90, 900), 0.3, 0, 0, index)
        assert (right - left) / (bottom - top) <= 1.38

"""Repeated augmentation: an epoch of the usual length has some images several times."""

from __future__ import annotations

import numpy as np
import torch

from vitkit import Preprocess
from vitkit.data.augmentation.pipeline import BatchTransform
from vitkit.data.datasets.dataset import ArraySplit
from vitkit.data.loading.crop_flip import Augmentation
from vitkit.data.loading.loader import TrainingSteps, batches

SMALL = Preprocess(image_size=12, fit="squash")
CHANGED = Augmentation(flip=0.5, shift=1, crop_scale=0.5, aa="trivial", reprob=0.3)


def steps(repeats: int, **settings: int) -> TrainingSteps:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    split = ArraySplit(pixels, np.arange(40) % 4, "noise")
    return TrainingSteps(split, SMALL, CHANGED, batch_size=8, seed=0, repeats=repeats, **settings)


def epoch_of(source: TrainingSteps, epoch: int = 0) -> list[tuple[int, int]]:
    """(index, view) of every place of an epoch."""
    each = source.steps_per_epoch
    shown = [source[step] for step in range(epoch * each, (epoch + 1) * each)]
    assert {batch.epoch for batch in shown} == {epoch}
    return [(int(i), int(v)) for b in shown for i, v in zip(b.indices, b.views, strict=True)]


def test_every_image_comes_so_many_times_in_an_epoch_of_the_same_length():
    once, thrice = steps(1), steps(3)
    assert thrice.steps_per_epoch == once.steps_per_epoch == 5
    order = [index for index, _ in epoch_of(once)]
    assert epoch_of(once) == [(index, 0) for index in order]
    assert epoch_of(thrice) == [(order[position // 3], position % 3) for position in range(40)]
    others = {index for index, _ in epoch_of(thrice, 1)}
    assert others != {index for index, _ in epoch_of(thrice)}


def test_views_differ_and_the_first_is_the_one_of_old():
    once, thrice = steps(1), steps(3)
    feed = BatchTransform(SMALL, torch.device("cpu"), CHANGED, seed=0)
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
    source = steps(3)
    here = [source[step] for step in range(4)]
    for batch, same in zip(here, batches(source, range(4), workers=2), strict=True):
        for name in ("pixels", "indices", "views"):
            assert torch.equal(getattr(batch, name), getattr(same, name))
    shares = [steps(3, rank=rank, world_size=2)[1] for rank in range(2)]
    for rank, share in enumerate(shares):
        assert torch.equal(share.views, here[1].views[rank::2])
        assert torch.equal(share.pixels, here[1].pixels[rank::2])
    parts = list(here[0].parts(2))
    assert torch.equal(torch.stack([part.views for part in parts], 1).flatten(), here[0].views)
    assert torch.equal(here[0].first(3).views, here[0].views[:3])


def test_the_views_of_an_image_go_to_different_parts():
    """So that mixing with another of the part is mixing with another image."""
    for part in steps(2)[0].parts(4):
        assert len(set(part.indices.tolist())) == len(part.indices) == 2

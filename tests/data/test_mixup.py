"""Mixup and CutMix: partners, proportions, and the labels that follow from them."""

import numpy as np
import pytest
import torch
from data.synthetic_batches import CPU, batch, images, preprocess
from scipy import stats

from vitkit.data.augmentation.mixing import Mixing, Mixture
from vitkit.data.augmentation.pipeline import BatchTransform

SIZE = (20, 28)
STEPS = range(700)


def mixtures(part: int = 0, **settings: float) -> list[Mixture | None]:
    mixing = Mixing(num_classes=10, **settings)
    return [mixing.draw(step, part, SIZE) for step in STEPS]


@pytest.mark.parametrize("alpha", [0.2, 0.8, 3.0])
def test_the_weight_of_mixup_is_from_beta(alpha):
    drawn = mixtures(mixup=alpha)
    assert all(mixture.box is None for mixture in drawn)
    drawn = [mixture.weight for mixture in drawn]
    assert stats.kstest(drawn, stats.beta(alpha, alpha).cdf).pvalue > 0.01


def test_the_weight_of_cutmix_is_the_area_that_is_left():
    drawn = mixtures(cutmix=1.0)
    for mixture in drawn:
        top, bottom, left, right = mixture.box
        assert 0 <= top <= bottom <= 20
        assert 0 <= left <= right <= 28
        mask = np.zeros(SIZE)
        mask[top:bottom, left:right] = 1
        assert mixture.weight == pytest.approx(1 - mask.mean(), abs=1e-12)
    tops, bottoms, lefts, rights = np.array([m.box for m in drawn]).T
    inner = (tops > 0) & (bottoms < 20) & (lefts > 0) & (rights < 28) & (rights > lefts + 5)
    shapes = (bottoms - tops)[inner] / (rights - lefts)[inner]
    assert np.median(shapes) == pytest.approx(20 / 28, abs=0.05)  # a box of the image's shape
    small = rights - lefts < 6
    places = np.histogram2d(tops[small], lefts[small], bins=2, range=((0, 20), (0, 28)))[0]
    assert places.min() > 0.12 * small.sum()  # anywhere


def test_chances_are_those_asked_for():
    both = mixtures(mixup=0.8, cutmix=1.0, prob=0.6, switch_prob=0.25)
    mixed = [mixture for mixture in both if mixture is not None]
    assert len(mixed) / len(both) == pytest.approx(0.6, abs=0.06)
    assert np.mean([m.box is not None for m in mixed]) == pytest.approx(0.25, abs=0.07)
    late = mixtures(mixup=0.8, until=100)
    assert all(mixture is not None for mixture in late[:100])
    assert not any(late[100:])


def test_a_draw_is_a_function_of_seed_step_and_part():
    base = mixtures(mixup=0.8)
    assert base == mixtures(mixup=0.8)
    for other in (mixtures(mixup=0.8, seed=1), mixtures(part=1, mixup=0.8)):
        same = np.corrcoef([m.weight for m in base], [m.weight for m in other])[0, 1]
        assert abs(same) < 0.12
    np.random.seed(0)
    expected = np.random.random_sample()
    np.random.seed(0)
    Mixing(num_classes=10, mixup=0.8).draw(0, 0, SIZE)
    assert np.random.random_sample() == expected  # the global generator is left alone


@pytest.mark.parametrize("settings", [{"mixup": 0.8}, {"cutmix": 1.0}], ids=str)
def test_images_and_labels_are_mixed_with_the_reversed_batch(settings):
    pixels = images(7, size=SIZE)
    plain = BatchTransform(preprocess(3, SIZE), CPU)(batch(pixels), step=3)
    mixing = Mixing(num_classes=10, **settings)
    fed = BatchTransform(preprocess(3, SIZE), CPU, None, mixing)(batch(pixels), step=3)
    own, partner = plain.images, plain.images.flip(0)
    if fed.mixture.box is None:
        expected = fed.mixture.weight * own + (1 - fed.mixture.weight) * partner
    else:
        top, bottom, left, right = fed.mixture.box
        inside = torch.zeros(SIZE, dtype=torch.bool)
        inside[top:bottom, left:right] = True
        assert 0 < int(inside.sum()) < 20 * 28
        expected = torch.where(inside, partner, own)
    torch.testing.assert_close(fed.images, expected)
    assert fed.targets.shape == (7, 10)
    torch.testing.assert_close(fed.targets.sum(1), torch.ones(7))
    for row, label in enumerate(plain.targets.tolist()):
        expected = fed.mixture.weight if label != 6 - label else 1.0
        assert float(fed.targets[row, label]) == pytest.approx(expected, abs=1e-6)


def test_targets_are_probabilities_whether_or_not_a_batch_is_mixed():
    feed = BatchTransform(
        preprocess(3, SIZE), CPU, None, Mixing(num_classes=10, mixup=0.8, prob=0.0)
    )
    fed = feed(batch(images(4, size=SIZE)), step=0)
    assert fed.mixture is None
    assert torch.equal(fed.targets, torch.eye(10)[:4])
    assert feed(batch(images(4, size=SIZE)), 0).targets.dtype == torch.float32

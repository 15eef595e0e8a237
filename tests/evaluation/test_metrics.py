"""Every score restated: against scikit-learn, published numbers and plain algebra."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import (
    balanced_accuracy_score,
    confusion_matrix,
    log_loss,
    top_k_accuracy_score,
)
from torch.nn import functional as F
from training.worlds import in_world, together

from vitkit.evaluation.intervals import (
    balanced_interval,
    bootstrap_balanced,
    mcnemar,
    wilson_interval,
)
from vitkit.evaluation.metrics import PredictionCounts

K, N = 7, 203
LABELS = np.random.default_rng(0).choice(K - 1, N, p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.05])
"""Uneven, and of the last class there is no image."""
LOGITS = torch.randn(N, K, generator=torch.Generator().manual_seed(1)) * 2
LOGITS[torch.arange(N), torch.from_numpy(LABELS)] += 1.5
LOGITS[::2] *= 0.1
"""Half of them are too sure, and half not sure enough."""
PROBABILITIES = LOGITS.double().softmax(1).numpy()


def count_predictions(places: range = range(N), batch: int = 16) -> PredictionCounts:
    """The images at `places`, in batches."""
    tally = PredictionCounts(K)
    for part in torch.tensor(list(places)).split(batch) if places else ():
        tally.add(LOGITS[part], torch.from_numpy(LABELS)[part])
    return tally


@pytest.mark.filterwarnings("ignore:y_pred contains classes")  # scikit-learn's; it is meant
def test_scores_are_those_of_scikit_learn():
    found, predicted = count_predictions().counts().scores(), PROBABILITIES.argmax(1)
    everything = {"labels": range(K)}
    assert found["images"] == N
    assert found["top1"] == (predicted == LABELS).mean()
    assert found["top5"] == top_k_accuracy_score(LABELS, PROBABILITIES, k=5, **everything)
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(LABELS, predicted))
    assert found["loss"] == pytest.approx(log_loss(LABELS, PROBABILITIES, **everything), rel=1e-6)
    truth = np.eye(K)[LABELS]
    brier = ((PROBABILITIES - truth) ** 2).sum(1).mean()
    assert found["brier"] == pytest.approx(brier, rel=1e-6)
    assert (
        count_predictions().confusion() == confusion_matrix(LABELS, predicted, labels=range(K))
    ).all()
    assert abs(found["balanced_accuracy"] - found["top1"]) > 0.01  # the classes are uneven enough


@pytest.mark.parametrize("label", [0, 4, 5, 9])
def test_equal_logits_are_in_the_order_of_the_classes_in_top1_and_in_top5(label):
    tally = PredictionCounts(10)
    tally.add(torch.zeros(6, 10), torch.full((6,), label))
    found = tally.counts().scores()
    assert (found["top1"], found["top5"]) == (float(label == 0), float(label < 5))


def test_a_tie_behind_the_first_classes_counts_as_argmax_would():
    logits = torch.tensor([[3.0, 2, 2, 2, 2, 2, 2, 1], [0, 0, 0, 0, 0, 0, 0, float("nan")]])
    tally = PredictionCounts(8)
    tally.add(logits.repeat(8, 1), torch.arange(8).repeat_interleave(2))
    found = tally.counts().scores()
    assert found["top1"] <= found["top5"] == 5 / 16  # NaN is never right


def test_logits_that_are_all_nan_are_right_for_no_class():
    tally = PredictionCounts(10)
    tally.add(torch.full((10, 10), torch.nan), torch.arange(10))
    counts = tally.counts()
    found = counts.scores()
    assert (found["top1"], found["top5"], counts.not_finite) == (0.0, 0.0, 10)


def test_the_calibration_error_is_the_mean_over_fifteen_bins():
    """Guo et al., Eq. 3, by a loop over bins that are open below and closed above."""
    confidence, right = PROBABILITIES.max(1), PROBABILITIES.argmax(1) == LABELS
    error = 0.0
    for m in range(1, 16):
        inside = (confidence > (m - 1) / 15) & (confidence <= m / 15)
        if inside.any():
            gap = abs(right[inside].mean() - confidence[inside].mean())
            error += inside.sum() / N * gap
    found = count_predictions().counts().scores()["ece"]
    assert found == pytest.approx(error, rel=1e-5)
    assert abs(found - abs(right.mean() - confidence.mean())) > 0.01  # one bin would be too few


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_a_model_that_is_as_sure_as_it_is_right_is_calibrated(share):
    """40 images, each given probability 0.8; so many of them right."""
    tally, right = PredictionCounts(2), int(40 * share)
    logits = torch.tensor([[0.0, np.log(4)]]).repeat(40, 1)
    tally.add(logits, torch.tensor([1] * right + [0] * (40 - right)))
    assert tally.counts().scores()["ece"] == pytest.approx(abs(share - 0.8), abs=1e-6)


@pytest.mark.parametrize("images", [N, 3, 1])
def test_two_processes_count_as_one_does(images):
    alone = count_predictions(range(images))

    def measured(world):
        tally = count_predictions(range(world.rank, images, world.size), batch=5)
        counts = tally.counts(world)
        return [counts.scores() | counts.intervals(), tally.confusion(world).tolist()]

    first, second = together(2, in_world(measured))
    assert first == second
    expected = alone.counts().scores() | alone.counts().intervals()
    assert first[0] == pytest.approx(expected, abs=1e-6)
    for name in ("top1", "top5", "balanced_accuracy", "top1_low", "images"):
        assert first[0][name] == expected[name]
    assert first[1] == alone.confusion().tolist()


@pytest.mark.parametrize("images", [N, 1])
def test_predictions_of_several_processes_are_in_the_order_of_the_split(images):
    alone = count_predictions(range(images))
    labels = torch.from_numpy(LABELS)[:images]
    expected = F.cross_entropy(LOGITS[:images], labels, reduction="none")
    assert alone.losses == pytest.approx(expected.numpy())

    def gathered(world):
        own = range(world.rank, images, world.size)
        whole = count_predictions(own, batch=5).gathered(world)
        columns = (whole.labels, whole.predicted, whole.confidence, whole.losses)
        return [column.tolist() for column in columns]

    wanted = [alone.labels, alone.predicted, alone.confidence, alone.losses]
    for found in together(2, in_world(gathered)):
        for column, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(column, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("hits", "images", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
     (1, 29, 0.0061, 0.1718)],
)  # fmt: skip
def test_wilson_intervals_are_the_published_ones(hits, images, low, high):
    """Newcombe, Statistics in Medicine 17 (1998), Table I, method 3; and scipy's."""
    found = wilson_interval(hits, images)
    assert found == pytest.approx((low, high), abs=5e-5)
    theirs = binomtest(hits, images).proportion_ci(method="wilson")
    assert found == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_a_share_of_zero_or_one_is_in_its_interval():
    for images in range(1, 200):
        assert wilson_interval(0, images)[0] == 0
        assert wilson_interval(images, images)[1] == 1


def test_the_bootstrap_is_a_function_of_its_seed_and_as_wide_as_it_should_be():
    right, images = np.array([80.0, 9.0, 0.0]), np.array([100.0, 10.0, 0.0])
    found = bootstrap_balanced(right, images)
    assert found == bootstrap_balanced(right, images) != bootstrap_balanced(right, images, 1)
    deviation = np.sqrt(0.8 * 0.2 / 100 + 0.9 * 0.1 / 10) / 2
    assert (found[1] - found[0]) / 2 == pytest.approx(1.96 * deviation, rel=0.15)
    assert found[0] < 0.85 < found[1]


def test_the_interval_of_the_balanced_accuracy_is_not_empty_where_all_is_right():
    n = np.array([20.0, 20.0])
    assert bootstrap_balanced(n, n) == (1.0, 1.0)
    assert balanced_interval(n, n) == pytest.approx(wilson_interval(40, 40))
    uneven = np.array([100.0, 4.0])
    theirs = binomtest(15, 15).proportion_ci(method="wilson")  # 4 / (1/100 + 1/4) is 15.4
    assert balanced_interval(uneven, uneven)[0] == pytest.approx(theirs.low, abs=0.01)
    right = uneven - 1
    wide, narrow = balanced_interval(right, uneven), bootstrap_balanced(right, uneven)
    assert wide[0] <= narrow[0] < narrow[1] <= wide[1]


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (8, 5), (3, 20), (15, 0), (300, 220)])
def test_mcnemar_is_the_exact_binomial_test(counts):
    n = sum(counts)
    expected = binomtest(counts[0], n).pvalue if n else 1.0
    assert mcnemar(*counts) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(*counts) == mcnemar(*counts[::-1])

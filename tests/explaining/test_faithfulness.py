"""Faithfulness: equal to a plain loop; 1 for occlusion itself, 0 for chance; intervals and p."""

import numpy as np
import pytest
import torch
from noise import fill_with_noise

import vitkit
from vitkit import Features
from vitkit.explaining import faithfulness

measure = faithfulness.measure_faithfulness
VARIANTS = {
    "class token": {},
    "registers": {"num_registers": 3},
    "mean": {"class_token": False, "pooling": "mean"},
    "map": {"class_token": False, "pooling": "map"},
    "rope": {"positions": "rope"},
    "distilled": {"distillation_token": True},
}


def model(**fields) -> vitkit.ViT:
    fields = {"image_size": (16, 24), "patch_size": 4, "num_classes": 3} | fields
    vit = vitkit.ViT(vitkit.ViTSpec(width=16, depth=2, num_heads=2, mlp_width=16, **fields))
    fill_with_noise(vit, std=0.4)
    return vit.double().eval()


def some_images(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 16, 24, generator=generator, dtype=torch.float64)


def probability(vit: vitkit.ViT, image: torch.Tensor, kept: list[int], number: int) -> float:
    """One image's probability of a class by some of its patches, block by block."""
    prefix = vit.spec.num_prefix_tokens
    rows = [*range(prefix), *(prefix + patch for patch in sorted(kept))]
    with torch.no_grad():
        tokens, context, _ = vit.embed(image[None])
        if context.rotation is not None:
            sin, cos = context.rotation
            context = context._replace(rotation=(sin[rows], cos[rows]))
        tokens = tokens[:, rows]
        for block in vit.blocks:
            tokens = block(tokens, context)
        features = Features.split(vit.norm(tokens), (1, len(kept)), vit.spec)
        return float(vit.forward_head(features).softmax(1)[0, number])


def plain_area(vit, image, order: list[int], number: int) -> float:
    """The area under the insertion curve of one order, in a loop of plain code."""
    patches = len(order)
    sizes = sorted({max(1, round(patches * step / 10)) for step in range(11)})
    heights = [probability(vit, image, order[:size], number) for size in sizes]
    area = 0.0
    for i in range(len(sizes) - 1):
        area += (sizes[i + 1] - sizes[i]) * (heights[i] + heights[i + 1]) / 2
    return area / (sizes[-1] - sizes[0])


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_a_batch_equals_a_plain_loop(fields):
    vit, images = model(**fields), some_images(2)
    grids = torch.randn(2, 4, 6, dtype=torch.float64)
    classes = torch.tensor([0, 2])
    for row, score in enumerate(measure(vit, images, grids, classes)):
        image, number = images[row], int(classes[row])
        values = grids[row].flatten().tolist()
        order = sorted(range(24), key=lambda patch: -values[patch])
        dropped = [
            -probability(vit, image, [other for other in range(24) if other != patch], number)
            for patch in range(24)
        ]
        greedy = sorted(range(24), key=lambda patch: -dropped[patch])
        random = faithfulness.random_orders(faithfulness.image_keys(images[row : row + 1]), 24, 0)[
            0
        ].tolist()
        chance = [plain_area(vit, image, each, number) for each in random]
        mean = sum(chance) / 20
        deletion = plain_area(vit, image, order[::-1], number)
        insertion = plain_area(vit, image, order, number)
        best_deletion = plain_area(vit, image, greedy[::-1], number)
        best_insertion = plain_area(vit, image, greedy, number)
        assert score.deletion_area == pytest.approx(deletion, abs=1e-6)
        assert score.insertion_area == pytest.approx(insertion, abs=1e-6)
        assert score.random_area == pytest.approx(mean, abs=1e-6)
        if mean - best_deletion > np.std(chance):
            expected = (mean - deletion) / (mean - best_deletion)
            assert score.deletion == pytest.approx(expected, abs=1e-6)
        else:
            assert score.deletion is None
        if best_insertion - mean > np.std(chance):
            expected = (insertion - mean) / (best_insertion - mean)
            assert score.insertion == pytest.approx(expected, abs=1e-6)
        else:
            assert score.insertion is None
        reverse = [plain_area(vit, image, each[::-1], number) for each in random]
        gains = [a - b for a, b in zip(chance, reverse, strict=True)]
        count = sum(gain >= insertion - deletion for gain in gains)
        assert score.p == pytest.approx((1 + count) / 21)


def greedy_grids(vit, images, classes) -> torch.Tensor:
    """Maps whose order is that of token occlusion."""
    grids = torch.zeros(len(images), 24, dtype=torch.float64)
    for row, image in enumerate(images):
        for patch in range(24):
            kept = [other for other in range(24) if other != patch]
            grids[row, patch] = -probability(vit, image, kept, int(classes[row]))
    return grids.view(-1, 4, 6)


def test_occlusion_scores_1_chance_0_and_its_reverse_below():
    vit, images = model(), some_images(24)
    classes = torch.arange(24) % 3
    found = faithfulness.references(vit, images, classes)
    greedy = greedy_grids(vit, images, classes)
    best = measure(vit, images, greedy, classes, reference=found)
    measured = [score.deletion for score in best if score.deletion is not None]
    assert len(measured) > 12
    assert measured == pytest.approx([1.0] * len(measured))
    worst = measure(vit, images, -greedy, classes, reference=found)
    assert np.median([score.deletion for score in worst if score.deletion is not None]) < -0.5
    assert min(score.p for score in worst) > 0.5
    random = []
    for seed in range(8):
        grids = torch.rand(24, 4, 6, generator=torch.Generator().manual_seed(seed))
        random += measure(vit, images, grids, classes, reference=found)
    scores = [score.deletion for score in random if score.deletion is not None]
    assert abs(np.mean(scores)) < 4 * np.std(scores) / np.sqrt(len(scores)) + 1e-9
    # each of the 21 values of p is equally likely
    assert 0.4 < np.mean([score.p for score in random]) < 0.65
    assert np.mean([score.p < 0.05 for score in random]) < 0.12


def test_an_image_s_score_depends_on_no_other_image_and_on_the_seed_alone(monkeypatch):
    vit, images = model(), some_images(3)
    grids, classes = torch.randn(3, 4, 6), torch.tensor([1, 0, 2])
    monkeypatch.setattr(faithfulness, "ROWS", 7)
    together = measure(vit, images, grids, classes)
    again = measure(vit, images, grids, classes)
    alone = measure(vit, images[2:], grids[2:], classes[2:])[0]
    assert together == again
    for name, value in together[2].as_json().items():
        assert value == pytest.approx(alone.as_json()[name], abs=1e-9), name
    other = measure(vit, images, grids, classes, seed=1)
    assert [score.random_area for score in other] != [score.random_area for score in together]


def test_equal_values_come_in_random_order_not_from_the_top():
    keys = np.arange(200)
    orders = faithfulness.map_orders(torch.zeros(200, 2, 3), keys, seed=0)
    assert {tuple(sorted(order)) for order in orders.tolist()} == {(0, 1, 2, 3, 4, 5)}
    first = np.bincount(orders[:, 0].numpy(), minlength=6)
    assert first.min() > 15
    assert torch.equal(orders, faithfulness.map_orders(torch.zeros(200, 2, 3), keys, seed=0))


def test_what_is_not_measurable_is_none_and_says_so():
    vit, images = model(), some_images(2)
    torch.nn.init.zeros_(vit.head.weight)  # all images, all patches: the same probabilities
    scores = measure(vit, images, torch.zeros(2, 4, 6), torch.tensor([0, 1]))
    for score in scores:
        assert (score.deletion, score.insertion, score.p) == (None, None, 1.0)
        assert score.line == (
            "deletion not measurable, insertion not measurable (no better than chance, p = 1)"
        )


def test_a_map_that_is_as_good_as_the_best_random_order_is_not_no_better_than_chance():
    # such as of 9 patches of which one decides: many random orders have it first
    random = np.repeat([-0.4, -0.1, 0.1, 0.4], 5)
    assert faithfulness.verdict_of_map(0.4, random, 9) == "too few patches to tell"
    assert faithfulness.verdict_of_map(0.4 - 1e-9, random, 9) == "too few patches to tell"
    assert faithfulness.verdict_of_map(0.1, random, 9) == "no better than chance"
    assert faithfulness.verdict_of_map(0.5, random, 9) == "better than chance"
    # no order matters to the model, however many there are
    assert faithfulness.verdict_of_map(0.0, np.zeros(20), 196) == "no better than chance"
    # 720 orders of 6 patches are enough, 120 of 5 are not
    assert faithfulness.verdict_of_map(0.1, random, 6) == "no better than chance"
    assert faithfulness.verdict_of_map(0.1, random, 5) == "too few patches to tell"


@pytest.mark.parametrize(
    ("gains", "p", "verdict"),
    [([0.5] * 4, 1 / 16, "too few images to tell"), ([0.5] * 5, 1 / 32, "better than chance"),
     ([-0.5] * 5, 1.0, "no better than chance"),
     ([0.5] * 4 + [0.0] * 3, 1 / 16, "too few images to tell"),
     ([0.0] * 9, 1.0, "no better than chance")],
)  # fmt: skip
def test_the_verdict_of_a_method_needs_images_enough(gains, p, verdict):
    scores = [vitkit.Faithfulness(1.0, 1.0, 0.5, 0.2, 0.2 + gain, 0.3, verdict) for gain in gains]
    report = vitkit.FaithfulnessReport("rollout", {}, tuple(scores))
    assert report.p == pytest.approx(p)
    assert report.verdict == verdict == report.as_json()["verdict"]
    assert f"({verdict}, p = {p:.2g})" in report.line


@pytest.mark.parametrize("patches", [1, 2])
def test_very_few_patches(patches):
    vit = model(image_size=(16, 12 * patches), patch_size=(16, 12))
    images = torch.randn(2, 3, 16, 12 * patches, dtype=torch.float64)
    grids = torch.rand(2, 1, patches)
    for score in measure(vit, images, grids, torch.tensor([0, 1])):
        assert 0 <= score.deletion_area <= 1
        assert score.p >= 2 / 21
        assert score.as_json()["verdict"] == "too few patches to tell"
        assert f"(too few patches to tell, p = {score.p:.2g})" in score.line
        if patches == 1:
            assert (score.deletion, score.insertion) == (None, None)


def test_the_mode_stays_and_wrong_input_is_named():
    vit, images = model().train(), some_images(1)
    measure(vit, images, torch.rand(1, 4, 6), torch.tensor([0]))
    assert vit.training
    assert all(parameter.grad is None for parameter in vit.parameters())
    with pytest.raises(vitkit.ShapeError, match=r"shape \(1, 6, 4\); expected \(1, 4, 6\)"):
        measure(vit, images, torch.rand(1, 6, 4), torch.tensor([0]))
    with pytest.raises(vitkit.SettingError, match="the model has no head"):
        measure(model(num_classes=0), images, torch.rand(1, 4, 6), torch.tensor([0]))


def test_p_is_never_0():
    assert faithfulness.paired_permutation(np.ones(40)) == 1 / 10_000
    assert faithfulness.paired_permutation(np.ones(10)) == 2**-10
    assert faithfulness.paired_permutation(-np.ones(10)) == 1
    assert faithfulness.paired_permutation([]) == 1
    assert faithfulness.paired_permutation(np.zeros(5)) == 1  # no difference at all


def test_the_interval_of_a_median_is_by_ranks():
    """Ranks 8 and 18 of 25 hold the median in 95.7 % of samples, and 9 and 17 in 89.2 %."""
    found = faithfulness.median_interval
    assert found([float(n) for n in range(25)]) == (7.0, 17.0)
    assert found([1.0] * 5) is None
    assert found([]) is None

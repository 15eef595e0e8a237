"""Deletion by grey and by blurred patches, and Kendall's tau between the ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from own_methods import own_method

import vitkit
from vitkit.explaining.truth.deletion import image_keys, random_orders, step_sizes
from vitkit.explaining.truth.measure import measure_truth
from vitkit.explaining.truth.other_removals import COVERED_IMAGES, CoveredPatches
from vitkit.explaining.truth.report import agreement_of_methods
from vitkit.explaining.truth.statistics import kendall_tau


def model(**fields) -> vitkit.ViT:
    fields = {"image_size": (16, 24), "patch_size": 8, "num_classes": 3} | fields
    vit = vitkit.ViT(vitkit.ViTSpec(width=16, depth=2, num_heads=2, mlp_width=16, **fields))
    fill_with_noise(vit, std=0.4)
    return vit.double().eval()


def some_images(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 16, 24, generator=generator, dtype=torch.float64)


def brightness(vit, images):
    return images.mean(1).unfold(1, 8, 8).unfold(2, 8, 8).mean((3, 4))


def blurred(image: torch.Tensor) -> torch.Tensor:
    """The patches' mean colours, interpolated between their centres, pixel by pixel."""
    made = torch.zeros_like(image)
    for y in range(16):
        for x in range(24):
            down, across = (y + 0.5) / 8 - 0.5, (x + 0.5) / 8 - 0.5
            down, across = min(max(down, 0), 1), min(max(across, 0), 2)
            for i in range(2):
                for j in range(3):
                    weight = max(0, 1 - abs(down - i)) * max(0, 1 - abs(across - j))
                    cell = image[:, 8 * i : 8 * i + 8, 8 * j : 8 * j + 8]
                    made[:, y, x] += weight * cell.mean((1, 2))
    return made


def covered(image: torch.Tensor, cover: torch.Tensor, kept: list[int]) -> torch.Tensor:
    made = cover.clone()
    for patch in kept:
        cell = (slice(None), slice(patch // 3 * 8, patch // 3 * 8 + 8),
                slice(patch % 3 * 8, patch % 3 * 8 + 8))  # fmt: skip
        made[cell] = image[cell]
    return made


@torch.no_grad()
def area(vit, image, cover, order: list[int], number: int) -> float:
    """The mean probability while patches are removed in an order, in a loop of plain code."""
    sizes = step_sizes(len(order))
    curve = [
        float(vit(covered(image, cover, order[6 - size :])[None]).softmax(1)[0, number])
        for size in sizes
    ]
    return float(np.trapezoid(curve, sizes) / (sizes[-1] - sizes[0]))


@pytest.mark.parametrize("fields", [{}, {"class_token": False, "pooling": "mean"}])
def test_both_scores_equal_a_plain_loop(fields):
    vit, images = model(**fields), some_images(2)
    with torch.no_grad():
        classes = vit(images).argmax(1).tolist()
    expected: dict[str, list[float]] = {"grey": [], "blur": []}
    for name, scores in expected.items():
        for image, number in zip(images, classes, strict=True):
            cover = torch.zeros_like(image) if name == "grey" else blurred(image)
            with torch.no_grad():
                rest = [
                    float(vit(covered(image, cover, [q for q in range(6) if q != p])[None])
                          .softmax(1)[0, number])
                    for p in range(6)
                ]  # fmt: skip
            greedy = sorted(range(6), key=lambda patch: rest[patch])
            random = random_orders(image_keys(image[None]), 6, 0)[0].tolist()
            chance = [area(vit, image, cover, order[::-1], number) for order in random]
            best = area(vit, image, cover, greedy, number)
            values = brightness(vit, image[None]).flatten()
            found = area(vit, image, cover, values.argsort(descending=True).tolist(), number)
            mean = float(np.mean(chance))
            if mean - best > np.std(chance):
                scores.append((mean - found) / (mean - best))
    assert expected["grey"]
    assert expected["blur"]
    report = measure_truth(own_method(brightness), vit, images, parts=("removal",))
    assert report.other_removals.grey == pytest.approx(np.median(expected["grey"]), abs=1e-6)
    assert report.other_removals.blur == pytest.approx(np.median(expected["blur"]), abs=1e-6)


def test_no_patch_is_covered_where_all_stay_and_a_flat_image_has_no_blur():
    vit, images = model(), some_images(2)
    every = torch.arange(6).expand(2, -1)
    with torch.inference_mode():
        for cover in ("grey", "blur"):
            found = CoveredPatches(vit, images, cover).logits(every)
            torch.testing.assert_close(found, vit(images))
        flat = torch.full((1, 3, 16, 24), 0.7, dtype=torch.float64)
        found = CoveredPatches(vit, flat, "blur").logits(torch.tensor([[2]]))
        torch.testing.assert_close(found, vit(flat))


def test_opinions_are_those_of_the_first_images_and_have_a_line():
    vit = model()
    images = some_images(COVERED_IMAGES + 3)
    report = measure_truth(own_method(brightness), vit, images, parts=("removal",))
    other = report.other_removals
    assert other.images == COVERED_IMAGES
    first = measure_truth(own_method(brightness), vit, images[:COVERED_IMAGES], parts=("removal",))
    assert first.other_removals == other
    for tau in (other.tau_dropped_grey, other.tau_dropped_blur, other.tau_grey_blur):
        assert 0 < tau <= 1  # the ways are related
    assert report.lines[-1] == (
        f"removal: deletion {other.grey:.2f} with grey patches (tau {other.tau_dropped_grey:.2f}), "
        f"{other.blur:.2f} with blurred patches (tau {other.tau_dropped_blur:.2f}) instead of "
        "dropped ones; tau is Kendall's, between the scores of 50 images"
    )
    assert report.as_json()["other_removals"]["tau_grey_blur"] == other.tau_grey_blur


def test_tau_of_methods_compares_their_medians():
    vit, images = model(), some_images(12)
    methods = [brightness, lambda *a: -brightness(*a), lambda vit, x: brightness(vit, x).abs()]
    reports = [measure_truth(own_method(m), vit, images, parts=("removal",)) for m in methods]
    found = agreement_of_methods(reports)
    dropped, grey = [r.deletion for r in reports], [r.other_removals.grey for r in reports]
    pairs = [(0, 1), (0, 2), (1, 2)]
    signs = [np.sign((dropped[a] - dropped[b]) * (grey[a] - grey[b])) for a, b in pairs]
    assert found["dropped_grey"] == pytest.approx(np.mean(signs))
    assert set(found) == {"dropped_grey", "dropped_blur", "grey_blur"}
    assert agreement_of_methods(reports[:1]) == dict.fromkeys(found)


def test_kendall_tau_with_ties_and_missing_values():
    assert kendall_tau([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]) == 1
    assert kendall_tau([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]) == -1
    # the example of scipy.stats.kendalltau
    found = kendall_tau([12.0, 2.0, 1.0, 12.0, 2.0], [1.0, 4.0, 7.0, 1.0, 0.0])
    assert found == pytest.approx(-0.4714045)
    assert kendall_tau([1.0, None, 3.0, 4.0], [1.0, 2.0, None, 4.0]) == 1
    assert kendall_tau([1.0, 1.0], [1.0, 2.0]) is None
    assert kendall_tau([1.0], [1.0]) is None

"""examples/research/sanity_checks_of_maps.py, against maps and models of known answers."""

from __future__ import annotations

import runpy
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from own_methods import own_method

import vitkit
from vitkit.explaining.methods.occlusion import TokenSubsets

SCRIPT = Path(__file__).parents[2] / "examples/research/sanity_checks_of_maps.py"
pytestmark = pytest.mark.soak
checks = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
CLASSES = torch.tensor([0, 1, 2, 3, 4] * 20)


def model(**fields) -> vitkit.ViT:
    fields = {"image_size": (16, 24), "num_classes": 5, "depth": 4} | fields
    vit = vitkit.ViT(vitkit.ViTSpec(patch_size=8, width=16, num_heads=2, mlp_width=16, **fields))
    fill_with_noise(vit, std=0.4)
    return vit.eval()


def some_images(count: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(count, 3, 16, 24, generator=torch.Generator().manual_seed(0), dtype=dtype)


def brightness(vit, images):
    """A map that ignores the model: the mean of each patch."""
    return images.mean(1).unfold(1, 8, 8).unfold(2, 8, 8).mean((3, 4))


def hash_of_weights(vit, images):
    """A map that is nothing but the model: numbers seeded by its weights."""
    numbers = b"".join(p.detach().numpy().tobytes() for p in vit.parameters())
    return torch.rand(len(images), 2, 3, generator=torch.manual_seed(zlib.crc32(numbers)))


def test_weights_do_not_matter_to_a_method_that_ignores_them():
    vit, images = model(), some_images(100)
    blind, hashed = (
        checks.maps_of(own_method(brightness)),
        checks.maps_of(own_method(hash_of_weights)),
    )
    assert checks.weights_matter(blind, vit, images, CLASSES) == pytest.approx(1.0)
    assert abs(checks.weights_matter(hashed, vit, images, CLASSES)) < 0.15
    random = checks.with_random_top(vit, 1)
    for name, value in random.state_dict().items():
        before = vit.state_dict()[name]
        top = name.startswith(("blocks.3.", "norm.", "head."))
        assert torch.equal(value, before) != (top and value.numel() > 1), name
        assert torch.equal(value.flatten().sort().values, before.flatten().sort().values)


def coloured(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of one brightness, which is the number of their class."""
    labels = torch.arange(count) % 6
    return labels.view(-1, 1, 1, 1).expand(-1, 3, 16, 24).float(), labels


def oracle(vit, images, *, classes):
    return (brightness(vit, images) == classes.view(-1, 1, 1)).float()


def test_an_oracle_points_at_its_class_and_a_constant_map_a_quarter():
    images, labels = coloured(30)
    vit = model(num_classes=6)
    found = checks.class_matters(
        checks.maps_of(own_method(oracle, by_class=True)), vit, images, labels
    )
    assert (found["pointing"], found["positive"], found["interval"][1]) == (1.0, 1.0, 1.0)
    ones = own_method(lambda vit, images: torch.ones(len(images), 4, 6))
    found = checks.class_matters(checks.maps_of(ones), vit, images, labels, count=400)
    assert found["pointing"] == pytest.approx(0.25, abs=0.07)
    minus = own_method(lambda vit, images: -torch.ones(len(images), 4, 6))
    assert checks.class_matters(checks.maps_of(minus), vit, images, labels)["pointing"] == 0
    three = labels < 3
    assert checks.class_matters(checks.maps_of(ones), vit, images[three], labels[three]) is None


@pytest.mark.parametrize(
    "fields",
    [{}, {"num_registers": 2}, {"class_token": False, "pooling": "mean"}, {"positions": "rope"}],
    ids=["class token", "registers", "mean", "rope"],
)
def test_a_cell_of_a_mosaic_has_the_tokens_of_a_whole_image(fields):
    vit, images = model(**fields), some_images(4)
    sheet = torch.cat([torch.cat([*images[:2]], 2), torch.cat([*images[2:]], 2)], 1)[None]
    seen = checks.MosaicViT(vit)
    with torch.inference_mode():
        assert seen.embed(sheet).grid == (4, 6)
        # with the tokens of one cell alone the model sees one image
        found = TokenSubsets(seen, sheet).logits(torch.tensor([[3, 4, 5, 9, 10, 11]]))
        torch.testing.assert_close(found, vit(images[1:2]), atol=1e-5, rtol=1e-4)


def test_saco_is_that_of_a_plain_loop():
    vit, images = model().double(), some_images(3, torch.float64)
    grids, classes = torch.randn(3, 2, 3, dtype=torch.float64), torch.tensor([0, 2, 1])
    found = checks.saco(vit, images, grids, classes)
    subsets = TokenSubsets(vit, images)
    for row in range(3):
        values, total, score = grids[row].flatten(), 0.0, 0.0
        rest = []
        for patch in range(6):  # six patches are six groups
            kept = torch.tensor([[p for p in range(6) if p != patch]])
            logits = subsets.logits(kept, torch.tensor([row]))
            rest.append(float(logits.softmax(1)[0, classes[row]].detach()))
        for i in range(6):
            for j in range(6):
                if values[i] > values[j]:
                    weight = float(values[i] - values[j])
                    score += weight if rest[i] <= rest[j] else -weight
                    total += weight
        assert found[row] == pytest.approx(score / total, abs=1e-6)
    assert np.isnan(checks.saco(vit, images, torch.ones(3, 2, 3), classes)).all()


def test_ranks_and_tau_with_ties_are_scipy_s():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    for levels in (2, 5, 1000):
        first, second = generator.integers(0, levels, (2, 40)).astype(float)
        np.testing.assert_allclose(checks.average_ranks(first), stats.rankdata(first))
        tau = stats.kendalltau(first, second).statistic
        assert checks.kendall_tau(first, second) == pytest.approx(tau)
    missing = checks.kendall_tau(np.array([1, np.nan, 3, 4]), np.array([1, 2, np.nan, 4]))
    assert missing == 1
    assert np.isnan(checks.kendall_tau(np.array([1.0]), np.array([1.0])))


def test_the_script_prints_what_is_known_of_its_own_model(capsys):
    checks.main()
    assert "'pointing': 1.0, 'positive': 1.0, 'model': 1.0}" in capsys.readouterr().out

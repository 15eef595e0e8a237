"""Images whose class is decided by one patch at a random place: the methods must find it."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange
from own_methods import METHODS
from torch import Tensor
from torch.nn import functional as F

import vitkit

GRID, PATCH, PATTERNS = 5, 4, 4
TOP = int(0.05 * GRID * GRID)
"""Patches that are 5 % of an image: one."""
READOUTS = {
    "mean": {"class_token": False, "pooling": "mean", "depth": 1},
    "cls": {"depth": 2},
}
SURE = ("libragrad", "integrated-gradients", "occlusion")
BY_ATTENTION = ("gradient-rollout", "legrad")
"""Methods by the gradient to the attention, balanced by default. Once the patch dominates the token
that is read, the last norm takes out the plain gradient, so the published forms miss many patches:
four models of the mean readout gave 0.89 to 1.00 and 0.44 to 0.91 of the images, class tokens less.
"""


def planted(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images of noise with one of four patterns, or none: the last class. Classes and places."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(PATTERNS, 3, PATCH, PATCH, generator=torch.Generator().manual_seed(9))
    patches = torch.randn(count, GRID * GRID, 3, PATCH, PATCH, generator=generator)
    classes = torch.randint(PATTERNS + 1, (count,), generator=generator)
    places = torch.randint(GRID * GRID, (count,), generator=generator)
    (has,) = (classes < PATTERNS).nonzero(as_tuple=True)
    patches[has, places[has]] = 1.5 * patterns[classes[has]]
    images = rearrange(patches, "B (gh gw) C P Q -> B C (gh P) (gw Q)", gh=GRID)
    return images, classes, places


def trained(readout: str, steps: int = 120, batch: int = 64) -> vitkit.ViT:
    torch.manual_seed(0)
    model = vitkit.ViT(
        vitkit.ViTSpec(
            image_size=GRID * PATCH, patch_size=PATCH, width=32, num_heads=2, mlp_width=64,
            num_classes=PATTERNS + 1, **READOUTS[readout],
        )
    )  # fmt: skip
    images, classes, _ = planted(steps * batch, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for some, numbers in zip(images.split(batch), classes.split(batch), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(some), numbers).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@pytest.fixture(scope="module", params=["mean", pytest.param("cls", marks=pytest.mark.soak)])
def case(request):
    """A readout, its model, and the images with a pattern that the model classifies correctly."""
    model = trained(request.param, steps=120 if request.param == "mean" else 250)
    images, classes, places = planted(80, seed=2)
    with torch.no_grad():
        right = model(images).argmax(dim=1) == classes
    assert right.float().mean() > 0.9
    shown = right & (classes < PATTERNS)
    return request.param, model, images[shown], classes[shown], places[shown]


def found(method: str, case, **options: object) -> float:
    """The share of images whose deciding patch is in the top 5 %."""
    _, model, images, classes, places = case
    maps = METHODS[method].compute(model, images, classes=classes, **options).flatten(1)
    larger = (maps > maps.gather(1, places[:, None])).sum(dim=1)
    return (larger < TOP).float().mean().item()


@pytest.mark.parametrize("method", SURE)
def test_the_deciding_patch_is_in_the_top_five_percent(method, case):
    options = {"steps": 20} if "steps" in METHODS[method].options else {}
    assert found(method, case, **options) >= 0.95


@pytest.mark.parametrize("method", BY_ATTENTION)
def test_balanced_gradients_to_the_attention_find_it(method, case):
    assert found(method, case) >= 0.95
    if case[0] == "cls":
        assert found(method, case, gradients="plain") < 0.95  # as `BY_ATTENTION` says

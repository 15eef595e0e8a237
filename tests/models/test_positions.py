"""Positions against restatements that share nothing with them: loops, scipy, Pillow, complex."""

import math

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from PIL import Image
from scipy import ndimage

import vitkit
from vitkit.models.embedding import PatchDropout, resample_positions, sincos_1d, sincos_2d

SMALL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "num_heads": 4,
         "mlp_width": 64, "num_classes": 7}  # fmt: skip


def test_sincos_1d_is_the_formula_of_section_3_5():
    table = sincos_1d(50, 20)
    for position in (0, 1, 17, 49):
        for i in range(10):
            angle = position / 10000 ** (2 * i / 20)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "column_first", "last"),
    [("sincos_2d", True, 3), ("sincos_2d_moco", False, 4), ("sincos_2d_mae", True, 4)],
)
def test_sincos_2d_in_the_order_of_each_code(kind, column_first, last):
    table = sincos_2d((3, 5), 16, kind)
    assert table.shape == (15, 16)
    for token in range(15):
        row, column = divmod(token, 5)
        first, second = (column, row) if column_first else (row, column)
        for i in range(4):
            frequency = 10000 ** (-i / last)
            expected = [math.sin(first * frequency), math.cos(first * frequency),
                        math.sin(second * frequency), math.cos(second * frequency)]  # fmt: skip
            assert table[token, i::4].tolist() == pytest.approx(expected, abs=1e-6)


def table_of(grid: tuple[int, int], width: int = 4) -> torch.Tensor:
    return torch.randn(1, 1 + grid[0] * grid[1], width, generator=torch.Generator().manual_seed(0))


def plane(table: torch.Tensor, grid: tuple[int, int], channel: int) -> np.ndarray:
    return table[0, 1:, channel].reshape(grid).numpy()


def test_bilinear_aligned_is_scipy_s_zoom():
    table = table_of((7, 7))
    made = resample_positions(table, (7, 7), (12, 10), "bilinear_aligned")
    assert torch.equal(made[:, 0], table[:, 0])
    expected = ndimage.zoom(plane(table, (7, 7), 2), (12 / 7, 10 / 7), order=1)
    np.testing.assert_allclose(plane(made, (12, 10), 2), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "kernel"),
    [("bilinear_antialias", Image.Resampling.BILINEAR),
     ("bicubic_antialias", Image.Resampling.BICUBIC)],
)  # fmt: skip
def test_antialiased_modes_are_pillow_s(how, kernel):
    table = table_of((12, 12))
    made = resample_positions(table, (12, 12), (5, 9), how)
    expected = Image.fromarray(plane(table, (12, 12), 1)).resize((9, 5), kernel)
    np.testing.assert_allclose(plane(made, (5, 9), 1), np.asarray(expected), atol=2e-5)


def keys(x: float) -> float:
    """The cubic kernel that torch uses without antialiasing, a = -0.75."""
    a, x = -0.75, abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def cubic(line: np.ndarray, places: list[float]) -> list[float]:
    def at(place: float) -> float:
        base = math.floor(place)
        taps = range(base - 1, base + 3)
        return sum(line[min(max(i, 0), len(line) - 1)] * keys(place - i) for i in taps)

    return [at(place) for place in places]


@pytest.mark.parametrize("how", ["bicubic", "bicubic_aligned", "bicubic_offset"])
def test_plain_bicubic_modes_place_their_samples_as_their_codes_do(how):
    """One row of cells, so that the other axis is left alone: 1 x 8 to 1 x 13."""
    table = table_of((1, 8))
    made = resample_positions(table, (1, 8), (1, 13), how)
    scale = {"bicubic": 8 / 13, "bicubic_offset": 8 / 13.1}.get(how)
    places = (
        [i * 7 / 12 for i in range(13)] if scale is None
        else [(i + 0.5) * scale - 0.5 for i in range(13)]
    )  # fmt: skip
    expected = cubic(plane(table, (1, 8), 3)[0], places)
    np.testing.assert_allclose(plane(made, (1, 13), 3)[0], expected, atol=1e-5)


def test_bilinear_places_its_samples_at_half_pixels():
    table = table_of((1, 8))
    made = plane(resample_positions(table, (1, 8), (1, 5), "bilinear"), (1, 5), 0)[0]
    places = [(i + 0.5) * 8 / 5 - 0.5 for i in range(5)]
    np.testing.assert_allclose(made, np.interp(places, range(8), plane(table, (1, 8), 0)[0]),
                               atol=1e-6)  # fmt: skip


def test_grids_are_compared_by_both_sides():
    table = table_of((4, 4))
    assert not torch.equal(resample_positions(table, (4, 4), (2, 8)), table)
    assert resample_positions(table, (4, 4), (4, 4)) is table


@pytest.mark.parametrize(
    "positions", ["learned", "sincos_1d", "sincos_2d", "sincos_2d_moco", "sincos_2d_mae", "rope"]
)
def test_any_size_runs_and_the_place_of_a_patch_matters(positions):
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL, positions=positions)).eval()
    fill_with_noise(model, std=0.3)
    images = torch.randn(2, 3, 48, 40)
    assert model(images).shape == (2, 7)
    moved = images.roll(8, dims=3)
    assert (model(images) - model(moved)).abs().max() > 1e-4


def test_without_positions_patches_are_a_set():
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL, positions="none")).eval()
    fill_with_noise(model, std=0.3)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(images), model(images.roll(8, dims=3)))


def test_patch_dropout_keeps_prefix_and_order_and_the_rows_of_the_rotation():
    drop = PatchDropout(0.5, prefix=2).train()
    tokens = torch.arange(18.0).reshape(1, 18, 1).expand(3, 18, 4).contiguous()
    rotation = (
        torch.arange(18.0)[:, None].expand(18, 8),
        -torch.arange(18.0)[:, None].expand(18, 8),
    )
    kept, (sin, cos) = drop(tokens, rotation)
    assert kept.shape == (3, 10, 4)
    for image in range(3):
        places = kept[image, :, 0]
        assert places[:2].tolist() == [0, 1]
        assert (places.diff() > 0).all()
        assert torch.equal(sin[image, 0, :, 0], places)
        assert torch.equal(cos[image, 0, :, 0], -places)
    assert not torch.equal(kept[0], kept[1]) or not torch.equal(kept[0], kept[2])
    same, as_it_was = drop.eval()(tokens, rotation)
    assert same is tokens
    assert as_it_was is rotation

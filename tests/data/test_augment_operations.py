"""Operations give Pillow's pixels, for any image, whatever else is in its batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data.synthetic_batches import fed, images
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitkit.data.augmentation.policies import GEOMETRIC, POINTWISE, apply

POLICIES = [
    {"aa": "rand-m9-p1-mstd0.5-inc1"},
    {"aa": "rand-m15-n2-p1-mmax15"},
    {"aa": "trivial"},
    {"aa": "3", "color_jitter": 0.3},
    {"reprob": 1.0},
]
FILL = (0.5, 0.5, 0.5)


def done(pixels: np.ndarray, name: str, value: float) -> np.ndarray:
    """One image (H, W, C) uint8 through one operation, in levels of 255."""
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    fill = FILL[: pixels.shape[2]]
    out = apply(images, np.array([name]), np.array([value]), fill)
    return out[0].permute(1, 2, 0).numpy() * 255


@pytest.mark.parametrize(
    ("name", "value", "by_pillow", "tolerance"),
    [
        ("brightness", 1.7, lambda p: ImageEnhance.Brightness(p).enhance(1.7), 1.01),
        ("contrast", 0.4, lambda p: ImageEnhance.Contrast(p).enhance(0.4), 1.5),
        ("contrast", 1.8, lambda p: ImageEnhance.Contrast(p).enhance(1.8), 1.5),
        ("saturation", 0.2, lambda p: ImageEnhance.Color(p).enhance(0.2), 1.5),
        ("saturation", 1.9, lambda p: ImageEnhance.Color(p).enhance(1.9), 2.5),
        ("grey", 0.0, lambda p: ImageOps.grayscale(p).convert("RGB"), 1.0),
        ("sharpness", 0.1, lambda p: ImageEnhance.Sharpness(p).enhance(0.1), 1.5),
        ("sharpness", 1.9, lambda p: ImageEnhance.Sharpness(p).enhance(1.9), 1.5),
        ("invert", 0.0, ImageOps.invert, 0.01),
        ("solarize", 100 / 255, lambda p: ImageOps.solarize(p, 100), 0.01),
        ("solarize", 256 / 255, lambda p: p, 0.01),
        ("solarize_add", 90 / 255, lambda p: p.point(lambda v: v + 90 * (v < 128)), 0.01),
        ("posterize", 3.0, lambda p: ImageOps.posterize(p, 3), 0.01),
        ("equalize", 0.0, ImageOps.equalize, 0.01),
        ("auto_contrast", 0.0, ImageOps.autocontrast, 1.01),
    ],
)
def test_an_operation_is_pillows(name, value, by_pillow, tolerance):
    pixels = images(1, size=(40, 56))[0].numpy()
    theirs = np.asarray(by_pillow(Image.fromarray(pixels)), np.float64)
    assert np.abs(done(pixels, name, value) - theirs).max() <= tolerance
    if value not in (256 / 255,):
        assert np.abs(theirs - pixels).max() > 10  # something is done at all


def test_blur_is_nearly_pillows():
    pixels = images(1, size=(40, 56))[0].numpy()
    theirs = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(2.0))  # box blurs, three times
    assert np.abs(done(pixels, "blur", 2.0) - np.asarray(theirs)).mean() < 1.0


@pytest.mark.parametrize(
    ("name", "value", "matrix"),
    [
        ("shear_x", 0.3, (1, -0.3, 0, 0, 1, 0)),
        ("shear_y", -0.2, (1, 0, 0, 0.2, 1, 0)),
        ("translate_x", 0.25, (1, 0, -14, 0, 1, 0)),
        ("translate_y", -0.25, (1, 0, 0, 0, 1, 10)),
        ("translate_x_pixels", 0.5, (1, 0, -16, 0, 1, 0)),
        ("translate_y_pixels", -0.5, (1, 0, 0, 0, 1, 16)),
    ],
)
def test_a_move_is_pillows(name, value, matrix):
    """Pillow's matrices lead from the new place to the old one."""
    pixels = images(1, size=(40, 56))[0].numpy()
    theirs = Image.fromarray(pixels).transform(
        (56, 40), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=(127,) * 3
    )
    apart = np.abs(done(pixels, name, value) - np.asarray(theirs))
    assert np.median(apart) <= 1.0  # at the edge ours fades into the fill
    assert (apart > 1.0).mean() < 0.06


def test_a_rotation_is_pillows():
    pixels = images(1, size=(40, 56))[0].numpy()
    theirs = Image.fromarray(pixels).rotate(
        -20, Image.Resampling.BILINEAR, fillcolor=(127, 127, 127)
    )
    apart = np.abs(done(pixels, "rotate", 20.0) - np.asarray(theirs))
    assert (apart > 1.5).mean() < 0.06


@pytest.mark.parametrize("settings", POLICIES, ids=str)
@pytest.mark.parametrize(("channels", "size"), [(1, (8, 8)), (3, (28, 28)), (3, (20, 33))])
def test_an_image_does_not_depend_on_its_batch(settings, channels, size):
    pixels = images(40, channels, size)
    together = fed(pixels, epoch=2, **settings)
    shuffled = [31, 4, 17, 8, 39, 0]
    apart = fed(pixels[shuffled], shuffled, epoch=2, **settings)
    torch.testing.assert_close(apart, together[shuffled], rtol=0, atol=1e-6)
    for index in shuffled[:3]:
        alone = fed(pixels[[index]], [index], epoch=2, **settings)
        torch.testing.assert_close(alone[0], together[index], rtol=0, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", [*POINTWISE, *GEOMETRIC])
def test_every_operation_gives_an_image_at_any_size(name, channels):
    for size in ((8, 8), (28, 28), (3, 5)):
        pixels = images(1, channels, size)[0].numpy()
        out = done(pixels, name, 1.0)
        assert out.shape == pixels.shape
        assert np.isfinite(out).all()
        assert 0 <= out.min() <= out.max() <= 255.001


def test_colour_means_nothing_to_a_grey_image():
    pixels = images(1, 1)[0].numpy()
    for name in ("saturation", "grey"):
        np.testing.assert_allclose(done(pixels, name, 0.3), pixels, atol=1e-4)


def test_one_value_has_no_contrast_to_stretch():
    pixels = np.full((8, 8, 3), (10, 200, 77), np.uint8)
    np.testing.assert_allclose(done(pixels, "auto_contrast", 0.0), pixels, atol=1e-4)


def test_what_comes_into_view_is_the_mean():
    pixels = np.full((8, 8, 3), 250, np.uint8)
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    out = apply(images, np.array(["translate_x"]), np.array([0.5]), (0.1, 0.2, 0.3))
    np.testing.assert_allclose(out[0, :, 4, 0], (0.1, 0.2, 0.3), atol=1e-6)
    np.testing.assert_allclose(out[0, :, 4, 7], 250 / 255, atol=1e-6)

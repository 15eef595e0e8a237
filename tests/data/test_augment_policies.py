"""Policies draw as often as the papers state, and their operations are those of Pillow."""

import numpy as np
import pytest
import torch
from data.synthetic_batches import fed, images
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitkit import SettingError
from vitkit.data.augmentation.policies import (
    GEOMETRIC,
    IDENTITY,
    POINTWISE,
    RANDAUGMENT_INCREASING,
    TRIVIALAUGMENT_WIDE,
    apply,
    colour_jitter,
    policy,
)
from vitkit.randomness import augmentation_key

MANY = np.arange(6000)


def drawn(text: str, seed: int = 0, epoch: int = 0, view: int = 0):
    when = augmentation_key(epoch, np.full(len(MANY), view))
    return policy(text).draw(seed, when, MANY, 4)


def test_randaugment_draws_every_operation_as_often_and_half_of_the_time():
    names, _ = drawn("rand-m9-mstd0.5-inc1")
    assert names.shape == (2, 6000)
    assert abs((names == IDENTITY).mean() - 0.5) < 0.02
    for choice in RANDAUGMENT_INCREASING:
        for layer in names:
            assert abs((layer == choice.operation).mean() * 2 * 15 - 1) < 0.35
    second = names[1][names[0] == "rotate"]
    assert len(set(second)) == 16  # whatever the first layer was: fifteen operations, or none


def test_levels_are_normal_about_the_one_asked_for_and_end_at_ten():
    names, values = drawn("rand-m9-mstd0.5-inc1")
    angles = values[names == "rotate"]
    assert abs((angles > 0).mean() - 0.5) < 0.1
    levels = np.abs(angles) / 3
    assert abs(np.median(levels) - 9) < 0.1
    assert abs(levels.std() - 0.5) < 0.1
    assert levels.max() <= 10 + 1e-9
    fixed = drawn("rand-m6-p1")
    assert np.allclose(np.abs(fixed[1][fixed[0] == "rotate"]), 18)
    below = drawn("rand-m8-p1-mstd101")
    levels = np.abs(below[1][below[0] == "rotate"]) / 3
    assert abs(levels.mean() - 4) < 0.3
    assert levels.max() < 8


def test_the_values_are_timms():
    """At level 9 with `inc1`: bits 4 - int(3.6), threshold 256 - int(230.4), factors 1 +- 0.81."""
    names, values = drawn("rand-m9-p1-inc1")
    expected = {
        "posterize": {1.0}, "solarize": {25.6 / 255}, "solarize_add": {99 / 255},
        "brightness": {0.19, 1.81}, "shear_x": {-0.27, 0.27}, "translate_y": {-0.405, 0.405},
    }  # fmt: skip
    for name, numbers in expected.items():
        assert {round(v, 9) for v in values[names == name]} == {round(n, 9) for n in numbers}
    names, values = drawn("rand-m9-p1")
    assert set(values[names == "posterize"]) == {3.0}
    assert np.allclose(values[names == "brightness"], 1.72)


def test_trivialaugment_has_one_operation_and_31_levels():
    names, values = drawn("trivial")
    assert names.shape == (1, 6000)
    for choice in TRIVIALAUGMENT_WIDE:
        assert abs((names == choice.operation).mean() * 14 - 1) < 0.25
    angles = np.abs(values[names == "rotate"])
    assert len(set(angles.round(6))) == 31
    assert angles.max() == pytest.approx(135)
    assert set(values[names == "posterize"]) <= {2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}


def test_3_augment_has_one_of_three():
    names, values = drawn("3")
    for name in ("grey", "solarize", "blur"):
        assert abs((names == name).mean() * 3 - 1) < 0.1
    sigmas = values[names == "blur"]
    assert 0.1 <= sigmas.min() < 0.2 < 1.9 < sigmas.max() <= 2.0


def test_jitter_changes_all_three_in_any_order():
    names, values = colour_jitter(0.3).draw(0, 0, MANY, 5)
    orders = {tuple(names[:, i]) for i in range(200)}
    assert len(orders) == 6
    assert all(set(order) == {"brightness", "contrast", "saturation"} for order in orders)
    assert 0.7 <= values.min() < 0.71 < 1.29 < values.max() <= 1.3


@pytest.mark.parametrize(
    "settings", [{"aa": "rand-m9-mstd0.5-inc1"}, {"color_jitter": 0.3}, {"reprob": 0.5}], ids=str
)
def test_views_change_what_is_fed_and_the_same_draws_do_not(settings):
    pixels = images(32)
    first, again = fed(pixels, **settings), fed(pixels, **settings)
    assert torch.equal(first, again)
    for other in ({"view": 1}, {"epoch": 1}, {"seed": 1}):
        changed = fed(pixels, **settings, **other)
        assert (changed - first).abs().amax((1, 2, 3)).gt(0.01).float().mean() > 0.3


def test_erasing_puts_noise_into_one_box_of_some_images():
    pixels = torch.full((800, 20, 24, 3), 128, dtype=torch.uint8)
    plain, out = fed(pixels), fed(pixels, reprob=0.25)
    changed = (out != plain).all(dim=1)
    erased = changed.any(dim=(1, 2))
    assert abs(erased.float().mean() - 0.25) < 0.05
    noise = []
    for image, where in zip(out[erased], changed[erased], strict=True):
        rows, columns = where.any(1).nonzero(), where.any(0).nonzero()
        box = where[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert box.all()  # a box it is
        assert 0.01 < box.float().sum() / (20 * 24) < 0.36
        noise.append((image[:, where] - 0.5) / 0.25)
    values = torch.cat([one.flatten() for one in noise])
    assert abs(float(values.mean())) < 0.02  # standard normal, after normalisation
    assert abs(float(values.std()) - 1) < 0.02


@pytest.mark.parametrize(
    ("text", "message"),
    [("rand-m9-mstd0.5-incl1", r"'incl1' is not part of a policy .did you mean 'inc'\?"),
     ("rand-m11", "m11 is above the highest strength; add -mmax11"),
     ("rand-m40", "m must be from 0 to 30, got 40"),
     ("rand-n0", "n must be a whole number from 1 to 15, got 0"),
     ("rand-p1.5", r"p must be from 0 to 1, got 1\.5"),
     ("rand-m15-mmax15-inc1", "with inc1 the highest strength is 10"),
     ("randaugment", r"is not a policy.*such as rand-m9-mstd0\.5-inc1"),
     ("trivail", r"is not a policy .did you mean 'trivial'\?"),
     ("3-augment", "is not a policy.*pass a policy such as"), ("", "is not a policy")],
)  # fmt: skip
def test_a_policy_that_means_nothing_is_refused(text, message):
    with pytest.raises(SettingError, match=message):
        policy(text)


POLICIES = [
    {"aa": "rand-m9-p1-mstd0.5-inc1"}, {"aa": "rand-m15-n2-p1-mmax15"}, {"aa": "trivial"},
    {"aa": "3", "color_jitter": 0.3}, {"reprob": 1.0},
]  # fmt: skip
FILL = (0.5, 0.5, 0.5)


def done(pixels: np.ndarray, name: str, value: float) -> np.ndarray:
    """One image (H, W, C) uint8 through one operation, in levels of 255."""
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    fill = FILL[: pixels.shape[2]]
    out = apply(images, np.array([name]), np.array([value]), fill)
    return out[0].permute(1, 2, 0).numpy() * 255


@pytest.mark.parametrize(
    ("name", "value", "by_pillow", "tolerance"),
    [("brightness", 1.7, lambda p: ImageEnhance.Brightness(p).enhance(1.7), 1.01),
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
     ("auto_contrast", 0.0, ImageOps.autocontrast, 1.01)],
)  # fmt: skip
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
    [("shear_x", 0.3, (1, -0.3, 0, 0, 1, 0)), ("shear_y", -0.2, (1, 0, 0, 0.2, 1, 0)),
     ("translate_x", 0.25, (1, 0, -14, 0, 1, 0)), ("translate_y", -0.25, (1, 0, 0, 0, 1, 10)),
     ("translate_x_pixels", 0.5, (1, 0, -16, 0, 1, 0)),
     ("translate_y_pixels", -0.5, (1, 0, 0, 0, 1, 16))],
)  # fmt: skip
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

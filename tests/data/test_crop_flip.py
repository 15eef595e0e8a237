"""Random crops, flips and shifts, compared with code that does them image by image."""

from __future__ import annotations

import numpy as np
import pytest

from vitkit import Preprocess
from vitkit.data.images.preprocess import fit
from vitkit.data.loading.crop_flip import Augmentation, crop_box
from vitkit.randomness import Draw, uniform

SMALL = Preprocess(image_size=16, fit="squash")
EVERYTHING = Augmentation(flip=0.5, shift=2, crop_scale=0.3)


def counting(count: int, size: int = 6) -> np.ndarray:
    """Images whose every pixel tells its place: value = 10 * row + column + 1."""
    rows, columns = np.mgrid[0:size, 0:size]
    image = (10 * rows + columns + 1).astype(np.uint8)
    return np.broadcast_to(image[None, :, :, None], (count, size, size, 1)).copy()


def test_flips_are_mirror_images_at_the_asked_rate():
    pixels, indices = counting(2000), np.arange(2000)
    out = Augmentation(flip=0.3).flip_and_shift(pixels.copy(), 0, 0, indices)
    flipped = (out[:, 0, 0, 0] == 6).sum()
    mirrored = (out == pixels[:, :, ::-1]).all(axis=(1, 2, 3))
    same = (out == pixels).all(axis=(1, 2, 3))
    assert (mirrored | same).all()
    assert mirrored.sum() == flipped
    assert abs(flipped / 2000 - 0.3) < 0.04


def test_shifts_move_whole_images_evenly_and_repeat_the_edge():
    pixels, indices = counting(5000), np.arange(5000)
    out = Augmentation(shift=2).flip_and_shift(pixels, 3, 1, indices)
    centre = out[:, 2, 2, 0].astype(int) - 1  # row and column of what is now at (2, 2)
    moves, counts = np.unique(
        np.stack([centre // 10 - 2, centre % 10 - 2]), axis=1, return_counts=True
    )
    assert moves.shape[1] == 25
    assert moves.min() == -2
    assert moves.max() == 2
    assert counts.min() > 130  # 200 expected of each of 25 moves
    down_two = out[(centre // 10 == 0) & (centre % 10 == 2)][0, :, :, 0]
    expected = np.concatenate([pixels[0, :1], pixels[0, :1], pixels[0, :4]])[..., 0]
    np.testing.assert_array_equal(down_two, expected)


@pytest.mark.parametrize("shape", [(40, 7, 9, 3), (40, 9, 7, 1), (40, 1, 2, 3)])
@pytest.mark.parametrize("most", [0, 1, 4, 12])
def test_flips_and_shifts_are_what_indexing_gives(shape: tuple[int, ...], most: int):
    """Pixel by pixel, written the slow way; shifts of more than the size, too."""
    batch, height, width, _ = shape
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    indices, given = np.arange(batch) * 7, pixels.copy()
    out = Augmentation(flip=0.5, shift=most).flip_and_shift(pixels.copy(), 3, 2, indices)
    flipped = uniform(3, 2, indices, Draw.FLIP) < 0.5
    draws = uniform(3, 2, indices[None, :], Draw.SHIFT, np.arange(2)[:, None])
    down, across = (draws * (2 * most + 1)).astype(int) - most
    for n in range(batch):
        rows = np.clip(np.arange(height) + down[n], 0, height - 1)
        columns = np.clip(np.arange(width) + across[n], 0, width - 1)
        image = given[n, :, ::-1] if flipped[n] else given[n]
        np.testing.assert_array_equal(out[n], image[rows][:, columns])


def test_augmentation_of_an_image_does_not_depend_on_its_batch():
    pixels, indices = counting(50), np.arange(50)
    whole = EVERYTHING.flip_and_shift(pixels.copy(), 0, 4, indices)
    part = EVERYTHING.flip_and_shift(pixels[[7, 3]], 0, 4, np.array([7, 3]))
    np.testing.assert_array_equal(part, whole[[7, 3]])


def test_crops_keep_the_asked_area_and_shape_and_lie_inside():
    for index in range(500):
        left, top, right, bottom = crop_box((50, 80), 0.35, 0, 0, index)
        assert 0 <= left < right <= 80
        assert 0 <= top < bottom <= 50
        width, height = right - left, bottom - top
        assert 0.34 <= width * height / (50 * 80) <= 1.0 or (width, height) == (67, 50)
        assert 0.72 <= width / height <= 1.38
    boxes = {crop_box((50, 80), 0.35, 0, 0, index) for index in range(500)}
    assert len(boxes) > 480


def test_a_crop_that_fits_nowhere_is_the_middle_at_the_nearest_ratio():
    assert crop_box((2, 1000), 0.9, 0, 0, 0) == (498, 0, 501, 2)  # 3 x 2, the nearest to 4:3
    assert crop_box((1000, 300), 0.9, 0, 0, 0) == (0, 300, 300, 700)
    assert crop_box((1, 1), 0.9, 0, 0, 0) == (0, 0, 1, 1)
    for index in range(50):
        left, top, right, bottom = crop_box((90, 900), 0.3, 0, 0, index)
        assert (right - left) / (bottom - top) <= 1.38


def test_without_a_crop_training_sees_what_evaluation_sees():
    image = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    plain = Augmentation().resize(image, SMALL, 0, 0, 0)
    np.testing.assert_array_equal(plain, fit(image, SMALL))
    cropped = Augmentation(crop_scale=0.5).resize(image, SMALL, 0, 0, 0)
    assert cropped.shape == (16, 16, 3)
    assert not np.array_equal(cropped, plain)

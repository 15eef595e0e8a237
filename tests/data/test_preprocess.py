"""The evaluation transform, restated independently, the same wherever an image is read."""

import io
import math

import numpy as np
import pytest
import torch
from image_files import RAMP, VARIANTS, encode, grey_tiff, ink_profile
from PIL import Image

import vitkit
from vitkit import ImageError, Preprocess, SettingError, ShapeError
from vitkit.data.images.preprocess import fit, normalise, preprocess_images, squash, viewport
from vitkit.data.loading.crop_flip import Augmentation, resized_crop
from vitkit.data.loading.loader import EvaluationBatches, TrainingSteps

RNG = np.random.default_rng(0)
GREY = {"mean": (0.5,), "std": (0.5,)}


def image(height: int, width: int, channels: int = 3) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, channels), dtype=np.uint8)


def restated(pixels: np.ndarray, size: int, ratio: float, resampling: int) -> np.ndarray:
    """Resize the shorter side, crop the centre: as torchvision says it, on PIL images."""
    image = Image.fromarray(pixels)
    shorter = math.floor(size / ratio)
    width, height = image.size
    if width <= height:
        new = (shorter, int(shorter * height / width))
    else:
        new = (int(shorter * width / height), shorter)
    image = image.resize(new, resampling)
    left = round((new[0] - size) / 2.0)
    top = round((new[1] - size) / 2.0)
    return np.asarray(image.crop((left, top, left + size, top + size)))


@pytest.mark.parametrize("shape", [(100, 61), (61, 100), (300, 301), (48, 48), (20, 10)])
@pytest.mark.parametrize(("size", "ratio"), [(48, 0.9), (48, 0.875), (31, 1.0), (33, 0.95)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
def test_crop_is_shorter_side_then_centre(shape, size, ratio, interpolation):
    pixels = image(*shape)
    preprocess = Preprocess(image_size=size, crop_ratio=ratio, interpolation=interpolation)
    expected = restated(pixels, size, ratio, Image.Resampling[interpolation.upper()])
    np.testing.assert_array_equal(fit(pixels, preprocess), expected)


def test_crop_of_a_rectangle_fits_the_side_that_is_shorter_for_its_target() -> None:
    # floor((40, 60) / 0.8) = (50, 75): scaled by min(200 / 50, 150 / 75) = 2 to (100, 75)
    pixels = image(200, 150)
    scaled = np.asarray(Image.fromarray(pixels).resize((75, 100), Image.Resampling.BICUBIC))
    preprocess = Preprocess(image_size=(40, 60), crop_ratio=0.8)
    np.testing.assert_array_equal(fit(pixels, preprocess), scaled[30:70, 8:68])


@pytest.mark.parametrize("shape", [(500, 20), (20, 500), (61, 77), (1, 1)])
def test_the_result_always_has_the_size_asked_for(shape: tuple[int, int]) -> None:
    for size in [(32, 32), (24, 48), (48, 24)]:
        for how in ("crop", "squash", "squash-crop"):
            for ratio in (0.87, 1.0):
                preprocess = Preprocess(image_size=size, fit=how, crop_ratio=ratio)
                assert fit(image(*shape), preprocess).shape == (*size, 3)


def test_squash_crop_takes_the_centre_of_the_whole_image() -> None:
    """DeiT's way in transformers: to 256 x 256, whatever the shape, of it the middle 224 x 224."""
    pixels = image(50, 90)
    squashed = np.asarray(Image.fromarray(pixels).resize((48, 32), Image.Resampling.BICUBIC))
    preprocess = Preprocess(image_size=(28, 42), fit="squash-crop", crop_ratio=0.875)
    np.testing.assert_array_equal(fit(pixels, preprocess), squashed[2:30, 3:45])
    top, left, height, width = viewport((50, 90), preprocess)
    assert (top, left, height, width) == (2 * 50 / 32, 3 * 90 / 48, 28 * 50 / 32, 42 * 90 / 48)


def test_grey_is_rec_601() -> None:
    colours = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [10, 100, 200]]])
    preprocess = Preprocess(image_size=(1, 5), fit="squash", **GREY)
    # 0.299 R + 0.587 G + 0.114 B, rounded
    assert fit(colours.astype(np.uint8), preprocess)[0, :, 0].tolist() == [76, 150, 29, 255, 84]


def test_grey_images_suit_colour_models_and_grey_ones_alike() -> None:
    grey = image(40, 50, 1)
    repeated = np.repeat(grey, 3, axis=2)
    for how in ("crop", "squash"):
        colour = Preprocess(image_size=32, fit=how)
        single = Preprocess(image_size=32, fit=how, **GREY)
        np.testing.assert_array_equal(fit(grey, colour), fit(repeated, colour))
        np.testing.assert_array_equal(fit(grey, single), fit(repeated, single))
        assert fit(grey, single).shape == (32, 32, 1)


def test_a_crop_is_resized_without_its_surroundings() -> None:
    pixels = image(60, 80)
    preprocess = Preprocess(image_size=(16, 24), crop_ratio=0.5)
    cut = Image.fromarray(pixels[10:50, 20:70]).resize((24, 16), Image.Resampling.BICUBIC)
    crop = resized_crop(pixels, (20, 10, 70, 50), preprocess, "pillow")
    np.testing.assert_array_equal(crop, np.asarray(cut))
    whole = Image.fromarray(pixels).resize((24, 16), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(squash(pixels, preprocess), np.asarray(whole))


def test_normalise_gives_exact_numbers_in_place_order_and_type() -> None:
    pixels = torch.tensor([[[[0, 51, 255], [102, 153, 204]]]], dtype=torch.uint8)
    images = normalise(pixels, Preprocess(mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 2.0)))
    assert images.dtype == torch.float32
    assert images.shape == (1, 3, 1, 2)
    assert images.is_contiguous()
    expected = [[[-1.0, 0.4 / 0.5 - 1.0]], [[0.2 / 0.25 - 1.0, 0.6 / 0.25 - 1.0]], [[0.5, 0.4]]]
    torch.testing.assert_close(images[0], torch.tensor(expected))


def test_normalise_is_the_formula_in_float32_bit_by_bit() -> None:
    pixels = torch.from_numpy(np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3))
    preprocess = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    images = normalise(pixels, preprocess).numpy()[0]
    for c in range(3):
        values = np.arange(256, dtype=np.float32) / np.float32(255)
        values = (values - np.float32(preprocess.mean[c])) / np.float32(preprocess.std[c])
        np.testing.assert_array_equal(images[c].ravel(), values)


def test_other_shapes_are_refused_with_both_shapes() -> None:
    with pytest.raises(ShapeError, match=r"\(H, W, 3\).*got \(4, 4, 2\)"):
        fit(image(4, 4, 2), Preprocess())
    with pytest.raises(ShapeError, match=r"\(B, H, W, 1\).*got \(1, 4, 4, 3\)"):
        normalise(torch.zeros(1, 4, 4, 3, dtype=torch.uint8), Preprocess(**GREY))
    with pytest.raises(ShapeError, match="at least one image"):
        preprocess_images([], Preprocess())


def test_viewport_marks_the_pixels_that_fit_returns() -> None:
    pixels = np.zeros((120, 200, 3), np.uint8)
    preprocess = Preprocess(image_size=60, crop_ratio=0.75, interpolation="nearest")
    top, left, height, width = viewport(pixels.shape[:2], preprocess)
    pixels[round(top) : round(top + height), round(left) : round(left + width)] = 255
    assert fit(pixels, preprocess).mean() > 254
    outside = 255 - pixels
    assert fit(outside, preprocess).mean() < 1


DRAW = np.random.default_rng(0)
COLOUR = DRAW.integers(0, 256, (40, 57, 3), np.uint8)
GREY_PIXELS = DRAW.integers(0, 256, (40, 57), np.uint8)


@pytest.fixture
def files(tmp_path):
    for number, pixels in enumerate((COLOUR, GREY_PIXELS, COLOUR[::-1])):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return sorted(tmp_path.iterdir())


@pytest.mark.parametrize("mean", [(0.5, 0.4, 0.3), (0.5,)])
@pytest.mark.parametrize("fit", ["crop", "squash"])
def test_preprocess_gives_what_a_predictor_gives_its_model(files, mean, fit):
    preprocess = vitkit.Preprocess(image_size=32, mean=mean, std=mean, fit=fit)
    received = []

    def forward(images):
        received.append(images)
        return images.mean((2, 3))

    vitkit.Predictor(forward, preprocess)(files)
    (batch,) = received
    assert torch.equal(preprocess([*files]), batch)
    for row, file in zip(batch, files, strict=True):
        assert torch.equal(preprocess(file), row)
        assert torch.equal(preprocess(str(file)), row)
        assert torch.equal(preprocess(Image.open(file)), row)
        assert torch.equal(preprocess(file.read_bytes()), row)
    assert torch.equal(preprocess(GREY_PIXELS), preprocess(GREY_PIXELS[..., None]))
    assert preprocess(COLOUR).shape == (len(mean), 32, 32)


@pytest.mark.parametrize(
    ("image", "error", "words"),
    [([], SettingError, "empty list"),
     (np.zeros((4, 4, 3), np.float32), ImageError, "uint8, got \\(4, 4, 3\\) float32"),
     (["a.png", COLOUR], ImageError, "a.png: missing"),
     (Image.new("RGB", (5, 0)), ImageError, "image: damaged: 0 x 5 pixels; expected"),
     ([COLOUR, Image.new("L", (0, 5))], ImageError, "image 1: damaged: 5 x 0 pixels")],
)  # fmt: skip
def test_what_is_no_image_is_refused_by_its_number(image, error, words):
    with pytest.raises(error, match=words):
        vitkit.Preprocess(image_size=32)(image)


INKS = Image.fromarray(COLOUR).convert("CMYK")
EXIF = Image.Exif()
EXIF[0x0112] = 6
UNUSUAL = {
    **{kind: VARIANTS[kind] for kind in ("progressive JPEG", "lossless WEBP", "packed TIFF")},
    "turned": encode(Image.fromarray(COLOUR), "JPEG", exif=EXIF),
    "turned TIFF": encode(Image.fromarray(COLOUR), "TIFF", exif=EXIF),
    "inks": encode(INKS, "JPEG", icc_profile=ink_profile()),
    "alpha": encode(Image.fromarray(np.dstack([COLOUR, GREY_PIXELS])), "WEBP"),
    "palette": encode(Image.fromarray(COLOUR).convert("P"), "PNG", transparency=3),
    "1 bit": encode(Image.fromarray(GREY_PIXELS).convert("1"), "TIFF", compression="group4"),
    "16 bits": grey_tiff(RAMP, 16),
    "frames": encode(
        Image.fromarray(COLOUR), "GIF", save_all=True, append_images=[Image.fromarray(COLOUR[::-1])]
    ),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_training_evaluation_and_prediction_see_the_same(tmp_path, kind):
    content = UNUSUAL[kind]
    (tmp_path / "image").write_bytes(content)
    data = {"train": [(tmp_path / "image", 0), (tmp_path / "image", 1)]}
    split = vitkit.open_dataset(data).splits["train"]
    preprocess = vitkit.Preprocess(image_size=24)
    expected = preprocess(content)
    trained = TrainingSteps(split, preprocess, Augmentation(), batch_size=2, seed=0)[0]
    evaluated = EvaluationBatches(split, preprocess, batch_size=2)[0]
    for batch in (trained, evaluated):
        assert torch.equal(batch.images(preprocess, torch.device("cpu"))[1], expected)
    for image in (tmp_path / "image", str(tmp_path / "image"), Image.open(io.BytesIO(content))):
        assert torch.equal(preprocess(image), expected)

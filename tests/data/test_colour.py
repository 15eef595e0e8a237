"""Unusual files give the same tensor wherever they are read, with the properties of the file."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import NOISE, PHOTO, RAMP, VARIANTS, encode, grey_tiff, ink_profile, png
from PIL import Image, ImageOps

from vitkit import Preprocess
from vitkit.data.datasets.dataset import FileSplit
from vitkit.data.images.decode import decode
from vitkit.data.images.preprocess import preprocess_images
from vitkit.data.images.read import read_image
from vitkit.data.loading.crop_flip import Augmentation
from vitkit.data.loading.loader import EvaluationBatches, TrainingSteps

OTHER = Image.fromarray(NOISE[::-1])
CLEAR = np.dstack([np.asarray(PHOTO), NOISE[:, :, 0]])


def turned(orientation: int, format: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(PHOTO, format, exif=exif)


DEEP_COLOUR = np.stack([RAMP, RAMP[::-1], RAMP.T], axis=2)
FILES: dict[str, tuple[bytes, set[str]]] = {
    **{name: (content, set()) for name, content in VARIANTS.items()},
    **{f"orientation {n}": (turned(n), {"turned"}) for n in range(2, 9)},
    "orientation 1": (turned(1), set()),
    "orientation 1 of a TIFF": (turned(1, "TIFF"), set()),
    "orientation 6 of a TIFF": (turned(6, "TIFF"), {"turned"}),
    "CMYK": (encode(PHOTO.convert("CMYK"), "JPEG"), {"CMYK"}),
    "CMYK with a profile": (
        encode(PHOTO.convert("CMYK"), "JPEG", icc_profile=ink_profile()),
        {"CMYK"},
    ),
    "CMYK TIFF": (encode(PHOTO.convert("CMYK"), "TIFF"), {"CMYK"}),
    "palette": (encode(PHOTO.convert("P"), "PNG"), set()),
    "palette and alpha": (encode(PHOTO.convert("P"), "PNG", transparency=3), {"alpha"}),
    "grey and alpha": (encode(PHOTO.convert("LA"), "PNG"), {"alpha"}),
    "colour and alpha": (encode(Image.fromarray(CLEAR), "WEBP"), {"alpha"}),
    "1 bit": (encode(PHOTO.convert("1"), "PNG"), {"1 bit"}),
    "1 bit TIFF": (encode(PHOTO.convert("1"), "TIFF", compression="group4"), {"1 bit"}),
    "16-bit grey": (
        png(256, 256, 16, 0, [row.astype(">u2").tobytes() for row in RAMP]),
        {"16 bits"},
    ),
    "16-bit grey TIFF": (grey_tiff(RAMP, 16), {"16 bits"}),
    "16-bit colour": (
        png(256, 256, 16, 2, [row.astype(">u2").tobytes() for row in DEEP_COLOUR]),
        {"16 bits"},
    ),
    **{
        f"animated {format}": (
            encode(PHOTO, format, save_all=True, append_images=[OTHER]),
            {"frames"},
        )
        for format in ("GIF", "WEBP", "PNG", "TIFF")
    },
}


@pytest.mark.parametrize("kind", FILES)
def test_training_evaluation_and_prediction_see_the_same(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "image"
    path.write_bytes(FILES[kind][0])
    split = FileSplit([str(path)], np.zeros(1, np.int64), tmp_path)
    preprocess = Preprocess(image_size=24)
    steps = TrainingSteps(split, preprocess, Augmentation(), batch_size=1, seed=0)
    expected = preprocess_images([decode(FILES[kind][0])], preprocess)
    here = torch.device("cpu")
    trained = steps[0].images(preprocess, here)
    evaluated = EvaluationBatches(split, preprocess, batch_size=1)[0].images(preprocess, here)
    opened = Image.open(io.BytesIO(FILES[kind][0]))
    assert torch.equal(trained, expected)
    assert torch.equal(evaluated, expected)
    for image in (path, str(path), FILES[kind][0], opened):
        assert torch.equal(preprocess_images([read_image(image)], preprocess), expected)
    other = preprocess_images([255 - decode(FILES[kind][0])], preprocess)
    assert not torch.equal(other, expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_jpegs_are_upright_as_pillow_turns_them(orientation: int) -> None:
    with Image.open(io.BytesIO(turned(orientation))) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(decode(turned(orientation)), expected)

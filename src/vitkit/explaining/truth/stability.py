"""Is a map stable? It must hardly change with the image's position or its compression."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitkit.data.images.preprocess import normalise, pil_image
from vitkit.explaining.truth.maps import MapMaker, rank_correlations
from vitkit.explaining.truth.statistics import mean_or_none
from vitkit.models.vit import ViT
from vitkit.shapes import Images
from vitkit.spec import Preprocess

QUALITY = 90
"""Of the JPEG files."""


@dataclass(frozen=True)
class Stability:
    """Mean Spearman correlations, in [-1, 1], of maps with those of images that look the same.

    Attributes:
        shift: after a shift by one pixel to the right; None where all maps are constant.
        jpeg: after JPEG compression of quality 90; None too where the preprocessing is not known.
    """

    shift: float | None
    jpeg: float | None


def stability(
    maps: MapMaker,
    model: ViT,
    images: Images,
    classes: Int64[Tensor, " B"],
    preprocess: Preprocess | None = None,
) -> Stability:
    """Compare maps with those of images that are shifted by a pixel, and compressed.

    Args:
        maps: the method.
        model: any ViT.
        images: (B, C, H, W) normalised, on the model's device.
        classes: explained in all of them, (B,).
        preprocess: of the images, whose mean and std turn them into pixels for JPEG.
    """
    before = maps(model, images, classes)

    def correlation(changed: Images) -> float | None:
        return mean_or_none(rank_correlations(before, maps(model, changed, classes)))

    jpeg = None
    if preprocess is not None:
        jpeg = correlation(compress(images, preprocess))
    return Stability(correlation(shift_right(images)), jpeg)


def shift_right(images: Images) -> Images:
    """Shift images (B, C, H, W) by one pixel; the first column is repeated."""
    return F.pad(images[..., :-1], (1, 0, 0, 0), mode="replicate")


def compress(images: Images, preprocess: Preprocess) -> Images:
    """Return normalised images (B, C, H, W) as they are after JPEG compression."""
    per_channel = (1, -1, 1, 1)
    mean = torch.tensor(preprocess.mean).view(per_channel)
    std = torch.tensor(preprocess.std).view(per_channel)
    # JPEG is of bytes: back to pixels first, as normalisation left them.
    unit = images.detach().cpu().float() * std + mean
    pixels = (unit * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    compressed = []
    for image in pixels.contiguous().numpy():
        file = io.BytesIO()
        pil_image(image).save(file, format="JPEG", quality=QUALITY)
        with Image.open(file) as opened:
            # A grey image comes back as (H, W).
            compressed.append(np.array(opened).reshape(image.shape))
    back = normalise(torch.from_numpy(np.stack(compressed)), preprocess)
    return back.to(images.device, images.dtype)

"""Read images of any kind and preprocess them: `preprocess(image)` gives the input of a model."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from vitkit.data.images.preprocess import preprocess_images
from vitkit.data.images.read import ImageSource, read_image
from vitkit.errors import SettingError
from vitkit.spec import Preprocess


def read_and_preprocess(
    image: ImageSource | list[Any] | tuple[Any, ...], preprocess: Preprocess
) -> Float[Tensor, "*B C h w"]:
    """Return the normalised input of one image (C, h, w), or of a list of them (B, C, h, w).

    Args:
        image: a path, an encoded file's bytes, a PIL image, or (H, W, 3), (H, W, 1) or (H, W)
            uint8 [0, 255]; or a list of these.
        preprocess: size (h, w), channels C, mean and std.

    Returns:
        float32, on the CPU.

    Raises:
        ImageError: an image that cannot be used, by name or number.
        SettingError: not an image; or an empty list.
    """
    if not isinstance(image, list | tuple):
        return preprocess_images([read_image(image)], preprocess)[0]
    if not image:
        raise SettingError("expected an image or a list of images, got an empty list")
    # Bytes and arrays have no name of their own: messages name their index.
    pixels = [read_image(source, f"image {number}") for number, source in enumerate(image)]
    return preprocess_images(pixels, preprocess)

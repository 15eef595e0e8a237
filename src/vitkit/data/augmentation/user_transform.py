"""A user's own transform of training images, made a function of (seed, epoch, index, view)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image

from vitkit.data.images.pixels import as_pixels
from vitkit.data.images.preprocess import pil_image
from vitkit.errors import UserCodeError, VitkitError
from vitkit.randomness import hash64

USER = 7
"""Key of the random numbers, beside those of `crop_flip`."""


class UserTransform:
    """A function from the pixels of a training image to other pixels, by a user's own function.

    The generators of Python, numpy and torch are seeded before each call and restored afterwards,
    so that the same keys give the same image in any process.

    Args:
        function: a PIL image -> a PIL image, an array or a tensor, as a dataset may hold them.
        name: its name, for messages.
        seed: seed of the run.
    """

    def __init__(self, function: Callable[[Image.Image], Any], name: str, seed: int) -> None:
        self.function = function
        self.name = name
        self.seed = seed

    def __call__(
        self, pixels: UInt8[np.ndarray, "H W C"], augmentation_key: int, index: int, image: str
    ) -> UInt8[np.ndarray, "h w c"]:
        """Return the changed image.

        Args:
            pixels: (H, W, 3) RGB or (H, W, 1) grey.
            augmentation_key: epoch and view, `randomness.augmentation_key`.
            index: the image's index in the split.
            image: its name, for messages.

        Raises:
            UserCodeError: the function raises, or returns something that is no image.
        """
        given = pil_image(pixels)
        with _seeded(int(hash64(self.seed, augmentation_key, index, USER))):
            try:
                return as_pixels(self.function(given), image)
            except VitkitError as error:
                raise UserCodeError(f"the result of the transform {self.name}: {error}") from error
            except Exception as error:  # whatever a user's own function raises
                raise UserCodeError.raised_by(
                    f"the transform {self.name}", error, f"at {image}"
                ) from error


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators while the block runs, and restore them afterwards."""
    # The user's function may draw from any of the three.
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

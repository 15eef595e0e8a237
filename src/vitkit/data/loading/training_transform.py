"""`training_transform`: the augmentation of training, for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.data.augmentation.crop_flip import Augmentation, augment_batch, training_pixels
from vitkit.data.images.read import ImageSource, read_image
from vitkit.data.loading.batch import Batch
from vitkit.data.loading.batch_transform import BatchTransform
from vitkit.errors import SettingError
from vitkit.randomness import augmentation_key
from vitkit.spec import Preprocess

LARGEST_KEY = 2**32
"""Numbers of epochs and views are below this."""
LARGEST_INDEX = 2**63
"""Indices are below this: they become 64-bit integers."""


@dataclass(frozen=True)
class TrainingTransform:
    """A function from an image to an augmented, normalised tensor; see `training_transform`.

    Attributes:
        preprocess: size, channels, mean and std of the tensors.
        augmentation: the random changes.
    """

    preprocess: Preprocess
    augmentation: Augmentation

    def __call__(
        self, image: ImageSource, key: Sequence[int] | None = None
    ) -> Float[Tensor, "C h w"]:
        """Return the augmented image, (C, h, w) float32 on the CPU.

        Args:
            image: a path, an encoded file's bytes, a PIL image, or (H, W, 3) or (H, W) uint8.
            key: (seed, epoch, index) or (seed, epoch, index, view), whole numbers from 0: the same
                key gives the same tensor, that of image `index` in epoch `epoch` of a run with this
                `seed`. Without a key it is drawn from torch's global generator, which differs
                between the workers of a `DataLoader`.

        Raises:
            ImageError: an image that cannot be used.
            SettingError: not an image; or a key of another form.
        """
        seed, epoch, index, view = _key(key)
        indices = np.array([index])
        views = np.array([view])
        keys = augmentation_key(epoch, views)
        pixels = training_pixels(
            read_image(image), self.preprocess, self.augmentation, seed, int(keys[0]), index
        )
        changed = augment_batch(pixels[None], self.augmentation, seed, keys, indices)
        # The rest is what the run does with a whole batch, here with a batch of one image.
        batch = Batch(
            torch.from_numpy(changed),
            torch.zeros(1, dtype=torch.int64),
            torch.from_numpy(indices),
            epoch,
            torch.from_numpy(views),
        )
        on_batch = BatchTransform(
            self.preprocess, torch.device("cpu"), self.augmentation, seed=seed
        )
        return on_batch.images(batch)[0]


def training_transform(
    preprocess: Preprocess,
    *,
    flip: float = 0.5,
    shift: int = 0,
    crop_scale: float = 0.35,
    aa: str | None = None,
    color_jitter: float = 0.0,
    reprob: float = 0.0,
) -> TrainingTransform:
    """Return the augmentation of training as a function from an image to a tensor.

    The tensors are those of a run with the same settings, bit for bit; `checkpoint.metadata` has
    the settings of a run as `recipe`. Mixup and CutMix mix a batch and are not part of it.

    >>> import numpy as np, vitkit
    >>> preprocess = vitkit.Preprocess(image_size=32)
    >>> transform = vitkit.training_transform(preprocess, aa="rand-m9-mstd0.5-inc1")
    >>> photograph = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    >>> transform(photograph).shape
    torch.Size([3, 32, 32])
    >>> key = (0, 3, 17)  # seed, epoch, index
    >>> bool((transform(photograph, key) == transform(photograph, key)).all())
    True

    It fits the argument `transform` of torchvision's datasets, and a dataset of one's own:

    >>> import torch
    >>> class Photographs(torch.utils.data.Dataset):
    ...     def __len__(self):
    ...         return 10
    ...     def __getitem__(self, index):
    ...         return transform(photograph), index % 2
    >>> images, labels = next(iter(torch.utils.data.DataLoader(Photographs(), batch_size=4)))
    >>> images.shape
    torch.Size([4, 3, 32, 32])

    Args:
        preprocess: size, channels, mean and std, such as `checkpoint.preprocess`.
        flip: probability of a horizontal flip, [0, 1].
        shift: largest random shift up, down, left and right, in pixels.
        crop_scale: smallest fraction of the area that a random crop keeps, (0, 1]; 1 turns it off.
        aa: augmentation policy: RandAugment such as `rand-m9-mstd0.5-inc1`, `trivial` or `3`.
        color_jitter: largest random change of brightness, contrast and saturation, [0, 1].
        reprob: probability that a random box is replaced by noise, [0, 1].

    Raises:
        SettingError: a value out of range, or a policy that does not exist.
    """
    augmentation = Augmentation(
        flip=flip,
        shift=shift,
        crop_scale=crop_scale,
        aa=aa,
        color_jitter=color_jitter,
        reprob=reprob,
    )
    # a wrong policy is refused here, not at the first image
    BatchTransform(preprocess, torch.device("cpu"), augmentation)
    return TrainingTransform(preprocess, augmentation)


def _key(key: Sequence[int] | None) -> tuple[int, int, int, int]:
    """Return (seed, epoch, index, view); a seed of torch's global generator without a key."""
    if key is None:
        return int(torch.randint(2**63 - 1, ())), 0, 0, 0
    try:
        numbers = [*map(int, key)]
        is_whole = all(number == given for number, given in zip(numbers, key, strict=True))
    except (TypeError, ValueError):
        numbers, is_whole = [], False
    if not is_whole or len(numbers) not in (3, 4) or min(numbers) < 0:
        raise SettingError(
            f"key {key!r}: expected (seed, epoch, index) or (seed, epoch, index, view), whole "
            "numbers from 0"
        )
    # Without a view it is the first one, as in a run without repeated augmentation.
    seed, epoch, index, view = [*numbers, 0][:4]
    if max(epoch, view) >= LARGEST_KEY:
        raise SettingError(f"key {key!r}: epoch and view must be below {LARGEST_KEY:,}")
    if index >= LARGEST_INDEX:
        raise SettingError(f"key {key!r}: the index must be below {LARGEST_INDEX:,}")
    return seed, epoch, index, view

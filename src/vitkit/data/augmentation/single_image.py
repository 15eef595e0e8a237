"""The augmentation of training for one image: `training_transform(preprocess)(image)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.data.augmentation.pipeline import Augmentation, BatchTransform
from vitkit.data.images.read import ImageSource, read_image
from vitkit.data.loading.batch import Batch
from vitkit.errors import SettingError, check_type
from vitkit.randomness import augmentation_key
from vitkit.spec import Preprocess, Resizer

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
            image: a path, an encoded file's bytes, a PIL image, or (H, W, 3), (H, W, 1) or
                (H, W) uint8 [0, 255].
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
        pixels = self.augmentation.resize(
            read_image(image), self.preprocess, seed, int(keys[0]), index
        )
        changed = self.augmentation.flip_and_shift(pixels[None], seed, keys, indices)
        # The rest is done as for a whole batch, here a batch of one image.
        batch = Batch(
            torch.from_numpy(changed),
            torch.zeros(1, dtype=torch.int64),
            torch.from_numpy(indices),
            epoch,
            torch.from_numpy(views),
        )
        # Built for each image: it holds no tensors, and its seed comes from the key.
        on_batch = BatchTransform(
            self.preprocess, torch.device("cpu"), self.augmentation, seed=seed
        )
        return on_batch.images(batch)[0]


OF_A_MODEL = "the preprocessing of a model, such as vitkit.load(path).preprocess"
"""The expected argument of `training_transform`, for messages."""


def training_transform(
    preprocess: Preprocess,
    *,
    flip: float = 0.5,
    shift: int = 0,
    crop_scale: float = 0.35,
    aa: str | None = None,
    color_jitter: float = 0.0,
    reprob: float = 0.0,
    resizer: Resizer = "torch",
) -> TrainingTransform:
    """Return the augmentation of training as a function from an image to a tensor.

    The tensors are those of a run with the same settings, bit for bit; `checkpoint.metadata` has
    the settings of a run as `recipe`. Mixup and CutMix mix a batch and are not part of it, and
    JPEGs are always decoded at their full size (`scaled_jpeg` off).

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
        aa: augmentation policy: RandAugment (arXiv 1909.13719) such as `rand-m9-mstd0.5-inc1`,
            `trivial` (TrivialAugment, arXiv 2103.10158) or `3` (3-Augment, arXiv 2204.07118).
        color_jitter: largest random change of brightness, contrast and saturation, [0, 1].
        reprob: probability that a random box is replaced by noise (arXiv 1708.04896), [0, 1].
        resizer: library that resizes a random crop, "torch" or "pillow".

    Raises:
        SettingError: no preprocessing, a value out of range, or a policy that does not exist.
    """
    check_type(preprocess, Preprocess, "training_transform", OF_A_MODEL)
    augmentation = Augmentation(
        flip=flip, shift=shift, crop_scale=crop_scale, aa=aa, color_jitter=color_jitter,
        reprob=reprob, resizer=resizer,
    )  # fmt: skip
    BatchTransform(preprocess, torch.device("cpu"), augmentation)  # refuses a wrong policy now
    return TrainingTransform(preprocess, augmentation)


def _key(key: Sequence[int] | None) -> tuple[int, int, int, int]:
    """Return (seed, epoch, index, view); a seed of torch's global generator without a key."""
    if key is None:
        return int(torch.randint(2**63 - 1, ())), 0, 0, 0
    try:
        numbers = [*map(int, key)]
        is_whole = all(number == given for number, given in zip(numbers, key, strict=True))
    except (TypeError, ValueError, OverflowError):  # int(infinity) overflows
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

"""The augmentation pipeline: the chain of training transforms, for batches and for one image.

On uint8 pixels, where a loader process makes the batch (`loading.loader`):

1. the user's own transform (`user_transform`);
2. `Augmentation.resize`: a random crop of each image, resized (`crop_flip`);
3. `Augmentation.flip_and_shift`: of a whole batch (`crop_flip`).

On floats, on the device of the model:

4. `BatchTransform.images`: a policy such as RandAugment and the colour jitter (`policies`),
   normalisation (`images.preprocess`), random erasing (`mixing`);
5. `BatchTransform`: mixup and CutMix of a batch and its targets (`mixing`).

`TrainingTransform` does 2 to 4 with one image, for a training loop of one's own.

A new operation of a policy is a function and two rows in `policies`.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from PIL import Image
from torch import Tensor

from vitkit import errors, randomness, shapes, spec
from vitkit.data.augmentation.mixing import Mixing, Mixture, erase
from vitkit.data.augmentation.policies import Policy, apply, colour_jitter, policy
from vitkit.data.images.preprocess import pil_image, standardise_in_place, to_unit
from vitkit.data.images.read import ImageSource, as_pixels, read_image
from vitkit.data.loading import crop_flip, loader

# `ModelInputs`: images and targets on the model's device, augmented and mixed.


@dataclass(frozen=True)
class ModelInputs:
    """Images and their targets.

    Attributes:
        images: normalised, (B, C, H, W) float.
        targets: class numbers (B,), or a probability for every class (B, K).
        mixture: how the images are mixed, if they are; the targets are mixed already.
        soft: a teacher's probability for every class (B, K), mixed likewise.
    """

    images: shapes.Images
    targets: Int64[Tensor, " B"] | Float[Tensor, "B K"]
    mixture: Mixture | None = None
    soft: Float[Tensor, "B K"] | None = None


class BatchTransform:
    """The second half of the pipeline: from a batch, or a part of one, to `ModelInputs`.

    Args:
        preprocess: mean and std.
        device: where the model is.
        augmentation: applied here are its policy, colour jitter and erasing; the batch has been
            cropped and flipped already.
        mixing: mixup and CutMix; without it targets are class numbers.
        seed: seed of the run.

    Raises:
        SettingError: a policy that does not exist.
    """

    def __init__(
        self,
        preprocess: spec.Preprocess,
        device: torch.device,
        augmentation: crop_flip.Augmentation | None = None,
        mixing: Mixing | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.preprocess = preprocess
        self.device = device
        self.mixing = mixing
        self.seed = seed
        augmentation = augmentation or crop_flip.Augmentation()
        self._policies: list[tuple[int, Policy]] = []
        if augmentation.aa is not None:
            self._policies.append((randomness.Draw.POLICY, policy(augmentation.aa)))
        if augmentation.color_jitter > 0:
            self._policies.append(
                (randomness.Draw.JITTER, colour_jitter(augmentation.color_jitter))
            )
        self._erase_chance = augmentation.reprob

    def __call__(self, batch: loader.Batch, step: int, part: int = 0) -> ModelInputs:
        """Return the model's inputs; the same arguments give the same inputs.

        Args:
            batch: pixels, labels, and the epoch and indices of its images.
            step: step of the run.
            part: part of the step, counted over all processes and micro-batches.
        """
        images = self.images(batch)
        labels = batch.labels.to(self.device)
        if self.mixing is None:
            return ModelInputs(images, labels)
        targets = self.mixing.probabilities(labels)
        # Targets are probabilities in every batch, mixed or not, so that the loss is one function.
        mixture = self.mixing.draw(step, part, (images.shape[2], images.shape[3]))
        if mixture is None:
            return ModelInputs(images, targets)
        return ModelInputs(mixture.images(images), mixture.targets(targets), mixture)

    def images(self, batch: loader.Batch) -> shapes.Images:
        """Return the images of a batch, augmented and normalised, before any are mixed.

        Returns:
            (B, C, H, W) float32, on the model's device.

        Raises:
            ShapeError: pixels of another number of channels than `preprocess` has.
        """
        indices = batch.indices.numpy()
        key = randomness.augmentation_key(batch.epoch, batch.views.numpy())
        # uint8 is transferred to the device, a quarter of the size of float32.
        images = to_unit(batch.pixels.to(self.device, non_blocking=True), self.preprocess)
        for purpose, chosen in self._policies:
            names, values = chosen.draw(self.seed, key, indices, purpose)
            for layer in range(len(names)):
                apply(images, names[layer], values[layer], self.preprocess.mean)
        images = standardise_in_place(images, self.preprocess)
        # Erasing comes after normalisation: its noise is standard normal.
        if self._erase_chance > 0:
            erase(images, self._erase_chance, self.seed, key, indices)
        return images


# The augmentation of training for one image: `training_transform(preprocess)(image)`.

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

    preprocess: spec.Preprocess
    augmentation: crop_flip.Augmentation

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
        keys = randomness.augmentation_key(epoch, views)
        pixels = self.augmentation.resize(
            read_image(image), self.preprocess, seed, int(keys[0]), index
        )
        changed = self.augmentation.flip_and_shift(
            np.array(pixels[None], order="C"), seed, keys, indices
        )
        # The rest is done as for a whole batch, here a batch of one image.
        batch = loader.Batch(
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
    preprocess: spec.Preprocess,
    *,
    flip: float = 0.5,
    shift: int = 0,
    crop_scale: float = 0.35,
    aa: str | None = None,
    color_jitter: float = 0.0,
    reprob: float = 0.0,
    resizer: spec.Resizer = "torch",
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
    errors.check_type(preprocess, spec.Preprocess, "training_transform", OF_A_MODEL)
    augmentation = crop_flip.Augmentation(
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
        # Without a view it is the first one, as in a run without repeated augmentation.
        seed, epoch, index, view = [*map(int, key), 0][: max(4, len(key))]
        is_key = [seed, epoch, index, view][: len(key)] == [*key] and min(seed, epoch, view) >= 0
    except (TypeError, ValueError, OverflowError):  # int(infinity) overflows
        is_key = False
    if not is_key or max(epoch, view) >= LARGEST_KEY or not 0 <= index < LARGEST_INDEX:
        raise errors.SettingError(
            f"key {key!r}: expected (seed, epoch, index) or (seed, epoch, index, view), whole "
            f"numbers from 0, epoch and view below {LARGEST_KEY:,}, index below {LARGEST_INDEX:,}"
        )
    return seed, epoch, index, view


# A user's own transform of training images, made a function of (seed, epoch, index, view).


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
        with _seeded(
            int(randomness.hash64(self.seed, augmentation_key, index, randomness.Draw.TRANSFORM))
        ):
            try:
                return as_pixels(self.function(given), image)
            except errors.VitkitError as error:
                raise errors.UserCodeError(
                    f"the result of the transform {self.name}: {error}"
                ) from error
            except Exception as error:  # whatever a user's own function raises
                raise errors.UserCodeError.raised_by(
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

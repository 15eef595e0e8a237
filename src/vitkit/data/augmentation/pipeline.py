"""The augmentation pipeline: the chain of training transforms, put together in its order.

On uint8 pixels, where a loader process makes the batch (`loading.loader`):

1. the user's own transform (`user_transform`);
2. `Augmentation.write`: a random crop of each image (`crop_flip`), resized (`resized_crop`) and
   mirrored as it is written into the batch;
3. `Augmentation.shifted`: of a whole batch (`crop_flip`).

On floats, on the device of the model:

4. `BatchTransform.images`: a policy such as RandAugment and the colour jitter (`policies`,
   `operations`), normalisation (`images.preprocess`), random erasing (`random_erasing`);
5. `BatchTransform`: mixup and CutMix of a batch and its targets (`mixup`).

`single_image` does 2 to 4 with one image, for a training loop of one's own.

A new operation of a policy is a function and a row in `operations`, and a row in `policies`.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from pydantic import Field

from vitkit.data.augmentation.crop_flip import (
    ERASE,
    JITTER,
    POLICY,
    PixelBatch,
    crop_box,
    flips,
    mirror,
    shift_batch,
)
from vitkit.data.augmentation.mixup import Mixing
from vitkit.data.augmentation.model_inputs import ModelInputs
from vitkit.data.augmentation.operations import apply
from vitkit.data.augmentation.policies import Policy, colour_jitter, policy
from vitkit.data.augmentation.random_erasing import erase
from vitkit.data.augmentation.resized_crop import (
    largest_reduction,
    reduced_box,
    resized_crop,
)
from vitkit.data.images.preprocess import fit, standardise_in_place, to_unit
from vitkit.data.loading.batch import Batch
from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.randomness import augmentation_key
from vitkit.shapes import Images
from vitkit.spec import Preprocess, Resizer


@frozen(raises=SettingError)
class Augmentation:
    """Settings of the random changes to training images, and the first half of the pipeline.

    The defaults change nothing.

    Attributes:
        flip: chance of a horizontal flip, [0, 1].
        shift: largest shift in pixels, up, down, left and right; edges are repeated.
        crop_scale: smallest part of the area that a random crop keeps, (0, 1]; 1 means no crop.
        aa: a policy by name, as `policies.policy` reads it.
        color_jitter: largest change of brightness, contrast and saturation, as a factor.
        reprob: chance that a box of the image is erased, [0, 1].
        resizer: the library that resizes a random crop; without crops an image is resized as in
            evaluation, by Pillow.
        scaled_jpeg: whether a JPEG is decoded smaller where its random crop is not enlarged.

    Raises:
        SettingError: a value out of range.
    """

    flip: float = Field(0.0, ge=0.0, le=1.0)
    shift: int = Field(0, ge=0)
    crop_scale: float = Field(1.0, gt=0.0, le=1.0)
    aa: str | None = None
    color_jitter: float = Field(0.0, ge=0.0, le=1.0)
    reprob: float = Field(0.0, ge=0.0, le=1.0)
    resizer: Resizer = "torch"
    scaled_jpeg: bool = False

    def reduction(
        self,
        size: tuple[int, int],
        preprocess: Preprocess,
        seed: int,
        augmentation_key: int,
        index: int,
    ) -> int:
        """Return the factor by which a JPEG may be decoded smaller for its crop: 1, 2, 4 or 8.

        Args:
            size: (H, W) of the upright image.
            preprocess: size (h, w) of the resized crop.
            seed: seed of the run.
            augmentation_key: epoch and view, `randomness.augmentation_key`.
            index: the image's index in the split.
        """
        if not self.scaled_jpeg or self.crop_scale == 1.0:
            return 1
        height, width = preprocess.image_size
        # A crop has at most the image's size: most small images need no draw.
        if size[0] < 2 * height or size[1] < 2 * width:
            return 1
        box = crop_box(size, self.crop_scale, seed, augmentation_key, index)
        return largest_reduction(size, box, preprocess.image_size)

    def resize(
        self,
        image: UInt8[np.ndarray, "H W channels"],
        preprocess: Preprocess,
        seed: int,
        augmentation_key: int,
        index: int,
        size: tuple[int, int] | None = None,
    ) -> UInt8[np.ndarray, "h w C"]:
        """Resize one image: by a random crop, or as in evaluation where crops are off.

        Args:
            image: (H, W, 3) or (H, W, 1) uint8.
            preprocess: size (h, w) and channels C.
            seed: seed of the run.
            augmentation_key: epoch and view, `randomness.augmentation_key`.
            index: the image's index in the split.
            size: the image's full size (H, W), where it was decoded smaller.
        """
        # Evaluation keeps the aspect ratio, an Inception crop of the whole image would not.
        if self.crop_scale == 1.0:
            return fit(image, preprocess)
        decoded = (image.shape[0], image.shape[1])
        size = size or decoded
        box = crop_box(size, self.crop_scale, seed, augmentation_key, index)
        return resized_crop(image, reduced_box(box, size, decoded), preprocess, self.resizer)

    def write(
        self,
        out: UInt8[np.ndarray, "h w C"],
        image: UInt8[np.ndarray, "H W channels"],
        preprocess: Preprocess,
        seed: int,
        augmentation_key: int,
        index: int,
        *,
        mirrored: bool,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Write an image into its place in a batch, resized as by `resize`.

        Args:
            out: its place, contiguous.
            image: as in `resize`, with the arguments after it.
            preprocess: the same.
            seed: the same.
            augmentation_key: the same.
            index: the same.
            mirrored: whether it is flipped left to right (`flips`).
            size: as in `resize`.
        """
        out[:] = self.resize(image, preprocess, seed, augmentation_key, index, size)
        if mirrored:
            mirror(out)

    def flips(
        self,
        seed: int,
        augmentation_keys: int | Int64[np.ndarray, "B"],
        indices: Int64[np.ndarray, "B"],
    ) -> Bool[np.ndarray, "B"]:
        """Return which images of a batch are mirrored.

        Args:
            seed: seed of the run.
            augmentation_keys: epoch and view of each image (B,), or of all.
            indices: the images' indices in the split (B,).
        """
        if self.flip == 0:
            return np.zeros(len(indices), bool)
        return flips(self.flip, seed, augmentation_keys, indices)

    def shifted(
        self,
        pixels: PixelBatch,
        seed: int,
        augmentation_keys: int | Int64[np.ndarray, "B"],
        indices: Int64[np.ndarray, "B"],
    ) -> PixelBatch:
        """Shift a batch, each image by its own random numbers; the shape stays.

        Args:
            pixels: (B, H, W, C) uint8.
            seed: seed of the run.
            augmentation_keys: epoch and view of each image (B,), or of all.
            indices: the images' indices in the split (B,).
        """
        if self.shift == 0:
            return pixels
        return shift_batch(pixels, self.shift, seed, augmentation_keys, indices)

    def flip_and_shift(
        self,
        pixels: PixelBatch,
        seed: int,
        augmentation_keys: int | Int64[np.ndarray, "B"],
        indices: Int64[np.ndarray, "B"],
    ) -> PixelBatch:
        """Flip and shift a batch, each image by its own random numbers; the shape stays.

        Args:
            pixels: (B, H, W, C) uint8.
            seed: seed of the run.
            augmentation_keys: epoch and view of each image (B,), or of all.
            indices: the images' indices in the split (B,).
        """
        pixels = np.array(pixels, order="C")
        for row in np.flatnonzero(self.flips(seed, augmentation_keys, indices)):
            mirror(pixels[row])
        return self.shifted(pixels, seed, augmentation_keys, indices)


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
        preprocess: Preprocess,
        device: torch.device,
        augmentation: Augmentation | None = None,
        mixing: Mixing | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.preprocess = preprocess
        self.device = device
        self.mixing = mixing
        self.seed = seed
        augmentation = augmentation or Augmentation()
        self._policies: list[tuple[int, Policy]] = []
        if augmentation.aa is not None:
            self._policies.append((POLICY, policy(augmentation.aa)))
        if augmentation.color_jitter > 0:
            self._policies.append((JITTER, colour_jitter(augmentation.color_jitter)))
        self._erase_chance = augmentation.reprob

    def __call__(self, batch: Batch, step: int, part: int = 0) -> ModelInputs:
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

    def images(self, batch: Batch) -> Images:
        """Return the images of a batch, augmented and normalised, before any are mixed.

        Returns:
            (B, C, H, W) float32, on the model's device.

        Raises:
            ShapeError: pixels of another number of channels than `preprocess` has.
        """
        indices = batch.indices.numpy()
        key = augmentation_key(batch.epoch, batch.views.numpy())
        # uint8 is transferred to the device, a quarter of the size of float32.
        images = to_unit(batch.pixels.to(self.device, non_blocking=True), self.preprocess)
        for purpose, chosen in self._policies:
            names, values = chosen.draw(self.seed, key, indices, purpose)
            for layer in range(len(names)):
                apply(images, names[layer], values[layer], self.preprocess.mean)
        images = standardise_in_place(images, self.preprocess)
        # Erasing comes after normalisation: its noise is standard normal.
        if self._erase_chance > 0:
            erase(images, self._erase_chance, self.seed, key, indices, ERASE)
        return images

"""The on-device batch transform: augmentation policy, normalisation, random erasing, mixing."""

from __future__ import annotations

import torch

from vitkit.data.augmentation.crop_flip import ERASE, JITTER, POLICY, Augmentation
from vitkit.data.augmentation.mixup import Mixing
from vitkit.data.augmentation.operations import apply
from vitkit.data.augmentation.policies import Policy, colour_jitter, policy
from vitkit.data.augmentation.random_erasing import erase
from vitkit.data.images.preprocess import standardise_in_place, to_unit
from vitkit.data.loading.batch import Batch
from vitkit.data.loading.model_inputs import ModelInputs
from vitkit.randomness import augmentation_key
from vitkit.shapes import Images
from vitkit.spec import Preprocess


class BatchTransform:
    """A function from a batch, or a part of one, to `ModelInputs` on the model's device.

    Args:
        preprocess: mean and std.
        device: where the model is.
        augmentation: applied here are its policy, colour jitter and erasing; the batch has been
            cropped and flipped already.
        mixing: mixup and CutMix; without it targets are class numbers.
        seed: of the run.

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
            step: of the run.
            part: of the step, counted over all processes and micro-batches.
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
        # Bytes travel to the device, a quarter of the size of floats.
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

"""What the model is fed: a batch of pixels on its way to numbers, on the model's own device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.data.augmentation.crop_flip import ERASE, JITTER, POLICY, Augmentation
from vitkit.data.augmentation.mixup import Mixing, Mixture
from vitkit.data.augmentation.operations import apply
from vitkit.data.augmentation.policies import Policy, colour_jitter, policy
from vitkit.data.augmentation.random_erasing import erase
from vitkit.data.images.preprocess import standardised, to_unit
from vitkit.data.loading.loader import Batch
from vitkit.randomness import augmentation_key
from vitkit.shapes import Images
from vitkit.spec import Preprocess


@dataclass(frozen=True)
class ModelInputs:
    """Images and what the model should say of them.

    Attributes:
        images: normalised, (B, C, H, W) float.
        targets: class numbers (B,), or a probability for every class (B, K).
        mixture: how the images are mixed; the targets are mixed already.
        soft: what a teacher says of the images, mixed likewise: a probability for every class.
    """

    images: Images
    targets: Int64[Tensor, " B"] | Float[Tensor, "B K"]
    mixture: Mixture | None = None
    soft: Float[Tensor, "B K"] | None = None


class BatchTransform:
    """Call it with a batch, or with a part of one.

    Args:
        preprocess: mean and std.
        device: where the model is.
        augmentation: what is done here is a policy, colour jitter and erasing; the batch has been
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
        self.preprocess, self.device, self.mixing, self.seed = preprocess, device, mixing, seed
        augmentation = augmentation or Augmentation()
        self._policies: list[tuple[int, Policy]] = []
        if augmentation.aa is not None:
            self._policies.append((POLICY, policy(augmentation.aa)))
        if augmentation.color_jitter > 0:
            self._policies.append((JITTER, colour_jitter(augmentation.color_jitter)))
        self._erased = augmentation.reprob

    def __call__(self, batch: Batch, step: int, part: int = 0) -> ModelInputs:
        """The same for the same arguments.

        Args:
            batch: pixels, labels, and which images of which epoch they are.
            step: of the run.
            part: of the step, counted over all processes and micro-batches.
        """
        images, labels = self.images(batch), batch.labels.to(self.device)
        if self.mixing is None:
            return ModelInputs(images, labels)
        targets = self.mixing.probabilities(labels)
        mixture = self.mixing.draw(step, part, (images.shape[2], images.shape[3]))
        if mixture is None:
            return ModelInputs(images, targets)
        return ModelInputs(mixture.images(images), mixture.targets(targets), mixture)

    def images(self, batch: Batch) -> Images:
        """The images of a batch, changed and normalised, before any are mixed."""
        indices, when = batch.indices.numpy(), augmentation_key(batch.epoch, batch.views.numpy())
        images = to_unit(batch.pixels.to(self.device, non_blocking=True), self.preprocess)
        for purpose, drawn in self._policies:
            names, values = drawn.draw(self.seed, when, indices, purpose)
            for layer in range(len(names)):
                apply(images, names[layer], values[layer], self.preprocess.mean)
        images = standardised(images, self.preprocess)
        if self._erased > 0:
            erase(images, self._erased, self.seed, when, indices, ERASE)
        return images

"""Measurement of what a model has learned, on batches of images."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.explaining.methods.attention import attention
from vitkit.explaining.model.artefacts import count_artefacts, patch_norms
from vitkit.explaining.model.depth_statistics import DepthMeasurement, batch_size_for
from vitkit.explaining.model.explanation import ModelExplanation
from vitkit.explaining.model.filters import first_layer_filters
from vitkit.explaining.model.positions import position_similarity
from vitkit.models.vit import ViT
from vitkit.shapes import Images


class ModelMeasurement:
    """All numbers of a `ModelExplanation`, from batches of images of one size.

    Args:
        model: any ViT.
    """

    def __init__(self, model: ViT) -> None:
        self.model = model
        self._depth = DepthMeasurement(model)
        self._norms: list[Float[Tensor, "B gh gw"]] = []
        self._attention: list[Float[Tensor, "B gh gw"]] = []

    def batch_size(self, image_size: tuple[int, int]) -> int:
        """Return how many images of a size (H, W) fit into one batch."""
        rows, columns = self.model.spec.patch_size
        return batch_size_for(self.model, (image_size[0] // rows, image_size[1] // columns))

    def add(self, images: Images) -> Float[Tensor, "B 1"]:
        """Measure a batch.

        Args:
            images: (B, C, H, W) normalised; they are moved to the model's device and dtype.

        Returns:
            The largest norm of a patch token of each image, (B, 1).

        Raises:
            CheckpointError: tokens that are not finite.
        """
        images = images.to(next(self.model.parameters()))
        tokens = self._depth.add(images)
        grid = self.model.patch_embed.grid(images)
        norms = patch_norms(self.model, tokens, grid).cpu()
        if not torch.isfinite(norms).all():
            raise CheckpointError(
                "the model's tokens are not finite (NaN or infinity), so they cannot be measured; "
                "check its weights, or use the model in float32"
            )
        self._norms.append(norms)
        self._attention.append(attention(self.model, images).cpu())
        return norms.flatten(1).amax(dim=1, keepdim=True)

    def result(self, name: str) -> ModelExplanation:
        """Return the numbers, of the weights and of the images so far.

        Args:
            name: name of the model, for captions.
        """
        filters, positions = first_layer_filters(self.model), position_similarity(self.model)
        if not self._norms:
            return ModelExplanation(name, filters, positions)
        artefacts = count_artefacts(torch.cat(self._norms), torch.cat(self._attention))
        return ModelExplanation(name, filters, positions, self._depth.result(), artefacts)

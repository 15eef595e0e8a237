"""Does the test fit the model? One that cannot do without tokens is not tested by dropping them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from vitkit.explaining.token_subset import TokenSubsets
from vitkit.explaining.truth.deletion import image_keys
from vitkit.explaining.truth.maps import BATCH, require_head
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.randomness import hash64, permutation
from vitkit.shapes import Images

SHARES = (0.0, 0.25, 0.5)
"""Shares of the patches that are dropped."""
LEAST = 0.5
"""A model that keeps less of its accuracy with a quarter of its patches dropped does not fit."""


@dataclass(frozen=True)
class ModelFit:
    """Accuracy, in [0, 1], while random patches are dropped.

    Attributes:
        labelled: whether it is measured by labels; else it is the share of images whose prediction
            stays, which is 1 with all patches.
        full: with all patches.
        quarter_dropped: with 25 % of them dropped.
        half_dropped: with 50 % of them dropped.
    """

    labelled: bool
    full: float
    quarter_dropped: float
    half_dropped: float

    @property
    def fits(self) -> bool:
        """True if at least half of the accuracy stays while 25 % of the patches are dropped.

        If not, deletion and insertion measure how the model fails on few tokens rather than the
        map; training with `patch_dropout=0.25` mends it.
        """
        return self.quarter_dropped >= LEAST * self.full


def model_fit(
    model: ViT, images: Images, labels: Int64[Tensor, " B"] | None = None, *, seed: int = 0
) -> ModelFit:
    """Measure how a model does with 25 and 50 % of the patches dropped at random.

    Args:
        model: any ViT with a head.
        images: (B, C, H, W) normalised, on the model's device.
        labels: (B,) the right classes; default the model's own predictions with all patches.
        seed: of the random patches, which depend on it and on the image alone.

    Raises:
        SettingError: a model without a head.
    """
    require_head(model)
    predicted: list[list[Tensor]] = [[] for _ in SHARES]
    with eval_mode(model), torch.inference_mode():
        for part in images.split(BATCH):
            subsets = TokenSubsets(model, part)
            keys = image_keys(part)
            orders = np.stack([permutation(int(hash64(seed, key)), -1, subsets.count)
                               for key in keys])  # fmt: skip
            for found, share in zip(predicted, SHARES, strict=True):
                kept = max(1, round(subsets.count * (1 - share)))
                # The same order for every share: the half that stays is part of the three quarters.
                patches = torch.from_numpy(orders[:, :kept]).sort(dim=1).values
                found.append(subsets.logits(patches).argmax(dim=1).cpu())
    classes = [torch.cat(parts) for parts in predicted]
    right = classes[0] if labels is None else labels.cpu()
    full, quarter, half = (float((found == right).double().mean()) for found in classes)
    return ModelFit(labels is not None, full, quarter, half)

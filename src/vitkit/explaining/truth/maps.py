"""Maps of many images by one method with its options, in batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.errors import SettingError
from vitkit.explaining.class_scores import check_classes, check_finite
from vitkit.explaining.method import Method
from vitkit.explaining.methods import METHODS
from vitkit.explaining.truth.statistics import spearman
from vitkit.messages import plural
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.shapes import Images, Logits

BATCH = 32
"""Images at a time."""


@dataclass(frozen=True)
class MapMaker:
    """A method with its options: images and classes -> maps.

    Attributes:
        method: one of `METHODS`, or a `Method` of the caller's with a `compute` of its own.
        options: keywords of the method, such as `layer`.

    Raises:
        SettingError: a method whose maps are colours, or an option that the method does not have.
    """

    method: Method
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method.colours:
            raise SettingError(
                f"the truth of {self.method.name!r} cannot be measured: its maps are colours, not "
                "importance; choose another method"
            )
        for name in self.options:
            if name not in self.method.options:
                known = ", ".join(self.method.options) or "none"
                raise SettingError(
                    f"method {self.method.name!r} has no option {name!r}; it has {known}"
                )

    def __call__(
        self, model: ViT, images: Images, classes: Int64[Tensor, " B"]
    ) -> Float[Tensor, "B gh gw"]:
        """Return the maps of images (B, C, H, W) for classes (B,), on the CPU.

        Raises:
            SettingError: maps that are not finite, by a model whose gradients overflow.
        """
        grids = []
        for part in torch.arange(len(images)).split(BATCH):
            options = dict(self.options)
            if self.method.by_class:
                # Methods blind to the class have no such argument.
                options["classes"] = classes[part].to(images.device)
            grids.append(self.method.compute(model, images[part], **options).detach().cpu())
        maps = torch.cat(grids)
        if not torch.isfinite(maps).all():
            raise SettingError(
                f"maps of {self.method.name} are not finite (NaN or infinity); use the model in "
                "float32"
            )
        return maps


def predict_logits(model: ViT, images: Images) -> Logits:
    """Return logits (B, K) of images (B, C, H, W) on the CPU, in eval mode, without gradients.

    Raises:
        SettingError: a model without a head, or no images.
        CheckpointError: logits that are not finite.
    """
    require_head(model)
    if len(images) == 0:
        raise SettingError(
            "the truth of a map cannot be measured without images; expected 1 or more"
        )
    with eval_mode(model), torch.inference_mode():
        return check_finite(torch.cat([model(part).cpu() for part in images.split(BATCH)]))


def require_head(model: ViT) -> None:
    """Raise `SettingError` for a model without a head: it has no class to be explained."""
    if model.spec.num_classes == 0:
        raise SettingError(
            "the truth of a map cannot be measured: the model has no head, so no probability "
            "falls when patches are dropped"
        )


def check_numbers(named: Mapping[str, Int64[Tensor, " B"] | None], model: ViT, images: int) -> None:
    """Raise `SettingError` where class numbers are not one of the model's for each image.

    Args:
        named: name in messages, such as `labels` -> class numbers (B,); None is not checked.
        model: any ViT.
        images: their number.
    """
    for name, numbers in named.items():
        if numbers is None:
            continue
        if len(numbers) != images:
            raise SettingError(
                f"{len(numbers)} {name} for {plural(images, 'image')}; expected one each"
            )
        check_classes(model, numbers, METHODS)


def rank_correlations(
    first: Float[Tensor, "B gh gw"], second: Float[Tensor, "B gh gw"]
) -> list[float]:
    """Return Spearman's correlation of two maps of each image; NaN where a map is constant."""
    pairs = zip(_rows(first), _rows(second), strict=True)
    return [spearman(a, b) for a, b in pairs]


def _rows(grids: Float[Tensor, "B gh gw"]) -> Float[np.ndarray, "B N"]:
    return grids.flatten(1).double().numpy()

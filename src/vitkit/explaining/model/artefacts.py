"""Artefacts: patch tokens of very high norm, and the attention that they draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from vitkit.errors import MODEL, SettingError, check_type
from vitkit.explaining.methods.attention import attention
from vitkit.messages import plural
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import Grid, Images, Tokens

IMAGES = "preprocessed images, a tensor (B, C, H, W)"
"""The expected images of functions of a model, for messages."""
DEVIATIONS = 4
"""Median absolute deviations above the median from which a norm is high."""


@dataclass(frozen=True)
class Artefacts:
    """High-norm patch tokens of a model on some images.

    "Vision Transformers Need Registers" (arXiv 2309.16588), Sec. 2: large models without registers
    write a few background patches with norms far above the others, and keep no local information
    there.

    Attributes:
        high: (B, gh, gw), True for each patch of high norm.
        norms: (B, gh, gw) norms of the last block's patch outputs, before the last norm.
        threshold: a norm above it is high.
        attention: share of the readout's attention to patches that goes to those of high norm, mean
            over images, in [0, 1].
    """

    high: Bool[np.ndarray, "B gh gw"]
    norms: Float64[np.ndarray, "B gh gw"]
    threshold: float
    attention: float

    @property
    def count(self) -> int:
        """The number of high-norm patches in all images."""
        return int(self.high.sum())

    @property
    def share(self) -> float:
        """The share of all patches that have a high norm, in [0, 1]."""
        return self.count / self.high.size

    def __str__(self) -> str:
        """Return one line: how many patches, their norms, and their share of the attention."""
        patches = f"{self.count:,} of {plural(self.high.size, 'patch token')}"
        line = f"{patches} ({100 * self.share:.1f} %) have a norm above {self.threshold:.3g}"
        if not self.count:
            return line
        return (
            f"{line} (largest {self.norms.max():.3g}, median {np.median(self.norms):.3g}) and get "
            f"{100 * self.attention:.1f} % of the attention to patches"
        )

    def _repr_html_(self) -> str:
        return f"<p>{self}</p>"


def find_artefacts(model: ViT, images: Images, *, threshold: float | None = None) -> Artefacts:
    """Find patch tokens of high norm, and their share of the readout's attention.

    The norm of a patch is that of its output of the last block, before the last norm. It is high
    above the median + 4 median absolute deviations of all patches of all images; about 0.3 % of
    normally distributed norms are. The attention is that of the method `attention` in the last
    layer: of the class token, the mean query or the MAP head's query, mean over heads, without the
    attention to prefix tokens.

    Args:
        model: any ViT, in any mode; it runs in eval mode without gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.
        threshold: a norm above it is high; default as above. To compare before with after, pass the
            threshold of before.

    Raises:
        SettingError: not a model, no image, or a threshold that is not a positive number.
        ShapeError: images that do not fit the model.
    """
    check_type(model, ViT, "find_artefacts", MODEL)
    check_type(images, Tensor, "find_artefacts", IMAGES)
    record = Record(tokens=[-1])
    with eval_mode(model), torch.inference_mode():
        grid = model.forward_features(images, record).grid
    (tokens,) = record.tokens.values()
    return count_artefacts(patch_norms(model, tokens, grid), attention(model, images), threshold)


def patch_norms(model: ViT, tokens: Tokens, grid: Grid) -> Float[Tensor, "B gh gw"]:
    """Return the norms of the patches among the tokens of a block (B, T, D).

    Args:
        model: the model of the tokens.
        tokens: (B, T, D), prefix tokens first.
        grid: (gh, gw) of the patches.
    """
    return tokens[:, model.spec.num_prefix_tokens :].norm(dim=-1).unflatten(1, grid)


def high_norm(norms: Float64[np.ndarray, "..."]) -> float:
    """Return the median + 4 median absolute deviations of norms.

    >>> high_norm(np.array([1.0, 2.0, 3.0, 4.0, 50.0]))
    7.0
    """
    median = np.median(norms)
    return float(median + DEVIATIONS * np.median(np.abs(norms - median)))


def count_artefacts(
    norms: Float[Tensor, "B gh gw"],
    attention: Float[Tensor, "B gh gw"],
    threshold: float | None = None,
) -> Artefacts:
    """Count the patches of high norm.

    Args:
        norms: norms of the patches of each image.
        attention: attention of the readout to the patches, each image's sum is 1.
        threshold: as for `find_artefacts`.

    Raises:
        SettingError: no image, or a threshold that is not a positive number.
    """
    if not len(norms):
        raise SettingError("no images; pass one image or more, (B, C, H, W)")
    if threshold is not None and not threshold > 0:
        raise SettingError.about("threshold", threshold, "must be a positive number")
    values = norms.double().cpu().numpy()
    limit = high_norm(values) if threshold is None else threshold
    high = values > limit
    # Each image's weights sum to 1, so its sum over high patches is a share.
    weights = attention.double().cpu().numpy()
    return Artefacts(high, values, limit, float((weights * high).sum() / len(values)))

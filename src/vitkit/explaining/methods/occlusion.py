"""Occlusion: how far a class's logit falls without each patch."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.errors import SettingError
from vitkit.explaining.class_scores import (
    TokenSubsets,
    at_least_float32,
    check_classes,
    class_scores,
)
from vitkit.explaining.method import whole_number
from vitkit.explaining.methods import METHODS
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.shapes import Grid, Images

ROWS_AT_ONCE = 64
"""Images with a dropped window per forward pass."""


def occlusion(
    model: ViT, images: Images, *, classes: Int64[Tensor, " B"], window: int = 1
) -> Float[Tensor, "B gh gw"]:
    """Return the fall of the class's logit when a patch is dropped.

    "Visualizing and Understanding Convolutional Networks" (arXiv 1311.2901, Sec. 4.2), with tokens
    that are dropped instead of pixels that are covered (see `TokenSubsets`). With a window of k x k
    patches, which moves by one patch, a patch has the mean over the windows that contain it.

    The logit, as for the methods by gradients: the log-probability hardly moves where the model is
    sure, and it falls as well when a patch is lost that spoke against another class.

    Args:
        model: in any mode; it runs in eval mode and without gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.
        classes: (B,) class numbers.
        window: k, patches on a side of the window.

    Returns:
        (B, gh, gw), in units of the logit; below 0 where the logit rises without the patch.

    Raises:
        SettingError: a model without a head, a class that it does not have, images of a single
            patch, or a window that leaves no patch.
        ShapeError: images that do not fit the model.
    """
    check_classes(model, classes, METHODS)
    windows = _windows(model.patch_embed.grid(images), window).to(images.device)  # V k*k
    with eval_mode(model), torch.inference_mode():
        subsets = TokenSubsets(model, images)
        covers = torch.zeros(len(windows), subsets.count, dtype=torch.bool, device=images.device)
        covers.scatter_(1, windows, True)  # V N
        kept = (~covers).nonzero()[:, 1].view(len(windows), -1)  # V n, as all windows are as large
        everything = torch.arange(subsets.count, device=images.device).expand(len(images), -1)
        whole = class_scores(subsets.logits(everything), classes)  # B
        without = []
        for rows in torch.arange(len(images) * len(windows)).to(images.device).split(ROWS_AT_ONCE):
            image, place = rows // len(windows), rows % len(windows)
            logits = subsets.logits(kept[place], image)
            without.append(class_scores(logits, classes.to(images.device)[image]))
        falls = at_least_float32(whole[:, None] - torch.cat(without).view(len(images), -1))  # B V
        shares = covers / covers.sum(dim=0)  # V N: each patch's mean
        return (falls @ shares.to(falls)).unflatten(1, subsets.grid)


def _windows(grid: Grid, window: int) -> Int64[Tensor, "V w"]:
    """Return the patches of each k x k window in the grid, by their numbers."""
    if grid == (1, 1):
        able = [name for name in METHODS if name != "occlusion"]
        raise SettingError(
            "occlusion drops patches in turn, and these images have a single one; other methods: "
            f"{', '.join(able)}"
        )
    most = min(grid) - int(grid[0] == grid[1])  # some patch must stay
    side = whole_number(window)
    if side is None or not 1 <= side <= most:
        expected = f"must be a whole number from 1 to {most} for {grid[0]} x {grid[1]} patches"
        raise SettingError.about("window", window, expected)
    numbers = torch.arange(grid[0] * grid[1]).view(grid)
    return numbers.unfold(0, side, 1).unfold(1, side, 1).reshape(-1, side * side)

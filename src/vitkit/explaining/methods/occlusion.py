"""Forward passes with some of the patches, and occlusion: the fall of a logit without each."""

import torch
from jaxtyping import Int64
from torch import Tensor

from vitkit import errors, shapes
from vitkit.explaining.methods import METHODS
from vitkit.explaining.methods.class_scores import (
    Classes,
    Maps,
    at_least_float32,
    check_classes,
    check_number,
    class_scores,
)
from vitkit.models import encoder, layers
from vitkit.models.vit import Features, ViT

ROWS_AT_ONCE = 64
"""Images with a dropped window per forward pass."""


class TokenSubsets:
    """Images cut into tokens once, for many forward passes with some of their patches.

    The caller chooses the model's mode and whether gradients are kept. A hybrid's patches are the
    cells of its feature map: each has seen its neighbours.

    Args:
        model: any ViT.
        images: (B, C, H, W) normalised, on the model's device.

    Attributes:
        grid: (gh, gw) of the patches.
        count: N = gh * gw.

    >>> import vitkit
    >>> model = vitkit.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    >>> subsets = TokenSubsets(model, torch.zeros(2, 3, 32, 32))
    >>> subsets.logits(torch.tensor([[0, 3], [1, 2]])).shape
    torch.Size([2, 10])
    """

    def __init__(self, model: ViT, images: shapes.Images) -> None:
        self.model = model
        self.embedded = model.embed(images)
        self.grid = self.embedded.grid
        self.count = self.grid[0] * self.grid[1]

    def logits(
        self, patches: Int64[Tensor, "R n"], image: Int64[Tensor, " R"] | None = None
    ) -> shapes.Logits:
        """Return the logits (R, K) of R passes with n patches each.

        Args:
            patches: (R, n) numbers of the patches that stay, from 0, row by row; n of 1 or more.
            image: (R,) which image each row is of; default: one row for each image.
        """
        tokens, context, _ = self.embedded
        if image is not None:
            tokens = tokens[image]
        prefix = self.model.spec.num_prefix_tokens
        # Class, distillation and register tokens always stay.
        first = torch.arange(prefix, device=tokens.device).expand(len(patches), -1)
        kept = torch.cat([first, patches.to(tokens.device) + prefix], dim=1)  # R T'
        tokens = tokens.gather(1, kept.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
        if context.rotation is not None:
            sin, cos = context.rotation
            # (T, h) for all images -> R 1 T' h, one axis for the heads
            context = context._replace(rotation=(sin[kept].unsqueeze(1), cos[kept].unsqueeze(1)))
        for block in encoder.block_calls(self.model.blocks):
            tokens = block(tokens, context)
        grid = 1, patches.shape[1]
        features = Features.split(self.model.norm(tokens), grid, self.model.spec)
        return self.model.forward_head(features)


def occlusion(model: ViT, images: shapes.Images, *, classes: Classes, window: int = 1) -> Maps:
    """Return the fall of the class's logit when a patch is dropped.

    "Visualizing and Understanding Convolutional Networks" (arXiv 1311.2901, Sec. 4.2), with tokens
    that are dropped instead of pixels that are covered (see `TokenSubsets`). With a window of k x k
    patches, which moves by one patch, a patch has the mean over the windows that contain it.

    The logit, as for the methods by gradients: the log-probability hardly moves where the model is
    sure, and it falls as well when a patch is lost that spoke against another class.

    Args:
        model: in any mode, which it keeps; it runs in eval mode.
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
    check_classes(model, classes)
    windows = _windows(model.patch_embed.grid(images), window).to(images.device)  # V k*k
    with layers.eval_mode(model), torch.inference_mode():
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


def _windows(grid: shapes.Grid, window: int) -> Int64[Tensor, "V w"]:
    """Return the patches of each k x k window in the grid, by their numbers."""
    if grid == (1, 1):
        able = [name for name in METHODS if name != "occlusion"]
        raise errors.SettingError(
            "occlusion drops patches in turn, and these images have a single one; other methods: "
            f"{', '.join(able)}"
        )
    # some patch must stay
    side = check_number("window", window, 1, min(grid) - int(grid[0] == grid[1]))
    numbers = torch.arange(grid[0] * grid[1]).view(grid)
    return numbers.unfold(0, side, 1).unfold(1, side, 1).reshape(-1, side * side)

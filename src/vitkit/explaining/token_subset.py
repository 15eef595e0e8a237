"""Forward passes with a subset of the patches: the other tokens are dropped, not greyed.

A ViT can do without tokens; each patch that stays keeps its position ("Masked Autoencoders Are
Scalable Vision Learners", arXiv 2111.06377; "Missingness Bias in Model Debugging", arXiv
2204.08945, on why grey patches mislead).
"""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from vitkit.errors import SettingError
from vitkit.models.encoder import block_calls
from vitkit.models.readout import Features
from vitkit.models.vit import ViT
from vitkit.shapes import Images, Logits


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

    def __init__(self, model: ViT, images: Images) -> None:
        self.model = model
        self.embedded = model.embed(images)
        self.grid = self.embedded.grid
        self.count = self.grid[0] * self.grid[1]

    def features(
        self, patches: Int64[Tensor, "R n"], image: Int64[Tensor, " R"] | None = None
    ) -> Features:
        """Return the tokens after the last norm of R passes with n patches each.

        Args:
            patches: (R, n) numbers of the patches that stay, from 0, row by row; n of 1 or more.
            image: (R,) which image each row is of; default: one row for each image.

        Raises:
            SettingError: no patch, or a patch that is not there.
        """
        if patches.shape[1] == 0 or not 0 <= int(patches.min()) <= int(patches.max()) < self.count:
            raise SettingError(f"patches must be at least one number from 0 to {self.count - 1}")
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
        for block in block_calls(self.model.blocks):
            tokens = block(tokens, context)
        return Features.split(self.model.norm(tokens), (1, patches.shape[1]), self.model.spec)

    def logits(
        self, patches: Int64[Tensor, "R n"], image: Int64[Tensor, " R"] | None = None
    ) -> Logits:
        """Return logits (R, K) of passes with n patches each; otherwise as `features`."""
        return self.model.forward_head(self.features(patches, image))


def drop_in_order(
    order: Int64[Tensor, "B N"], kept: int, *, first: bool = False
) -> Int64[Tensor, "B n"]:
    """Return the patches that stay when all but `kept` are dropped in an order, sorted.

    Args:
        order: (B, N) all patches of each image, the first to be dropped first.
        kept: how many stay.
        first: keep the first ones of the order instead (insertion).
    """
    part = order[:, :kept] if first else order[:, order.shape[1] - kept :]
    return part.sort(dim=1).values

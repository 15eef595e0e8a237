"""Pre-training without labels: patches are hidden, and the model predicts their pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit
from vitkit.models.embedding import patchify
from vitkit.training.optimization.parameters import learning_rate


class MaskedImages(nn.Module):
    """A ViT that predicts hidden patches (SimMIM, arXiv 2111.09886, Sec. 3).

    The token of a hidden patch is replaced by one learned vector, the mask token; its position is
    added as usual. The encoder is that of the ViT; one matrix maps its tokens to pixels.
    """

    def __init__(self, model: vitkit.ViT, share: float = 0.5) -> None:
        """Hide a `share` of the patches of each image; the model must have no class token."""
        super().__init__()
        self.model, self.num_hidden = model, round(share * model.spec.num_patches)
        values = model.patch_embed.patch_size[0] * model.patch_embed.patch_size[1]
        self.mask_token = nn.Parameter(torch.zeros(1, 1, model.spec.width))
        self.norm = nn.LayerNorm(model.spec.width)
        self.pixels = nn.Linear(model.spec.width, values * model.spec.in_channels)

    def hide(self, count: int) -> Tensor:
        """Choose the hidden patches at random, equally many in every image: (count, N), True if hidden."""
        return (
            torch.rand(count, self.model.spec.num_patches).argsort(1) < self.num_hidden
        )

    def forward(self, images: Tensor, hidden: Tensor) -> Tensor:
        """Predict the pixels of all patches, (B, N, V)."""
        z = torch.where(
            hidden[..., None], self.mask_token, self.model.patch_embed(images)
        )
        z = z + self.model.pos_embed
        for block in self.model.blocks:
            z = block(z)
        predicted: Tensor = self.pixels(self.norm(z))
        return predicted

    def loss(self, images: Tensor) -> Tensor:
        """Compute the mean squared error of the pixels of hidden patches."""
        hidden = self.hide(len(images))
        patches = patchify(images, self.model.patch_embed.patch_size)
        return F.mse_loss(self(images, hidden)[hidden], patches[hidden])


def pretrain(
    model: MaskedImages, images: Tensor, *, steps: int, batch: int, lr: float, seed: int
) -> list[float]:
    """Train in place on normalised images (M, C, H, W); return the loss of every step."""
    torch.manual_seed(seed)
    groups = vitkit.parameter_groups(model, lr=lr, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step, "cosine", peak=lr, low=lr / 100, warmup=steps // 10, total=steps
            )
        loss = model.loss(images[torch.randint(len(images), (batch,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses

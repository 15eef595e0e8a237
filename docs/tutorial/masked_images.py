"""Pre-training without labels: patches are hidden, and the model guesses their pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit
from vitkit.models.embedding import patchify
from vitkit.training.optimization.schedule import learning_rate


class MaskedImages(nn.Module):
    """A ViT that guesses patches that it does not see (SimMIM, arXiv 2111.09886, Sec. 3).

    In place of a hidden patch's token stands one learned vector, to which its position is added. The
    encoder is the ViT's own; one matrix makes pixels of its tokens.
    """

    def __init__(self, model: vitkit.ViT, share: float = 0.5) -> None:
        """Hide a `share` of the patches of a model without a class token."""
        super().__init__()
        self.model, self.hidden = model, round(share * model.spec.num_patches)
        values = model.patch_embed.patch_size[0] * model.patch_embed.patch_size[1]
        self.mask_token = nn.Parameter(torch.zeros(1, 1, model.spec.width))
        self.norm = nn.LayerNorm(model.spec.width)
        self.pixels = nn.Linear(model.spec.width, values * model.spec.in_channels)

    def hide(self, count: int) -> Tensor:
        """(count, N): which patches are hidden, as many in every image."""
        return torch.rand(count, self.model.spec.num_patches).argsort(1) < self.hidden

    def forward(self, images: Tensor, hidden: Tensor) -> Tensor:
        """The patches (B, N, V) as the model guesses them, seen and hidden."""
        z = torch.where(hidden[..., None], self.mask_token, self.model.patch_embed(images))
        z = z + self.model.pos_embed
        for block in self.model.blocks:
            z = block(z)
        guessed: Tensor = self.pixels(self.norm(z))
        return guessed

    def loss(self, images: Tensor) -> Tensor:
        """Mean squared error of the pixels of hidden patches."""
        hidden = self.hide(len(images))
        patches = patchify(images, self.model.patch_embed.patch_size)
        return F.mse_loss(self(images, hidden)[hidden], patches[hidden])


def pretrain(
    model: MaskedImages, images: Tensor, *, steps: int, batch: int, lr: float, seed: int
) -> list[float]:
    """Train it in place on normalised images (M, C, H, W); the loss of every step."""
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

"""A plain CNN with about as many parameters as the ViT of the Fashion-MNIST recipe."""

from __future__ import annotations

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Four 3 x 3 convolutions with BatchNorm, then the mean of the map: (B, 1, 28, 28) -> (B, K)."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.maps = nn.Sequential(
            *layer(1, 32, stride=2), *layer(32, 64, stride=1),
            *layer(64, 128, stride=2), *layer(128, 120, stride=1),
        )  # fmt: skip
        self.head = nn.Linear(120, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.maps(images).mean((2, 3)))


def layer(channels: int, maps: int, *, stride: int) -> list[nn.Module]:
    """Return a convolution, its BatchNorm and ReLU."""
    convolution = nn.Conv2d(channels, maps, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(maps), nn.ReLU()]

"""Train a convolutional teacher for Fashion-MNIST, with two residual blocks.

    python benchmarks/teacher.py WEIGHTS [--epochs 10] [--threads 2]

DeiT's best teacher is a convolutional network (arXiv 2012.12877, Table 2). This one has 0.46 M
parameters and learns by SGD with momentum and a one-cycle learning rate (arXiv 1708.07120). It uses
the training images of a vitkit run, flipped and shifted in the same way, and labels without
smoothing, because smoothed labels make poor teachers (arXiv 1906.02629). `vitkit train --teacher
teacher:trained` loads it from the file that the variable TEACHER_WEIGHTS names.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from race import BATCH, accuracy, varied
from race import images as raw_images
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS = "TEACHER_WEIGHTS"
EPOCHS = 10


def convolution(channels: int, maps: int, stride: int = 1) -> nn.Sequential:
    """Return a 3 x 3 convolution with batch norm and ReLU."""
    filters = nn.Conv2d(channels, maps, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(filters, nn.BatchNorm2d(maps), nn.ReLU())


class Residual(nn.Module):
    """Residual block (B, C, H, W) -> (B, C, H, W) of two convolutions (arXiv 1512.03385)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            convolution(channels, channels), convolution(channels, channels)
        )

    def forward(self, maps: Tensor) -> Tensor:
        return maps + self.change(maps)


class ConvolutionalTeacher(nn.Module):
    """CNN (B, 1, 28, 28) -> (B, 10) with feature maps of 28 x 28, 14 x 14 and 7 x 7."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(
            convolution(1, 32), convolution(32, 64, stride=2), Residual(64),
            convolution(64, 128, stride=2), Residual(128),
        )  # fmt: skip
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.maps(images).mean((2, 3)))


def trained() -> ConvolutionalTeacher:
    """Load the trained teacher."""
    teacher = ConvolutionalTeacher()
    teacher.load_state_dict(torch.load(os.environ[WEIGHTS], weights_only=True))
    return teacher


def train(path: Path, epochs: int) -> None:
    """Train it, print the validation accuracy of each epoch, and save the last weights."""
    torch.manual_seed(0)
    teacher, data = ConvolutionalTeacher().to(memory_format=torch.channels_last), raw_images(0)
    images, labels = data["train"]
    optimizer = torch.optim.SGD(
        teacher.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, epochs * steps, pct_start=0.2)
    start = time.perf_counter()
    for epoch in range(epochs):
        teacher.train()
        for places in torch.randperm(len(images)).split(BATCH):
            seen = varied(images[places]).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(teacher(seen), labels[places]).backward()
            optimizer.step()
            schedule.step()
        print(f"teacher: epoch {epoch + 1}, validation {accuracy(teacher.eval(), *data['val']):.4f}"
              f" after {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
    torch.save(teacher.state_dict(), path)


def score(path: Path, part: str) -> float:
    """Return the top-1 of saved weights on a split."""
    os.environ[WEIGHTS] = str(path)
    return accuracy(trained().eval(), *raw_images(0, (part,))[part])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("weights", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args.weights, args.epochs)


if __name__ == "__main__":
    main()

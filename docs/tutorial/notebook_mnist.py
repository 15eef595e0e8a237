"""The lab notebook's ViT for MNIST, computed as the notebook computes it, mistakes included.

Our own code after its description, to measure what `vitkit train mnist --recipe mnist` is set
beside. What changes only the speed is done the fast way: the notebook ran attention twice and threw
the first result away, went through the images of a batch one by one, and made its positions by a
double loop in every forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit
from vitkit.models.positions import sincos_1d

SIDE, GRID, WIDTH, HEADS, CLASSES = 28, 7, 20, 2, 10
EPOCHS, BATCH, RATE = 5, 16, 0.01


class NotebookAttention(nn.Module):
    """Two heads. (B, 50, 20) -> (B, 50, 20).

    Mistake: each head sees its own slice of the width alone, for queries, keys and values, and no
    matrix mixes the heads afterwards, so the halves of a token never meet here.

    Mistake: the heads' layers sit in Python lists, where torch does not see them. They are not
    parameters of the model: never trained, moved or saved, 660 numbers that stay as they are drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        part = WIDTH // HEADS
        self.queries = [nn.Linear(part, part) for _ in range(HEADS)]
        self.keys = [nn.Linear(part, part) for _ in range(HEADS)]
        self.values = [nn.Linear(part, part) for _ in range(HEADS)]

    def forward(self, tokens: Tensor) -> Tensor:
        found = []
        for head, own in enumerate(tokens.chunk(HEADS, dim=-1)):
            q, k, v = self.queries[head](own), self.keys[head](own), self.values[head](own)
            weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
            found.append(weights @ v)
        return torch.cat(found, dim=-1)


class NotebookViT(nn.Module):
    """(B, 1, 28, 28) -> "probabilities" (B, 10). 4,990 registered parameters."""

    def __init__(self) -> None:
        super().__init__()
        tokens = GRID * GRID + 1
        self.linear = nn.Linear(SIDE * SIDE // GRID**2, WIDTH)
        self.class_token = nn.Parameter(torch.rand(1, WIDTH))
        # Mistake: normed over tokens and width together, with 1,000 weights and biases each, which
        # tie the model to 50 tokens and let every token change every other one.
        self.norm1 = nn.LayerNorm((tokens, WIDTH))
        self.norm2 = nn.LayerNorm((tokens, WIDTH))
        self.attention = NotebookAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        # Mistake: a softmax here, and another one inside the loss: it cannot fall below 1.461.
        # There is no norm before the head, either.
        self.head = nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Softmax(dim=-1))
        self.register_buffer("positions", sincos_1d(tokens, WIDTH), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        # Mistake: width and height are taken for each other, which a square image hides.
        batch, channels, width, height = images.shape
        # Mistake: `reshape` makes strips of 16 pixels of a row; none of the 49 is a patch.
        strips = images.reshape(batch, GRID**2, channels * width * height // GRID**2)
        tokens = self.linear(strips)
        tokens = torch.cat([self.class_token.expand(batch, 1, -1), tokens], dim=1)
        tokens = tokens + self.positions
        tokens = tokens + self.attention(self.norm1(tokens))
        tokens = tokens + self.mlp(self.norm2(tokens))
        return self.head(tokens[:, 0])


def loss_of(said: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of what is a softmax already.

    Mistake: the mean over the batch is divided by the batch once more. Adam hides it, as its steps
    do not depend on the gradient's scale.
    """
    return F.cross_entropy(said, labels) / len(labels)


def mended() -> vitkit.ViT:
    """The nearest model without the mistakes, of 3,210 parameters: patches for strips, heads that
    share an output matrix, norms over the width, a norm before the head, and logits."""
    return vitkit.create_model(
        "vit_tiny_patch16_224", image_size=SIDE, patch_size=SIDE // GRID, in_channels=1,
        num_classes=CLASSES, width=WIDTH, depth=1, num_heads=HEADS, mlp_width=WIDTH,
        positions="sincos_1d", activation="relu",
    )  # fmt: skip


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of,
    epochs: int = EPOCHS,
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Adam at 0.01, batches of 16, no schedule.

    Args:
        model: trained in place.
        images: (N, 1, 28, 28) in [0, 1], not normalised otherwise.
        labels: class numbers (N,).
        loss: of what the model says and the labels.
        epochs: passes.
        seed: decides the order.

    Yields:
        After every epoch: its number, `train_loss` (the mean of `loss`) and the `seconds` so far.
    """
    # Only the registered parameters are handed over: the heads are not among them.
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    seconds = 0.0
    for epoch in range(epochs):
        start, total, seen = time.perf_counter(), 0.0, 0
        for places in _batches(len(images), seed, epoch):
            value = loss(model(images[places]), labels[places])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            total += value.item() * len(places)
            seen += len(places)
        seconds += time.perf_counter() - start
        yield {"epoch": epoch + 1, "train_loss": total / seen, "seconds": seconds}


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The part it gets right.

    Mistake of the notebook, left out here: it evaluated without `eval()` and without `no_grad()`.
    The first changes nothing in a model without dropout; the second costs memory and time.
    """
    with torch.no_grad():
        right = sum(
            int((model(some).argmax(-1) == told).sum())
            for some, told in zip(images.split(1000), labels.split(1000), strict=True)
        )
    return right / len(labels)


def _batches(count: int, seed: int, epoch: int) -> Iterator[Tensor]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return iter(order.split(BATCH))

"""Notebook E's ViT for MNIST, computed as in the notebook, including its mistakes.

It is our own code, written after the notebook's description, for the comparison with
`vitkit train mnist --recipe mnist`. Only slow code is replaced: the notebook computes attention
twice and discards the first result, processes the images of a batch one by one, and creates its
positions by a double loop in every forward pass, on the device that a global variable names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit
from vitkit.models.embedding import sincos_1d

SIDE, GRID, WIDTH, HEADS, CLASSES = 28, 7, 20, 2, 10
EPOCHS, BATCH, RATE = 5, 16, 0.01


class NotebookAttention(nn.Module):
    """Two heads. (B, 50, 20) -> (B, 50, 20).

    Mistake: each head reads only its own slice of the width, for queries, keys and values, and no
    matrix combines the heads afterwards, so attention never combines the two halves of a token.

    Mistake: the layers of the heads are in Python lists, which torch does not see. Their 660 weights
    are not parameters of the model: they are not trained, moved or saved.
    """

    def __init__(self) -> None:
        super().__init__()
        part = WIDTH // HEADS
        self.queries = [nn.Linear(part, part) for _ in range(HEADS)]
        self.keys = [nn.Linear(part, part) for _ in range(HEADS)]
        self.values = [nn.Linear(part, part) for _ in range(HEADS)]

    def forward(self, tokens: Tensor) -> Tensor:
        outputs = []
        for head, part in enumerate(tokens.chunk(HEADS, dim=-1)):
            q, k, v = (
                self.queries[head](part),
                self.keys[head](part),
                self.values[head](part),
            )
            weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
            outputs.append(weights @ v)
        return torch.cat(outputs, dim=-1)


class NotebookViT(nn.Module):
    """(B, 1, 28, 28) -> "probabilities" (B, 10). 4,990 registered parameters."""

    def __init__(self) -> None:
        super().__init__()
        tokens = GRID * GRID + 1
        self.linear = nn.Linear(SIDE * SIDE // GRID**2, WIDTH)
        # Mistake: `rand` makes all numbers positive, with a mean of 0.5.
        self.class_token = nn.Parameter(torch.rand(1, WIDTH))
        # Mistake: LayerNorm over tokens and width together. Its 1,000 weights and biases each fix
        # the number of tokens to 50, and a change to one token changes all others.
        self.norm1 = nn.LayerNorm((tokens, WIDTH))
        self.norm2 = nn.LayerNorm((tokens, WIDTH))
        self.attention = NotebookAttention()
        # Mistake: an MLP of one layer; its output is never negative.
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        # Mistake: a softmax here and another one in the loss, which cannot fall below 1.461.
        # Mistake: no norm before the head.
        self.head = nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Softmax(dim=-1))
        self.register_buffer("positions", sincos_1d(tokens, WIDTH), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        # Mistake: width and height are swapped; with square images this has no effect.
        batch, channels, width, height = images.shape
        # Mistake: `reshape` makes strips of 16 consecutive pixels; none of the 49 is a patch.
        strips = images.reshape(batch, GRID**2, channels * width * height // GRID**2)
        tokens = self.linear(strips)
        tokens = torch.cat([self.class_token.expand(batch, 1, -1), tokens], dim=1)
        tokens = tokens + self.positions
        tokens = tokens + self.attention(self.norm1(tokens))
        tokens = tokens + self.mlp(self.norm2(tokens))
        return self.head(tokens[:, 0])


def loss_of(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy of probabilities, as if they were logits.

    Mistake: the mean over the batch is divided by the batch size once more. Adam hides it, because
    its steps do not depend on the scale of the gradient.
    """
    return F.cross_entropy(probabilities, labels) / len(labels)


def corrected() -> vitkit.ViT:
    """Create the closest model without the mistakes, with 3,210 parameters: square patches, heads
    with an output matrix, norms over the width, a norm before the head, and logits."""
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
    rate: float = RATE,
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Train with Adam, a batch size of 16 and no schedule.

    Args:
        model: trained in place.
        images: (N, 1, 28, 28) in [0, 1], not normalised otherwise.
        labels: class numbers (N,).
        loss: a function of the outputs and the labels.
        epochs: passes over the images.
        rate: the learning rate; the notebook's is 0.01.
        seed: determines the order of the images.

    Yields:
        After every epoch: its number, `train_loss` (the mean of `loss`) and the `seconds` so far.
    """
    # Only registered parameters are passed; the heads are not among them.
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    seconds = 0.0
    for epoch in range(epochs):
        start, total, seen = time.perf_counter(), 0.0, 0
        for indexes in _batches(len(images), seed, epoch):
            value = loss(model(images[indexes]), labels[indexes])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            total += value.item() * len(indexes)
            seen += len(indexes)
        seconds += time.perf_counter() - start
        yield {"epoch": epoch + 1, "train_loss": total / seen, "seconds": seconds}


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy.

    A mistake of the notebook is not repeated here: it evaluates without `eval()` and `no_grad()`.
    The first changes nothing in a model without dropout; the second costs memory and time.
    """
    with torch.no_grad():
        correct = sum(
            int((model(batch).argmax(-1) == truth).sum())
            for batch, truth in zip(images.split(1000), labels.split(1000), strict=True)
        )
    return correct / len(labels)


def _batches(count: int, seed: int, epoch: int) -> Iterator[Tensor]:
    order = torch.randperm(
        count, generator=torch.Generator().manual_seed(1000 * seed + epoch)
    )
    return iter(order.split(BATCH))

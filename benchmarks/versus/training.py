"""Training steps: forward, loss, backward, clipping, fused AdamW, zeroed gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from versus.child import Ready, Request
from versus.inference import BATCHES, library_model, probes, sample
from versus.machine import named
from vitkit.data.augmentation.pipeline import ModelInputs
from vitkit.data.loading.loader import Batch
from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.spec import RANDOM_RATES, ViTSpec
from vitkit.training.step import Objective, TrainingStep
from vitkit.weights.load import load

LEARNING_RATE = 1e-4
CLIP = 1.0
"""Largest norm of the gradient."""
Step = Callable[[Tensor, Tensor], float]
"""Images (B, C, H, W) and class numbers (B,) -> the loss; changes the weights."""


def build(request: Request) -> Ready:
    """Build the training step of a library; nothing is dropped at random.

    Raises:
        VitkitError: the library does not compute this model, or refuses the file.
    """
    spec = ViTSpec.from_json(request["spec"])
    if request["kind"] == "engine":
        # a checkpoint keeps the rates that it was trained with, and no other format does
        own = load(request["own"]).model
        model = ViT(own.spec.replace(**dict.fromkeys(RANDOM_RATES, 0.0)))
        model.load_state_dict(own.state_dict())
        version = named("torch")
        step = _own_step(model, request)
    else:
        version, model = library_model(request, request["source"])
        step = _plain_step(model, request)
    with torch.no_grad():
        logits = model.eval()(probes(spec)).float()
    model.train()
    loss = step(*_batch(spec, request["batch_size"], 0))

    def fit(count: int) -> Callable[[int], object]:
        batches = [_batch(spec, count, seed) for seed in range(BATCHES)]
        return lambda number: step(*batches[number % BATCHES])

    return Ready(version, fit, logits, loss)


def class_labels(count: int, classes: int, *, seed: int = 0) -> Tensor:
    """Return random class numbers (B,), the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(1, classes), (count,), generator=generator)


def _batch(spec: ViTSpec, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (B, C, H, W) and class numbers (B,) for a step."""
    return sample(spec, count, seed), class_labels(count, spec.num_classes, seed=seed)


def _plain_step(model: nn.Module, request: Request) -> Step:
    """Return the step of another library's model, as its users write it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    run: Callable[[Tensor], Tensor] = torch.compile(model) if request["compiled"] else model

    def step(images: Tensor, labels: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=request["precision"] == "bfloat16"):
            output = run(images)
        loss = F.cross_entropy(output.float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _own_step(model: ViT, request: Request) -> Step:
    """Return vitkit's `TrainingStep`, with the attention kernel that a run chooses."""
    half = request["precision"] == "bfloat16"
    if half:
        use_attention(model, "plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    objective = Objective(
        model, F.cross_entropy, "bfloat16" if half else "off", torch.device("cpu")
    )
    given: list[ModelInputs] = []
    own = TrainingStep(
        objective, optimizer, lambda batch, step, part: given[-1], clip=CLIP,
        compile=request["compiled"],
    )  # fmt: skip

    def step(images: Tensor, labels: Tensor) -> float:
        given[:] = [ModelInputs(images, labels)]
        pixels = torch.zeros(len(labels), 1, 1, 3, dtype=torch.uint8)  # not looked at
        batch = Batch(pixels, labels, torch.arange(len(labels)), 0, torch.zeros_like(labels))
        return own(batch, 0).loss

    return step

"""Training steps of the contenders: forward, loss, backward, clipping, AdamW, zeroed gradients.

Runs in the process of one contender.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.benchmarking.contender_process.forward_passes import Task, library_model
from vitkit.benchmarking.inputs import class_labels
from vitkit.benchmarking.machine import installed_versions
from vitkit.data.augmentation.model_inputs import ModelInputs
from vitkit.data.loading.batch import Batch
from vitkit.engines.choosing.sample_images import sample_images
from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.spec import RANDOM_RATES
from vitkit.training.optimization.precision import Precision
from vitkit.training.step import Objective, TrainingStep
from vitkit.weights.load import load

LEARNING_RATE = 1e-4
CLIP = 1.0
"""Largest norm of the gradient."""
CPU = torch.device("cpu")


class TrainedModel(NamedTuple):
    """A model that is ready to be trained.

    Attributes:
        library: with its version.
        logits: images (B, C, H, W) -> logits (B, K), in evaluation mode, before the first step.
        step: images (B, C, H, W) and class numbers (B,) -> the loss; changes the weights.
    """

    library: str
    logits: Callable[[Tensor], Tensor]
    step: Callable[[Tensor, Tensor], float]


def make_trained_model(task: Task) -> TrainedModel:
    """Build the training step of a contender; AdamW is fused, and nothing is dropped at random.

    Raises:
        SettingError: the library does not compute this model.
        CheckpointError: the library refuses the file.
    """
    if task.kind == "engine":
        return _own(task)
    library, model, read = library_model(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    run: Callable[[Tensor], Any] = torch.compile(model) if task.compiled else model

    def logits(images: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            found: Tensor = read(model(images))
        model.train()
        return found

    def step(images: Tensor, labels: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bfloat16"):
            output = read(run(images))
        loss = F.cross_entropy(output.float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return TrainedModel(library, logits, step)


def _own(task: Task) -> TrainedModel:
    """Build vitkit's `TrainingStep`, with the attention kernel that a run chooses."""
    model = _without_dropout(load(task.own).model)
    precision: Precision = "off"
    if task.precision == "bfloat16":
        precision = "bfloat16"
        use_attention(model, "plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    objective = Objective(model, F.cross_entropy, precision, CPU)
    given: list[ModelInputs] = []
    training_step = TrainingStep(
        objective, optimizer, lambda batch, step, part: given[-1], clip=CLIP, compile=task.compiled
    )

    def logits(images: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            found: Tensor = model(images)
        model.train()
        return found

    def step(images: Tensor, labels: Tensor) -> float:
        given[:] = [ModelInputs(images, labels)]
        return training_step(_pixels_of(labels), 0).loss

    torch_version = installed_versions(["torch"])["torch"]
    return TrainedModel(f"torch {torch_version}", logits, step)


def _without_dropout(model: ViT) -> ViT:
    """Return a model with the same weights whose steps are those of the other libraries' models.

    A checkpoint keeps the rates that it was trained with, and no other format does.
    """
    same = ViT(model.spec.replace(**dict.fromkeys(RANDOM_RATES, 0.0)))
    same.load_state_dict(model.state_dict())
    return same


def _pixels_of(labels: Tensor) -> Batch:
    """Return a batch with these labels; its pixels are not looked at."""
    pixels = torch.zeros(len(labels), 1, 1, 3, dtype=torch.uint8)
    return Batch(pixels, labels, torch.arange(len(labels)), 0, torch.zeros_like(labels))


def training_batch(task: Task, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (B, C, H, W) and class numbers (B,) for a step."""
    spec = task.spec
    images = sample_images(count, spec.in_channels, spec.image_size, seed=seed)
    return images, class_labels(count, spec.num_classes, seed=seed)

"""Evaluation of a model on a split, against a count by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitkit
from vitkit import CheckpointError, DataError
from vitkit.data.datasets.dataset import ArraySplit
from vitkit.evaluation.loop import evaluate_model


def test_evaluation_against_a_count_by_hand():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 7, 101)
    images = np.zeros((101, 4, 4, 1), np.uint8)
    images[:, 0, 0, 0] = np.arange(101)
    table = torch.randn(101, 7, generator=torch.Generator().manual_seed(1))
    identity = vitkit.Preprocess(image_size=4, mean=(0.0,), std=(1.0,), fit="squash")

    def forward(batch: torch.Tensor) -> torch.Tensor:
        return table[(batch[:, 0, 0, 0] * 255).round().long()]

    split = ArraySplit(images, labels, "x")
    found = evaluate_model(forward, split, identity, num_classes=7, batch_size=16)
    best = table.argsort(dim=1, descending=True).numpy()
    assert found["top1"] == pytest.approx((best[:, 0] == labels).mean())
    assert found["top5"] == pytest.approx((best[:, :5] == labels[:, None]).any(1).mean())
    losses = -table.log_softmax(1).numpy()[np.arange(101), labels]
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert found["images"] == 101


def test_a_model_whose_logits_are_not_finite_is_refused():
    model = vitkit.create_model("vit_tiny_patch16_224", num_classes=10, in_channels=1,
                                image_size=8, patch_size=4, depth=1)  # fmt: skip
    model.head.bias.data[3] = torch.nan
    pixels = vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.5,))
    checkpoint = vitkit.Checkpoint(model, pixels, tuple("0123456789"))
    with pytest.raises(CheckpointError, match=r"NaN or infinity for 359 of 359 images, so they"):
        vitkit.evaluate(checkpoint, "digits", device="cpu")


def test_with_two_classes_there_is_no_top_k():
    split = ArraySplit(np.zeros((3, 4, 4, 1), np.uint8), np.array([0, 1, 0]), "x")
    grey = vitkit.Preprocess(image_size=4, mean=(0.0,), std=(1.0,), fit="squash")
    found = evaluate_model(lambda x: x.new_zeros(len(x), 2), split, grey, num_classes=2)
    assert set(found) == {"top1", "loss", "balanced_accuracy", "brier", "ece", "images"}
    with pytest.raises(DataError, match="the split has no images"):
        evaluate_model(lambda x: x, split.subset(np.array([], int)), grey, num_classes=2)

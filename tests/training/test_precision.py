"""Precision and attention kernel, chosen by processor, model and batch."""

from __future__ import annotations

import pytest
import torch

import vitkit
from vitkit.training.optimization.precision import choose_kernel, choose_precision

AMD, INTEL, AMX = (
    {"cpu_name": "AMD EPYC", "avx512_bf16": True, "amx_bf16": False},
    {"cpu_name": "Intel(R) Xeon(R)", "avx512_bf16": True, "amx_bf16": False},
    {"cpu_name": "Intel(R) Xeon(R)", "avx512_bf16": True, "amx_bf16": True},
)


@pytest.mark.parametrize(
    ("features", "batch_size", "precision"),
    [(AMD, 64, "bfloat16"), (AMX, 64, "bfloat16"), (AMD, 2, "off"), (INTEL, 64, "off"),
     ({}, 64, "off")],
)  # fmt: skip
def test_precision_follows_the_processor_the_model_and_the_batch(
    monkeypatch, features, batch_size, precision
):
    """A step of 64 images has 1.3e9 operations here, a step of 2 images 4e7."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    cpu, model = torch.device("cpu"), vitkit.create_model(
        "vit_tiny_patch16_224", image_size=8, patch_size=2, width=64, depth=4, num_heads=4,
        mlp_width=256, num_classes=10,
    )  # fmt: skip
    chosen, reason = choose_precision(model, batch_size, cpu)
    assert chosen == precision
    assert "bfloat16" in reason
    if batch_size == 2:
        assert "a step of 40 million operations is too small" in reason
    assert choose_kernel(model, chosen, cpu) == ("fused" if precision == "off" else "plain")


def test_long_sequences_keep_the_fused_kernel():
    model = vitkit.create_model("vit_tiny_patch16_224", image_size=528, depth=1, num_classes=3)
    assert choose_kernel(model, "bfloat16", torch.device("cpu")) == "fused"

"""The public names, that importing is silent and light, and that the floors hold."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import vitkit

PUBLIC = [
    "MLP",
    "ConversionReport",
    "CrossAttention",
    "DistillWrapper",
    "Encoder",
    "EncoderBlock",
    "Inspection",
    "MultiHeadSelfAttention",
    "PatchEmbedding",
    "Prediction",
    "Predictor",
    "Preprocess",
    "Record",
    "Transformer",
    "ViT",
    "ViTSpec",
    "VitkitError",
    "adapt",
    "check",
    "checkpoint_gradients",
    "compare",
    "convert",
    "create_model",
    "embed",
    "evaluate",
    "explain",
    "formats",
    "freeze",
    "inspect",
    "list_models",
    "load",
    "parameter_groups",
    "resized",
    "save",
    "scaled_dot_product_attention",
    "summary",
    "train",
]


def test_the_public_names_are_these():
    assert vitkit.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(vitkit))
    for name in PUBLIC:
        assert getattr(vitkit, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = vitkit.trian


def test_no_submodule_hides_a_public_function():
    """Importing `vitkit.x` sets the attribute `x`: no room may bear a public function's name."""
    for module in pkgutil.walk_packages(vitkit.__path__, "vitkit."):
        importlib.import_module(module.name)
    for name in PUBLIC:
        assert callable(getattr(vitkit, name)), name


def in_child(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def test_importing_is_silent_and_brings_no_heavy_library():
    code = (
        "import sys, vitkit, vitkit.models.presets\n"
        "vitkit.load\n"
        "heavy = {'ignite', 'matplotlib', 'tensorboard', 'tyro', 'kornia', 'torchvision',\n"
        "         'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert in_child(code) == "[]\n"
    assert in_child("import sys, vitkit; print('torch' in sys.modules)") == "False\n"


def test_help_needs_no_torch():
    code = (
        "import sys; from vitkit.cli import run\n"
        "code = run(['--help']); print(code, 'torch' in sys.modules)"
    )
    assert in_child(code).endswith("0 False\n")

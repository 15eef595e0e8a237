"""The public names, that importing is silent and light, and that the floors hold."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys

import pytest

import vitkit
from vitkit.cli import VERBS

PUBLIC = [
    "MLP",
    "Animation",
    "Artefacts",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "ConversionReport",
    "CrossAttention",
    "DataError",
    "Dataset",
    "DeviceError",
    "DistillWrapper",
    "Encoder",
    "EncoderBlock",
    "Evaluation",
    "Explanation",
    "FeatureMaps",
    "Features",
    "ImageError",
    "Inspection",
    "Interrupted",
    "LearningCurves",
    "LoaderError",
    "MissingExtraError",
    "ModelExplanation",
    "MultiHeadSelfAttention",
    "NonFiniteError",
    "Objective",
    "OutputError",
    "PatchEmbedding",
    "Prediction",
    "Predictor",
    "Preprocess",
    "Record",
    "SettingError",
    "ShapeError",
    "SpecError",
    "TrainConfig",
    "TrainResult",
    "TrainSettings",
    "Trainer",
    "TrainingStep",
    "Transformer",
    "TruthReport",
    "TruthScore",
    "UserCodeError",
    "UserError",
    "ViT",
    "ViTSpec",
    "VitkitError",
    "adapt",
    "animate_explanation",
    "check",
    "checkpoint_gradients",
    "compare",
    "convert",
    "create_model",
    "embed",
    "evaluate",
    "explain",
    "explain_model",
    "find_artefacts",
    "find_images",
    "find_register_neurons",
    "formats",
    "freeze",
    "inspect",
    "list_models",
    "load",
    "measure_registers",
    "open_dataset",
    "parameter_groups",
    "plot_attention",
    "plot_attention_sheet",
    "plot_explanations",
    "report",
    "resized",
    "save",
    "scaled_dot_product_attention",
    "show_batch",
    "summary",
    "test_time_registers",
    "train",
    "training_transform",
    "truth_report",
]


def test_the_public_names_are_these():
    assert vitkit.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(vitkit))
    for name in PUBLIC:
        assert getattr(vitkit, name).__doc__, name
    assert len(dir(vitkit)) == len(set(dir(vitkit)))
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
        "         'huggingface_hub', 'torch._dynamo'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert in_child(code) == "[]\n"
    assert in_child("import sys, vitkit; print('torch' in sys.modules)") == "False\n"


def imported(arguments: list[str], *modules: str) -> tuple[int, list[str]]:
    """Run one command in a process of its own; return its exit code and which modules it has."""
    code = (
        "import json, sys; from vitkit.cli import run\n"
        f"try: code = run({arguments!r})\n"
        "except SystemExit as end: code = end.code\n"  # --help ends so
        f"print('\\n' + json.dumps([code, sorted({set(modules)!r} & set(sys.modules))]))"
    )
    (line,) = (line for line in in_child(code).splitlines() if line.startswith("["))
    exit_code, names = json.loads(line)
    return exit_code, names


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], 0),
        (["models"], 0),
        (["models", "vit_tiny*", "--pretrained"], 0),
        (["models", "no-such-model"], 2),
        (["no-such-verb"], 2),
        (["predict"], 2),
        (["predict", "model.safetensors", "no-such.png"], 2),
        (["embed", "model.safetensors", "no-such.png", "--out", "f.npz"], 2),
        (["check", "no-such-folder"], 2),
        (["summary", "no-such-model"], 2),
        (["train", "digits", "--epochs", "0"], 2),
        (["train", "digits", "--learning-rate", "1"], 2),
        (["help"], 0),
        (["completion", "bash"], 0),
        (["eval", "model.safetensors"], 2),
        (["explain", "model.safetensors", "no-such.png"], 2),
        (["convert", "model.safetensors", "out", "--to", "tim"], 2),
        *[([verb, "--help"], 0) for verb in VERBS],
    ],
)
def test_what_needs_no_tensor_needs_no_torch(arguments, expected):
    assert imported(arguments, "torch") == (expected, [])


@pytest.mark.parametrize("verb", ["predict", "embed", "explain", "eval", "inspect", "convert"])
def test_an_error_of_the_user_waits_for_no_library_that_it_does_not_need(verb):
    arguments = {
        "embed": ["--out", "features.npz"],
        "convert": ["--to", "timm"],
        "inspect": [],
    }.get(verb, [])
    operand = {"inspect": [], "eval": ["digits"], "convert": ["out"]}.get(verb, [__file__])
    heavy = ("torch._dynamo", "ignite", "kornia", "matplotlib", "tensorboard", "torchvision")
    command = [verb, "no-such.safetensors", *operand, *arguments]
    assert imported(command, *heavy) == (2, [])


def test_a_wrong_folder_of_images_does_not_wait_for_the_training_loop():
    heavy = ("torch._dynamo", "ignite", "kornia", "matplotlib", "torchvision")
    assert imported(["train", "no-such-folder"], *heavy) == (2, [])

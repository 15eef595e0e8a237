"""Checkpoints to start from, and short runs on the embedded digits."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from training.tiny_runs import trained

import vitkit
from vitkit import Callback, Checkpoint

SPEC = {"image_size": 8, "patch_size": 4, "in_channels": 1, "num_classes": 10, "width": 16,
        "depth": 2, "num_heads": 2, "mlp_width": 32,
        "initialisation": "xavier_uniform"}  # fmt: skip
SHORT = {
    "epochs": 2, "batch_size": 256, "warmup_epochs": 0.5, "amp": "off", "quiet": True, "shift": 1,
    "device": "cpu", "threads": 1, "log_examples": False, "log_histograms": False,
    "plots": False, "report": False,
}  # fmt: skip
"""Five steps an epoch."""
DIGITS = tuple("0123456789")


def a_checkpoint(
    place: Path, classes: Sequence[str] = (), seed: int = 7, mean: float = 0.3, **fields: object
) -> Checkpoint:
    """A file of a small model with untrained weights."""
    torch.manual_seed(seed)
    model = vitkit.ViT(vitkit.ViTSpec(**SPEC | fields))
    channels = model.spec.in_channels
    preprocess = vitkit.Preprocess(
        image_size=model.spec.image_size, mean=(mean,) * channels, std=(0.25,) * channels,
        interpolation="bilinear", fit="squash",
    )  # fmt: skip
    return vitkit.load(vitkit.save(place, model, preprocess=preprocess, classes=classes))


def train(output: Path, callback: Callable[[], Callback] | None = None, **settings: object):
    if "resume" in settings:
        return vitkit.train(**settings)
    return trained({"data": "digits", "output": str(output)} | SHORT | settings, callback)


def only_begun(output: Path, **settings: object) -> Checkpoint:
    """What a run starts from, as it leaves it after a step that is too small to matter."""
    run = train(output, max_steps=1, lr=1e-12, min_lr=0.0, weight_decay=0.0, **settings)
    return vitkit.load(run.last)


def log_of(output: Path) -> str:
    return (output / "train.log").read_text()


def bits(path: Path) -> str:
    """A hash over the tensors of a checkpoint."""
    total = hashlib.sha256()
    for name, value in sorted(vitkit.load(path).model.state_dict().items()):
        total.update(name.encode() + value.numpy().tobytes())
    return total.hexdigest()

"""Recipes: functions that give the settings for a purpose, each headed by what it is worth.

A recipe sets what differs from the defaults; YAML and flags override it. Numbers come from
`docs/benchmarks.md`, with the command and the spread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitkit.errors import SettingError, did_you_mean
from vitkit.training.config import Settings, read_yaml

NO_PICTURE_CHANGES: Settings = {"flip": 0.0, "shift": 0, "crop_scale": 1.0, "fit": "squash"}


def digits() -> Settings:
    """A 0.1 M-parameter ViT on the embedded 8 x 8 digits, in well under a minute on two cores.

    Command: `vitkit train digits --recipe digits`
    """
    return NO_PICTURE_CHANGES | {
        "model": "vit_tiny_patch16_224",
        "spec": {
            "image_size": 8,
            "patch_size": 2,
            "in_channels": 1,
            "width": 64,
            "depth": 4,
            "num_heads": 4,
            "mlp_width": 128,
            "stem": "linear",
            "class_token": True,
        },
        "epochs": 60,
        "batch_size": 64,
        "lr": 2e-3,
        "beta2": 0.95,
        "warmup_epochs": 5.0,
        "shift": 1,
    }


def fashion_mnist() -> Settings:
    """A 0.2 M-parameter ViT on Fashion-MNIST, ten minutes on two cores.

    Command: `vitkit train fashion-mnist --recipe fashion-mnist`
    """
    return NO_PICTURE_CHANGES | {
        "model": "vit_tiny_patch16_224",
        "spec": {
            "image_size": 28,
            "patch_size": 7,
            "in_channels": 1,
            "width": 64,
            "depth": 4,
            "num_heads": 4,
            "mlp_width": 256,
            "stem": "linear",
            "class_token": False,
            "pooling": "mean",
        },
        "epochs": 30,
        "batch_size": 256,
        "lr": 2e-3,
        "beta2": 0.95,
        "warmup_epochs": 2.0,
        "flip": 0.5,
        "shift": 2,
        "mean": (0.2860,),
        "std": (0.3530,),
    }


RECIPES: dict[str, Callable[[], Settings]] = {"digits": digits, "fashion-mnist": fashion_mnist}


def recipe_settings(name: str | None) -> Settings:
    """The settings of a recipe by name, or of a YAML file by path; none for `None`.

    Raises:
        SettingError: neither a recipe nor a YAML file, or a YAML file that cannot be used.
    """
    if name is None:
        return {}
    if name in RECIPES:
        return RECIPES[name]()
    if Path(name).suffix in (".yaml", ".yml"):
        return read_yaml(name)
    raise SettingError(
        f"there is no recipe {name!r}{did_you_mean(name, RECIPES)}; "
        f"recipes are {', '.join(RECIPES)}, or give a .yaml file"
    )

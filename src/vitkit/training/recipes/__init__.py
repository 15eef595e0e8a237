"""Recipes: functions that give the settings for a purpose, each headed by what it is worth.

A recipe sets what differs from the defaults; YAML and flags override it. What was measured here
with several seeds has a receipt (`training/recipes/reference.py`); the others quote their paper, or
the one run there was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitkit.errors import SettingError, did_you_mean
from vitkit.training.config.train_config import Settings, layered, read_yaml
from vitkit.training.recipes.imagenet import (
    augreg,
    deit,
    deit3,
    plain_vit_s16_90ep,
    vit_paper,
    vit_paper_decay01,
)
from vitkit.training.recipes.small import cifar10, cifar10_small, digits, fashion_mnist, mnist
from vitkit.training.recipes.transfer import distil, finetune, finetune_sgd, linear_probe

RECIPES: dict[str, Callable[[], Settings]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar10-small": cifar10_small,
    "vit-paper": vit_paper,
    "vit-paper-decay01": vit_paper_decay01,
    "deit": deit,
    "deit3": deit3,
    "plain-vit-s16-90ep": plain_vit_s16_90ep,
    "augreg": augreg,
    "finetune": finetune,
    "finetune-sgd": finetune_sgd,
    "linear-probe": linear_probe,
    "distil": distil,
}


def recipe_settings(name: str | None) -> Settings:
    """The settings of a recipe by name, or of a YAML file by path; none for `None`.

    A YAML file may name the recipe that it changes: `recipe: digits`.

    Raises:
        SettingError: neither a recipe nor a YAML file, or a YAML file that cannot be used.
    """
    if name is None:
        return {}
    if Path(name).suffix in (".yaml", ".yml"):
        settings = read_yaml(name)
        base = settings.pop("recipe", None)
        if base is not None and base not in list(RECIPES):
            raise SettingError(
                f"{name}: its recipe {base!r} is none{did_you_mean(str(base), RECIPES)}; there are "
                f"{', '.join(RECIPES)}"
            )
        return layered(_named(base), settings)
    return _named(name)


def underlying(name: str | None) -> str | None:
    """The recipe's name, or that of the one a YAML file changes; `None` where it can't be known."""
    if name is None or Path(name).suffix not in (".yaml", ".yml"):
        return name
    base = read_yaml(name).get("recipe") if Path(name).is_file() else None
    return base if isinstance(base, str) else None


def _named(name: str | None) -> Settings:
    if name is None:
        return {}
    if name in RECIPES:
        return RECIPES[name]()
    raise SettingError(
        f"there is no recipe {name!r}{did_you_mean(name, RECIPES)}; "
        f"recipes are {', '.join(RECIPES)}, or give a .yaml file"
    )

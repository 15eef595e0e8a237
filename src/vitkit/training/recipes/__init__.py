"""Recipes: functions that return settings for one purpose, with the score to expect.

A recipe sets what differs from the defaults; YAML and flags override it. Its docstring has the
score to expect, measured here or quoted from its paper.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitkit.errors import SettingError
from vitkit.messages import did_you_mean, nearest_parent
from vitkit.training.config.meaning import Settings
from vitkit.training.config.merging import layered, read_yaml
from vitkit.training.recipes.presets import (
    augreg,
    cifar10,
    cifar10_small,
    deit,
    deit3,
    digits,
    distil,
    fashion_mnist,
    finetune,
    finetune_sgd,
    linear_probe,
    mnist,
    plain_vit_s16_90ep,
    vit_paper,
    vit_paper_decay01,
)

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
    """Return the settings of a recipe by name, or of a YAML file by path; none for `None`.

    A YAML file may name the recipe that it changes: `recipe: digits`.

    Args:
        name: one of `RECIPES`, or the path of a file that ends in .yaml or .yml.

    Raises:
        SettingError: neither a recipe nor a YAML file, or a YAML file that cannot be used.
    """
    if name is None:
        return {}
    if not _is_yaml(name):
        return _by_name(name)
    if not Path(name).exists():
        raise SettingError(f"--recipe {name}: no such file; {nearest_parent(Path(name))}")
    settings = read_yaml(name)
    # in a YAML file, the recipe that the file changes
    base = settings.pop("recipe", None)
    if base is None:
        return layered(settings)
    if base not in list(RECIPES):  # a list: YAML may give a value without a hash
        raise SettingError(
            f"{name}: its recipe {base!r} does not exist{did_you_mean(str(base), RECIPES)}; "
            f"recipes are {', '.join(RECIPES)}"
        )
    return layered(_by_name(base), settings)


def _is_yaml(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def _by_name(name: str) -> Settings:
    if name in RECIPES:
        return RECIPES[name]()
    raise SettingError(
        f"there is no recipe {name!r}{did_you_mean(name, RECIPES)}; recipes are "
        f"{', '.join(RECIPES)}; or pass a .yaml file"
    )

"""Recipes: settings for one purpose, with the score to expect: the tables of `recipes.toml`.

A recipe sets what differs from the defaults; YAML and flags override it. Its text has the score to
expect, measured here or quoted from its paper.
"""

import copy
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from vitkit import errors, messages
from vitkit.training.config import meaning, merging

RECIPES: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files("vitkit.training.recipes").joinpath("recipes.toml").read_text(encoding="utf-8")
)
"""Name -> `about`, the recipe that it changes (`from`), settings that are None, and settings."""


def recipe(name: str) -> meaning.Settings:
    """Return the settings of a recipe by its name."""
    table = copy.deepcopy(RECIPES[name])
    del table["about"]
    base = recipe(table.pop("from")) if "from" in table else {}
    return base | dict.fromkeys(table.pop("unset", ())) | table


def recipe_settings(name: str | None) -> meaning.Settings:
    """Return the settings of a recipe by name, or of a YAML file by path; none for `None`.

    A YAML file may name the recipe that it changes: `recipe: digits`.

    Args:
        name: one of `RECIPES`, or the path of a file that ends in .yaml or .yml.

    Raises:
        SettingError: neither a recipe nor a YAML file, or a YAML file that cannot be used.
    """
    if name is None:
        return {}
    if Path(name).suffix not in (".yaml", ".yml"):
        return _by_name(name)
    if not Path(name).exists():
        raise errors.SettingError(
            f"--recipe {name}: no such file; {messages.nearest_parent(Path(name))}"
        )
    settings = merging.read_yaml(name)
    # in a YAML file, the recipe that the file changes
    base = settings.pop("recipe", None)
    if base is None:
        return merging.layered(settings)
    return merging.layered(_by_name(str(base), f"{name}: "), settings)


def _by_name(name: str, where: str = "") -> meaning.Settings:
    if name in RECIPES:
        return recipe(name)
    raise errors.SettingError(
        f"{where}there is no recipe {name!r}{messages.did_you_mean(name, RECIPES)}; recipes are "
        f"{', '.join(RECIPES)}; or pass a .yaml file"
    )

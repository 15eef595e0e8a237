"""Merging of settings from several sources, their YAML, and their other names."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Any, get_type_hints

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from vitkit import errors, frozen, messages
from vitkit.io.atomic import write_bytes
from vitkit.training.config.meaning import Settings
from vitkit.training.config.train_config import TrainConfig

SYNONYMS = (("img_size", "progressive", "spec.image_size"), ("drop_path", "spec.drop_path"))
"""Groups of names that set the same thing."""
MODEL_DEFAULT = "the model's own"
"""Stands for the value of a spec field that no setting names."""


def layered(*layers: Mapping[str, Any]) -> Settings:
    """Merge settings, later ones over earlier ones; `spec` is merged field by field.

    A `spec` belongs to the `model` it was written for: a later layer that names another model drops
    the earlier layers' `spec`. Of synonyms, such as `img_size` and `spec.image_size`, the latest
    layer that has any of them decides; in one layer they must agree.

    Raises:
        SettingError: a key that is no setting (the nearest one is named), or a spec that is none.
    """
    merged: Settings = {"model": TrainConfig.model, "spec": {}}
    for layer in layers:
        check_names(layer)
        spec = layer.get("spec") or {}
        if not isinstance(spec, Mapping):
            raise errors.SettingError(
                f"spec = {spec!r}: expected fields of ViTSpec, such as width: 64"
            )
        # a later synonym replaces an earlier one
        for synonyms in SYNONYMS:
            if any(_is_set(layer, name) for name in synonyms):
                for name in synonyms:
                    _remove(merged, name)
        # the fields of a spec belong to one model
        if layer.get("model", merged["model"]) == merged["model"]:
            spec = {**merged["spec"], **spec}
        merged |= {**layer, "spec": dict(spec)}
    return merged


def check_names(keys: Iterable[str], where: str = "") -> None:
    """Raise `SettingError` for the first key that is no setting.

    Args:
        keys: names of settings.
        where: begins the message, such as `recipe.yaml:2: `.
    """
    known = frozen.field_names(TrainConfig)
    for key in keys:
        if key in known:
            continue
        hint = hint_on(key, known, _second_names(TrainConfig))
        raise errors.SettingError(f"{where}there is no setting {key!r}{hint}")


def _is_set(layer: Mapping[str, Any], name: str) -> bool:
    """Return True if a layer has a value for `name`, or for `field` where it is `spec.field`."""
    owner, _, field = name.rpartition(".")
    values = (layer.get(owner) or {}) if owner else layer
    return values.get(field) not in (None, (), [])


def _remove(merged: Settings, name: str) -> None:
    owner, _, field = name.rpartition(".")
    if owner:
        # a copy: the dictionary may belong to a layer
        merged[owner] = {key: value for key, value in merged[owner].items() if key != field}
    else:
        merged.pop(field, None)


def with_flat_spec(settings: Mapping[str, Any]) -> Settings:
    """Return the settings with each field of the spec as an entry `spec.NAME`."""
    flat = {f"spec.{name}": value for name, value in settings.get("spec", {}).items()}
    for name, value in settings.items():
        if name != "spec":
            flat[name] = value
    return flat


# `config.yaml` of a run, written and read; a user's own recipes are YAML of the same kind.

GONE: dict[str, tuple[Any, ...]] = {
    "distill_views": (0,),
    "find_batch_size": (False,),
    "find_lr": (False,),
    "grad_checkpointing": ("norm_and_activation",),  # a run without it makes the same bits
    "save_augmented_grid": (False, True),
}
"""Settings of earlier versions -> the values with which a file may still have them."""


def read_yaml(path: str | Path) -> Settings:
    """Read the settings in a YAML file, and check each of them.

    Raises:
        SettingError: no such file, no valid YAML (duplicate keys and tags are not), an unknown key,
            a value out of range; with the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.SettingError(f"{path}: cannot be read: {error}") from None
    content = _parse(path, text)
    if not isinstance(content, dict):
        raise errors.SettingError(f"{path}: expected `setting: value` lines, such as `lr: 1e-3`")
    settings = {str(key): value for key, value in content.items()}
    for name, values in GONE.items():
        if name in settings and settings[name] in values:
            del settings[name]
    for key in settings:
        # one by one, so that the message has the line
        check_names([key], where=f"{path}{_line(text, key)}: ")
    try:
        TrainConfig(**{"data": ""} | settings)
    except errors.SettingError as error:
        line = _line(text, error.wrong.field) if error.wrong else ""
        raise errors.SettingError(f"{path}{line}: {error}") from None
    return settings


def write_yaml(path: Path, settings: Mapping[str, Any]) -> None:
    """Write settings as a YAML file.

    Raises:
        OutputError: the file cannot be written.
    """
    write_bytes(path, to_yaml(settings).encode())


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Return the settings as YAML text, in their own order; `read_yaml` gives them back."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    # in the order of the sections, not of the alphabet
    yaml.sort_base_mapping_type_on_output = False
    text = StringIO()
    yaml.dump(dict(settings), text)
    return text.getvalue()


def _parse(path: Path, text: str) -> Any:
    """Return the content of a YAML text; raise `SettingError` with the line where it is not one."""
    try:
        # pure: YAML 1.2, which reads 1e-3 as a number
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise errors.SettingError(f"{path}{line}: not valid YAML: {problem}") from None


def _line(text: str, key: str) -> str:
    """Return `:` and the line number of a key, or "" if the key is not found in the text."""
    for number, row in enumerate(text.splitlines(), 1):
        if row.startswith(f"{key}:"):
            return f":{number}"
    return ""


# Other names of a setting: names in other programs, second names of a flag, camel case.


@cache
def programs() -> dict[str, dict[str, str]]:
    """Return program -> its words -> settings of vitkit, or advice: `foreign_names.toml`."""
    file = resources.files("vitkit.training.config").joinpath("foreign_names.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def letters(name: str) -> str:
    """Return the letters and digits of a name, in small letters."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _meaning_of(word: str) -> str | None:
    """Return what another program's name stands for in vitkit; None if it is unknown."""
    for words in programs().values():
        for foreign, meaning in words.items():
            if letters(foreign) == letters(word):
                return meaning
    return None


def hint_on(
    word: str, known: Iterable[str], second: Mapping[str, str], *, as_flags: bool = False
) -> str:
    """Return the end of a message on an unknown name: what it is called in vitkit.

    >>> hint_on("learning_rate", ["lr"], {}), hint_on("--batchSize", ["batch_size"], {})
    ("; vitkit calls it 'lr'", "; vitkit calls it 'batch_size'")
    >>> hint_on("--lrr", ["lr"], {}, as_flags=True)
    " (did you mean '--lr'?)"

    Args:
        word: the name as typed.
        known: names that exist, with underscores; `spec` stands for all fields of the model.
        second: other names, as by `_second_names` -> the known one.
        as_flags: write names as flags.
    """
    known = list(known)
    # compared by letters: `--batchSize` is `batch_size`
    by_letters = {letters(name): name for name in known} | dict(second)
    meaning = by_letters.get(letters(word)) or _meaning_of(word)
    if meaning is not None and meaning.endswith("."):
        return f"; {meaning.rstrip('.')}"
    names = meaning.split() if meaning else []
    if names and all(name.partition(".")[0] in known for name in names):
        ours = [f"--{name.replace('_', '-')}" if as_flags else repr(name) for name in names]
        return f"; vitkit calls it {' and '.join(ours)}"
    if not as_flags:
        return messages.did_you_mean(word, known)
    # the quotes of `did_you_mean` enclose names without dashes
    near = messages.did_you_mean(word.lstrip("-"), [name.replace("_", "-") for name in known])
    return near.replace("mean '", "mean '--")


def _second_names(settings: type[Any]) -> dict[str, str]:
    """Return every second name of a flag, in small letters without dashes -> its setting."""
    hints = get_type_hints(settings, include_extras=True)
    by_alias = {}
    for name, hint in hints.items():
        for metadata in getattr(hint, "__metadata__", ()):
            for alias in getattr(metadata, "aliases", None) or ():
                by_alias[letters(alias)] = name
    return by_alias

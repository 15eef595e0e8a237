"""`config.yaml` of a run, written and read; a user's own recipes are YAML of the same kind."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from vitkit.errors import SettingError
from vitkit.io.atomic import write_bytes
from vitkit.training.config.field_types import Settings
from vitkit.training.config.merging import check_names
from vitkit.training.config.train_config import TrainConfig

GONE: Settings = {"distill_views": 0}
"""Settings of earlier versions -> the value with which a file may still have them."""


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
        raise SettingError(f"{path}: cannot be read: {error}") from None
    content = _parse(path, text)
    if not isinstance(content, dict):
        raise SettingError(f"{path}: expected `setting: value` lines, such as `lr: 1e-3`")
    settings = {str(key): value for key, value in content.items()}
    for name, default in GONE.items():
        if name in settings and settings[name] == default:
            del settings[name]
    for key in settings:
        # one by one, so that the message has the line
        check_names([key], where=f"{path}{_line(text, key)}: ")
    try:
        TrainConfig(**{"data": ""} | settings)
    except SettingError as error:
        line = _line(text, error.wrong.field) if error.wrong else ""
        raise SettingError(f"{path}{line}: {error}") from None
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
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = str(error.problem or error).splitlines()[0]
        raise SettingError(f"{path}{line}: not valid YAML: {problem}") from None
    except YAMLError as error:
        raise SettingError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None


def _line(text: str, key: str) -> str:
    """Return `:` and the line number of a key, or "" if the key is not found in the text."""
    for number, row in enumerate(text.splitlines(), 1):
        if row.startswith(f"{key}:"):
            return f":{number}"
    return ""

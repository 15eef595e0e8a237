"""Settings passed as Python objects, and the names that stand for them in config.yaml."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from vitkit.errors import SettingError
from vitkit.io.results import GIVEN, MEMORY_PREFIX, import_name, is_importable, names_an_object
from vitkit.training.config.meaning import Settings
from vitkit.training.config.train_config import TrainConfig

SINGLE = ("loss", "transform", "teacher")
"""Settings whose value may be a function or an object."""
LISTS = ("metrics", "callbacks")
"""Settings whose value may be a list of functions or objects."""


def with_names(settings: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Replace objects among the settings by their names.

    Args:
        settings: keywords of a call; paths become text.

    Returns:
        The settings as text and numbers; and by name the objects that no import would find again,
        such as a lambda, a function of a notebook or an instance of a class.

    Raises:
        SettingError: two different objects with one name.
    """
    objects: dict[str, Any] = {}

    def named(setting: str, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool | int | float | dict):
            raise SettingError(f"{setting} {value!r}: expected a function, an object or its name")
        if isinstance(value, Path):
            return str(value)
        return _register(value, objects)

    # other settings are numbers, text and paths, which config.yaml can hold
    texts: Settings = {}
    for name, value in settings.items():
        if name in SINGLE:
            texts[name] = named(name, value)
        elif name in LISTS:
            several = value if isinstance(value, list | tuple) else [value]
            if value is None:  # like an empty list
                several = ()
            texts[name] = [named(name, entry) for entry in several]
        else:
            texts[name] = str(value) if isinstance(value, Path) else value
    return texts, {name: thing for name, thing in objects.items() if not is_importable(thing)}


def _register(thing: Any, objects: dict[str, Any]) -> str:
    """Add an object under its name, which is numbered for further instances of one class."""
    name = first = import_name(thing)
    for number in count(2):
        if objects.setdefault(name, thing) is thing:
            break
        if not first.endswith("()"):
            raise SettingError(
                f"two objects have the name {name}; define them with def or class under names of "
                "their own"
            )
        name = f"{first}-{number}"
    return name


def _settings_where(config: TrainConfig, accept: Callable[[str], bool]) -> dict[str, str]:
    """Return the settings with a text that is accepted: setting -> its first such text."""
    found: dict[str, str] = {}
    values = config.to_json()
    for name in ("data", *SINGLE, *LISTS):
        texts = values[name] if name in LISTS else [values[name]]
        for text in texts:
            if isinstance(text, str) and accept(text):
                found.setdefault(name, text)
    return found


def refuse_missing(config: TrainConfig) -> None:
    """Refuse names of objects that the call did not pass, or that a resumed run needs again.

    Raises:
        SettingError: names all of them, and the call to make.
    """

    def is_missing(text: str) -> bool:
        return text not in GIVEN and (text.startswith(MEMORY_PREFIX) or names_an_object(text))

    # the address of data, the name of functions and objects: both from an earlier call
    missing = _settings_where(config, is_missing)
    if not missing:
        return
    objects = ", ".join(f"{name} {text}" for name, text in missing.items())
    message = (
        f"{objects}: no import finds an object of a script or a notebook; pass the object "
        f"itself: {_call(missing)}"
    )
    if config.resume is not None:
        message = (
            f"the run was started in Python with objects that are not stored: {objects}; pass the "
            f"same ones again: {_call(missing, f'resume={str(config.resume)!r}')}"
        )
    raise SettingError(message)


def how_to_resume(config: TrainConfig, root: Path) -> str:
    """Return the command that resumes a run, or the call in Python where objects were passed."""
    passed = _settings_where(config, GIVEN.__contains__)
    if not passed:
        return f"resume with: vitkit train --resume {shlex.quote(str(root))}"
    return f"resume with the same objects: {_call(passed, f'resume={str(root)!r}')}"


def _call(settings: Iterable[str], *keywords: str) -> str:
    """Return the text of a call of `vitkit.train` with objects for these settings."""
    objects = [f"{name}=..." for name in settings if name != "data"]
    return f"vitkit.train({', '.join(['data', *keywords, *objects])})"


def refuse_passed(config: TrainConfig) -> None:
    """Refuse objects that exist in this process only, if other processes are started.

    Raises:
        SettingError: names the setting and the object.
    """
    for name, text in _settings_where(config, GIVEN.__contains__).items():
        # `data` cannot be imported: only a script that every process runs has it
        mend = "define it at the top level of a module, or "
        if name == "data":
            mend = ""
        raise SettingError(
            f"devices {config.devices} starts processes of their own, and {name} {text} exists in "
            f"this process alone; {mend}start the script with torchrun --nproc-per-node "
            f"{config.devices}"
        )

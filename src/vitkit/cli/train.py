"""`vitkit train DATA`: every field of `TrainConfig` is a flag."""

from __future__ import annotations

import tyro

from vitkit.cli.fields import take_fields
from vitkit.errors import SettingError
from vitkit.training import session
from vitkit.training.config import Settings, TrainConfig, layered
from vitkit.training.recipes import recipe_settings

DESCRIPTION = """Train a ViT on your pictures.

DATA is a folder (train/<class>/*.jpg with val/ and test/, or <class>/*.jpg), or digits, mnist,
fashion-mnist. Order: defaults < --recipe < flags. Any field of the model: --spec.FIELD VALUE,
such as --spec.patch-size 4."""


def run(arguments: list[str]) -> None:
    """Read the settings in their order, then train."""
    rest, spec = take_fields(arguments)
    given = {name: _peek(rest, name) for name in ("recipe", "model", "resume", "output")}
    stored = session.resumed_settings(given["resume"], given["output"])
    named = bool(rest) and not rest[0].startswith("-")
    data, flags = (rest[0], rest[1:]) if named else (str(stored.get("data", "")), rest)
    if not data and not {"-h", "--help"} & set(rest):
        raise SettingError("DATA is missing; it comes first: vitkit train DATA [flags]")
    asked: Settings = {"data": data, "spec": spec}
    if given["model"] is not None:
        asked["model"] = given["model"]
    base = TrainConfig(**layered(stored, recipe_settings(given["recipe"]), asked))
    config = tyro.cli(
        TrainConfig, default=base, args=flags, prog="vitkit train DATA", description=DESCRIPTION
    )
    session.train(config)


def _peek(arguments: list[str], name: str) -> str | None:
    """The value of one flag, before the others are read."""
    flag = f"--{name}"
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
        if argument == flag and place + 1 < len(arguments):
            return arguments[place + 1]
    return None

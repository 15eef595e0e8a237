"""Other names of a setting: names in other programs, second names of a flag, camel case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from vitkit.messages import did_you_mean
from vitkit.training.config.foreign_names import letters, meaning_of


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
        second: other names, as by `second_names` -> the known one.
        as_flags: write names as flags.
    """
    known = list(known)
    # compared by letters: `--batchSize` is `batch_size`
    by_letters = {letters(name): name for name in known} | dict(second)
    meaning = by_letters.get(letters(word)) or meaning_of(word)
    if meaning is not None and meaning.endswith("."):
        return f"; {meaning.rstrip('.')}"
    names = meaning.split() if meaning else []
    if names and all(name.partition(".")[0] in known for name in names):
        ours = [f"--{name.replace('_', '-')}" if as_flags else repr(name) for name in names]
        return f"; vitkit calls it {' and '.join(ours)}"
    if not as_flags:
        return did_you_mean(word, known)
    # the quotes of `did_you_mean` enclose names without dashes
    near = did_you_mean(word.lstrip("-"), [name.replace("_", "-") for name in known])
    return near.replace("mean '", "mean '--")


def second_names(settings: type[Any]) -> dict[str, str]:
    """Return every second name of a flag, in small letters without dashes -> its setting."""
    hints = get_type_hints(settings, include_extras=True)
    by_alias = {}
    for name, hint in hints.items():
        for metadata in getattr(hint, "__metadata__", ()):
            for alias in getattr(metadata, "aliases", None) or ():
                by_alias[letters(alias)] = name
    return by_alias

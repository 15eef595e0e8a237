"""Command-line parser with one-line errors, and the flags that several verbs share."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from vitkit.cli.arguments import KINDS, Argument, Command, inverse
from vitkit.errors import SettingError, UserError
from vitkit.exporting.artefact import engine_refused, is_artefact, refuse_needless_trust
from vitkit.process import uncollected_imports
from vitkit.training.config.merging import hint_on, letters

if TYPE_CHECKING:
    from vitkit.engines.choose import EngineOptions
    from vitkit.prediction.image_list import ImageList
    from vitkit.prediction.predictor import Predictor
    from vitkit.weights.checkpoint import Checkpoint


# Command-line parser with one-line errors.


@dataclass
class Words:
    """The parsed arguments of a verb, as text.

    Attributes:
        positionals: values without a flag.
        flags: (name of the argument, its flag and values as typed), in their order.
        values: name of an argument with a flag -> its last values.
    """

    positionals: list[str] = field(default_factory=list)
    flags: list[tuple[str, list[str]]] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)

    def last(self, name: str) -> str | None:
        """Return the last value of a flag, "True" or "False" of a switch; None if not given."""
        return self.values[name][-1] if self.values.get(name) else None

    def flag_words(self, *without: str) -> list[str]:
        """Return all flags and their values, except those of some arguments."""
        return [word for name, words in self.flags if name not in without for word in words]

    @property
    def ordered(self) -> list[str]:
        """All words, the positional arguments first."""
        return [*self.positionals, *self.flag_words()]


HELP_ALL = "--help-all"
HELP = ("-h", "--help", HELP_ALL)


def wants_help(words: Sequence[str]) -> bool:
    """Return True if the help is asked for."""
    return not set(HELP).isdisjoint(words)


def read_words(command: Command, words: Sequence[str]) -> Words:
    """Parse the arguments of a verb: each flag with its values.

    Raises:
        SettingError: a flag that does not exist, a value that is missing, empty, or of another
            type, a positional argument that is missing or one too many.
    """
    read = read_flags(command, words)
    _check_positionals(command, read.positionals)
    for argument in command.arguments:
        if argument.flags and argument.required and argument.name not in read.values:
            message = f"{argument.label} is missing; expected: {command.usage}"
            if argument.choices:
                message += f"; {argument.metavar} is one of {', '.join(argument.choices)}"
            raise SettingError(message)
    return read


def read_flags(command: Command, words: Sequence[str]) -> Words:
    """Parse as `read_words` does, without checking the number of positional arguments."""
    by_flag = _flags(command)
    read = Words()
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not _is_flag(word):
            read.positionals.append(word)
            if not word.strip():
                number = len(read.positionals)
                raise SettingError(f"argument {number} is empty; expected: {command.usage}")
            continue
        typed, equals, value = _split(word, by_flag)
        found = _find(typed, by_flag)
        if found is None:
            raise SettingError(_no_such_flag(command, typed))
        values = [value] if equals else list(_values(found, remaining))
        if found.bare and not values:
            values = [found.bare]
        _check_values(found, typed, values, given=bool(equals))
        as_typed = [typed, *values]
        # the parser takes a value that begins with a dash for a flag
        if len(values) == 1 and values[0].startswith("-"):
            as_typed = [f"{typed}={values[0]}"]
        read.flags.append((found.name, as_typed))
        # A switch has no value: its form, --x or --no-x, decides.
        read.values[found.name] = values or [str(not typed.startswith(("--no-", "--no_")))]
    return read


def _flags(command: Command) -> dict[str, Argument]:
    """Return every flag with its argument, also those that turn a switch off."""
    by_flag = {}
    for argument in command.arguments:
        for flag in argument.flags:
            by_flag[flag] = argument
            if argument.is_switch and flag.startswith("--"):
                by_flag[inverse(flag)] = argument
    return by_flag


def _find(typed: str, by_flag: dict[str, Argument]) -> Argument | None:
    if "." in typed:  # --spec.patch-size
        return by_flag.get(typed.partition(".")[0] + ".")
    return by_flag.get("--" + typed[2:].replace("_", "-") if typed.startswith("--") else typed)


def _split(word: str, by_flag: dict[str, Argument]) -> tuple[str, str, str]:
    """Split `--lr=1` and `-cdigits` into flag, `=` and value; the last two may be empty."""
    typed, equals, value = word.partition("=")
    if typed not in by_flag and typed[:2] in by_flag:
        return typed[:2], "=", word[2:]
    return typed, equals, value


def _is_flag(word: str) -> bool:
    """Return True for a word that begins with a dash and is no number; "-" is standard input."""
    return bool(re.match(r"-[^\d.]|-\.\D", word))


def _values(found: Argument, remaining: list[str]) -> Iterator[str]:
    """Take the values of a flag from the words after it."""
    while not found.is_switch and remaining and not _is_flag(remaining[0]):
        yield remaining.pop(0)
        if not found.many:
            return


def _check_values(found: Argument, typed: str, values: list[str], *, given: bool) -> None:
    """Raise `SettingError` for values that a flag cannot have.

    Args:
        found: the flag's argument.
        typed: the flag as typed.
        values: its values.
        given: whether they were written behind `=`.
    """
    if found.is_switch:
        if given:
            raise SettingError(f"{typed} takes no value; leave out ={values[0]}")
        return
    if not values:
        raise SettingError(f"{typed} needs {_needed(found, typed)}")
    for value in values:
        if not value.strip():
            raise SettingError(f"{typed} is empty; pass a value, or leave it out")
        found.check(value, typed)
    if found.counts and len(values) not in found.counts:
        expected = " or ".join(map(str, found.counts))
        raise SettingError(
            f"{typed} {' '.join(values)}: expected {expected} values, got {len(values)}"
        )


def _needed(found: Argument, typed: str) -> str:
    """Describe the value that a flag needs."""
    if "." in typed:
        return f"a value, such as {typed} 4"
    if found.kind in (int, float):
        return KINDS[found.kind]
    return f"a value: {'|'.join(found.choices) or found.metavar}"


def _check_positionals(command: Command, values: list[str]) -> None:
    """Raise `SettingError` if a positional argument is missing, or one too many."""
    expected = command.positionals
    missing = [argument.metavar for argument in expected[len(values) :] if argument.required]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise SettingError(f"{' and '.join(missing)} {are} missing; expected: {command.usage}")
    for argument, value in zip(expected, values, strict=False):
        argument.check(value, argument.metavar)
    if len(values) > len(expected) and not any(argument.many for argument in expected):
        raise SettingError(
            f"{values[len(expected)]!r} is one argument too many; expected: {command.usage}"
        )


def _no_such_flag(command: Command, typed: str) -> str:
    """Return the message on a flag that does not exist, with the nearest one."""
    # Flags that every verb has, and that are no arguments of it.
    known = ["help", "help_all"]
    second: dict[str, str] = {}
    for argument in command.arguments:
        if not argument.flags:
            continue
        known.append(argument.name)
        second |= {letters(flag): argument.name for flag in argument.flags}
    hint = hint_on(typed, known, second, as_flags=True)
    if not hint.startswith(";"):  # no remedy was found
        hint += f"; `vitkit {command.verb} {HELP_ALL if command.common else '--help'}` lists all"
    return f"there is no flag {typed}{hint}"


# Fields of a model as flags, `--spec.patch-size 4`, and settings named as flags in messages.

SPEC = Argument(
    name="spec",
    flags=("--spec.",),
    metavar="VALUE",
    help="a field of the model that the file does not state, such as --spec.num-heads 6.",
)


def take_fields(arguments: list[str], group: str = "spec") -> tuple[list[str], dict[str, Any]]:
    """Split `--spec.patch-size 4` off the other arguments; values are parsed as YAML.

    Raises:
        SettingError: a field without a value, or with one that is not YAML.
    """
    rest: list[str] = []
    fields: dict[str, Any] = {}
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith(f"--{group}."):
            rest.append(argument)
            continue
        name, _, value = argument.removeprefix(f"--{group}.").partition("=")
        value = value or next(remaining, "")  # `--spec.depth=4` or `--spec.depth 4`
        if not value or value.startswith("--"):
            raise SettingError(f"{argument} needs a value, such as --{group}.patch-size 4")
        try:
            fields[name.replace("-", "_")] = YAML(typ="safe", pure=True).load(value)
        except (YAMLError, ValueError):  # such as a date that does not exist
            raise SettingError(
                f"--{group}.{name}: {value!r} cannot be read; expected a value such as 4 or [4, 8]"
            ) from None
    return rest, fields


@contextmanager
def as_flags(*fields: str, group: str = "") -> Iterator[None]:
    """Name a value that the block refuses by its flag: `--batch-size 0: must be ...`.

    Args:
        fields: those that are flags; values of others may come from a file.
        group: prefix of the flags, such as `spec.`.
    """
    try:
        yield
    except UserError as error:
        wrong = error.wrong
        if wrong is None or wrong.field not in fields:
            raise  # not about a value, or about a value from a file
        flag = f"--{group}{wrong.field.replace('_', '-')}"
        raise type(error)(f"{flag} {wrong.value}: {wrong.expected}") from None


# The flags of an engine: `--engine`, `--precision` and `--calibrate`.

EngineChoice = Literal["auto", "torch", "compile", "openvino", "onnxruntime"]
PrecisionChoice = Literal["auto", "float32", "bfloat16", "int8"]


class EngineFlags(NamedTuple):
    """The values of these flags, and `--data-root`, in which a named dataset is looked for."""

    engine: str
    precision: str
    calibrate: str | None
    data_root: str | None

    def options(self, images: int | None = None) -> EngineOptions:
        """Return the options of the engine; lines about trials go to stderr.

        Args:
            images: number of images that it will run; None if unknown.

        Raises:
            SettingError: values that do not exist, or not together.
        """
        from vitkit.engines.choose import EngineOptions

        options = EngineOptions(**self._asdict(), images=images, report=_print_report)
        options.check()
        return options


def _print_report(line: str) -> None:
    """Print a line about trials on stderr."""
    sys.stderr.write(f"vitkit: {line}\n")


def open_checkpoint(
    path: str, engine: EngineFlags, images: int | None, *, allow_partial: bool = False
) -> tuple[Checkpoint, EngineOptions]:
    """Return a checkpoint and the options of the engine that runs it on a number of images.

    Args:
        path: path of the checkpoint.
        engine: the flags.
        images: None if their number is unknown.
        allow_partial: accept unknown and missing tensors.

    Raises:
        SettingError, CheckpointError: the message names the wrong value.
    """
    # imported here: --help and wrong paths do not wait for torch
    with uncollected_imports():
        from vitkit.weights.load import load
    options = engine.options(images)  # first: it takes no time
    return load(path, strict=not allow_partial), options


# Flags from which a predictor is opened: of a checkpoint, or of an exported model.


@dataclass(frozen=True)
class PredictorFlags:
    """The flags, by their names.

    Attributes:
        choice: engine, precision and calibration of a checkpoint.
        device: device of a checkpoint.
        batch_size: images per batch.
        allow_partial: accept a checkpoint with unknown or missing tensors.
        trust_code: open an exported model of torch.
    """

    choice: EngineFlags
    device: str
    batch_size: int
    allow_partial: bool
    trust_code: bool

    def open(self, path: str, images: ImageList) -> tuple[Predictor, dict[str, str]]:
        """Return the predictor, and the true labels of the images in its classes.

        Args:
            path: a checkpoint, a run folder, or an exported model.
            images: images that will be predicted.

        Raises:
            SettingError: a flag that has no effect on this file.
        """
        # imported here: --help does not wait for torch
        with uncollected_imports():
            from vitkit.prediction.labels import match_labels, match_names
            from vitkit.prediction.predictor import Predictor

        refuse_needless_trust(path, trust_code=self.trust_code)
        if is_artefact(path):
            self._refuse_engine(path)
            predictor = Predictor(path, batch_size=self.batch_size, trust_code=self.trust_code)
            return predictor, match_names(predictor.classes, predictor.classes, images.classes)
        checkpoint, options = open_checkpoint(
            path, self.choice, images.total, allow_partial=self.allow_partial
        )
        predictor = Predictor.from_checkpoint(
            checkpoint, engine=options, device=self.device, batch_size=self.batch_size
        )
        return predictor, match_labels(checkpoint, images.classes)

    def _refuse_engine(self, path: str) -> None:
        """Refuse flags that have no effect on an exported model."""
        choice = self.choice
        plain = EngineFlags("auto", "float32", None, choice.data_root)
        if choice != plain or self.device not in ("auto", "cpu"):
            raise engine_refused(path)
        if self.allow_partial:
            raise SettingError(
                f"--allow-partial has no effect: {path} is an exported model, which is whole; "
                "leave it out"
            )

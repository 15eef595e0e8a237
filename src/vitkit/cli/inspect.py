"""`vitkit inspect FILE`."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional, Suppress

from vitkit.cli.arguments import Command, describe_function
from vitkit.cli.output import flags, fold, suggest, terminal_width
from vitkit.cli.parsing import SPEC, read_words, take_fields
from vitkit.exporting.artefact import is_artefact
from vitkit.process import uncollected_imports

EXAMPLES = (
    "vitkit inspect model.safetensors  # library, model, preprocessing, and how each is known",
    "vitkit inspect ViT-B_16.npz --json  # the same for a program",
    "vitkit inspect net.pth --trust-pickle --spec.num-heads 6  # state what the file does not",
)


def inspect_command(
    file: Positional[str],
    *,
    model: str | None = None,
    json: bool = False,
    trust_pickle: bool = False,
    spec: Suppress[dict[str, Any] | None] = None,
) -> None:
    """Identify a weights file: which library wrote it, its model, and how each field is known.

    Args:
        file: weights of any known format, a folder with them, or an exported model; nothing of an
            exported model is run.
        model: name of the model, for fields that the file does not state.
        json: print JSON.
        trust_pickle: load .pth, .pt and .bin files, with torch's weights_only=True.
        spec: fields of `ViTSpec` that the file does not state.
    """
    if is_artefact(file):
        _print_exported(Path(file), json=json)
        return
    # imported here: --help does not wait for torch
    with uncollected_imports():
        from vitkit.weights.inspection import inspect as inspect_file

    inspection = inspect_file(file, model=model, trust_pickle=trust_pickle, **(spec or {}))
    if json:
        sys.stdout.write(json_text.dumps(inspection.to_json(), indent=2) + "\n")
        return
    sys.stdout.write(fold(f"{inspection}\n", terminal_width()))
    stated = flags(model=model, trust_pickle=trust_pickle)
    for name, value in (spec or {}).items():
        stated += [f"--spec.{name.replace('_', '-')}", str(value)]
    # the other verbs take only a file
    then = ("convert", file, "model.safetensors", "--to", "vitkit") if stated else ("summary", file)
    suggest((*then, *stated))


def _print_exported(path: Path, *, json: bool) -> None:
    """Print the description that is inside an exported model."""
    from vitkit.exporting.files import read_artefact_description

    description = read_artefact_description(path)
    if json:
        sys.stdout.write(f"{description.to_text()}\n")
        return
    lines = "".join(f"{line}\n" for line in description.lines())
    sys.stdout.write(fold(lines, terminal_width()))


def describe(_: Sequence[str] = ()) -> Command:
    """Describe the verb."""
    return describe_function("inspect", inspect_command, examples=EXAMPLES, extra=[SPEC])


def run(arguments: list[str]) -> None:
    """Parse the arguments and inspect."""
    rest, spec = take_fields(read_words(describe(), arguments).ordered)
    tyro.cli(partial(inspect_command, spec=spec), args=rest, prog="vitkit inspect")

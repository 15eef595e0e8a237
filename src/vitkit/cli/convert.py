"""`vitkit convert FILE OUT --to FORMAT`."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from vitkit.cli.fields import fields_of_spec
from vitkit.weights.convert import convert as convert_file


def convert(
    file: Positional[str],
    out: Positional[str],
    *,
    to: str,
    allow_lossy: bool = False,
    trust_pickle: bool = False,
    spec: Annotated[tuple[str, ...], arg(metavar="FIELD=VALUE")] = (),
) -> None:
    """Write a checkpoint in another format, say what happened, and prove it.

    Args:
        file: weights of any known format, or a folder with them.
        out: a folder, or a file with the target's ending.
        to: the format to write.
        allow_lossy: also do what approximates or loses something.
        trust_pickle: read .pth, .pt and .bin files, by torch's weights_only reader.
        spec: fields that the file cannot say, such as num_heads=6.
    """
    report = convert_file(
        file, out, to=to, allow_lossy=allow_lossy, trust_pickle=trust_pickle,
        **fields_of_spec(spec),
    )  # fmt: skip
    sys.stdout.write(f"{report}\n")


def run(arguments: list[str]) -> None:
    """Parse and convert."""
    tyro.cli(convert, args=arguments, prog="vitkit convert")

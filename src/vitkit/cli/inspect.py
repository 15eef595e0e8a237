"""`vitkit inspect FILE`."""

from __future__ import annotations

import json as json_text
import sys
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from vitkit.cli.fields import fields_of_spec
from vitkit.weights.inspection import inspect as inspect_file


def inspect(
    file: Positional[str],
    *,
    json: bool = False,
    trust_pickle: bool = False,
    spec: Annotated[tuple[str, ...], arg(metavar="FIELD=VALUE")] = (),
) -> None:
    """Whose file it is, what model and preprocessing, and how sure each is.

    Args:
        file: weights of any known format, or a folder with them.
        json: print JSON.
        trust_pickle: read .pth, .pt and .bin files, by torch's weights_only reader.
        spec: fields that the file cannot say, such as num_heads=6.
    """
    found = inspect_file(file, trust_pickle=trust_pickle, **fields_of_spec(spec))
    text = json_text.dumps(found.to_json(), indent=2) if json else str(found)
    sys.stdout.write(text + "\n")


def run(arguments: list[str]) -> None:
    """Parse and say."""
    tyro.cli(inspect, args=arguments, prog="vitkit inspect")

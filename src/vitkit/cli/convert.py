"""`vitkit convert FILE OUT --to FORMAT`."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import tyro
from tyro.conf import Positional, Suppress

from vitkit.cli.arguments import Argument, Command, describe_function
from vitkit.cli.output import fold, print_results, terminal_width
from vitkit.cli.parsing import SPEC, read_words, take_fields
from vitkit.process import uncollected_imports

# listed here, since importing the formats imports torch
FormatName = Literal[
    "vitkit",
    "timm",
    "huggingface",
    "torchvision",
    "google",
    "jeonsworld",
    "deit",
    "dinov2",
    "lucidrains",
]
ADAPT = Argument(
    name="adapt",
    flags=("--adapt.",),
    metavar="VALUE",
    help="change the model before it is written, by one of the fields image-size, patch-size, "
    "resampling, in-channels, mean, std, fit, num-classes, classes, such as --adapt.image-size 384 "
    "or --adapt.classes '[cat, dog]'.",
)


EXAMPLES = (
    "vitkit convert runs/photos-vit-1 for-timm --to timm  # a folder that timm loads",
    "vitkit convert ViT-B_16.npz vit-b16 --to huggingface  # Google's file for transformers",
    "vitkit convert net.pth net.safetensors --to vitkit --trust-pickle  # away from pickle",
)


def convert_command(
    file: Positional[str],
    out: Positional[str],
    *,
    to: FormatName,
    model: str | None = None,
    allow_lossy: bool = False,
    trust_pickle: bool = False,
    allow_partial: bool = False,
    json: bool = False,
    spec: Suppress[dict[str, Any] | None] = None,
    adapt: Suppress[dict[str, Any] | None] = None,
) -> None:
    """Write a checkpoint in another format, report every change, and verify the result.

    The library that defines the format runs the written file; if it cannot, the report says why.

    Args:
        file: weights of any known format, or a folder with them.
        out: a folder, or a file with the ending of the format; nothing is overwritten.
        to: the format to write.
        model: name of the model, for fields that the file does not state.
        allow_lossy: also make changes that approximate or lose part of the model.
        trust_pickle: load .pth, .pt and .bin files, with torch's weights_only=True.
        allow_partial: accept weights with unknown or missing tensors: leave out the unknown
            ones, initialise the missing ones at random, and list both.
        json: print JSON.
        spec: fields of `ViTSpec` that the file does not state.
        adapt: changes of the model, by the names of `vitkit.adapt`.
    """
    # imported here: --help does not wait for torch
    with uncollected_imports():
        from vitkit.weights.convert import convert as convert_file

    report = convert_file(
        file,
        out,
        to=to,
        model=model,
        allow_lossy=allow_lossy,
        trust_pickle=trust_pickle,
        strict=not allow_partial,
        adapt=adapt or {},
        **(spec or {}),
    )
    if json:
        sys.stdout.write(json_text.dumps(report.to_json(), indent=2) + "\n")
        return
    sys.stdout.write(fold(f"{report}\n", terminal_width()))
    print_results(then=[("inspect", out)])


def describe(_: Sequence[str] = ()) -> Command:
    """Describe the verb."""
    return describe_function("convert", convert_command, examples=EXAMPLES, extra=[SPEC, ADAPT])


def run(arguments: list[str]) -> None:
    """Parse the arguments and convert."""
    rest, spec = take_fields(read_words(describe(), arguments).ordered)
    rest, adapt = take_fields(rest, "adapt")
    convert = partial(convert_command, spec=spec, adapt=adapt)
    tyro.cli(convert, args=rest, prog="vitkit convert")

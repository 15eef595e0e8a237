"""`vitkit convert FILE OUT --to FORMAT`."""

from __future__ import annotations

import json as json_text
import sys

import tyro
from tyro.conf import Positional

from vitkit.cli.arguments import take_fields


def run(arguments: list[str]) -> None:
    """Parse the arguments and convert."""
    rest, spec = take_fields(arguments)
    # two groups of flags that tyro does not know
    rest, adapt = take_fields(rest, "adapt")

    def convert(
        file: Positional[str],
        out: Positional[str],
        *,
        to: str,
        model: str | None = None,
        allow_lossy: bool = False,
        trust_pickle: bool = False,
        allow_partial: bool = False,
        json: bool = False,
    ) -> None:
        """Write a checkpoint in another format, report every change, and verify the result.

        The library that defines the format runs the written file; if it cannot, the report says
        why.

        Pass fields that the file does not state as --spec.FIELD VALUE, such as --spec.num-heads 6.
        To change the model before it is written, pass --adapt.image-size, --adapt.patch-size,
        or any of --adapt.resampling, --adapt.in-channels, --adapt.mean, --adapt.std, --adapt.fit,
        or --adapt.num-classes and --adapt.classes.

        Args:
            file: weights of any known format, or a folder with them.
            out: a folder, or a file with the ending of the format; nothing is overwritten.
            to: the format to write, such as timm, huggingface or vitkit; a wrong name lists all.
            model: name of the model, for fields that the file does not state.
            allow_lossy: also make changes that approximate or lose part of the model.
            trust_pickle: load .pth, .pt and .bin files, with torch's weights_only=True.
            allow_partial: accept weights with unknown or missing tensors: leave out the unknown
                ones, initialise the missing ones at random, and list both.
            json: print JSON.
        """
        # imported here: --help does not wait for torch
        from vitkit.weights.convert import convert as convert_file

        report = convert_file(
            file,
            out,
            to=to,
            model=model,
            allow_lossy=allow_lossy,
            trust_pickle=trust_pickle,
            strict=not allow_partial,
            adapt=adapt,
            **spec,
        )
        text = json_text.dumps(report.to_json(), indent=2) if json else str(report)
        sys.stdout.write(f"{text}\n")

    tyro.cli(convert, args=rest, prog="vitkit convert")

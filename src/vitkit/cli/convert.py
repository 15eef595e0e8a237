"""`vitkit convert FILE OUT --to FORMAT`."""

from __future__ import annotations

import json as json_text
import sys

import tyro
from tyro.conf import Positional

from vitkit.cli.arguments import take_fields
from vitkit.weights.convert import convert as convert_file


def run(arguments: list[str]) -> None:
    """Parse the arguments and convert."""
    rest, spec = take_fields(arguments)
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
        """Write a checkpoint in another format, report every change, and prove the result.

        The proof is made by the library that defines the format; the report names the reason where
        that was not possible.

        Fields that the file does not state: --spec.FIELD VALUE, such as --spec.num-heads 6. Changes
        on the way: --adapt.image-size, --adapt.patch-size, --adapt.resampling,
        --adapt.in-channels, --adapt.mean, --adapt.std, --adapt.fit, --adapt.num-classes,
        --adapt.classes.

        Args:
            file: weights of any known format, or a folder with them.
            out: a folder, or a file with the target's ending; nothing there is overwritten.
            to: the format to write.
            model: the model's name, for what the file does not state.
            allow_lossy: also make changes that approximate or lose something.
            trust_pickle: read .pth, .pt and .bin files, by torch's weights_only reader.
            allow_partial: go on with weights that have unknown or missing tensors: leave out the
                unknown, give the missing random values, and list both.
            json: print JSON.
        """
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

"""`vitkit convert FILE OUT --to FORMAT`."""

from __future__ import annotations

import sys

import tyro
from tyro.conf import Positional

from vitkit.cli.fields import take_fields
from vitkit.weights.convert import convert as convert_file


def run(arguments: list[str]) -> None:
    """Parse and convert."""
    rest, spec = take_fields(arguments)
    rest, adapt = take_fields(rest, "adapt")

    def convert(
        file: Positional[str],
        out: Positional[str],
        *,
        to: str,
        allow_lossy: bool = False,
        trust_pickle: bool = False,
    ) -> None:
        """Write a checkpoint in another format, say what happened, and prove it.

        Fields that the file cannot say: --spec.FIELD VALUE, such as --spec.num-heads 6. What is
        to change on the way: --adapt.image-size, --adapt.patch-size, --adapt.resampling,
        --adapt.in-channels, --adapt.mean, --adapt.std, --adapt.num-classes, --adapt.classes.

        Args:
            file: weights of any known format, or a folder with them.
            out: a folder, or a file with the target's ending; nothing there is overwritten.
            to: the format to write.
            allow_lossy: also do what approximates or loses something.
            trust_pickle: read .pth, .pt and .bin files, by torch's weights_only reader.
        """
        report = convert_file(
            file, out, to=to, allow_lossy=allow_lossy, trust_pickle=trust_pickle,
            adapt=adapt, **spec,
        )  # fmt: skip
        sys.stdout.write(f"{report}\n")

    tyro.cli(convert, args=rest, prog="vitkit convert")

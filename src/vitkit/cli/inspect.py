"""`vitkit inspect FILE`."""

from __future__ import annotations

import json as json_text
import sys

import tyro
from tyro.conf import Positional

from vitkit.cli.arguments import take_fields


def run(arguments: list[str]) -> None:
    """Parse the arguments and inspect."""
    rest, spec = take_fields(arguments)

    def inspect(
        file: Positional[str],
        *,
        model: str | None = None,
        json: bool = False,
        trust_pickle: bool = False,
    ) -> None:
        """Identify a weights file: which library wrote it, its model, and how each field is known.

        Pass fields that the file does not state as --spec.FIELD VALUE, such as --spec.num-heads 6.

        Args:
            file: weights of any known format, or a folder with them.
            model: name of the model, for fields that the file does not state.
            json: print JSON.
            trust_pickle: load .pth, .pt and .bin files, with torch's weights_only=True.
        """
        # imported here: --help does not wait for torch
        from vitkit.weights.inspection import inspect as inspect_file

        inspection = inspect_file(file, model=model, trust_pickle=trust_pickle, **spec)
        text = json_text.dumps(inspection.to_json(), indent=2) if json else str(inspection)
        sys.stdout.write(text + "\n")

    tyro.cli(inspect, args=rest, prog="vitkit inspect")

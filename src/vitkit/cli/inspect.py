"""`vitkit inspect FILE`."""

from __future__ import annotations

import json as json_text
import sys

import tyro
from tyro.conf import Positional

from vitkit.cli.arguments import take_fields
from vitkit.weights.inspection import inspect as inspect_file


def run(arguments: list[str]) -> None:
    """Parse and say."""
    rest, spec = take_fields(arguments)

    def inspect(
        file: Positional[str],
        *,
        model: str | None = None,
        json: bool = False,
        trust_pickle: bool = False,
    ) -> None:
        """Whose file it is, what model and preprocessing, and how sure each is.

        Fields that the file cannot say: --spec.FIELD VALUE, such as --spec.num-heads 6.

        Args:
            file: weights of any known format, or a folder with them.
            model: the model's name, which decides what the file does not say.
            json: print JSON.
            trust_pickle: read .pth, .pt and .bin files, by torch's weights_only reader.
        """
        found = inspect_file(file, model=model, trust_pickle=trust_pickle, **spec)
        text = json_text.dumps(found.to_json(), indent=2) if json else str(found)
        sys.stdout.write(text + "\n")

    tyro.cli(inspect, args=rest, prog="vitkit inspect")

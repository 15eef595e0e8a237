"""The flags of an engine: `--engine`, `--precision` and `--calibrate`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, NamedTuple

from vitkit.process import uncollected_imports

if TYPE_CHECKING:
    from vitkit.engines.choosing.options import EngineOptions
    from vitkit.weights.checkpoint import Checkpoint

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
        from vitkit.engines.choosing.options import EngineOptions

        options = EngineOptions(**self._asdict(), images=images, report=print_report)
        options.check()
        return options


def print_report(line: str) -> None:
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

"""`EngineOptions`: the engine that a user wants, and what is known about its work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from vitkit.data.sources.open import DataSource
from vitkit.engines.registry import check_engine, refuse_uncalibrated
from vitkit.errors import SettingError
from vitkit.other_names import refuse_moved_keywords

Calibration: TypeAlias = DataSource
"""Images with classes, as for `train`."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that runs a model, and what is known about its work.

    Attributes:
        engine: `torch`, `compile`, `openvino`, `onnxruntime`; `auto` chooses by trials, see
            `choose_engine`.
        precision: `float32`, `bfloat16`, `int8`; `auto` takes the fastest whose logits agree.
        calibrate: images with classes for int8, and for agreement; their train split, else val.
        data_root: the folder of named datasets.
        images: number of images that it will run, by which `auto` chooses; default their number
            where a function gets them, else 1,000.
        report: receives the lines about trials; default warnings of the log `vitkit`, which Python
            prints on stderr.
    """

    engine: str = "auto"
    precision: str = "float32"
    calibrate: Calibration | None = None
    data_root: str | Path | None = None
    images: int | None = None
    report: Callable[[str], object] = logging.getLogger("vitkit").warning

    @classmethod
    def of(cls, engine: str | EngineOptions, **settings: Any) -> EngineOptions:
        """Return the options that a function was called with, checked.

        Args:
            engine: its name, or all options, which take the place of the settings.
            **settings: `precision`, `calibrate` or `data_root`.

        Raises:
            SettingError: values that do not exist, or not together.
            TypeError: another setting; one that has left the package is answered with its place.
        """
        refuse_moved_keywords(settings.keys() - {"precision", "calibrate", "data_root"})
        if isinstance(engine, EngineOptions):
            options, plain = engine, cls()
            for name, value in settings.items():
                if name != "data_root" and value != getattr(plain, name):
                    raise SettingError(
                        f"{name}= beside EngineOptions: write EngineOptions(..., {name}=...)"
                    )
        else:
            options = cls(engine=engine, **settings)
        options.check()
        return options

    def check(self) -> None:
        """Raise `SettingError` for values that do not exist, before anything is read."""
        check_engine(self.engine, self.precision)
        refuse_uncalibrated(self.precision, self.calibrate)
        if self.calibrate is not None and self.precision not in ("int8", "auto"):
            raise SettingError(
                f"--calibrate has no effect with precision {self.precision}; pass --precision "
                "int8 or auto, or leave it out"
            )

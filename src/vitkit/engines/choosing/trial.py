"""A trial of one engine on one model in a child process: agreement of logits, and speed."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitkit.engines.build import build_engine
from vitkit.engines.choosing.agreement import Agreement, compare_logits
from vitkit.engines.engine import Engine
from vitkit.weights.load import load

TRIAL_SECONDS = 3.0
"""Seconds for which batches are run, after the first one."""
TRIAL_BATCH = 8
"""Images that are run at once, and the number of images where the user gives none."""
LONGEST = 60.0
"""Seconds after which a trial is ended: the engine hangs."""
MODEL_FILE = "model.safetensors"
TENSORS_FILE = "images.safetensors"


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        engine: its name.
        precision: precision that it computed in.
        start_seconds: until the first batch of a converted model is done, without the import of
            torch and the reading of the model, which every engine needs.
        image_seconds: the median time of a batch, for one image.
        agreement: agreement of its logits with those of torch in float32.
        reason: why the engine cannot be used here, if so.
        made: when, in seconds since 1970.
    """

    engine: str
    precision: str
    start_seconds: float = 0.0
    image_seconds: float = 0.0
    agreement: Agreement | None = None
    reason: str = ""
    made: float = field(default_factory=time.time)

    @property
    def usable(self) -> bool:
        """True if the engine ran and its logits agree."""
        return not self.reason

    def seconds(self, images: int) -> float:
        """Return the expected time for a number of images."""
        return self.start_seconds + images * self.image_seconds

    def to_json(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Trial:
        """Return the trial of values that `to_json` returned."""
        agreement = values.get("agreement")
        return cls(**values | {"agreement": agreement and Agreement(**agreement)})


def write_inputs(folder: Path, images: Tensor, logits: Tensor, calibration: Tensor | None) -> None:
    """Write what a trial reads beside the model: images, torch's logits, images for int8."""
    tensors = {"images": images.contiguous(), "logits": logits.contiguous()}
    if calibration is not None:
        tensors["calibration"] = calibration.contiguous()
    save_file(tensors, folder / TENSORS_FILE)


def run_trial(inputs: str, kept: str, name: str, precision: str, threads: str) -> dict[str, Any]:
    """Try an engine and return the values of a `Trial`; runs in a child process.

    Args:
        inputs: folder with the model, the images and the logits that are expected.
        kept: folder in which a converted model is kept.
        name: name of the engine.
        precision: precision to compute in.
        threads: number of threads.
    """
    torch.set_num_threads(int(threads))
    model = load(Path(inputs) / MODEL_FILE).model
    tensors = load_file(Path(inputs) / TENSORS_FILE)
    images, expected = tensors["images"], tensors["logits"]
    with torch.inference_mode():
        model(images)  # importing torch is not counted: every process has done it
        build = partial(
            build_engine,
            name,
            model,
            precision=precision,
            threads=int(threads),
            folder=Path(kept),
            image_size=(images.shape[2], images.shape[3]),
            calibration=tensors.get("calibration"),
        )
        engine = build()  # includes the conversion, done once per model
        parts = images.split(TRIAL_BATCH)
        agreement = compare_logits(torch.cat([engine(part) for part in parts]), expected)
        if model.spec.num_classes == 0:  # features have no class
            agreement = replace(agreement, images=0)
        start = time.perf_counter()
        engine = build()
        engine(parts[0])
        started = time.perf_counter() - start
        trial = Trial(name, precision, started, _image_seconds(engine, parts[0]), agreement)
    reason = agreement.refusal(precision)
    return trial.to_json() | {"reason": reason}


def _image_seconds(engine: Engine, images: Tensor) -> float:
    times: list[float] = []
    end = time.perf_counter() + TRIAL_SECONDS
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        engine(images)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) / len(images)

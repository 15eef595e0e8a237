"""Trials of several engines on a model, one child process after the other, and their report."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.devices import on_device
from vitkit.engines.child import run_child
from vitkit.engines.choosing.flops import rough_flops
from vitkit.engines.choosing.sample_images import sample_images
from vitkit.engines.choosing.trial import (
    LONGEST,
    MODEL_FILE,
    TRIAL_BATCH,
    Trial,
    write_inputs,
)
from vitkit.engines.choosing.trial_cache import read_trials, write_trials
from vitkit.engines.engine import EngineRequest
from vitkit.engines.registry import ENGINES, EXTRA, compiler_name, has_compiler
from vitkit.spec import Preprocess
from vitkit.weights.formats.vitkit import save

SLOWEST = 1e10
"""Operations per second of the slowest processor, for the time limit of a trial."""
CALIBRATION_PASSES = 4
"""How often the calibration of int8 runs its images, at most."""
COMPILING = 180.0
"""Seconds more for a compiler: on a busy machine a model takes over a minute."""
FIXED_PASSES = 4
"""Batches of a trial besides those of agreement and calibration."""
FUNCTION = "vitkit.engines.choosing.trial:run_trial"
Pair = tuple[str, str]
"""Engine and precision."""


def make_trials(
    request: EngineRequest, pairs: Sequence[Pair], samples: Tensor | None
) -> list[Trial]:
    """Try engines in child processes and keep the results in the folder of the request.

    A crash by a signal, wrong logits, or no answer in the time that a trial may take makes an
    engine unusable, and the next one is tried.

    Args:
        request: with a folder.
        pairs: engine and precision of each trial.
        samples: the user's images (N, C, H, W), on which agreement is measured; default noise.

    Raises:
        OSError, OutputError, SafetensorError: the folder cannot be written.
    """
    folder, spec = request.folder, request.model.spec
    assert folder is not None, "trials are kept in a folder"
    if samples is None:
        samples = samples_for(request)
    # beside the results, not in /tmp: only one folder must be writable
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as name:
        inputs = Path(name)
        # a file has a transform, which a trial does not use
        preprocess = Preprocess(image_size=spec.image_size)
        if spec.in_channels == 1:
            preprocess = preprocess.replace(mean=(0.5,), std=(0.5,))
        save(inputs / MODEL_FILE, request.model, preprocess=preprocess)
        write_inputs(inputs, samples, expected_logits(request, samples), request.calibration)
        trials = [_try(request, folder, inputs, pair, len(samples)) for pair in pairs]
    known = read_trials(folder, request.threads)
    found = {(trial.engine, trial.precision): trial for trial in (*known, *trials)}
    write_trials(folder, request.threads, found.values())
    return trials


def samples_for(request: EngineRequest) -> Float[Tensor, "B C H W"]:
    """Return images of noise for a model, where the user gives none."""
    return sample_images(TRIAL_BATCH, request.model.spec.in_channels, request.image_size)


def expected_logits(request: EngineRequest, images: Tensor) -> Float[Tensor, "N K"]:
    """Return torch's logits on the processor, where trials run."""
    model = on_device(request.model, torch.device("cpu"))
    with torch.inference_mode():
        return torch.cat([model(part).float() for part in images.split(TRIAL_BATCH)])


def _try(request: EngineRequest, folder: Path, inputs: Path, pair: Pair, images: int) -> Trial:
    name, precision = pair
    passes = float(images + FIXED_PASSES * TRIAL_BATCH)
    if precision == "int8" and request.calibration is not None:
        passes += CALIBRATION_PASSES * len(request.calibration)
    seconds = LONGEST + passes * rough_flops(request.model.spec) / SLOWEST
    if name == "compile":
        seconds += COMPILING
    arguments = (
        str(inputs),
        str(folder),
        name,
        precision,
        str(request.threads),
    )
    result = run_child(FUNCTION, *arguments, seconds=seconds)
    if result.reason:
        return Trial(name, precision, reason=result.reason)
    return Trial.from_json(result.value)


def report_line(trials: Sequence[Trial], chosen: Trial) -> str:
    """Return the result of trials in one line, the engine that was chosen first.

    Such as `engine openvino, float32: 29.1 images/s (2.1 times as fast as torch, 1.4 times
    onnxruntime); compile not usable here: no answer in 240 s`.

    Args:
        trials: all that were made.
        chosen: one of them.
    """
    several = len({trial.precision for trial in trials}) > 1
    others: list[str] = []
    unusable: list[str] = []
    for trial in trials:
        name = f"{trial.engine} {trial.precision}" if several else trial.engine
        if not trial.usable:
            unusable.append(f"{name} not usable here: {trial.reason}")
        elif trial is not chosen:
            ratio = trial.image_seconds / chosen.image_seconds
            as_fast = "" if others else "as fast as "
            others.append(f"{ratio:.1f} times {as_fast}{name}")
    line = f"engine {chosen.engine}, {chosen.precision}: {1 / chosen.image_seconds:.1f} images/s"
    if others:
        line += f" ({', '.join(others)})"
    if missing := [name for name, kind in ENGINES.items() if kind.missing()]:
        gain = ENGINES[missing[0]].gain
        unusable.append(f"{', '.join(missing)} not installed: pip install '{EXTRA}'; {gain}")
    if not has_compiler():
        unusable.append(f"compile needs a C++ compiler, and {compiler_name()} is not on the PATH")
    return "; ".join([line, *unusable])

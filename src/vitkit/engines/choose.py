"""Choose the engine with the shortest expected time, by one cached trial per model and machine."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor

from vitkit.data.checks.check import drop_or_refuse_unreadable
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import with_validation_of
from vitkit.data.images.preprocess import fit, normalise
from vitkit.data.sources.open import DataSource, open_dataset
from vitkit.devices import on_device, resolve_device
from vitkit.engines.engine import Engine, EngineRequest, build_requested
from vitkit.engines.registry import (
    CPU_PRECISIONS,
    ENGINES,
    KINDS,
    check_engine,
    has_compiler,
    refuse_not_installed,
    refuse_uncalibrated,
)
from vitkit.engines.trials import (
    TRIAL_BATCH,
    Trial,
    compare_logits,
    expected_logits,
    make_trials,
    model_folder,
    one_at_a_time,
    read_trials,
    report_line,
    rough_flops,
    samples_for,
)
from vitkit.errors import CheckpointError, DataError, OutputError, SettingError
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.other_names import refuse_moved_keywords
from vitkit.weights.checkpoint import Checkpoint, stored_object
from vitkit.weights.formats.vitkit import as_saved

USUAL_IMAGES = 1000
"""Assumed number of images for an engine, if it is unknown."""
WORTH_SECONDS = 60.0
"""Expected seconds with torch above which trials pay off."""
SHORT_SECONDS = 1.0
"""Expected seconds below which the cache of trials is not even read."""
SLOW_FLOPS = 1e11
"""Operations per second of torch on two cores, to estimate that time."""
MOST_CALIBRATION = 300
MOST_AGREEMENT = 128
"""Most user images for int8 calibration, and for measuring agreement."""
UNWRITABLE = (OSError, OutputError, SafetensorError)
"""Errors of a folder that cannot be written."""


def choose_engine(
    model: ViT,
    options: EngineOptions,
    *,
    samples: Tensor | None = None,
    device: torch.device,
    image_size: tuple[int, int] | None = None,
) -> Engine:
    """Return a model's engine: the one that the options name, or the fastest in trials.

    On a GPU, and for work that takes less time than trials, `auto` is torch. Otherwise each
    installed engine is tried in a child process, once: the results are kept in the user's cache.
    The engine with the shortest expected time for these images is chosen, its start included. One
    that is named is tried, too, unless it is torch or on a GPU.

    Where no trial can be made, as a file cannot describe the model or the cache cannot be written,
    `auto` is torch, and the logits of an engine that is named are compared here.

    Args:
        model: a `ViT` in eval mode, on `device`.
        options: the engine, and what is known about the work. Its data are opened by the caller.
        samples: preprocessed images (N, C, H, W) of the user's: every other one calibrates int8,
            and agreement is measured on the rest.
        device: where torch and compile run.
        image_size: (height, width) of the images; default the model's.

    Raises:
        SettingError: no such engine or precision, one that cannot be used here with the reason, or
            int8 without images to calibrate with.
        MissingExtraError: an engine that is asked for by name and not installed.
    """
    check_engine(options.engine, options.precision)
    calibration, agreement = _parts(samples)
    request = EngineRequest(
        model=model,
        precision=options.precision,
        threads=torch.get_num_threads(),
        image_size=image_size or model.spec.image_size,
        device=device,
        calibration=calibration,
    )
    pairs = _candidates(options, samples)
    if len(pairs) == 1 and pairs[0][0] == "torch":
        return _build(request, *pairs[0])
    seconds = _images_expected(options) * rough_flops(model.spec) / SLOW_FLOPS
    may_be_torch = _may_be_torch(options)
    on_gpu = device.type != "cpu" and not ENGINES[pairs[0][0]].cpu_only
    if on_gpu or (may_be_torch and seconds < SHORT_SECONDS):
        return _usual(request, options, "the work is short or on a GPU")
    if not _is_plain(model):
        why = "a child process could not read this model"
        return _untried(request, pairs[0], agreement, options, why)
    request = replace(request, folder=model_folder(request))
    trials = _known(request, pairs)
    if trials is not None:
        return _best(request, trials, options)[0]
    if may_be_torch and seconds < WORTH_SECONDS:
        return _usual(request, options, "the work is short or on a GPU")
    return _by_trials(request, pairs, agreement, options)


def _may_be_torch(options: EngineOptions) -> bool:
    """Return True if torch may be chosen, which needs no trial."""
    return options.engine == "auto" and options.precision != "int8"


def _images_expected(options: EngineOptions) -> int:
    """Return the number of images that an engine will run, as far as it is known."""
    return USUAL_IMAGES if options.images is None else options.images


def _usual(request: EngineRequest, options: EngineOptions, why: str) -> Engine:
    """Return torch without trials; report it if the precision is `auto`."""
    precision = options.precision
    if precision == "auto":
        precision = "float32"
        options.report(
            f"precision auto: float32 without a trial, as {why}; pass --precision bfloat16 to use "
            "it"
        )
    return _build(request, "compile" if options.engine == "compile" else "torch", precision)


def _untried(
    request: EngineRequest,
    pair: tuple[str, str],
    samples: Tensor | None,
    options: EngineOptions,
    why: str,
) -> Engine:
    """Return torch if no trial is possible; else build the engine and compare its logits here.

    Raises:
        SettingError: an engine that is asked for, and whose logits are wrong.
    """
    if _may_be_torch(options):
        return _usual(request, options, why)
    engine = _build(request, *pair)
    if samples is None:
        samples = samples_for(request)
    samples = samples[:TRIAL_BATCH]
    with torch.inference_mode():
        reason = compare_logits(engine(samples), expected_logits(request, samples)).refusal(pair[1])
    if reason:
        raise SettingError(f"engine {pair[0]} cannot run this model: {reason}; pass --engine torch")
    return engine


def _by_trials(
    request: EngineRequest,
    pairs: Sequence[tuple[str, str]],
    samples: Tensor | None,
    options: EngineOptions,
) -> Engine:
    """Make trials, or wait for those of another process, and build the best engine."""
    assert request.folder is not None
    try:
        with one_at_a_time(request.folder, options.report):
            trials = _known(request, pairs)
            if trials is None:
                noun = plural(len(pairs), "engine")
                options.report(
                    f"trying {noun} on this model, once on this machine; it takes up to minutes"
                )
                trials = make_trials(request, pairs, samples)
    except UNWRITABLE as error:
        why = "the cache cannot be written"
        options.report(f"no engine is tried, as {why}: {error}; VITKIT_CACHE names another folder")
        return _untried(replace(request, folder=None), pairs[0], samples, options, why)
    engine, chosen = _best(request, trials, options)
    if chosen is not None:
        options.report(report_line(trials, chosen))
    return engine


def _parts(samples: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return images to calibrate with, and others to measure agreement on."""
    if samples is None or len(samples) < 2:
        return samples, samples
    count = min(MOST_AGREEMENT, len(samples) // 2)
    chosen = torch.zeros(len(samples), dtype=torch.bool)
    chosen[torch.linspace(0, len(samples) - 1, count).long()] = True
    return samples[~chosen][:MOST_CALIBRATION], samples[chosen]


def _build(request: EngineRequest, name: str, precision: str) -> Engine:
    return build_requested(name, replace(request, precision=precision))


def _candidates(options: EngineOptions, samples: Tensor | None) -> list[tuple[str, str]]:
    """Return the engines and precisions to choose from."""
    names: Sequence[str] = [options.engine]
    if options.engine == "auto":
        names = [name for name, kind in ENGINES.items() if not kind.missing()]
        if not has_compiler():
            names = [name for name in names if name != "compile"]
    else:
        refuse_not_installed(options.engine, options.precision)
    precisions = [options.precision]
    if options.precision == "auto":
        precisions = ["float32", "bfloat16", *(["int8"] if samples is not None else [])]
    pairs = []
    for name in names:
        kind = ENGINES[name]
        pairs += [(name, p) for p in precisions if p in kind.precisions and not kind.missing(p)]
    if not pairs:
        refuse_not_installed("openvino", options.precision)
    refuse_uncalibrated(options.precision, samples)
    return pairs


def _is_plain(model: ViT) -> bool:
    """Return True for a model that a file can describe, so that a child process can read it."""
    try:
        as_saved(model, Path("the model"))
    except CheckpointError:
        return False
    return True


def _known(request: EngineRequest, candidates: Sequence[tuple[str, str]]) -> list[Trial] | None:
    """Return the cached trials of all candidates, or None if one is missing."""
    assert request.folder is not None
    found = {(t.engine, t.precision): t for t in read_trials(request.folder, request.threads)}
    if not found.keys() >= set(candidates):
        return None
    return [found[pair] for pair in candidates]


def _best(
    request: EngineRequest, trials: Sequence[Trial], options: EngineOptions
) -> tuple[Engine, Trial | None]:
    """Build the fastest usable engine; fall back to the next one if it fails.

    Where none is usable, `auto` is torch in float32: what failed may be the child processes.

    Raises:
        SettingError: an engine or a precision that is asked for is not usable.
    """
    images = _images_expected(options)
    usable = sorted((t for t in trials if t.usable), key=lambda trial: trial.seconds(images))
    for trial in usable:
        try:
            return _build(request, trial.engine, trial.precision), trial
        except Exception:
            if trial is usable[-1]:
                raise
    reasons = "; ".join(f"{t.engine} {t.precision}: {t.reason}" for t in trials)
    if _may_be_torch(options) and options.precision != "bfloat16":
        options.report(f"engine torch, float32, without a trial, as all have failed ({reasons})")
        return _build(request, "torch", "float32"), None
    raise SettingError(f"no engine can be used here ({reasons}); pass --engine torch")


# The engine that runs a checkpoint, calibrated on the user's images.

FEWEST_IMAGES = 16
"""Least images for int8, to measure the range of each activation."""


def engine_of(
    checkpoint: Checkpoint,
    options: EngineOptions,
    *,
    device: str = "auto",
    features: bool = False,
) -> Engine:
    """Return the engine that runs the model of a checkpoint.

    Args:
        checkpoint: its model stays as it is, and where it is.
        options: the user's wishes.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        features: run the model without its head: outputs are pooled features.

    Raises:
        DeviceError: a device that does not exist here.
        SettingError, MissingExtraError, DataError: the message names the wrong value.
    """
    _refuse_device(options, device)
    resolved = resolve_device(device)
    samples = None
    if options.calibrate is not None:
        samples = calibration_images(options.calibrate, checkpoint, options.data_root)
    model = on_device(checkpoint.model, resolved)
    return choose_engine(
        headless(model) if features else model,
        options,
        samples=samples,
        device=resolved,
        image_size=checkpoint.preprocess.image_size,
    )


def _refuse_device(options: EngineOptions, device: str) -> None:
    """Refuse a device where the engine or the precision runs on the CPU alone."""
    if device in ("auto", "cpu"):
        return
    for flag, value, on_cpu in (
        ("--engine", options.engine, [kind.name for kind in KINDS if kind.cpu_only]),
        ("--precision", options.precision, CPU_PRECISIONS),
    ):
        if value in on_cpu:
            raise SettingError(
                f"--device {device} has no effect with {flag} {value}, which runs on the CPU; "
                "leave one of them out"
            )


def calibration_images(
    data: Calibration, checkpoint: Checkpoint, data_root: str | Path | None = None
) -> Float[Tensor, "N C H W"]:
    """Return preprocessed images to calibrate with and to measure agreement on.

    They are spread evenly over the train split, else over val: never over test, whose scores would
    then be of images that the engine was made for. Images of train that the checkpoint's training
    cut off for validation are no part of it.

    Args:
        data: as for `train`.
        checkpoint: its preprocessing, and the settings of its training.
        data_root: the folder of named datasets.

    Raises:
        DataError: data that cannot be opened, without such a split, or with too few images.
    """
    recipe = stored_object(checkpoint, "recipe")
    trained_on = stored_object(checkpoint, "data").get("fingerprint")
    dataset = open_dataset(
        data,
        data_root=data_root,
        ignore_extra_classes=recipe.get("ignore_extra_classes") is True,
        follow_links=recipe.get("follow_links") is True,
    )
    dataset = with_validation_of(dataset, trained_on, recipe.get("val_fraction"))
    if recipe.get("bad_images") == "skip":
        dataset, _ = drop_or_refuse_unreadable(dataset, "skip")
    name = next((name for name in ("train", "val") if name in dataset.splits), None)
    if name is None:
        raise DataError(
            f"--calibrate {dataset.name} has neither a train nor a val split; pass other images "
            "than those of the test"
        )
    split: Split = dataset.splits[name]
    if len(split) < FEWEST_IMAGES:
        raise DataError(
            f"--calibrate {dataset.name} has {plural(len(split), 'image')} in {name}; at least "
            f"{FEWEST_IMAGES} are needed, and {MOST_CALIBRATION} are used"
        )
    count = min(len(split), MOST_CALIBRATION + MOST_AGREEMENT)
    indices = np.linspace(0, len(split) - 1, count).round().astype(np.int64)
    pixels = np.stack([fit(split.read(int(index)), checkpoint.preprocess) for index in indices])
    return normalise(torch.from_numpy(pixels), checkpoint.preprocess)


def headless(model: ViT) -> ViT:
    """Return a model without its head, which returns the pooled features (B, E).

    It shares all weights with the model, which stays as it is.
    """
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    copied.reset_classifier(0)
    return copied


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

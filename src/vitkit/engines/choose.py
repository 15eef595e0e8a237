"""Choose the engine with the shortest expected time, by one timed batch of each in a child process.

The times are kept in the user's cache, for a model, a machine and the versions of the runtimes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import math
import os
import shutil
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from vitkit import devices, errors, other_names, process
from vitkit.data.images.preprocess import preprocess_images
from vitkit.engines import registry
from vitkit.engines.engine import CPU, Engine, EngineRequest, build_requested
from vitkit.io import atomic, caches
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.weights.checkpoint import Checkpoint, stored_object
from vitkit.weights.files import weights_fingerprint
from vitkit.weights.formats.vitkit import as_saved

if TYPE_CHECKING:
    from vitkit.data.sources.open import DataSource

Pair: TypeAlias = tuple[str, str]
"""Engine and precision."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that runs a model, and what is known about its work.

    Attributes:
        engine: a name, as `vitkit predict --engine` has it; `auto` takes the fastest one here.
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
    calibrate: DataSource | None = None
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
        other_names.refuse_moved_keywords(settings.keys() - {"precision", "calibrate", "data_root"})
        if isinstance(engine, EngineOptions):
            options, plain = engine, cls()
            for name, value in settings.items():
                if name != "data_root" and value != getattr(plain, name):
                    raise errors.SettingError(
                        f"{name}= beside EngineOptions: write EngineOptions(..., {name}=...)"
                    )
        else:
            options = cls(engine=engine, **settings)
        options.check()
        return options

    def check(self) -> None:
        """Raise `SettingError` for values that do not exist, before anything is read."""
        registry.check_engine(self.engine, self.precision, self.calibrate)
        if self.calibrate is not None and self.precision not in ("int8", "auto"):
            raise errors.SettingError(
                f"--calibrate has no effect with precision {self.precision}; pass --precision "
                "int8 or auto, or leave it out"
            )


# The engine that runs a checkpoint.

OWN = registry.KINDS[0].name
"""The engine that is the model itself, and needs no trial."""
FEW_IMAGES = 100
"""Images for fewer of which no other engine is worth its start."""
USUAL_IMAGES = 1000
"""Assumed number of images, where it is unknown."""
SHORT = "the work is short or on a GPU"
WORTH_SECONDS = 60.0
"""Expected seconds of the model itself from which trials pay off."""


def engine_of(
    checkpoint: Checkpoint, options: EngineOptions, *, device: str = "auto", features: bool = False
) -> Engine:
    """Return the engine that runs the model of a checkpoint: the one that is named, or the fastest.

    On a GPU, and for work that takes less time than trials, `auto` is torch. Otherwise each
    installed engine is tried, once: the one with the shortest expected time for these images is
    taken, its start included. One that is named is tried, too, unless it is torch or on a GPU.
    Where no child process can read the model, or the cache cannot be written, `auto` is torch, and
    another engine is refused.

    Args:
        checkpoint: its model stays as it is, and where it is.
        options: the user's wishes, which `EngineOptions.check` has passed.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        features: run the model without its head: outputs are pooled features.

    Raises:
        DeviceError: a device that does not exist here.
        SettingError, MissingExtraError, DataError: the message names the wrong value.
    """
    if _needs_processor(options, device):
        device = "cpu"
    pairs = _candidates(options)
    calibration = samples = None
    if options.calibrate is not None:
        raw, *_ = calibration_images(options.calibrate, checkpoint, options.data_root)
        prepared = preprocess_images(raw, checkpoint.preprocess)
        # agreement is measured on others than the ranges of activations
        is_sample = torch.arange(len(prepared)) % 3 == 0
        calibration, samples = prepared[~is_sample], prepared[is_sample]
    place = devices.resolve_device(device)
    model = devices.on_device(checkpoint.model, place)
    if features:
        model = headless(model)
    size = checkpoint.preprocess.image_size
    request = EngineRequest(model, size, device=place, calibration=calibration)
    if len(pairs) == 1 and pairs[0][0] == OWN:
        return build_requested(OWN, replace(request, precision=pairs[0][1]))
    images = USUAL_IMAGES if options.images is None else options.images
    if place != CPU or (_may_be_own(options) and images < FEW_IMAGES):
        return _untried(request, options, SHORT)
    return _by_trials(request, pairs, samples, options, images)


def _needs_processor(options: EngineOptions, device: str) -> bool:
    """Return True for an engine or a precision of the processor; refuse another device with it."""
    kind = registry.ENGINES.get(options.engine)
    if kind is not None and kind.cpu_only:
        given = f"--engine {options.engine}"
    elif options.precision in registry.CPU_PRECISIONS:
        given = f"--precision {options.precision}"
    else:
        return False
    if device not in ("auto", "cpu"):
        raise errors.SettingError(
            f"--device {device} has no effect with {given}, which runs on the CPU; leave one of "
            "them out"
        )
    return True


def _candidates(options: EngineOptions) -> list[Pair]:
    """Return the engines and precisions to choose from."""
    names: Iterable[str] = registry.ENGINES
    if options.engine != "auto":
        registry.refuse_not_installed(options.engine, options.precision)
        names = [options.engine]
    wished: Sequence[str] = [options.precision]
    if options.precision == "auto":
        wished = registry.PRECISIONS
    pairs = []
    for name in names:
        kind = registry.ENGINES[name]
        if options.engine == "auto" and kind.compiles and not registry.has_compiler():
            continue
        for precision in kind.precisions:
            uncalibrated = precision == "int8" and options.calibrate is None
            if precision in wished and not uncalibrated and not kind.missing(precision):
                pairs.append((name, precision))
    if not pairs:  # int8, which an extra has
        raise errors.MissingExtraError(
            f"precision {options.precision} needs packages that are not installed: pip install "
            f"'{registry.EXTRA}'"
        )
    return pairs


def _may_be_own(options: EngineOptions) -> bool:
    """Return True if the model itself may be chosen, which needs no trial."""
    return options.engine == "auto" and options.precision != "int8"


def _untried(request: EngineRequest, options: EngineOptions, why: str) -> Engine:
    """Return the model itself, or a named engine, without a trial; report it for `auto`."""
    if options.precision != "auto":
        request = replace(request, precision=options.precision)
    else:
        options.report(
            f"precision auto: float32 without a trial, as {why}; pass --precision bfloat16 to use "
            "it"
        )
    return build_requested(OWN if options.engine == "auto" else options.engine, request)


def _by_trials(
    request: EngineRequest,
    pairs: list[Pair],
    samples: Tensor | None,
    options: EngineOptions,
    images: int,
) -> Engine:
    """Return the fastest of several engines for a number of images, by trials that are kept."""
    request = replace(request, folder=_model_folder(request))
    try:
        found = _trials(request, pairs, samples, options, images)
    except (errors.CheckpointError, errors.OutputError, process.NotSentError) as error:
        if not _may_be_own(options):
            raise errors.SettingError(
                f"engine {options.engine} cannot be tried: {error}; VITKIT_CACHE names the folder "
                f"of trials; or pass --engine {OWN}"
            ) from None
        options.report(f"no engine is tried: {error}")
        return _untried(request, options, "none is tried")
    if not found:
        return _untried(request, options, SHORT)
    best = min((found[pair] for pair in pairs), key=lambda trial: trial.seconds(images))
    if not best.reason:
        return build_requested(best.engine, replace(request, precision=best.precision))
    if _may_be_own(options):  # what failed may be the child processes
        return _untried(request, options, "all trials have failed")
    reason = f"{best.engine} {best.precision}: {best.reason}"
    raise errors.SettingError(f"no engine can be used here ({reason}); pass --engine {OWN}")


def _trials(
    request: EngineRequest,
    pairs: list[Pair],
    samples: Tensor | None,
    options: EngineOptions,
    images: int,
) -> dict[Pair, Trial]:
    """Return the trials of the model, kept or made now; none where they would not pay off.

    Raises:
        CheckpointError: a model that its weights alone do not describe.
        NotSentError: a model that no child process can read.
        OutputError: the cache cannot be written.
    """
    assert request.folder is not None
    as_saved(request.model, Path("the model"))
    atomic.refuse_unwritable(request.folder / TRIALS_FILE)
    kept = _read_trials(request.folder)
    usable = any(pair in kept and not kept[pair].reason for pair in pairs)
    # what has failed before is tried again where it is asked for by name
    if kept.keys() >= set(pairs) and (usable or _may_be_own(options)):
        return kept
    if samples is None:
        samples = sample_images(TRIAL_BATCH, request.model.spec.in_channels, request.image_size)
    expected, seconds = _own_logits(request.model, samples)
    if _may_be_own(options) and images * seconds < WORTH_SECONDS:
        return {}
    options.report(
        f"trying {plural(len(pairs), 'engine')} on this model, once on this machine; it takes up "
        "to minutes"
    )
    for pair in pairs:
        kept[pair] = _try(request, pair, samples, expected, seconds)
    _write_trials(request.folder, kept)
    options.report(_report_line(map(kept.__getitem__, pairs)))
    return kept


def headless(model: ViT) -> ViT:
    """Return a model without its head, which returns the pooled features (B, E).

    It shares all weights with the model, which stays as it is.
    """
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    copied.reset_classifier(0)
    return copied


# A trial of one engine on one model in a child process: right logits, and the time of a batch.

TRIAL_BATCH = 8
"""Images of the batch that is timed, and the number of images where the user gives none."""
REPEATS = 3
"""Runs of that batch, of which the fastest counts: other work only adds to a run."""
START_SECONDS, SLOWEST = 300.0, 20
"""Seconds that a start may take, and how many times as long as torch an image may take."""
CALIBRATION_PASSES = 4
"""How often the calibration of int8 runs its images, at most."""
BOUNDS = {"float32": 1e-3, "bfloat16": 0.05, "int8": 0.15}
"""Precision -> the largest relative error of logits."""


def logit_error(found: Float[Tensor, "N K"], expected: Float[Tensor, "N K"]) -> float:
    """Return the root mean square of the error of logits, relative to their spread.

    Args:
        found: logits of the same images as those expected.
        expected: torch's in float32.

    Returns:
        The error over the deviation of the expected logits around each image's mean; NaN or
        infinite where a logit found is.
    """
    found, expected = found.double().cpu(), expected.double().cpu()
    centred = expected
    if expected.shape[1] > 1:  # a single logit has no spread
        centred = expected - expected.mean(1, keepdim=True)
    spread = max(float(centred.square().mean().sqrt()), 1e-6)
    return float((found - expected).square().mean().sqrt()) / spread


def disagreement(
    logits: Float[Tensor, "N K"], expected: Float[Tensor, "N K"], precision: str
) -> str:
    """Return why logits are not good enough for a precision; empty if they are.

    Args:
        logits: as for `logit_error`.
        expected: as for `logit_error`.
        precision: precision that the logits were computed in.
    """
    error = logit_error(logits, expected)
    if error <= BOUNDS[precision]:  # not NaN
        return ""
    return (
        f"its logits differ by {error:.2g} of their spread; at most {BOUNDS[precision]} is expected"
    )


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        engine: its name.
        precision: precision that it computed in.
        start_seconds: until the first batch of a converted model is done, without the import of
            torch and the reading of the model, which every engine needs.
        image_seconds: the time of a batch, for one image.
        reason: why the engine cannot be used here, if so.
    """

    engine: str
    precision: str
    start_seconds: float = 0.0
    image_seconds: float = 0.0
    reason: str = ""

    def seconds(self, images: int) -> float:
        """Return the expected time for a number of images; infinite if it cannot be used."""
        if self.reason:
            return math.inf
        return self.start_seconds + images * self.image_seconds


def _own_logits(model: ViT, images: Tensor) -> tuple[Float[Tensor, "N K"], float]:
    """Return torch's logits in float32 on the processor, and the model's seconds of an image."""
    model = devices.on_device(model, CPU)
    dtype = next(model.parameters()).dtype
    with torch.inference_mode():
        start = time.perf_counter()
        logits = torch.cat([model(part.to(dtype)) for part in images.split(TRIAL_BATCH)])
        seconds = (time.perf_counter() - start) / len(images)
        if dtype != torch.float32:
            logits = copy.deepcopy(model).float()(images)
    return logits, seconds


def _try(
    request: EngineRequest, pair: Pair, images: Tensor, expected: Tensor, own_seconds: float
) -> Trial:
    """Try an engine in a child process: a crash, a hang or wrong logits make it unusable."""
    name, precision = pair
    passes = len(images) + (REPEATS + 2) * TRIAL_BATCH
    if precision == "int8" and request.calibration is not None:
        passes += CALIBRATION_PASSES * len(request.calibration)
    limit = START_SECONDS + SLOWEST * passes * own_seconds
    request = replace(request, precision=precision)
    try:
        return process.run_in_child(try_engine, name, request, images, expected, seconds=limit)
    except process.NotSentError:  # about the model, and not the engine
        raise
    except process.ChildError as error:
        return Trial(name, precision, reason=str(error))


def try_engine(name: str, request: EngineRequest, images: Tensor, expected: Tensor) -> Trial:
    """Build an engine, compare its logits and time a batch; runs in a child process.

    Args:
        name: name of the engine.
        request: the inputs from which it is built.
        images: preprocessed images (N, C, H, W).
        expected: their logits (N, K) by torch in float32.
    """
    torch.set_num_threads(request.threads)
    batch = images[:TRIAL_BATCH]
    with torch.inference_mode():
        build_requested(name, request)(batch)  # includes the conversion, done once per model
        start = time.perf_counter()
        engine = build_requested(name, request)
        engine(batch)
        started = time.perf_counter() - start
        logits = torch.cat([engine(part) for part in images.split(TRIAL_BATCH)])
        reason = disagreement(logits, expected, request.precision)
        seconds = min(timeit.repeat(lambda: engine(batch), number=1, repeat=REPEATS))
    return Trial(name, request.precision, started, seconds / len(batch), reason)


def _report_line(trials: Iterable[Trial]) -> str:
    """Return the result of trials in one line, the fastest first.

    Such as `engines: NAME float32 29.1 images/s, OTHER float32: no answer in 320 s`.
    """
    parts = []
    for trial in sorted(trials, key=lambda trial: (trial.reason, trial.image_seconds)):
        words = f"{trial.engine} {trial.precision}"
        if trial.reason:
            parts.append(f"{words}: {trial.reason}")
        else:
            parts.append(f"{words} {1 / trial.image_seconds:.1f} images/s")
    line = f"engines: {', '.join(parts)}"
    for kind in registry.KINDS:
        if kind.missing():
            line += (
                f"; {kind.name} is not installed: pip install '{registry.EXTRA}'; it is {kind.gain}"
            )
    return line


# The cache of trials and converted models: a folder for each model, machine and version.

CACHE_VERSION = 3
"""Changes when trials or converted models of an earlier vitkit must not be used."""
MOST_BYTES = 5 * 2**30
"""Size of all converted models that are kept; the ones used longest ago go first."""
TRIALS_FILE = "trials.json"


def _model_folder(request: EngineRequest) -> Path:
    """Return the folder of a model's trials and converted files, which may not exist yet.

    Its name is a digest of the model, of the images that int8 is calibrated with, and of what the
    speed depends on: processor, cores, threads and versions.
    """
    weights = {name: tensor.detach() for name, tensor in request.model.state_dict().items()}
    if request.calibration is not None:
        weights["calibration"] = request.calibration
    versions = {}
    for package in sorted(
        {"torch", *registry.QUANTISERS}.union(*(kind.packages for kind in registry.KINDS))
    ):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    facts = (
        CACHE_VERSION,
        weights_fingerprint(weights),
        request.model.spec.to_json(),
        request.image_size,
        _processor(),
        process.available_cores(),
        request.threads,
        versions,
    )
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return caches.cache_folder() / "engines" / digest[:32]


def _processor() -> str:
    """Return the name and the instructions of the processor, as far as the system tells them."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        keys = ("model name", "flags", "Features")
        return "\n".join(sorted({line for line in lines if line.startswith(keys)}))
    return torch.backends.cpu.get_cpu_capability()


def _read_trials(folder: Path) -> dict[Pair, Trial]:
    """Return the trials in a model's folder; none if they cannot be read."""
    trials = {}
    if caches.is_whole(folder / TRIALS_FILE):
        with contextlib.suppress(OSError):
            os.utime(folder)  # used now
            for values in json.loads((folder / TRIALS_FILE).read_bytes()):
                trials[values["engine"], values["precision"]] = Trial(**values)
    return trials


def _write_trials(folder: Path, trials: dict[Pair, Trial]) -> None:
    """Keep trials; delete the least recently used models, until the rest is small enough."""
    content = json.dumps([asdict(trial) for trial in trials.values()], indent=1)
    with contextlib.suppress(OSError):
        with caches.caching(folder) as new:
            (new / TRIALS_FILE).write_text(content)
        total = 0
        models = folder.parent.iterdir()
        for path in sorted(models, key=lambda path: path.stat().st_mtime, reverse=True):
            total += sum(file.stat().st_size for file in path.rglob("*"))
            if path != folder and total > MOST_BYTES:
                shutil.rmtree(path, ignore_errors=True)


# Images: of the user's, and noise.

FEWEST_IMAGES = 16
"""Least images for int8, to measure the range of each activation."""
MOST_IMAGES = 450
"""Images that are used where there are as many: 300 to calibrate, 150 to measure agreement."""


def calibration_images(
    data: DataSource, checkpoint: Checkpoint, data_root: str | Path | None = None
) -> tuple[list[UInt8[np.ndarray, "_ _ _"]], str, str]:
    """Return decoded images to calibrate with and to measure agreement on, and where they are from.

    They are spread evenly over the train split, else over val: never over test, whose scores would
    then be of images that the engine was made for. Images of train that the checkpoint's training
    cut off for validation are no part of it.

    Args:
        data: as for `train`.
        checkpoint: the settings of its training.
        data_root: the folder of named datasets.

    Returns:
        The images (H, W, channels), the name of the dataset, and that of the split.

    Raises:
        DataError: data that cannot be opened, without such a split, or with too few images.
    """
    # imported here: other engines need no data source
    from vitkit.data.checks.check import drop_or_refuse_unreadable
    from vitkit.data.datasets.splitting import with_validation_of
    from vitkit.data.sources.open import open_dataset

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
    name = "train" if "train" in dataset.splits else "val"
    images = dataset.splits.get(name)
    count = 0 if images is None else len(images)
    if images is None or count < FEWEST_IMAGES:
        raise errors.DataError(
            f"--calibrate {dataset.name} has {plural(count, 'image')} in train or val; at least "
            f"{FEWEST_IMAGES} are needed, and {MOST_IMAGES} are used"
        )
    chosen = np.linspace(0, count - 1, min(count, MOST_IMAGES)).round().astype(int)
    return list(map(images.read, chosen.tolist())), dataset.name, name


def sample_images(
    count: int, channels: int, image_size: tuple[int, int], seed: int = 0
) -> Float[Tensor, "B C H W"]:
    """Return smooth noise of mean 0 and deviation 1 (B, C, H, W).

    White noise would not do: a model sees the same grey in every patch of it.

    Args:
        count: B.
        channels: C.
        image_size: (H, W) in pixels.
        seed: seed of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (2 + side // 8 for side in image_size)
    noise = torch.randn(count, channels, rows, columns, generator=generator)
    images = F.interpolate(noise, image_size, mode="bicubic")
    std, mean = torch.std_mean(images, (2, 3), keepdim=True)
    return (images - mean) / (std + 1e-6)

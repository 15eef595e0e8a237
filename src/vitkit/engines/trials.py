"""Trials of engines in child processes: right logits first, then speed; results are cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from vitkit.devices import on_device
from vitkit.engines.child import run_child
from vitkit.engines.engine import Engine, EngineRequest, build_engine
from vitkit.engines.registry import ENGINES, EXTRA, QUANTISERS, compiler_name, has_compiler
from vitkit.io.caches import cache_folder, caching, is_whole, weights_fingerprint
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.formats.vitkit import save
from vitkit.weights.load import load

# Agreement of two tensors of logits, and the bounds that an engine must keep.

FLOAT32_BOUND = 1e-4
"""Largest difference of a logit, as a share of the largest logit (at least 1)."""
COSINE_BOUNDS = {"bfloat16": 0.999, "int8": 0.99}
"""Smallest cosine of an image's logits with those of float32."""
SAME_CLASS_BOUNDS = {"bfloat16": 0.99, "int8": 0.99}
"""Smallest share of images with the same most probable class, where `images` are enough."""
ENOUGH_IMAGES = 100
"""Least images to judge the share of equal classes; with fewer, one image weighs too much."""


@dataclass(frozen=True)
class Agreement:
    """How far logits are from those expected.

    Attributes:
        difference: largest difference of a logit.
        scale: largest expected logit, by its absolute value.
        cosine: smallest cosine of an image's logits with those expected.
        same_class: share of images with the same most probable class, in [0, 1].
        images: number of images.
        finite: True if no logit is NaN or infinite.
    """

    difference: float
    scale: float
    cosine: float
    same_class: float
    images: int
    finite: bool

    def refusal(self, precision: str) -> str:
        """Return why these logits are not good enough for a precision; empty if they are."""
        if not self.finite:
            return "its logits are NaN or infinite"
        if precision == "float32":
            bound = FLOAT32_BOUND * max(1.0, self.scale)
            if self.difference <= bound:
                return ""
            return f"its logits differ by {self.difference:.2g}; at most {bound:.2g} is expected"
        if self.cosine < COSINE_BOUNDS[precision]:
            return (
                f"its logits have a cosine similarity of {self.cosine:.4f} with those of float32; "
                f"at least {COSINE_BOUNDS[precision]} is expected"
            )
        if self.images >= ENOUGH_IMAGES and self.same_class < SAME_CLASS_BOUNDS[precision]:
            return (
                f"it gives the same class as float32 for {self.same_class:.1%} of the images; at "
                f"least {SAME_CLASS_BOUNDS[precision]:.0%} is expected"
            )
        return ""


def compare_logits(logits: Float[Tensor, "N K"], expected: Float[Tensor, "N K"]) -> Agreement:
    """Compare logits (N, K) with those expected (N, K), of the same images."""
    logits, expected = logits.double().cpu(), expected.double().cpu()
    return Agreement(
        difference=float((logits - expected).abs().max()),
        scale=float(expected.abs().max()),
        cosine=float(F.cosine_similarity(logits, expected, dim=1).min()),
        same_class=float((logits.argmax(1) == expected.argmax(1)).double().mean()),
        images=len(expected),
        finite=bool(torch.isfinite(logits).all()),
    )


# A trial of one engine on one model in a child process: agreement of logits, and speed.

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


CACHE_VERSION = 1
"""Changes when trials or converted models of an earlier vitkit must not be used."""
MOST_BYTES = 5 * 2**30
"""Size of all converted models that are kept; the ones used longest ago go first."""
DIGITS = 32
LASTING = ("ended by SIGFPE", "ended by SIGILL", "ended by SIGSEGV", "its logits")
"""Prefixes of failures that would happen again, so that they are not retried."""
FORGOTTEN_SECONDS = 86_400.0
"""Seconds after which other failures are retried: a busy machine, full memory."""


def _digest(*facts: object) -> str:
    text = json.dumps([CACHE_VERSION, *facts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def versions() -> dict[str, str]:
    """Return the versions of torch and of the runtimes that are installed; none is imported."""
    found = {"torch": str(torch.__version__)}
    packages = set(QUANTISERS).union(*(kind.packages for kind in ENGINES.values()))
    for package in sorted(packages):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def processor() -> str:
    """Return the name and the instructions of the processor, as far as the system tells them."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        keys = ("model name", "flags", "Features")
        return "\n".join(sorted({line for line in lines if line.startswith(keys)}))
    return f"{platform.machine()} {platform.processor()}"


def _machine_key(threads: int) -> str:
    """Return a digest of what the speed depends on: processor, cores, threads and versions."""
    cores: Iterable[int] = range(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        cores = os.sched_getaffinity(0)
    return _digest(processor(), sorted(cores), threads, versions())


def model_folder(request: EngineRequest) -> Path:
    """Return the folder of a model's trials and converted files, which may not exist yet.

    Its name is a digest of the weights, the spec, the image size, the images that int8 is
    calibrated with, and the versions.
    """
    model = request.model
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    images = "" if request.calibration is None else weights_fingerprint({"": request.calibration})
    facts = (
        weights_fingerprint(weights),
        model.spec.to_json(),
        request.image_size,
        images,
    )
    return cache_folder() / "engines" / _digest(*facts, versions())


@contextlib.contextmanager
def one_at_a_time(folder: Path, report: Callable[[str], object]) -> Iterator[None]:
    """Let only one process at a time try a model: concurrent trials would slow each other down.

    The operating system releases the lock when the process ends, however it ends.

    Args:
        folder: folder of the model; made if missing.
        report: receives a line if another process is waited for.

    Raises:
        OSError: the folder cannot be written.
    """
    from filelock import FileLock, Timeout  # here: most processes make no trials

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("another process tries the engines on this model; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def read_trials(folder: Path, threads: int) -> list[Trial]:
    """Return the trials of this machine in a model's folder; none if they cannot be read.

    A failure that may have been one of the moment is left out after a day.
    """
    path = _path(folder, threads)
    if not is_whole(path):
        return []
    trials = [Trial.from_json(values) for values in json.loads(path.read_bytes())]
    with contextlib.suppress(OSError):
        os.utime(folder)  # used now
    return [trial for trial in trials if _holds(trial)]


def _holds(trial: Trial) -> bool:
    """Return False for a failure that should be retried."""
    if trial.usable or trial.reason.startswith(LASTING):
        return True
    return 0 <= time.time() - trial.made < FORGOTTEN_SECONDS


def _write_trials(folder: Path, threads: int, trials: Iterable[Trial]) -> None:
    """Keep trials; a cache that cannot be written only costs time."""
    content = json.dumps([trial.to_json() for trial in trials], indent=1)
    path = _path(folder, threads)
    with contextlib.suppress(OSError), caching(folder) as new:
        (new / path.name).write_text(content)
    prune(folder.parent)


def _path(folder: Path, threads: int) -> Path:
    return folder / f"trials-{_machine_key(threads)}.json"


def prune(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Delete the least recently used models of `folder`, until the rest is small enough.

    The newest always stays.

    Args:
        folder: one folder a model.
        most_bytes: size of the rest.
    """
    with contextlib.suppress(OSError):
        models = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for rank, path in enumerate(models):
            total += sum(file.stat().st_size for file in path.rglob("*"))
            if rank > 0 and total > most_bytes:
                shutil.rmtree(path, ignore_errors=True)


# Trials of several engines on a model, one child process after the other, and their report.

SLOWEST = 1e10
"""Operations per second of the slowest processor, for the time limit of a trial."""
CALIBRATION_PASSES = 4
"""How often the calibration of int8 runs its images, at most."""
COMPILING = 180.0
"""Seconds more for a compiler: on a busy machine a model takes over a minute."""
FIXED_PASSES = 4
"""Batches of a trial besides those of agreement and calibration."""
FUNCTION = "vitkit.engines.trials:run_trial"
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
    _write_trials(folder, request.threads, found.values())
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


# Approximate operations of a forward pass, to estimate the time of work.


def rough_flops(spec: ViTSpec) -> float:
    """Return the operations of the blocks for one image; a multiplication and an addition are two.

    For each block 2 T D (4 D + 2 M) for the matrices, and 4 T^2 D for attention.

    >>> round(rough_flops(ViTSpec()) / 1e9)
    35
    """
    tokens, width = spec.num_patches + spec.num_prefix_tokens, spec.width
    matrices = 2 * tokens * width * (4 * width + 2 * spec.mlp_width)
    return float(spec.depth * (matrices + 4 * tokens**2 * width))


# Images for trials where the user gives none: noise with the statistics of photographs.

DECAY = 1.0
"""The amplitude of a spatial frequency f is 1 / f in photographs (Field, 1987)."""


def sample_images(
    count: int, channels: int, image_size: tuple[int, int], seed: int = 0
) -> Float[Tensor, "B C H W"]:
    """Return noise of mean 0 and deviation 1 with the spectrum of photographs (B, C, H, W).

    White noise would not do: a model sees the same grey in every patch of it.

    Args:
        count: B.
        channels: C.
        image_size: (H, W) in pixels.
        seed: seed of the noise.
    """
    height, width = image_size
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, channels, height, width, generator=generator)
    rows = torch.fft.fftfreq(height)[:, None] * height
    columns = torch.fft.rfftfreq(width)[None, :] * width
    frequency = (rows**2 + columns**2).sqrt().clamp(min=1.0)
    images = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency**DECAY, s=image_size)
    mean, std = images.mean((2, 3), keepdim=True), images.std((2, 3), keepdim=True)
    return (images - mean) / (std + 1e-6)

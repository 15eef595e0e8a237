"""A benchmark from a model's name to its result: processes, logits, turns, tasks."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from versus import per_second, speed_ratio, turn_order
from versus.baselines import Library
from versus.child import Child, ChildError, Request
from versus.inference import probes
from versus.machine import machine_facts
from vitkit.engines.choose import disagreement
from vitkit.errors import CheckpointError
from vitkit.layer_table import summary
from vitkit.models.presets import table
from vitkit.other_names import usual_name
from vitkit.spec import Preprocess
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load
from vitkit.weights.pretrained import create_model
from vitkit.weights.write import write_checkpoint

MODULES = {"inference": "inference", "latency": "inference", "training": "training"}
"""Task -> the module that builds it; inference and latency share their processes."""
TRAINING_PASSES = 3
"""Forward passes that a step is worth: a backward pass has twice the products."""
TRAINED_ENGINES = ("torch", "compile")
INT8_COSINE = 0.9
"""Smallest cosine of an image's logits with ours. An engine that is used must keep 0.99; here the
weights may be untrained, whose logits are small beside the rounding, and speed does not depend on
them. Other weights give a cosine near 0."""
LOSS_BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest difference of the first losses, as a part of the loss (at least 1)."""
NOISE = 0.1
"""Standard deviation of what is added to biases of untrained models, and to a head of zeros."""
Result = dict[str, Any]


@dataclass
class _Running:
    """A library that takes part, with its process and what is known of it."""

    name: str
    library: Library
    child: Child
    built: Request
    logits: torch.Tensor
    expected: torch.Tensor
    seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0


def measure(args: argparse.Namespace, libraries: list[Library], left_out: dict[str, str]) -> Result:
    """Measure all tasks, one after the other; the first library is the base of all ratios.

    Raises:
        VitkitError: a model that cannot be read, or a process that ended while it was timed.
    """
    checkpoint = _open_model(args.model)
    facts = machine_facts()
    before = _products(args, libraries)
    with tempfile.TemporaryDirectory() as folder:
        tasks = _Benchmark(args, checkpoint, Path(folder)).run(libraries)
    # the larger of two measurements: other programs make it smaller
    peaks = {key: max(speed, before[key]) for key, speed in _products(args, libraries).items()}
    for task in tasks:
        for row in task["rows"]:
            speed = row["images_per_second"][0] * task["operations_per_image"]
            found = [peaks[key] for key in peaks if key.startswith(f"{row['precision']} ")]
            row["share_of_peak"] = speed / max(found) if found else None
    return {"benchmark": 3, "settings": vars(args), "machine": facts, "matrix_products": peaks,
            "tasks": tasks, "left_out": left_out}  # fmt: skip


def _report(line: str) -> None:
    """Print on stderr what is done now, as a benchmark takes minutes."""
    print(line, file=sys.stderr, flush=True)


def _open_model(name: str) -> Checkpoint:
    """Return a checkpoint, or an untrained model by its name; speed does not depend on weights."""
    if not os.path.exists(name):
        name = usual_name(name, table())
    if os.path.exists(name) or Path(name).suffix or "/" in name:
        checkpoint = load(name)
    else:
        torch.manual_seed(0)
        model = create_model(name).eval()
        _unsettle(model)
        classes = tuple(f"class {number}" for number in range(model.spec.num_classes))
        checkpoint = Checkpoint(model, Preprocess(image_size=model.spec.image_size), classes)
    if not checkpoint.model.spec.num_classes:
        raise CheckpointError(f"{name}: it has no logits to compare; choose a model with classes")
    return checkpoint


@torch.no_grad()
def _unsettle(model: torch.nn.Module) -> None:
    """Add noise to what is 0 or 1 in an untrained model, so that logits show mistakes in it.

    The biases of query, key and value stay zero: vit-pytorch has none.
    """
    for name, parameter in model.named_parameters():
        if ".attn.qkv." not in name and (parameter.ndim == 1 or not parameter.any()):
            parameter.add_(torch.randn(parameter.shape), alpha=NOISE)


def _products(args: argparse.Namespace, libraries: list[Library]) -> dict[str, float]:
    """Return the speeds of matrix products by `precision library`, in operations per second.

    No library has a plain product in int8 that is as fast as those inside of quantised models.
    """
    found: dict[str, float] = {}
    precisions = {one.precision for one in libraries} & set(LOSS_BOUNDS) if args.peak else ()
    for precision in sorted(precisions):
        child = Child(args.threads)
        speeds = child.ask("products", precision=precision, threads=args.threads)
        child.close()
        found |= {f"{precision} {name}": speed for name, speed in speeds.items()}
    return found


class _Benchmark:
    """The tasks of a benchmark of one model, whose files are written to a folder."""

    def __init__(self, args: argparse.Namespace, checkpoint: Checkpoint, folder: Path) -> None:
        self._args, self._checkpoint, self._folder = args, checkpoint, folder
        self._written: dict[str, Request] = {}
        spec = checkpoint.model.spec
        with torch.inference_mode():
            self._expected = checkpoint.model(probes(spec))
            size = (1, spec.in_channels, *spec.image_size)
            self._operations = 2.0 * summary(checkpoint.model, size).mult_adds

    def run(self, libraries: list[Library]) -> list[Result]:
        """Measure the chosen tasks."""
        made: list[Result] = []
        for module in dict.fromkeys(MODULES[task] for task in self._args.tasks):
            tasks = [task for task in self._args.tasks if MODULES[task] == module]
            not_timed: dict[str, str] = {}
            running: list[_Running] = []
            try:
                self._build(module, libraries, running, not_timed)
                made += [self._timed(task, running) | {"not_timed": not_timed} for task in tasks]
            finally:
                for one in running:
                    one.child.close()
        return made

    def _build(
        self, module: str, libraries: list[Library], running: list[_Running], not_timed: Result
    ) -> None:
        """Build all libraries whose logits are ours, then the first one again; note the others."""
        waiting = [(one.name, one) for one in _able(module, libraries, not_timed)]
        for name, library in waiting:
            _report(f"{module}: building {name}")
            child = Child(self._args.threads)
            try:
                built = child.ask("build", **self._request(module, library))
                logits = torch.tensor(built["logits"])
                one = _Running(name, library, child, built, logits, self._expected)
                problem = _refusal(module, one, running[0] if running else one)
                if problem:
                    raise ChildError(f"not equal: {problem}")
            except ChildError as error:
                not_timed[name] = str(error)
                child.close()
            else:
                running.append(one)
                if len(running) == 1:  # its ratio to itself is the noise
                    waiting.append((f"{name}, again", library))

    def _request(self, module: str, library: Library) -> Request:
        """Return what the process of a library must know; refuse a format without the model."""
        own = self._files("vitkit")
        request = {**asdict(library), "module": module, "threads": self._args.threads,
                   "batch_size": self._args.batch_size, "own": own["path"]}  # fmt: skip
        form = "timm" if library.kind == "runtime" else library.source
        if library.kind == "engine" or form == "vit-pytorch":
            return request | own
        try:
            return request | self._files(form)
        except CheckpointError as error:
            if library.kind == "runtime":
                return request | own
            raise ChildError(str(error)) from None

    def _files(self, form: str) -> Request:
        """Write the model in a format, also where it cannot store it exactly: logits decide."""
        if form not in self._written:
            place = self._folder / form
            spec = write_checkpoint(self._checkpoint, place, form, True, before={}).spec
            self._written[form] = {"path": str(place), "spec": spec.to_json()}
        return self._written[form]

    def _timed(self, task: str, running: list[_Running]) -> Result:
        """Time all libraries in turn."""
        count = 1 if task == "latency" else self._args.batch_size
        for one in running:
            _report(f"{task}: warming up {one.name}")
            one.child.ask("fit", batch_size=count)
            one.seconds = []
        _report(f"{task}: {self._args.rounds} rounds of {len(running)} libraries")
        by_name = {one.name: one for one in running}
        for name in turn_order(by_name, self._args.rounds):
            reply = by_name[name].child.ask("run", seconds=self._args.seconds)
            by_name[name].seconds.append(reply["seconds"])
            by_name[name].peak_mb = reply["peak_mb"]
        rows = [_row(one, running[0], count) for one in running]
        operations = self._operations * (TRAINING_PASSES if task == "training" else 1)
        return {"task": task, "batch_size": count, "operations_per_image": operations,
                "rows": rows, "fastest": _fastest(rows)}  # fmt: skip


def _able(module: str, libraries: list[Library], not_timed: Result) -> list[Library]:
    """Return the libraries that have a task; note the others."""
    able = []
    for one in libraries:
        trains = one.kind == "library" or one.source in TRAINED_ENGINES
        if module == "training" and not (trains and one.precision in LOSS_BOUNDS):
            not_timed[one.name] = "does not train; libraries and vitkit torch and compile do"
        else:
            able.append(one)
    return able


def _refusal(module: str, one: _Running, base: _Running) -> str:
    """Return why a library does not compute what we do; empty if it does."""
    # a training step is compared before it begins, in float32
    precision = "float32" if module == "training" else one.library.precision
    if precision == "int8" and one.logits.isfinite().all():
        cosine = _agreement(one)["cosine"]
        return f"a cosine of {cosine:.3f} with our logits" if cosine < INT8_COSINE else ""
    problem = disagreement(one.logits, one.expected, precision)
    loss, expected = one.built["loss"], base.built["loss"]
    if problem or loss is None:
        return problem
    bound = max(LOSS_BOUNDS[each.library.precision] for each in (one, base))
    if abs(loss - expected) <= bound * max(1.0, abs(expected)):
        return ""
    return f"the loss of its first step is {loss:.6g}; {expected:.6g} is expected"


def _agreement(one: _Running) -> dict[str, float]:
    """Return how far a library's logits are from ours."""
    return {
        "difference": float((one.logits - one.expected).abs().max()),
        "scale": float(one.expected.abs().max()),
        "cosine": float(cosine_similarity(one.logits, one.expected).min()),
    }


def _row(one: _Running, first: _Running, count: int) -> Result:
    """Return what is known of a library, as plain values."""
    return {
        "library": one.name,
        "is_baseline": one.library.kind != "engine",
        "is_again": one is not first and one.library == first.library,
        "precision": one.library.precision,
        "version": one.built["version"],
        "logits": _agreement(one),
        "images_per_second": per_second(one.seconds, count),
        "faster": speed_ratio(one.seconds, first.seconds),
        "seconds": one.seconds,
        "peak_mb": one.peak_mb,
    }


def _fastest(rows: list[Result]) -> Result | None:
    """Return the fastest of vitkit beside the fastest of the baselines, if there are both."""
    best: dict[bool, Result] = {}
    for row in sorted(rows, key=lambda row: row["images_per_second"]):
        if not row["is_again"]:
            best[row["is_baseline"]] = row
    if len(best) < 2:
        return None
    own, baseline = best[False], best[True]
    return {"vitkit": own["library"], "baseline": baseline["library"],
            "faster": speed_ratio(own["seconds"], baseline["seconds"])}  # fmt: skip

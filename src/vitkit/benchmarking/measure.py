"""A benchmark from a model's name to its result: processes, logits, turns, tasks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitkit.benchmarking.contender_process.image_loading import LOADERS, write_photographs
from vitkit.benchmarking.contenders import PEERS, Contender, Lineup
from vitkit.benchmarking.machine import MachineRecord
from vitkit.benchmarking.model_files import WrittenFormats, reference_logits, write_model_files
from vitkit.benchmarking.processes import ContenderError, Worker
from vitkit.benchmarking.result import BenchmarkResult, BenchmarkRow, TaskName, TaskResult
from vitkit.benchmarking.settings import BenchmarkSettings
from vitkit.benchmarking.statistics import turn_order
from vitkit.engines.choosing.agreement import Agreement, compare_logits
from vitkit.layer_table import summary
from vitkit.models.vit import ViT
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.formats.description import OWN_FORMAT

DISTRIBUTIONS = (
    "vitkit",
    "torch",
    "numpy",
    "timm",
    "transformers",
    "torchvision",
    "vit-pytorch",
    "onnxruntime",
    "onnx",
    "onnxscript",
    "openvino",
    "nncf",
)
TRAINING_PASSES = 3
"""Forward passes that a training step is worth: the backward pass has twice the products."""
INT8_COSINE = 0.9
"""Smallest cosine of an image's logits with ours. An engine that is used must keep 0.99; here the
weights may be untrained, whose logits are small beside the rounding, and speed does not depend on
them. Other weights give a cosine near 0."""
LOSS_BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest difference of the first losses, as a part of the loss (at least 1)."""
PEAK_PRECISIONS = ("float32", "bfloat16")
"""Precisions of which the peak of matrix products is measured. No library has a plain product in
int8 that is as fast as those inside of quantised models, so the share of it would be no share."""
TRAINED_ENGINES = ("torch", "compile")
Report = Callable[[str], object]
Request = dict[str, Any]


@dataclass
class _Measured:
    """A contender that takes part, with its process and what is known of it."""

    contender: Contender
    worker: Worker
    library: str
    build_seconds: float
    loss: float | None = None
    agreement: Agreement | None = None
    warm_up_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)


class Benchmark:
    """A benchmark of one model.

    Args:
        name: of the model, as it was given.
        checkpoint: the model in eval mode.
        lineup: the contenders.
        settings: precision, threads, rounds and tasks.
        report: called with a line on what is done now.
    """

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        lineup: Lineup,
        settings: BenchmarkSettings,
        report: Report = lambda line: None,
    ) -> None:
        self._name, self._checkpoint = name, checkpoint
        self._lineup, self._settings, self._report = lineup, settings, report
        self._reference = reference_logits(checkpoint.model)
        self._operations = 2.0 * _mult_adds(checkpoint.model)

    def run(self) -> BenchmarkResult:
        """Measure all tasks, one after the other."""
        machine = MachineRecord(DISTRIBUTIONS)
        products = self._matrix_products()
        formats = {one.source for one in self._lineup.contenders if one.kind == "library"}
        if any(one.kind == "runtime" for one in self._lineup.contenders):
            formats.add("timm")  # a runtime converts timm's model, where it has one
        tasks: list[TaskResult] = []
        with tempfile.TemporaryDirectory() as folder:
            self._report("writing the weights for each library")
            place = Path(folder)
            model = write_model_files(self._checkpoint, place / "weights", sorted(formats))
            chosen = self._settings.tasks
            if "inference" in chosen or "latency" in chosen:
                tasks += self._forward_passes(model)
            if "training" in chosen:
                tasks.append(self._training(model))
            if "loader" in chosen:
                tasks.append(self._loading(place / "photographs"))
        products = _larger(products, self._matrix_products())
        return BenchmarkResult(
            self._name,
            self._settings.to_json(),
            machine.to_json(),
            products,
            tuple(tasks),
            self._lineup.left_out,
        )

    def _matrix_products(self) -> dict[str, dict[str, float]]:
        """Return the speed of matrix products, by precision and library, where it is known."""
        products: dict[str, dict[str, float]] = {}
        threads = self._settings.threads
        for precision in dict.fromkeys(one.precision for one in self._lineup.contenders):
            if precision not in PEAK_PRECISIONS:
                continue
            self._report(f"measuring the peak of matrix products in {precision}")
            with Worker(threads) as worker, suppress(ContenderError):
                found = worker.ask("peak", precision=precision, threads=threads)
                products[precision] = found["products"]
        return products

    def _forward_passes(self, model: WrittenFormats) -> Iterator[TaskResult]:
        """Measure inference, then latency, by the same processes."""
        excluded: dict[str, str] = {}
        request = partial(self._request, "inference", model)
        with self._built(self._lineup.contenders, request, excluded) as built:
            tasks: tuple[tuple[TaskName, int], ...] = (
                ("inference", self._settings.batch_size),
                ("latency", 1),
            )
            for task, count in tasks:
                if task in self._settings.tasks:
                    yield self._timed(task, built, count, excluded, self._operations)

    def _training(self, model: WrittenFormats) -> TaskResult:
        excluded: dict[str, str] = {}
        able = []
        for contender in self._lineup.contenders:
            if contender.precision not in LOSS_BOUNDS:
                excluded[contender.name] = f"training has no {contender.precision}"
            elif contender.kind == "library" or contender.source in TRAINED_ENGINES:
                able.append(contender)
            else:
                excluded[contender.name] = f"does not train; {' and '.join(TRAINED_ENGINES)} do"
        request = partial(self._request, "training", model)
        with self._built(able, request, excluded) as built:
            operations = TRAINING_PASSES * self._operations
            return self._timed("training", built, self._settings.batch_size, excluded, operations)

    def _loading(self, folder: Path) -> TaskResult:
        """Measure the loaders of the chosen libraries, and vitkit's, on one thread each."""
        write_photographs(folder, self._settings.batch_size)
        excluded: dict[str, str] = {}
        contenders = []
        for one in self._lineup.contenders:
            if one.kind == "library" and one.source in LOADERS:
                contenders.append(PEERS[one.source])  # a loader has no precision
        contenders.append(Contender("vitkit", "engine", "vitkit"))

        def request(contender: Contender) -> Request:
            return {
                "task": "loader",
                "source": contender.source,
                "threads": 1,
                "folder": str(folder),
                "image_size": self._checkpoint.model.spec.image_size,
                "batch_size": self._settings.batch_size,
            }

        with self._built(dict.fromkeys(contenders), request, excluded) as built:
            return self._timed("loader", built, self._settings.batch_size, excluded)

    @contextmanager
    def _built(
        self,
        contenders: Iterable[Contender],
        request: Callable[[Contender], Request],
        excluded: dict[str, str],
    ) -> Iterator[list[_Measured]]:
        """Build all contenders whose logits are ours, the first one twice; note the others."""
        built: list[_Measured] = []
        with ExitStack() as stack:

            def add(contender: Contender) -> None:
                self._report(f"building {contender.name}")
                with ExitStack() as own:  # its process goes on only if it takes part
                    try:
                        given = request(contender)
                        worker = own.enter_context(Worker(given["threads"]))
                        built.append(self._build(contender, worker, given, built))
                    except ContenderError as error:
                        excluded[contender.name] = str(error)
                    else:
                        stack.enter_context(own.pop_all())

            for contender in contenders:
                add(contender)
            if built:
                add(built[0].contender.again())
            yield built

    def _request(self, task: str, model: WrittenFormats, contender: Contender) -> Request:
        """Return what the process of a contender must know.

        Raises:
            ContenderError: its format cannot hold the model.
        """
        form = {"engine": OWN_FORMAT, "runtime": "timm"}.get(contender.kind, contender.source)
        if form in model.refused and contender.kind == "library":
            raise ContenderError(model.refused[form])
        files = model.files.get(form, model.files[OWN_FORMAT])
        return {
            **contender.to_json(),
            "task": task,
            "own": model.files[OWN_FORMAT].path,
            "path": files.path,
            "spec": files.spec,
            "changes": files.changes,
            "norm_eps": self._checkpoint.model.spec.norm_eps,
            "threads": self._settings.threads,
            "batch_size": self._settings.batch_size,
        }

    def _build(
        self, contender: Contender, worker: Worker, given: Request, built: list[_Measured]
    ) -> _Measured:
        """Build a contender in its process, and compare its logits with ours.

        Raises:
            ContenderError: it cannot be built, or computes another model.
        """
        reply = worker.ask("build", **given)
        measured = _Measured(
            contender, worker, reply["library"], reply["build_seconds"], reply.get("loss")
        )
        if "logits" in reply:
            # a training step is compared before it begins, in float32
            precision = "float32" if given["task"] == "training" else contender.precision
            measured.agreement = compare_logits(torch.tensor(reply["logits"]), self._reference)
            refusal = _refusal(measured.agreement, precision)
            if not refusal and built:
                refusal = _other_loss(measured, built[0])
            if refusal:
                raise ContenderError(_not_equal(refusal, given["changes"]))
        return measured

    def _timed(
        self,
        task: TaskName,
        built: list[_Measured],
        count: int,
        excluded: dict[str, str],
        operations: float = 0.0,
    ) -> TaskResult:
        """Time all contenders in turn; one whose process ends is noted, and the others go on."""
        active = {one.contender.name: one for one in built}
        ended = dict(excluded)
        for one in built:
            self._report(f"{task}: warming up {one.contender.name}")
            one.seconds = []
            with _noting(one, active, ended):
                reply = one.worker.ask("fit", batch_size=count)
                one.warm_up_seconds = reply["warm_up_seconds"]
        self._report(f"{task}: {self._settings.rounds} rounds of {len(active)} contenders")
        for name in turn_order(list(active), self._settings.rounds):
            if name in active:
                with _noting(active[name], active, ended):
                    reply = active[name].worker.ask("run", seconds=self._settings.seconds)
                    active[name].seconds.append(reply["seconds"])
        rows: list[BenchmarkRow] = []
        again = None
        for one in list(active.values()):
            with _noting(one, active, ended):
                row = _row(one, count, one.worker.ask("memory")["peak_mb"])
                if not one.contender.is_again:
                    rows.append(row)
                elif built[0].contender.name in active:
                    again = row
        return TaskResult(task, count, tuple(rows), again, ended, operations)


@contextmanager
def _noting(one: _Measured, active: dict[str, _Measured], ended: dict[str, str]) -> Iterator[None]:
    """Leave out a contender whose process fails inside the block."""
    try:
        yield
    except ContenderError as error:
        active.pop(one.contender.name, None)
        ended[one.contender.name] = str(error)


def _larger(
    first: dict[str, dict[str, float]], second: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the larger of two measurements of each product: other programs make it smaller."""
    larger: dict[str, dict[str, float]] = {}
    for precision in first | second:
        one, other = first.get(precision, {}), second.get(precision, {})
        larger[precision] = {
            library: max(one.get(library, 0.0), other.get(library, 0.0)) for library in one | other
        }
    return larger


def _row(one: _Measured, count: int, peak_mb: float) -> BenchmarkRow:
    found = one.agreement
    return BenchmarkRow(
        contender=one.contender.name,
        is_ours=one.contender.is_ours,
        precision=one.contender.precision,
        library=one.library,
        seconds=tuple(one.seconds),
        images=count,
        agreement=found,
        peak_mb=peak_mb,
        build_seconds=one.build_seconds,
        warm_up_seconds=one.warm_up_seconds,
    )


def _refusal(found: Agreement, precision: str) -> str:
    """Return why logits are not those of the same model; empty if they are."""
    if precision != "int8" or not found.finite:
        return found.refusal(precision)
    if found.cosine >= INT8_COSINE:
        return ""
    return f"its logits have a cosine of {found.cosine:.3f} with ours; {INT8_COSINE} is expected"


def _other_loss(measured: _Measured, base: _Measured) -> str:
    """Return why the first step of a contender is not that of another one; empty if it is."""
    loss, expected = measured.loss, base.loss
    if loss is None or expected is None:
        return ""
    bound = max(LOSS_BOUNDS[one.contender.precision] for one in (measured, base))
    if abs(loss - expected) <= bound * max(1.0, abs(expected)):
        return ""
    return f"the loss of its first step is {loss:.6g}; {expected:.6g} is expected"


def _not_equal(refusal: str, changes: str) -> str:
    because = f"; its format cannot store: {changes}" if changes else ""
    return f"not equal: {refusal}{because}"


def _mult_adds(model: ViT) -> int:
    """Return the multiply-adds of one image's forward pass."""
    spec = model.spec
    with torch.no_grad():
        return summary(model, (1, spec.in_channels, *spec.image_size)).mult_adds

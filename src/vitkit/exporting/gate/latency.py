"""The latency of an exported model beside that of its baseline, measured in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vitkit.data.images.preprocess import preprocess_images
from vitkit.errors import CheckpointError
from vitkit.exporting.files.description import ArtefactDescription
from vitkit.exporting.gate.checks import NOT_WRITTEN, GateBounds, artefact_inputs, torch_logits
from vitkit.exporting.gate.fresh_process import FreshProcess
from vitkit.weights.checkpoint import Checkpoint

ROUNDS = 7
RUNS = 3
"""Runs of a batch in each round; the fastest of all counts, as other work only adds to a run."""
SLOWEST = {"torch": 1.5, "float32": 1.05}
"""Baseline -> how many times as long the exported model may take."""


def measure_latency(
    checkpoint: Checkpoint,
    image: np.ndarray,
    process: FreshProcess,
    description: ArtefactDescription,
    baseline: FreshProcess | None,
) -> dict[str, Any]:
    """Return the latency of one image by the exported model and by its baseline.

    Both run in turns, so that other work on the machine meets both; each one's fastest run counts.

    Args:
        checkpoint: checkpoint of the exported model.
        image: RGB (H, W, 3) uint8.
        process: runs the exported model.
        description: description of it.
        baseline: runs the same model in float32 by the same runtime; None: torch, from the decoded
            image on where the preprocessing is inside.
    """
    inputs = preprocess_images([image], checkpoint.preprocess)
    batch = artefact_inputs([image], description)

    def run_torch() -> None:
        prepared = inputs
        if description.with_preprocessing:
            prepared = preprocess_images([image], checkpoint.preprocess)
        torch_logits(checkpoint, prepared)

    def by_baseline(times: int) -> Sequence[float]:
        return _seconds(run_torch, times) if baseline is None else baseline.seconds(batch, times)

    by_baseline(1)  # the first run prepares memory
    process.seconds(batch, 1)
    exported: list[float] = []
    reference: list[float] = []
    for _ in range(ROUNDS):
        exported += process.seconds(batch, RUNS)
        reference += by_baseline(RUNS)
    return {
        "batch_size": 1,
        "exported_ms": 1000 * min(exported),
        "baseline_ms": 1000 * min(reference),
        "baseline": "torch" if baseline is None else "float32",
        "ratio": min(exported) / min(reference),
    }


def _seconds(run: Callable[[], None], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def refuse_slower(
    latency: dict[str, Any], description: ArtefactDescription, bounds: GateBounds
) -> None:
    """Refuse an exported model that is slower than its baseline allows.

    A float32 graph with preprocessing has no bound: its resize costs more than Pillow's, and takes
    the place of code outside.

    Raises:
        CheckpointError: it is slower than the bound.
    """
    bound = SLOWEST[latency["baseline"]]
    unbounded = description.with_preprocessing and latency["baseline"] == "torch"
    if bounds.allow_slower or unbounded or latency["ratio"] <= bound:
        return
    baselines = {"torch": "torch", "float32": "the same runtime in float32"}
    raise CheckpointError(
        f"export refused, {NOT_WRITTEN}: it takes {latency['exported_ms']:.2f} ms per image, "
        f"{latency['ratio']:.2f} times as long as {baselines[latency['baseline']]} "
        f"({latency['baseline_ms']:.2f} ms; bound {bound:g}); pass --allow-slower "
        "(allow_slower=True) to accept it"
    )

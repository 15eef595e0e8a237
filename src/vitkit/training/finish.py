"""The end of a run: temperature, confusion matrix, and the test split, read once."""

from __future__ import annotations

from collections.abc import Iterator

from vitkit.evaluation.confusion_plot import MAX_CLASSES, confusion_matrix, png
from vitkit.evaluation.metrics import Metrics, headline
from vitkit.evaluation.predict import LabelledLogits, count_predictions, evaluate_outputs
from vitkit.evaluation.temperature import calibrate
from vitkit.io.atomic import write_bytes
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.training.monitoring.metric_files import tested_at
from vitkit.training.parallel.fsdp import place_like, unsharded_model
from vitkit.training.run import Run
from vitkit.training.run_evaluation import evaluate_split
from vitkit.weights.formats.vitkit import DESCRIBED, save
from vitkit.weights.load import load

MOST_LOGITS = 2**28
"""Validation logits that the temperature is fitted on at most, 1 GB; of more, every n-th batch."""


def finish_run(run: Run, stopped: str) -> dict[str, Metrics]:
    """Evaluate the best weights on the test split once, and write its score beside them.

    A finished run that is resumed has read the split already; only other weights are tested again.

    Args:
        run: after its last step.
        stopped: why it ended.

    Returns:
        Split -> metrics of the best weights.

    Raises:
        Interrupted: a signal came; the run goes on with this.
        OutputError: the run folder cannot be written.
    """
    plan, folder, log, world = run.plan, run.folder, run.log, run.world
    if not world.broadcast_from_main(folder.best.exists):  # stopped before the first epoch ended
        log.info(f"ended after {stopped}; weights: {folder.last}")
        return {}
    best = load(folder.best)
    metrics: dict[str, Metrics] = dict(best.metadata["metrics"])
    splits = plan.dataset.splits
    # the file has whole weights; a sharded run evaluates them in shards
    model = place_like(best.model, run.model, world, plan.device)
    temperature = _calibrate(run, model) if "val" in splits else None
    if "test" in splits and plan.config.test:
        metrics["test"] = _test(run, model, metrics.get("test"), temperature)
    # `save` writes these itself; an old temperature was fitted by an earlier end
    rest = {key: v for key, v in best.metadata.items() if key not in (*DESCRIBED, "temperature")}
    rest["metrics"] = metrics
    if temperature:
        rest["temperature"] = temperature
    described = {"preprocess": best.preprocess, "classes": best.classes, **rest}
    whole = unsharded_model(model, world)
    world.broadcast_from_main(lambda: str(save(folder.best, whole, **described)))
    if run.progress.skipped:
        log.info(
            f"{plural(run.progress.skipped, 'step')} skipped: loss or gradient was NaN or infinite"
        )
    log.info(f"ended after {stopped}; best weights: {folder.best}")
    return metrics


def _test(run: Run, model: ViT, before: Metrics | None, temperature: float | None) -> Metrics:
    """Return the scores on the test split, read now unless these weights have them already."""
    tested = run.world.broadcast_from_main(lambda: tested_at(run.folder))
    if before is not None:
        test, how = before, "evaluated before"
    else:
        classes = run.plan.spec.num_classes
        outputs = evaluate_split(run, "test", model)
        test, _ = evaluate_outputs(outputs, classes, temperature or 1.0, run.world)
        how = (
            f"evaluated again (with other weights after step {tested[-1]})"
            if tested
            else "evaluated once"
        )
    shown = "  ".join(headline(test))
    run.log.info(
        f"test split, {plural(int(test['images']), 'image')}, {how}, best weights: {shown}"
    )
    run.log.scored("test", run.progress.step, test)
    return test


def _calibrate(run: Run, model: ViT) -> float | None:
    """Fit the temperature on the validation images, and draw their confusion matrix."""
    plan, world, log = run.plan, run.world, run.log
    classes = plan.spec.num_classes
    # every n-th batch, rounded up
    every = -(-len(plan.dataset.splits["val"]) * classes // MOST_LOGITS)
    sample: list[LabelledLogits] = []

    def sampled() -> Iterator[LabelledLogits]:
        for number, (logits, labels) in enumerate(evaluate_split(run, "val", model)):
            if number % every == 0:
                sample.append((logits.cpu(), labels))
            yield logits, labels

    counts = count_predictions(sampled(), classes)
    calibration = calibrate(sample, world)
    log.info(f"best weights: {calibration.message}")
    if classes <= MAX_CLASSES:
        drawn = confusion_matrix(counts.confusion(world), plan.dataset.classes, "validation")
        world.broadcast_from_main(lambda: write_bytes(run.folder.confusion, png(drawn)))
        if plan.config.log_examples:
            log.image("val/confusion_matrix", drawn, run.progress.step, at_end=True)
    return calibration.temperature

"""The end of a run: temperature, figures, and the test split, read once."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from vitkit.evaluation.evaluation_loop import count_predictions, evaluate_outputs
from vitkit.evaluation.metrics import Metrics, PredictionCounts, headline
from vitkit.evaluation.result import Evaluation
from vitkit.evaluation.temperature import Calibration, calibrate
from vitkit.evaluation.user_metrics import KeptOutputs, finite_scores, load_metrics
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.plots import MAX_CLASSES
from vitkit.training.monitoring.metric_files import tested_at, write_predictions
from vitkit.training.monitoring.plot_files import write_confusion, write_curves
from vitkit.training.parallel.fsdp import place_like, unsharded_model
from vitkit.training.run import Run
from vitkit.training.run_evaluation import evaluate_split
from vitkit.training.state.best_weights import load_best, stored_scores
from vitkit.weights.formats.vitkit import DESCRIBED, save


def finish_run(run: Run, stopped: str) -> dict[str, Metrics]:
    """Evaluate the best weights on the test split once, and write its score beside them.

    A finished run that is resumed has read the split already; only other weights are tested again.

    Args:
        run: after its last step.
        stopped: why it ended.

    Returns:
        Split -> metrics of the best weights.

    Raises:
        Interrupted: a signal came; a resumed run continues with this function.
        OutputError: the run folder cannot be written.
        CheckpointError: the file of the best weights is another model's.
        UserCodeError: a metric of the user raised.
    """
    plan, folder, log, world = run.plan, run.folder, run.log, run.world
    if not world.broadcast_from_main(folder.best.exists):  # stopped before the first epoch ended
        log.info(f"ended after {stopped}; weights: {folder.last}")
        return {}
    best = load_best(folder.best, plan.spec.num_classes)
    splits = plan.dataset.splits
    # the file has whole weights; a sharded run evaluates them in shards
    model = place_like(best.model, run.model, world, plan.device)
    metrics = stored_scores(best)
    if "val" in splits and "val" not in metrics:
        metrics["val"] = _validate(run, model)
    temperature = _calibrate(run, model) if "val" in splits else None
    if "test" in splits and plan.config.test:
        metrics["test"] = _test(run, model, metrics.get("test"), temperature)
    # `save` writes these itself; an old temperature is from an earlier end of the run
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
    # a probe trains no epochs
    if plan.config.plots and plan.config.probe is None:
        world.broadcast_from_main(lambda: write_curves(folder, log.info))
    log.info(f"ended after {stopped}; {_chosen(run)}: {folder.best}")
    return metrics


def _chosen(run: Run) -> str:
    """Describe which weights are kept."""
    has_validation = "val" in run.plan.dataset.splits
    return "best weights" if has_validation else "weights of the last epoch"


def _validate(run: Run, model: ViT) -> Metrics:
    """Compute the validation scores of weights whose file has none."""
    run.log.info(f"{run.folder.best} has no validation scores; its weights are evaluated now")
    own = load_metrics(run.plan.config.metrics)
    outputs = KeptOutputs(evaluate_split(run, "val", model), keep=bool(own))
    counts = count_predictions(outputs, run.plan.spec.num_classes)
    scores = counts.counts(run.world).scores() | outputs.scores(own, run.world)
    return finite_scores(scores)


def _test(run: Run, model: ViT, before: Metrics | None, temperature: float | None) -> Metrics:
    """Return the scores on the test split, computed now unless these weights have them already."""
    tested = run.world.broadcast_from_main(lambda: tested_at(run.folder))
    if before is not None:
        test, how = before, "evaluated at an earlier end of this run"
    else:
        classes = run.plan.spec.num_classes
        own = load_metrics(run.plan.config.metrics)
        outputs = KeptOutputs(evaluate_split(run, "test", model), keep=bool(own))
        test, counts = evaluate_outputs(outputs, classes, temperature or 1.0, run.world)
        _write_confusion(run, "test", counts)
        test |= finite_scores(outputs.scores(own, run.world))
        _write_predictions(run, test, counts.gathered(run.world))
        how = "evaluated once"
        if tested:
            how = f"evaluated again (with other weights after step {tested[-1]})"
    shown = "  ".join(headline(test))
    run.log.info(
        f"test split, {plural(int(test['images']), 'image')}, {how}, {_chosen(run)}: {shown}"
    )
    run.log.scored("test", run.progress.step, test)
    return test


def _write_predictions(run: Run, scores: Metrics, counts: PredictionCounts) -> None:
    """Write the prediction and the loss of every test image."""
    dataset = run.plan.dataset
    evaluation = Evaluation(scores, counts, dataset.splits["test"], dataset.classes, "test")
    run.world.broadcast_from_main(lambda: write_predictions(run.folder, evaluation))


def _calibrate(run: Run, model: ViT) -> float | None:
    """Fit the temperature on held-out logits; draw their confusion matrix if no test follows."""
    plan, log = run.plan, run.log
    assert run.held_out is not None, "there is a validation split"
    if run.held_out.is_complete:
        calibration = calibrate([run.held_out.predictions()])
    else:
        calibration = Calibration(
            None,
            "temperature left at 1: the validation logits of the first epochs are missing, "
            f"{run.folder.held_out}",
        )
    log.info(f"best weights: {calibration.message}")
    # the figure shows the split of the last printed score
    is_last = "test" not in plan.dataset.splits or not plan.config.test
    if is_last and _is_drawn(run):
        outputs = evaluate_split(run, "val", model)
        _write_confusion(run, "val", count_predictions(outputs, plan.spec.num_classes))
    return calibration.temperature


def _is_drawn(run: Run) -> bool:
    """Return whether the run draws a confusion matrix."""
    return run.plan.config.plots and run.plan.spec.num_classes <= MAX_CLASSES


def _write_confusion(run: Run, split: str, counts: PredictionCounts) -> None:
    """Write the confusion matrix of a split if it is enabled. Each process must call."""
    if _is_drawn(run):
        table = counts.confusion(run.world)
        run.world.broadcast_from_main(lambda: _draw_confusion(run, split, table))


def _draw_confusion(run: Run, split: str, counts: Int64[np.ndarray, "K K"]) -> None:
    """Write the confusion matrix of a split, and show it in TensorBoard."""
    classes = run.plan.dataset.classes
    pixels = write_confusion(run.folder, split, counts, classes, run.log.info)
    if pixels is not None and run.plan.config.log_examples:
        run.log.image(f"{split}/confusion_matrix", pixels, run.progress.step, at_end=True)

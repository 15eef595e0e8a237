"""The end of a run: temperature, figures, the test split read once; probes."""

from functools import partial

from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.evaluation import features, loop, result
from vitkit.evaluation.metrics import Metrics, PredictionCounts, headline
from vitkit.evaluation.temperature import Calibration, calibrate
from vitkit.io.atomic import write_bytes
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.plots import MAX_CLASSES
from vitkit.training.monitoring import figures, trackers
from vitkit.training.run import Run, evaluate_split
from vitkit.training.step import place_like, unsharded_model
from vitkit.weights.formats.vitkit import DESCRIBED, save
from vitkit.weights.load import load


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
        UserCodeError: a metric of the user raised.
    """
    plan, folder, log, world = run.plan, run.folder, run.log, run.world
    if not world.broadcast_from_main(folder.best.exists):  # stopped before the first epoch ended
        log.info(f"ended after {stopped}; weights: {folder.last}")
        return {}
    best = load(folder.best)
    splits = plan.dataset.splits
    # the file has whole weights; a sharded run evaluates them in shards
    model = place_like(best.model, run.model, world, plan.device)
    metrics: dict[str, Metrics] = dict(best.metadata.get("metrics", {}))
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
        world.broadcast_from_main(lambda: figures.write_curves(folder, log.info))
    log.info(f"ended after {stopped}; {_chosen(run)}: {folder.best}")
    return metrics


def _chosen(run: Run) -> str:
    """Describe which weights are kept."""
    has_validation = "val" in run.plan.dataset.splits
    if has_validation:
        return "best weights"
    return "weights of the last epoch"


def _test(run: Run, model: ViT, before: Metrics | None, temperature: float | None) -> Metrics:
    """Return the scores on the test split, computed now unless these weights have them already."""
    tested = run.world.broadcast_from_main(lambda: trackers.tested_at(run.folder))
    if before is not None:
        test, how = before, "evaluated at an earlier end of this run"
    else:
        classes = run.plan.spec.num_classes
        own = loop.load_metrics(run.plan.config.metrics)
        outputs = loop.KeptOutputs(evaluate_split(run, "test", model), keep=bool(own))
        test, counts = loop.evaluate_outputs(outputs, classes, temperature or 1.0, run.world)
        _write_confusion(run, "test", counts)
        test |= loop.finite_scores(outputs.scores(own, run.world))
        dataset = run.plan.dataset
        gathered = counts.gathered(run.world)
        table = result.Evaluation(test, gathered, dataset.splits["test"], dataset.classes, "test")
        run.world.broadcast_from_main(
            lambda: write_bytes(run.folder.predictions, table.predictions_csv())
        )
        how = "evaluated once"
        if tested:
            how = f"evaluated again (with other weights after step {tested[-1]})"
    shown = "  ".join(headline(test))
    run.log.info(
        f"test split, {plural(int(test['images']), 'image')}, {how}, {_chosen(run)}: {shown}"
    )
    run.log.scored("test", run.progress.step, test)
    return test


def _calibrate(run: Run, model: ViT) -> float | None:
    """Fit the temperature on held-out logits; draw their confusion matrix if no test follows."""
    plan, log = run.plan, run.log
    assert run.held_out is not None, "there is a validation split"
    if run.held_out.is_complete:
        calibration = calibrate(*run.held_out.predictions())
    else:
        calibration = Calibration(
            None,
            "temperature left at 1: the validation logits of the first epochs are missing, "
            f"{run.folder.held_out}",
        )
    log.info(f"best weights: {calibration.message}")
    # the figure shows the split of the last printed score
    is_last = "test" not in plan.dataset.splits or not plan.config.test
    if is_last and plan.config.plots:
        outputs = evaluate_split(run, "val", model)
        _write_confusion(run, "val", loop.count_predictions(outputs, plan.spec.num_classes))
    return calibration.temperature


def _write_confusion(run: Run, split: str, counts: PredictionCounts) -> None:
    """Write the confusion matrix of a split if it is enabled. Each process must call."""
    classes = run.plan.dataset.classes
    if run.plan.config.plots and len(classes) <= MAX_CLASSES:
        table, write = (
            counts.confusion(run.world),
            partial(figures.write_confusion, run.folder, split),
        )
        run.world.broadcast_from_main(lambda: write(table, classes, run.log.info))


# Linear and k-NN probes on the features of a frozen model.

NO_VOTES = 1e-9
"""The probability of a class without neighbours."""
OF_VOTES = ("top1", "balanced_accuracy", "images")
"""Scores of votes, which are not calibrated probabilities."""


def fit_linear_probe(run: Run) -> dict[str, Metrics]:
    """Fit the head on features of train that are computed once; returns its validation scores.

    Raises:
        DataError: images that cannot be read.
    """
    plan = run.plan
    train, labels = _features(run, "train")
    val, val_labels = _features(run, "val")

    def keep(logits: Tensor) -> None:
        assert run.held_out is not None, "a probe needs a validation split"
        # `watched` records the outputs as they are read
        list(run.held_out.watched([(logits, val_labels)], run.world))
        run.held_out.add()

    fitted = features.fit_linear(
        train, labels, val, val_labels, plan.spec.num_classes, device=plan.device, watch=keep
    )
    run.log.info(
        f"linear head: L2 strength {fitted.strength:g}, chosen on validation: top1 "
        f"{fitted.top1:.4f}  loss {fitted.loss:.4f}"
    )
    # a distilled model averages the logits of two heads: both become the fitted one
    for name, parameter in run.model.named_parameters():
        if name in ("head.weight", "head_dist.weight"):
            parameter.data.copy_(fitted.weight)
        elif name in ("head.bias", "head_dist.bias"):
            parameter.data.copy_(fitted.bias)
    return {"val": _scores(run, fitted(val), val_labels)}


def evaluate_neighbours(run: Run) -> dict[str, Metrics]:
    """Score the votes of the nearest neighbours on each split except train; write metrics.jsonl.

    Raises:
        DataError: images that cannot be read.
    """
    train, labels = _features(run, "train")
    # the test split is read only where the run may read it
    unseen = {"train"} if run.plan.config.test else {"train", "test"}
    metrics = {}
    for split in run.plan.dataset.splits:
        if split in unseen:
            continue
        queries, truth = _features(run, split)
        votes = features.knn(train, labels, queries, run.plan.spec.num_classes)
        # Scores are counted from logits; a class without a vote has the lowest.
        scores = _scores(run, votes.clamp_min(NO_VOTES).log(), truth)
        # votes are not probabilities: they have neither loss nor calibration error
        scores = {name: value for name, value in scores.items() if name.startswith(OF_VOTES)}
        scores |= among_voted(votes, truth)
        metrics[split] = scores
        shown = "  ".join(f"{name} {value:.4f}" for name, value in [*scores.items()][:2])
        run.log.info(f"{features.NEIGHBOURS} nearest neighbours, {split}: {shown}")
        run.log.scored(split, run.progress.step, scores)
    return metrics


def _features(run: Run, split: str) -> tuple[Tensor, Tensor]:
    plan = run.plan
    return features.extract_features(
        run.model.eval(),
        plan.dataset,
        split,
        plan.preprocess,
        device=plan.device,
        workers=plan.workers,
        log=run.log.info,
    )


def _scores(run: Run, logits: Tensor, labels: Tensor) -> Metrics:
    return loop.count_predictions([(logits, labels)], run.plan.spec.num_classes).counts().scores()


def among_voted(votes: Float[Tensor, "N K"], labels: Int64[Tensor, "N"]) -> Metrics:
    """Return top-k, k = min(5, K), among the classes with a vote, as most have none."""
    k = min(5, votes.shape[1])
    shares, classes = votes.topk(k)  # (N, k) each
    hits = (classes == labels[:, None]) & (shares > 0)
    return {f"top{k}": float(hits.any(1).double().mean())}

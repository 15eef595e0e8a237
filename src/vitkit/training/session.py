"""One call of `vitkit train`, from the settings to the test score."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from vitkit.errors import SettingError
from vitkit.models.vit import ViT
from vitkit.training.config import Settings, TrainConfig, read_yaml, to_yaml
from vitkit.training.evaluation import Metrics
from vitkit.training.log import RunLog, drop_rows_after
from vitkit.training.loop import Trainer
from vitkit.training.plan import Plan, make_plan
from vitkit.training.precision import Precision, faster_precision
from vitkit.training.run_folder import RunFolder, new_folder, resumed_folder
from vitkit.training.signals import stop_flag
from vitkit.weights.checkpoint import load, save
from vitkit.weights.files import write_bytes

FIXED = ("data", "model", "spec", "img_size", "drop_path", "batch_size", "seed", "amp",
         "val_fraction", "bad_images", "ignore_extra_classes", "mean", "std", "fit",
         "interpolation", "crop_ratio")  # fmt: skip
"""Settings that a resumed run cannot change without being another run."""

_DESCRIBED = ("format_version", "spec", "preprocess", "classes", "versions")
"""What `save` writes by itself."""


@dataclass(frozen=True)
class TrainResult:
    """What a run left.

    Attributes:
        run: its folder.
        best: weights of the best epoch by validation top-1.
        last: weights of the last step.
        metrics: split -> metrics of the best weights: `val`, and `test` where there is one.
        stopped: why the run ended.
    """

    run: Path
    best: Path
    last: Path
    metrics: dict[str, Metrics] = field(default_factory=dict)
    stopped: str = ""


def train(config: TrainConfig, trainer: type[Trainer] = Trainer) -> TrainResult:
    """Train, or go on training, and evaluate the best weights once on the test split.

    Args:
        config: every setting.
        trainer: the loop; a subclass may add to its steps.

    Raises:
        UserError: anything wrong with the settings, the data or the place to write, before the
            first step.
        NonFiniteError: the loss or the gradient is not a finite number.
        Interrupted: SIGINT or SIGTERM came; everything is saved.
    """
    run = None if config.resume is None else resumed_folder(config.resume, config.output)
    afresh = run is None
    if run is not None:
        _refuse_changes(run, config)
    plan = make_plan(config)
    if run is None:
        run = new_folder(config)
    torch.manual_seed(config.seed)
    model = ViT(plan.spec).to(plan.device)
    with (
        RunLog(run, total=plan.total_steps, quiet=config.quiet) as log,
        stop_flag() as stop,
    ):
        for note in plan.notes:
            log.say(note)
        precision = _decide_precision(plan, model, log)
        settings = config.to_json() | {"amp": precision, "resume": None, "overwrite": False}
        write_bytes(run.config, to_yaml(settings).encode())
        _say_plan(plan, run, log, model)
        loop = trainer(plan, run, log, model, precision, stop)
        if not afresh:
            loop.resume()
            drop_rows_after(run, loop.progress.step)
        elif config.resume == "auto":
            log.say(f"nothing to resume in {run.root}; starting afresh")
        loop.train()
        metrics = _finish(loop, run, log)
    return TrainResult(run.root, run.best, run.last, metrics, loop.stopped)


def stored_settings(run: RunFolder) -> Settings:
    """The settings a run was started with. Raises `SettingError` where they cannot be read."""
    return read_yaml(run.config)


def _refuse_changes(run: RunFolder, config: TrainConfig) -> None:
    """A resumed run is the same run: name what would make it another."""
    before = TrainConfig(**stored_settings(run)).to_json()
    now = config.to_json()
    if now["amp"] == "auto":
        now["amp"] = before["amp"]
    changed = [f"{k}: {before[k]} -> {now[k]}" for k in FIXED if before[k] != now[k]]
    if changed:
        raise SettingError(
            f"--resume {run.root}: these settings differ from the run's: {'; '.join(changed)}; "
            f"leave them out, or start afresh with another --output"
        )


def _decide_precision(plan: Plan, model: ViT, log: RunLog) -> Precision:
    if plan.config.amp != "auto":
        return plan.config.amp
    batch = plan.steps[0]
    images = batch.images(plan.preprocess, plan.device)
    precision, said = faster_precision(model, images, batch.labels.to(plan.device), plan.device)
    log.say(said)
    return precision


def _say_plan(plan: Plan, run: RunFolder, log: RunLog, model: ViT) -> None:
    config, spec = plan.config, plan.spec
    parts = ", ".join(f"{len(part):,} {name}" for name, part in plan.dataset.splits.items())
    parameters = sum(p.numel() for p in model.parameters())
    log.say(f"data: {plan.dataset.name}, {len(plan.dataset.classes)} classes, pictures: {parts}")
    log.say(
        f"model: {parameters:,} parameters, {spec.num_patches} patches of {spec.patch_size[0]} x "
        f"{spec.patch_size[1]}, width {spec.width}, {spec.depth} blocks, {spec.num_heads} heads"
    )
    log.say(
        f"training: {config.epochs} epochs of {plan.steps.steps_per_epoch} steps, batch "
        f"{config.batch_size}, lr {config.lr:g}, on {plan.device}, into {run.root}"
    )


def _finish(loop: Trainer, run: RunFolder, log: RunLog) -> dict[str, Metrics]:
    """Read the best weights back, look at the test split once, and write its score beside them."""
    best = load(run.best)
    metrics: dict[str, Metrics] = dict(best.metadata["metrics"])
    if "test" in loop.plan.dataset.splits:
        loop.model.load_state_dict(best.model.state_dict())
        test = loop.evaluate("test")
        metrics["test"] = test
        shown = "  ".join(f"{name} {v:.4f}" for name, v in test.items() if name != "pictures")
        log.say(f"test, {test['pictures']:.0f} pictures, read once, best weights: {shown}")
        log.curve({f"test/{k}": v for k, v in test.items()}, loop.progress.step)
        rest = {key: value for key, value in best.metadata.items() if key not in _DESCRIBED}
        save(
            run.best,
            best.model,
            preprocess=best.preprocess,
            classes=best.classes,
            **rest | {"metrics": metrics},
        )
    log.say(f"ended after {loop.stopped}; best weights: {run.best}")
    return metrics

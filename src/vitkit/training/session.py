"""One call of `vitkit train`, from the settings to the test score."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from vitkit.errors import SettingError
from vitkit.frozen import replace as replaced
from vitkit.models.vit import ViT
from vitkit.training.checkpointing import clean, newest_state, step_of
from vitkit.training.config import Settings, TrainConfig, read_yaml, to_yaml
from vitkit.training.evaluation import Metrics
from vitkit.training.log import RunLog, drop_rows_after
from vitkit.training.loop import Trainer
from vitkit.training.plan import Plan, make_plan
from vitkit.training.precision import Precision, faster_precision
from vitkit.training.run_folder import RunFolder, new_folder, resumed_folder
from vitkit.training.signals import stop_flag
from vitkit.weights.files import write_bytes
from vitkit.weights.load import load
from vitkit.weights.own import DESCRIBED, save

FIXED = ("model", "spec", "img_size", "drop_path", "batch_size", "seed", "amp", "opt",
         "weight_decay", "beta1", "beta2", "val_fraction", "bad_images", "ignore_extra_classes",
         "mean", "std", "fit", "interpolation", "crop_ratio")  # fmt: skip
"""Settings that a resumed run cannot change without being another run."""
WHEREABOUTS = ("data", "data_root", "follow_links", "recipe", "output", "overwrite", "resume",
               "device", "workers", "quiet")  # fmt: skip
"""Settings that say where things are, not what the run is."""


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
    state: Path | None = None
    passed_over: list[str] = []
    if run is not None:
        before = TrainConfig(**read_yaml(run.config))
        if config.amp == "auto":  # the trial was made when the run began
            config = replaced(config, amp=before.amp)
        changes = _changes(run, before, config)
        state, passed_over = newest_state(run.state)
    plan = make_plan(config)
    if run is None:
        run, changes = new_folder(config), []
    clean(run.state)
    torch.manual_seed(config.seed)
    model = ViT(plan.spec).to(plan.device)
    done = 0 if state is None else step_of(state)
    with (
        RunLog(run, total=plan.total_steps, done=done, quiet=config.quiet) as log,
        stop_flag() as stop,
    ):
        for line in (*plan.notes, *changes, *passed_over):
            log.say(line)
        precision = _decide_precision(plan, model, log)
        plan = replace(plan, config=replaced(config, amp=precision))
        loop = trainer(plan, run, log, model, precision, stop)
        if state is not None:
            loop.resume(state)
            drop_rows_after(run, done)
        elif config.resume == "auto":
            log.say(f"nothing to resume in {run.root}; starting afresh")
        kept = replaced(plan.config, output=str(run.root), resume=None, overwrite=False)
        write_bytes(run.config, to_yaml(kept.to_json()).encode())
        _say_plan(plan, run, log, model)
        loop.train()
        metrics = _finish(loop, run, log)
    return TrainResult(run.root, run.best, run.last, metrics, loop.stopped)


def resumed_settings(resume: str | None, output: str | None) -> Settings:
    """On resume, the settings the run was started with; else none.

    Raises:
        OutputError, SettingError: a run that is not there, or whose settings cannot be read.
    """
    run = None if resume is None else resumed_folder(resume, output)
    if run is None:
        return {}
    stored = read_yaml(run.config)
    kept = {key: value for key, value in stored.items() if key not in ("resume", "overwrite")}
    return kept | {"output": str(run.root)}


def _changes(run: RunFolder, earlier: TrainConfig, config: TrainConfig) -> list[str]:
    """What differs from the run that goes on, a line each.

    Raises:
        SettingError: something that would make it another run, or another folder.
    """
    before, now = earlier.to_json(), config.to_json()
    if config.output is not None and Path(config.output).resolve() != run.root.resolve():
        raise SettingError(
            f"--resume {run.root} goes on in that folder; leave out --output {config.output}"
        )
    free = [key for key in now if key not in (*FIXED, *WHEREABOUTS) and before[key] != now[key]]
    changed = [f"{key}: {before[key]} -> {now[key]}" for key in FIXED if before[key] != now[key]]
    if changed:
        raise SettingError(
            f"--resume {run.root}: these settings differ from the run's: {'; '.join(changed)}; "
            f"leave them out, or start afresh with another --output"
        )
    return [f"changed since the start: {key} {before[key]} -> {now[key]}" for key in free]


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
        rest = {key: value for key, value in best.metadata.items() if key not in DESCRIBED}
        save(
            run.best,
            best.model,
            preprocess=best.preprocess,
            classes=best.classes,
            **rest | {"metrics": metrics},
        )
    log.say(f"ended after {loop.stopped}; best weights: {run.best}")
    return metrics

"""The first lines of a run's log: the data, the model, the settings."""

from __future__ import annotations

from vitkit.distributed import ProcessGroup
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.training.checks.unused_settings import note_on_probe
from vitkit.training.config.merging import with_flat_spec
from vitkit.training.config.run_config import USUAL
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.monitoring.run_log import RunLog
from vitkit.training.monitoring.terminal import epochs_per_line
from vitkit.training.resume import StoppedRun
from vitkit.training.run import Run
from vitkit.training.run_folder import RunFolder
from vitkit.training.run_plan import Plan

IN_OTHER_LINES = ("output", "start")
IN_LINE_ON_TRAINING = ("epochs", "batch_size", "lr")
"""Settings that are logged in lines of their own; a probe has no line on training."""
IN_LINE_ON_MODEL = (
    "spec.patch_size",
    "spec.width",
    "spec.mlp_width",
    "spec.depth",
    "spec.num_heads",
)


def open_log(
    plan: Plan, folder: RunFolder, stopped: StoppedRun | None, world: ProcessGroup
) -> RunLog:
    """Return the log of a new or resumed run; only the first process writes it."""
    return RunLog(
        folder,
        total=plan.last_step,
        done=0 if stopped is None else stopped.step,
        quiet=plan.config.quiet,
        writes=world.is_main,
        unvalidated=stopped is not None and stopped.unvalidated,
    )


def log_model(plan: Plan, log: RunLog, model: ViT) -> None:
    """Log the data and the model, which tuning does not change."""
    spec = plan.spec
    parts = ", ".join(f"{len(part):,} {name}" for name, part in plan.dataset.splits.items())
    log.info(f"data: {plan.dataset.name}, {len(plan.dataset.classes)} classes, images: {parts}")
    # counted before the model is sharded
    parameters = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    counts = f"{parameters:,} parameters"
    if frozen:
        counts += f" ({frozen:,} of them frozen)"
    patches = "patch" if spec.num_patches == 1 else "patches"
    log.info(
        f"model: {counts}, {spec.num_patches:,} {patches} of {spec.patch_size[0]} x "
        f"{spec.patch_size[1]}, width {spec.width}, MLP width {spec.mlp_width}, "
        f"{plural(spec.depth, 'block')}, {plural(spec.num_heads, 'head')}"
    )


def log_settings(run: Run) -> None:
    """Log all settings, including the tuned ones, and the steps."""
    plan, log, world = run.plan, run.log, run.world
    config = plan.config
    log.info(f"settings: {_settings_shown(config)}")
    if config.probe is not None:
        note = note_on_probe(config)
        if note is not None:
            log.info(note)
    else:
        log.info(
            f"training: {plural(config.epochs, 'epoch')} of "
            f"{plural(plan.steps.steps_per_epoch, 'step')}, "
            f"batch {config.batch_size}, lr {config.lr:g}, on {plan.device}, into {run.folder.root}"
        )
        every = epochs_per_line(config.epochs)
        if every > 1:
            best = " and the best ones" if "val" in plan.dataset.splits else ""
            log.info(f"epochs shown below: 1 of {every}{best}; {run.folder.log.name} has all")
    if world.size > 1:
        each = config.batch_size // world.size
        parts = f" in {config.grad_accum_steps} parts" if config.grad_accum_steps > 1 else ""
        log.info(
            f"processes: {world.size} ({config.parallel}), {plural(each, 'image')} each{parts} "
            f"make a batch of {config.batch_size}"
        )


def _settings_shown(config: TrainConfig) -> str:
    """Return the settings that differ from the defaults and are in no other line of the log."""
    # a setting that was left open is shown where it got another value than usual
    usual = TrainConfig(data=config.data).to_json() | USUAL
    hidden: tuple[str, ...] = IN_OTHER_LINES
    if config.probe is None:
        hidden += IN_LINE_ON_TRAINING
    shown = {k: v for k, v in config.to_json().items() if v != usual[k] and k not in hidden}
    # a model of another size is not the named one
    if {"width", "depth"} <= config.spec.keys():
        shown.pop("model", None)
    if "image_size" in config.spec:
        shown.pop("img_size", None)
    changed = [
        f"{name} {_short(value)}"
        for name, value in with_flat_spec(shown).items()
        if name not in IN_LINE_ON_MODEL
    ]
    return ", ".join(changed) or "all have their defaults"


def _short(value: object) -> str:
    """Format a value without the digits that come from rounding, such as 2.3000000000000003."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)

"""Resolve `auto` settings (precision, compile, batch size, learning rate) before training.

Precision and attention kernel follow from a rule. Batch size and learning rate are measured if the
user asks for it, with a copy of the model on training images of the run. The results are settings
like any others: they are written to config.yaml and kept on resume.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vitkit.errors import SettingError
from vitkit.models.vit import ViT
from vitkit.training.config.field_types import Settings
from vitkit.training.monitoring.plot_files import write_figure
from vitkit.training.optimization.precision import choose_kernel, choose_precision
from vitkit.training.run_folder import LR_FINDER, RunFolder
from vitkit.training.run_plan import Plan
from vitkit.training.tuning.batch_size import find_batch_size
from vitkit.training.tuning.compilation import compiler_problem
from vitkit.training.tuning.learning_rate import FoundRate, find_lr

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure


def tune_settings(
    plan: Plan,
    model: ViT,
    log: Callable[[str], None],
    *,
    resumes: bool = False,
    folder: RunFolder | None = None,
) -> Settings:
    """Resolve the `auto` settings of a run.

    Args:
        plan: plan of the run.
        model: freshly initialised, on the plan's device; it is not changed.
        log: called with one line for every decision, and its reason.
        resumes: the run is resumed; it was compiled from its start if `compile` is set.
        folder: receives a figure of the search for the learning rate.

    Returns:
        The settings that were decided.

    Raises:
        SettingError: there is no compiler here for a run that began with one; or the smallest
            batch does not fit into memory.
        NonFiniteError: the search for a learning rate finds no finite loss.
    """
    config = plan.config
    decided: Settings = {"find_lr": False, "find_batch_size": False}
    decided |= _arithmetic(plan, model, log)
    if config.compile:
        problem = compiler_problem(plan.device)
        if problem is None:
            log("compile: the first steps take long, as they are compiled")
        elif resumes:
            raise SettingError(
                f"the run is compiled, and {problem}; resume it on a machine with a compiler"
            )
        else:
            decided["compile"] = False
            log(f"compile: {problem}; the training step is not compiled")
    if config.find_batch_size:
        plan = plan.with_settings(decided)
        decided["batch_size"], line = find_batch_size(plan, model)
        log(line)
    # After the batch size, on which the best learning rate depends.
    if config.find_lr:
        plan = plan.with_settings(decided)
        found = find_lr(plan, model)
        decided["lr"] = found.lr
        # a final rate above the peak would be refused
        decided["min_lr"] = min(config.min_lr, found.lr)
        log(found.line)
        if folder is not None and config.plots:
            write_figure(folder.root / LR_FINDER, lambda: _rate_search(found), log)
    return decided


def _rate_search(found: FoundRate) -> NotebookFigure:
    # imported here: no other run needs matplotlib before its end
    from vitkit.plots.curves import draw_rate_search

    return draw_rate_search(found.rates, found.losses, found.lowest, found.lr)


def _arithmetic(plan: Plan, model: ViT, log: Callable[[str], None]) -> Settings:
    """Choose the precision and the attention kernel where the settings have `auto`."""
    config = plan.config
    precision, kernel, reason = config.amp, config.attention_kernel, ""
    if precision == "auto":
        if config.probe is None:
            precision, reason = choose_precision(model, config.batch_size, plan.device)
        else:  # a probe computes its features once, exactly
            precision = "off"
    if kernel == "auto":
        kernel = choose_kernel(model, precision, plan.device)
    if reason:
        name = "float32" if precision == "off" else f"{precision} autocast"
        log(f"precision: {name}, {kernel} attention ({reason})")
    return {"amp": precision, "attention_kernel": kernel}

"""Resolve `auto` settings (precision, attention kernel, compile) before training, by rules.

The results are settings like any others: they are written to config.yaml and kept on resume.
"""

from collections.abc import Callable

import torch

from vitkit.errors import SettingError
from vitkit.models.vit import ViT
from vitkit.training.config.meaning import Settings
from vitkit.training.optimization.precision import choose_kernel, choose_precision
from vitkit.training.plan import Plan


def tune_settings(
    plan: Plan,
    model: ViT,
    log: Callable[[str], None],
    *,
    resumes: bool = False,
) -> Settings:
    """Resolve the `auto` settings of a run.

    Args:
        plan: plan of the run.
        model: freshly initialised, on the plan's device; it is not changed.
        log: called with one line for every decision, and its reason.
        resumes: the run is resumed; it was compiled from its start if `compile` is set.

    Returns:
        The settings that were decided.

    Raises:
        SettingError: there is no compiler here for a run that began with one.
    """
    config = plan.config
    decided = _arithmetic(plan, model, log)
    if config.compile:
        problem = _compiler_problem(plan.device)
        if problem is None:
            log("compile: the first steps take long, as they are compiled")
        elif resumes:
            raise SettingError(
                f"the run is compiled, and {problem}; resume it on a machine with a compiler"
            )
        else:
            decided["compile"] = False
            log(f"compile: {problem}; the training step is not compiled")
    return decided


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


def _compiler_problem(device: torch.device) -> str | None:
    """Return in a few words why torch.compile cannot work on a device; `None` if it can."""
    # imported here: few runs are compiled, and the first one takes a second
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if has_triton():
            return None
        return "there is no Triton for this GPU"
    from vitkit.engines.registry import has_compiler

    if has_compiler():
        return None
    return "there is no C++ compiler here"

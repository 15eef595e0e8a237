"""Settings of the steps: how many, how large, by which optimizer, on which loss."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import (
    Fraction,
    LowerCase,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Schedule,
    stored_as_text,
)
from vitkit.training.config.meaning import Meaning


@frozen(raises=SettingError)
class OptimizerSettings:
    """Steps, learning rate, optimizer, loss, and the average of the weights."""

    # may change: a finished run can be made longer
    epochs: Annotated[
        PositiveInt, Meaning(resume="may change", changes_result=True, with_probe="ignored")
    ] = 10
    """Passes over the training split."""
    max_steps: Annotated[
        PositiveInt | None,
        Meaning(resume="may change", changes_result=True, with_probe="refused"),
    ] = None
    """End after this many optimizer steps of the whole run; the schedule stays that of `epochs`."""
    # fixed: the number of a step decides which images it has
    batch_size: Annotated[
        PositiveInt,
        tyro.conf.arg(aliases=("-b",)),
        Meaning(resume="fixed", changes_result=True, with_probe="ignored"),
    ] = 128
    """Images of one optimizer step, over all processes and accumulation steps."""
    find_batch_size: Annotated[
        bool, Meaning(resume="may change", changes_result=True, with_probe="refused")
    ] = False
    """Before the start, double the batch until memory ends, it is no faster or an epoch has fewer
    than 8 steps, instead of `batch_size`."""
    # fixed: mixing is drawn for each part
    grad_accum_steps: Annotated[
        PositiveInt, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = 1
    """Parts in which a batch goes through the model, where it does not fit into memory whole."""
    # may change: the rate is a function of the step and no part of the state
    lr: Annotated[
        PositiveFloat, Meaning(resume="may change", changes_result=True, with_probe="ignored")
    ] = 1e-3
    """Peak learning rate, for this batch size; never rescaled silently."""
    find_lr: Annotated[
        bool, Meaning(resume="may change", changes_result=True, with_probe="refused")
    ] = False
    """Before the start, try rates on training images with a copy of the model, and take a tenth
    of the one where the loss is lowest, instead of `lr`."""
    min_lr: Annotated[
        NonNegativeFloat, Meaning(resume="may change", changes_result=True, with_probe="ignored")
    ] = 1e-5
    """Learning rate at the end of the schedule; the constant one stays at its peak."""
    sched: Annotated[
        Schedule, Meaning(resume="may change", changes_result=True, with_probe="ignored")
    ] = "cosine"
    """How the rate falls after the warm-up; `rsqrt`: as the root of warm-up over step."""
    warmup_epochs: Annotated[
        NonNegativeFloat, Meaning(resume="may change", changes_result=True, with_probe="ignored")
    ] = 1.0
    """Epochs of linear warm-up from zero; fractions are fine."""
    # fixed: its moments are a part of the state
    opt: Annotated[
        LowerCase, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = "adamw"
    """The optimizer: `adamw`, `sgd`, `adam`; `muon` for the matrices of the blocks, with AdamW for
    the rest; or one of pytorch-optimizer whose state can be saved, by name, such as `lamb`, `lion`,
    `adan`."""
    momentum: Annotated[
        Fraction,
        Meaning(resume="fixed", changes_result=True, with_probe="ignored", optimizers=("sgd",)),
    ] = 0.9
    """Momentum of sgd."""
    beta1: Annotated[
        Fraction,
        Meaning(
            resume="fixed",
            changes_result=True,
            with_probe="ignored",
            optimizers=("adamw", "adam", "muon"),
        ),
    ] = 0.9
    """Decay of the mean gradient, of adamw, adam and the AdamW beside muon."""
    beta2: Annotated[
        Fraction,
        Meaning(
            resume="fixed",
            changes_result=True,
            with_probe="ignored",
            optimizers=("adamw", "adam", "muon"),
        ),
    ] = 0.999
    """Decay of the squared gradient, of the same."""
    # fixed: it is stored in the optimizer's parameter groups
    weight_decay: Annotated[
        NonNegativeFloat,
        tyro.conf.arg(aliases=("--wd",)),
        Meaning(resume="fixed", changes_result=True, with_probe="ignored"),
    ] = 0.05
    """Decay of matrices; biases, norms, tokens and positions have none. It is decoupled in adamw,
    adam and muon, a part of the gradient in sgd, and follows the library in its optimizers."""
    layer_decay: Annotated[
        PositiveFraction, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 1.0
    """Factor on the rate from each block to the one before it; 0.75 is usual in fine-tuning."""
    # may change: clipping keeps no state
    clip_grad: Annotated[
        PositiveFloat | None,
        Meaning(resume="may change", changes_result=True, with_probe="ignored"),
    ] = 1.0
    """Largest norm of the whole gradient."""
    on_nan: Annotated[
        Literal["stop", "skip"],
        Meaning(resume="may change", changes_result=True, with_probe="ignored"),
    ] = "stop"
    """On a loss or gradient that is not finite: stop, or skip the step, at most 2 in a row."""
    loss: Annotated[
        str,
        stored_as_text("loss"),
        Meaning(resume="fixed", changes_result=True, with_probe="ignored"),
    ] = "cross-entropy"
    """`cross-entropy`; `bce`, each class a question of its own; or your own as MODULE:FUNCTION, of
    logits (B, K) and targets."""
    bce_threshold: Annotated[
        Fraction | None, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = None
    """With `bce`, classes of a mixture above this probability count in full; DeiT III has 0."""
    label_smoothing: Annotated[
        Fraction,
        tyro.conf.arg(aliases=("--smoothing",)),
        Meaning(resume="fixed", changes_result=True, with_probe="ignored"),
    ] = 0.1
    """Probability mass spread over all classes."""
    model_ema: Annotated[
        bool, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = False
    """Average the weights over the steps; the average is evaluated and written as the weights."""
    model_ema_decay: Annotated[
        Fraction,
        Meaning(
            resume="fixed", changes_result=True, with_probe="refused", only_with=("model_ema",)
        ),
    ] = 0.9998
    """Decay of that average."""

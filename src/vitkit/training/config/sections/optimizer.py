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
        PositiveInt | None,
        Meaning(resume="may change", changes_result=True, with_probe="ignored"),
    ] = None
    """Passes over the training split, 1 or more. Default: follows from the number of training
    images: 500 optimizer steps, or 2,000 with at most 200,000 images where the model is chosen by
    the data; from 10 to 300 epochs."""
    max_steps: Annotated[
        PositiveInt | None,
        Meaning(resume="may change", changes_result=True, with_probe="refused"),
    ] = None
    """End the run after this many optimizer steps; the schedule still spans `epochs`."""
    # fixed: the number of a step decides which images it has
    batch_size: Annotated[
        PositiveInt | None,
        tyro.conf.arg(aliases=("-b",)),
        Meaning(resume="fixed", changes_result=True, with_probe="ignored"),
    ] = None
    """Images per optimizer step, over all processes and micro-batches. Default: follows from the
    number of training images: a power of two of at most 128 with which an epoch has 8 steps, or
    at most 64 with --pretrained."""
    last_batch: Annotated[
        Literal["drop", "fill"] | None,
        Meaning(resume="fixed", changes_result=True, with_probe="ignored"),
    ] = None
    """Images of an epoch that do not fill a batch: `drop` leaves them out of this epoch, `fill`
    adds others of the epoch a second time. Default: `fill` where the batch size follows from the
    data, else `drop`."""
    find_batch_size: Annotated[
        bool, Meaning(resume="may change", changes_result=True, with_probe="refused")
    ] = False
    """Before training, double the batch size until memory is full, throughput stops rising or an
    epoch would have fewer than 8 steps; replaces `batch_size`."""
    # fixed: mixing is drawn for each part
    grad_accum_steps: Annotated[
        PositiveInt, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = 1
    """Number of micro-batches per optimizer step (gradient accumulation), for batches that do not
    fit into memory."""
    # may change: the rate is a function of the step and no part of the state
    lr: Annotated[
        PositiveFloat | None,
        Meaning(resume="may change", changes_result=True, with_probe="ignored"),
    ] = None
    """Peak learning rate for this batch size, above 0; it is never rescaled silently. Default:
    1e-3; 5e-4 with --pretrained; that of the model's recipe where the model is chosen by the
    data."""
    find_lr: Annotated[
        bool, Meaning(resume="may change", changes_result=True, with_probe="refused")
    ] = False
    """Before training, raise the learning rate on a copy of the model and use a tenth of the rate
    with the lowest loss; replaces `lr`."""
    min_lr: Annotated[
        NonNegativeFloat, Meaning(resume="may change", changes_result=True, with_probe="ignored")
    ] = 1e-5
    """Learning rate at the end of the schedule, 0 or more; not used by `--sched constant`."""
    sched: Annotated[
        Schedule, Meaning(resume="may change", changes_result=True, with_probe="ignored")
    ] = "cosine"
    """Learning rate after the warm-up: `cosine` or `linear` decay to `min_lr`, `constant`, or
    `rsqrt`, which decays as sqrt(warm-up / step)."""
    warmup_epochs: Annotated[
        NonNegativeFloat | None,
        Meaning(resume="may change", changes_result=True, with_probe="ignored"),
    ] = None
    """Epochs of linear warm-up from zero, 0 or more; fractions such as 0.5 are allowed. Default: a
    twentieth of the epochs, at least 1; a tenth of an epoch where there is only one."""
    # fixed: its moments are a part of the state
    opt: Annotated[
        LowerCase | None, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = None
    """Optimizer: `adamw`, `sgd`, `adam`; `muon` for the matrices of the blocks, with AdamW for the
    rest; or one of the pytorch-optimizer library whose state can be saved, such as `lamb`, `lion`,
    `adan`. Default: `adamw`, or that of the model's recipe where the model is chosen by the
    data."""
    momentum: Annotated[
        Fraction,
        Meaning(resume="fixed", changes_result=True, with_probe="ignored", optimizers=("sgd",)),
    ] = 0.9
    """Momentum of sgd, from 0 to below 1."""
    beta1: Annotated[
        Fraction,
        Meaning(
            resume="fixed",
            changes_result=True,
            with_probe="ignored",
            optimizers=("adamw", "adam", "muon"),
        ),
    ] = 0.9
    """Decay rate of the mean gradient in adamw, adam and the AdamW beside muon, from 0 to below
    1."""
    beta2: Annotated[
        Fraction | None,
        Meaning(
            resume="fixed",
            changes_result=True,
            with_probe="ignored",
            optimizers=("adamw", "adam", "muon"),
        ),
    ] = None
    """Decay rate of the mean squared gradient in the same optimizers, from 0 to below 1. Default:
    0.999, or 0.95 where the model is chosen by the data."""
    # fixed: it is stored in the optimizer's parameter groups
    weight_decay: Annotated[
        NonNegativeFloat,
        tyro.conf.arg(aliases=("--wd",)),
        Meaning(resume="fixed", changes_result=True, with_probe="ignored"),
    ] = 0.05
    """Weight decay of matrices, 0 or more; biases, norms, tokens and positions have none. It is
    decoupled in adamw, adam and muon, and a part of the gradient in sgd."""
    layer_decay: Annotated[
        PositiveFraction,
        Meaning(resume="fixed", changes_result=True, with_probe="refused", for_pretrained=True),
    ] = 1.0
    """Factor on the learning rate from each block to the one below it, above 0; 1 turns it off, and
    0.75 is usual in fine-tuning."""
    # may change: clipping keeps no state
    clip_grad: Annotated[
        PositiveFloat | None,
        Meaning(resume="may change", changes_result=True, with_probe="ignored"),
    ] = 1.0
    """Largest L2 norm of the gradient of all parameters; larger gradients are scaled down."""
    on_nan: Annotated[
        Literal["stop", "skip"],
        Meaning(resume="may change", changes_result=True, with_probe="ignored"),
    ] = "stop"
    """When loss or gradient is NaN or infinite: stop, or skip the step (at most 2 in a row)."""
    loss: Annotated[
        str,
        stored_as_text("loss"),
        Meaning(resume="fixed", changes_result=True, with_probe="ignored"),
    ] = "cross-entropy"
    """`cross-entropy`, `bce` (one binary question per class), or your own function of logits (B, K)
    and targets as MODULE:FUNCTION."""
    bce_threshold: Annotated[
        Fraction | None, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = None
    """With `--loss bce`, classes of a mixed image with a probability above this count as 1; DeiT
    III uses 0. Default: targets stay probabilities."""
    label_smoothing: Annotated[
        Fraction,
        tyro.conf.arg(aliases=("--smoothing",)),
        Meaning(resume="fixed", changes_result=True, with_probe="ignored"),
    ] = 0.1
    """Label smoothing: probability spread evenly over all classes, from 0 to below 1."""
    model_ema: Annotated[
        bool, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = False
    """Keep an exponential moving average (EMA) of the weights; it is evaluated and saved instead of
    the weights themselves."""
    model_ema_decay: Annotated[
        Fraction,
        Meaning(
            resume="fixed", changes_result=True, with_probe="refused", only_with=("model_ema",)
        ),
    ] = 0.9998
    """Decay of the EMA per step, from 0 to below 1."""

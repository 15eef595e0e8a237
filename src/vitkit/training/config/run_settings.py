"""Settings of the steps and of the run: optimizer, evaluation, logs, folder, machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.meaning import (
    OF_BITS,
    OF_CALL,
    OF_DATA,
    OF_IMAGES,
    OF_LENGTH,
    OF_LOG,
    OF_LOOP,
    OF_MACHINE,
    OF_OUTPUT,
    OF_SCHEDULE,
    OF_SEARCH,
    OF_STEPS,
    OF_TRAINING,
    Aliases,
    Fraction,
    LowerCase,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    RunPath,
    Schedule,
    TrackerName,
    stored_as_text,
)


@frozen(raises=SettingError)
class OptimizerSettings:
    """Steps, learning rate, optimizer, loss, and the average of the weights."""

    # may change: a finished run can be made longer
    epochs: Annotated[PositiveInt | None, OF_SCHEDULE] = None
    """Passes over the training split, 1 or more. Default: follows from the number of training
    images: 500 optimizer steps, or 2,000 with at most 200,000 images where the model is chosen by
    the data; from 10 to 300 epochs."""
    max_steps: Annotated[PositiveInt | None, OF_LENGTH] = None
    """End the run after this many optimizer steps; the schedule still spans `epochs`."""
    # fixed: the number of a step decides which images it has
    batch_size: Annotated[PositiveInt | None, Aliases(("-b",)), OF_STEPS] = None
    """Images per optimizer step, over all processes and micro-batches. Default: follows from the
    number of training images: a power of two of at most 128 with which an epoch has 8 steps, or
    at most 64 with --pretrained."""
    last_batch: Annotated[Literal["drop", "fill"] | None, OF_STEPS] = None
    """Images of an epoch that do not fill a batch: `drop` leaves them out of this epoch, `fill`
    adds others of the epoch a second time. Default: `fill` where the batch size follows from the
    data, else `drop`."""
    # fixed: mixing is drawn for each part
    grad_accum_steps: Annotated[PositiveInt, OF_STEPS] = 1
    """Number of micro-batches per optimizer step (gradient accumulation), for batches that do not
    fit into memory."""
    # may change: the rate is a function of the step and no part of the state
    lr: Annotated[PositiveFloat | None, OF_SCHEDULE] = None
    """Peak learning rate for this batch size, above 0; it is never rescaled silently. Default:
    1e-3; 5e-4 with --pretrained; that of the model's recipe where the model is chosen by the
    data."""
    find_lr: Annotated[bool, OF_LENGTH] = False
    """Before training, raise the learning rate on a copy of the model and use a tenth of the rate
    with the lowest loss; replaces `lr`."""
    min_lr: Annotated[NonNegativeFloat, OF_SCHEDULE] = 1e-5
    """Learning rate at the end of the schedule, 0 or more; not used by `--sched constant`."""
    sched: Annotated[Schedule, OF_SCHEDULE] = "cosine"
    """Learning rate after the warm-up: `cosine` or `linear` decay to `min_lr`, `constant`, or
    `rsqrt`, which decays as sqrt(warm-up / step)."""
    warmup_epochs: Annotated[NonNegativeFloat | None, OF_SCHEDULE] = None
    """Epochs of linear warm-up from zero, 0 or more; fractions such as 0.5 are allowed. Default: a
    twentieth of the epochs, at least 1; a tenth of an epoch where there is only one."""
    # fixed: its moments are a part of the state
    opt: Annotated[LowerCase | None, OF_STEPS] = None
    """Optimizer: `adamw`, `sgd`, `adam`; `muon` for the matrices of the blocks, with AdamW for the
    rest; or one of the pytorch-optimizer library whose state can be saved, such as `lamb`, `lion`,
    `adan`. Default: `adamw`, or that of the model's recipe where the model is chosen by the
    data."""
    momentum: Annotated[Fraction, replace(OF_STEPS, optimizers=("sgd",))] = 0.9
    """Momentum of sgd, from 0 to below 1."""
    beta1: Annotated[Fraction, replace(OF_STEPS, optimizers=("adamw", "adam", "muon"))] = 0.9
    """Decay rate of the mean gradient in adamw, adam and the AdamW beside muon, from 0 to below
    1."""
    beta2: Annotated[Fraction | None, replace(OF_STEPS, optimizers=("adamw", "adam", "muon"))] = (
        None
    )
    """Decay rate of the mean squared gradient in the same optimizers, from 0 to below 1. Default:
    0.999, or 0.95 where the model is chosen by the data."""
    # fixed: it is stored in the optimizer's parameter groups
    weight_decay: Annotated[NonNegativeFloat, Aliases(("--wd",)), OF_STEPS] = 0.05
    """Weight decay of matrices, 0 or more; biases, norms, tokens and positions have none. It is
    decoupled in adamw, adam and muon, and a part of the gradient in sgd."""
    layer_decay: Annotated[PositiveFraction, replace(OF_TRAINING, for_pretrained=True)] = 1.0
    """Factor on the learning rate from each block to the one below it, above 0; 1 turns it off, and
    0.75 is usual in fine-tuning."""
    # may change: clipping keeps no state
    clip_grad: Annotated[PositiveFloat | None, OF_SCHEDULE] = 1.0
    """Largest L2 norm of the gradient of all parameters; larger gradients are scaled down."""
    on_nan: Annotated[Literal["stop", "skip"], OF_SCHEDULE] = "stop"
    """When loss or gradient is NaN or infinite: stop, or skip the step (at most 2 in a row)."""
    loss: Annotated[str, stored_as_text("loss"), OF_STEPS] = "cross-entropy"
    """`cross-entropy`, `bce` (one binary question per class), or your own function of logits (B, K)
    and targets as MODULE:FUNCTION."""
    bce_threshold: Annotated[Fraction | None, OF_STEPS] = None
    """With `--loss bce`, classes of a mixed image with a probability above this count as 1; DeiT
    III uses 0. Default: targets stay probabilities."""
    label_smoothing: Annotated[Fraction, Aliases(("--smoothing",)), OF_STEPS] = 0.1
    """Label smoothing: probability spread evenly over all classes, from 0 to below 1."""
    model_ema: Annotated[bool, OF_TRAINING] = False
    """Keep an exponential moving average (EMA) of the weights; it is evaluated and saved instead of
    the weights themselves."""
    model_ema_decay: Annotated[Fraction, replace(OF_TRAINING, only_with=("model_ema",))] = 0.9998
    """Decay of the EMA per step, from 0 to below 1."""


# Settings of evaluation: the test split, and when validation ends a run.


@frozen(raises=SettingError)
class EvaluationSettings:
    """The test split and early stopping."""

    # not compared: a finished run may be resumed to read the test split
    test: Annotated[bool, OF_SEARCH] = True
    """Evaluate the best weights on the test split, once, at the end."""
    # may change: the state counts the epochs, and the setting only limits them
    patience: Annotated[PositiveInt | None, OF_LENGTH] = None
    """Stop after this many epochs without a higher validation top-1. Default: never."""
    metrics: Annotated[tuple[str, ...], OF_LOG] = ()
    """Further metrics, as MODULE:FUNCTION: functions of logits (N, K) and class numbers (N,) of a
    whole split that return one number."""


# Settings of what a run reports: curves, images, services, the terminal.


@frozen(raises=SettingError)
class LoggingSettings:
    """Curves, image grids, tracking services, and output on the terminal."""

    # a probe logs no steps
    log_interval: Annotated[PositiveInt, replace(OF_SCHEDULE, changes_result=False)] = 50
    """Steps between two points of the TensorBoard curves and two lines of metrics.jsonl."""
    log_histograms: Annotated[bool, OF_LOG] = True
    """Write histograms of the weights to TensorBoard at the end of epochs."""
    log_examples: Annotated[bool, OF_LOG] = True
    """Write some validation images with their predictions to TensorBoard."""
    plots: Annotated[bool, OF_OUTPUT] = True
    """Draw the learning curves and the confusion matrix at the end, about a second's work; off is
    for many short runs."""
    report: Annotated[bool, OF_OUTPUT] = True
    """Write report.html at the end, a page with the results of the run for any browser; it takes
    about two seconds, and more where many mistakes are large images."""
    save_augmented_grid: Annotated[bool, OF_LOOP] = False
    """Before the first step, write the first training batch as the model sees it, with its labels,
    to augmented.png."""
    logger: Annotated[tuple[TrackerName, ...], OF_OUTPUT] = ()
    """Experiment trackers that also receive the metrics: `wandb`, `mlflow`."""
    quiet: Annotated[bool, OF_MACHINE] = False
    """Print no progress bar and no messages; train.log in the run folder has them."""


# Settings of the run as a whole: its recipe, its kind, its folder.


@frozen(raises=SettingError)
class RunSettings:
    """The recipe, the run folder, resuming, and kinds of runs besides training."""

    # only its name: its settings are compared one by one
    recipe: Annotated[str | None, Aliases(("-c", "--config")), OF_CALL] = None
    """Settings to start from: the name of a recipe, or a YAML file; flags override them."""
    output: Annotated[RunPath, Aliases(("--output-dir",)), OF_SEARCH] = None
    """Run folder. Default: runs/DATA-MODEL-N."""
    overwrite: Annotated[bool, OF_SEARCH] = False
    """If the run folder exists, rename it (nothing is deleted) and start afresh; folders that are
    not runs of vitkit, or that contain the data, are never renamed."""
    resume: Annotated[RunPath, OF_CALL] = None
    """Continue a stopped run: its folder, or `auto` for the one at --output, if it exists."""
    save_every: Annotated[PositiveInt | None, OF_LOOP] = None
    """Optimizer steps between two saved states. Default: one at the end of every epoch, but at most
    one in five seconds."""
    callbacks: Annotated[tuple[str, ...], replace(OF_SCHEDULE, changes_result=False)] = ()
    """Callbacks of the training loop, as MODULE:CLASS: subclasses of `vitkit.Callback`."""
    probe: Annotated[Literal["linear", "knn"] | None, OF_IMAGES] = None
    """Train only a linear head on features that are computed once (`linear`), or only measure the
    accuracy of k-nearest neighbours (`knn`)."""
    auto: Annotated[bool, replace(OF_LENGTH, with_probe="used", with_auto="own")] = False
    """Try k-NN, then a linear probe, then fine-tuning (or, without pretrained weights, a suitably
    small ViT from scratch), and stop when the next step brings no significant gain."""
    budget: Annotated[str | None, replace(OF_LENGTH, with_probe="used", with_auto="own")] = None
    """Time limit of `--auto`, such as 90s, 10m or 1h. Default: 10m."""


# Settings of the machine: device, precision, memory, processes.


@frozen(raises=SettingError)
class RuntimeSettings:
    """The seed, and where and in which arithmetic a run is computed."""

    # changes the result only within the spread of seeds, by which runs are compared
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True), OF_BITS] = 0
    """Seed of initial weights, image order, augmentation and dropout, 0 or more; the same seed
    gives the same run."""
    # a run may be resumed on other devices or another machine
    device: Annotated[str, OF_MACHINE] = "auto"
    """Device: `cpu`, `cuda`, `cuda:1`, `mps`; auto picks the fastest one available."""
    # fixed: half precision has other bits, and float16 a loss scale in the state
    amp: Annotated[Literal["auto", "off", "bfloat16", "float16"], OF_DATA] = "auto"
    """Mixed precision: auto uses bfloat16 (float16 on a GPU without it) if the device is known to
    be faster in it and the step is large enough to gain, else float32."""
    # fixed for bit-exactness; the difference is rounding
    attention_kernel: Annotated[Literal["auto", "fused", "plain"], OF_BITS] = "auto"
    """Attention by one fused kernel (`fused`), or by two matrix products and a softmax (`plain`);
    auto uses plain only for half precision on a CPU with up to 1,024 tokens."""
    compile: Annotated[
        bool,
        Aliases(("--torchcompile",)),
        replace(OF_TRAINING, with_auto="passed on"),
    ] = False
    """Compile the training step with torch.compile; without a compiler the step stays as it is."""
    grad_checkpointing: Annotated[Literal["block"] | None, OF_LOOP] = None
    """Save memory by computing activations again in the backward pass: those inside each `block`
    (the same without a value), or only norms and activation functions."""
    devices: Annotated[PositiveInt, OF_LOG] = 1
    """Number of processes to start on this machine, one per device; with torchrun, use its own
    option instead."""
    # states can be read by any number of processes, whole or sharded
    parallel: Annotated[Literal["ddp", "fsdp"], replace(OF_LOG, several_processes=True)] = "ddp"
    """With several processes: `ddp` keeps the whole model in each, `fsdp` splits every weight among
    them."""
    timeout: Annotated[PositiveFloat, replace(OF_CALL, several_processes=True)] = 60.0
    """Seconds a process waits for the others before it assumes that one has died, above 0."""
    # fixed for bit-exactness: the order of sums depends on it
    threads: Annotated[PositiveInt | None, OF_BITS] = None
    """CPU threads of torch. Default: torch's choice, which a resumed run keeps, as rounding
    depends on it."""
    workers: Annotated[NonNegativeInt | None, Aliases(("-j",)), OF_MACHINE] = None
    """Loader processes per training process. Default: 0 for data in memory, else one per core up to
    8."""

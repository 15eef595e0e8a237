"""Every setting of a run, by section; `TrainConfig` and `RunConfig`, before and after defaults."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from vitkit.errors import SettingError
from vitkit.frozen import field_names, frozen, to_json
from vitkit.spec import Channel, Fit, Interpolation, Resizer
from vitkit.training.config.meaning import (
    OF_AUGMENTATION,
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
    PolicyName,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Probability,
    RunPath,
    Schedule,
    Settings,
    StoredText,
    Threads,
    TrackerName,
    WeightsSource,
    fields_where,
)

# Settings of the data and the model: images, augmentation, architecture, weights, teacher.


@frozen(raises=SettingError)
class DataSettings:
    """The dataset, its splits, and the evaluation transform."""

    data: Annotated[str, OF_MACHINE]
    """An image folder, a CSV or Parquet file, `wds:SHARDS.tar`, `hf://owner/name`, or a name:
    `digits`, `mnist`, `fashion-mnist`, `cifar10`, `cifar100`."""
    data_root: Annotated[str | None, Aliases(("--data-dir",)), OF_MACHINE] = None
    """Folder of named datasets such as `mnist`; for a CSV file, the folder that its paths are
    relative to."""
    cache: Annotated[str | None, OF_MACHINE] = None
    """Folder for decoded images, shared by runs, so that each image is decoded once; `auto` (or no
    value): the user's cache folder. Default: no cache."""
    # decides which images are found, so it can change the result
    follow_links: Annotated[bool, replace(OF_MACHINE, changes_result=True)] = False
    """Follow symbolic links that lead out of the image folder."""
    # may change: the data must be those of the run's start
    bad_images: Annotated[Literal["refuse", "skip"], replace(OF_DATA, resume="may change")] = (
        "refuse"
    )
    """Images that cannot be decoded when the run starts: refuse to start, or skip them."""
    ignore_extra_classes: Annotated[bool, OF_DATA] = False
    """Leave out classes of val or test that train does not have, instead of refusing the data."""
    # fixed: another split would validate on training images
    val_fraction: Annotated[Fraction, OF_DATA] = 0.1
    """Fraction of train that becomes the validation split if the data have train but no val, from 0
    to below 1. Data without any splits are always divided 70/10/20."""
    # a run keeps a copy, with which it resumes
    relabel: Annotated[str | None, replace(OF_MACHINE, resume="fixed", changes_result=True)] = None
    """A CSV file of corrected labels with the columns `path,old_class,new_class`, as the page of
    `vitkit report` exports it; the images and their folders stay as they are."""
    balance: Annotated[bool, replace(OF_TRAINING, with_auto="passed on")] = False
    """Draw every class equally often, although some have more images than others."""
    # the transform of evaluation, which a probe uses as well as training does
    mean: Annotated[Channel | None, OF_IMAGES] = None
    """Mean of each channel, for pixels in [0, 1]. Default: the pretrained weights', else 0.5."""
    std: Annotated[Channel | None, OF_IMAGES] = None
    """Standard deviation of each channel, for pixels in [0, 1]. Default: the pretrained weights',
    else 0.5."""
    interpolation: Annotated[Interpolation | None, OF_IMAGES] = None
    """Resampling filter for resizing. Default: the pretrained weights', else bicubic."""
    fit: Annotated[Fit | None, OF_IMAGES] = None
    """Resizing in evaluation: `crop` scales the shorter side to image size / crop ratio and crops
    the centre; `squash` scales each side separately; `squash-crop` squashes to image size / crop
    ratio and crops the centre. Default: the pretrained weights', else crop."""
    crop_ratio: Annotated[PositiveFraction | None, OF_IMAGES] = None
    """Fraction of the shorter side that the centre crop keeps, above 0 and up to 1. Default: the
    pretrained weights', else 0.9."""


# Settings of random changes to the training images: geometry, colour, erasing, mixing.

OF_GEOMETRY = replace(OF_STEPS, changes_images=True)
"""A probe ignores these instead of refusing them, as a recipe may have them."""
MIXING_DETAIL = replace(OF_TRAINING, only_with=("mixup", "cutmix"))
"""Details of mixup and CutMix."""


@frozen(raises=SettingError)
class AugmentationSettings:
    """Random crops, flips, policies, erasing, and mixing of images."""

    transform: Annotated[StoredText | None, OF_AUGMENTATION] = None
    """Your own function from a training image (PIL) to an image, as MODULE:FUNCTION; it is applied
    first, and its random numbers are seeded for each image and epoch."""
    flip: Annotated[Probability | None, OF_GEOMETRY] = None
    """Probability of a horizontal flip, 0 to 1. Default: 0.5; 0 for grey images where the model is
    chosen by the data, as they are often signs."""
    shift: Annotated[NonNegativeInt | None, OF_GEOMETRY] = None
    """Largest random shift up, down, left and right, in pixels; 0 turns it off. Default: 0, or an
    eighth to a fourteenth of the side where the data choose the model and are small squares of one
    size."""
    crop_scale: Annotated[PositiveFraction | None, OF_GEOMETRY] = None
    """Smallest fraction of the area that a random crop keeps (Inception crop), above 0; 1 turns it
    off. Default: 0.35, or 1 for images that are shifted by default."""
    # one value of a hundred differs, mostly by 1 of 255: far less than between two seeds
    resizer: Annotated[Resizer, replace(OF_STEPS, changes_result=False)] = "torch"
    """Library that resizes random crops: `torch`, or `pillow`, which is slower. Where crops are
    off, and in evaluation, it is always Pillow."""
    scaled_jpeg: Annotated[bool, OF_TRAINING] = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size where its random crop is still not enlarged:
    photographs of several megapixels load faster, and are a little less sharp. Training only."""
    aa: Annotated[PolicyName, OF_AUGMENTATION] = None
    """Augmentation policy: RandAugment such as `rand-m9-mstd0.5-inc1`, TrivialAugment `trivial`, or
    3-Augment `3`; default none."""
    color_jitter: Annotated[Probability, OF_AUGMENTATION] = 0.0
    """Largest random change of brightness, contrast and saturation, as a fraction from 0 to 1;
    applied after `aa`."""
    reprob: Annotated[Probability, OF_AUGMENTATION] = 0.0
    """Probability that a random box of an image is replaced by noise (random erasing), 0 to 1."""
    repeated_aug: Annotated[PositiveInt, OF_TRAINING] = 1
    """Augmented copies of each image per epoch (repeated augmentation). The epoch keeps its length,
    so with N copies it covers 1/N of the images."""
    mixup: Annotated[NonNegativeFloat, OF_AUGMENTATION] = 0.0
    """Alpha of mixup: images are mixed by a weight from Beta(alpha, alpha); 0 turns it off."""
    cutmix: Annotated[NonNegativeFloat, OF_AUGMENTATION] = 0.0
    """Alpha of CutMix, for the area of the pasted box; 0 turns it off. With mixup on as well, each
    batch gets one of them."""
    mixup_prob: Annotated[Probability, MIXING_DETAIL] = 1.0
    """Probability that a batch is mixed, 0 to 1."""
    # needs both, and `only_with` means any of them
    mixup_switch_prob: Annotated[Probability, OF_TRAINING] = 0.5
    """Probability of CutMix instead of mixup where both are on, 0 to 1."""
    mixup_off_epoch: Annotated[NonNegativeInt, MIXING_DETAIL] = 0
    """Epoch, counted from 0, from which batches are no longer mixed; 0 means never."""


# Settings of the model: its architecture.

DEFAULT_MODEL = "vit_tiny_patch16_224"
"""The model that settings of the model are applied to where none is named."""


@frozen(raises=SettingError)
class ModelSettings:
    """Architecture: the model, and changes to it."""

    model: Annotated[str | None, OF_DATA] = None
    """Name of a model (`vitkit models` lists them); `--spec.FIELD VALUE` changes single fields.
    Default: that of the pretrained weights; else a small ViT that suits the number and the size of
    the training images, or vit_tiny_patch16_224 for 100,000 larger images."""
    spec: Annotated[Settings, OF_IMAGES] = Field(default_factory=dict)
    """Any field of the model (`ViTSpec`), such as `--spec.patch-size 4`."""
    img_size: Annotated[PositiveInt | None, OF_IMAGES] = None
    """Image size in pixels, for square images; short for `--spec.image-size`. Default: the model's,
    or that of the images up to 64 where the model is chosen by the data."""
    progressive: Annotated[tuple[PositiveInt, ...], OF_TRAINING] = ()
    """Progressive resizing: image sizes in pixels over equal parts of the epochs, such as `128 160
    192`; evaluation uses the last one."""
    # off in evaluation mode, in which a probe computes its features
    drop_path: Annotated[Fraction | None, OF_STEPS] = None
    """Drop probability of the last block (stochastic depth), from 0 to below 1; it rises linearly
    over the blocks. Short for `--spec.drop-path`."""


# Settings of fine-tuning: the weights that a model starts from, and what of it is frozen.

CATALOGUE = "auto"
"""`pretrained` without a value: the published weights of the model."""


@frozen(raises=SettingError)
class FineTuningSettings:
    """Initial weights and frozen parts."""

    pretrained: Annotated[WeightsSource, Aliases(("--finetune",)), OF_DATA] = None
    """Initial weights: a file of any known format, a folder, a published checkpoint's name, or an
    address such as `hf://owner/name`; without a value, the published weights of --model.
    Preprocessing follows the checkpoint unless you override it."""
    # these two let a file be read; with it the result is the same
    trust_pickle: Annotated[bool, OF_OUTPUT] = False
    """Load weights stored as a pickle (`.pth`), with torch's `weights_only=True`."""
    allow_partial: Annotated[bool, OF_OUTPUT] = False
    """Accept --pretrained weights with unknown or missing tensors: leave out the unknown ones,
    initialise the missing ones at random, and list both."""
    # a resumed run takes it over, so there is nothing to compare
    start: Annotated[Settings | None, replace(OF_IMAGES, resume="not compared")] = None
    """Facts about the initial weights (path, SHA-256, spec), for `resume`."""
    freeze: Annotated[tuple[str, ...], replace(OF_TRAINING, for_pretrained=True)] = ()
    """Parameters to freeze: `backbone` (everything except the head), or names or patterns such as
    `patch_embed` or `blocks.*.attn`."""
    freeze_blocks: Annotated[NonNegativeInt, replace(OF_TRAINING, for_pretrained=True)] = 0
    """Number of first blocks to freeze, together with the embedding; 0 freezes neither."""


# Settings of distillation: the teacher, and how its answers enter the loss.

DISTILLATION_DETAIL = replace(OF_TRAINING, only_with=("teacher",))
"""Details of learning from a teacher."""


@frozen(raises=SettingError)
class DistillationSettings:
    """The teacher and its part in the loss."""

    # a path; a resumed run compares the teacher's digest instead
    teacher: Annotated[
        StoredText | None,
        Aliases(("--teacher-path",)),
        replace(OF_TRAINING, resume="not compared"),
    ] = None
    """Teacher model for distillation: a checkpoint, or `package.module:function` that returns a
    model."""
    distill: Annotated[
        Literal["soft", "hard"],
        Aliases(("--distillation-type",)),
        DISTILLATION_DETAIL,
    ] = "soft"
    """Soft distillation (the teacher's probabilities) or hard distillation (its top class)."""
    distill_alpha: Annotated[
        Probability, Aliases(("--distillation-alpha",)), DISTILLATION_DETAIL
    ] = 0.5
    """Weight of the distillation loss, 0 to 1; the label loss has the rest."""
    distill_temperature: Annotated[
        PositiveFloat, Aliases(("--distillation-tau",)), DISTILLATION_DETAIL
    ] = 3.0
    """Temperature that divides the logits of teacher and student in soft distillation, above 0."""


# Settings of the steps and of the run: optimizer, evaluation, logs, folder, machine.


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
    loss: Annotated[StoredText, OF_STEPS] = "cross-entropy"
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
    """Save memory by computing the activations inside each `block` again in the backward pass (the
    same without a value)."""
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
    threads: Annotated[Threads | None, OF_BITS] = None
    """CPU threads of torch. Default: torch's choice, which a resumed run keeps, as rounding
    depends on it."""
    workers: Annotated[NonNegativeInt | None, Aliases(("-j",)), OF_MACHINE] = None
    """Loader processes per training process. Default: 0 for data in memory, else one per core up to
    8."""


# A dataclass lists the fields of its last base first: read the bases from below.
@frozen(raises=SettingError)
class TrainConfig(
    LoggingSettings,
    RuntimeSettings,
    EvaluationSettings,
    DistillationSettings,
    AugmentationSettings,
    OptimizerSettings,
    RunSettings,
    FineTuningSettings,
    ModelSettings,
    DataSettings,
):
    """Every setting of a run, one section after another. Raises `SettingError` out of range."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, for YAML and for the checkpoint."""
        return to_json(self)


SECTIONS: tuple[type[Any], ...] = TrainConfig.__bases__[::-1]
"""The settings classes in the order of the fields."""


def leaves_model_open(settings: TrainConfig) -> bool:
    """Return whether no setting names the model or weights to start from.

    Fields of its spec may be named: they replace those of the model that the data choose.
    """
    return not (settings.model or settings.progressive or settings.pretrained)


# `RunConfig`: the settings of a run, including those derived from the data.

USUAL: Settings = {
    "epochs": 10,
    "batch_size": 128,
    "last_batch": "drop",
    "lr": 1e-3,
    "warmup_epochs": 1.0,
    "opt": "adamw",
    "beta2": 0.999,
    "flip": 0.5,
    "shift": 0,
    "crop_scale": 0.35,
}
"""The settings that may be left open (`None` in `TrainConfig`), with their usual values.

They apply where nothing follows from the data: in a probe, and, but for epochs and batch size, to a
model that is named."""


def left_open(config: TrainConfig) -> list[str]:
    """Return the names of the settings that will be derived from the data."""
    names = [name for name in USUAL if getattr(config, name) is None]
    if leaves_model_open(config):
        names += ["model", "spec"]
        if config.fit is None:  # chosen with the model
            names.append("fit")
    return names


@frozen(raises=SettingError)
class RunConfig(TrainConfig):
    """Every setting of a run, none of them left open; config.yaml has these."""

    epochs: PositiveInt
    batch_size: PositiveInt
    last_batch: Literal["drop", "fill"]
    lr: PositiveFloat
    warmup_epochs: NonNegativeFloat
    opt: LowerCase
    beta2: Fraction
    flip: Probability
    shift: NonNegativeInt
    crop_scale: PositiveFraction


# The settings that two runs may differ in and be repeats (other seeds) of each other.


def not_of_the_kind() -> tuple[str, ...]:
    """Return the settings that do not change which kind of run it is, such as the seed."""
    not_compared = fields_where(TrainConfig, resume="not compared")
    without_weight = fields_where(TrainConfig, changes_result=False)
    # these may have another path on resume, but they define the run
    names = {*not_compared, *without_weight} - {"data", "relabel", "teacher", "start"}
    return tuple(name for name in field_names(TrainConfig) if name in names)

"""`TrainSettings`: keywords of `vitkit.train` with their types, for editors.

Written by `scripts/train_settings.py` from `TrainConfig`; not to be edited by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from vitkit.training.trainer import Callback


class TrainSettings(TypedDict, total=False):
    """Every setting of a run, by the keyword that `vitkit.train` takes; all of them are optional.

    The names are those of the flags of `vitkit train` and of config.yaml.
    """

    data_root: str | Path | None
    """Folder of named datasets such as `mnist`; for a CSV file, the folder that its paths are
    relative to."""
    cache: str | Path | None
    """Folder for decoded images, shared by runs, so that each image is decoded once; `auto` (or no
    value): the user's cache folder. Default: no cache."""
    follow_links: bool
    """Follow symbolic links that lead out of the image folder."""
    bad_images: Literal["refuse", "skip"]
    """Images that cannot be decoded when the run starts: refuse to start, or skip them."""
    ignore_extra_classes: bool
    """Leave out classes of val or test that train does not have, instead of refusing the data."""
    val_fraction: float
    """Fraction of train that becomes the validation split if the data have train but no val, from 0
    to below 1. Data without any splits are always divided 70/10/20."""
    relabel: str | Path | None
    """A CSV file of corrected labels with the columns `path,old_class,new_class`, as the page of
    `vitkit report` exports it; the images and their folders stay as they are."""
    balance: bool
    """Draw every class equally often, although some have more images than others."""
    mean: Sequence[float] | None
    """Mean of each channel, for pixels in [0, 1]. Default: the pretrained weights', else 0.5."""
    std: Sequence[float] | None
    """Standard deviation of each channel, for pixels in [0, 1]. Default: the pretrained weights',
    else 0.5."""
    interpolation: Literal["nearest", "bilinear", "bicubic"] | None
    """Resampling filter for resizing. Default: the pretrained weights', else bicubic."""
    fit: Literal["squash", "crop", "squash-crop"] | None
    """Resizing in evaluation: `crop` scales the shorter side to image size / crop ratio and crops
    the centre; `squash` scales each side separately; `squash-crop` squashes to image size / crop
    ratio and crops the centre. Default: the pretrained weights', else crop."""
    crop_ratio: float | None
    """Fraction of the shorter side that the centre crop keeps, above 0 and up to 1. Default: the
    pretrained weights', else 0.9."""
    model: str | None
    """Name of a model (`vitkit models` lists them); `--spec.FIELD VALUE` changes single fields.
    Default: that of the pretrained weights; else a small ViT that suits the number and the size of
    the training images, or vit_tiny_patch16_224 for 100,000 larger images."""
    spec: Mapping[str, Any]
    """Any field of the model (`ViTSpec`), such as `--spec.patch-size 4`."""
    img_size: int | None
    """Image size in pixels, for square images; short for `--spec.image-size`. Default: the model's,
    or that of the images up to 64 where the model is chosen by the data."""
    progressive: Sequence[int]
    """Progressive resizing: image sizes in pixels over equal parts of the epochs, such as `128 160
    192`; evaluation uses the last one."""
    drop_path: float | None
    """Drop probability of the last block (stochastic depth), from 0 to below 1; it rises linearly
    over the blocks. Short for `--spec.drop-path`."""
    pretrained: str | Path | bool | None
    """Initial weights: a file of any known format, a folder, a published checkpoint's name, or an
    address such as `hf://owner/name`; without a value, the published weights of --model.
    Preprocessing follows the checkpoint unless you override it."""
    trust_pickle: bool
    """Load weights stored as a pickle (`.pth`), with torch's `weights_only=True`."""
    allow_partial: bool
    """Accept --pretrained weights with unknown or missing tensors: leave out the unknown ones,
    initialise the missing ones at random, and list both."""
    freeze: Sequence[str]
    """Parameters to freeze: `backbone` (everything except the head), or names or patterns such as
    `patch_embed` or `blocks.*.attn`."""
    freeze_blocks: int
    """Number of first blocks to freeze, together with the embedding; 0 freezes neither."""
    output: str | Path | None
    """Run folder. Default: runs/DATA-MODEL-N."""
    overwrite: bool
    """If the run folder exists, rename it (nothing is deleted) and start afresh; folders that are
    not runs of vitkit, or that contain the data, are never renamed."""
    resume: str | Path | None
    """Continue a stopped run: its folder, or `auto` for the one at --output, if it exists."""
    save_every: int | None
    """Optimizer steps between two saved states. Default: one at the end of every epoch, but at most
    one in five seconds."""
    callbacks: Sequence[str | Callback | Callable[[], Callback]]
    """Callbacks of the training loop, as MODULE:CLASS: subclasses of `vitkit.Callback`."""
    probe: Literal["linear", "knn"] | None
    """Train only a linear head on features that are computed once (`linear`), or only measure the
    accuracy of k-nearest neighbours (`knn`)."""
    auto: bool
    """Try k-NN, then a linear probe, then fine-tuning (or, without pretrained weights, a suitably
    small ViT from scratch), and stop when the next step brings no significant gain."""
    budget: str | None
    """Time limit of `--auto`, such as 90s, 10m or 1h. Default: 10m."""
    epochs: int | None
    """Passes over the training split, 1 or more. Default: follows from the number of training
    images: 500 optimizer steps, or 2,000 with at most 200,000 images where the model is chosen by
    the data; from 10 to 300 epochs."""
    max_steps: int | None
    """End the run after this many optimizer steps; the schedule still spans `epochs`."""
    batch_size: int | None
    """Images per optimizer step, over all processes and micro-batches. Default: follows from the
    number of training images: a power of two of at most 128 with which an epoch has 8 steps, or
    at most 64 with --pretrained."""
    last_batch: Literal["drop", "fill"] | None
    """Images of an epoch that do not fill a batch: `drop` leaves them out of this epoch, `fill`
    adds others of the epoch a second time. Default: `fill` where the batch size follows from the
    data, else `drop`."""
    grad_accum_steps: int
    """Number of micro-batches per optimizer step (gradient accumulation), for batches that do not
    fit into memory."""
    lr: float | None
    """Peak learning rate for this batch size, above 0; it is never rescaled silently. Default:
    1e-3; 5e-4 with --pretrained; that of the model's recipe where the model is chosen by the
    data."""
    min_lr: float
    """Learning rate at the end of the schedule, 0 or more; not used by `--sched constant`."""
    sched: Literal["cosine", "linear", "constant", "rsqrt"]
    """Learning rate after the warm-up: `cosine` or `linear` decay to `min_lr`, `constant`, or
    `rsqrt`, which decays as sqrt(warm-up / step)."""
    warmup_epochs: float | None
    """Epochs of linear warm-up from zero, 0 or more; fractions such as 0.5 are allowed. Default: a
    twentieth of the epochs, at least 1; a tenth of an epoch where there is only one."""
    opt: str | None
    """Optimizer: `adamw`, `sgd`, `adam`; `muon` for the matrices of the blocks, with AdamW for the
    rest; or one of the pytorch-optimizer library whose state can be saved, such as `lamb`, `lion`,
    `adan`. Default: `adamw`, or that of the model's recipe where the model is chosen by the
    data."""
    momentum: float
    """Momentum of sgd, from 0 to below 1."""
    beta1: float
    """Decay rate of the mean gradient in adamw, adam and the AdamW beside muon, from 0 to below
    1."""
    beta2: float | None
    """Decay rate of the mean squared gradient in the same optimizers, from 0 to below 1. Default:
    0.999, or 0.95 where the model is chosen by the data."""
    weight_decay: float
    """Weight decay of matrices, 0 or more; biases, norms, tokens and positions have none. It is
    decoupled in adamw, adam and muon, and a part of the gradient in sgd."""
    layer_decay: float
    """Factor on the learning rate from each block to the one below it, above 0; 1 turns it off, and
    0.75 is usual in fine-tuning."""
    clip_grad: float | None
    """Largest L2 norm of the gradient of all parameters; larger gradients are scaled down."""
    on_nan: Literal["stop", "skip"]
    """When loss or gradient is NaN or infinite: stop, or skip the step (at most 2 in a row)."""
    loss: str | Callable[[Tensor, Tensor], Tensor]
    """`cross-entropy`, `bce` (one binary question per class), or your own function of logits (B, K)
    and targets as MODULE:FUNCTION."""
    bce_threshold: float | None
    """With `--loss bce`, classes of a mixed image with a probability above this count as 1; DeiT
    III uses 0. Default: targets stay probabilities."""
    label_smoothing: float
    """Label smoothing: probability spread evenly over all classes, from 0 to below 1."""
    model_ema: bool
    """Keep an exponential moving average (EMA) of the weights; it is evaluated and saved instead of
    the weights themselves."""
    model_ema_decay: float
    """Decay of the EMA per step, from 0 to below 1."""
    transform: str | Callable[[Any], Any] | None
    """Your own function from a training image (PIL) to an image, as MODULE:FUNCTION; it is applied
    first, and its random numbers are seeded for each image and epoch."""
    flip: float | None
    """Probability of a horizontal flip, 0 to 1. Default: 0.5; 0 for grey images where the model is
    chosen by the data, as they are often signs."""
    shift: int | None
    """Largest random shift up, down, left and right, in pixels; 0 turns it off. Default: 0, or an
    eighth to a fourteenth of the side where the data choose the model and are small squares of one
    size."""
    crop_scale: float | None
    """Smallest fraction of the area that a random crop keeps (Inception crop), above 0; 1 turns it
    off. Default: 0.35, or 1 for images that are shifted by default."""
    resizer: Literal["pillow", "torch"]
    """Library that resizes random crops: `torch`, or `pillow`, which is slower. Where crops are
    off, and in evaluation, it is always Pillow."""
    scaled_jpeg: bool
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size where its random crop is still not enlarged:
    photographs of several megapixels load faster, and are a little less sharp. Training only."""
    aa: str | int | None
    """Augmentation policy: RandAugment such as `rand-m9-mstd0.5-inc1`, TrivialAugment `trivial`, or
    3-Augment `3`; default none."""
    color_jitter: float
    """Largest random change of brightness, contrast and saturation, as a fraction from 0 to 1;
    applied after `aa`."""
    reprob: float
    """Probability that a random box of an image is replaced by noise (random erasing), 0 to 1."""
    repeated_aug: int
    """Augmented copies of each image per epoch (repeated augmentation). The epoch keeps its length,
    so with N copies it covers 1/N of the images."""
    mixup: float
    """Alpha of mixup: images are mixed by a weight from Beta(alpha, alpha); 0 turns it off."""
    cutmix: float
    """Alpha of CutMix, for the area of the pasted box; 0 turns it off. With mixup on as well, each
    batch gets one of them."""
    mixup_prob: float
    """Probability that a batch is mixed, 0 to 1."""
    mixup_switch_prob: float
    """Probability of CutMix instead of mixup where both are on, 0 to 1."""
    mixup_off_epoch: int
    """Epoch, counted from 0, from which batches are no longer mixed; 0 means never."""
    teacher: str | Path | Module | Callable[[], Module] | None
    """Teacher model for distillation: a checkpoint, or `package.module:function` that returns a
    model."""
    distill: Literal["soft", "hard"]
    """Soft distillation (the teacher's probabilities) or hard distillation (its top class)."""
    distill_alpha: float
    """Weight of the distillation loss, 0 to 1; the label loss has the rest."""
    distill_temperature: float
    """Temperature that divides the logits of teacher and student in soft distillation, above 0."""
    test: bool
    """Evaluate the best weights on the test split, once, at the end."""
    patience: int | None
    """Stop after this many epochs without a higher validation top-1. Default: never."""
    metrics: Sequence[str | Callable[[Tensor, Tensor], Any]]
    """Further metrics, as MODULE:FUNCTION: functions of logits (N, K) and class numbers (N,) of a
    whole split that return one number."""
    seed: int
    """Seed of initial weights, image order, augmentation and dropout, 0 or more; the same seed
    gives the same run."""
    device: str
    """Device: `cpu`, `cuda`, `cuda:1`, `mps`; auto picks the fastest one available."""
    amp: Literal["auto", "off", "bfloat16", "float16"]
    """Mixed precision: auto uses bfloat16 (float16 on a GPU without it) if the device is known to
    be faster in it and the step is large enough to gain, else float32."""
    attention_kernel: Literal["auto", "fused", "plain"]
    """Attention by one fused kernel (`fused`), or by two matrix products and a softmax (`plain`);
    auto uses plain only for half precision on a CPU with up to 1,024 tokens."""
    compile: bool
    """Compile the training step with torch.compile; without a compiler the step stays as it is."""
    grad_checkpointing: Literal["block"] | None
    """Save memory by computing the activations inside each `block` again in the backward pass (the
    same without a value)."""
    devices: int
    """Number of processes to start on this machine, one per device; with torchrun, use its own
    option instead."""
    parallel: Literal["ddp", "fsdp"]
    """With several processes: `ddp` keeps the whole model in each, `fsdp` splits every weight among
    them."""
    timeout: float
    """Seconds a process waits for the others before it assumes that one has died, above 0."""
    threads: int | None
    """CPU threads of torch. Default: torch's choice, which a resumed run keeps, as rounding
    depends on it."""
    workers: int | None
    """Loader processes per training process. Default: 0 for data in memory, else one per core up to
    8."""
    log_interval: int
    """Steps between two points of the TensorBoard curves and two lines of metrics.jsonl."""
    log_histograms: bool
    """Write histograms of the weights to TensorBoard at the end of epochs."""
    log_examples: bool
    """Write some validation images with their predictions to TensorBoard."""
    plots: bool
    """Draw the learning curves and the confusion matrix at the end, about a second's work; off is
    for many short runs."""
    report: bool
    """Write report.html at the end, a page with the results of the run for any browser; it takes
    about two seconds, and more where many mistakes are large images."""
    logger: Sequence[Literal["wandb", "mlflow"]]
    """Experiment trackers that also receive the metrics: `wandb`, `mlflow`."""
    quiet: bool
    """Print no progress bar and no messages; train.log in the run folder has them."""


NOT_OF_THE_KIND = (
    "data_root",
    "cache",
    "follow_links",
    "trust_pickle",
    "allow_partial",
    "recipe",
    "output",
    "overwrite",
    "resume",
    "save_every",
    "callbacks",
    "resizer",
    "test",
    "metrics",
    "seed",
    "device",
    "attention_kernel",
    "grad_checkpointing",
    "devices",
    "parallel",
    "timeout",
    "threads",
    "workers",
    "log_interval",
    "log_histograms",
    "log_examples",
    "plots",
    "report",
    "logger",
    "quiet",
)
"""Settings that repeats of a run (other seeds) may differ in."""

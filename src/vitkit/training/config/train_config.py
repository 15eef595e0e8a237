"""`TrainConfig`: every setting of a run, by one name in Python, in YAML and as a flag."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro
from pydantic import BeforeValidator, Field
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from vitkit.errors import SettingError, did_you_mean
from vitkit.frozen import field_names, frozen, to_json
from vitkit.spec import Channel, Fit, Interpolation
from vitkit.training.config.setting_names import our_name
from vitkit.training.optimization.schedule import Schedule

Settings: TypeAlias = dict[str, Any]
"""Some fields of `TrainConfig` by name; `spec` is a dictionary of `ViTSpec` fields."""

Count = Annotated[int, Field(ge=0, strict=True)]
AtLeastOne = Annotated[int, Field(ge=1, strict=True)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
TrackerName: TypeAlias = Literal["wandb", "mlflow"]
DEFAULT_MODEL = "vit_tiny_patch16_224"
"""What a run from noise trains where no model is named."""


def _place(value: Any) -> Any:
    """`pretrained=True`, as `create_model` has it, and paths, as a setting."""
    if isinstance(value, bool):
        return "auto" if value else None
    return str(value) if isinstance(value, Path) else value


def _words(setting: str) -> BeforeValidator:
    """A file, or the name of a function: what a file of settings can keep."""

    def check(value: Any) -> Any:
        if value is None or isinstance(value, str | Path):
            return value if value is None else str(value)
        raise ValueError(
            f"{setting} is a {type(value).__name__}; a run is told in words, so that it can be "
            f"resumed: give a file, or a function by its name, package.module:function"
        )

    return BeforeValidator(check)


def _text(value: Any) -> Any:
    """`aa: 3` in YAML is a number."""
    return str(value) if isinstance(value, int) else value


def _lower(value: Any) -> Any:
    """`AdamW` is `adamw`."""
    return value.lower() if isinstance(value, str) else value


@frozen(raises=SettingError)
class TrainConfig:
    """Every setting of a run. Raises `SettingError` for a value out of range."""

    data: Annotated[str, tyro.conf.Suppress]
    """A folder of images, a CSV or Parquet file, `wds:SHARDS.tar`, `hf://owner/name`, or a name:
    `digits`, `mnist`, `fashion-mnist`, `cifar10`, `cifar100`."""
    model: str | None = None
    """A model's name (`vitkit models` lists them); single fields change by `--spec.FIELD VALUE`.
    Default: that of the pretrained weights, else vit_tiny_patch16_224."""
    spec: Annotated[Settings, tyro.conf.Suppress] = Field(default_factory=dict)
    """`ViTSpec` fields that differ from the model's preset."""
    recipe: Annotated[str | None, tyro.conf.arg(aliases=("-c", "--config"))] = None
    """Settings to start from: a recipe's name or a YAML file; flags override them."""
    pretrained: Annotated[
        str | None, BeforeValidator(_place), tyro.conf.arg(aliases=("--finetune",))
    ] = None
    """Start from weights: a file of any known format, a folder, a published checkpoint's name, an
    address such as `hf://owner/name`; without a value, what is published for --model. Images are
    treated as the weights know them, but for what a setting says."""
    trust_pickle: bool = False
    """Read weights that are a pickle (`.pth`), by torch's `weights_only` reader."""
    allow_partial: bool = False
    """Go on with --pretrained weights that have unknown or missing tensors: leave out the unknown,
    give the missing random values, and list both."""
    start: Annotated[Settings | None, tyro.conf.Suppress] = None
    """What the run started from, as it was found; kept for `resume`."""
    freeze: tuple[str, ...] = ()
    """What does not train: `backbone` (all but the head), or parameters by name or pattern, such as
    `patch_embed` or `blocks.*.attn`."""
    freeze_blocks: Count = 0
    """The embedding and the first so many blocks do not train."""
    probe: Literal["linear", "knn"] | None = None
    """Train nothing but a linear head on features that are computed once, or only look how good
    the nearest neighbours are."""
    auto: bool = False
    """Climb from the cheapest answer upwards, nearest neighbours, a linear head, fine-tuning, or
    from noise what suits the images, as long as the next one pays."""
    budget: str | None = None
    """The time that `auto` has: 90s, 10m (default), 1h."""
    img_size: AtLeastOne | None = None
    """Image size in pixels, a square; short for `--spec.image-size`."""
    progressive: tuple[AtLeastOne, ...] = ()
    """Progressive resizing: image sizes over equal parts of the epochs, such as `128 160 192`;
    the last one is that of evaluation."""
    data_root: Annotated[str | None, tyro.conf.arg(aliases=("--data-dir",))] = None
    """Where to look for named data sets such as `mnist`; of a CSV, where its paths begin."""
    cache: str | None = None
    """Keep the decoded images in this folder, for this run and others; `auto`: the user's own."""
    output: Annotated[str | None, tyro.conf.arg(aliases=("--output-dir",))] = None
    """The run folder; by default runs/DATA-MODEL-N."""
    overwrite: bool = False
    """Put an existing run folder aside (it is renamed, not deleted) and start afresh; a folder that
    is no run of vitkit, or holds the data, is never moved."""
    resume: str | None = None
    """Go on with a stopped run: its folder, or `auto` for the one at --output, if there is one."""
    epochs: AtLeastOne = 10
    """Passes over the training split."""
    batch_size: Annotated[AtLeastOne, tyro.conf.arg(aliases=("-b",))] = 128
    """Images of one optimizer step, over all processes and accumulation steps."""
    grad_accum_steps: AtLeastOne = 1
    """Parts in which a batch goes through the model, where it does not fit into memory whole."""
    max_steps: AtLeastOne | None = None
    """End after this many optimizer steps of the whole run; the schedule stays that of `epochs`."""
    save_every: AtLeastOne | None = None
    """Optimizer steps between two saved states; by default one at the end of every epoch that ends
    five seconds or more after the last one."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    """Peak learning rate, for this batch size; never rescaled silently."""
    find_lr: bool = False
    """Before the start, try rates on training images with a copy of the model, and take a tenth
    of the one where the loss is lowest, instead of `lr`."""
    find_batch_size: bool = False
    """Before the start, double the batch until memory ends, it is no faster or an epoch has fewer
    than 8 steps, instead of `batch_size`."""
    min_lr: Annotated[float, Field(ge=0.0)] = 1e-5
    """Learning rate at the end of the schedule; the constant one stays at its peak."""
    sched: Schedule = "cosine"
    """How the rate falls after the warm-up; `rsqrt`: as the root of warm-up over step."""
    warmup_epochs: Annotated[float, Field(ge=0.0)] = 1.0
    """Epochs of linear warm-up from zero; fractions are fine."""
    opt: Annotated[str, BeforeValidator(_lower)] = "adamw"
    """The optimizer: `adamw`, `sgd`, `adam`; `muon` for the matrices of the blocks, with AdamW for
    the rest; or one of pytorch-optimizer whose state can be kept, by name, such as `lamb`, `lion`,
    `adan`."""
    momentum: Fraction = 0.9
    """Of sgd alone."""
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Factor on the rate from each block to the one before it; 0.75 is usual in fine-tuning."""
    weight_decay: Annotated[float, Field(ge=0.0), tyro.conf.arg(aliases=("--wd",))] = 0.05
    """Decay of matrices; biases, norms, tokens and positions have none. It is decoupled in adamw,
    adam and muon, a part of the gradient in sgd, and in each of the library's as it has it."""
    beta1: Fraction = 0.9
    """Decay of the mean gradient, of adamw, adam and the AdamW beside muon."""
    beta2: Fraction = 0.999
    """Decay of the squared gradient, of the same."""
    clip_grad: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Largest norm of the whole gradient."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What to do about a loss or gradient that is not finite; skip leaves out 2 steps in a row."""
    model_ema: bool = False
    """Average the weights over the steps; the average is what is evaluated and shared."""
    model_ema_decay: Fraction = 0.9998
    """Decay of that average."""
    loss: Annotated[str, _words("loss")] = "cross-entropy"
    """`cross-entropy`; `bce`, each class a question of its own; or your own as MODULE:FUNCTION, of
    logits (B, K) and targets."""
    bce_threshold: Fraction | None = None
    """With `bce`, classes of a mixture above this probability count in full; DeiT III has 0."""
    label_smoothing: Annotated[Fraction, tyro.conf.arg(aliases=("--smoothing",))] = 0.1
    """Probability mass spread over all classes."""
    teacher: Annotated[
        str | None, _words("teacher"), tyro.conf.arg(aliases=("--teacher-path",))
    ] = None
    """A model to learn from as well: a checkpoint, or `package.module:function` that makes one."""
    distill: Annotated[Literal["soft", "hard"], tyro.conf.arg(aliases=("--distillation-type",))] = (
        "soft"
    )
    """What of the teacher is learned: its probabilities, or its first choice."""
    distill_alpha: Annotated[Probability, tyro.conf.arg(aliases=("--distillation-alpha",))] = 0.5
    """The teacher's share of the loss."""
    distill_temperature: Annotated[
        float, Field(gt=0.0), tyro.conf.arg(aliases=("--distillation-tau",))
    ] = 3.0
    """Both are softened by it, with `distill: soft`."""
    distill_views: Count = 0
    """Variants that each image has in the whole run, so that the teacher looks at each once and
    what it says is kept; 0 for new ones in every epoch and a teacher that is asked in every step.
    """
    drop_path: Fraction | None = None
    """Stochastic depth of the last block; short for `--spec.drop-path`."""
    flip: Probability = 0.5
    """Chance of a horizontal flip."""
    shift: Count = 0
    """Largest random shift up, down, left and right, in pixels."""
    crop_scale: Annotated[float, Field(gt=0.0, le=1.0)] = 0.35
    """Smallest part of the area a random crop keeps (Inception crop); 1 turns it off."""
    aa: Annotated[str | None, BeforeValidator(_text)] = None
    """A policy of random changes: RandAugment such as `rand-m9-mstd0.5-inc1`, TrivialAugment
    `trivial`, 3-Augment `3`."""
    color_jitter: Probability = 0.0
    """Largest random change of brightness, contrast and saturation, as a factor; after `aa`."""
    reprob: Probability = 0.0
    """Chance that a random box of an image is erased by noise."""
    repeated_aug: AtLeastOne = 1
    """How often an epoch has an image, each time changed in another way; an epoch stays as long,
    so it has as many times fewer images."""
    mixup: Annotated[float, Field(ge=0.0)] = 0.0
    """Alpha of mixup, of Beta(alpha, alpha); 0 is off."""
    cutmix: Annotated[float, Field(ge=0.0)] = 0.0
    """Alpha of CutMix, the same; with both on, every batch has one of them."""
    mixup_prob: Probability = 1.0
    """Chance that a batch is mixed at all."""
    mixup_switch_prob: Probability = 0.5
    """Chance of CutMix, where both are on."""
    mixup_off_epoch: Count = 0
    """The epoch, counted from 0, from which on nothing is mixed; 0 for never."""
    save_augmented_grid: bool = False
    """Before the first step, show in augmented.png what the model is fed, with its labels."""
    mean: Channel | None = None
    """Mean of each channel on [0, 1]; default 0.5."""
    std: Channel | None = None
    """Standard deviation of each channel on [0, 1]; default 0.5."""
    interpolation: Interpolation | None = None
    """The resampling filter; default bicubic."""
    fit: Fit | None = None
    """How images are brought to size outside training: centre `crop` (default); `squash`, each
    side by its own factor; or `squash-crop`, to image size / crop ratio, of it the centre."""
    crop_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Part of the shorter side that the centre crop keeps; default 0.9."""
    val_fraction: Fraction = 0.1
    """Part of train that becomes the validation split where the data has none."""
    test: bool = True
    """Look at the test split, once, at the end."""
    patience: AtLeastOne | None = None
    """Stop after this many epochs without a higher validation top-1."""
    balance: bool = False
    """Draw every class as often as any other, where some have more images."""
    bad_images: Literal["refuse", "skip"] = "refuse"
    """What to do about images that cannot be decoded: refuse to start, or leave them out. One that
    goes missing later ends the run, or another one of its class takes its place."""
    ignore_extra_classes: bool = False
    """Leave out classes of val or test that train does not have, instead of refusing."""
    follow_links: bool = False
    """Follow symbolic links that lead out of the folder of images."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Decides initial weights, order, augmentation and dropout."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`; auto takes the best there is."""
    amp: Literal["auto", "off", "bfloat16", "float16"] = "auto"
    """Mixed precision; auto takes bfloat16 (float16 on a GPU without it) where the device is known
    to multiply faster in it and a step is large enough to gain, and float32 elsewhere."""
    attention_kernel: Literal["auto", "fused", "plain"] = "auto"
    """How heads attend: by one fused kernel, or by two matrix products with the attention weights
    between them; auto takes plain for half precision on a processor, up to 1,024 tokens."""
    compile: Annotated[bool, tyro.conf.arg(aliases=("--torchcompile",))] = False
    """Compile the training step (torch.compile); without a compiler it stays as it is."""
    grad_checkpointing: Literal["block", "norm_and_activation"] | None = None
    """Less memory for more time: compute again in the backward pass the insides of each block (also
    without a value), or norms and activations alone."""
    devices: AtLeastOne = 1
    """Processes to start on this machine, one a device; under torchrun it is torchrun's number."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What several processes hold: each the whole model, or each a part of every weight."""
    timeout: Annotated[float, Field(gt=0.0)] = 60.0
    """Seconds that one process waits for another in a step before it takes it for dead."""
    threads: AtLeastOne | None = None
    """Threads of torch's own on the CPU; decided at the start and kept, as sums depend on it."""
    workers: Annotated[
        Annotated[int, Field(ge=0, strict=True)] | None, tyro.conf.arg(aliases=("-j",))
    ] = None
    """Loader processes of each process; default 0 for data in memory, else one per core up to 8."""
    log_interval: AtLeastOne = 50
    """Steps between two points of the TensorBoard curves and two lines of metrics.jsonl."""
    log_histograms: bool = True
    """Show in TensorBoard how the weights lie, at the end of epochs."""
    log_examples: bool = True
    """Show in TensorBoard some validation images and what is predicted for them."""
    logger: tuple[TrackerName, ...] = ()
    """Services that are told the curves, too: `wandb`, `mlflow`."""
    quiet: bool = False
    """No progress bar and no messages; the run folder has them all the same."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for YAML and for the checkpoint."""
        return to_json(self)


SAME = (("img_size", "progressive", "spec.image_size"), ("drop_path", "spec.drop_path"))
"""Names under which one thing can be set."""


def layered(*layers: Mapping[str, Any]) -> Settings:
    """Later settings over earlier ones; `spec` is merged field by field.

    A `spec` belongs to the `model` it was written for: a later layer that names another model drops
    the earlier layers' `spec`. What several names say, such as `img_size` and `spec.image_size`, is
    said by the latest layer that has any of them; in one layer they must agree.

    Raises:
        SettingError: a key that is no setting (the nearest one is named), or a spec that is none.
    """
    merged: Settings = {"model": TrainConfig.model, "spec": {}}
    for layer in layers:
        check_names(layer)
        spec = layer.get("spec") or {}
        if not isinstance(spec, Mapping):
            raise SettingError(f"spec = {spec!r}: expected fields of ViTSpec, such as width: 64")
        for names in SAME:
            if any(_named(layer, name) for name in names):
                for name in names:
                    _forget(merged, name)
        if layer.get("model", merged["model"]) == merged["model"]:
            spec = {**merged["spec"], **spec}
        merged |= {**layer, "spec": dict(spec)}
    return merged


def _named(layer: Mapping[str, Any], name: str) -> bool:
    """Whether a layer sets what is called `name`, or `spec.name`."""
    owner, _, field = name.rpartition(".")
    holder = (layer.get(owner) or {}) if owner else layer
    return holder.get(field) not in (None, (), [])


def _forget(merged: Settings, name: str) -> None:
    owner, _, field = name.rpartition(".")
    if owner:
        merged[owner] = {key: value for key, value in merged[owner].items() if key != field}
    else:
        merged.pop(field, None)


def check_names(keys: Iterable[str], where: str = "") -> None:
    """Raise `SettingError` for the first key that is no setting."""
    known = field_names(TrainConfig)
    for key in keys:
        if key not in known:
            ours = our_name(key, TrainConfig)
            near = f"; did you mean {ours!r}?" if ours else did_you_mean(key, known)
            raise SettingError(f"{where}there is no setting {key!r}{near}")


def read_yaml(path: str | Path) -> Settings:
    """The settings in a YAML file.

    Raises:
        SettingError: no such file, no valid YAML (duplicate keys and tags are not), an unknown key,
            a value out of range; with the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: cannot be read as a YAML file: {error}") from None
    try:
        read = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        place = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = str(error.problem or error).splitlines()[0]
        raise SettingError(f"{path}{place}: not valid YAML: {problem}") from None
    except YAMLError as error:
        raise SettingError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(read, dict):
        raise SettingError(f"{path}: expected `setting: value` lines, such as `lr: 1e-3`")
    settings = {str(key): value for key, value in read.items()}
    for key in settings:
        check_names([key], where=f"{path}{_line(text, key)}: ")
    try:
        TrainConfig(**{"data": ""} | settings)
    except SettingError as error:
        line = _line(text, error.wrong.field) if error.wrong else ""
        raise SettingError(f"{path}{line}: {error}") from None
    return settings


def _line(text: str, key: str) -> str:
    """Return `:` and the line of a key of a YAML text, or nothing where its spelling differs."""
    rows = enumerate(text.splitlines(), 1)
    return next((f":{number}" for number, row in rows if row.startswith(f"{key}:")), "")


def to_yaml(settings: Mapping[str, Any]) -> str:
    """The settings as YAML text, in their own order; `read_yaml` gives them back."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    text = StringIO()
    yaml.dump(dict(settings), text)
    return text.getvalue()

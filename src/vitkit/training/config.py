"""`TrainConfig`: every setting of a run, by one name in Python, in YAML and as a flag."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro
from pydantic import Field
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from vitkit.errors import SettingError, did_you_mean
from vitkit.frozen import field_names, frozen, to_json
from vitkit.spec import Channel, Fit, Interpolation

Settings: TypeAlias = dict[str, Any]
"""Some fields of `TrainConfig` by name; `spec` is a dictionary of `ViTSpec` fields."""

Count = Annotated[int, Field(ge=0, strict=True)]
AtLeastOne = Annotated[int, Field(ge=1, strict=True)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
TrackerName: TypeAlias = Literal["wandb", "mlflow"]


@frozen(raises=SettingError)
class TrainConfig:
    """Every setting of a run. Raises `SettingError` for a value out of range."""

    data: Annotated[str, tyro.conf.Suppress]
    """A folder of pictures, a CSV or Parquet file, `wds:SHARDS.tar`, `hf://owner/name`, or a name:
    `digits`, `mnist`, `fashion-mnist`, `cifar10`, `cifar100`."""
    model: str = "vit_tiny_patch16_224"
    """A model's name (`vitkit models` lists them); single fields change by `--spec.FIELD VALUE`."""
    spec: Annotated[Settings, tyro.conf.Suppress] = Field(default_factory=dict)
    """`ViTSpec` fields that differ from the model's preset."""
    recipe: str | None = None
    """Settings to start from: a recipe's name or a YAML file; flags override them."""
    img_size: AtLeastOne | None = None
    """Picture size in pixels, a square; short for `--spec.image-size`."""
    data_root: str | None = None
    """Where to look for named data sets such as `mnist`."""
    cache: str | None = None
    """Keep the decoded pictures in this folder, for this run and others; `auto`: the user's own."""
    output: str | None = None
    """The run folder; by default runs/DATA-MODEL-N."""
    overwrite: bool = False
    """Put an existing run folder aside (it is renamed, not deleted) and start afresh."""
    resume: str | None = None
    """Go on with a stopped run: its folder, or `auto` for the one at --output, if there is one."""
    epochs: AtLeastOne = 10
    """Passes over the training split."""
    batch_size: AtLeastOne = 128
    """Pictures of one optimizer step, over all processes and accumulation steps."""
    grad_accum_steps: AtLeastOne = 1
    """Parts in which a batch goes through the model, where it does not fit into memory whole."""
    max_steps: AtLeastOne | None = None
    """End after this many optimizer steps of the whole run; the schedule stays that of `epochs`."""
    save_every: AtLeastOne | None = None
    """Optimizer steps between two saved states; by default one at the end of every epoch."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    """Peak learning rate, for this batch size; never rescaled silently."""
    min_lr: Annotated[float, Field(ge=0.0)] = 1e-5
    """Learning rate at the end of the cosine."""
    warmup_epochs: Annotated[float, Field(ge=0.0)] = 1.0
    """Epochs of linear warm-up from zero; fractions are fine."""
    opt: Literal["adamw", "muon"] = "adamw"
    """The optimizer; muon is for the matrices of the blocks, with AdamW for the rest."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.05
    """Decoupled decay of matrices; biases, norms, tokens and positions have none."""
    beta1: Fraction = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: Fraction = 0.999
    """AdamW's decay of the squared gradient."""
    clip_grad: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Largest norm of the whole gradient."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What to do about a loss or gradient that is not finite; skip leaves out 2 steps in a row."""
    model_ema: bool = False
    """Average the weights over the steps; the average is what is evaluated and shared."""
    model_ema_decay: Fraction = 0.9998
    """Decay of that average."""
    label_smoothing: Fraction = 0.1
    """Probability mass spread over all classes."""
    drop_path: Fraction | None = None
    """Stochastic depth of the last block; short for `--spec.drop-path`."""
    flip: Probability = 0.5
    """Chance of a horizontal flip."""
    shift: Count = 0
    """Largest random shift up, down, left and right, in pixels."""
    crop_scale: Annotated[float, Field(gt=0.0, le=1.0)] = 0.35
    """Smallest part of the area a random crop keeps (Inception crop); 1 turns it off."""
    mean: Channel | None = None
    """Mean of each channel on [0, 1]; default 0.5."""
    std: Channel | None = None
    """Standard deviation of each channel on [0, 1]; default 0.5."""
    interpolation: Interpolation = "bicubic"
    """The resampling filter."""
    fit: Fit = "crop"
    """How pictures are brought to size outside training: centre `crop`, or `squash`."""
    crop_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Part of the shorter side that the centre crop keeps."""
    val_fraction: Fraction = 0.1
    """Part of train that becomes the validation split where the data has none."""
    patience: AtLeastOne | None = None
    """Stop after this many epochs without a higher validation top-1."""
    bad_images: Literal["refuse", "skip"] = "refuse"
    """What to do about pictures that cannot be decoded, before the first step."""
    ignore_extra_classes: bool = False
    """Leave out classes of val or test that train does not have, instead of refusing."""
    follow_links: bool = False
    """Follow symbolic links that lead out of the folder of pictures."""
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0
    """Decides initial weights, order, augmentation and dropout."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`; auto takes the best there is."""
    amp: Literal["auto", "off", "bfloat16"] = "auto"
    """Mixed precision; auto tries bfloat16 and keeps it where it is faster."""
    devices: AtLeastOne = 1
    """Processes to start on this machine, one a device; under torchrun it is torchrun's number."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What several processes hold: each the whole model, or each a part of every weight."""
    timeout: Annotated[float, Field(gt=0.0)] = 60.0
    """Seconds that one process waits for another in a step before it takes it for dead."""
    threads: AtLeastOne | None = None
    """Threads of torch's own on the CPU; decided at the start and kept, as sums depend on it."""
    workers: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Loader processes of each process; default 0 for data in memory, else one per core up to 8."""
    log_interval: AtLeastOne = 50
    """Steps between two points of the TensorBoard curves and two lines of metrics.jsonl."""
    log_histograms: bool = True
    """Show in TensorBoard how the weights lie, at the end of epochs."""
    log_examples: bool = True
    """Show in TensorBoard some validation pictures and what is predicted for them."""
    logger: tuple[TrackerName, ...] = ()
    """Services that are told the curves, too: `wandb`, `mlflow`."""
    quiet: bool = False
    """No progress bar and no messages; the run folder has them all the same."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for YAML and for the checkpoint."""
        return to_json(self)


def layered(*layers: Mapping[str, Any]) -> Settings:
    """Later settings over earlier ones; `spec` is merged field by field.

    A `spec` belongs to the `model` it was written for: a later layer that names another model drops
    the earlier layers' `spec`.

    Raises:
        SettingError: a key that is no setting (the nearest one is named), or a spec that is none.
    """
    merged: Settings = {"model": TrainConfig.model, "spec": {}}
    for layer in layers:
        check_names(layer)
        spec = layer.get("spec") or {}
        if not isinstance(spec, Mapping):
            raise SettingError(f"spec = {spec!r}: expected fields of ViTSpec, such as width: 64")
        if layer.get("model", merged["model"]) == merged["model"]:
            spec = {**merged["spec"], **spec}
        merged |= {**layer, "spec": dict(spec)}
    return merged


def check_names(keys: Iterable[str], where: str = "") -> None:
    """Raise `SettingError` for the first key that is no setting."""
    known = field_names(TrainConfig)
    for key in keys:
        if key not in known:
            raise SettingError(f"{where}there is no setting {key!r}{did_you_mean(key, known)}")


def read_yaml(path: str | Path) -> Settings:
    """The settings in a YAML file.

    Raises:
        SettingError: no such file, no valid YAML (duplicate keys and tags are not), an unknown key;
            with the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: cannot be read as a YAML file: {error}") from None
    try:
        settings = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        place = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = str(error.problem or error).splitlines()[0]
        raise SettingError(f"{path}{place}: not valid YAML: {problem}") from None
    except YAMLError as error:
        raise SettingError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(settings, dict):
        raise SettingError(f"{path}: expected `setting: value` lines, such as `lr: 1e-3`")
    lines = text.splitlines()
    for key in settings:
        number = next((n for n, row in enumerate(lines, 1) if row.startswith(f"{key}:")), 0)
        check_names([str(key)], where=f"{path}:{number}: ")
    return {str(key): value for key, value in settings.items()}


def to_yaml(settings: Mapping[str, Any]) -> str:
    """The settings as YAML text, in their own order; `read_yaml` gives them back."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    text = StringIO()
    yaml.dump(dict(settings), text)
    return text.getvalue()

"""Defaults of settings that follow from the training images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vitkit import errors, messages
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.data.loading.loader import steps_of_epoch
from vitkit.training.config.meaning import Settings
from vitkit.training.config.train_config import (
    DEFAULT_MODEL,
    USUAL,
    RunConfig,
    TrainConfig,
    leaves_model_open,
)
from vitkit.training.recipes import recipe

# Derive the open settings from the training images: model, batch size, epochs, rate.

OF_OPTIMIZER = ("lr", "beta2")
"""Settings that belong to the optimizer of a recipe."""


def chooses_model(config: TrainConfig) -> bool:
    """Return whether the model follows from the data.

    A student's does not: it gets the images as its teacher does.
    """
    return leaves_model_open(config) and config.probe is None and config.teacher is None


def decide_settings(
    config: TrainConfig, dataset: Dataset, processes: int = 1
) -> tuple[RunConfig, str]:
    """Derive the open settings; a pure function of settings and data.

    What a setting, a recipe or a stopped run names is never changed.

    Args:
        config: the settings.
        dataset: with its training images.
        processes: processes that share each batch.

    Returns:
        All settings, and at most one line: what was chosen, and what may be better.

    Raises:
        SettingError: an image size that no model for these images has.
    """
    train = dataset.splits["train"]
    model = _model_settings(config, train)
    settings = USUAL | model
    # config.yaml names the model even where the default one is taken
    if config.pretrained is None:
        settings.setdefault("model", DEFAULT_MODEL)
    else:
        settings |= {name: recipe("finetune")[name] for name in ("lr", "batch_size")}
    if config.probe is None:
        settings |= _steps(config, len(train), settings["batch_size"], model, processes)
    elif config.epochs is not None:  # a probe makes no steps
        settings["warmup_epochs"] = _warmup(config.epochs)
    if config.opt is not None and config.opt != settings["opt"]:
        settings |= {name: USUAL[name] for name in OF_OPTIMIZER}
    given = vars(config).copy()
    for name in settings:
        # a chosen spec includes the given fields already
        if given[name] is None or name == "spec":
            del given[name]
    decided = RunConfig(**settings | given)
    return decided, _describe(config, decided, len(train))


def _model_settings(config: TrainConfig, train: Split) -> Settings:
    """Return the model for the training images, with its rate and augmentation, if it is open."""
    if not chooses_model(config):
        return {}
    statistics = ImageStatistics.of(train)
    if len(train) >= MANY and statistics.side > LARGEST:
        return {}
    size = next(name for name, fewest in SIZES.items() if fewest <= len(train))
    named = config.spec.get("image_size")
    side = config.img_size or (named if isinstance(named, int) else None)
    settings = scratch_settings(size, statistics, side)
    # crops of a part of the image are the user's choice
    names = {*USUAL, "model", "spec"}
    if config.fit is None and config.crop_ratio is None:
        names.add("fit")
    for name in settings.keys() - names:
        del settings[name]
    if config.mean is not None:
        settings["spec"]["in_channels"] = len(config.mean)
    settings["spec"] |= config.spec
    # shards of a matrix cannot be made orthogonal
    if config.parallel == "fsdp" and settings.get("opt") not in (None, USUAL["opt"]):
        settings |= {name: USUAL[name] for name in ("opt", *OF_OPTIMIZER)}
    return settings


def _steps(
    config: TrainConfig, images: int, most: int, model: Settings, processes: int
) -> Settings:
    """Return the settings of the steps; those that are given are taken into account."""
    batch_size = config.batch_size or _default_batch_size(config, images, most, processes)
    last_batch = config.last_batch or ("drop" if config.batch_size else "fill")
    epochs = config.epochs or _default_epochs(
        config, images, batch_size, fill=last_batch == "fill", scratch=bool(model)
    )
    return {
        "batch_size": batch_size,
        "last_batch": last_batch,
        "epochs": epochs,
        "warmup_epochs": _warmup(epochs),
    }


def _describe(config: TrainConfig, decided: RunConfig, images: int) -> str:
    """Return a line on the chosen settings and better alternatives; empty if none was chosen."""
    if config.probe is not None:
        return ""
    parts, advice = list[str](), ""
    if chooses_model(config) and decided.spec:
        spec = decided.spec
        side = config.img_size or spec["image_size"]
        if isinstance(side, list | tuple):  # height and width
            side = " x ".join(map(str, side))
        parts.append(f"a ViT of width {spec['width']} and depth {spec['depth']} at {side} px")
        advice = "; --auto also tries simpler models; --pretrained WEIGHTS is usually far better"
    elif config.pretrained is not None and config.recipe is None:
        advice = "; --recipe finetune has further settings for trained weights"
    if config.batch_size is None:
        parts.append(f"batch {decided.batch_size}")
    if config.epochs is None:
        parts.append(messages.plural(decided.epochs, "epoch"))
    if not parts:  # all settings were given
        return ""
    if config.lr is None:
        parts.append(f"lr {decided.lr:g}")
    return f"chosen for {messages.plural(images, 'training image')}: {', '.join(parts)}{advice}"


SAMPLE = 64
"""Images in the sample, evenly spaced over the training split."""
LARGEST = 64
"""Side to which larger images are resized, in pixels: from scratch, more epochs gain more."""
SMALLEST_PATCH = 4
"""On images of 8 pixels, patches of 4 are far better than patches of 2 (the recipe `digits`)."""
FEWEST_PATCHES, SIDE_OF_MANY = 3, 12
"""Patches in a row of a larger image, at least, and the side from which an image is larger."""
MANY = 100_000
"""Images larger than `LARGEST` from which a model at their own resolution learns more."""
FINE = 28
"""Largest side for a grid of 4 x 4 patches (the recipe `fashion-mnist`); above it, 8 x 8."""


@dataclass(frozen=True)
class ImageStatistics:
    """Statistics of a sample of the training images.

    Attributes:
        side: median of the shorter sides, in pixels.
        uniform: True if all images are squares of one size, as in MNIST: centred and cropped by the
            authors of the dataset.
        colour: True if any image has colour.
    """

    side: int
    uniform: bool
    colour: bool

    @classmethod
    def of(cls, split: Split) -> ImageStatistics:
        """Compute the statistics of a split from a sample of its images.

        Raises:
            ImageError: one of them cannot be read.
        """
        indices = np.unique(np.linspace(0, len(split) - 1, SAMPLE).astype(int))
        # Decoded, as the header does not tell grey images from colour.
        images = [split.read(int(index)) for index in indices]
        sizes = {image.shape[:2] for image in images}
        return cls(
            side=int(np.median([min(image.shape[:2]) for image in images])),
            uniform=len(sizes) == 1 and all(height == width for height, width in sizes),
            # A grey image that is stored in colour has equal channels.
            colour=any((image != image[..., :1]).any() for image in images),
        )

    @property
    def _shifted(self) -> bool:
        return self.uniform and self.side <= LARGEST

    def augmentation(self, side: int) -> Settings:
        """Return the augmentation of training images that a model gets at `side` pixels.

        Grey images are often signs (digits, letters, scans), whose meaning a flip would change.
        Uniform images that are not larger than a model from scratch gets them are shifted, as in
        the recipes for them; photographs are cropped.
        """
        flip, part_shifted = 0.0, 14
        if self.colour:
            flip, part_shifted = 0.5, 8
        if self._shifted:
            shift = max(1, side // part_shifted)
            return {"flip": flip, "shift": shift, "crop_scale": 1.0}
        return {"flip": flip, "shift": 0, "crop_scale": 0.35}


SIZES = {"cifar10-small": 30_000, "fashion-mnist": 10_000, "digits": 0}
"""Recipe of a model that two cores can train -> the fewest images for it, from large to small.

They have 0.8, 0.23 and 0.14 million parameters."""


def scratch_settings(name: str, statistics: ImageStatistics, side: int | None = None) -> Settings:
    """Adapt a recipe to images of another size, with an augmentation for them.

    Args:
        name: the recipe with the size of the model and its optimizer.
        statistics: statistics of the training images.
        side: side of the model's images, in pixels; default that of the images, up to `LARGEST`.

    Raises:
        SettingError: a side that only patches of more than a third of it divide.
    """
    # A multiple of 4, so that patches of 4 fit.
    side = side or max(8, min(statistics.side, LARGEST) // 4 * 4)
    most = 4 if side <= FINE else 8
    # the smallest patch that leaves at most so many in a row
    patches = range(min(SMALLEST_PATCH, side), side + 1)
    patch_size = next(p for p in patches if side % p == 0 and side // p <= most)
    if side >= SIDE_OF_MANY and side // patch_size < FEWEST_PATCHES:
        raise errors.SettingError(
            f"--img-size {side}: only patches of {patch_size} pixels divide it, too few for a "
            f"model; pass a size that smaller ones divide, such as {round(side / most) * most}"
        )
    settings = recipe(name)
    for of_dataset in ("mean", "std", "fit"):
        settings.pop(of_dataset, None)
    settings |= statistics.augmentation(side)
    if statistics.uniform:
        # Images of one square size: nothing is cut off, nothing is stretched.
        settings["fit"] = "squash"
    settings["spec"] |= {
        "image_size": side,
        "patch_size": patch_size,
        "in_channels": 3 if statistics.colour else 1,
    }
    return settings


# Batch size, epochs and warm-up that follow from the number of training images.

MIN_STEPS = 8
"""Steps of an epoch that a batch size must leave."""
STEPS, SCRATCH_STEPS = 500, 2_000
"""Least optimizer steps: of a named model, and of a small one from random weights.

The first is what AugReg (arXiv 2106.10270) fine-tunes with on small data. The second is not tuned:
`benchmarks/first_try.py` measures what it reaches."""
SCRATCH_IMAGES = 200_000
"""Most images in these steps for the small model, to limit the time on a few cores."""
FEWEST_EPOCHS, FINETUNE_EPOCHS, MOST_EPOCHS = 10, 20, 300
"""More epochs than the last gained little in the papers on small data."""
WARMUP = 1 / 20
"""Part of the epochs that is warm-up; at least one epoch, and a tenth of a run of one epoch."""


def _default_batch_size(config: TrainConfig, images: int, most: int, processes: int) -> int:
    """Return a power of two with `MIN_STEPS` steps an epoch, as far as other settings allow."""
    fewest = max(MIN_STEPS, images // MIN_STEPS)
    batch_size = min(most, 1 << fewest.bit_length() - 1, images)
    # every process has as many images in each micro-batch as any other
    shares = config.grad_accum_steps * processes
    # an image is mixed with another one of its part
    least = shares * (2 if config.mixup or config.cutmix else 1)
    batch_size = max(batch_size // shares * shares, least)
    if 1 < batch_size <= config.repeated_aug:  # the views of one image must not fill a batch
        batch_size = (config.repeated_aug // shares + 1) * shares
    return batch_size


def _default_epochs(
    config: TrainConfig, images: int, batch_size: int, *, fill: bool, scratch: bool
) -> int:
    """Return the epochs that make enough optimizer steps."""
    steps = max(1, steps_of_epoch(images, batch_size, fill=fill))
    fewest = FEWEST_EPOCHS if config.pretrained is None else FINETUNE_EPOCHS
    enough = math.ceil(STEPS / steps)
    if scratch:
        enough = math.ceil(min(SCRATCH_STEPS / steps, SCRATCH_IMAGES / images))
    epochs = min(max(enough, fewest), MOST_EPOCHS)
    # neither --max-steps nor the last size of --progressive may come after the end
    return max(epochs, math.ceil((config.max_steps or 0) / steps), len(config.progressive))


def _warmup(epochs: int) -> float:
    """Return the epochs of warm-up of a run, whether its epochs are given or not."""
    if epochs > 1:
        return max(1.0, epochs * WARMUP)
    return epochs / 10

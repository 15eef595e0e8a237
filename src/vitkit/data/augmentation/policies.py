"""RandAugment, TrivialAugment and 3-Augment: their operations, strengths and random draws.

A draw is a function of (seed, epoch, index, view), so that no image depends on its batch.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Shaped

from vitkit import errors, messages, randomness
from vitkit.shapes import Images

# The operations of RandAugment and other policies: kornia's functions, with one value per image.
#
# Every function takes images (B, C, H, W) float in [0, 1], on any device, and a value for each
# (B,), and returns new images in [0, 1]; each result depends on its own image alone. Values have
# the meaning that they have in Pillow. `saturation` and `grey` leave grey images (C = 1) as they
# are.

OperationValues = Float[torch.Tensor, " B"]
Names = Shaped[np.ndarray, " B"]

BLUR_SIZE = 13
"""Taps of the blur: three standard deviations, of at most two pixels, to either side."""
SMOOTHING_SIZE = 3
"""Taps of the smoothing filter of `sharpness`."""
BRIGHT = 128 / 255
"""From here on a pixel is bright: Pillow's 128 of 255."""
TRANSLATED = 32
"""Unit of `translate_*_pixels` in pixels; in a smaller image, its side."""


def _of_kornia(path: str) -> Callable[[Images, OperationValues], Images]:
    """Return a function of kornia, which is imported when it is first called: that takes 1 s."""

    def operation(images: Images, values: OperationValues) -> Images:
        changed: Images = attrgetter(path)(import_module("kornia"))(images, values)
        return changed

    return operation


saturation = _of_kornia("enhance.adjust.adjust_saturation_with_gray_subtraction")
_sharpness = _of_kornia("enhance.sharpness")


def grey(images: Images, values: OperationValues) -> Images:
    """Put Rec. 601's grey in every channel."""
    return saturation(images, torch.zeros_like(values))


def sharpness(images: Images, factors: OperationValues) -> Images:
    """Sharpen: 0 is smoothed, 1 the image, 2 sharpened."""
    # Edge pixels are unchanged, and smaller images have only edge pixels.
    if min(images.shape[2:]) < SMOOTHING_SIZE:
        return images.clone()
    return _sharpness(images, factors)


def blur(images: Images, sigmas: OperationValues) -> Images:
    """Blur by a Gaussian of a standard deviation in pixels (0, 2]; edges are repeated."""
    from kornia.filters import gaussian_blur2d

    return gaussian_blur2d(images, BLUR_SIZE, sigmas[:, None].expand(-1, 2), "replicate")


def invert(images: Images, _: OperationValues) -> Images:
    """Return the negative."""
    return 1 - images


def solarize_add(images: Images, additions: OperationValues) -> Images:
    """Make dark pixels brighter and leave bright ones as they are."""
    brighter = (images + additions[:, None, None, None]).clamp_(max=1)
    return torch.where(images < BRIGHT, brighter, images)


def posterize(images: Images, bits: OperationValues) -> Images:
    """Keep the highest of 8 bits, a whole number of them from 0 (black) to 8 (all)."""
    from kornia.enhance import posterize

    return posterize(images, bits.clamp(0, 8).int())


def equalize(images: Images, _: OperationValues) -> Images:
    """Flatten the histogram of every channel."""
    from kornia.enhance import equalize

    return equalize(images)


def auto_contrast(images: Images, _: OperationValues) -> Images:
    """Stretch every channel to [0, 1]; a constant channel is unchanged."""
    low = images.amin((2, 3), keepdim=True)
    high = images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low), images)


POINTWISE: dict[str, Callable[[Images, OperationValues], Images]] = {
    # of a factor: 0 is black, the mean grey of the image, or grey; 1 is the image
    "brightness": _of_kornia("enhance.adjust_brightness_accumulative"),
    "contrast": _of_kornia("enhance.adjust_contrast_with_mean_subtraction"),
    "saturation": saturation,
    "grey": grey,
    "sharpness": sharpness,
    "blur": blur,
    "invert": invert,
    # of a threshold: values at or above it are inverted; above 1 none
    "solarize": _of_kornia("enhance.solarize"),
    "solarize_add": solarize_add,
    "posterize": posterize,
    "equalize": equalize,
    "auto_contrast": auto_contrast,
}
"""Operations on pixel values, applied to groups of images with the same operation."""
GEOMETRIC = (
    "rotate",  # degrees, about the middle
    "shear_x",  # pixels across for each pixel down, about the upper left
    "shear_y",  # pixels down for each pixel across, about the upper left
    "translate_x",  # parts of the width
    "translate_y",  # parts of the height
    "translate_x_pixels",  # `TRANSLATED` pixels
    "translate_y_pixels",
)
"""Operations on pixel positions, applied at once, each image with a matrix of its own."""
IDENTITY = ""
"""The operation that leaves an image as it is."""


def apply(
    images: Images, names: Names, values: Float64[np.ndarray, " B"], fill: tuple[float, ...]
) -> Images:
    """Apply to every image its operation, in place.

    Args:
        images: (B, C, H, W) float in [0, 1].
        names: the operation of each image (B,), or `IDENTITY`.
        values: its value (B,).
        fill: the colour (C,) of pixels that come into view from outside.
    """
    geometric = np.isin(names, GEOMETRIC)
    # All geometric operations are one warp; the others run once for each operation that occurs.
    groups = []
    if geometric.any():
        groups.append(np.flatnonzero(geometric))
    pointwise = set(names[~geometric]) - {IDENTITY}
    for name in sorted(pointwise):
        groups.append(np.flatnonzero(names == name))
    for group in groups:
        rows = torch.from_numpy(group).to(images.device)
        before = images.index_select(0, rows)
        if geometric[group[0]]:
            matrices = _matrices_of(names[group], values[group], (images.shape[2], images.shape[3]))
            after = _warp(before, torch.from_numpy(matrices).to(images), fill)
        else:
            group_values = torch.from_numpy(values[group]).to(images)
            after = POINTWISE[names[group[0]]](before, group_values)
        images.index_copy_(0, rows, after)
    return images


def _warp(
    images: Images, matrices: Float[torch.Tensor, "B 2 3"], fill: tuple[float, ...]
) -> Images:
    """Move the pixels of every image by its own affine map, bilinearly."""
    from kornia.geometry.transform import warp_affine

    colour = torch.tensor(fill, device=images.device).view(-1, 1, 1)
    size = (images.shape[2], images.shape[3])
    # kornia fills with zeros, so the colour is zero while it works.
    return warp_affine(images - colour, matrices, size).add_(colour).clamp_(0, 1)


def _matrices_of(
    names: Names, values: Float64[np.ndarray, " B"], size: tuple[int, int]
) -> Float64[np.ndarray, "B 2 3"]:
    """Return the maps from (x, y) to new (x, y) of geometric operations."""
    height, width = size

    def of(name: str) -> Float64[np.ndarray, " B"]:
        """Return the values of one operation (B,), 0 for images with another."""
        return np.where(names == name, values, 0.0)

    # The sum of all operations: each image has one, and the values of the others are 0.
    angle = of("rotate") * (math.pi / 180)
    cos, sin = np.cos(angle), np.sin(angle)
    shear_x, shear_y = of("shear_x"), of("shear_y")
    across = of("translate_x") * width + of("translate_x_pixels") * min(TRANSLATED, width)
    down = of("translate_y") * height + of("translate_y_pixels") * min(TRANSLATED, height)
    x, y = (width - 1) / 2, (height - 1) / 2
    # Rotate about the centre of the image, not about its upper left pixel.
    across += x - (cos * x - sin * y) + shear_x / 2  # the upper left corner is at (-1/2, -1/2)
    down += y - (sin * x + cos * y) + shear_y / 2
    rows = [[cos, shear_x - sin, across], [sin + shear_y, cos, down]]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=1)


Draws = Float64[np.ndarray, "L B"]


class Choice(NamedTuple):
    """An operation and its value at a level t: start + t (end - start).

    Attributes:
        operation: its name, a key of `POINTWISE` or one of `GEOMETRIC`.
        start: the value at level 0.
        end: the value at level 1.
        mirrored: True to take the value on the other side of `start` for half of the images.
        rounded: function to whole numbers, where the published policy has one.
    """

    operation: str
    start: float = 0.0
    end: float = 0.0
    mirrored: bool = False
    rounded: Callable[[Float64[np.ndarray, " _"]], Float64[np.ndarray, " _"]] | None = None


GEOMETRY = (
    Choice("rotate", 0.0, 30.0, mirrored=True),
    Choice("shear_x", 0.0, 0.3, mirrored=True),
    Choice("shear_y", 0.0, 0.3, mirrored=True),
    Choice("translate_x", 0.0, 0.45, mirrored=True),
    Choice("translate_y", 0.0, 0.45, mirrored=True),
)
"""Geometric operations of RandAugment in either form."""
ALWAYS = (
    Choice("auto_contrast"),
    Choice("equalize"),
    Choice("invert"),
    Choice("solarize_add", 0.0, 110 / 255),
)
"""Other operations that both forms have in common."""
RANDAUGMENT = (
    *ALWAYS,
    *GEOMETRY,
    Choice("posterize", 0.0, 4.0, rounded=np.floor),
    Choice("solarize", 0.0, 256 / 255),
    Choice("saturation", 0.1, 1.9),
    Choice("contrast", 0.1, 1.9),
    Choice("brightness", 0.1, 1.9),
    Choice("sharpness", 0.1, 1.9),
)
"""arXiv 1909.13719 with the ranges of the authors' code, as timm has them up to level 10: some of
the operations are the weaker the higher the level."""
RANDAUGMENT_INCREASING = (
    *ALWAYS,
    *GEOMETRY,
    Choice("posterize", 4.0, 0.0, rounded=np.ceil),
    Choice("solarize", 256 / 255, 0.0),
    Choice("saturation", 1.0, 1.9, mirrored=True),
    Choice("contrast", 1.0, 1.9, mirrored=True),
    Choice("brightness", 1.0, 1.9, mirrored=True),
    Choice("sharpness", 1.0, 1.9, mirrored=True),
)
"""timm's `inc1`, DeiT's: all of them are the stronger the higher the level."""
TRIVIALAUGMENT_WIDE = (
    Choice(IDENTITY),
    Choice("auto_contrast"),
    Choice("equalize"),
    Choice("rotate", 0.0, 135.0, mirrored=True),
    Choice("shear_x", 0.0, 0.99, mirrored=True),
    Choice("shear_y", 0.0, 0.99, mirrored=True),
    Choice("translate_x_pixels", 0.0, 1.0, mirrored=True),
    Choice("translate_y_pixels", 0.0, 1.0, mirrored=True),
    Choice("posterize", 8.0, 2.0, rounded=np.rint),
    Choice("solarize", 1.0, 0.0),
    Choice("saturation", 1.0, 1.99, mirrored=True),
    Choice("contrast", 1.0, 1.99, mirrored=True),
    Choice("brightness", 1.0, 1.99, mirrored=True),
    Choice("sharpness", 1.0, 1.99, mirrored=True),
)
"""arXiv 2103.10158, Table 1, the wide space."""
TRIVIALAUGMENT_LEVELS = 31
THREE_AUGMENT = (
    Choice("grey"),
    Choice("solarize", 128 / 255, 128 / 255),
    Choice("blur", 0.1, 2.0),
)
"""arXiv 2204.07118, Sec. 3.2; the ranges are those of the authors' code."""


@dataclass(frozen=True, eq=False)
class Policy:
    """A distribution of operations and values.

    Attributes:
        choices: the operations, each as likely as any other.
        levels: function from uniform draws in [0, 1) to levels.
        layers: number of operations one after another.
        chance: that an operation is applied, [0, 1]; else that layer leaves the image as it is.
        each_once: True if the layers are all the choices in random order.
    """

    choices: tuple[Choice, ...]
    levels: Callable[[Draws], Draws]
    layers: int = 1
    chance: float = 1.0
    each_once: bool = False

    def draw(
        self,
        seed: int,
        augmentation_key: int | Int64[np.ndarray, " B"],
        indices: Int64[np.ndarray, " B"],
        purpose: int,
    ) -> tuple[Shaped[np.ndarray, "L B"], Draws]:
        """Draw the operations and values of every layer for every image.

        Args:
            seed: seed of the run.
            augmentation_key: epoch and view, `randomness.augmentation_key`.
            indices: the images' indices in the split.
            purpose: key of the random numbers.

        Returns:
            Names of operations (L, B) and their values (L, B).
        """
        layers = np.arange(self.layers)[:, None]
        # In all arrays below, layers are rows and images are columns.
        keys = (seed, augmentation_key, indices, purpose, layers)
        choice, applied, level, side = (randomness.uniform(*keys, number) for number in range(4))
        table = self.choices
        # Sorting random numbers gives a random permutation, one for each image.
        if self.each_once:
            chosen = choice.argsort(axis=0, kind="stable")
        else:
            chosen = (choice * len(table)).astype(np.int64)
        columns = [*zip(*table, strict=True)]
        names, start, end, mirrored = (np.array(column)[chosen] for column in columns[:4])
        sign = np.where(mirrored & (side < 0.5), -1, 1)
        values = start + sign * (end - start) * self.levels(level)
        # Some operations, such as posterize, have whole numbers as values.
        for number, row in enumerate(table):
            if row.rounded is not None:
                values = np.where(chosen == number, row.rounded(values), values)
        return np.where(applied < self.chance, names, IDENTITY), values


def colour_jitter(strength: float) -> Policy:
    """Change brightness, contrast and saturation by factors in [1 - strength, 1 + strength].

    In random order, as torchvision's `ColorJitter(strength, strength, strength)`.
    """
    names = ("brightness", "contrast", "saturation")
    low = max(0.0, 1 - strength)
    choices = tuple(Choice(name, low, 1 + strength) for name in names)
    return Policy(choices, levels=_as_drawn, layers=len(choices), each_once=True)


def policy(text: str) -> Policy:
    """Return a policy by its name, in timm's grammar.

    `rand-m9-n2-p0.5-mstd0.5-mmax10-inc1` is RandAugment: level m of 10 (default 10), n layers
    (2), each with chance p (0.5), levels normal about m with the deviation mstd (0; above 100:
    uniform below m) and at most mmax (10), operations the stronger the higher their level (inc1) or
    as published (inc0, the default). `trivial` is TrivialAugment Wide, `3` is 3-Augment.

    Raises:
        SettingError: another name, another part, or a number out of range.
    """
    # Only RandAugment has parts; `trivial-m9` is a mistake, so the whole text is compared.
    name, *parts = text.split("-")
    if name == "rand":
        return _randaugment(text, parts)
    if text == "trivial":
        return Policy(TRIVIALAUGMENT_WIDE, levels=_trivial_levels)
    if text == "3":
        return Policy(THREE_AUGMENT, levels=_as_drawn)
    guess = messages.did_you_mean(text, EXAMPLES) or messages.did_you_mean(name, EXAMPLE_NAMES)
    raise errors.SettingError(
        f"--aa {text!r} is not a policy{guess}; pass a policy such as {EXAMPLES[0]}, "
        f"{EXAMPLES[1]} or {EXAMPLES[2]}"
    )


EXAMPLES = ("rand-m9-mstd0.5-inc1", "trivial", "3")
EXAMPLE_NAMES = ("rand", "trivial", "3")
GRAMMAR: dict[str, tuple[float, float, float]] = {
    "m": (10.0, 0.0, 30.0),
    "n": (2.0, 1.0, 15.0),
    "p": (0.5, 0.0, 1.0),
    "mstd": (0.0, 0.0, math.inf),
    "mmax": (10.0, 1.0, 30.0),
    "inc": (0.0, 0.0, 1.0),
}
"""The parts of RandAugment's name: default, smallest, largest."""
WHOLE = ("n", "mmax", "inc")
"""Parts that are whole numbers."""


def _randaugment(text: str, parts: list[str]) -> Policy:
    given: dict[str, float] = {}
    for key, (default, _, _) in GRAMMAR.items():
        given[key] = default
    problem = ""
    for part in parts:
        match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", part)
        key = match.group(1) if match else part
        if match is None or key not in GRAMMAR:
            near = messages.did_you_mean(key, GRAMMAR)
            problem = f"{part!r} is not part of a policy{near}; expected rand-m9-mstd0.5-inc1"
            break
        _, low, high = GRAMMAR[key]
        given[key] = float(match.group(2))
        if not low <= given[key] <= high or (key in WHOLE and given[key] % 1):
            kind = "a whole number " if key in WHOLE else ""
            problem = f"{key} must be {kind}from {low:g} to {high:g}, got {given[key]:g}"
            break
    # Increasing operations reach their strongest value at level 10, so none is above it.
    if given["inc"] and given["mmax"] > 10:
        problem = problem or "with inc1 the highest strength is 10; lower mmax, or leave out inc1"
    elif given["m"] > given["mmax"]:
        most = math.ceil(given["m"])
        problem = problem or f"m{given['m']:g} is above the highest strength; add -mmax{most}"
    if problem:
        raise errors.SettingError(f"--aa {text!r}: {problem}")
    table = RANDAUGMENT_INCREASING if given["inc"] else RANDAUGMENT
    levels = partial(_normal_levels, given["m"], given["mstd"], given["mmax"])
    return Policy(table, levels, layers=int(given["n"]), chance=given["p"])


def _normal_levels(mean: float, deviation: float, highest: float, draws: Draws) -> Draws:
    if deviation > 100:  # timm's convention for uniform levels
        return draws * mean / 10
    # The inverse of the normal distribution makes a uniform draw a normal one.
    normal = np.zeros_like(draws)
    if deviation:
        normal = torch.special.ndtri(torch.from_numpy(draws)).numpy()
    return np.clip(mean + deviation * normal, 0, highest) / 10


def _trivial_levels(draws: Draws) -> Draws:
    # The strengths 0/30, 1/30 ... 30/30, each as likely as any other.
    return np.floor(draws * TRIVIALAUGMENT_LEVELS) / (TRIVIALAUGMENT_LEVELS - 1)


def _as_drawn(draws: Draws) -> Draws:
    return draws

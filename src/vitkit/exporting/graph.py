"""The graph that is exported: preprocessing and model in one program."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitkit import errors, spec
from vitkit.engines import engine, inference_folds
from vitkit.weights.checkpoint import Checkpoint

# The evaluation transform as a part of the graph: uint8 images of any size to the model's input.
#
# Pillow resamples along one axis at a time, and rounds to whole numbers after each. One axis is a
# product with a matrix, whose entries are a filter's values. Here the matrices are computed in the
# graph from the image's height and width, so that one graph takes images of all sizes. Source:
# Pillow, `Resample.c` (coefficients, fixed point) and `Convert.c` (grey).

FIXED_POINT = 2.0**22
"""Pillow's coefficients of uint8 images are whole multiples of 1 / this number."""
GREY = (19595, 38470, 7471)
"""Rec. 601 in multiples of 1 / 65536, as Pillow rounds it."""
CUBIC = -0.5
"""The parameter a of Pillow's bicubic filter (Keys, "Cubic Convolution Interpolation", Eq. 15)."""


class PreprocessingGraph(nn.Module):
    """`fit` and `normalise` of a batch of images of one size, by operators that runtimes have.

    Equal to `fit` but for single pixels that differ by 1 of 255, where a product in float32 falls
    on the other side of a half.

    Args:
        preprocess: size, filter, fit, mean and standard deviation.

    Raises:
        SettingError: the filter is `nearest`: Pillow adds up its positions, with rounding errors
            that decide between neighbours, and a graph cannot follow them.
    """

    mean: Tensor
    std: Tensor
    grey: Tensor

    def __init__(self, preprocess: spec.Preprocess) -> None:
        super().__init__()
        if preprocess.interpolation == "nearest":
            raise errors.SettingError(
                "preprocessing with interpolation 'nearest' cannot be a part of the graph with the "
                "same pixels; leave out --with-preprocessing (with_preprocessing=)"
            )
        self.preprocess = preprocess
        shape = (1, preprocess.channels, 1, 1)
        for name, values in (("mean", preprocess.mean), ("std", preprocess.std)):
            self.register_buffer(name, torch.tensor(values).view(shape), persistent=False)
        self.register_buffer("grey", torch.tensor(GREY, dtype=torch.int32), persistent=False)

    def forward(self, images: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B C h w"]:
        """Return the model's input.

        Args:
            images: RGB, uint8 [0, 255], of any height and width.

        Returns:
            (B, C, h, w) float32, normalised.
        """
        pixels = images.permute(0, 3, 1, 2)
        if self.preprocess.channels == 1:
            pixels = self._grey(pixels)
        pixels = pixels.to(torch.float32)
        size = (_length(pixels, 2), _length(pixels, 3))
        scaled = _scaled_lengths(size, self.preprocess)
        rows = self._matrix(0, size[0], scaled[0], pixels.shape[2])
        columns = self._matrix(1, size[1], scaled[1], pixels.shape[3])
        # Across first, then down, and whole numbers after each, as in Pillow.
        pixels = _to_whole(pixels @ columns.T)
        pixels = _to_whole(rows @ pixels)
        return (pixels / 255.0 - self.mean) / self.std

    def _grey(self, pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B 1 H W"]:
        """Convert to grey by Rec. 601, rounded to the nearest whole number."""
        weighted = pixels.to(torch.int32) * self.grey.view(1, 3, 1, 1)
        total = weighted[:, 0:1] + weighted[:, 1:2] + weighted[:, 2:3] + 32768
        return torch.div(total, 65536, rounding_mode="floor").to(torch.float32)

    def _matrix(
        self,
        axis: int,
        length: Int64[Tensor, ""],
        scaled: Int64[Tensor, ""],
        count: Any,
    ) -> Float[Tensor, "h H"]:
        """Return the resampling matrix of one axis, for the rows that the centre crop keeps.

        Args:
            axis: 0 is down, 1 across.
            length: length of the image along the axis.
            scaled: length of the resized image, of which the crop is the centre.
            count: `length` as a number, or as a symbol while the graph is recorded.
        """
        kept = self.preprocess.image_size[axis]
        first = _half_to_even(scaled - kept)
        outputs = torch.arange(kept).view(-1, 1) + first
        # The centre of an output pixel on the input's axis, ((o + 0.5) length / scaled), as whole
        # and fraction: exact in whole numbers, also where a runtime has no float64.
        doubled = (2 * outputs + 1) * length
        whole = torch.div(doubled, 2 * scaled, rounding_mode="floor")
        inputs = torch.arange(count).view(1, -1)
        rest = (doubled - whole * 2 * scaled).to(torch.float64) / (2 * scaled).to(torch.float64)
        factor = torch.clamp(length.to(torch.float64) / scaled.to(torch.float64), min=1.0)
        distance = ((inputs - whole).to(torch.float64) + 0.5 - rest) / factor
        weights = _filter(distance, self.preprocess.interpolation)
        weights = weights / weights.sum(1, keepdim=True)
        # Rounded as Pillow rounds: half away from zero.
        fixed = torch.floor(weights.abs() * FIXED_POINT + 0.5) * torch.sign(weights)
        return (fixed / FIXED_POINT).to(torch.float32)


def _filter(distance: Float[Tensor, "h H"], interpolation: str) -> Float[Tensor, "h H"]:
    """Return the value of a filter at distances from its centre, in units of its scale."""
    x = distance.abs()
    if interpolation == "bilinear":
        return torch.clamp(1.0 - x, min=0.0)
    near = ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * CUBIC
    return torch.where(x < 1.0, near, torch.where(x < 2.0, far, torch.zeros_like(x)))


def _to_whole(pixels: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """Round to the nearest whole number, halves up, and clip to [0, 255]."""
    return torch.clamp(torch.floor(pixels + 0.5), 0.0, 255.0)


def _length(pixels: Tensor, axis: int) -> Int64[Tensor, ""]:
    """Return the length of an axis as a tensor, so that what follows from it is in the graph."""
    return torch.full((), pixels.shape[axis], dtype=torch.int64)


def _scaled_lengths(
    size: tuple[Int64[Tensor, ""], Int64[Tensor, ""]], preprocess: spec.Preprocess
) -> tuple[Int64[Tensor, ""], Int64[Tensor, ""]]:
    """Return (H, W) of the resized image of which the crop is the centre, as `fit` computes it."""
    height, width = size
    crop_height, crop_width = preprocess.image_size
    if preprocess.fit == "squash":
        return torch.full_like(height, crop_height), torch.full_like(width, crop_width)
    tall = math.floor(crop_height / preprocess.crop_ratio)
    wide = math.floor(crop_width / preprocess.crop_ratio)
    fixed = torch.full_like(height, tall), torch.full_like(width, wide)
    if preprocess.fit == "squash-crop":
        return fixed
    by_height = height * wide <= width * tall  # the height fits, the width is longer
    if tall == wide:
        long_width = torch.div(tall * width, height, rounding_mode="floor")
        long_height = torch.div(tall * height, width, rounding_mode="floor")
    else:
        long_width = _nearest(width, height, tall)
        long_height = _nearest(height, width, wide)
    return torch.where(by_height, fixed[0], long_height), torch.where(
        by_height, long_width, fixed[1]
    )


def _nearest(long: Int64[Tensor, ""], short: Int64[Tensor, ""], target: int) -> Int64[Tensor, ""]:
    """Return the long side's length where the short one becomes `target`, rounded as by `fit`.

    Where it falls between two pixels, the rounding errors of float64 decide in `fit`; a runtime
    that computes in float32 may take the other pixel.
    """
    quotient = long.to(torch.float64) / (short.to(torch.float64) / target)
    return torch.round(quotient).to(torch.int64)


def _half_to_even(number: Int64[Tensor, ""]) -> Int64[Tensor, ""]:
    """Return half of a whole number from 0 on, halves rounded to even."""
    floor = torch.div(number, 2, rounding_mode="floor")
    return floor + (number % 2) * (floor % 2)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = ((engine.INPUT, (engine.OUTPUT,)), ("pixels", ("probabilities", engine.OUTPUT)))
"""Name of the input, and of the outputs, without preprocessing and with it."""
MAX_SIDE = 2**15
"""The longest side of an image that a graph with preprocessing takes, in pixels."""
EXAMPLE_SIZE = (67, 45)
"""Height and width of the example of a graph that takes all sizes."""


class ExportedModel(nn.Module):
    """Images (B, C, h, w) float32 -> logits (B, K) float32, in any precision inside.

    Args:
        model: folded, in the precision.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.model(images.to(self.dtype))
        return logits.to(torch.float32)


class PixelModel(nn.Module):
    """Pixels (B, H, W, 3) uint8 -> probabilities (B, K), logits (B, K), both float32.

    Args:
        model: images -> logits.
        preprocessing: pixels -> images.
        temperature: divides the logits before the softmax.
    """

    def __init__(
        self, model: nn.Module, preprocessing: PreprocessingGraph, temperature: float
    ) -> None:
        super().__init__()
        self.model = model
        self.preprocessing = preprocessing
        self.temperature = temperature

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities and the logits."""
        logits = self.model(self.preprocessing(pixels))
        return torch.softmax(logits / self.temperature, 1), logits


def exported_program(
    checkpoint: Checkpoint, *, dtype: torch.dtype, with_preprocessing: bool
) -> ExportedProgram:
    """Return the program of a checkpoint's model, for batches of any size.

    Args:
        checkpoint: its model stays as it is.
        dtype: dtype of the weights and of what is computed.
        with_preprocessing: take pixels of any size.

    Raises:
        SettingError: torch cannot export the model, or preprocessing that cannot be in the graph.
    """
    folded = (
        inference_folds.fold_for_inference(checkpoint.model).cpu().to(dtype).requires_grad_(False)
    )
    model: nn.Module = ExportedModel(folded, dtype)
    preprocess = checkpoint.preprocess
    if not with_preprocessing:
        example = torch.zeros(engine.EXAMPLE_BATCH, preprocess.channels, *preprocess.image_size)
        return engine.export_program(model.eval(), example)
    model = PixelModel(model, PreprocessingGraph(preprocess), checkpoint.temperature)
    example = torch.zeros(engine.EXAMPLE_BATCH, *EXAMPLE_SIZE, 3, dtype=torch.uint8)
    sides = {1: Dim("height", min=2, max=MAX_SIDE), 2: Dim("width", min=2, max=MAX_SIDE)}
    return engine.export_program(model.eval(), example, sides)


def program_names(program: ExportedProgram) -> tuple[str, tuple[str, ...]]:
    """Return the name of a program's input, and those of its outputs."""
    return NAMES[len(program.graph_signature.user_outputs) - 1]

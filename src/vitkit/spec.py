"""`ViTSpec` describes a model, `Preprocess` its evaluation transform; both are stored with it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, SupportsIndex

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from vitkit import errors, other_names
from vitkit.frozen import Described, frozen
from vitkit.messages import plural

if TYPE_CHECKING:
    from torch import Tensor


def _as_pair(value: object) -> object:
    """Turn one number into a pair: 16 is (16, 16)."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, list | tuple) and len(value) == 2:
        return value
    raise PydanticCustomError("pair", "must be a whole number, or two: height and width")


def _as_int(value: object) -> object:
    """Accept numpy's integers, but no booleans."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    return value


# Upper bounds are far beyond any model; a forged file must neither overflow nor build for hours.
MOST_BLOCKS = 1000
Positive = Annotated[int, BeforeValidator(_as_int), Field(ge=1, le=2**20, strict=True)]
Blocks = Annotated[int, BeforeValidator(_as_int), Field(ge=1, le=MOST_BLOCKS, strict=True)]
PixelCount = Annotated[int, BeforeValidator(_as_int), Field(ge=1, le=2**14, strict=True)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Size = Annotated[tuple[PixelCount, PixelCount], BeforeValidator(_as_pair)]
"""Height and width in pixels; one number means a square."""

Count = Annotated[int, BeforeValidator(_as_int), Field(ge=0, le=2**24, strict=True)]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
Stem = Literal["convolution", "linear", "normed_linear", "resnet", "backbone"]
ResNetVariant = Literal["published", "timm", "jeonsworld"]
Positions = Literal[
    "learned", "sincos_1d", "sincos_2d", "sincos_2d_moco", "sincos_2d_mae", "rope", "none"
]
Resampling = Literal[
    "bicubic_antialias",
    "bicubic",
    "bicubic_aligned",
    "bicubic_offset",
    "bilinear",
    "bilinear_aligned",
    "bilinear_antialias",
]
Block = Literal["pre_norm", "post_norm", "res_post_norm"]
MLPKind = Literal["plain", "swiglu_packed", "swiglu_split"]
Norm = Literal["layer", "rms"]
QKVBias = bool | Literal["no_key"]
Pooling = Literal["cls", "mean", "mean_all", "map", "cls_mean"]
Initialisation = Literal["jax", "timm", "xavier_normal", "xavier_uniform", "mimetic"]
STAGE_STRIDES = (4, 4, 8, 16, 32)
"""Pixels per cell of a ResNet's feature map, by the number of its stages."""


def resolve_head_width(width: int, num_heads: int, head_width: int | None) -> int:
    """Return h, the width of one head: as given, or width / num_heads.

    Raises:
        SpecError: num_heads does not divide width, and no head width is given.
    """
    if head_width is not None:
        return head_width
    if width % num_heads:
        # suggest the two nearest valid numbers
        divisors = [k for k in range(1, width + 1) if width % k == 0]
        nearest = sorted(sorted(divisors, key=lambda k: abs(k - num_heads))[:2])
        raise errors.SpecError(
            f"width {width} is not divisible by num_heads {num_heads}; use "
            f"{' or '.join(map(str, nearest))} heads, or set head_width"
        )
    return width // num_heads


@frozen(raises=errors.SpecError)
class ViTSpec(Described):
    """The architecture of a plain ViT ("An Image is Worth 16x16 Words", Sec. 3.1).

    Raises `SpecError` for a spec that no model could have. The defaults are ViT-B/16 at 224 pixels.
    """

    OTHER_NAMES: ClassVar = other_names.OTHER_FIELDS

    image_size: Size = (224, 224)
    """Height and width of the images of the position table, in pixels."""
    patch_size: Size = (16, 16)
    """Height and width of one patch, in pixels; must divide `image_size`."""
    in_channels: Literal[1, 3] = 3
    """1 for grey images, 3 for RGB."""
    num_classes: Count = 1000
    """Logits of the head; 0 leaves the head out, and `forward` returns pooled features."""
    width: Positive = 768
    """D, the length of a token."""
    depth: Blocks = 12
    """L, the number of encoder blocks."""
    num_heads: Positive = 12
    """k, the attention heads of a block; must divide `width` unless `head_width` is given."""
    head_width: Positive | None = None
    """h, the width of one head; `None` means width / num_heads."""
    mlp_width: Positive = 3072
    """M, the hidden width of the MLP; of a SwiGLU, the width after the gate."""

    stem: Stem = "convolution"
    """Map from patches to tokens: a stride-P convolution; the same map as one matrix (`linear`);
    LayerNorm, matrix, LayerNorm (`normed_linear`); patches of a ResNet's feature map, or of a
    `backbone` that the caller passes to `ViT`."""
    resnet_layers: tuple[Blocks, ...] = ()
    """Blocks of each stage of the ResNetV2 stem, (3, 4, 9) for R50 with stride 16."""
    resnet_variant: ResNetVariant = "published"
    """Implementation whose epsilons, padding and shortcut norm the ResNetV2 stem follows."""
    patch_bias: bool = True
    """True if the patch projection has a bias."""

    class_token: bool = True
    """True if a learned class token precedes the patches."""
    distillation_token: bool = False
    """True if a distillation token with a head of its own follows the class token (DeiT)."""
    distilled_readout: Literal["mean", "cls"] = "mean"
    """Output of `forward` with two heads: their mean (DeiT), or the class head's logits."""
    num_registers: Count = 0
    """R, learned tokens that take part in attention alone (arXiv 2309.16588)."""
    positions: Positions = "learned"
    """Kind of position embedding; see `models/embedding.py`."""
    positions_cover_prefix: bool = True
    """True if the learned table has rows for class, distillation and register tokens too."""
    position_resampling: Resampling = "bicubic_antialias"
    """Interpolation of a learned table for another grid; see `models/embedding.py`."""
    rope_temperature: Annotated[float, Field(gt=0.0)] = 100.0
    """Base of the rotation periods (with `positions="rope"`)."""
    embedding_norm: bool = False
    """True if there is a norm before the first block (CLIP; timm's `norm_pre`)."""

    block: Block = "pre_norm"
    """x + f(norm(x)), norm(x + f(x)) as in the Transformer of 2017, or x + norm(f(x))."""
    norm: Norm = "layer"
    """LayerNorm or RMSNorm, in the blocks and after; norms inside a stem do not change."""
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-6
    """The norms' epsilon."""
    activation: Activation = "gelu"
    """The MLP's non-linearity: `gelu` is exact (erf), `gelu_tanh` is the published JAX code's."""
    mlp: MLPKind = "plain"
    """Two layers; or a SwiGLU with gate and value in one matrix, or in two."""
    qkv_bias: QKVBias = True
    """True if the query, key and value projection has a bias; `no_key` leaves the key's out."""
    qk_norm: bool = False
    """True if queries and keys are normalised, each head by itself (arXiv 2302.05442)."""
    layer_scale: Annotated[float, Field(gt=0.0)] | None = None
    """Initial value of LayerScale (arXiv 2103.17239); `None` leaves it out."""

    pooling: Pooling = "cls"
    """Input of the head: the class token; the mean of the patches, or of all tokens; one query
    that attends to the patches (`map`); class token and mean of the patches side by side."""
    final_norm: bool = True
    """True if there is a norm after the last block."""
    norm_before_pool: bool = True
    """True for the last norm before pooling, False for the pooled vector (timm's `fc_norm`)."""
    representation_width: Positive | None = None
    """Width of a tanh layer before the head (the paper's pre-training head, `pre_logits`)."""
    head_bias: float = 0.0
    """Initial value of the head's bias; use about -log(K) for a sigmoid loss."""
    initialisation: Initialisation = "jax"
    """Scheme of the initial weights; see `models/initialisation.py`."""

    position_dropout: Rate = 0.0
    """Dropout once, after positions are added."""
    patch_dropout: Rate = 0.0
    """Share of an image's patch tokens that is dropped in training (arXiv 2208.07220)."""
    attention_dropout: Rate = 0.0
    """Dropout on the attention weights."""
    projection_dropout: Rate = 0.0
    """Dropout after the attention's output projection."""
    mlp_dropout: Rate = 0.0
    """Dropout after both linear layers of the MLP."""
    head_dropout: Rate = 0.0
    """Dropout before the head."""
    drop_path: Rate = 0.0
    """Stochastic depth of the last block."""
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    """`linear`: stochastic depth rises from 0 at the first block; `constant`: equal in all."""

    def __post_init__(self) -> None:
        # pydantic has checked each field by itself; these checks are between fields.
        for problem in chain(_of_sizes(self), _of_stem(self), _of_tokens(self)):
            raise errors.SpecError(problem)

    @property
    def grid(self) -> tuple[int, int]:
        """The patches (gh, gw) of an image of `image_size`."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def num_patches(self) -> int:
        """The number of patches, N = HW / P^2 (Sec. 3.1)."""
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        """The number of tokens before the patches: class, distillation and registers."""
        return int(self.class_token) + int(self.distillation_token) + self.num_registers

    @property
    def position_rows(self) -> int:
        """The number of rows of the learned position table; 0 where positions are not learned."""
        if self.positions != "learned":
            return 0
        return self.num_patches + self.num_prefix_tokens * self.positions_cover_prefix

    @property
    def pooled_width(self) -> int:
        """The width of the pooled vector: D, or 2 D for `cls_mean`."""
        if self.pooling == "cls_mean":
            return 2 * self.width
        return self.width

    @property
    def head_inputs(self) -> int:
        """The width of the head's input: of the representation layer, if there is one."""
        return self.representation_width or self.pooled_width

    @property
    def attention_width(self) -> int:
        """The width of all heads side by side, k * h."""
        return self.num_heads * resolve_head_width(self.width, self.num_heads, self.head_width)


RANDOM_RATES = tuple(name for name, kind in ViTSpec.__annotations__.items() if kind == "Rate")
"""Fields by which training drops something at random."""


def _multiples(number: int, divisor: int) -> str:
    """Name the nearest multiple of `divisor`, or both if they are equally near."""
    below = number // divisor * divisor
    above = -(-number // divisor) * divisor
    if below and number - below == above - number:
        return f"{below} or {above}"
    return str(below if below and number - below < above - number else above)


def _of_sizes(spec: ViTSpec) -> Iterator[str]:
    for side, image, patch in zip("HW", spec.image_size, spec.patch_size, strict=True):
        if image % patch:
            below = image // patch * patch
            nearest = f"{below} or {below + patch}" if below else f"{patch}"
            yield (
                f"image_size {image} ({side}) is not divisible by patch_size {patch}; "
                f"the nearest sizes that are: {nearest}"
            )
    head_width = resolve_head_width(spec.width, spec.num_heads, spec.head_width)
    needs = {"sincos_1d": (2, spec.width, "width"), "rope": (4, head_width, "head width")}
    for name in ("sincos_2d", "sincos_2d_moco", "sincos_2d_mae"):
        needs[name] = (4, spec.width, "width")
    # Sines come in pairs with cosines; two coordinates need two pairs.
    divisor, number, noun = needs.get(spec.positions, (1, spec.width, "width"))
    if number % divisor:
        yield (
            f"positions {spec.positions!r} need a {noun} divisible by {divisor}, not {number}; "
            f"the nearest is {_multiples(number, divisor)}"
        )
    if spec.positions != "rope" and spec.rope_temperature != ViTSpec.rope_temperature:
        yield (
            f"rope_temperature {spec.rope_temperature:g} has no effect with positions "
            f"{spec.positions!r}; set positions to 'rope', or leave it out"
        )
    # The gate of a SwiGLU is always silu; a field that says otherwise would be a silent mistake.
    if spec.mlp != "plain" and spec.activation != "silu":
        yield (
            f"mlp {spec.mlp!r} has a silu gate, and activation is {spec.activation!r}; set "
            "activation to 'silu', or mlp to 'plain'"
        )


def _of_stem(spec: ViTSpec) -> Iterator[str]:
    if spec.stem != "resnet":
        for name, plain in (("resnet_layers", ()), ("resnet_variant", "published")):
            value = getattr(spec, name)
            if value != plain:
                yield (f"{name} {value!r} needs stem 'resnet', not {spec.stem!r}")
        return
    # the pooling of jeonsworld's stem makes a map that is one cell too small for fewer stages
    fewest = 2 if spec.resnet_variant == "jeonsworld" else 0
    if not fewest <= len(spec.resnet_layers) < len(STAGE_STRIDES):
        yield (
            f"resnet_layers {spec.resnet_layers} has {plural(len(spec.resnet_layers), 'stage')}; "
            f"a {spec.resnet_variant} ResNet has {fewest} to {len(STAGE_STRIDES) - 1}"
        )
    stride = STAGE_STRIDES[len(spec.resnet_layers)]
    for patch in spec.patch_size:
        if patch % stride:
            yield (
                f"patch_size {patch} is not divisible by {stride}, the stride of a ResNet of "
                f"{plural(len(spec.resnet_layers), 'stage')}; the nearest is "
                f"{_multiples(patch, stride)}"
            )


def _of_tokens(spec: ViTSpec) -> Iterator[str]:
    # DeiT's two heads read one token each, so there is nothing to pool.
    if spec.distillation_token and (not spec.class_token or spec.pooling != "cls"):
        yield (
            "distillation_token needs class_token=True and pooling 'cls', not "
            f"class_token={spec.class_token} and pooling {spec.pooling!r}"
        )
    if spec.distilled_readout == "cls" and not spec.distillation_token:
        yield (
            "distilled_readout 'cls' needs distillation_token=True; set it, or leave out "
            "distilled_readout"
        )
    if spec.pooling in ("cls", "cls_mean") and not spec.class_token:
        yield (f"pooling {spec.pooling!r} needs class_token=True; set it, or use pooling 'mean'")


Interpolation = Literal["nearest", "bilinear", "bicubic"]
Fit = Literal["squash", "crop", "squash-crop"]
Resizer = Literal["pillow", "torch"]
"""A library that resizes the crops of training."""
Channel = tuple[float] | tuple[float, float, float]


@frozen(raises=errors.SpecError)
class Preprocess(Described):
    """The evaluation transform of a decoded image, (H, W, 3) uint8 RGB.

    The image is converted to grey for one channel (Rec. 601), resized to `image_size`, divided by
    255, and normalised: (value - mean) / std. Raises `SpecError` on impossible values.
    """

    image_size: Size = (224, 224)
    """Height and width of the tensor, in pixels."""
    mean: Channel = (0.5, 0.5, 0.5)
    """Mean of each channel on the scale [0, 1]; one value means grey images."""
    std: Channel = (0.5, 0.5, 0.5)
    """Standard deviation of each channel on the scale [0, 1]."""
    interpolation: Interpolation = "bicubic"
    """The resampling filter; all but `nearest` are antialiased when they shrink."""
    fit: Fit = "crop"
    """`crop`: shorter side to image_size / crop_ratio, then the centre; `squash`: each side to
    image_size; `squash-crop`: each side to image_size / crop_ratio, then the centre."""
    crop_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of the shorter side that the centre crop keeps; `fit="squash"` crops nothing."""

    def __post_init__(self) -> None:
        problem = ""
        if len(self.mean) != len(self.std):
            problem = f"mean has {len(self.mean)} channels and std has {len(self.std)}"
        elif min(self.std) <= 0:
            problem = f"std {self.std} must be positive in every channel"
        # The image before the crop is held in memory: a forged ratio must not exhaust it.
        elif max(self.image_size) > 2**14 * self.crop_ratio:
            problem = (
                f"image_size {self.image_size} with crop_ratio {self.crop_ratio:g} enlarges "
                f"images to more than {2**14} pixels; use a smaller size or a larger ratio"
            )
        if problem:
            raise errors.SpecError(problem)

    @property
    def channels(self) -> int:
        """The number of channels C, 1 for grey and 3 for RGB."""
        return len(self.mean)

    def __call__(self, image: Any) -> Tensor:
        """Return the model's input for an image, as evaluation and prediction compute it.

        >>> import numpy as np
        >>> preprocess = Preprocess(image_size=32)
        >>> photograph = np.zeros((480, 640, 3), np.uint8)
        >>> preprocess(photograph).shape, preprocess([photograph, photograph]).shape
        (torch.Size([3, 32, 32]), torch.Size([2, 3, 32, 32]))

        Args:
            image: a path, an encoded file's bytes, a PIL image, or (H, W, 3), (H, W, 1) or (H, W)
                uint8 RGB or grey [0, 255]; or a list of these.

        Returns:
            (C, h, w) float32, normalised, on the CPU; (B, C, h, w) for a list of B images.

        Raises:
            ImageError: an image that cannot be used, by name or number.
            SettingError: not an image; or an empty list.
        """
        # found by name when it is called: a layer above this one has it, with torch and Pillow
        made: Tensor = import_module("vitkit.data.images.preprocess").read_and_preprocess(
            self, image
        )
        return made

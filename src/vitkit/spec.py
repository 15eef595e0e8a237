"""`ViTSpec` says what a model is, `Preprocess` what its pictures become; both are stored."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal, SupportsIndex

from pydantic import BeforeValidator, Field

from vitkit.errors import SpecError
from vitkit.frozen import frozen, replace, to_json


def _as_pair(value: object) -> object:
    """One number means both: 16 is (16, 16)."""
    return (value, value) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_int(value: object) -> object:
    """numpy's integers are integers; truth values are not."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    return value


Positive = Annotated[int, BeforeValidator(_as_int), Field(ge=1, strict=True)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Size = Annotated[tuple[Positive, Positive], BeforeValidator(_as_pair)]
"""Height and width in pixels; one number means a square."""

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
Stem = Literal["convolution", "linear"]
Pooling = Literal["cls", "mean"]


def resolve_head_width(width: int, num_heads: int, head_width: int | None) -> int:
    """h, the width of one head: as given, or width / num_heads.

    Raises `SpecError` where num_heads does not divide width and no head width is given.
    """
    if head_width is not None:
        return head_width
    if width % num_heads:
        heads = [k for k in range(1, width + 1) if width % k == 0]
        nearest = sorted(sorted(heads, key=lambda k: abs(k - num_heads))[:2])
        raise SpecError(
            f"width {width} is not divisible by num_heads {num_heads}; "
            f"take {' or '.join(map(str, nearest))} heads, or give head_width"
        )
    return width // num_heads


@frozen(raises=SpecError)
class ViTSpec:
    """Everything that decides a plain ViT ("An Image is Worth 16x16 Words", Sec. 3.1).

    Raises `SpecError` for a spec that no model could have. The defaults are ViT-B/16 at 224 pixels.
    """

    image_size: Size = (224, 224)
    """Height and width of the pictures the position table is made for, in pixels."""
    patch_size: Size = (16, 16)
    """Height and width of one patch, in pixels; must divide `image_size`."""
    in_channels: Literal[1, 3] = 3
    """1 for grey pictures, 3 for RGB."""
    num_classes: Annotated[int, BeforeValidator(_as_int), Field(ge=0, strict=True)] = 1000
    """Logits of the head; 0 leaves the head out, and `forward` returns pooled features."""
    width: Positive = 768
    """D, the length of a token."""
    depth: Positive = 12
    """L, the number of encoder blocks."""
    num_heads: Positive = 12
    """k, the attention heads of a block; must divide `width` unless `head_width` is given."""
    head_width: Positive | None = None
    """h, the width of one head; `None` means width / num_heads."""
    mlp_width: Positive = 3072
    """M, the hidden width of the MLP."""
    activation: Activation = "gelu"
    """The MLP's non-linearity: `gelu` is exact (erf), `gelu_tanh` is the published JAX code's."""
    qkv_bias: bool = True
    """Whether the fused query, key and value projection has a bias."""
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-6
    """LayerNorm's epsilon."""
    stem: Stem = "convolution"
    """How patches are projected: a stride-P convolution, or the same map as one matrix."""
    class_token: bool = True
    """Whether a learned class token stands before the patches."""
    pooling: Pooling = "cls"
    """What the head reads: the class token, or the mean of the patch tokens."""
    position_dropout: Rate = 0.0
    """Dropout once, after positions are added."""
    attention_dropout: Rate = 0.0
    """Dropout on the attention weights."""
    projection_dropout: Rate = 0.0
    """Dropout after the attention's output projection."""
    mlp_dropout: Rate = 0.0
    """Dropout after both linear layers of the MLP."""
    drop_path: Rate = 0.0
    """Stochastic depth of the last block; it rises linearly from 0 at the first."""

    def __post_init__(self) -> None:
        for side, image, patch in zip("HW", self.image_size, self.patch_size, strict=True):
            if image % patch:
                below, above = image // patch * patch, -(-image // patch) * patch
                raise SpecError(
                    f"image_size {image} ({side}) is not divisible by patch_size {patch}; "
                    f"the nearest sizes that are: {f'{below} or {above}' if below else above}"
                )
        resolve_head_width(self.width, self.num_heads, self.head_width)
        if self.pooling == "cls" and not self.class_token:
            raise SpecError("pooling 'cls' needs class_token=True; or take pooling 'mean'")

    @property
    def grid(self) -> tuple[int, int]:
        """(gh, gw), the patches of a picture of `image_size`."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def num_patches(self) -> int:
        """N = HW / P^2 (Sec. 3.1)."""
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: 1 with a class token, else 0."""
        return int(self.class_token)

    @property
    def attention_width(self) -> int:
        """Width of all heads side by side, k * h."""
        return self.num_heads * resolve_head_width(self.width, self.num_heads, self.head_width)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` gives the same spec back."""
        return to_json(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ViTSpec:
        """The spec that `to_json` wrote. Raises `SpecError` on unknown fields and wrong values."""
        return cls(**values)

    def replace(self, **changes: Any) -> ViTSpec:
        """A spec with some fields changed, validated again."""
        return replace(self, **changes)


Interpolation = Literal["nearest", "bilinear", "bicubic"]
Fit = Literal["squash", "crop"]
Channel = tuple[float] | tuple[float, float, float]


@frozen(raises=SpecError)
class Preprocess:
    """What is done to a decoded picture, (H, W, 3) uint8 RGB, before a model sees it.

    The picture is brought to `image_size`, turned to grey when one channel is asked for (Rec. 601),
    divided by 255, and normalised: (value - mean) / std. Raises `SpecError` on impossible values.
    """

    image_size: Size = (224, 224)
    """Height and width of the tensor, in pixels."""
    mean: Channel = (0.5, 0.5, 0.5)
    """Mean of each channel on the scale [0, 1]; one value means grey pictures."""
    std: Channel = (0.5, 0.5, 0.5)
    """Standard deviation of each channel on the scale [0, 1]."""
    interpolation: Interpolation = "bicubic"
    """The resampling filter; all but `nearest` are antialiased when they shrink."""
    fit: Fit = "crop"
    """`crop`: shorter side to image_size / crop_ratio, then the centre; `squash`: both sides."""
    crop_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Part of the shorter side that the centre crop keeps (with `fit="crop"`)."""

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise SpecError(f"mean has {len(self.mean)} channels and std has {len(self.std)}")
        if min(self.std) <= 0:
            raise SpecError(f"std {self.std} must be positive in every channel")

    @property
    def channels(self) -> int:
        """C, 1 for grey and 3 for RGB."""
        return len(self.mean)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` gives the same object back."""
        return to_json(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Preprocess:
        """What `to_json` wrote. Raises `SpecError` on unknown fields and wrong values."""
        return cls(**values)

    def replace(self, **changes: Any) -> Preprocess:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)

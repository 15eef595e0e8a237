"""Parts that several methods share: class scores, subsets of patches, rows of the readout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vitkit.errors import CheckpointError, SettingError
from vitkit.explaining.method import Method, whole_number
from vitkit.models.encoder import block_calls
from vitkit.models.layers import eval_mode
from vitkit.models.readout import Features
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import Grid, Images, Logits, resolve_layers

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    ExplainFunction: TypeAlias = Callable[..., Float[Tensor, "B gh gw *colours"]]
    """(model, images (B, C, H, W), *, classes (B,) where `by_class`, **options) -> (B, gh, gw)."""


@contextmanager
def gradients_in_eval_mode(model: ViT) -> Iterator[None]:
    """Run a `with` block in eval mode with gradients enabled, whatever the caller's settings."""
    with eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        yield


def check_classes(model: ViT, classes: Int64[Tensor, " B"], methods: Mapping[str, Method]) -> None:
    """Check that the model has these classes.

    Args:
        model: any ViT.
        classes: (B,) class numbers, from 0.
        methods: all methods, to name those that need no class.

    Raises:
        SettingError: a model without a head, or a class that it does not have.
    """
    count = model.spec.num_classes
    if not count:
        able = [method.name for method in methods.values() if not method.by_class]
        raise SettingError(
            "the model has no head, so it has no class to explain; methods that need none: "
            f"{', '.join(able)}"
        )
    for number in classes.tolist():
        if not 0 <= number < count:
            raise SettingError(f"class {number} does not exist; classes are 0 to {count - 1}")


def check_finite(logits: Logits) -> Logits:
    """Return logits (B, K) that are numbers.

    Raises:
        CheckpointError: logits of a model whose weights are broken, or overflow.
    """
    if not torch.isfinite(logits).all():
        raise CheckpointError(
            "the model's logits are not finite (NaN or infinity), so no class can be explained; "
            "check its weights, or use the model in float32"
        )
    return logits


def class_scores(logits: Logits, classes: Int64[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return the logit of each row's class: (B, K), (B,) -> (B,)."""
    # a copy: a graph cannot keep the predicted classes of `torch.inference_mode`
    return logits.gather(1, classes.to(logits.device).clone()[:, None])[:, 0]


def at_least_float32(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return half precision as float32, for sums; other dtypes unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class TokenSubsets:
    """Images cut into tokens once, for many forward passes with some of their patches.

    The caller chooses the model's mode and whether gradients are kept. A hybrid's patches are the
    cells of its feature map: each has seen its neighbours.

    Args:
        model: any ViT.
        images: (B, C, H, W) normalised, on the model's device.

    Attributes:
        grid: (gh, gw) of the patches.
        count: N = gh * gw.

    >>> import vitkit
    >>> model = vitkit.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    >>> subsets = TokenSubsets(model, torch.zeros(2, 3, 32, 32))
    >>> subsets.logits(torch.tensor([[0, 3], [1, 2]])).shape
    torch.Size([2, 10])
    """

    def __init__(self, model: ViT, images: Images) -> None:
        self.model = model
        self.embedded = model.embed(images)
        self.grid = self.embedded.grid
        self.count = self.grid[0] * self.grid[1]

    def features(
        self, patches: Int64[Tensor, "R n"], image: Int64[Tensor, " R"] | None = None
    ) -> Features:
        """Return the tokens after the last norm of R passes with n patches each.

        Args:
            patches: (R, n) numbers of the patches that stay, from 0, row by row; n of 1 or more.
            image: (R,) which image each row is of; default: one row for each image.

        Raises:
            SettingError: no patch, or a patch that is not there.
        """
        if patches.shape[1] == 0 or not 0 <= int(patches.min()) <= int(patches.max()) < self.count:
            raise SettingError(f"patches must be at least one number from 0 to {self.count - 1}")
        tokens, context, _ = self.embedded
        if image is not None:
            tokens = tokens[image]
        prefix = self.model.spec.num_prefix_tokens
        # Class, distillation and register tokens always stay.
        first = torch.arange(prefix, device=tokens.device).expand(len(patches), -1)
        kept = torch.cat([first, patches.to(tokens.device) + prefix], dim=1)  # R T'
        tokens = tokens.gather(1, kept.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
        if context.rotation is not None:
            sin, cos = context.rotation
            # (T, h) for all images -> R 1 T' h, one axis for the heads
            context = context._replace(rotation=(sin[kept].unsqueeze(1), cos[kept].unsqueeze(1)))
        for block in block_calls(self.model.blocks):
            tokens = block(tokens, context)
        return Features.split(self.model.norm(tokens), (1, patches.shape[1]), self.model.spec)

    def logits(
        self, patches: Int64[Tensor, "R n"], image: Int64[Tensor, " R"] | None = None
    ) -> Logits:
        """Return logits (R, K) of passes with n patches each; otherwise as `features`."""
        return self.model.forward_head(self.features(patches, image))


def drop_in_order(
    order: Int64[Tensor, "B N"], kept: int, *, first: bool = False
) -> Int64[Tensor, "B n"]:
    """Return the patches that stay when all but `kept` are dropped in an order, sorted.

    Args:
        order: (B, N) all patches of each image, the first to be dropped first.
        kept: how many stay.
        first: keep the first ones of the order instead (insertion).
    """
    part = order[:, :kept] if first else order[:, order.shape[1] - kept :]
    return part.sort(dim=1).values


def token_weights(model: ViT, grid: Grid) -> Float[Tensor, " T"]:
    """Return the weight of each token in the head's input, the same for all images.

    It is found by pooling one-hot tokens, so it is what the model's own pooling does: 1 for the
    class token; a half each for the class and the distillation token of a model that takes the mean
    of its two heads; 1 / N for each patch under `mean`, 1 / T for each token under `mean_all`; a
    half for the class token and the rest for the patches under `cls_mean`. A MAP head has weights
    of its own for each image; here its patches have the same weight.

    Args:
        model: any ViT.
        grid: (gh, gw) of the patches.

    Returns:
        (T,) on the model's device, float32 at least, of sum 1.
    """
    spec = model.spec
    prefix = spec.num_prefix_tokens
    like = at_least_float32(next(model.parameters()).detach()[:0])
    patches = grid[0] * grid[1]
    if spec.pooling == "map":
        weights = like.new_zeros(prefix + patches)
        weights[prefix:] = 1 / patches
        return weights
    eye = torch.eye(prefix + patches, dtype=like.dtype, device=like.device)
    one_hot = Features.split(eye.unsqueeze(0), grid, spec)  # 1 T T: the widths number the tokens
    rows = [model.attn_pool(one_hot)]
    if model.dist_pool is not None and spec.distilled_readout == "mean":
        rows.append(model.dist_pool(one_hot))
    # `cls_mean` pools two vectors side by side, which weigh the same
    return torch.cat(rows, dim=1).unflatten(1, (-1, len(eye))).mean(dim=(0, 1))


def readout_row(
    model: ViT, features: Features, pooling: Float[Tensor, "B k 1 N"] | None = None
) -> Float[Tensor, "B T"]:
    """Return the weight of each token in the head's input, for each image.

    Args:
        model: any ViT.
        features: features of the images.
        pooling: (B, k, 1, N), weights of a MAP head over the patches, such as its recorded map; the
            mean over the heads is the row. Other models need none.

    Returns:
        (B, T); see `token_weights` for models without a MAP head. Without a MAP head each row has
        the sum 1.
    """
    if pooling is None:
        return token_weights(model, features.grid).expand(len(features.patches), -1)
    patches = at_least_float32(pooling).mean(dim=(1, 2))  # B N
    return F.pad(patches, (model.spec.num_prefix_tokens, 0))


def pooling_map(model: ViT, features: Features, record: Record) -> Float[Tensor, "B k 1 N"] | None:
    """Return the recorded map (B, k, 1, N) of a MAP head's query, `None` for other models.

    Args:
        model: any ViT.
        features: features of the forward pass of this record.
        record: requested with `pooling=has_map_head(model)`.
    """
    if not has_map_head(model):
        return None
    model.forward_head(features, record)
    return record.pooling[0]


def has_map_head(model: ViT) -> bool:
    """Return True if the model pools by attention, with a query of its own."""
    return model.spec.pooling == "map"


def check_number(name: str, value: object) -> int:
    """Return an option as a whole number; NumPy's are taken too.

    Raises:
        SettingError: not one whole number.
    """
    number = whole_number(value)
    if number is None:
        more = "; for the maps of several use vitkit.Record"
        raise SettingError.about(name, value, "must be one whole number", more)
    return number


def check_layer(layer: object, model: ViT) -> int:
    """Return the number of a block, from 0; negative ones count from the end.

    Raises:
        SettingError: not one whole number, or a block that the model does not have.
    """
    (number,) = resolve_layers([check_number("layer", layer)], model.spec.depth)
    return number


def check_patch(query: object, grid: Grid) -> int:
    """Return the number of a patch, from 0, row by row.

    Raises:
        SettingError: not one whole number, or a patch that the images do not have.
    """
    number = check_number("query", query)
    rows, columns = grid
    if not 0 <= number < rows * columns:
        expected = f"must be a patch, 0 to {rows * columns - 1} (row by row, {rows} x {columns})"
        raise SettingError.about("query", number, expected)
    return number

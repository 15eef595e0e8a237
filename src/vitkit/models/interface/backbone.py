"""`Backbone`: a model's inner tokens and its head, by the methods of timm and DINOv2."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxtyping import Float
from torch import Tensor, nn

from vitkit.errors import SettingError, ShapeError, SpecError
from vitkit.models.attention import Context
from vitkit.models.encoder import RunBlock, block_calls, recompute_block
from vitkit.models.initialisation import fresh_heads
from vitkit.models.interface.pretrained import Origin
from vitkit.other_names import field_value
from vitkit.shapes import Grid, Images, Tokens, resolve_layers
from vitkit.spec import ViTSpec

Intermediate: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Patch tokens of a layer, (B, D, gh, gw) or (B, N, D), alone or with its prefix (B, R, D)."""
OutputFormat = Literal["NCHW", "NLC"]
FORMATS: tuple[OutputFormat, ...] = ("NCHW", "NLC")
COMPILED = "_orig_mod"
"""Name of the inner module in `torch.compile`'s wrapper."""


class Embedded(NamedTuple):
    """The input of the first block.

    Attributes:
        tokens: z_0 (B, T, D).
        context: what every block gets beside its tokens.
        grid: (gh, gw) of the patches.
    """

    tokens: Tokens
    context: Context
    grid: Grid


class Backbone(nn.Module):
    """A model's inner tokens, the facts about its head, and other heads, by timm's names."""

    spec: ViTSpec
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module
    head_dist: nn.Module
    attn_pool: nn.Module
    fc_norm: nn.Module
    pre_logits: nn.Module
    run_block: RunBlock | None
    origin: Origin | None
    embed: Callable[[Images], Embedded]
    _make_pooling: Callable[[ViTSpec], nn.Module]

    def forward_intermediates(
        self,
        x: Images,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: OutputFormat = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the tokens after some blocks, as timm's method of this name (and as a `Record`).

        Args:
            x: images (B, C, H, W) float, normalised.
            indices: numbers of the blocks, from 0, negative ones from the end; one number n means
                the last n; `None` all. Results are in the order of the blocks.
            return_prefix_tokens: give a pair for each block: its patches, and its class,
                distillation and register tokens (B, R, D).
            norm: apply the last norm to each.
            stop_early: leave out the blocks after the last that is asked for; the first result then
                has the tokens of that one.
            output_fmt: `NCHW` for maps (B, D, gh, gw), `NLC` for patches row by row (B, N, D).
            intermediates_only: return the list alone.

        Returns:
            All tokens after the last norm (B, T, D), which `forward_head` takes too, and the list.

        Raises:
            SettingError: a block that does not exist, or another format.
            ShapeError: as for `forward`; or `NCHW` while `patch_dropout` drops patches.

        >>> import torch
        >>> from vitkit import create_model
        >>> model = create_model("vit_tiny_patch16_224", img_size=32, patch_size=8)
        >>> tokens, maps = model.forward_intermediates(torch.zeros(2, 3, 32, 48), [1, -1])
        >>> tokens.shape, [tuple(m.shape) for m in maps]
        (torch.Size([2, 25, 192]), [(2, 192, 4, 6), (2, 192, 4, 6)])
        >>> _, [(patches, prefix)] = model.forward_intermediates(
        ...     torch.zeros(2, 3, 32, 32), 1, output_fmt="NLC", return_prefix_tokens=True)
        >>> patches.shape, prefix.shape
        (torch.Size([2, 16, 192]), torch.Size([2, 1, 192]))
        """
        check_format(output_fmt)
        layers = take_layers(indices, len(self.blocks))
        tokens, context, grid = self.embed(x)
        calls = block_calls(self.blocks, run=self.run_block)
        if stop_early:
            # `take_layers` sorts, so the last one is the deepest.
            calls = calls[: layers[-1] + 1]
        intermediates: list[Any] = []
        for layer, block in enumerate(calls):
            tokens = block(tokens, context)
            if layer in layers:
                kept = self.norm(tokens) if norm else tokens
                intermediates.append(self._arranged(kept, grid, output_fmt, return_prefix_tokens))
        if intermediates_only:
            return intermediates
        return self.norm(tokens), intermediates

    def _arranged(
        self, tokens: Tokens, grid: Grid, output_fmt: OutputFormat, with_prefix: bool
    ) -> Intermediate:
        count = self.spec.num_prefix_tokens
        patches = tokens[:, count:]
        if output_fmt == "NCHW":
            patches = _as_map(patches, grid)
        if with_prefix and count:  # without such tokens timm gives no pair either
            return patches, tokens[:, :count]
        return patches

    def get_intermediate_layers(
        self,
        x: Images,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_class_token: bool = False,
        norm: bool = True,
    ) -> tuple[Intermediate, ...]:
        """Return the patches of some layers; arguments and results as DINOv2's method of this name.

        Args:
            x: images (B, C, H, W) float, normalised.
            n: the last n blocks, or the numbers of some, from 0.
            reshape: give maps (B, D, gh, gw) in the place of patches (B, N, D).
            return_class_token: give a pair for each block: patches, and class token (B, D).
            norm: apply the last norm to each.

        Raises:
            SettingError: a block that does not exist, or a class token where the model has none.
            ShapeError: as for `forward`.

        >>> import torch
        >>> from vitkit import create_model
        >>> model = create_model("vit_tiny_patch16_224", img_size=32, patch_size=8)
        >>> (patches, cls), = model.get_intermediate_layers(
        ...     torch.zeros(2, 3, 32, 32), reshape=True, return_class_token=True)
        >>> patches.shape, cls.shape
        (torch.Size([2, 192, 4, 4]), torch.Size([2, 192]))
        """
        if return_class_token and not self.spec.class_token:
            raise SettingError("return_class_token=True: the model has no class token")
        pairs = self.forward_intermediates(
            x,
            n,
            return_prefix_tokens=return_class_token,
            norm=norm,
            stop_early=True,
            output_fmt="NCHW" if reshape else "NLC",
            intermediates_only=True,
        )
        if not return_class_token:
            return tuple(pairs)
        return tuple((patches, prefix[:, 0]) for patches, prefix in pairs)  # class token first

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The module, channels and pixels per cell of each block's map, as timm names them."""
        # timm has one number, also for patches that are not square.
        cell = max(self.spec.patch_size)
        return [
            {"module": f"blocks.{layer}", "num_chs": self.spec.width, "reduction": cell}
            for layer in range(len(self.blocks))
        ]

    @property
    def num_features(self) -> int:
        """The width E of the head's input, which `forward` returns where there is no head."""
        return self.spec.head_inputs

    @property
    def num_classes(self) -> int:
        """The number of logits; 0 without a head. A linear layer put in place of `head` counts."""
        head = getattr(self.head, COMPILED, self.head)
        if isinstance(head, nn.Identity):
            return 0
        if isinstance(head, nn.Linear):
            return head.out_features
        return self.spec.num_classes  # a layer of the user's own

    @property
    def embed_dim(self) -> int:
        """The width D of a token."""
        return self.spec.width

    def get_classifier(self) -> nn.Module:
        """Return the head, a `torch.nn.Linear`, or an `Identity` where there is none."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a fresh head in place of the model's, as timm's method of this name.

        The head starts as `spec.initialisation` says, on the model's device and in its dtype.
        `spec` follows, so the model can be saved; class names are forgotten.

        Args:
            num_classes: K; 0 for none, so that `forward` returns pooled features (B, E).
            global_pool: also change the pooling: `token` (class token), `avg` (mean of the
                patches); default as it is. The last norm keeps its place.

        Raises:
            SpecError: a negative number, or a pooling that the model cannot have.

        >>> import torch
        >>> from vitkit.models.vit import ViT
        >>> model = ViT(ViTSpec(width=64, depth=1, num_heads=4, mlp_width=128))
        >>> model.reset_classifier(10, "avg")
        >>> model.num_classes, model.spec.pooling, model.get_classifier()
        (10, 'mean', Linear(in_features=64, out_features=10, bias=True))
        >>> model.reset_classifier(0)
        >>> model(torch.zeros(2, 3, 224, 224)).shape
        torch.Size([2, 64])
        """
        old = self.spec
        spec = old.replace(num_classes=num_classes, pooling=_pooling(global_pool, old))
        # Those layers have as many weights as the pooled vector has numbers.
        normed_width = old.final_norm and not old.norm_before_pool
        if spec.pooled_width != old.pooled_width and (normed_width or old.representation_width):
            raise SpecError(
                f"global_pool {global_pool!r}: the layers after the pooling are made for "
                f"{old.pooling!r}, which is {old.pooled_width} wide; leave global_pool out"
            )
        if spec.pooling != old.pooling:
            self.attn_pool = self._make_pooling(spec)
        # Made on the CPU, then put where the model is, in its dtype and mode.
        like = next(self.parameters())
        for name, head in fresh_heads(spec).items():
            setattr(self, name, head.to(like.device, like.dtype).train(self.training))
        self.spec = spec
        if self.origin is not None:
            self.origin = replace(self.origin, classes=())

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass, which saves memory; or keep activations.

        >>> import torch
        >>> from vitkit.models.vit import ViT
        >>> model = ViT(ViTSpec(width=64, depth=1, num_heads=4, mlp_width=128))
        >>> model.set_grad_checkpointing()
        >>> model(torch.zeros(1, 3, 224, 224)).sum().backward()  # the same gradients
        """
        self.run_block = recompute_block if enable else None


def check_format(output_fmt: str) -> None:
    """Raise `SettingError` for another layout than `NCHW` and `NLC`."""
    if output_fmt not in FORMATS:
        raise SettingError(f"output_fmt {output_fmt!r} is none of {', '.join(FORMATS)}")


def take_layers(indices: int | Sequence[int] | None, depth: int) -> list[int]:
    """Return the numbers of the requested layers in ascending order, each once.

    Args:
        indices: the last n, the numbers of some, or `None` for all.
        depth: number of layers.

    Raises:
        SettingError: a layer that does not exist, or none at all.

    >>> take_layers(2, 12), take_layers([-1, 3], 12)
    ([10, 11], [3, 11])
    """
    if indices is None:
        return list(range(depth))
    # By `index`, as numbers may be numpy's.
    try:
        if not isinstance(indices, Iterable):
            return _last_layers(operator.index(indices), depth)
        layers = [operator.index(layer) for layer in indices]
    except TypeError:
        raise SettingError(
            f"layers {indices!r}: pass a number n for the last n, or several numbers"
        ) from None
    if not layers:
        raise SettingError("no layers are named; name some, or pass None for all")
    return sorted(resolve_layers(layers, depth))


def _last_layers(count: int, depth: int) -> list[int]:
    if not 1 <= count <= depth:
        raise SettingError(f"the last {count} layers: must be from 1 to {depth}")
    return list(range(depth - count, depth))


def _as_map(patches: Float[Tensor, "B N D"], grid: Grid) -> Float[Tensor, "B D gh gw"]:
    """Arrange patch tokens as a map."""
    if patches.shape[1] != grid[0] * grid[1]:
        raise ShapeError(
            f"{patches.shape[1]} patches make no map of {grid[0]} x {grid[1]}: patch_dropout drops "
            "some in training; call model.eval(), or pass output_fmt='NLC'"
        )
    return patches.unflatten(1, grid).permute(0, 3, 1, 2).contiguous()


def _pooling(global_pool: str | None, spec: ViTSpec) -> str:
    """Return the pooling that timm's `global_pool` means for a model."""
    if global_pool is None:
        return spec.pooling
    pooling: str = field_value("global_pool", global_pool)
    if pooling == "map" != spec.pooling:
        raise SpecError("global_pool 'map': the model has no attention pooling; pass token or avg")
    return pooling

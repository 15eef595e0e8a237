"""Exact folds and faster kernels for inference: the same logits in fewer operations.

    LayerScale      gamma * (W x + b)            = (gamma W) x + gamma b
    norm's affine   W (g * n + o) + b            = (W g) n + (W o + b),   n the normed token
    normalisation   E ((x / 255 - m) / s) + b    = (E / (255 s)) x + (b - E m / s)

All are equal in exact arithmetic; in float32 logits differ by about 1e-6 of the largest one. What
`forward_features` and a `Record` return stays the same too, so the last norm keeps its affine.
"""

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitkit import errors, process, shapes
from vitkit.models import attention, embedding, encoder
from vitkit.models.layers import MLP, LayerScale, SplitSwiGLU
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess
from vitkit.weights.fold import scaled_rows

PIXEL_MAX = 255.0
FOLDABLE = (nn.Linear, attention.KeylessBiasLinear)
"""Layers into which a norm's affine map may be folded; subclasses may compute more."""


def optimized(
    model: ViT,
    *,
    precision: str = "float32",
    preprocess: Preprocess | None = None,
    batch_size: int = 8,
    measure: bool = True,
) -> ViT:
    """Return a copy of a model for inference: folded, cast once, with the fastest kernels here.

    For your own loop, under `torch.inference_mode()`. It is a `ViT` like the model: features,
    records and heads work as before. It cannot be trained, and is not for saving. On a CPU the
    process then keeps freed memory (`keep_freed_memory` in `process.py`).

    Args:
        model: a `ViT`; it stays as it is.
        precision: `float32`, or `bfloat16`: all weights, without autocast. Images may stay float32.
        preprocess: if given, the copy takes pixels of 0 to 255 in (B, C, H, W), floats or uint8,
            and its patch projection normalises them as this says.
        batch_size: images per batch for which kernels are chosen.
        measure: choose kernels of attention and linear layers by measurement, on a CPU, in about a
            second; otherwise torch's own.

    Raises:
        SettingError: no `ViT`; an unknown precision; `preprocess` with a stem that is no projection
            of pixels.

    >>> model = ViT(image_size=32, patch_size=8, width=64, depth=2, num_heads=4, mlp_width=128)
    >>> fast = optimized(model.eval(), measure=False)
    >>> images = torch.rand(2, 3, 32, 32)
    >>> torch.allclose(fast(images), model(images), atol=1e-5)
    True
    """
    errors.check_type(model, ViT, "optimized", errors.MODEL)
    if precision not in ("float32", "bfloat16"):
        raise errors.SettingError(
            f"precision {precision!r} does not exist for optimized; use float32 or bfloat16"
        )
    on_cpu = next(model.parameters()).is_cpu
    folded = fold_for_inference(model, norms=not on_cpu)
    if preprocess is not None:
        _fold_normalisation(folded, preprocess)
    folded.to(torch.bfloat16 if precision == "bfloat16" else next(model.parameters()).dtype)
    folded.requires_grad_(False)
    folded.patch_embed = CastingStem(folded.patch_embed)
    folded.register_forward_pre_hook(_cast_images)  # uint8 is no input of `forward`
    if on_cpu:
        process.keep_freed_memory()
    if measure and on_cpu:
        _fastest_kernels(folded, batch_size)
    if precision == "bfloat16" and next(folded.parameters()).is_cuda:
        fuse_gelu(folded)
    return folded


def _cast_images(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    images, *others = inputs  # images, and perhaps a record
    return (images.to(next(model.parameters()).dtype), *others)


class CastingStem(embedding.PatchEmbedding):
    """A stem for images of any dtype, also uint8: it casts them to the dtype of its weights.

    Args:
        stem: stem of a model.
    """

    def __init__(self, stem: embedding.PatchEmbedding) -> None:
        nn.Module.__init__(self)
        self.stem = stem
        self.in_channels, self.patch_size = stem.in_channels, stem.patch_size

    def forward(self, images: Tensor) -> shapes.Tokens:
        """Return the embedded patches."""
        tokens: Tensor = self.stem(self._cast(images))
        return tokens

    def grid(self, images: Tensor) -> shapes.Grid:
        """Return (gh, gw), as the stem does."""
        return self.stem.grid(self._cast(images))

    def _cast(self, images: Tensor) -> Tensor:
        return images.to(next(self.stem.parameters()).dtype)


def fold_for_inference(model: ViT, *, norms: bool = True) -> ViT:
    """Return a copy of a model in eval mode with LayerScale and norms folded.

    Layers that are not vitkit's own, such as adapters, stay as they are.

    Args:
        model: a `ViT`; it stays as it is.
        norms: whether the affine of a norm goes into the layers after it. On a CPU torch's own
            LayerNorm takes 2 to 3 times as long without an affine; other runtimes gain by it.
    """
    folded = copy.deepcopy(model).eval()
    with torch.no_grad():
        for block in folded.blocks:
            if isinstance(block, encoder.EncoderBlock):
                _fold_layer_scales(block)
                if norms and not isinstance(
                    block, encoder.PostNormBlock | encoder.ResPostNormBlock
                ):
                    _fold_norms(block)
    return folded


def _is_foldable(layer: nn.Module | None) -> bool:
    """Return True for a plain linear layer: subclasses and hooks may compute more than W x + b."""
    return type(layer) in FOLDABLE and not _has_hooks(layer)


def _has_hooks(module: Any) -> bool:
    """Return True if something is called before or after the module's own forward pass."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _fold_layer_scales(block: encoder.EncoderBlock) -> None:
    for name, part, attribute, norm in (
        ("ls1", block.attn, "proj", block.norm1),
        ("ls2", block.mlp, "fc2", block.norm2),
    ):
        scale = getattr(block, name)
        if not isinstance(scale, LayerScale):
            continue
        target: Any = getattr(part, attribute, None)
        if isinstance(block, encoder.ResPostNormBlock):
            target = norm  # the scale follows the norm of the branch
        if type(target) not in (nn.LayerNorm, nn.RMSNorm) and not _is_foldable(target):
            continue
        for kind, parameter in list(target.named_parameters()):  # weight and bias
            setattr(target, kind, nn.Parameter(scaled_rows(scale.gamma, parameter)))
        setattr(block, name, nn.Identity())


def _fold_norms(block: encoder.EncoderBlock) -> None:
    names = ("fc1_g", "fc1_x") if isinstance(block.mlp, SplitSwiGLU) else ("fc1",)
    readers: tuple[tuple[str, nn.Module, tuple[str, ...]], ...] = (
        ("norm1", block.attn, ("qkv",)),
        ("norm2", block.mlp, names),
    )
    for name, part, attributes in readers:
        norm = getattr(block, name)
        layers: list[Any] = [getattr(part, attribute, None) for attribute in attributes]
        plain = all(map(_is_foldable, layers))
        if type(norm) not in (nn.LayerNorm, nn.RMSNorm) or norm.weight is None or not plain:
            continue
        for attribute, layer in zip(attributes, layers, strict=True):
            setattr(part, attribute, _absorb_affine(layer, norm))
        bare = type(norm)(norm.normalized_shape, eps=norm.eps, elementwise_affine=False)
        setattr(block, name, bare)


def _absorb_affine(linear: nn.Linear, norm: nn.LayerNorm | nn.RMSNorm) -> nn.Linear:
    """Return the layer W (g * n + o) + b as one of n: (W g) n + (W o + b)."""
    bias: Tensor | None = linear.bias
    if isinstance(linear, attention.KeylessBiasLinear):
        bias = torch.cat([linear.q_bias, torch.zeros_like(linear.q_bias), linear.v_bias])
    offset = getattr(norm, "bias", None)
    if offset is not None:
        offset = linear.weight @ offset
        bias = offset if bias is None else bias + offset
    with torch.device("meta"):
        layer = nn.Linear(linear.weight.shape[1], linear.weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(linear.weight * norm.weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer


def _fold_normalisation(model: ViT, preprocess: Preprocess) -> None:
    """Change a model to take pixels of 0 to 255 in place of normalised images."""
    stem = model.patch_embed
    if type(stem) not in (embedding.PatchEmbedding, embedding.LinearPatchEmbedding):
        raise errors.SettingError(
            f"preprocess= needs patches that are projected from pixels, and the stem of this "
            f"model is {model.spec.stem!r}; leave preprocess out, and normalise the images"
        )
    kernel, bias = stem.proj.weight, stem.proj.bias  # D C P Q
    mean = kernel.new_tensor(preprocess.mean)[:, None, None]
    std = kernel.new_tensor(preprocess.std)[:, None, None]
    with torch.no_grad():
        offset = (kernel * (mean / std)).flatten(1).sum(1)
        if bias is None:
            bias = torch.zeros_like(offset)
        stem.proj.bias = nn.Parameter(bias - offset)
        stem.proj.weight = nn.Parameter(kernel / (PIXEL_MAX * std))


# Faster kernels of attention and linear layers than those of torch's modules.
#
# On a processor they are chosen by measurement. torch multiplies float32 matrices by MKL, which on
# some processors that are not Intel's takes slower instructions than the processor has. oneDNN,
# which is part of torch too, chooses by what the processor can do, and takes weights in an order
# that suits it. On a GPU the GELU of an MLP is computed by the matrix product before it
# (`GeluLinear`).

ROUNDS = 7
"""Turns in which kernels are timed, one after the other; the fastest turn of each counts."""
GAIN = 1.1
"""Ratio of times from which another kernel is used: equal ones differ by up to 5 % by chance."""


class PackedLinear(nn.Module):
    """A linear layer by oneDNN, (..., D) -> (..., E), with its weight in oneDNN's own order.

    Args:
        linear: the layer; it stays as it is.
        rows: number of tokens of a call for which the order is best; any other works too.
    """

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.rows = rows
        weight = linear.weight.detach()
        self.register_buffer("weight", torch.ops.mkldnn._reorder_linear_weight(weight, rows))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return product


def can_pack(dtype: torch.dtype) -> bool:
    """Return True if oneDNN's linear layers exist here for a dtype."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), 1)
    except (AttributeError, RuntimeError):  # no oneDNN, or a processor without the instructions
        return False
    return True


def _fastest_kernels(model: ViT, batch_size: int) -> None:
    """Choose the kernels of a model on a CPU by timing its first block; changed in place."""
    spec, block = model.spec, model.blocks[0]
    if spec.positions == "rope":
        return  # a single block gets no rotary angles
    dtype = next(model.parameters()).dtype
    count = spec.num_patches + spec.num_prefix_tokens
    tokens = torch.randn(batch_size, count, spec.width, dtype=dtype)

    def run(kernel: attention.AttentionKernel) -> object:
        attention.use_attention(model, kernel)
        return block(tokens)

    with torch.inference_mode():
        times = in_turns({"fused": lambda: run("fused"), "plain": lambda: run("plain")})
        attention.use_attention(
            model, "plain" if times["fused"] > GAIN * times["plain"] else "fused"
        )
        if can_pack(dtype):
            packed = copy.deepcopy(block)
            _pack(packed, batch_size * count)
            times = in_turns({"torch": lambda: block(tokens), "onednn": lambda: packed(tokens)})
            if times["torch"] > GAIN * times["onednn"]:
                _pack(model.blocks, batch_size * count)


def _pack(module: nn.Module, rows: int) -> None:
    """Replace torch's linear layers by oneDNN's."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child, rows))


def in_turns(calls: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the fastest time of each call in seconds, measured in turns after a warm-up.

    Args:
        calls: name -> function without arguments.
        rounds: rounds of all calls.
    """
    fastest = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            fastest[name] = min(fastest[name], time.perf_counter() - start)
    return fastest


class GeluLinear(nn.Module):
    """GELU(W x + b) by one kernel on a GPU: (..., D) -> (..., E).

    A GELU of its own reads and writes the widest tensor of a block once more. cuBLASLt applies it
    to the product before that is written, in the tanh form of "Gaussian Error Linear Units" (arXiv
    1606.08415), Sec. 2. The forms differ by at most 5e-4, so this is for bfloat16: rounding to that
    moves values above 0.25 by as much.

    Args:
        linear: the layer, with a bias; it stays as it is.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        _define_gelu_linear()

    def forward(self, x: Tensor) -> Tensor:
        """Return GELU(W x + b)."""
        product: Tensor = torch.ops.vitkit.gelu_linear(x, self.weight, self.bias)
        return product


@functools.cache
def _define_gelu_linear() -> None:
    """Define the operator `vitkit::gelu_linear` once: a compiler may decompose torch's own."""

    @torch.library.custom_op(
        "vitkit::gelu_linear",
        mutates_args=(),
        schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    )
    def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        product: Tensor = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
        return product.unflatten(0, x.shape[:-1])

    @gelu_linear.register_fake
    def _shape(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))


def fuse_gelu(model: ViT) -> None:
    """Put `GeluLinear` in place of the first layer and the GELU of each plain MLP.

    Layers that are not vitkit's own, such as adapters, and layers with hooks stay as they are.

    Args:
        model: on a GPU, in bfloat16, for inference; changed in place.
    """
    for block in model.blocks:
        mlp = getattr(block, "mlp", None)
        if type(mlp) is not MLP or type(mlp.fc1) is not nn.Linear or type(mlp.act) is not nn.GELU:
            continue
        if not (_has_hooks(mlp.fc1) or _has_hooks(mlp.act)):
            parts: nn.Module = mlp
            parts.fc1, parts.act = GeluLinear(mlp.fc1), nn.Identity()

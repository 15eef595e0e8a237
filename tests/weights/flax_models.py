"""The Vision Transformers of vit_jax and of big_vision, written again in Flax.

google-research/vision_transformer, vit_jax/models_vit.py and models_resnet.py; big_vision,
models/vit.py. What they leave to Flax is left to it here: most names, the shapes and order of
kernels, the epsilon of norms, tanh in GELU. Images are (B, H, W, C).
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from peers import peer

import vitkit

jax, jnp, nn, traverse_util = map(peer, ("jax", "jax.numpy", "flax.linen", "flax.traverse_util"))
bfloat16 = jnp.bfloat16
Arrays = dict[str, np.ndarray]


class MlpBlock(nn.Module):
    """GELU with Flax's default approximation; `activation` "gelu" is the exact one."""

    spec: vitkit.ViTSpec

    @nn.compact
    def __call__(self, x):
        exact = {"approximate": False} if self.spec.activation == "gelu" else {}
        y = nn.gelu(nn.Dense(self.spec.mlp_width)(x), **exact)
        return nn.Dense(x.shape[-1])(y)


class Block(nn.Module):
    spec: vitkit.ViTSpec

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.spec.num_heads)(y, y)
        y = nn.LayerNorm()(x)
        return x + MlpBlock(self.spec)(y)


class PositionTable(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, *x.shape[1:]))


class Encoder(nn.Module):
    """The blocks and the last norm; vit_jax's adds the positions, big_vision's may be one stack."""

    spec: vitkit.ViTSpec
    positions: bool = False
    stacked: bool = False

    @nn.compact
    def __call__(self, x):
        x = PositionTable(name="posembed_input")(x) if self.positions else x
        if self.stacked:
            scan = nn.scan(
                lambda block, x, _: (block(x), None), variable_axes={"params": 0},
                split_rngs={"params": True}, length=self.spec.depth,
            )  # fmt: skip
            x, _ = scan(Block(self.spec, name="encoderblock"), x, None)
        else:
            for i in range(self.spec.depth):
                x = Block(self.spec, name=f"encoderblock_{i}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class VitJax(nn.Module):
    """Positions are added inside of the encoder, to the class token too; hybrids."""

    spec: vitkit.ViTSpec

    @nn.compact
    def __call__(self, images):
        spec = self.spec
        x = resnet(images, spec.resnet_layers) if spec.stem == "resnet" else images
        x = patches(x, spec).reshape(len(x), -1, spec.width)
        x = with_token(self, x) if spec.class_token else x
        x = Encoder(spec, positions=True, name="Transformer")(x)
        return head(x[:, 0] if spec.class_token else x.mean(axis=1), spec)


class BigVision(nn.Module):
    """Positions are added before the class token joins, or are sines; attention pooling."""

    spec: vitkit.ViTSpec
    stacked: bool = False

    @nn.compact
    def __call__(self, images):
        spec = self.spec
        x = patches(images, spec)
        _, *grid, width = x.shape
        x = x.reshape(len(x), -1, width)
        if spec.positions == "learned":
            x += self.param("pos_embedding", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        else:
            x += sincos(*grid, width)
        x = with_token(self, x) if spec.class_token else x
        x = Encoder(spec, stacked=self.stacked, name="Transformer")(x)
        pools = {"map": MAPHead(spec), "cls": lambda x: x[:, 0], "mean": lambda x: x.mean(axis=1)}
        return head(pools[spec.pooling](x), spec)


class MAPHead(nn.Module):
    spec: vitkit.ViTSpec

    @nn.compact
    def __call__(self, x):
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, x.shape[-1]))
        probe = jnp.tile(probe, (len(x), 1, 1))
        x = nn.MultiHeadDotProductAttention(self.spec.num_heads)(probe, x)
        y = nn.LayerNorm()(x)
        return (x + MlpBlock(self.spec)(y))[:, 0]


def patches(x, spec):
    """Called, as the next ones, in a model's own scope: the names stand beside the encoder's."""
    size = tuple(side // count for side, count in zip(x.shape[1:3], spec.grid, strict=True))
    return nn.Conv(spec.width, size, size, padding="VALID", name="embedding")(x)


def with_token(model, x):
    token = model.param("cls", nn.initializers.zeros, (1, 1, x.shape[-1]))
    return jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], axis=1)


def head(x, spec):
    if spec.representation_width:
        x = nn.tanh(nn.Dense(spec.representation_width, name="pre_logits")(x))
    return nn.Dense(spec.num_classes, name="head")(x) if spec.num_classes else x


def sincos(height: int, width: int, channels: int):
    y, x = (axis.reshape(-1, 1) for axis in jnp.mgrid[:height, :width])
    omega = 10_000.0 ** -(jnp.arange(channels // 4) / (channels // 4 - 1))
    waves = [wave(axis * omega) for axis in (x, y) for wave in (jnp.sin, jnp.cos)]
    return jnp.concatenate(waves, axis=1)[None]


class StdConv(nn.Module):
    """A convolution whose kernel has mean 0 and deviation 1 for each of its filters."""

    features: int
    size: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        kernel -= kernel.mean((0, 1, 2))
        kernel /= kernel.std((0, 1, 2)) + 1e-5
        layout = ("NHWC", "HWIO", "NHWC")
        stride = (self.stride, self.stride)
        return jax.lax.conv_general_dilated(x, kernel, stride, "SAME", dimension_numbers=layout)


class Unit(nn.Module):
    """Three convolutions around a shortcut, projected where its shape is another."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        def part(x, number, *conv):
            return nn.GroupNorm(name=f"gn{number}")(StdConv(*conv, name=f"conv{number}")(x))

        n, shortcut = self.features, x
        if self.stride > 1 or x.shape[-1] != 4 * n:
            shortcut = part(x, "_proj", 4 * n, 1, self.stride)
        x = nn.relu(part(x, 1, n, 1))
        x = nn.relu(part(x, 2, n, 3, self.stride))
        return nn.relu(shortcut + part(x, 3, 4 * n, 1))


class Stage(nn.Module):
    number: int
    units: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.units):
            stride = 2 if self.number > 1 and i == 0 else 1
            x = Unit(64 * 2 ** (self.number - 1), stride, name=f"unit{i + 1}")(x)
        return x


def resnet(x, layers: tuple[int, ...]):
    x = nn.relu(nn.GroupNorm(name="gn_root")(StdConv(64, 7, 2, name="conv_root")(x)))
    x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
    for number, units in enumerate(layers, start=1):
        x = Stage(number, units, name=f"block{number}")(x)
    return x


Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]


@lru_cache
def parameters(model: nn.Module) -> Shapes:
    """Name -> shape and dtype, as Flax's `init` makes them for images of the spec's size."""
    images = jnp.zeros((1, *model.spec.image_size, model.spec.in_channels))
    tree = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    flat = traverse_util.flatten_dict(tree, sep="/")
    return {name: (leaf.shape, leaf.dtype) for name, leaf in flat.items()}


def logits(model: nn.Module, arrays: Arrays, images: np.ndarray) -> np.ndarray:
    """Logits (B, C) of images (B, H, W, C), with arrays by the names of `parameters`."""
    params = traverse_util.unflatten_dict(arrays, sep="/")
    return np.asarray(compiled(model)({"params": params}, images))


@lru_cache
def compiled(model: nn.Module) -> Callable[..., Any]:
    return jax.jit(lambda *given: model.apply(*given))


def as_google_reads(arrays: Arrays) -> Arrays:
    """A file's arrays by Linen's names, as both codes rename them; vit_jax squeezes GroupNorms."""
    convert = peer("flax.training.checkpoints", "convert_pre_linen")
    tree = traverse_util.unflatten_dict(
        {name.removeprefix("params/"): array for name, array in arrays.items()}, sep="/"
    )
    flat = traverse_util.flatten_dict(convert(tree), sep="/")
    groups = re.compile(r"(^|/)gn(\d|_root|_proj)/")
    return {name: a.squeeze() if groups.search(name) else a for name, a in flat.items()}

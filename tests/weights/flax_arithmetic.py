"""Flax's arithmetic in plain numpy, in float64, on the arrays as they lie in a `.npz` file.

google-research/vision_transformer, vit_jax/models_vit.py and models_resnet.py; big_vision,
models/vit.py. Pictures and maps are (B, H, W, C), kernels HWIO, projections into heads [D, H, h].
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Arrays = dict[str, np.ndarray]


def flax_logits(arrays: Arrays, images: np.ndarray) -> np.ndarray:
    """Logits of pictures (B, H, W, C) as vit_jax's and big_vision's `__call__` compute them."""
    w = {name.removeprefix("params/"): a.astype(np.float64) for name, a in arrays.items()}
    old = not any(name.startswith("params/") for name in arrays)
    x = root(images, w) if "conv_root/kernel" in w else images
    x = convolution(x, w["embedding/kernel"], w["embedding/kernel"].shape[0]) + w["embedding/bias"]
    _, height, width, channels = x.shape
    x = x.reshape(len(x), height * width, channels)
    token = np.tile(w["cls"], (len(x), 1, 1)) if "cls" in w else x[:, :0]
    if old:
        x = np.concatenate([token, x], 1) + w["Transformer/posembed_input/pos_embedding"]
    else:
        sines = sincos(height, width, channels)
        x = np.concatenate([token, x + w.get("pos_embedding", sines)], 1)
    x = encoder(x, w, (1, 2, 3) if old else (0, 1, 0))
    if "MAPHead_0/probe" in w:
        probe = np.tile(w["MAPHead_0/probe"], (len(x), 1, 1))
        y = attention(probe, x, w, "MAPHead_0/MultiHeadDotProductAttention_0/")
        y = y + mlp(layer_norm(y, w, "MAPHead_0/LayerNorm_0/"), w, "MAPHead_0/MlpBlock_0/")
        x = y[:, 0]
    else:
        x = x[:, 0] if "cls" in w else x.mean(axis=1)
    x = np.tanh(dense(x, w, "pre_logits/")) if "pre_logits/kernel" in w else x
    return dense(x, w, "head/") if "head/kernel" in w else x


def encoder(x: np.ndarray, w: Arrays, numbers: tuple[int, int, int]) -> np.ndarray:
    a, n, m = numbers
    for i in range(sum(name.endswith("LayerNorm_0/scale") for name in w if "block_" in name)):
        at = f"Transformer/encoderblock_{i}/"
        y = layer_norm(x, w, f"{at}LayerNorm_0/")
        x = x + attention(y, y, w, f"{at}MultiHeadDotProductAttention_{a}/")
        x = x + mlp(layer_norm(x, w, f"{at}LayerNorm_{n}/"), w, f"{at}MlpBlock_{m}/")
    return layer_norm(x, w, "Transformer/encoder_norm/")


def dense(x: np.ndarray, w: Arrays, at: str) -> np.ndarray:
    return x @ w[f"{at}kernel"] + w[f"{at}bias"]


def layer_norm(x: np.ndarray, w: Arrays, at: str) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * w[f"{at}scale"] + w[f"{at}bias"]


def mlp(x: np.ndarray, w: Arrays, at: str) -> np.ndarray:
    x = dense(x, w, f"{at}Dense_0/")
    x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return dense(x, w, f"{at}Dense_1/")


def attention(asks: np.ndarray, told: np.ndarray, w: Arrays, at: str) -> np.ndarray:
    def heads(x: np.ndarray, part: str) -> np.ndarray:
        return np.einsum("bnd,dhe->bnhe", x, w[f"{at}{part}/kernel"]) + w[f"{at}{part}/bias"]

    q, k, v = heads(asks, "query"), heads(told, "key"), heads(told, "value")
    scores = np.exp(np.einsum("bnhe,bmhe->bhnm", q / np.sqrt(q.shape[-1]), k))
    mixed = np.einsum("bhnm,bmhe->bnhe", scores / scores.sum(-1, keepdims=True), v)
    return np.einsum("bnhe,hed->bnd", mixed, w[f"{at}out/kernel"]) + w[f"{at}out/bias"]


def sincos(height: int, width: int, channels: int) -> np.ndarray:
    y, x = (side.reshape(-1, 1) for side in np.mgrid[:height, :width])
    omega = 1 / 10_000 ** (np.arange(channels // 4) / (channels // 4 - 1))
    parts = [np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)]
    return np.concatenate(parts, axis=1)[None]


def windows(x: np.ndarray, size: int, stride: int, fill: float) -> np.ndarray:
    """TensorFlow's SAME: (B, H, W, C) -> (B, h, w, C, size, size); more below and to the right."""
    zeros = [max((-(-side // stride) - 1) * stride + size - side, 0) for side in x.shape[1:3]]
    pads = [(0, 0), *((n // 2, n - n // 2) for n in zeros), (0, 0)]
    x = np.pad(x, pads, constant_values=fill)
    return sliding_window_view(x, (size, size), axis=(1, 2))[:, ::stride, ::stride]


def convolution(x: np.ndarray, kernel: np.ndarray, stride: int) -> np.ndarray:
    patches = windows(x, len(kernel), stride, 0.0)
    return np.einsum("byxcpq,pqcf->byxf", patches, kernel, optimize=True)


def std_conv(x: np.ndarray, kernel: np.ndarray, stride: int = 1) -> np.ndarray:
    kernel = kernel - kernel.mean(axis=(0, 1, 2))
    return convolution(x, kernel / (kernel.std(axis=(0, 1, 2)) + 1e-5), stride)


def group_norm(x: np.ndarray, w: Arrays, at: str) -> np.ndarray:
    parts = x.reshape(len(x), x.shape[1] * x.shape[2], 32, -1)
    mean, var = parts.mean((1, 3), keepdims=True), parts.var((1, 3), keepdims=True)
    normed = ((parts - mean) / np.sqrt(var + 1e-6)).reshape(x.shape)
    return normed * w[f"{at}scale"] + w[f"{at}bias"]


def root(x: np.ndarray, w: Arrays) -> np.ndarray:
    x = np.maximum(group_norm(std_conv(x, w["conv_root/kernel"], 2), w, "gn_root/"), 0)
    x = windows(x, 3, 2, -np.inf).max(axis=(-2, -1))
    stage = 1
    while f"block{stage}/unit1/conv1/kernel" in w:
        unit = 1
        while f"block{stage}/unit{unit}/conv1/kernel" in w:
            stride = 2 if stage > 1 and unit == 1 else 1
            x = residual_unit(x, w, f"block{stage}/unit{unit}/", stride)
            unit += 1
        stage += 1
    return x


def residual_unit(x: np.ndarray, w: Arrays, at: str, stride: int) -> np.ndarray:
    shortcut = x
    if f"{at}conv_proj/kernel" in w:
        shortcut = std_conv(x, w[f"{at}conv_proj/kernel"], stride)
        shortcut = group_norm(shortcut, w, f"{at}gn_proj/")
    y = np.maximum(group_norm(std_conv(x, w[f"{at}conv1/kernel"]), w, f"{at}gn1/"), 0)
    y = np.maximum(group_norm(std_conv(y, w[f"{at}conv2/kernel"], stride), w, f"{at}gn2/"), 0)
    return np.maximum(shortcut + group_norm(std_conv(y, w[f"{at}conv3/kernel"]), w, f"{at}gn3/"), 0)

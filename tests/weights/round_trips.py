"""Models full of noise, their files in any format, and the same bits in two of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from noise import fill_with_noise
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vitkit

OUR_ENTRY = "vitkit_about"
"""What vitkit writes beside a format: everything that the format cannot store."""


BASE = {"image_size": 32, "patch_size": 8, "width": 128, "depth": 2, "num_heads": 2,
        "mlp_width": 256, "num_classes": 7}  # fmt: skip
GRID = {"patch_size": (4, 16), "image_size": (32, 64)}
GATED = {"mlp": "swiglu_packed", "activation": "silu", "mlp_width": 344}
DISTILLED, NO_HEAD, GREY = {"distillation_token": True}, {"num_classes": 0}, {"in_channels": 1}
POOLED, APART = {"representation_width": 24}, {"positions_cover_prefix": False}
MEAN = {"pooling": "mean", "class_token": False}
MAP = MEAN | {"pooling": "map"}
GOOGLE = {"activation": "gelu_tanh", "position_resampling": "bilinear_aligned"}
HYBRID = {"stem": "resnet", "image_size": 64, "patch_size": 32, "depth": 1}
R50 = HYBRID | {"image_size": 32, "patch_size": 16}
JEONSWORLD = R50 | {"resnet_variant": "jeonsworld", "resnet_layers": (1, 2, 1), "image_size": 64}
HF = {"position_resampling": "bicubic", "norm_eps": 1e-12}
DINO = HF | {"layer_scale": 1.0, "pooling": "cls_mean"}
REGISTERS = DINO | APART | {"num_registers": 3, "position_resampling": "bicubic_antialias"}
BACKBONE = {"num_classes": 0, "layer_scale": 1e-5, "position_resampling": "bicubic_offset"}
FOUR = BACKBONE | APART | {"num_registers": 4, "position_resampling": "bicubic_antialias"}
PLAIN = {"qkv_bias": False, "norm_eps": 1e-5}
LUCID = PLAIN | {"stem": "normed_linear"}
EVA = {"positions": "rope", "layer_scale": 1e-5, "norm_eps": 1e-5, "num_registers": 4,
       "pooling": "mean"}  # fmt: skip
MODELS: dict[str, list[dict[str, Any]]] = {
    "google": [GOOGLE | fields for fields in (
        {}, NO_HEAD, POOLED, APART, MEAN, MAP, GREY, HYBRID | {"resnet_layers": ()},
        HYBRID | MEAN | {"resnet_layers": ()}, R50 | {"resnet_layers": (3, 4, 9)},
        MEAN | POOLED | {"image_size": 224, "patch_size": 56, "positions": "sincos_2d"},
        {"image_size": (32, 48)}, APART | {"image_size": (16, 40)},
    )],
    "huggingface": [HF | fields for fields in (
        {}, {"activation": "gelu_tanh", "qkv_bias": False, "norm_eps": 1e-3}, GREY, NO_HEAD,
        {"activation": "quick_gelu"}, {"activation": "relu"}, NO_HEAD | POOLED, DISTILLED,
        DISTILLED | NO_HEAD, DINO, DINO | GATED, DINO | NO_HEAD | {"pooling": "cls"},
        DINO | NO_HEAD, REGISTERS, REGISTERS | GATED,
    )],
    "torchvision": [{"position_resampling": "bicubic_aligned"} | fields for fields in (
        {}, POOLED, NO_HEAD)],
    "jeonsworld": [{"position_resampling": "bilinear_aligned"} | fields for fields in (
        {}, NO_HEAD, GREY | GRID, JEONSWORLD, JEONSWORLD | {"patch_size": 32})],
    "lucidrains": [LUCID | fields for fields in (
        {}, MEAN, {"num_heads": 4, "head_width": 48}, {"num_heads": 8}, NO_HEAD, GREY, GRID,
        {"stem": "convolution"}, MEAN | {"positions": "sincos_2d"},
        {"stem": "convolution", "pooling": "mean_all", "norm_before_pool": False},
        {"stem": "convolution", "num_heads": 3, "head_width": 20},
    )],
    "dinov2": [BACKBONE | fields for fields in (
        {}, GATED, {"num_classes": 7, "pooling": "cls_mean"}, FOUR, {"layer_scale": None},
        FOUR | GATED | {"num_classes": 7, "pooling": "cls_mean"}, {"qkv_bias": False}, APART,
    )],
    "deit": [{"position_resampling": "bicubic"} | fields for fields in (
        {}, DISTILLED, APART | {"layer_scale": 1e-5}, NO_HEAD)],
    "timm": [
        {}, DISTILLED, APART | {"num_registers": 4, "layer_scale": 1e-5}, MAP,
        {"embedding_norm": True, "patch_bias": False, "norm_eps": 1e-5},
        GATED | {"layer_scale": 1e-5}, EVA | {"qkv_bias": "no_key"},
        EVA | {"mlp": "swiglu_split", "activation": "silu", "qkv_bias": False},
        HYBRID | {"resnet_layers": (2, 2, 2, 2), "resnet_variant": "timm", "depth": 2},
        NO_HEAD | {"norm": "rms", "pooling": "mean", "norm_before_pool": False},
        {"qkv_bias": False, "qk_norm": True, "layer_scale": 1e-5, "activation": "relu"},
        MAP | {"final_norm": True, "mlp_width": 200}, {"pooling": "mean_all"},
        GREY | {"pooling": "mean", "norm_before_pool": False, "num_registers": 3},
        {"embedding_norm": True, "patch_bias": False, "positions": "none"},
    ],
}  # fmt: skip
"""Format -> models that it holds as they are."""


def noisy(spec: vitkit.ViTSpec) -> vitkit.ViT:
    model = vitkit.ViT(spec).eval()
    fill_with_noise(model, std=0.05)
    return model


def model_of(name: str, fields: dict[str, Any]) -> vitkit.ViT:
    """One of `MODELS`, every parameter off its identity."""
    model = noisy(vitkit.ViTSpec(**BASE | fields))
    if name == "lucidrains" and model.spec.positions == "sincos_2d":
        for block in model.blocks:
            nn.init.zeros_(block.attn.proj.bias)  # their SimpleViT has none
    return model


def written(
    form: Any, model: vitkit.ViT, folder: Path, classes: tuple[str, ...] = (), **options: Any
) -> Path:
    """A model as the files of a format, without our entry in the header, as those of others are.

    It stays in those of lucidrains, which show least of a model.
    """
    height, width = model.spec.image_size
    fit = "crop" if height == width else "squash"  # not every format has a crop to oblongs
    grey = {} if model.spec.in_channels == 3 else {"mean": (0.5,), "std": (0.5,)}
    given = {"preprocess": vitkit.Preprocess(image_size=(height, width), fit=fit, **grey)}
    name = getattr(form, "name", form)
    model.save_pretrained(folder, to=name, classes=classes or None, **given | options)
    (folder / "README.md").unlink()
    for file in folder.glob("*.safetensors"):
        if name not in ("lucidrains", "vitkit"):
            without_our_entry(file)
    return folder


def without_our_entry(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        kept = dict(opened.metadata())
    kept.pop(OUR_ENTRY, None)
    save_file(load_file(file), file, kept)


def stored(path: Path) -> dict[str, Tensor]:
    """The tensors of a file or folder, by their own names."""
    if path.is_dir():
        (path,) = (file for file in path.iterdir() if file.name.startswith("model."))
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return load_file(path)


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def same_files(left: Path, right: Path) -> None:
    """The same files in two folders, the same bits in every tensor, the same bytes beside them."""
    assert sorted(file.name for file in left.iterdir()) == sorted(
        file.name for file in right.iterdir()
    )
    same_bits(stored(left), stored(right))
    for file in left.glob("*.json"):
        assert file.read_bytes() == (right / file.name).read_bytes(), file.name

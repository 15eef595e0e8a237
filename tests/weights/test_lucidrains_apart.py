"""vit-pytorch 0.40.2, the last whose `ViT` is plain: its files in ours, our files in its classes.

It is installed apart from the newest release. Its package asks for torchvision, the files of its
classes only for torch and einops: they are imported by themselves.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from noise import fill_with_noise
from peers import TOLERANCE, random_images, relative
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from weights.round_trips import noisy, same_bits, stored

import vitkit

APART = Path(sys.prefix) / "apart" / "vit-pytorch-0.40.2"
SIZES = {"image_size": (32, 48), "patch_size": (8, 16), "num_classes": 7, "dim": 128, "depth": 2,
         "mlp_dim": 96}  # fmt: skip
OURS = {"image_size": (32, 48), "patch_size": (8, 16), "num_classes": 7, "width": 128, "depth": 2,
        "mlp_width": 96, "qkv_bias": False, "norm_eps": 1e-5}  # fmt: skip
HEADS = [(2, 64), (4, 48), (3, 20), (1, 96)]
POOLINGS = {
    "cls": {"pooling": "cls"},
    "mean": {"pooling": "mean_all", "norm_before_pool": False},
    "simple": {"pooling": "mean", "class_token": False, "positions": "sincos_2d",
               "norm_before_pool": False},
}  # fmt: skip
NORMS = ("transformer.layers.0.0.norm.weight", "transformer.layers.1.0.norm.weight")
each_pooling = pytest.mark.parametrize("pool", POOLINGS)


def theirs(name: str) -> Any:
    """A class of 0.40.2: `ViT` or `SimpleViT`."""
    module = {"ViT": "vit", "SimpleViT": "simple_vit"}[name]
    if not (APART / "vit_pytorch-0.40.2.dist-info").is_dir():
        pytest.fail(f"{APART} is missing; `make .venv/.develop` installs it", pytrace=False)
    found = importlib.util.spec_from_file_location(module, APART / "vit_pytorch" / f"{module}.py")
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return getattr(made, name)


def their_model(pool: str, heads: int, head_width: int) -> nn.Module:
    shape = SIZES | {"heads": heads, "dim_head": head_width}
    model = theirs("SimpleViT")(**shape) if pool == "simple" else theirs("ViT")(**shape, pool=pool)
    fill_with_noise(model, std=0.05)
    return model.eval()


def our_model(pool: str, heads: int, head_width: int, **fields: object) -> vitkit.ViT:
    shape = {"num_heads": heads, "head_width": head_width}
    model = noisy(vitkit.ViTSpec(**OURS | shape | POOLINGS[pool] | fields))
    if pool == "simple":
        for block in model.blocks:
            nn.init.zeros_(block.attn.proj.bias)
    return model


@each_pooling
@pytest.mark.parametrize(
    ("stem", "heads", "head_width"),
    [("linear", 2, None), *(("convolution", *width) for width in HEADS)],
)
@torch.inference_mode()
def test_our_model_is_loaded_strictly_and_computed(tmp_path, pool, heads, head_width, stem):
    model, images = (
        our_model(pool, heads, head_width, stem=stem),
        random_images(2, *OURS["image_size"]),
    )
    vitkit.save(tmp_path / "ours.safetensors", model, preprocess=vitkit.Preprocess())
    vitkit.convert(tmp_path / "ours.safetensors", tmp_path / "out", to="lucidrains")
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    assert header["vit_pytorch_release"] == "0.40.2"
    arguments = json.loads(header["vit_pytorch"])
    arguments |= {name: tuple(v) for name, v in arguments.items() if isinstance(v, list)}
    other = theirs(arguments.pop("class"))(**arguments).eval()
    weights = load_file(file)
    other.load_state_dict(weights, strict=True)
    assert relative(model(images), other(images)) <= TOLERANCE
    one, two = NORMS
    other.load_state_dict(weights | {one: weights[two], two: weights[one]})
    assert relative(model(images), other(images)) > 10 * TOLERANCE


@torch.inference_mode()
def test_one_head_as_wide_as_the_tokens_has_no_projection_there(tmp_path):
    model, images = their_model("cls", 1, 128), random_images(2, *SIZES["image_size"])
    assert not any("to_out" in name for name in model.state_dict())
    save_file(model.state_dict(), tmp_path / "theirs.safetensors")
    sizes = {name: SIZES[name] for name in ("image_size", "patch_size")}
    read = vitkit.load(tmp_path / "theirs.safetensors", **sizes).model
    assert (read.spec.num_heads, read.spec.head_width) == (1, None)
    assert relative(read(images), model(images)) <= TOLERANCE
    vitkit.convert(tmp_path / "theirs.safetensors", tmp_path / "again", to="lucidrains", **sizes)
    same_bits(model.state_dict(), stored(tmp_path / "again"))

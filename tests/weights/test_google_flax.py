"""Google's `.npz` files and the codes behind them, in Flax: both ways, names and logits."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import TOLERANCE, relative
from weights.flax_models import (
    Arrays,
    BigVision,
    Shapes,
    VitJax,
    as_google_reads,
    logits,
    parameters,
)

import vitkit

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 1, "num_heads": 2,
         "mlp_width": 96, "num_classes": 7, "activation": "gelu_tanh",
         "position_resampling": "bilinear_aligned"}  # fmt: skip
NO_TOKEN = {"class_token": False, "pooling": "mean"}
MAP = {"class_token": False, "pooling": "map"}
SINES = NO_TOKEN | {"positions": "sincos_2d", "image_size": 224, "patch_size": 56}
HYBRID = {"stem": "resnet", "image_size": 64, "patch_size": 32}
STAGES = {"stem": "resnet", "resnet_layers": (1, 2)}
CASES = {
    "token": (VitJax, {"depth": 2}),
    "pre_logits": (VitJax, {"representation_width": 24}),
    "grey, no head": (VitJax, {"in_channels": 1, "num_classes": 0}),
    "R+Ti": (VitJax, HYBRID),
    "R+Ti gap": (VitJax, HYBRID | NO_TOKEN),
    "two stages": (VitJax, STAGES),
    "token of big_vision": (BigVision, {"positions_cover_prefix": False}),
    "gap": (BigVision, NO_TOKEN),
    "gap of 2022": (BigVision, SINES | {"representation_width": 64}),
    "map": (BigVision, MAP),
}
READ_ONLY = {
    "gap of vit_jax": (VitJax, NO_TOKEN),
    "one stack": (partial(BigVision, stacked=True), MAP | {"depth": 2}),
}
"""Layouts that we read and do not write."""

Flax = Callable[..., Any]


@pytest.fixture(scope="module")
def flax() -> Iterator[Flax]:
    """A call in a process of its own: JAX's threads run on, and it warns of every later fork."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda function, *given: pool.submit(function, *given).result()


def spec_of(fields: dict[str, object]) -> vitkit.ViTSpec:
    return vitkit.ViTSpec(**SMALL | fields)


def noise(shapes: Shapes) -> Arrays:
    """Values for parameters, none of them at its identity."""
    draw = np.random.default_rng(0).standard_normal
    return {
        name: (0.05 * draw(shape) + name.endswith("scale")).astype(dtype)
        for name, (shape, dtype) in shapes.items()
    }


def saved(arrays: Arrays, prefix: str, folder: Path) -> Path:
    np.savez(folder / "model.npz", **{prefix + name: array for name, array in arrays.items()})
    return folder / "model.npz"


@torch.inference_mode()
def difference(
    flax: Flax, ours: vitkit.ViT, theirs: Any, arrays: Arrays, contrast: float = 1.0
) -> float:
    """Largest |ours - Flax's| of float32 logits, as a part of their scale."""
    generator = torch.Generator().manual_seed(2)
    size = (2, ours.spec.in_channels, *ours.spec.image_size)
    images = contrast * torch.randn(size, generator=generator)
    expected = flax(logits, theirs, arrays, images.permute(0, 2, 3, 1).numpy())
    return relative(ours(images), torch.tensor(expected))


@pytest.mark.parametrize("case", CASES | READ_ONLY)
def test_what_flax_made_is_computed_as_flax_does_and_written_as_it_was(flax, tmp_path, case):
    make, fields = (CASES | READ_ONLY)[case]
    theirs = make(spec_of(fields))
    arrays = noise(flax(parameters, theirs))
    prefix = "params/" if isinstance(theirs, BigVision) else ""
    ours = vitkit.load(saved(arrays, prefix, tmp_path)).model
    assert ours.spec == theirs.spec
    assert difference(flax, ours, theirs, arrays) <= TOLERANCE
    if case in CASES:
        (file,) = vitkit.convert(tmp_path / "model.npz", tmp_path / "again.npz", to="google").files
        with np.load(file, allow_pickle=False) as written:
            again = as_google_reads(dict(written))
        assert again.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(again[name], array, err_msg=name, strict=True)


def test_another_gelu_and_swapped_arrays_show(flax, tmp_path):
    theirs = VitJax(spec_of({"depth": 2}))
    arrays = noise(flax(parameters, theirs))
    ours = vitkit.load(saved(arrays, "", tmp_path)).model
    exact = VitJax(ours.spec.replace(activation="gelu"))
    assert difference(flax, ours, exact, arrays) > 10 * TOLERANCE
    at = "Transformer/encoderblock_1/MultiHeadDotProductAttention_0"
    query, value = f"{at}/query/kernel", f"{at}/value/kernel"
    swapped = arrays | {query: arrays[value], value: arrays[query]}
    assert difference(flax, ours, theirs, swapped) > 100 * TOLERANCE


def test_the_small_numbers_of_a_hybrid_count(flax, tmp_path):
    """Next to kernels and images as small as they are: 1e-5 and 1e-6, where timm has others."""
    theirs = VitJax(spec_of(HYBRID))
    arrays = noise(flax(parameters, theirs))
    arrays["conv_root/kernel"] *= 1e-3
    file = saved(arrays, "", tmp_path)
    ours, timms = vitkit.load(file).model, vitkit.load(file, resnet_variant="timm").model
    assert difference(flax, ours, theirs, arrays, contrast=0.01) <= TOLERANCE
    assert difference(flax, timms, theirs, arrays, contrast=0.01) > 100 * TOLERANCE

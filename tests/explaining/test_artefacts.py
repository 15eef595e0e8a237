"""Artefacts, on models whose artefacts are planted by hand."""

import math

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from own_methods import METHODS

import vitkit

WIDTH, NEURON, LAYER = 32, 5, 1
SIZE = (32, 48)
READOUTS = {
    "class token": {},
    "registers": {"num_registers": 2},
    "distilled": {"distillation_token": True},
    "mean": {"class_token": False, "pooling": "mean"},
    "mean of all": {"pooling": "mean_all"},
    "MAP": {"class_token": False, "pooling": "map"},
    "both": {"pooling": "cls_mean"},
    "rotary": {"positions": "rope"},
    "LayerScale": {"layer_scale": 0.5},
    "packed SwiGLU": {"mlp": "swiglu_packed", "activation": "silu"},
    "split SwiGLU": {"mlp": "swiglu_split", "activation": "silu"},
}


def planted(seed: int = 0, **fields) -> vitkit.ViT:
    """A model with a neuron that fires on patches of ones, and writes a high norm there."""
    vit = vitkit.ViT(
        vitkit.ViTSpec(
            image_size=SIZE, patch_size=8, width=WIDTH, depth=3, num_heads=2, mlp_width=16,
            num_classes=4, **{"activation": "relu"} | fields,
        )
    )  # fmt: skip
    fill_with_noise(vit, seed, std=0.05)
    with torch.no_grad():
        # the first channel of a token is the mean of its patch, and nothing else writes it
        kernel = vit.patch_embed.proj.weight
        kernel -= kernel.mean(dim=(1, 2, 3), keepdim=True)
        kernel[0] = 1.0 / kernel[0].numel()
        vit.patch_embed.proj.bias[0] = 0.0
        if vit.pos_embed is not None:
            vit.pos_embed[..., 0] = 0.0
        for block in vit.blocks:
            for last in (block.attn.proj, block.mlp.fc2):
                last.weight[0] = 0.0
                last.bias[0] = 0.0
        mlp = vit.blocks[LAYER].mlp
        first = getattr(mlp, "fc1", None) or mlp.fc1_g
        first.weight[NEURON] = 0.0
        # a bright token is about 5 there after the norm, others are below 2
        first.weight[NEURON, 0] = 4.0
        first.bias[NEURON] = -12.0
        if vit.spec.mlp != "plain":  # a value of -1 at all tokens: the neuron fires with -8
            value, row = (mlp.fc1, 16 + NEURON) if hasattr(mlp, "fc1") else (mlp.fc1_x, NEURON)
            value.weight[row] = 0.0
            value.bias[row] = -1.0
        mlp.fc2.weight[:, NEURON] = 0.0
        mlp.fc2.weight[1, NEURON] = 50.0
    return vit


def pixels(bright: list[tuple[int, int, int]], count: int = 4) -> torch.Tensor:
    """Noise, with some patches (image, row, column) that are 1 everywhere."""
    generator = torch.Generator().manual_seed(1)
    images = 0.1 * torch.randn(count, 3, *SIZE, generator=generator)
    for image, row, column in bright:
        images[image, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 1.0
    return images


BRIGHT = [(0, 0, 1), (0, 3, 5), (1, 2, 2)]


@pytest.mark.parametrize("readout", READOUTS)
def test_artefacts_are_counted_with_their_share_of_the_attention(readout):
    vit, images = planted(**READOUTS[readout]).eval(), pixels(BRIGHT)
    found = vitkit.find_artefacts(vit, images)
    record = vitkit.Record(tokens=[-1])
    with torch.no_grad():
        vit.forward_features(images, record)
        weights = METHODS["attention"].compute(vit, images)
    norms = record.tokens[2][:, vit.spec.num_prefix_tokens :].double().norm(dim=2).numpy()
    median = np.median(norms)
    limit = median + 4 * np.median(abs(norms - median))
    share = count = 0
    for image in range(4):
        for patch in range(24):
            if norms[image, patch] > limit:
                count += 1
                share += float(weights[image].flatten()[patch]) / 4
                assert found.high[image, patch // 6, patch % 6]
    assert found.threshold == pytest.approx(limit, rel=1e-6)
    assert found.count == count == found.high.sum()
    assert found.attention == pytest.approx(share, abs=1e-6)
    assert {tuple(place) for place in np.argwhere(found.norms > 100).tolist()} == set(BRIGHT)
    assert f"{count} of 96 patch tokens" in str(found)


def test_no_artefacts():
    vit, images = planted().eval(), pixels([])
    found = vitkit.find_artefacts(vit, images, threshold=100.0)
    assert (found.count, found.share, found.attention) == (0, 0.0, 0.0)
    assert str(found) == "0 of 96 patch tokens (0.0 %) have a norm above 100"


def test_what_is_wrong_is_named():
    with pytest.raises(vitkit.SettingError, match=r"no images; pass one image or more"):
        vitkit.find_artefacts(planted(), torch.zeros(0, 3, *SIZE))
    with pytest.raises(vitkit.SettingError, match="threshold = nan: must be above 0"):
        vitkit.find_artefacts(planted(), pixels([]), threshold=math.nan)

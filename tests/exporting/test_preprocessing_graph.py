"""The resize in the graph against Pillow's, on photographs."""

import numpy as np
import pytest
import torch
from skimage import data

import vitkit
from vitkit import SettingError
from vitkit.exporting.graph import PreprocessingGraph

MODES = [
    {"image_size": 224},
    {"image_size": 64, "interpolation": "bilinear", "crop_ratio": 1.0},
    {"image_size": (96, 160), "interpolation": "bilinear"},
    {"image_size": (64, 48), "fit": "squash"},
    {"image_size": 96, "fit": "squash-crop", "mean": (0.5,), "std": (0.25,)},
]


def photographs() -> list[np.ndarray]:
    coffee = data.coffee()
    return [data.astronaut(), coffee, data.chelsea()[:17], np.ascontiguousarray(coffee[:64, :64])]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_pixels_are_those_of_fit(mode):
    preprocess = vitkit.Preprocess(**mode)
    graph = PreprocessingGraph(preprocess)
    for photograph in photographs():
        expected = preprocess(photograph)[None]
        found = graph(torch.from_numpy(photograph)[None])
        # back on the scale of pixels, where both are whole numbers
        difference = ((found - expected) * graph.std * 255).abs().round()
        assert found.shape == expected.shape
        assert difference.max() <= 1
        assert (difference > 0).double().mean() < 2e-3


def test_a_length_between_two_pixels_is_rounded_as_by_fit():
    # 333 / (148 / 54) is 121.5; float64 rounds it to 121, the even neighbour is 122
    preprocess = vitkit.Preprocess(image_size=(72, 54), crop_ratio=1.0)
    photograph = np.ascontiguousarray(data.astronaut()[:333, :148])
    found = PreprocessingGraph(preprocess)(torch.from_numpy(photograph)[None])
    expected = preprocess(photograph)[None]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


def test_nearest_is_refused_in_one_line():
    with pytest.raises(SettingError, match=r"nearest.*leave out --with-preprocessing"):
        PreprocessingGraph(vitkit.Preprocess(interpolation="nearest"))

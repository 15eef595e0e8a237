"""Google's `.npz` files: layouts, guesses and refusals."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from weights.round_trips import noisy, same_bits, written

import vitkit
from vitkit import CheckpointError

Arrays = dict[str, np.ndarray]
SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 2,
         "mlp_width": 96, "num_classes": 7, "activation": "gelu_tanh",
         "position_resampling": "bilinear_aligned"}  # fmt: skip
NO_TOKEN = {"class_token": False, "pooling": "mean"}
CASES = {
    "classic": {},
    "big_vision": {"positions_cover_prefix": False},
    "gap of 2022": NO_TOKEN | {"image_size": 224, "patch_size": 56, "positions": "sincos_2d",
                               "representation_width": 64},
    "map": {"class_token": False, "pooling": "map"},
}  # fmt: skip


def spec_of(case: str) -> vitkit.ViTSpec:
    return vitkit.ViTSpec(**SMALL | CASES[case])


def arrays_of(path: Path) -> Arrays:
    with np.load(path / "model.npz", allow_pickle=False) as file:
        return dict(file)


def saved(arrays: Arrays, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "model.npz", **arrays)
    return folder


def linen(arrays: Arrays) -> Arrays:
    swaps = [("Attention_1/", "Attention_0/"), ("/LayerNorm_2/", "/LayerNorm_1/"),
             ("MlpBlock_3/", "MlpBlock_0/")]  # fmt: skip
    made = {}
    for name, array in arrays.items():
        for old, new in swaps:
            name = name.replace(old, new)
        made[name] = array
    return made


def elsewhere(arrays: Arrays) -> Arrays:
    table = "Transformer/posembed_input/pos_embedding"
    rest = {n: a for n, a in arrays.items() if n != table}
    return rest | {"Transformer/pos_embedding": arrays[table]}


def optimised(arrays: Arrays) -> Arrays:
    state = {"opt/state/step": np.int32(3), "opt/state/param_states/cls/momentum": arrays["cls"]}
    return {f"opt/target/{name}": array for name, array in arrays.items()} | state


def two_towers(arrays: Arrays) -> Arrays:
    text = {"params/t": np.ones(1, np.float32), "params/txt/head/kernel": arrays["head/kernel"]}
    return {f"params/img/{name}": array for name, array in linen(arrays).items()} | text


LAYOUTS: list[Callable[[Arrays], Arrays]] = [elsewhere, optimised, two_towers]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_the_same_model(tmp_path, layout):
    model = noisy(spec_of("classic"))
    arrays = layout(arrays_of(written("google", model, tmp_path / "one")))
    checkpoint = vitkit.load(saved(arrays, tmp_path / "two"))
    assert checkpoint.model.spec == model.spec
    same_bits(model.state_dict(), checkpoint.model.state_dict())


def test_the_first_vit_g_s_pool_has_no_module_of_its_own(tmp_path):
    model = noisy(spec_of("map"))
    arrays = arrays_of(written("google", model, tmp_path / "one"))
    bare = {name.replace("MAPHead_0/", ""): array for name, array in arrays.items()}
    same_bits(model.state_dict(), vitkit.load(saved(bare, tmp_path / "two")).model.state_dict())


def test_naflex_has_a_matrix_for_patches_and_a_grid_of_positions(tmp_path):
    spec = spec_of("map").replace(image_size=(32, 48), position_resampling="bilinear_antialias")
    model = noisy(spec)
    arrays = arrays_of(written("google", model, tmp_path / "one"))
    kernel, table = arrays["params/embedding/kernel"], arrays["params/pos_embedding"]
    arrays["params/embedding/kernel"] = kernel.reshape(8 * 8 * 3, 64)
    arrays["params/pos_embedding"] = table.reshape(4, 6, 64)
    checkpoint = vitkit.load(saved(arrays, tmp_path / "two"))
    assert checkpoint.model.spec == spec
    same_bits(model.state_dict(), checkpoint.model.state_dict())


# 25 rows are 4 x 6 and a class token, or 5 x 5; 10 rows are 2 x 5, or 3 x 3 and a class token.
@pytest.mark.parametrize(("case", "size"), [("classic", (32, 48)), ("big_vision", (16, 40))])
def test_grids_that_are_no_squares_are_asked_for(tmp_path, case, size):
    spec = spec_of(case).replace(image_size=size)
    place = written("google", noisy(spec), tmp_path / "first")
    with pytest.raises(CheckpointError, match="not a square grid; pass image_size"):
        vitkit.load(place)


def test_what_is_only_usual_is_marked_so(tmp_path):
    sure = vitkit.load(written("google", noisy(spec_of("classic")), tmp_path / "a")).metadata[
        "sure"
    ]
    assert sure["num_heads"] == sure["positions_cover_prefix"] == sure["pooling"] == "shapes"
    assert sure["activation"] == sure["norm_eps"] == sure["preprocess"] == "usual"
    checkpoint = vitkit.load(written("google", noisy(spec_of("gap of 2022")), tmp_path / "b"))
    assert checkpoint.metadata["sure"]["image_size"] == "usual"
    assert checkpoint.metadata["sure"]["pooling"] == "usual"
    fits = [checkpoint.preprocess.fit, vitkit.load(tmp_path / "a").preprocess.fit]
    assert fits == ["crop", "squash"]


@pytest.mark.parametrize(
    "names",
    [
        ("stem/kernel", "MixerBlock_0/LayerNorm_0/scale", "head/kernel"),  # an MLP-Mixer
        ("embedding/kernel", "LayerNorm_0/scale"),
    ],
)
def test_only_vits_are_claimed(tmp_path, names):
    place = saved(dict.fromkeys(names, np.ones(1, np.float32)), tmp_path)
    with pytest.raises(CheckpointError, match="in no known format"):
        vitkit.load(place)

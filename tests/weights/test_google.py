"""Google's `.npz` files: names, layouts, refusals, and timm's own reader of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peers import peer
from weights.round_trips import noisy, round_trip, same_bits, written

import vitkit
from vitkit.errors import CheckpointError
from vitkit.weights import recognise_format as registry
from vitkit.weights.formats.format import Bundle
from vitkit.weights.formats.google import GOOGLE
from vitkit.weights.load import load
from vitkit.weights.tensor_file import Header

Arrays = dict[str, np.ndarray]
SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 2,
         "mlp_width": 96, "num_classes": 7, "activation": "gelu_tanh",
         "position_resampling": "bilinear_aligned"}  # fmt: skip
NO_TOKEN = {"class_token": False, "pooling": "mean"}
HYBRID = {"stem": "resnet", "image_size": 64, "depth": 1}
CASES = {
    "classic": {},
    "no head": {"num_classes": 0},
    "pre_logits": {"representation_width": 24},
    "big_vision": {"positions_cover_prefix": False},
    "gap": NO_TOKEN,
    "gap of 2022": NO_TOKEN | {"image_size": 224, "patch_size": 56, "positions": "sincos_2d",
                               "representation_width": 64},
    "map": {"class_token": False, "pooling": "map"},
    "grey": {"in_channels": 1},
    "R50": HYBRID | {"patch_size": 16, "resnet_layers": (3, 4, 9), "image_size": 32},
    "R+Ti": HYBRID | {"patch_size": 32},
    "R+Ti gap": HYBRID | NO_TOKEN | {"patch_size": 32},
}  # fmt: skip
DTYPES = {"R50": torch.float64}
"""Its stages turn float32's rounding into 1e-5."""


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(registry.FORMATS, GOOGLE.name, GOOGLE)


def spec_of(case: str) -> vitkit.ViTSpec:
    return vitkit.ViTSpec(**SMALL | CASES[case])


def arrays_of(path: Path) -> Arrays:
    with np.load(path / "model.npz", allow_pickle=False) as file:
        return dict(file)


def saved(arrays: Arrays, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "model.npz", **arrays)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_with_the_same_bits(tmp_path, case):
    round_trip(GOOGLE, spec_of(case), tmp_path)


BLOCK_SHAPES = {
    "LayerNorm_0/scale": (64,), "LayerNorm_0/bias": (64,),
    **{f"MultiHeadDotProductAttention_1/{part}/kernel": (64, 2, 32)
       for part in ("query", "key", "value")},
    **{f"MultiHeadDotProductAttention_1/{part}/bias": (2, 32)
       for part in ("query", "key", "value")},
    "MultiHeadDotProductAttention_1/out/kernel": (2, 32, 64),
    "MultiHeadDotProductAttention_1/out/bias": (64,),
    "LayerNorm_2/scale": (64,), "LayerNorm_2/bias": (64,),
    "MlpBlock_3/Dense_0/kernel": (64, 96), "MlpBlock_3/Dense_0/bias": (96,),
    "MlpBlock_3/Dense_1/kernel": (96, 64), "MlpBlock_3/Dense_1/bias": (64,),
}  # fmt: skip
ENDS = {
    "cls": (1, 1, 64), "embedding/kernel": (8, 8, 3, 64), "embedding/bias": (64,),
    "Transformer/posembed_input/pos_embedding": (1, 17, 64),
    "Transformer/encoder_norm/scale": (64,), "Transformer/encoder_norm/bias": (64,),
    "pre_logits/kernel": (64, 24), "pre_logits/bias": (24,),
    "head/kernel": (24, 7), "head/bias": (7,),
}  # fmt: skip


def test_names_shapes_and_dtypes_are_the_published_ones(tmp_path):
    arrays = arrays_of(written(GOOGLE, noisy(spec_of("pre_logits")), tmp_path / "plain"))
    expected = ENDS | {
        f"Transformer/encoderblock_{i}/{name}": shape
        for i in (0, 1) for name, shape in BLOCK_SHAPES.items()
    }  # fmt: skip
    assert {name: array.shape for name, array in arrays.items()} == expected
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    hybrid = arrays_of(written(GOOGLE, noisy(spec_of("R+Ti")), tmp_path / "hybrid"))
    assert hybrid["gn_root/scale"].shape == hybrid["gn_root/bias"].shape == (1, 1, 1, 64)


# timm's own reader of these files.


def timm_model(name: str, case: str, **fields: object) -> torch.nn.Module:
    s = spec_of(case)
    return peer("timm").create_model(
        name, img_size=s.image_size, embed_dim=s.width, depth=s.depth, num_heads=s.num_heads,
        mlp_ratio=s.mlp_width / s.width, num_classes=s.num_classes, act_layer="gelu_tanh", **fields,
    ).eval()  # fmt: skip


GAP = {"class_token": False, "global_pool": "avg", "fc_norm": False}
TIMM = {
    "classic": ("vit_tiny_patch16_224", {"patch_size": 8}),
    "big_vision": ("vit_tiny_patch16_224", {"patch_size": 8, "no_embed_class": True}),
    "gap": ("vit_tiny_patch16_224", GAP | {"patch_size": 8}),
    "map": ("vit_tiny_patch16_224", GAP | {"patch_size": 8, "global_pool": "map"}),
    "R50": ("vit_base_r50_s16_224", {}),
    "R+Ti": ("vit_tiny_r_s16_p8_224", {}),
}


@pytest.mark.parametrize("case", TIMM)
def test_timm_reads_what_we_write_and_computes_the_same(tmp_path, case):
    name, fields = TIMM[case]
    path, dtype = written(GOOGLE, noisy(spec_of(case)), tmp_path), DTYPES.get(case, torch.float32)
    theirs = timm_model(name, case, **fields)
    theirs.load_pretrained(str(path / "model.npz"))
    variant = {"resnet_variant": "timm"} if spec_of(case).stem == "resnet" else {}
    ours = load(path, **variant).model.to(dtype)
    images = torch.randn(2, 3, *ours.spec.image_size, dtype=dtype)
    with torch.inference_mode():
        expected = theirs.to(dtype)(images)
        assert (ours(images) - expected).abs().max() <= 1e-5 * expected.abs().max()


# Other layouts, made of the classic one.


def linen(arrays: Arrays) -> Arrays:
    swaps = [("Attention_1/", "Attention_0/"), ("/LayerNorm_2/", "/LayerNorm_1/"),
             ("MlpBlock_3/", "MlpBlock_0/")]  # fmt: skip
    made = {}
    for name, array in arrays.items():
        for old, new in swaps:
            name = name.replace(old, new)
        made[name] = array
    return made


def stacked(arrays: Arrays) -> Arrays:
    blocks = {n: a for n, a in linen(arrays).items() if "encoderblock_" in n}
    made = {n: a for n, a in arrays.items() if "encoderblock_" not in n}
    for name in [n for n in blocks if "encoderblock_0/" in n]:
        levels = [blocks[name.replace("block_0", f"block_{i}")] for i in range(SMALL["depth"])]
        made[name.replace("encoderblock_0", "encoderblock")] = np.stack(levels)
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
    arrays = layout(arrays_of(written(GOOGLE, model, tmp_path / "one")))
    checkpoint = load(saved(arrays, tmp_path / "two"))
    assert checkpoint.model.spec == model.spec
    same_bits(model.state_dict(), checkpoint.model.state_dict())


def test_the_first_vit_g_s_pool_has_no_module_of_its_own(tmp_path):
    model = noisy(spec_of("map"))
    arrays = arrays_of(written(GOOGLE, model, tmp_path / "one"))
    bare = {name.replace("MAPHead_0/", ""): array for name, array in arrays.items()}
    same_bits(model.state_dict(), load(saved(bare, tmp_path / "two")).model.state_dict())


def test_naflex_has_a_matrix_for_patches_and_a_grid_of_positions(tmp_path):
    spec = spec_of("map").replace(image_size=(32, 48), position_resampling="bilinear_antialias")
    model = noisy(spec)
    arrays = arrays_of(written(GOOGLE, model, tmp_path / "one"))
    kernel, table = arrays["params/embedding/kernel"], arrays["params/pos_embedding"]
    arrays["params/embedding/kernel"] = kernel.reshape(8 * 8 * 3, 64)
    arrays["params/pos_embedding"] = table.reshape(4, 6, 64)
    checkpoint = load(saved(arrays, tmp_path / "two"))
    assert checkpoint.model.spec == spec
    same_bits(model.state_dict(), checkpoint.model.state_dict())


# 25 rows are 4 x 6 and a class token, or 5 x 5; 10 rows are 2 x 5, or 3 x 3 and a class token.
@pytest.mark.parametrize(("case", "size"), [("classic", (32, 48)), ("big_vision", (16, 40))])
def test_grids_that_are_no_squares_are_asked_for(tmp_path, case, size):
    spec = spec_of(case).replace(image_size=size)
    round_trip(GOOGLE, spec, tmp_path, image_size=size)
    assert load(tmp_path / "first", image_size=size).model.spec == spec
    with pytest.raises(CheckpointError, match="not a square grid; pass image_size"):
        load(tmp_path / "first")


def test_what_is_only_usual_is_marked_so(tmp_path):
    sure = load(written(GOOGLE, noisy(spec_of("classic")), tmp_path / "a")).metadata["sure"]
    assert sure["num_heads"] == sure["positions_cover_prefix"] == sure["pooling"] == "shapes"
    assert sure["activation"] == sure["norm_eps"] == sure["preprocess"] == "usual"
    checkpoint = load(written(GOOGLE, noisy(spec_of("gap of 2022")), tmp_path / "b"))
    assert checkpoint.metadata["sure"]["image_size"] == "usual"
    assert checkpoint.metadata["sure"]["pooling"] == "usual"
    fits = [checkpoint.preprocess.fit, load(tmp_path / "a").preprocess.fit]
    assert fits == ["crop", "squash"]


def test_only_vits_are_claimed():
    def of(*names: str) -> bool:
        return GOOGLE.detect(Header(Path("x"), dict.fromkeys(names, (1,)), {}))

    assert of("params/embedding/kernel", "params/Transformer/encoder_norm/scale")
    assert not of("stem/kernel", "MixerBlock_0/LayerNorm_0/scale", "head/kernel")  # an MLP-Mixer
    assert not of("embedding/kernel", "LayerNorm_0/scale")
    assert not of("patch_embed.proj.weight", "blocks.0.norm1.weight")


KEY = "Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel"
WRONG: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "missing": (lambda a: {n: v for n, v in a.items() if n != KEY}, f"{KEY} is missing"),
    "unknown": (lambda a: a | {"extra/kernel": a["cls"]}, "1 unknown tensor"),
    "shape": (lambda a: a | {KEY: a[KEY][:, 1:]}, r"shape \(95, 64\); the model needs \(96, 64\)"),
    "mixed": (lambda a: a | linen(a), "mixes two layouts"),
    "ragged": (
        lambda a: stacked(a) | {"Transformer/encoderblock/LayerNorm_0/bias": np.ones((3, 64))},
        r"stacks of \[\(2,\), \(3,\)\] blocks",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, wrong):
    damage, message = WRONG[wrong]
    arrays = arrays_of(written(GOOGLE, noisy(spec_of("classic")), tmp_path / "one"))
    with pytest.raises(CheckpointError, match=message) as error:
        load(saved(damage(arrays), tmp_path / "two"))
    assert "\n" not in str(error.value)


def test_heads_that_contradict_the_kernels_are_refused(tmp_path):
    path = written(GOOGLE, noisy(spec_of("classic")), tmp_path)
    with pytest.raises(CheckpointError, match="4 contradicts the kernels, which have 2 heads"):
        load(path, num_heads=4)


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("classic", {"pooling": "mean"}, "no class token beside pooling 'mean'"),
        ("R+Ti", {"positions_cover_prefix": False}, "hybrids are learned and cover the class"),
        ("R+Ti gap", {"pooling": "map"}, "hybrids have no attention pool"),
    ],
)
def test_what_neither_code_computes_is_not_written(case, fields, message):
    spec = spec_of(case).replace(**fields)
    with pytest.raises(CheckpointError, match=message):
        GOOGLE.write(Bundle(spec, {}, vitkit.Preprocess(), ()))

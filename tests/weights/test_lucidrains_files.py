"""lucidrains' files: read as its newest classes compute, and written for them."""

from __future__ import annotations

import json

import pytest
import torch
from peers import peer, relative
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from weights.lucidrains_models import check_read, theirs
from weights.round_trips import noisy, round_trip, same_bits, stored, written

import vitkit
from vitkit.errors import CheckpointError
from vitkit.weights.convert import ConversionReport, convert
from vitkit.weights.formats.key_table import write_tensors
from vitkit.weights.formats.lucidrains import LUCIDRAINS
from vitkit.weights.load import load

OURS = {"image_size": 32, "patch_size": 8, "num_classes": 7, "width": 128, "depth": 2,
        "num_heads": 2, "mlp_width": 96, "stem": "normed_linear", "qkv_bias": False,
        "norm_eps": 1e-5}  # fmt: skip
MEAN = {"pooling": "mean", "class_token": False}
MEAN_ALL = {"pooling": "mean_all"}
FIRST = {"norm_before_pool": False}
PLAIN = {"stem": "convolution"}
SIMPLE = MEAN | {"positions": "sincos_2d"}
SWAPPED = ("transformer.layers.0.0.norm.weight", "transformer.layers.0.1.net.0.weight")


@pytest.mark.parametrize("kind", ["cls", "mean"])
def test_their_model_saved_by_torch_is_computed_by_ours(tmp_path, kind):
    checkpoint = check_read(theirs(kind), tmp_path)
    assert checkpoint.model.spec.pooling == kind
    assert checkpoint.metadata["sure"]["num_heads"] == "usual"


def test_their_simple_model_is_computed_by_ours(tmp_path):
    checkpoint = check_read(theirs("simple"), tmp_path, image_size=32)
    assert checkpoint.model.spec.positions == "sincos_2d"
    guessed = load(tmp_path / "vit.pt", trust_pickle=True)
    assert guessed.model.spec.image_size == (256, 256)
    assert any("image_size (256, 256) is a guess" in w for w in guessed.metadata["warnings"])


@pytest.mark.parametrize("overrides", [{"num_heads": 4}, {"head_width": 48}, {}])
def test_heads_are_64_wide_by_default(tmp_path, overrides):
    model = theirs(heads=4, dim_head=48)
    if overrides:
        spec = check_read(model, tmp_path, **overrides).model.spec
        assert (spec.num_heads, spec.head_width) == (4, 48)
    else:
        torch.save(model.state_dict(), tmp_path / "vit.pt")
        spec = load(tmp_path / "vit.pt", trust_pickle=True).model.spec
        assert (spec.num_heads, spec.head_width) == (3, 64)


def ours(**fields: object) -> vitkit.ViT:
    model = noisy(vitkit.ViTSpec(**OURS | fields))
    if model.spec.positions == "sincos_2d":
        for block in model.blocks:
            nn.init.zeros_(block.attn.proj.bias)
    return model


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "fields"), [("cls", {}), ("mean", MEAN), ("simple", SIMPLE)])
def test_our_model_written_is_loaded_strictly_by_theirs(tmp_path, kind, fields):
    model, other, images = ours(**fields), theirs(kind), torch.randn(2, 3, 32, 32)
    weights = load_file(written(LUCIDRAINS, model, tmp_path) / "model.safetensors")
    other.load_state_dict(weights)
    expected = model(images)
    assert relative(other(images), expected) <= 1e-5
    one, two = SWAPPED
    other.load_state_dict(weights | {one: weights[two], two: weights[one]})
    assert relative(other(images), expected) > 1e-4


def test_the_constructor_s_arguments_lie_in_the_header(tmp_path):
    model = ours(num_heads=4, head_width=48)
    file = written(LUCIDRAINS, model, tmp_path) / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        arguments = json.loads(opened.metadata()["vit_pytorch"])
    assert arguments.pop("class") == "ViT"
    other = peer("vit_pytorch.vit", "ViT")(**arguments).eval()
    other.load_state_dict(load_file(file))
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert relative(other(images), model(images)) <= 1e-5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        MEAN,
        {"num_heads": 4, "head_width": 48},
        {"num_heads": 8},
        {"num_classes": 0},
        PLAIN,
        PLAIN | MEAN_ALL | FIRST,
        PLAIN | {"num_heads": 3, "head_width": 20},
        {"in_channels": 1},
        {"patch_size": (4, 16), "image_size": (32, 64)},
    ],
    ids=str,
)
def test_there_and_back_with_the_same_bits(tmp_path, fields):
    spec = vitkit.ViTSpec(**OURS | fields)
    checkpoint = round_trip(LUCIDRAINS, spec, tmp_path)
    assert checkpoint.model.spec == spec
    assert checkpoint.metadata["sure"]["num_heads"] == "stored"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"patch_size": 7}, "192 values per patch are not 7 of 1 or 3 channels"),
        ({"in_channels": 1}, "192 values per patch are not a square"),
        ({"num_heads": 3}, "width 128, which 42 per head"),
        ({"image_size": 64}, "the file has positions for 16"),
    ],
)
def test_what_the_user_says_must_fit_the_file(tmp_path, overrides, message):
    torch.save(theirs().state_dict(), tmp_path / "vit.pt")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "vit.pt", trust_pickle=True, **overrides)


def test_the_simple_model_there_and_back(tmp_path):
    model = ours(**SIMPLE)
    first = written(LUCIDRAINS, model, tmp_path / "first")
    again = load(first).model
    assert again.spec == model.spec
    same_bits(model.state_dict(), again.state_dict())
    same_bits(stored(first), stored(written(LUCIDRAINS, again, tmp_path / "second")))


@pytest.mark.parametrize("kind", ["cls", "mean", "simple"])
def test_theirs_comes_back_with_the_same_bits(tmp_path, kind):
    model = theirs(kind)
    save_file(model.state_dict(), tmp_path / "theirs.safetensors")
    read = load(tmp_path / "theirs.safetensors").model
    same_bits(model.state_dict(), stored(written(LUCIDRAINS, read, tmp_path / "again")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (SIMPLE, "attn.proj.bias is not zero"),
        ({"num_heads": 1}, "attn.proj is not an identity"),
        (MEAN | {"class_token": True}, "pooling 'mean_all'"),
        (
            PLAIN | MEAN,
            "neither 0.40.2 nor .* stem = 'convolution', .* pooling = 'mean', norm_before",
        ),
        (PLAIN | MEAN_ALL, "pooling = 'mean_all', norm_before_pool = True in one model"),
        (MEAN_ALL, "neither 0.40.2 nor .* pooling = 'mean_all'"),
        (MEAN | {"norm_before_pool": False}, "neither .* norm_before_pool = False"),
        ({"num_registers": 2}, "cannot store reg_token"),
        ({"layer_scale": 0.1}, "cannot store blocks.0.ls1.gamma"),
    ],
)
def test_what_theirs_cannot_hold_is_refused(fields, message):
    model = noisy(vitkit.ViTSpec(**OURS | fields))
    with pytest.raises(CheckpointError, match=message):
        write_tensors(LUCIDRAINS.table(model.spec), model.spec, model.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("transformer.norm.bias"), "tensor transformer.norm.bias is missing"),
        (lambda w: w.update(extra=torch.zeros(2)), "1 unknown tensor: extra"),
        (lambda w: w.update({"mlp_head.bias": torch.zeros(3)}), "gives head.bias the shape"),
        (
            lambda w: w.pop("transformer.layers.1.0.to_out.0.weight"),
            "to_out.0.weight is missing",
        ),
        (
            lambda w: w.update({"transformer.layers.0.0.to_qkv.weight": torch.zeros(99, 128)}),
            "width 33, .*; pass num_heads",
        ),
        (
            lambda w: w.update({"to_patch_embedding.2.weight": torch.zeros(128, 96)}),
            "96 values per patch are not a square of 1 or 3 channels; pass patch_size",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(tmp_path, change, message):
    weights = theirs().state_dict()
    change(weights)
    torch.save(weights, tmp_path / "wrong.pt")
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path / "wrong.pt", trust_pickle=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (PLAIN, "ViT of 0.40.2 always has a head"),
        (SIMPLE, "SimpleViT of 1.17.3 always has a head"),
    ],
)
def test_models_without_a_head_are_of_the_newest_class_alone(tmp_path, fields, message):
    with pytest.raises(CheckpointError, match=message):
        written(LUCIDRAINS, ours(**fields, num_classes=0), tmp_path)


def converted(folder, model: vitkit.ViT, **options: object) -> ConversionReport:
    vitkit.save(folder / "ours.safetensors", model, preprocess=vitkit.Preprocess())
    return convert(folder / "ours.safetensors", folder / "out", to="lucidrains", **options)


def test_a_plain_vit_loses_its_biases_of_attention_or_has_none(tmp_path):
    model = ours(**PLAIN, qkv_bias=True)
    with pytest.raises(CheckpointError, match="cannot store: qkv_bias: the biases of"):
        converted(tmp_path, model)
    report = converted(tmp_path, model, allow_lossy=True)
    assert report.lost == ("qkv_bias: the biases of query, key and value",)
    assert report.max_difference > 1e-4
    for block in model.blocks:
        nn.init.zeros_(block.attn.qkv.bias)
    (tmp_path / "out" / "model.safetensors").unlink()
    report = converted(tmp_path, model)
    assert report.folded == ("qkv_bias: it was all zeros",)
    assert report.max_difference <= 1e-5


def test_a_file_of_theirs_is_converted_to_their_format(tmp_path):
    torch.save(theirs().state_dict(), tmp_path / "theirs.pth")
    report = convert(tmp_path / "theirs.pth", tmp_path / "out", to="lucidrains", trust_pickle=True)
    assert report.max_difference <= 1e-5

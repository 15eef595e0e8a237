"""Tokens and maps of inner layers: equal to timm's and a Record's."""

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from peers import TOLERANCE, peer, relative
from torch import Tensor, nn

import vitkit
from vitkit import SettingError, ShapeError

timm = peer("timm")
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 4, "depth": 4}
MODELS = {
    "plain": ("vit_tiny_patch16_224", {}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 3, "init_values": 0.1}),
    "after pooling": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "no prefix": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "map": ("vit_base_patch16_siglip_224", {}),
}


def pair(name: str) -> tuple[vitkit.ViT, nn.Module]:
    """A model of ours and timm's with the same weights."""
    preset, keywords = MODELS[name]
    # timm's entry points of this model set its sizes themselves, and take only these keywords.
    fields = SMALL | keywords
    ours = vitkit.create_model(preset, num_classes=5, **fields).eval()
    theirs = timm.create_model(preset, num_classes=5, **fields).eval()
    fill_with_noise(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


def assert_same(ours: object, theirs: object) -> None:
    """Equal tensors in equal lists and pairs."""
    if isinstance(theirs, Tensor):
        assert isinstance(ours, Tensor)
        assert ours.shape == theirs.shape
        assert relative(ours, theirs) <= TOLERANCE
        return
    assert type(ours) is type(theirs)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)


CALLS = [
    {},
    {"indices": 2},
    {"indices": [0, -1], "norm": True},
    {"indices": [2, 1, 2], "output_fmt": "NLC", "return_prefix_tokens": True},
    {"indices": (1,), "stop_early": True},
    {"indices": [1], "stop_early": True, "intermediates_only": True, "norm": True},
    {"return_prefix_tokens": True, "intermediates_only": True},
]


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_intermediates_equal_timm_s(name):
    ours, theirs = pair(name)
    images = torch.randn(2, 3, 32, 32)
    for call in CALLS:
        expected = theirs.forward_intermediates(images, **call)
        assert_same(ours.forward_intermediates(images, **call), expected)
    assert_same(
        ours.get_intermediate_layers(images, 2, reshape=True, norm=False),
        tuple(theirs.get_intermediate_layers(images, 2, reshape=True)),
    )
    assert ours.feature_info == theirs.feature_info


@torch.inference_mode()
def test_the_tokens_give_the_logits_by_forward_head():
    ours, theirs = pair("distilled")
    images = torch.randn(2, 3, 32, 32)
    tokens, _ = ours.forward_intermediates(images, [1])
    assert torch.equal(ours.forward_head(tokens), ours(images))
    assert relative(ours(images), theirs.forward_head(tokens)) <= TOLERANCE


@torch.inference_mode()
def test_intermediates_are_those_of_a_record():
    ours, _ = pair("registers")
    images, record = torch.randn(2, 3, 32, 48), vitkit.Record(tokens=[1, 3])
    ours(images, record)
    found = ours.forward_intermediates(
        images, [1, 3], output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
    )
    for layer, (patches, prefix) in zip([1, 3], found, strict=True):
        assert torch.equal(torch.cat([prefix, patches], dim=1), record.tokens[layer])
    pairs = ours.get_intermediate_layers(images, [1, 3], return_class_token=True)
    for layer, (patches, token) in zip([1, 3], pairs, strict=True):  # with the norm, as DINOv2's
        expected = ours.norm(record.tokens[layer])
        assert torch.equal(patches, expected[:, 4:])
        assert torch.equal(token, expected[:, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"indices": 5}, "the last 5 layers: must be from 1 to 4"),
        ({"indices": 0}, "the last 0 layers: must be from 1 to 4"),
        ({"indices": [4]}, "layer 4 does not exist; layers are 0 to 3"),
        ({"indices": []}, "no layers are named"),
        ({"indices": "2"}, "layers '2': pass a number n for the last n, or several"),
        ({"indices": 1.5}, "layers 1.5: pass a number n for the last n, or several"),
        ({"indices": [0.0]}, r"layers \[0.0\]: pass a number n for the last n, or several"),
        ({"output_fmt": "NHWC"}, "output_fmt 'NHWC' is none of NCHW, NLC"),
    ],
)
@pytest.mark.usefixtures("wrong_types_come_in")
def test_layers_that_do_not_exist_are_named(call, message):
    model, _ = pair("plain")
    with pytest.raises(SettingError, match=message):
        model.forward_intermediates(torch.randn(1, 3, 32, 32), **call)


@pytest.mark.usefixtures("wrong_types_come_in")
@torch.inference_mode()
def test_numpy_s_numbers_name_layers_too():
    model, _ = pair("plain")
    images = torch.randn(1, 3, 32, 32)
    for indices in (np.int64(2), np.array([2, 3]), [np.int64(-2), 3]):
        found = model.forward_intermediates(images, indices, intermediates_only=True)
        assert_same(found, model.forward_intermediates(images, 2, intermediates_only=True))


def test_a_class_token_that_is_not_there():
    model, _ = pair("no prefix")
    with pytest.raises(SettingError, match="the model has no class token"):
        model.get_intermediate_layers(torch.randn(1, 3, 32, 32), return_class_token=True)


def test_dropped_patches_make_no_map():
    model = vitkit.create_model("vit_tiny_patch16_224", **SMALL, patch_drop_rate=0.5).train()
    images = torch.randn(1, 3, 32, 32)
    with pytest.raises(ShapeError, match="8 patches make no map of 4 x 4: patch_dropout"):
        model.forward_intermediates(images)
    (patches,) = model.forward_intermediates(images, 1, output_fmt="NLC", intermediates_only=True)
    assert patches.shape == (1, 8, 64)


def test_gradients_reach_the_first_layer_also_when_they_are_recomputed():
    model, _ = pair("plain")
    images = torch.randn(1, 3, 32, 32)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        _, (features,) = model.forward_intermediates(images, [2])
        features.square().sum().backward()
        gradients.append(model.patch_embed.proj.weight.grad.clone())
    assert torch.equal(*gradients)
    assert gradients[0].abs().sum() > 0


FEATURES = [{}, {"out_indices": [0, 2]}, {"out_indices": (-2,)}, {"out_indices": 1}]


@pytest.mark.parametrize("name", ["plain", "registers", "after pooling", "distilled"])
@pytest.mark.parametrize("call", FEATURES)
@torch.inference_mode()
def test_features_only_equals_timm_s(name, call):
    preset, keywords = MODELS[name]
    fields = SMALL | keywords
    ours = vitkit.create_model(preset, features_only=True, **call, **fields).eval()
    theirs = timm.create_model(preset, features_only=True, **call, **fields).eval()
    fill_with_noise(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(2, 3, 32, 32)
    assert_same(ours(images), theirs(images))
    info, other = ours.feature_info, theirs.feature_info
    assert info.channels() == other.channels()
    assert info.reduction() == other.reduction()
    assert info.module_name() == other.module_name()
    assert list(info.out_indices) == list(other.out_indices)
    assert len(info) == len(ours.model.blocks)
    assert [d["num_chs"] for d in info.get_dicts()] == [d["num_chs"] for d in other.get_dicts()]
    assert info[0]["module"] == other[0]["module"]


@torch.inference_mode()
def test_what_is_left_of_a_backbone_is_saved_as_it_is(tmp_path):
    backbone = vitkit.create_model(
        "vit_tiny_patch16_224", features_only=True, out_indices=[1, 2], **SMALL, drop_path_rate=0.3
    )
    assert backbone.training
    rates = [block.drop_path1.rate for block in backbone.model.blocks]
    fill_with_noise(backbone)
    path = vitkit.save(
        tmp_path / "b.safetensors", backbone.model, preprocess=vitkit.Preprocess(image_size=32)
    )
    again = vitkit.FeatureMaps(vitkit.load(path).model, [1, 2])
    images = torch.randn(1, 3, 32, 32)
    assert all(map(torch.equal, again(images), backbone.eval()(images)))
    assert [block.drop_path1.rate for block in again.model.blocks] == pytest.approx(rates)
    assert again.model.spec.depth == 3


@pytest.mark.usefixtures("wrong_types_come_in")
@torch.inference_mode()
def test_maps_may_have_the_last_norm_and_another_layout():
    ours, theirs = pair("plain")
    images = torch.randn(1, 3, 32, 32)
    expected = theirs.forward_intermediates(
        images, [0, 3], norm=True, output_fmt="NLC", intermediates_only=True
    )
    maps = vitkit.FeatureMaps(ours, [3, 0], norm=True, output_fmt="NLC")
    assert_same(maps(images), expected)
    assert ours.spec.final_norm
    with pytest.raises(SettingError, match="output_fmt 'NHW' is none of"):
        vitkit.FeatureMaps(ours, output_fmt="NHW")
    with pytest.raises(SettingError, match=r"a Linear is not a vitkit\.ViT"):
        vitkit.FeatureMaps(nn.Linear(2, 2))
    with pytest.raises(SettingError, match="out_indices needs features_only=True"):
        vitkit.create_model("vit_tiny_patch16_224", out_indices=[1])

"""timm's keywords and its calls on the head: the same model as timm makes of them."""

import math

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from peers import TOLERANCE, peer, relative
from torch import nn

import vitkit
from vitkit import SpecError

timm = peer("timm")
TINY, SMALL = "vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 2}
KEYWORDS = [
    {"embed_dim": 96},
    {"embed_dim": 96, "mlp_ratio": 2.5},
    {"mlp_ratio": 1.3},
    {"in_chans": 1, "num_classes": 7},
    {"global_pool": "avg"},
    {"global_pool": "avg", "fc_norm": False},
    {"global_pool": "avg", "pool_include_prefix": True},
    {"global_pool": "token", "fc_norm": True},
    {"class_token": False, "global_pool": "avg", "reg_tokens": 2},
    {"reg_tokens": 3, "no_embed_class": True},
    {"pos_embed": "none"},
    {"pre_norm": True},
    {"init_values": 0.3, "qk_norm": True, "qkv_bias": False},
    {"act_layer": "quick_gelu", "final_norm": False},
    {"norm_layer": "rmsnorm"},
    {"dynamic_img_size": True, "num_classes": 0},
]


@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@torch.inference_mode()
def test_timm_s_keywords_make_timm_s_model(keywords):
    ours = vitkit.create_model(TINY, **SMALL, **keywords).eval()
    theirs = timm.create_model(TINY, **SMALL, **keywords).eval()
    fill_with_noise(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(2, keywords.get("in_chans", 3), 32, 32)
    assert relative(ours(images), theirs(images)) <= TOLERANCE
    assert ours.num_features == theirs.num_features
    assert ours.num_classes == theirs.num_classes
    assert ours.embed_dim == theirs.embed_dim


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("vit_base_patch16_siglip_gap_224", {"global_pool": "avg", "depth": 1}),
        ("vit_base_patch16_siglip_gap_224", {"global_pool": "avg", "fc_norm": True, "depth": 1}),
        ("vit_so400m_patch14_siglip_224", {"embed_dim": 576, "depth": 1}),
        ("vit_giant_patch14_dinov2", {"embed_dim": 96, "num_heads": 3, "depth": 1}),
        ("vit_giant_patch14_dinov2", {"mlp_ratio": 4.0, "depth": 1, "img_size": 28}),
        ("deit3_small_patch16_224", {"embed_dim": 96, "global_pool": "avg", "depth": 1}),
        ("deit_tiny_distilled_patch16_224", {"embed_dim": 96, "drop_rate": 0.1, "depth": 1}),
        ("vit_small_patch16_dinov3", {"embed_dim": 96, "depth": 1, "num_reg_tokens": 2}),
    ],
)
def test_what_a_keyword_leaves_open_follows_from_the_named_model(name, keywords):
    def shapes(model: nn.Module) -> list[tuple[int, ...]]:
        return sorted(tuple(value.shape) for value in model.state_dict().values())

    with torch.device("meta"):
        ours = vitkit.create_model(name, **keywords)
        theirs = timm.create_model(name, **keywords)
    assert shapes(ours) == shapes(theirs)
    kinds = [type(module) is nn.Identity for module in (ours.norm, ours.fc_norm)]
    assert kinds == [type(module) is nn.Identity for module in (theirs.norm, theirs.fc_norm)]


def test_rates_are_those_of_timm():
    rates = {
        "drop_rate": 0.1, "pos_drop_rate": 0.2, "patch_drop_rate": 0.3, "proj_drop_rate": 0.4,
        "attn_drop_rate": 0.5, "drop_path_rate": 0.6,
    }  # fmt: skip
    ours = vitkit.create_model(TINY, **SMALL, **rates).spec
    theirs = timm.create_model(TINY, **SMALL, **rates)
    block = theirs.blocks[-1]
    assert (ours.head_dropout, ours.position_dropout) == (theirs.head_drop.p, theirs.pos_drop.p)
    assert ours.patch_dropout == theirs.patch_drop.prob
    assert (ours.projection_dropout, ours.mlp_dropout) == (
        block.attn.proj_drop.p,
        block.mlp.drop1.p,
    )
    assert ours.attention_dropout == block.attn.attn_drop.p
    assert ours.drop_path == pytest.approx(block.drop_path1.drop_prob)


def test_initial_weights_by_timm_s_names():
    model = vitkit.create_model(TINY, **SMALL, weight_init="jax_nlhb", num_classes=10)
    theirs = timm.create_model(TINY, **SMALL, weight_init="jax_nlhb", num_classes=10)
    assert torch.equal(model.head.bias, theirs.head.bias)
    assert model.head.bias[0].item() == pytest.approx(-math.log(10))
    assert vitkit.create_model(TINY, **SMALL, weight_init="").spec.initialisation == "timm"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"img_size": 32, "image_size": 32}, "img_size and image_size both decide image_size"),
        ({"embed_dim": 96, "width": 96}, "embed_dim and width both decide width"),
        ({"mlp_ratio": 4, "mlp_width": 9}, "mlp_ratio and mlp_width both decide mlp_width"),
        ({"global_pool": "avg", "pooling": "mean"}, "global_pool and pooling both decide pooling"),
        ({"pool_include_prefix": True, "pooling": "cls"}, "prefix and pooling both decide pool"),
        ({"fc_norm": True, "use_fc_norm": True}, "fc_norm and use_fc_norm both decide norm_bef"),
        ({"proj_drop_rate": 0.1, "mlp_dropout": 0.1}, "proj_drop_rate and mlp_dropout both decide"),
        ({"global_pool": "max"}, "global_pool='max' does not exist in vitkit; it has 'token', 'a"),
        ({"global_pool": ""}, "it has 'token', 'avg', 'map'; all tokens are those of model.forw"),
        ({"norm_layer": nn.LayerNorm}, "norm_layer=.*LayerNorm.* it has 'layernorm', 'rmsnorm'"),
        ({"proj_bias": False}, "proj_bias=False: only proj_bias=True exists in vitkit"),
        ({"embed_dim": "96"}, "width = '96': must be a whole number"),
        ({"mlp_ratio": "4"}, "mlp_ratio='4': must be a number above 0"),
        ({"mlp_ratio": math.inf}, "mlp_ratio=inf: must be a number above 0"),
        ({"mlp_ratio": math.nan}, "mlp_ratio=nan: must be a number above 0"),
        ({"checkpoint_path": "x.pth"}, "checkpoint_path does not exist in vitkit; pass pretrained"),
        ({"embed_dimm": 96}, "no field 'embed_dimm'"),
        ({"class_token": False}, "pooling 'cls' needs class_token=True"),
    ],
)
def test_clashes_and_unknown_values_are_refused(keywords, message):
    with pytest.raises(SpecError, match=message):
        vitkit.create_model(TINY, **keywords)


def test_numpy_s_numbers_are_sizes_too():
    found = vitkit.create_model(TINY, **SMALL, embed_dim=np.int64(96), mlp_ratio=np.float32(2))
    assert (found.spec.width, found.spec.mlp_width) == (96, 192)


def test_none_is_as_not_given():
    keywords = {"init_values": None, "act_layer": None, "fc_norm": None, "global_pool": None}
    named = vitkit.create_model("deit3_small_patch16_224", depth=1, **keywords)
    assert named.spec == vitkit.create_model("deit3_small_patch16_224", depth=1).spec


def test_a_spec_names_its_own_field_for_timm_s():
    for name, field in (("embed_dim", "width"), ("global_pool", "pooling"), ("in_chans", "in_ch")):
        with pytest.raises(SpecError, match=rf"no field '{name}' \(did you mean '{field}"):
            vitkit.ViTSpec(**{name: 1})
        with pytest.raises(SpecError, match=rf"no field '{name}' \(did you mean '{field}"):
            vitkit.ViTSpec.from_json({name: 1})


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        (TINY, [(7, None), (3, "avg"), (0, None), (5, "token")]),
        (TINY, [(4, "avg")]),
        ("deit_tiny_distilled_patch16_224", [(6, None)]),
        ("vit_base_patch16_siglip_224", [(3, None), (2, "avg")]),
    ],
)
@torch.inference_mode()
def test_a_head_is_reset_as_timm_does_it(name, calls, tmp_path):
    ours = vitkit.create_model(name, **SMALL).eval()
    theirs = timm.create_model(name, **SMALL).eval()
    images = torch.randn(2, 3, 32, 32)
    for call in calls:
        ours.reset_classifier(*call)
        # timm's distilled class takes no pooling but its own
        theirs.reset_classifier(*call if call[1] else call[:1])
        fill_with_noise(ours)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        assert relative(ours(images), theirs(images)) <= TOLERANCE
        assert ours.num_classes == call[0]
        assert ours.get_classifier() is ours.head
        path = vitkit.save(
            tmp_path / "m.safetensors", ours, preprocess=vitkit.Preprocess(image_size=32)
        )
        again = vitkit.load(path).model
        assert again.spec == ours.spec
        assert torch.equal(again(images), ours(images))


def test_a_reset_head_is_where_and_what_the_model_is():
    model = vitkit.create_model(TINY, **SMALL, initialisation="timm", head_bias=-2.0)
    model.double().eval().requires_grad_(False)
    torch.manual_seed(3)
    model.reset_classifier(9)
    assert model.head.weight.dtype == torch.float64
    assert not model.head.training
    assert model.head.weight.requires_grad
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.head.bias.unique().tolist() == [-2.0]
    model.head = nn.Linear(192, 4)
    assert model.num_classes == 4


def test_poolings_that_a_model_cannot_have():
    model = vitkit.create_model(TINY, **SMALL)
    with pytest.raises(SpecError, match=r"global_pool 'map': .*; pass token or avg"):
        model.reset_classifier(2, "map")
    with pytest.raises(SpecError, match="num_classes = -1: must be 0 or more"):
        model.reset_classifier(-1)
    wide = vitkit.create_model(TINY, **SMALL, pooling="cls_mean", norm_before_pool=False)
    with pytest.raises(SpecError, match="made for 'cls_mean', which is 384 wide"):
        wide.reset_classifier(2, "avg")
    assert (wide.spec.pooling, wide.num_features) == ("cls_mean", 384)


@pytest.mark.parametrize(
    "images",
    [
        vitkit.Preprocess(image_size=32, crop_ratio=0.8),
        vitkit.Preprocess(image_size=32, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225),
                          fit="squash", interpolation="bilinear"),
    ],
)  # fmt: skip
def test_timm_builds_its_transform_from_our_model(tmp_path, images):
    create_transform, resolve = peer("timm.data", "create_transform", "resolve_model_data_config")
    path = vitkit.save(
        tmp_path / "m.safetensors", vitkit.create_model(TINY, **SMALL), preprocess=images,
        classes=list(map(str, range(1000))), licence="mit",
    )  # fmt: skip
    model = vitkit.load(path).model
    config = resolve(model)
    assert config["input_size"] == (3, 32, 32)
    assert config["mean"] == images.mean
    assert config["std"] == images.std
    assert config["interpolation"] == images.interpolation
    resize = create_transform(**config).transforms[0].size
    assert resize == ((32, 32) if images.fit == "squash" else 40)
    assert model.pretrained_cfg["label_names"][:2] == ["0", "1"]
    assert model.pretrained_cfg["license"] == "mit"
    assert model.pretrained_cfg["source"] == str(path)
    model.reset_classifier(3)
    assert "label_names" not in model.pretrained_cfg
    assert model.pretrained_cfg["num_classes"] == 3

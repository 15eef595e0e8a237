"""What the fields of a spec do: stems, tokens, blocks, readouts, initial weights."""

import copy
import math
import pickle

import pytest
import torch
from noise import fill_with_noise
from torch import nn

import vitkit
from vitkit import SettingError, SpecError

SMALL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "num_heads": 4,
         "mlp_width": 64, "num_classes": 7}  # fmt: skip
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def small(backbone: nn.Module | None = None, **overrides: object) -> vitkit.ViT:
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL | overrides), backbone=backbone).eval()
    fill_with_noise(model, std=0.2)
    return model


def test_a_distilled_model_answers_with_both_heads_or_with_one():
    both = small(distillation_token=True)
    features = both.forward_features(IMAGES)
    cls, distillation = both.forward_heads(features)
    torch.testing.assert_close(both(IMAGES), (cls + distillation) / 2)
    torch.testing.assert_close(cls, both.head(features.cls))
    torch.testing.assert_close(distillation, both.head_dist(features.distillation))
    alone = small(distillation_token=True, distilled_readout="cls")
    alone.load_state_dict(both.state_dict())
    torch.testing.assert_close(alone(IMAGES), cls)
    with pytest.raises(SettingError, match="distillation_token=True"):
        small().forward_heads(small().forward_features(IMAGES))


def test_features_are_taken_apart_in_order_and_put_together_again():
    model = small(distillation_token=True, num_registers=3)
    record = vitkit.Record(tokens=[-1])
    features = model.forward_features(IMAGES, record)
    normed = model.norm(record.tokens[1])
    assert torch.equal(features.cls, normed[:, 0])
    assert torch.equal(features.distillation, normed[:, 1])
    assert torch.equal(features.registers, normed[:, 2:5])
    assert torch.equal(features.patches, normed[:, 5:])
    assert torch.equal(features.all_tokens(), normed)
    assert features.grid == (4, 4)
    assert model.prefix_tokens(features.patches).shape == (1, 5, 32)


def test_every_pooling_is_what_its_name_says():
    for pooling, expected in {
        "cls": lambda f: f.cls,
        "mean": lambda f: f.patches.mean(1),
        "mean_all": lambda f: torch.cat([f.cls[:, None], f.registers, f.patches], 1).mean(1),
        "cls_mean": lambda f: torch.cat([f.cls, f.patches.mean(1)], 1),
    }.items():
        model = small(pooling=pooling, num_registers=2)
        features = model.forward_features(IMAGES)
        torch.testing.assert_close(model.pooled(features), expected(features))
        torch.testing.assert_close(model(IMAGES), model.head(expected(features)))
    headless = small(pooling="cls_mean", num_classes=0)
    assert headless(IMAGES).shape == (2, 64)


def test_a_representation_is_a_tanh_layer_before_the_head():
    model = small(representation_width=48)
    represented = model.pre_logits.fc(model.forward_features(IMAGES).cls).tanh()
    torch.testing.assert_close(model(IMAGES), model.head(represented))
    assert model.head.in_features == 48
    spec = vitkit.ViTSpec(**SMALL, head_bias=-math.log(7), distillation_token=True)
    with_bias = vitkit.ViT(spec)
    assert with_bias.head.bias.tolist() == pytest.approx([-math.log(7)] * 7)
    assert with_bias.head_dist.bias.tolist() == pytest.approx([-math.log(7)] * 7)
    scaled = vitkit.ViT(vitkit.ViTSpec(**SMALL, layer_scale=0.1))
    assert scaled.blocks[1].ls2.gamma.tolist() == pytest.approx([0.1] * 32)


def test_blocks_put_their_norms_where_they_say():
    for block, expected in {
        "post_norm": lambda b, z: b.norm2((y := b.norm1(z + b.attn(z))) + b.mlp(y)),
        "res_post_norm": lambda b, z: (y := z + b.norm1(b.attn(z))) + b.norm2(b.mlp(y)),
        "pre_norm": lambda b, z: (y := z + b.attn(b.norm1(z))) + b.mlp(b.norm2(y)),
    }.items():
        encoder = vitkit.Encoder(32, 1, 4, 64, block=block).eval()
        fill_with_noise(encoder, std=0.3)
        z = torch.randn(2, 5, 32)
        torch.testing.assert_close(encoder(z), encoder.norm(expected(encoder.blocks[0], z)))
    with pytest.raises(SpecError, match="activation 'gelu' is none of silu"):
        vitkit.Encoder(32, 1, 4, 64, mlp="swiglu_packed")
    with pytest.raises(SpecError, match=r"block 'prenorm' is none of .* .did you mean 'pre_norm'"):
        vitkit.Encoder(32, 1, 4, 64, block="prenorm")


def test_stochastic_depth_rises_or_is_constant():
    rates = [b.drop_path1.rate for b in small(depth=3, drop_path=0.4).blocks]
    assert rates == pytest.approx([0.0, 0.2, 0.4])
    assert small(depth=1, drop_path=0.4).blocks[0].drop_path1.rate == 0.4, "it is the last one"
    constant = small(depth=3, drop_path=0.4, drop_path_schedule="constant")
    assert [b.drop_path2.rate for b in constant.blocks] == pytest.approx([0.4] * 3)


def test_a_block_that_always_drops_its_branches_returns_its_tokens():
    """A rate of 1 would divide 0 by 0."""
    block = vitkit.EncoderBlock(8, 2, 16, drop_path=1.0).train()
    tokens = torch.randn(3, 5, 8)
    assert torch.equal(block(tokens), tokens)


class Tiny(nn.Module):
    """A map of a quarter of the size, with weights that must not change."""

    def __init__(self, channels: int = 5, stride: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, stride, stride)
        self.conv.weight.data.fill_(0.25)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.conv(images)


def test_any_network_s_map_can_be_cut_into_patches():
    backbone = Tiny().train()
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL, stem="backbone"), backbone=backbone)
    assert backbone.training
    assert (backbone.conv.weight == 0.25).all()
    assert model.patch_embed.proj.weight.shape == (32, 5, 2, 2)
    cells = backbone(IMAGES)[:, :, 2:4, 6:8]
    expected = (cells.unsqueeze(1) * model.patch_embed.proj.weight).sum((2, 3, 4))
    token = model.patch_embed(IMAGES)[:, 4 + 3] - model.patch_embed.proj.bias
    torch.testing.assert_close(token, expected)
    assert model(torch.randn(1, 3, 48, 16)).shape == (1, 7)


def test_a_backbone_that_does_not_fit_is_refused():
    spec = vitkit.ViTSpec(**SMALL, stem="backbone")
    with pytest.raises(SpecError, match="patch_size 8 is not a multiple of 16 pixels"):
        vitkit.ViT(spec, backbone=Tiny(stride=16))
    with pytest.raises(SpecError, match=r"needs a network; pass ViT\(spec, backbone="):
        vitkit.ViT(spec)
    with pytest.raises(SpecError, match="stem 'convolution' takes no backbone"):
        vitkit.ViT(vitkit.ViTSpec(**SMALL), backbone=Tiny())
    with pytest.raises(SpecError, match="one map"):
        vitkit.ViT(spec, backbone=nn.Flatten())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions": "rope", "width": 30, "num_heads": 5}, "head width divisible by 4, not 6"),
        ({"positions": "sincos_2d", "width": 30, "num_heads": 5}, "by 4, not 30; .* 28 or 32"),
        ({"mlp": "swiglu_packed"}, "has a silu gate, and activation is 'gelu'"),
        ({"stem": "resnet", "resnet_layers": (3, 4, 9)}, "patch_size 8 .* by 16.* nearest is 16"),
        ({"resnet_layers": (3,)}, r"resnet_layers \(3,\) needs stem 'resnet', not 'convolution'"),
        ({"stem": "resnet", "resnet_layers": (1,) * 5}, "5 stages; a published ResNet has 0 to 4"),
        ({"stem": "resnet", "resnet_variant": "jeonsworld"}, "jeonsworld ResNet has 2 to 4"),
        ({"stem": "resnet", "resnet_variant": "tim"}, r"must be .* .did you mean 'timm'\?"),
        ({"stem": "resnet", "resnet_layers": (3, 0, 9)}, "resnet_layers = 0: must be 1 or more"),
        ({"resnet_variant": "timm"}, "resnet_variant 'timm' needs stem 'resnet'"),
        ({"stem": "resnet", "image_size": 60, "patch_size": 6}, "nearest is 4 or 8"),
        ({"rope_temperature": 50.0}, "rope_temperature 50 has no effect with positions 'learned'"),
        ({"distilled_readout": "cls"}, "needs distillation_token=True"),
        ({"distillation_token": True, "pooling": "mean"}, "pooling 'cls', not .*'mean'"),
        ({"distillation_token": True, "class_token": False, "pooling": "mean"}, "class_token=True"),
        ({"class_token": False, "pooling": "cls_mean"}, "pooling 'cls_mean' needs class_token"),
        ({"qkv_bias": "key"}, "qkv_bias"),
        ({"layer_scale": 0.0}, "layer_scale = 0.0: must be above 0"),
        ({"num_registers": -1}, "num_registers = -1"),
        ({"patch_dropout": 1.0}, "patch_dropout = 1.0: must be below 1"),
        ({"block": "sandwich"}, "block = 'sandwich'"),
    ],
)
def test_contradictions_are_refused_with_the_numbers(fields, message):
    with pytest.raises(SpecError, match=message):
        vitkit.ViTSpec(**SMALL | fields)


def test_initial_weights_by_name():
    wide = {"width": 128, "num_heads": 2, "mlp_width": 512, "num_registers": 2}

    def made(how: str) -> vitkit.ViT:
        torch.manual_seed(0)
        return vitkit.ViT(vitkit.ViTSpec(**SMALL | wide, initialisation=how))

    for how, std in {"jax": math.sqrt(2 / 256), "xavier_normal": math.sqrt(2 / 256),
                     "xavier_uniform": math.sqrt(2 / 256), "timm": 0.02}.items():  # fmt: skip
        model = made(how)
        for part in model.blocks[0].attn.qkv.weight.chunk(3):
            assert part.std().item() == pytest.approx(std, rel=0.05), how
        assert model.reg_token.std().item() == pytest.approx(0.02, rel=0.2)
        assert (model.head.weight.abs().max() == 0) == (how == "jax")
    uniform, normal = (made(how).blocks[0].attn.qkv.weight for how in ("jax", "xavier_normal"))
    bound = math.sqrt(6 / 256)
    assert uniform.abs().max() <= bound < normal.abs().max()
    assert made("xavier_normal").pos_embed.std().item() == pytest.approx(0.02, rel=0.1)
    assert made("xavier_uniform").blocks[0].mlp.fc1.bias.std().item() == pytest.approx(
        1e-6, rel=0.2
    )


def test_mimetic_attention_looks_at_itself_and_takes_itself_away():
    torch.manual_seed(0)
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL | {"width": 128, "num_heads": 2},
                                      initialisation="mimetic"))  # fmt: skip
    attention = model.blocks[1].attn
    query, key, value = attention.qkv.weight.detach().chunk(3)
    scores = query[:64].T @ key[:64]  # of rank 64: the greater half of a spectrum around 0.7
    assert scores.diagonal().mean() > 0.4
    mixed = value.T @ attention.proj.weight.T
    assert mixed.diagonal().mean().item() == pytest.approx(-0.4, abs=0.05)
    off = mixed[~torch.eye(128, dtype=torch.bool)]
    assert off.std().item() == pytest.approx(0.4 / math.sqrt(128), rel=0.05)
    assert model.pos_embed[0, 1:].abs().max().item() == pytest.approx(1.0, abs=1e-3)


def test_a_copy_computes_the_same_and_is_its_own():
    model = small(distillation_token=True, layer_scale=0.1, num_registers=1)
    twin = copy.deepcopy(model)
    assert torch.equal(pickle.loads(pickle.dumps(model))(IMAGES), model(IMAGES))
    fill_with_noise(model, seed=9)
    assert not torch.equal(model(IMAGES), twin(IMAGES))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(IMAGES), twin(IMAGES))

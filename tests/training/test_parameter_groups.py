"""Parameter groups for an optimizer, layer-wise learning rate decay, and freezing."""

from __future__ import annotations

import pytest
import torch
from noise import fill_with_noise

import vitkit
from vitkit import SettingError
from vitkit.training.optimization.optimizers import make_optimizer
from vitkit.training.optimization.parameters import parameter_groups


def small(**fields: object) -> vitkit.ViT:
    spec = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 3, "num_heads": 2,
            "mlp_width": 32, "num_classes": 5}  # fmt: skip
    return vitkit.ViT(vitkit.ViTSpec(**spec | fields))


def test_layer_decay_slows_the_early_layers():
    model = small(distillation_token=True, num_registers=2, layer_scale=0.1, embedding_norm=True)
    groups = vitkit.parameter_groups(model, lr=1.0, weight_decay=0.3, layer_decay=0.5)
    of = {id(p): group for group in groups for p in group["params"]}
    assert len(of) == len(list(model.parameters()))

    def group(name: str) -> dict:
        return of[id(model.get_parameter(name))]

    for name, rate in {
        "cls_token": 0.5**4, "reg_token": 0.5**4, "pos_embed": 0.5**4, "norm_pre.weight": 0.5**4,
        "patch_embed.proj.weight": 0.5**4, "blocks.0.attn.qkv.weight": 0.5**3,
        "blocks.2.mlp.fc1.bias": 0.5, "norm.weight": 1.0, "head_dist.weight": 1.0,
    }.items():  # fmt: skip
        assert group(name)["lr"] == pytest.approx(rate), name
        assert group(name)["lr_scale"] == group(name)["lr"]
    for name in ("cls_token", "dist_token", "reg_token", "pos_embed", "blocks.1.ls1.gamma",
                 "blocks.1.norm1.weight", "head.bias"):  # fmt: skip
        assert group(name)["weight_decay"] == 0.0, name
    for name in ("patch_embed.proj.weight", "blocks.1.mlp.fc2.weight", "head.weight"):
        assert group(name)["weight_decay"] == 0.3, name
    torch.optim.AdamW(groups).step()


def test_without_layer_decay_there_are_two_groups():
    first, second = vitkit.parameter_groups(small(), lr=0.1, weight_decay=0.3)
    assert (first["weight_decay"], second["weight_decay"]) == (0.3, 0.0)
    with pytest.raises(SettingError, match=r"layer_decay 1\.5 must lie in \(0, 1\]"):
        vitkit.parameter_groups(small(), lr=0.1, weight_decay=0.3, layer_decay=1.5)


def test_frozen_parameters_stay_and_get_no_group():
    model = small()
    fill_with_noise(model)
    frozen = vitkit.freeze(model, "head", blocks=2)
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight", "head.bias"} <= set(frozen)
    assert not any(name.startswith(("blocks.2", "norm")) for name in frozen)
    groups = vitkit.parameter_groups(model, lr=0.5, weight_decay=0.1)
    taken = {id(p) for group in groups for p in group["params"]}
    assert taken == {id(p) for p in model.parameters() if p.requires_grad}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(groups)
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        if name in frozen:
            assert torch.equal(value, before[name]), name
    assert not torch.equal(model.norm.weight, before["norm.weight"])


def test_freezing_takes_patterns_and_refuses_what_fits_nothing():
    model = small()
    assert vitkit.freeze(model, "blocks.*.attn.qkv") == [
        f"blocks.{layer}.attn.qkv.{kind}" for layer in range(3) for kind in ("weight", "bias")
    ]
    with pytest.raises(SettingError, match=r"no parameter is named 'patch_embd' .did you mean"):
        vitkit.freeze(model, "patch_embd")
    with pytest.raises(SettingError, match=r"^blocks = 4: the model has 3 blocks; pass 0 to 3"):
        vitkit.freeze(model, blocks=4)


def test_the_backbone_is_everything_but_the_head():
    model = small(distillation_token=True)
    frozen = vitkit.freeze(model, "backbone")
    left = [name for name, p in model.named_parameters() if p.requires_grad]
    assert left == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]
    assert sorted([*frozen, *left]) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("pattern", "message"),
    {
        "bakbone": "'bakbone' .did you mean 'backbone'\\?.; the model has backbone, cls_token, ",
        "blocks.9": "'blocks.9'; the model has .*, blocks.0 to blocks.2, norm, head$",
        "block.1": "did you mean 'blocks.1'",
        "blocks.2.atn": "did you mean 'blocks.2.attn'",
        "blocks.*.mpl": r"did you mean 'blocks\.\*\.mlp'",
    }.items(),
)
def test_a_part_that_is_not_there_is_likened_to_those_that_are(pattern, message):
    with pytest.raises(SettingError, match=message):
        vitkit.freeze(small(), pattern)


def test_biases_norms_tokens_and_positions_do_not_decay():
    model = vitkit.create_model("vit_tiny_patch16_224", depth=1, num_classes=2)
    decayed, free = parameter_groups(model, lr=0.5, weight_decay=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "head.weight",
    }  # fmt: skip
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(free["params"]) == len(names)
    optimizer = make_optimizer(model, "adamw", lr=0.5, weight_decay=0.1, betas=(0.9, 0.999))
    with torch.no_grad():
        model.head.weight.fill_(1.0)
        model.norm.weight.fill_(1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model.head.weight, torch.tensor(1 - 0.5 * 0.1))
    assert torch.equal(model.norm.weight, torch.ones_like(model.norm.weight))

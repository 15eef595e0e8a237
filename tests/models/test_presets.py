"""Named models: the table's figures are what is built, and what timm builds by the same names."""

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import peer
from torch import nn
from torch.overrides import TorchFunctionMode

import vitkit
from vitkit import SettingError, SpecError
from vitkit.models.presets import preset, table

timm = peer("timm")
ROOT = Path(__file__).parents[2]
THEIRS = set(table()) & set(timm.list_models())
WITH_A_HEAD_HERE = {  # timm's default weights of these have none
    "vit_base_r50_s16_224", "vit_huge_patch14_224", "vit_large_patch32_224", "vit_small_patch8_224",
}  # fmt: skip
PUBLISHED = {
    "vit_tiny_patch16_224": 5_717_416, "vit_small_patch16_224": 22_050_664,
    "vit_base_patch16_224": 86_567_656, "vit_base_patch32_224": 88_224_232,
    "vit_large_patch16_224": 304_326_632, "vit_large_patch32_224": 306_535_400,
    "vit_huge_patch14_224": 632_045_800, "vit_base_r50_s16_384": 98_950_952,
    "vit_cifar_patch4_32": 8_470_026,
}  # fmt: skip
FILLING = {"uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"}


class Unfilled(TorchFunctionMode):
    """Leaves out what fills tensors: on the meta device it has no effect and takes most time."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        inside = {"tensor": args[0]} if args else kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return inside["tensor"]
        if getattr(function, "__name__", "") in FILLING:
            return args[0]
        return function(*args, **(kwargs or {}))


def on_meta(make: Callable[..., nn.Module], name: str, **settings: Any) -> nn.Module:
    with torch.device("meta"), Unfilled():
        return make(name, **settings)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "name", [*list(table())[::4], *(pytest.param(name, marks=pytest.mark.soak)
                                    for n, name in enumerate(table()) if n % 4)]
)  # fmt: skip
def test_the_model_is_what_its_line_says_and_what_timm_builds(name):
    ours = on_meta(vitkit.create_model, name)
    assert count(ours) == table()[name].parameters
    written = json.loads(json.dumps(ours.spec.to_json()))
    assert vitkit.ViTSpec.from_json(written) == ours.spec == preset(name)
    if name in THEIRS:
        same_as_timm(name, ours)


def same_as_timm(name: str, ours: vitkit.ViT) -> None:
    classes = {"num_classes": 1000} if name in WITH_A_HEAD_HERE else {}
    theirs = on_meta(timm.create_model, name, **classes)
    assert count(ours) == count(theirs)
    assert ours.spec.num_classes == theirs.num_classes
    assert ours.spec.image_size == theirs.patch_embed.img_size
    same_numbers(ours, theirs)
    assert shapes(ours) == shapes(theirs)


def same_numbers(ours: vitkit.ViT, theirs: nn.Module) -> None:
    """What parameters and their names do not say."""
    spec, block, line = ours.spec, theirs.blocks[0], torch.linspace(-3, 3, 50)
    assert {"cls": "token", "mean": "avg", "map": "map"}[spec.pooling] == theirs.global_pool
    assert spec.num_heads == block.attn.num_heads
    assert epsilons(ours) == epsilons(theirs)
    assert (spec.block == "res_post_norm") == (type(block).__name__ == "ResPostBlock")
    if spec.block == "pre_norm":
        scale = getattr(block, "ls1", block)
        assert spec.layer_scale == getattr(scale, "init_values", None)
    assert torch.equal(ours.blocks[0].mlp.act(line), block.mlp.act(line))


def epsilons(model: nn.Module) -> set[tuple[str, float]]:
    kinds = ((type(part).__name__, part) for part in model.modules())
    return {(kind[0], part.eps) for kind, part in kinds if "Norm" in kind and hasattr(part, "eps")}


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The state dict's, by the keys of most; timm's class `Eva`, DINOv3's, has others."""
    found = {}
    for key, value in model.state_dict().items():
        key = re.sub(r"gamma_([12])$", r"ls\1.gamma", key)
        key = re.sub(r"attn\.([qv]_bias)$", r"attn.qkv.\1", key)
        found[key] = tuple(value.shape)
    return found


def test_most_names_are_timm_s_and_only_four_differ_in_their_classes():
    assert len(THEIRS) >= 170
    assert THEIRS >= WITH_A_HEAD_HERE
    for name in WITH_A_HEAD_HERE:
        assert on_meta(timm.create_model, name).num_classes == 0


def test_published_figures():
    assert {name: table()[name].parameters for name in PUBLISHED} == PUBLISHED


def test_a_field_can_be_overridden():
    assert count(on_meta(vitkit.create_model, "vit_base_patch16_224", qkv_bias=False)) == 86_540_008
    with pytest.raises(SpecError, match=r"no field 'num_clases' .did you mean 'num_classes'"):
        vitkit.create_model("vit_base_patch16_224", num_clases=3)


def test_names_are_unique_and_sorted_and_every_line_says_where_it_is_from():
    names = vitkit.list_models()
    assert names == sorted(set(names))
    assert set(names) == set(table())
    assert all(entry.source and entry.family for entry in table().values())


def test_an_unknown_name_gets_the_nearest_three():
    near = r"no model 'vit_base_patch16_223' .did you mean 'vit_base_patch16_224' or '.* or '"
    with pytest.raises(SettingError, match=near):
        vitkit.create_model("vit_base_patch16_223")


def test_the_document_agrees_with_the_table():
    page = runpy.run_path(str(ROOT / "scripts" / "models_table.py"))["page"]
    assert (ROOT / "docs/models.md").read_text() == page(), "run scripts/models_table.py"

"""Names that a reader of a notebook or a user of another library types."""

import re

import pytest
import torch

import vitkit
from vitkit import cli
from vitkit.other_names import AMBIGUOUS, CLASSES, KEYWORDS, TIMM_KEYWORDS, TRANSFORMER, usual_name

TINY = {"image_size": 32, "patch_size": 16, "depth": 1, "num_classes": 5}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_vit_without_arguments_is_the_base_model():
    with torch.device("meta"):
        model = vitkit.ViT()
    assert count(model) == 86_567_656
    assert model.spec == vitkit.create_model("vit_base_patch16_224", depth=12).spec


def test_the_call_of_the_distillation_notebook_works():
    with torch.device("meta"):
        model = vitkit.ViT(
            image_size=256, patch_size=32, num_classes=1000, dim=1024, depth=6, heads=16,
            mlp_dim=2048, dropout=0.1, emb_dropout=0.2,
        )  # fmt: skip
    spec = model.spec
    assert (spec.image_size, spec.patch_size) == ((256, 256), (32, 32))
    assert (spec.width, spec.depth, spec.num_heads, spec.mlp_width) == (1024, 6, 16, 2048)
    assert (spec.attention_dropout, spec.projection_dropout, spec.mlp_dropout) == (0.1,) * 3
    assert spec.position_dropout == 0.2
    assert spec.head_dropout == 0.0


@pytest.mark.parametrize("name", ["ViT-B/16", "vit_b16", "vit_b_16", "ViT-B_16", "B/16", "vitb16"])
def test_short_names_of_the_base_model(name):
    short = vitkit.create_model(name, width=24, num_heads=3, mlp_width=24, **TINY).spec
    usual = "vit_base_patch16_224"
    assert short == vitkit.create_model(usual, width=24, num_heads=3, mlp_width=24, **TINY).spec


@pytest.mark.parametrize(("verb", "known"), [("summary", "86,567,656"), ("models", "86.57 M")])
def test_the_command_line_takes_short_names(verb, known, capsys):
    assert cli.run([verb, "ViT-B/16"]) == 0
    assert known in capsys.readouterr().out


def test_other_sizes_of_the_papers():
    names = vitkit.list_models()
    assert usual_name("ViT-L_16-384", names) == "vit_large_patch16_384"
    assert usual_name("vit_ti_16", names) == "vit_tiny_patch16_224"
    assert usual_name("ViT-H/14", names) == "vit_huge_patch14_224"
    assert usual_name("B/17", names) == "B/17", "there is no such model"
    assert [usual_name(name, names) for name in names] == names


def test_a_name_of_two_models_is_answered_with_both():
    with pytest.raises(vitkit.SettingError, match=r"8\.47 M.*'vit_tiny_patch16_224' for timm's"):
        vitkit.create_model("vit_tiny")
    for answer in AMBIGUOUS.values():
        assert set(re.findall(r"'(\w+)'", answer)) <= set(vitkit.list_models())


VALUES = {
    "activation": "relu", "pooling": "mean", "norm_eps": 1e-3, "image_size": (48, 48),
    "in_channels": 1, "width": 24, "num_heads": 6, "head_width": 8, "mlp_width": 24, "depth": 2,
    "num_classes": 7,
}  # fmt: skip


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_of_elsewhere_sets_its_fields(keyword):
    fields = KEYWORDS[keyword]
    value = VALUES.get(fields[0], 0.25)
    sizes = TINY | {"width": 12, "num_heads": 3, "mlp_width": 12}
    given = {name: size for name, size in sizes.items() if name not in fields}
    for model in (
        vitkit.ViT(**given, **{keyword: value}),
        vitkit.create_model("vit_tiny_patch16_224", **given, **{keyword: value}),
    ):
        assert [getattr(model.spec, field) for field in fields] == [value] * len(fields)


def test_two_names_of_one_field_are_refused():
    with pytest.raises(vitkit.SpecError, match="dim and width both decide width; pass one"):
        vitkit.ViT(dim=192, width=192)
    with pytest.raises(vitkit.SpecError, match="mlp_dropout and hidden_dropout_prob both decide"):
        vitkit.create_model("vit_tiny_patch16_224", mlp_dropout=0.1, hidden_dropout_prob=0.1)


def test_a_spec_answers_with_its_own_name():
    with pytest.raises(vitkit.SpecError, match=r"no field 'dim'.*'width'"):
        vitkit.ViTSpec(dim=192)
    with pytest.raises(vitkit.SpecError, match=r"no field 'drop_rate'.*'head_dropout'"):
        vitkit.ViTSpec(drop_rate=0.1)


def test_every_keyword_leads_to_fields_that_exist():
    fields = set(vitkit.ViTSpec().to_json())
    assert {field for names in KEYWORDS.values() for field in names} <= fields
    assert not set(KEYWORDS) & fields, "a field is its own name"
    assert not set(KEYWORDS) & set(TIMM_KEYWORDS)


def test_a_transformer_answers_with_its_own_names():
    with pytest.raises(TypeError, match=r"no argument 'num_encoder_layers'; write encoder_depth="):
        vitkit.Transformer(num_encoder_layers=2)
    with pytest.raises(TypeError, match=r"no argument 'colour'$"):
        vitkit.Transformer(colour=2)
    for argument in TRANSFORMER.values():
        with torch.device("meta"):
            vitkit.Transformer(**{argument: 1e-5 if argument == "norm_eps" else 8})


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_elsewhere_is_answered_with_one_that_exists(name):
    with pytest.raises(AttributeError, match="write vitkit") as caught:
        getattr(vitkit, name)
    for expression in str(caught.value).partition("; write ")[2].split(" or "):
        parent: object = vitkit
        for part in expression.removeprefix("vitkit.").partition("(")[0].split("."):
            parent = getattr(parent, part)
        assert callable(parent)


def test_an_unknown_attribute_has_no_hint():
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        vitkit.nothing  # noqa: B018

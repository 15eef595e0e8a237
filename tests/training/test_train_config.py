"""Settings: their sections, order and ranges, and what YAML may not do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.errors import SettingError
from vitkit.frozen import field_names
from vitkit.training.config.merging import layered
from vitkit.training.config.sections.optimizer import OptimizerSettings
from vitkit.training.config.train_config import SECTIONS, TrainConfig
from vitkit.training.config.yaml_files import read_yaml, to_yaml
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.recipes import RECIPES, recipe_settings


def test_sections_share_no_field_and_give_the_order_of_the_settings():
    names = [name for section in SECTIONS for name in section.__annotations__]
    assert names == field_names(TrainConfig)
    assert len(set(names)) == len(names)
    assert next(iter(TrainConfig(data="digits").to_json())) == "data"
    for section in SECTIONS:
        assert section.__doc__


def test_a_section_alone_is_validated_like_the_whole():
    settings = OptimizerSettings(opt="SGD", lr=0.1)
    model = torch.nn.Linear(2, 2)
    assert isinstance(configured_optimizer(model, settings), torch.optim.SGD)
    with pytest.raises(SettingError, match="lr = -1: must be above 0"):
        OptimizerSettings(lr=-1)


def test_later_layers_win_and_specs_merge_field_by_field():
    merged = layered(
        {"data": "digits", "lr": 1e-3, "spec": {"width": 64, "depth": 4}},
        {"lr": 2e-3},
        {"spec": {"patch_size": 4}},
    )
    assert merged.pop("model") == TrainConfig.model
    assert merged == {
        "data": "digits", "lr": 2e-3, "spec": {"width": 64, "depth": 4, "patch_size": 4}
    }  # fmt: skip


def test_naming_another_model_drops_the_spec_written_for_the_first():
    recipe = {"model": "vit_tiny_patch16_224", "spec": {"width": 64}}
    assert layered(recipe, {"model": "vit_base_patch16_224"})["spec"] == {}
    assert layered(recipe, {"model": "vit_tiny_patch16_224"})["spec"] == {"width": 64}


@pytest.mark.parametrize(
    ("earlier", "later", "image_size", "drop_path"),
    [
        ({"spec": {"image_size": 8}}, {"img_size": 16}, (16, 16), 0.0),
        ({"img_size": 16}, {"spec": {"image_size": 8}}, (8, 8), 0.0),
        ({"spec": {"image_size": 8}}, {"progressive": (8, 16)}, (16, 16), 0.0),
        ({"progressive": (8, 16)}, {"img_size": 24}, (24, 24), 0.0),
        ({"spec": {"drop_path": 0.1, "image_size": 8}}, {"drop_path": 0.0}, (8, 8), 0.0),
        ({"drop_path": 0.1}, {"spec": {"drop_path": 0.2, "image_size": 8}}, (8, 8), 0.2),
    ],
)
def test_a_short_name_wins_over_the_long_one_of_an_earlier_layer(
    earlier, later, image_size, drop_path, tmp_path
):
    small = {"patch_size": 4, "width": 32, "depth": 1, "num_heads": 2}
    kept = layered({"data": "digits", "spec": small}, earlier, later)
    result = vitkit.train(
        **kept, epochs=2, max_steps=1, warmup_epochs=0.5, amp="off", quiet=True,
        output=str(tmp_path / "run"),
    )  # fmt: skip
    spec = vitkit.load(result.last).model.spec
    assert (spec.image_size, spec.drop_path, spec.patch_size) == (image_size, drop_path, (4, 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr = -1.0"),
        ({"lr": 0}, "lr = 0"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"epochs": 0}, "epochs = 0"),
        ({"batch_size": -4}, "batch_size = -4"),
        ({"label_smoothing": 1.0}, "label_smoothing = 1.0"),
        ({"bad_images": "ignore"}, "bad_images = 'ignore'"),
        ({"lr": "fast"}, "^lr = 'fast': must be a number$"),
        ({"epochs": 1.5}, "^epochs = 1.5: must be a whole number$"),
        ({"freeze": "backbone"}, r"^freeze = 'backbone': must be a list, such as \[backbone\]$"),
        ({"sched": "cosin"}, "must be 'cosine', 'linear', .*; did you mean 'cosine'?"),
        ({"std": (1.0, 2.0)}, "must be 1 number or must be 3 numbers"),
        ({"mean": []}, r"^mean = \[\]: must be 1 number or must be 3 numbers$"),
    ],
)
def test_values_out_of_range_are_named(settings, message):
    with pytest.raises(SettingError, match=message):
        TrainConfig(data="digits", **settings)


def test_unknown_settings_name_the_nearest():
    with pytest.raises(SettingError, match="did you mean 'weight_decay'"):
        layered({"weight_deca": 1})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("learning_rate", "lr"), ("learningrate", "lr"), ("numEpochs", "epochs"),
     ("wd", "weight_decay"), ("output_dir", "output"), ("optimizer", "opt")],
)  # fmt: skip
def test_names_of_other_programs_are_answered_with_ours(theirs, ours):
    with pytest.raises(SettingError, match=f"no setting '{theirs}'; did you mean '{ours}'"):
        vitkit.train("digits", **{theirs: 1})


def test_the_case_of_an_optimizer_does_not_matter():
    assert TrainConfig(data="digits", opt="AdamW").opt == "adamw"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1e-3\nlr: 2e-3\n", r"recipe.yaml:2: not valid YAML: found duplicate key"),
        ("lr: 1e-3\nweight_deca: 2\n", r"recipe.yaml:2: there is no setting .*weight_decay."),
        ("x: !!python/object/apply:os.system ['true']\n", "recipe.yaml:1: not valid YAML"),
        ("lr: [1\n", "not valid YAML"),
        ("lr: 1e-3\nlearningrate: 2\n", "recipe.yaml:2: there is no .*; did you mean 'lr'"),
        ("lr: 1e-3\nepochs: many\n", "recipe.yaml:2: epochs = 'many': must be a whole number"),
        ('"lr": -1\n', r"recipe.yaml: lr = -1: must be above 0"),
        ("freeze: backbone\n", r"recipe.yaml:1: freeze = 'backbone': must be a list"),
        ("just words\n", "expected `setting: value` lines"),
        ("", "expected `setting: value` lines"),
    ],
)
def test_yaml_is_refused_with_its_line(tmp_path: Path, text, message):
    with pytest.raises(SettingError, match=message) as error:
        read_yaml(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_yaml_reads_1e_3_as_a_number_and_config_survives_it(tmp_path: Path):
    assert read_yaml(written(tmp_path, "lr: 1e-3\nspec: {width: 64}\n")) == {
        "lr": 1e-3, "spec": {"width": 64}
    }  # fmt: skip
    config = TrainConfig(**layered({"data": "digits"}, recipe_settings("digits"), {"lr": 3e-5}))
    text = to_yaml(config.to_json())
    assert TrainConfig(**read_yaml(written(tmp_path, text))) == config


def test_every_recipe_is_a_valid_config_with_a_docstring_that_has_its_command():
    for name, recipe in RECIPES.items():
        TrainConfig(**layered({"data": name}, recipe()))
        assert f"--recipe {name}" in (recipe.__doc__ or "")
    with pytest.raises(SettingError, match="no recipe 'digit'; did you mean 'digits'"):
        recipe_settings("digit")

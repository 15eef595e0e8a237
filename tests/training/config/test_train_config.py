"""Settings: their sections, order and ranges, and what YAML may not do."""

from __future__ import annotations

import pytest
import torch

import vitkit
from vitkit import SettingError, TrainConfig
from vitkit.frozen import field_names
from vitkit.training.config.merging import layered
from vitkit.training.config.run_settings import OptimizerSettings
from vitkit.training.config.train_config import SECTIONS, USUAL, RunConfig
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
    settings = RunConfig(data="digits", **USUAL | {"opt": "SGD", "lr": 0.1})
    model = torch.nn.Linear(2, 2)
    assert isinstance(configured_optimizer(model, settings), torch.optim.SGD)
    assert OptimizerSettings(opt="SGD").opt == "sgd"
    with pytest.raises(SettingError, match="lr = -1: must be above 0"):
        OptimizerSettings(lr=-1)


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
        ({"sched": "cosin"}, "must be 'cosine', 'linear', .* .did you mean 'cosine'?"),
        ({"std": (1.0, 2.0)}, "must be 1 number or must be 3 numbers"),
        ({"mean": []}, r"^mean = \[\]: must be 1 number or must be 3 numbers$"),
        ({"mean": [0.5, float("nan"), 0.5]}, r"^mean = .*\]: must be a finite number$"),
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
    with pytest.raises(SettingError, match=f"no setting '{theirs}'; vitkit calls it '{ours}'"):
        vitkit.train("digits", **{theirs: 1})


def test_the_case_of_an_optimizer_does_not_matter():
    assert TrainConfig(data="digits", opt="AdamW").opt == "adamw"


def test_every_recipe_is_a_valid_config_with_a_docstring_that_has_its_command():
    for name, recipe in RECIPES.items():
        TrainConfig(**layered({"data": name}, recipe_settings(name)))
        assert f"--recipe {name}" in recipe["about"]
    with pytest.raises(SettingError, match=r"no recipe 'digit' .did you mean 'digits'"):
        recipe_settings("digit")

"""Settings: their sections, order and ranges, and what YAML may not do."""

import pytest

import vitkit
from vitkit import SettingError, TrainConfig


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
        vitkit.train("digits", weight_deca=1)


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


def test_a_mistyped_recipe_is_answered_with_the_nearest():
    with pytest.raises(SettingError, match=r"no recipe 'digit' .did you mean 'digits'"):
        vitkit.train("digits", recipe="digit")

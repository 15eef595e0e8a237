"""Settings in YAML files."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitkit import SettingError, TrainConfig
from vitkit.training.config.merging import layered, read_yaml, to_yaml
from vitkit.training.recipes import recipe_settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1e-3\nlr: 2e-3\n", r"recipe.yaml:2: not valid YAML: found duplicate key"),
        ("lr: 1e-3\nweight_deca: 2\n", r"recipe.yaml:2: there is no setting .*weight_decay."),
        ("x: !!python/object/apply:os.system ['true']\n", "recipe.yaml:1: not valid YAML"),
        ("lr: [1\n", "not valid YAML"),
        ("lr: 1e-3\nlearningrate: 2\n", "recipe.yaml:2: there is no .*; vitkit calls it 'lr'"),
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


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path

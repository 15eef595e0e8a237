"""Settings in YAML files."""

from pathlib import Path

import pytest

import vitkit
from vitkit import SettingError


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
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(SettingError, match=message) as error:
        vitkit.train("digits", recipe=path, output=tmp_path / "run")
    assert "\n" not in str(error.value)

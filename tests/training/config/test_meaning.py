"""Facts about settings: every setting has them, and they are asked for, not listed again."""

import dataclasses
import re
from pathlib import Path

import pytest

import vitkit
from vitkit import TrainConfig
from vitkit.frozen import field_names
from vitkit.training.config.meaning import Meaning, fields_where, meanings


def test_every_setting_has_a_meaning():
    assert list(meanings(TrainConfig)) == field_names(TrainConfig)


def test_a_setting_without_a_meaning_is_an_error():
    @dataclasses.dataclass
    class Careless:
        lr: float = 1e-3

    with pytest.raises(TypeError, match=r"Careless\.lr has 0 Meaning, not 1"):
        meanings(Careless)
    with pytest.raises(AttributeError, match="may_change"):
        fields_where(TrainConfig, may_change=True)


def test_names_in_facts_are_settings():
    for meaning in meanings(TrainConfig).values():
        assert set(meaning.only_with) <= set(field_names(TrainConfig))


@pytest.mark.parametrize("fact", [field.name for field in dataclasses.fields(Meaning)])
def test_every_fact_is_asked_for_by_some_code(fact):
    root = Path(vitkit.__file__).parent / "training"
    asked = re.compile(rf"fields_where\(TrainConfig, {fact}=|meaning\.{fact}\b")
    users = [path for path in root.rglob("*.py") if path.name != "meaning.py"]
    assert any(asked.search(path.read_text(encoding="utf-8")) for path in users)

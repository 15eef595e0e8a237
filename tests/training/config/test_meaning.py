"""Facts about settings: every setting has them, and they are asked for, not listed again."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import vitkit
from vitkit import TrainConfig
from vitkit.frozen import field_names
from vitkit.training.config.meaning import Meaning, fields_where, meanings

FACTS = [
    (
        {"resume": "not compared"},
        """data data_root cache follow_links relabel start recipe output overwrite resume teacher
        test device timeout workers quiet""",
    ),
    (
        {"resume": "may change"},
        """bad_images trust_pickle allow_partial save_every callbacks metrics auto budget epochs
        max_steps lr find_lr min_lr sched warmup_epochs clip_grad on_nan
        patience grad_checkpointing devices parallel log_interval log_histograms log_examples
        plots report save_augmented_grid logger""",
    ),
    (
        {"changes_result": False},
        """data data_root cache trust_pickle allow_partial recipe output overwrite resume
        save_every callbacks metrics test seed device attention_kernel grad_checkpointing
        devices parallel timeout threads workers log_interval log_histograms log_examples
        plots report save_augmented_grid logger quiet resizer""",
    ),
    (
        {"with_probe": "ignored"},
        """drop_path epochs batch_size last_batch grad_accum_steps lr min_lr sched warmup_epochs
        opt momentum beta1 beta2 weight_decay clip_grad on_nan loss bce_threshold
        label_smoothing flip shift crop_scale resizer log_interval callbacks""",
    ),
    (
        {"with_probe": "refused"},
        """transform balance progressive freeze freeze_blocks save_every max_steps
        find_lr layer_decay model_ema model_ema_decay aa color_jitter reprob
        scaled_jpeg
        repeated_aug mixup cutmix mixup_prob mixup_switch_prob mixup_off_epoch teacher distill
        distill_alpha distill_temperature patience compile grad_checkpointing
        save_augmented_grid""",
    ),
    (
        {"with_auto": "passed on"},
        """data data_root cache follow_links bad_images ignore_extra_classes val_fraction relabel
        balance
        model pretrained trust_pickle allow_partial seed device amp attention_kernel compile
        threads workers plots report logger quiet""",
    ),
    ({"with_auto": "own"}, "output overwrite auto budget test"),
    ({"only_with": ("mixup", "cutmix")}, "mixup_prob mixup_off_epoch"),
    ({"only_with": ("model_ema",)}, "model_ema_decay"),
    (
        {"only_with": ("teacher",)},
        "distill distill_alpha distill_temperature",
    ),
    ({"optimizers": ("sgd",)}, "momentum"),
    ({"optimizers": ("adamw", "adam", "muon")}, "beta1 beta2"),
    ({"several_processes": True}, "parallel timeout"),
    ({"for_pretrained": True}, "freeze freeze_blocks layer_decay"),
    (
        {"changes_images": True},
        "transform flip shift crop_scale aa color_jitter reprob mixup cutmix",
    ),
]
"""Facts and the settings that have them: one that changes by mistake is seen here."""


@pytest.mark.parametrize(("fact", "settings"), FACTS, ids=lambda value: str(value)[:30])
def test_these_settings_have_the_fact(fact, settings):
    assert set(fields_where(TrainConfig, **fact)) == set(settings.split())


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

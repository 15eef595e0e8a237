"""Theirs to ours to theirs with the same bits: every preset, random models, a whole B/16, halves."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from weights.cells import SMALL
from weights.round_trips import noisy, reread, same_files, stored, written

import vitkit
from vitkit.errors import CheckpointError
from vitkit.models.presets import preset
from vitkit.models.presets import table as presets
from vitkit.weights.fitting import fit
from vitkit.weights.format import Format
from vitkit.weights.formats import FORMATS

TRAINING = {
    name: getattr(vitkit.ViTSpec(), name)
    for name in ("position_dropout", "patch_dropout", "attention_dropout", "projection_dropout",
                 "mlp_dropout", "head_dropout", "drop_path", "drop_path_schedule", "head_bias",
                 "initialisation")
}  # fmt: skip
"""Fields that no weights depend on: no file of theirs has them."""
COMPUTED = {"norm_eps", "activation", "position_resampling"}
"""What the code of a format knows and its files do not."""
UNSAID = {
    "google": COMPUTED | {"resnet_variant"},
    "huggingface": {"position_resampling"},
    "torchvision": COMPUTED | {"num_heads"},
    "jeonsworld": COMPUTED | {"num_heads"},
    "lucidrains": COMPUTED,
    "dinov2": COMPUTED | {"num_heads"},
    "deit": COMPUTED | {"num_heads"},
    "timm": COMPUTED,
}
"""Fields that have to be told for files of a format to be read again."""


def relevant(spec: vitkit.ViTSpec) -> vitkit.ViTSpec:
    """The spec without training, where LayerScale starts, and the second name of one stem."""
    stem = "convolution" if spec.stem == "linear" else spec.stem
    return spec.replace(**TRAINING, stem=stem, layer_scale=1.0 if spec.layer_scale else None)


@functools.cache
def kinds() -> Mapping[vitkit.ViTSpec, tuple[str, ...]]:
    """Every preset made small, and whose nature it has: the presets that become the same."""
    found: dict[vitkit.ViTSpec, list[str]] = {}
    for name in presets():
        whole = preset(name)
        fields = SMALL | {
            "image_size": tuple(2 * side for side in whole.patch_size),
            "num_classes": 5 if whole.num_classes else 0,
            "resnet_layers": (1,) * len(whole.resnet_layers),
        }
        found.setdefault(relevant(whole.replace(**fields)), []).append(name)
    return {spec: tuple(names) for spec, names in found.items()}


def fitted(model: vitkit.ViT, form: Format) -> tuple[vitkit.ViT, str]:
    """The model as the format holds it, and what that costs."""
    found = fit(model.spec, model.state_dict(), *form.holds)
    made = vitkit.ViT(found.spec).eval()
    made.load_state_dict(found.state)
    kinds = [step.kind for step in found.steps]
    return made, next((k for k in ("lost", "approximated", "folded") if k in kinds), "exact")


def there_and_back(form: Format, model: vitkit.ViT, folder: Path, told: set[str]) -> vitkit.ViT:
    """Write, read with what the file cannot say, write again: the same in every bit."""
    first = written(form, model, folder / "first")
    spec = relevant(model.spec)
    size = {} if spec.image_size[0] == spec.image_size[1] else {"image_size": spec.image_size}
    found = vitkit.inspect(first, **size)
    assert found.format == form.name
    unsaid = {
        name: value
        for name, value in spec.__dict__.items()
        if name not in TRAINING and getattr(relevant(found.spec), name) != value
    }
    assert unsaid.keys() <= told, (unsaid, spec)
    for name in unsaid:
        assert found.sure[name] == "usual", name
    checkpoint = reread(model, first, **size, **unsaid)
    assert relevant(checkpoint.model.spec) == spec
    same_files(first, written(form, checkpoint.model, folder / "second"))
    return checkpoint.model


HELD = {
    "google": 121, "huggingface": 82, "torchvision": 72, "jeonsworld": 72, "lucidrains": 66,
    "dinov2": 81, "deit": 72, "timm": 205,
}  # fmt: skip
"""How many presets, made small, a format holds in one way or another."""


@functools.cache
def small(spec: vitkit.ViTSpec) -> vitkit.ViT:
    return noisy(spec)


@pytest.mark.parametrize("name", FORMATS)
def test_every_preset_that_a_format_holds_comes_back(tmp_path, name):
    form, held = FORMATS[name], Counter[str]()
    done: set[vitkit.ViTSpec] = set()
    for number, (spec, presets_of_it) in enumerate(kinds().items()):
        try:
            model, how = fitted(small(spec), form)
            if relevant(model.spec) not in done:
                there_and_back(form, model, tmp_path / str(number), {"position_resampling"})
        except CheckpointError:
            continue
        done.add(relevant(model.spec))
        held[how] += len(presets_of_it)
    assert held.total() >= HELD[name], held


def test_the_presets_are_all_there():
    assert sum(map(len, kinds().values())) == len(presets()) >= 205
    assert len(kinds()) >= 60

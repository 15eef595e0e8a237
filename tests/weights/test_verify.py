"""The libraries' own models of what is written: the same tokens and logits, or a clear word."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import peer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights.round_trips import BASE, MODELS, model_of, noisy, written

import vitkit
from vitkit.models.presets import preset
from vitkit.weights import verify
from vitkit.weights.recognise_format import FORMATS

LIBRARIES = {name: form.reference for name, form in FORMATS.items() if form.reference}
TOLERANCE = 1e-5
SIZES = {"depth": 2, "width": 64, "num_heads": 1, "mlp_width": 128, "num_classes": 7}
# vit-pytorch 0.40.2 cannot be installed beside the newest; DeiT III has other names in timm.
APART = ("stem", "convolution"), ("layer_scale", 1e-5)
CASES = [
    (name, fields)
    for name in LIBRARIES
    for fields in MODELS[name]
    if name == "timm" or not set(APART) & set(fields.items())
]


@torch.inference_mode()
def distances(ours: vitkit.ViT, theirs: verify.ReferenceModel) -> list[float]:
    """Largest |difference| of each block's tokens, then of the logits."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, ours.spec.in_channels, *ours.spec.image_size, generator=generator)
    record = vitkit.Record(tokens=range(ours.spec.depth))
    logits, (blocks, read) = ours(images, record), theirs(images)
    pairs = [*zip(record.tokens.values(), blocks, strict=True), (logits, read)]
    for left, right in pairs:
        assert left.shape == right.shape
        assert right.dtype == torch.float32
    return [float((left - right).abs().max()) for left, right in pairs]


def found(target: str, place: Path, spec: vitkit.ViTSpec) -> verify.ReferenceModel:
    for module in LIBRARIES[target].modules:
        peer(module)  # the parity tests need all of them
    theirs = verify.reference_model(target, place, spec)
    assert theirs is not None
    return theirs


def rewritten(place: Path, change: Any) -> None:
    """The file with its tensors changed and its header kept."""
    file = place / "model.safetensors"
    with safe_open(file, framework="pt") as old:
        metadata = old.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata)


def two_norms(tensors: dict[str, Tensor]) -> tuple[str, str]:
    """A norm of the first block, and one of the last."""
    norm = re.compile(r".*\.(norm1|ln_1|layernorm_before|0\.norm)\.weight")
    names = sorted(name for name in tensors if norm.fullmatch(name) and "backbone" not in name)
    return names[0], names[-1]


@pytest.mark.parametrize(("target", "fields"), CASES)
def test_the_library_computes_what_ours_does_from_the_file(tmp_path, target, fields):
    ours = model_of(target, fields)
    place = written(target, ours, tmp_path / "made")
    theirs = found(target, place, ours.spec)
    name, _, version = theirs.library.partition(" ")
    assert name == LIBRARIES[target].distribution
    assert re.match(r"\d+\.\d+", version)
    measured = distances(ours, theirs)
    assert len(measured) == ours.spec.depth + 1
    # A ResNet's stages turn float32's rounding into 1e-5, in timm against itself as well.
    assert max(measured) <= (1e-4 if ours.spec.resnet_layers else TOLERANCE)

    def swap(tensors: dict[str, Tensor]) -> None:
        first, last = two_norms(tensors)
        tensors[first], tensors[last] = tensors[last], tensors[first]

    rewritten(place, swap)
    swapped = distances(ours, found(target, place, ours.spec))
    assert swapped[0] > 1e-3
    assert swapped[-1] > 10 * TOLERANCE


FOLDED = [
    ("huggingface", "deit3_base_patch16_224", "ViTForImageClassification"),
    ("huggingface", "mae_vit_base_patch16", "ViTForImageClassification"),
    ("torchvision", "deit3_base_patch16_224", "VisionTransformer"),
    ("timm", "mae_vit_base_patch16", "VisionTransformer"),
]


@pytest.mark.parametrize(("target", "name", "of_class"), FOLDED)
def test_what_was_folded_is_what_the_library_computes(tmp_path, target, name, of_class):
    ours = noisy(preset(name, **SIZES, image_size=32))
    place = written(target, ours, tmp_path / "made")
    theirs = found(target, place, vitkit.load(place).model.spec)
    assert type(theirs.built.model).__name__ == of_class
    assert max(distances(ours, theirs)) <= TOLERANCE


ONE_EACH = [(name, MODELS[name][0]) for name in LIBRARIES if name != "huggingface"]
ONE_EACH += [("timm", MODELS["timm"][6]), ("lucidrains", MODELS["lucidrains"][8])]
ONE_EACH.append(("huggingface", MODELS["huggingface"][9]))  # its ViT names others than the file


@pytest.mark.parametrize(("target", "fields"), ONE_EACH)
@pytest.mark.parametrize("fault", ["missing", "too many", "another shape"])
def test_a_file_that_is_not_wholly_theirs_is_refused_in_one_line(tmp_path, target, fields, fault):
    ours = model_of(target, fields)
    place = written(target, ours, tmp_path / "made")
    name = two_norms(load_file(place / "model.safetensors"))[0]

    def spoil(tensors: dict[str, Tensor]) -> None:
        if fault == "missing":
            del tensors[name]
        elif fault == "too many":
            tensors[name + ".more"] = torch.zeros(3)
        else:
            tensors[name] = torch.zeros(3)

    found(target, place, ours.spec)
    rewritten(place, spoil)
    with pytest.raises(vitkit.CheckpointError, match=re.escape(name)) as caught:
        verify.reference_model(target, place, ours.spec)
    assert f"{LIBRARIES[target].distribution} " in str(caught.value)
    assert str(place) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_single_file_is_read_as_its_folder_is(tmp_path):
    for target in ("torchvision", "lucidrains", "deit"):
        ours = model_of(target, MODELS[target][0])
        file = written(target, ours, tmp_path / target) / "model.safetensors"
        file = file.rename(tmp_path / f"{target}.safetensors")
        assert max(distances(ours, found(target, file, ours.spec))) <= TOLERANCE


def test_nothing_is_printed_and_nothing_stays_changed(tmp_path, capfd, caplog):
    caplog.set_level("INFO")
    for number, (target, fields) in enumerate(ONE_EACH):
        ours = model_of(target, fields)
        place = written(target, ours, tmp_path / str(number))
        level, drawn = logging.root.manager.disable, torch.get_rng_state()
        distances(ours, found(target, place, ours.spec))
        assert logging.root.manager.disable == level
        assert torch.equal(torch.get_rng_state(), drawn), target
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_formats_without_a_library_have_no_witness(tmp_path):
    ours = model_of("torchvision", {})
    for target in {"vitkit", *FORMATS} - LIBRARIES.keys():
        assert f"the format {target}" in verify.reference_model(target, tmp_path, ours.spec)
    assert {"google", "jeonsworld", "dinov2"} <= FORMATS.keys() - LIBRARIES.keys()


BEYOND = [
    ("timm", {"norm_eps": 1e-12}),
    ("deit", {"layer_scale": 0.5}),
    ("torchvision", {"image_size": (16, 32)}),
    ("torchvision", {"patch_size": (8, 4)}),
    ("torchvision", {"in_channels": 1}),
]


@pytest.mark.parametrize(("target", "fields"), BEYOND)
def test_what_no_class_of_theirs_computes_has_no_witness(tmp_path, target, fields):
    ours = noisy(vitkit.ViTSpec(**BASE | fields))
    reason = verify.reference_model(target, written(target, ours, tmp_path / "made"), ours.spec)
    assert re.fullmatch(r"\w+ [\d.+cpu]+ has no class that computes this model", reason)


@pytest.fixture
def simple(tmp_path):
    """A file that vit-pytorch reads, as long as it can be imported."""
    ours = model_of("lucidrains", MODELS["lucidrains"][8])
    place = written("lucidrains", ours, tmp_path / "written")
    found("lucidrains", place, ours.spec)
    return place, ours.spec


BROKEN = ("ImportError('not here')", "RuntimeError('torch 1.4')", "OSError('libcudart.so.12')",
          "AttributeError('ops')")  # fmt: skip
NAMED = r"vit-pytorch [\d.]+"


@pytest.mark.parametrize("fault", BROKEN)
def test_a_library_that_cannot_be_imported_is_no_witness(tmp_path, monkeypatch, simple, fault):
    (tmp_path / "vit_pytorch").mkdir()
    (tmp_path / "vit_pytorch" / "__init__.py").write_text(f"raise {fault}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vit_pytorch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    kind, reason = re.fullmatch(r"(\w+)\('(.*)'\)", fault).groups()
    expected = rf"{NAMED} cannot be imported \({kind}: {reason}\); pip install 'vit-pytorch>=1"
    assert re.match(expected, verify.reference_model("lucidrains", *simple))


def test_a_library_that_is_not_installed_is_no_witness(monkeypatch, simple):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(verify.importlib.metadata, "version", missing)
    reason = "vit-pytorch is not installed; pip install 'vit-pytorch>=1.16.1'"
    assert verify.reference_model("lucidrains", *simple) == reason


@pytest.mark.parametrize(("version", "taken"), [("1.16.0", False), ("1.9.4rc1", False),
                                                ("1.16.1", True), ("1.16.1.post2+cpu", True),
                                                ("2", True)])  # fmt: skip
def test_a_library_older_than_what_is_tested_is_no_witness(monkeypatch, simple, version, taken):
    monkeypatch.setattr(verify.importlib.metadata, "version", lambda name: version)
    witness = verify.reference_model("lucidrains", *simple)
    if taken:
        assert witness.library == f"vit-pytorch {version}"
    else:
        assert f"vit-pytorch {version} is older than the" in witness


def test_the_oldest_versions_are_those_of_the_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["parity"]
    for line in LIBRARIES.values():
        oldest = ".".join(map(str, line.oldest))
        assert any(re.match(rf"{line.distribution}>={oldest}(,|$)", one) for one in extra), line

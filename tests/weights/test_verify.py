"""The libraries' own models of what is converted: the same logits, or a clear word."""

import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from peers import peer
from safetensors.torch import load_file, save_file
from weights.round_trips import BASE, MODELS, model_of, noisy

import vitkit
from vitkit import CheckpointError, cli
from vitkit.weights.recognise_format import FORMATS

LIBRARIES = {name: f.reference for name, f in FORMATS.items() if f.reference}
TOLERANCE = 1e-5
# vit-pytorch 0.40.2 cannot be installed beside the newest; DeiT III has other names in timm.
APART = ("stem", "convolution"), ("layer_scale", 1e-5)
CASES = [
    (name, fields)
    for name in LIBRARIES
    for fields in MODELS[name]
    if name == "timm" or not set(APART) & set(fields.items())
]
CASES.append(("timm", {"norm_eps": 1e-5}))  # of a plain stem; their names do not say it


def converted(folder: Path, to: str, model: vitkit.ViT, **options: Any) -> vitkit.ConversionReport:
    grey = {} if model.spec.in_channels == 3 else {"mean": (0.5,), "std": (0.5,)}
    preprocess = vitkit.Preprocess(image_size=model.spec.image_size, fit="squash", **grey)
    own = vitkit.save(folder / "own.safetensors", model, preprocess=preprocess)
    return vitkit.convert(own, folder / "made", to=to, **options)


@pytest.mark.parametrize(("to", "fields"), CASES)
def test_the_library_computes_what_ours_does_from_the_file(tmp_path, to, fields):
    peer(LIBRARIES[to].module)
    model = model_of(to, fields)
    report = converted(tmp_path, to, model)
    assert re.match(rf"{LIBRARIES[to].distribution} \d+\.\d+", report.proved_by)
    assert report.unproved == ""
    # A ResNet's stages turn float32's rounding into 1e-5, in timm against itself as well.
    assert report.max_difference <= (1e-4 if model.spec.resnet_layers else TOLERANCE)


@pytest.mark.parametrize("fault", ["missing", "too many", "another shape", "swapped"])
@pytest.mark.parametrize("to", LIBRARIES)
def test_a_file_that_is_not_theirs_is_refused_or_differs(tmp_path, monkeypatch, to, fault):
    norm = re.compile(r".*\.(norm1|ln_1|layernorm_before|0\.norm)\.weight")

    def spoiled(path: Path, *rest: Any) -> Any:
        file = path if path.is_file() else path / "model.safetensors"
        tensors = load_file(file)
        first, *_, last = sorted(filter(norm.fullmatch, tensors))
        if fault == "missing":
            del tensors[first]
        elif fault == "too many":
            tensors[first + ".more"] = tensors[last]
        elif fault == "another shape":
            tensors[first] = tensors[first][:3].clone()
        else:
            tensors[first], tensors[last] = tensors[last], tensors[first]
        save_file(tensors, file, {"format": "pt"})
        return build(path, *rest)

    build = LIBRARIES[to].build
    form = FORMATS[to]
    changed = vars(form) | {"reference": form.reference._replace(build=spoiled)}
    monkeypatch.setitem(FORMATS, to, type(form)(**changed))
    model = model_of(to, MODELS[to][0])
    if fault == "swapped":
        assert converted(tmp_path, to, model).max_difference > 10 * TOLERANCE
        return
    with pytest.raises(CheckpointError, match=r"refuses the converted file: .*weight"):
        converted(tmp_path, to, model)


BEYOND = [
    ("timm", {"norm_eps": 1e-12}, r"timm [\d.]+ has no class that computes this model"),
    ("torchvision", {"image_size": (16, 32)}, r"torchvision [\d.+cpu]+ has no class"),
    ("torchvision", {"in_channels": 1}, r"torchvision [\d.+cpu]+ has no class"),
    ("jeonsworld", {}, "no package that can be installed reads the format jeonsworld"),
    ("vitkit", {}, "$"),
]


@pytest.mark.parametrize(("to", "fields", "reason"), BEYOND)
def test_what_no_class_of_theirs_computes_is_read_again_by_vitkit(tmp_path, to, fields, reason):
    report = converted(tmp_path, to, noisy(vitkit.ViTSpec(**BASE | fields)))
    assert (report.proved_by, report.max_difference <= TOLERANCE) == ("vitkit", True)
    assert re.match(reason, report.unproved)


@pytest.mark.parametrize("fault", ["not installed", "cannot be imported", "is older than"])
def test_a_library_that_cannot_be_used_is_named_with_the_cure(tmp_path, monkeypatch, capsys, fault):
    name, version = "torchvision.models.vision_transformer", importlib.metadata.version

    def found(name: str) -> str:
        if fault == "not installed":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.9.4rc1" if fault == "is older than" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", found)
    if fault == "cannot be imported":
        monkeypatch.setitem(sys.modules, "torchvision", None)
        monkeypatch.delitem(sys.modules, name, raising=False)
    report = converted(tmp_path, "torchvision", noisy(vitkit.ViTSpec(**BASE)))
    assert report.proved_by == "vitkit"
    assert re.match(rf"torchvision.* {fault}.*; pip install 'torchvision>=0\.26'", report.unproved)
    line = ["convert", str(tmp_path / "own.safetensors"), str(tmp_path / "b"), "--to"]
    assert cli.run([*line, "torchvision"]) == 0
    shown = capsys.readouterr().out
    assert "not verified by another library: torchvision" in shown
    assert "verified by vitkit: the logits are identical" in shown
    line[2] = str(tmp_path / "c")
    assert cli.run([*line, "torchvision", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unproved"] == report.unproved


def test_the_oldest_versions_are_those_of_the_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["parity"]
    for line in LIBRARIES.values():
        oldest = ".".join(map(str, line.oldest))
        assert any(re.match(rf"{line.distribution}>={oldest}(,|$)", one) for one in extra), line

"""Conversion: what is exact stays exact, what is lossy is asked for, and the report is true."""

import json
import re

import pytest
from weights.round_trips import noisy, without_our_entry

import vitkit
from vitkit import CheckpointError, OutputError, cli

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 1,
         "mlp_width": 96, "num_classes": 7}  # fmt: skip


def saved(folder, **fields: object):
    model = noisy(vitkit.ViTSpec(**SMALL | fields))
    preprocess = vitkit.Preprocess(image_size=32)
    return model, vitkit.save(folder / "own.safetensors", model, preprocess=preprocess)


LOSSY = [
    ({"activation": "gelu_tanh"}, "activation gelu_tanh (becomes gelu)", "approximated"),
    ({"norm_eps": 1e-3}, "norm_eps 0.001 (becomes 1e-06)", "approximated"),
    ({"distillation_token": True}, "distillation_token: the token", "lost"),
]


@pytest.mark.parametrize(("fields", "message", "kind"), LOSSY)
def test_lossy_steps_are_listed_and_need_a_word(tmp_path, fields, message, kind):
    _, own = saved(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=f"cannot store: {re.escape(message)}.*--allow-lossy"):
        vitkit.convert(own, tmp_path / "out", to="torchvision")
    assert not (tmp_path / "out").exists()
    report = vitkit.convert(own, tmp_path / "out", to="torchvision", allow_lossy=True)
    assert message in getattr(report, kind)[0]
    assert report.max_difference > 1e-6
    assert message in str(report)


def test_what_a_format_has_no_place_for_lies_in_the_header(tmp_path):
    model = noisy(vitkit.ViTSpec(**SMALL | {"num_heads": 4}))
    own = vitkit.save(tmp_path / "own.safetensors", model, classes=list("abcdefg"),
                      preprocess=vitkit.Preprocess(image_size=32, mean=(0.1,) * 3))  # fmt: skip
    report = vitkit.convert(own, tmp_path / "out", to="torchvision")
    assert report.max_difference <= 1e-5
    assert report.notes == ()
    again = vitkit.load(tmp_path / "out")
    assert (again.model.spec, again.classes) == (model.spec, tuple("abcdefg"))
    assert again.preprocess.mean == (0.1,) * 3
    assert vitkit.inspect(tmp_path / "out").sure["num_heads"] == "stored"


def test_what_no_header_can_hold_is_in_the_report_instead(tmp_path):
    model = noisy(vitkit.ViTSpec(**SMALL | {"activation": "gelu_tanh"}))
    own = vitkit.save(tmp_path / "own.safetensors", model, classes=list("abcdefg"),
                      preprocess=vitkit.Preprocess(image_size=32, mean=(0.1,) * 3))  # fmt: skip
    report = vitkit.convert(own, tmp_path / "model.npz", to="google")
    assert report.max_difference <= 1e-6
    assert any("size before the crop [35, 35]" in note for note in report.notes)
    assert any("mean [0.1, 0.1, 0.1]" in note for note in report.notes)
    assert "the file cannot store the 7 class names" in report.notes


def test_inspect_says_what_it_knows_and_how(tmp_path, capsys):
    model, own = saved(tmp_path)
    vitkit.convert(own, tmp_path / "out", to="torchvision")
    found = vitkit.inspect(tmp_path / "out")
    assert (found.format, found.spec.width, found.spec.depth) == ("torchvision", 64, 2)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.sure["width"] == "shapes"
    assert found.sure["norm_eps"] == found.sure["preprocess"] == "stored"
    without_our_entry(tmp_path / "out" / "model.safetensors")
    found = vitkit.inspect(tmp_path / "out")
    assert found.sure["norm_eps"] == found.sure["preprocess"] == "usual"
    assert vitkit.inspect(own).sure["norm_eps"] == "stored"
    assert vitkit.inspect(tmp_path / "out", num_heads=4).sure["num_heads"] == "stored"
    assert cli.run(["inspect", str(tmp_path / "out")]) == 0
    assert "torchvision" in capsys.readouterr().out
    assert cli.run(["inspect", str(own), "--json"]) == 0
    assert '"format": "vitkit"' in capsys.readouterr().out


def test_nothing_that_is_there_is_written_over(tmp_path):
    _, own = saved(tmp_path)
    for out, to in ((tmp_path / "out", "torchvision"), (own, "vitkit")):
        if to == "torchvision":
            vitkit.convert(own, out, to=to)
        before = {file: file.read_bytes() for file in tmp_path.rglob("*.safetensors")}
        with pytest.raises(OutputError, match="exists; choose another place"):
            vitkit.convert(own, out, to=to)
        assert {file: file.read_bytes() for file in tmp_path.rglob("*.safetensors")} == before


def test_the_command_converts_and_reports(tmp_path, capsys):
    _, own = saved(tmp_path, layer_scale=0.5)
    assert cli.run(["convert", str(own), str(tmp_path / "tv"), "--to", "torchvision"]) == 0
    text = capsys.readouterr().out
    assert "folded: layer_scale: multiplied into attn.proj and mlp.fc2" in text
    assert "largest difference of the logits" in text
    assert cli.run(["convert", str(own), str(tmp_path / "x"), "--to", "nothing"]) == 2
    assert "must be one of vitkit, timm" in capsys.readouterr().err


def run_folder(tmp_path, own):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "best.safetensors").write_bytes(own.read_bytes())
    (tmp_path / "config.yaml").touch()


COMPANY = {
    "a run": (lambda place, own: run_folder(place, own), "", "timm", "is the folder of a run"),
    "its model": (lambda place, own: run_folder(place, own), "model.safetensors", "torchvision",
                  "is the folder of a run"),
    "other weights": (lambda place, own: (place / "pytorch_model.bin").touch(), "", "torchvision",
                      "has pytorch_model.bin"),
    "a bare file": (lambda place, own: (place / "a.pth").touch(), "", "timm", "has a.pth"),
    "a config": (lambda place, own: (place / "config.json").write_text("{}"), "x.safetensors",
                 "torchvision", "has config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPANY)
def test_no_folder_comes_to_mean_something_else(tmp_path, case):
    make, name, to, message = COMPANY[case]
    _, own = saved(tmp_path)
    place = tmp_path / "place"
    place.mkdir()
    make(place, own)
    before = sorted(place.rglob("*"))
    with pytest.raises(OutputError, match=rf"{message}.*; choose another"):
        vitkit.convert(own, place / name, to=to)
    assert sorted(place.rglob("*")) == before


def test_a_converted_file_may_stand_in_a_run_under_a_name_of_its_own(tmp_path):
    _, own = saved(tmp_path)
    run_folder(tmp_path, own)
    vitkit.convert(own, tmp_path / "for_torchvision.safetensors", to="torchvision")
    assert vitkit.load(tmp_path).format == "vitkit"


def test_a_resized_side_says_the_crop_ratio(tmp_path):
    """224 / 0.9 and 224 / 0.9032 are both 248 pixels."""
    _, own = saved(tmp_path)
    report = vitkit.convert(own, tmp_path / "out", to="huggingface")
    assert not any("preprocessing" in note for note in report.notes)
    assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["size"] == {
        "shortest_edge": 35
    }


def test_an_oblong_crop_is_squashed_as_the_refusal_says(tmp_path):
    model = noisy(vitkit.ViTSpec(**SMALL | {"image_size": (32, 48)}))
    preprocess = vitkit.Preprocess(image_size=(32, 48))
    own = vitkit.save(tmp_path / "own.safetensors", model, preprocess=preprocess)
    line = ["convert", str(own), str(tmp_path / "hf"), "--to", "huggingface"]
    assert cli.run(line) == 2
    assert cli.run([*line, "--adapt.fit", "squash"]) == 0
    assert vitkit.load(tmp_path / "hf").preprocess == preprocess.replace(fit="squash")


@pytest.mark.parametrize("size", [(16, 64), (16, 40)], ids=["of a square number", "of none"])
def test_an_oblong_size_is_noted_only_where_the_file_cannot_say_it(tmp_path, size):
    model = noisy(vitkit.ViTSpec(**SMALL | {"image_size": size, "activation": "gelu_tanh"}))
    preprocess = vitkit.Preprocess(image_size=size, fit="squash")
    own = vitkit.save(tmp_path / "own.safetensors", model, preprocess=preprocess)
    for to, is_noted in (("huggingface", True), ("timm", True), ("google", False)):
        report = vitkit.convert(own, tmp_path / to, to=to, allow_lossy=True)
        notes = [note for note in report.notes if "image_size" in note and "pass it" in note]
        assert len(notes) == (not is_noted), (to, report.notes)
        assert report.max_difference <= 1e-5
        asked = {} if is_noted else {"image_size": size}
        assert vitkit.load(tmp_path / to, **asked).model.spec.image_size == size


@pytest.mark.parametrize("to", ["google", "torchvision", "jeonsworld"])
def test_grey_images_stay_grey_in_every_format(tmp_path, to):
    """Google's .npz has no place for mean and std, and its usual ones are three numbers."""
    model = noisy(vitkit.ViTSpec(**SMALL | {"in_channels": 1}))
    preprocess = vitkit.Preprocess(image_size=32, mean=(0.5,), std=(0.5,))
    own = vitkit.save(tmp_path / "own.safetensors", model, preprocess=preprocess)
    (file, *_) = vitkit.convert(own, tmp_path / to, to=to, allow_lossy=True).files
    back = vitkit.load(file)
    assert back.model.spec.in_channels == back.preprocess.channels == 1


def test_a_file_that_describes_itself_takes_no_settings(tmp_path):
    with pytest.raises(CheckpointError, match="describes itself completely; leave out num_heads"):
        vitkit.inspect(saved(tmp_path)[1], num_heads=3)

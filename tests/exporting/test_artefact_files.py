"""Exported models from their files alone: evaluated, or refused in one line before they are run."""

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export_material import CLASSES, PREPROCESS
from PIL import Image

import vitkit
from vitkit import CheckpointError, SettingError, cli
from vitkit.exporting import files

PLAIN = files.ArtefactDescription("onnx", PREPROCESS, CLASSES, len(CLASSES), 1.0)


def text(format: str = "onnx", **changes: object) -> str:
    return json.dumps(json.loads(PLAIN.to_text()) | {"format": format} | changes)


def describe_onnx(path: Path, description: str) -> None:
    model = onnx.load(path, load_external_data=False)
    del model.metadata_props[:]
    model.metadata_props.add(key="vitkit", value=description)
    path.write_bytes(model.SerializeToString())


def save_graph(path: Path, node: onnx.NodeProto, size: list[int], weights: object) -> Path:
    """Write a model of one node from images of a size to three logits."""
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["B", *sides])
        for name, sides in (("images", size), ("logits", [3]))
    ]
    graph = onnx.helper.make_graph([node], "graph", values[:1], values[1:], [weights])
    opsets = [onnx.helper.make_opsetid(name, 1 if name else 20) for name in {"", node.domain}]
    path.write_bytes(onnx.helper.make_model(graph, opset_imports=opsets).SerializeToString())
    return path


def save_onnx(path: Path, *, location: str = "", domain: str = "") -> Path:
    """Write a model of one product; its weights are at `location` if that is named."""
    weights = onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "weights")
    if location:
        weights.ClearField("raw_data")
        weights.data_location = onnx.TensorProto.EXTERNAL
        weights.external_data.add(key="location", value=location)
    node = onnx.helper.make_node("MatMul", ["images", "weights"], ["logits"], domain=domain)
    return save_graph(path, node, [4], weights)


def save_colour_model(path: Path, **description: object) -> Path:
    """Write a model whose logits are the means of red, green and blue."""
    node = onnx.helper.make_node("ReduceMean", ["images", "axes"], ["logits"], keepdims=0)
    axes = onnx.numpy_helper.from_array(np.array([2, 3]), "axes")
    save_graph(path, node, [3, 32, 32], axes)
    describe_onnx(path, text(**description))
    return path


def save_colours(folder: Path) -> Path:
    """Write four images of pure colours, of which the last one has a wrong label."""
    for number, (label, channel) in enumerate((("ant", 0), ("bee", 1), ("cat", 2), ("cat", 0))):
        (folder / label).mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((40, 36, 3), np.uint8)
        pixels[..., channel] = 255
        Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


def test_eval_takes_an_exported_model(tmp_path, capsys):
    model = save_colour_model(tmp_path / "a.onnx", temperature=2.0)
    data = str(save_colours(tmp_path / "photos" / "test").parent)
    table = tmp_path / "rows.csv"
    assert cli.run(["eval", str(model), data, "--json", "--predictions", str(table)]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert (scores["images"], scores["top1"], scores["split"]) == (4, 0.75, "test")
    assert [entry["accuracy"] for entry in scores["per_class"]] == [1.0, 1.0, 0.5]
    assert scores["confusion"] == [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    assert scores["temperature"] == 2.0
    assert scores["calibrated_loss"] != scores["loss"]
    assert len(table.read_text().splitlines()) == 5
    evaluation = vitkit.evaluate(model, data, batch_size=3, metrics=[count_rows])
    assert evaluation["loss"] == pytest.approx(scores["loss"])
    assert evaluation["count_rows"] == 4

    # an image is as in the training: another test split would have images of it
    metadata = {"data": {"fingerprint": "1" * 64}}
    trained = save_colour_model(tmp_path / "b.onnx", source={"metadata": metadata})
    (tmp_path / "other" / "test" / "dog").mkdir(parents=True)
    Image.new("RGB", (40, 36)).save(tmp_path / "other" / "test" / "dog" / "1.png")
    save_onnx(tmp_path / "c.onnx")
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
        archive.writestr("a/extra/vitkit.json", text("torch"))
    for words, message in (
        ([model, data, "--engine", "openvino"], "leave out --engine"),
        ([model, data, "--device", "mps"], "leave out --engine"),
        ([model, tmp_path / "other"], "classes that the checkpoint lacks: 'dog'"),
        ([tmp_path / "c.onnx", data], "has no description of vitkit"),
        ([tmp_path / "a.pt2", data], "pass --trust-code"),
        ([model, data, "--trust-code"], "is not a .pt2 file and runs no code"),
        ([trained, tmp_path / "photos" / "test"], "images differ from those the checkpoint"),
    ):
        assert cli.run(["eval", *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def count_rows(logits: torch.Tensor, labels: torch.Tensor) -> int:
    return len(logits)


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        vitkit.Predictor(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../secret", "C:\\secret"])
def test_weights_outside_of_the_folder_are_not_opened(tmp_path, location):
    path = save_onnx(tmp_path / "a.onnx", location=location)
    describe_onnx(path, text())
    refused(path, "outside of the file's folder|are missing: .*; copy both files")


def external(location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="hidden", data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


Hide = Callable[[onnx.ModelProto, onnx.TensorProto], object]
KIND = onnx.AttributeProto
HIDDEN: dict[str, Hide] = {
    "a sparse tensor": lambda model, tensor: model.graph.node[0].attribute.add(
        name="a", type=KIND.SPARSE_TENSOR).sparse_tensor.values.CopyFrom(tensor),
    "sparse tensors": lambda model, tensor: model.graph.node[0].attribute.add(
        name="a", type=KIND.SPARSE_TENSORS).sparse_tensors.add().indices.CopyFrom(tensor),
    "the default of a function": lambda model, tensor: model.functions.add(
        name="f", domain="own").attribute_proto.add(name="a", type=KIND.TENSOR).t.CopyFrom(tensor),
    "a graph of a function": lambda model, tensor: model.functions.add(
        name="f", domain="own").node.add(op_type="If").attribute.add(
        name="then_branch", type=KIND.GRAPH).g.initializer.append(tensor),
}  # fmt: skip


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
def test_weights_outside_are_found_wherever_they_are_named(tmp_path, capsys, hide):
    path = save_onnx(tmp_path / "a.onnx")
    model = onnx.load(path)
    hide(model, external("../secret"))
    path.write_bytes(model.SerializeToString())
    describe_onnx(path, text())
    assert cli.run(["predict", str(path), __file__]) == 2
    error = capsys.readouterr().err
    assert "/secret, outside of the file's folder; such a file is not opened" in error
    assert error.count("\n") == 1


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "secret").write_bytes(bytes(48))
    (tmp_path / "folder" / "weights").symlink_to(tmp_path / "secret")
    path = save_onnx(tmp_path / "folder" / "a.onnx", location="weights")
    describe_onnx(path, text())
    refused(path, "outside of the file's folder")


def test_onnx_files_without_description_or_with_a_bad_one(tmp_path):
    path = save_onnx(tmp_path / "a.onnx")
    refused(path, "has no description of vitkit")
    for changes, message in (
        ({"format_version": 2}, "of version 2; this vitkit reads up to 1; upgrade vitkit"),
        ({"temperature": 0}, "its description is damaged: temperature is 0"),
        ({"classes": ["one"]}, "num_classes is 3"),
        ({"classes": [1, 2, 3]}, r"classes is \[1, 2, 3\]"),
        ({"int8": None}, "int8 is None"),
        ({"preprocess": {"image_size": -1}}, "image_size"),
        ({"format": "openvino"}, r"for names that end in \.xml"),
        ({"weights": "0" * 64}, "its description is of other weights"),
    ):
        describe_onnx(path, text(**changes))
        refused(path, message)
    for whole, message in (("[" * 100_000, "nested too deeply"), ("[1]", "list indices")):
        describe_onnx(path, whole)
        refused(path, f"its description is damaged: .*{message}")
    path.write_bytes(path.read_bytes()[:-40])
    refused(path, r"truncated, damaged, or not a \.onnx model")


def test_damaged_weights_are_found(tmp_path):
    path = save_onnx(tmp_path / "small.onnx")
    files.write_onnx(onnx.load(path), path, PLAIN)
    assert files.read_artefact_description(path).num_classes == 3
    content = path.read_bytes()
    ones = np.ones((4, 3), np.float32).tobytes()
    assert content.count(ones) == 1
    path.write_bytes(content.replace(ones, bytes(len(ones))))
    refused(path, "its description is of other weights; copy or export it again")


def test_many_weights_are_in_a_file_of_their_own(tmp_path, monkeypatch):
    model = onnx.load(save_onnx(tmp_path / "small.onnx"))
    weights = np.arange(1200, dtype=np.float32).reshape(4, 300)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, "weights"))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 300
    monkeypatch.setattr(files, "MOST_WEIGHTS", 4000)
    path = tmp_path / "a.onnx"
    files.write_onnx(model, path, replace(PLAIN, num_classes=300, classes=()))
    assert (tmp_path / "a.onnx.data").stat().st_size >= weights.nbytes > path.stat().st_size
    found = files.open_artefact(path)(torch.eye(4)[1:2])
    assert np.array_equal(found, weights[1:2])


def test_operators_of_unknown_libraries_are_refused(tmp_path):
    path = save_onnx(tmp_path / "a.onnx", domain="evil.example")
    describe_onnx(path, text())
    refused(path, "'evil.example', which needs an additional library")


def test_openvino_models_that_are_damaged(tmp_path):
    path = tmp_path / "a.xml"
    layer = '<layer id="0"><data offset="0" size="64"/></layer>'
    escaped = text("openvino").replace('"', "&quot;")
    whole = f'<net><layers>{layer}</layers><rt_info><vitkit value="{escaped}"/></rt_info></net>'
    path.write_text(whole)
    refused(path, "its weights are missing: a.bin")
    path.with_suffix(".bin").write_bytes(bytes(63))
    refused(path, "truncated: 63 of 64 bytes")
    path.with_suffix(".bin").unlink()
    (tmp_path.parent / "secret.bin").write_bytes(bytes(64))
    path.with_suffix(".bin").symlink_to("../secret.bin")
    refused(path, r"secret\.bin, outside of the file's folder")
    (tmp_path / "weights").write_bytes(bytes(64))
    path.with_suffix(".bin").unlink()
    path.with_suffix(".bin").symlink_to("weights")
    refused(path, "OpenVINO cannot open it")
    path.write_text('<!DOCTYPE net [<!ENTITY a "b">]>' + whole)
    refused(path, "with a DOCTYPE")
    path.write_text(whole[:-20])
    refused(path, r"truncated, damaged, or not a \.xml model")
    path.write_text("<net><layers/></net>")
    refused(path, "has no description of vitkit")


def test_archives_of_torch_need_trust(tmp_path, capsys):
    path = tmp_path / "a.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/extra/vitkit.json", text("torch"))
    refused(path, r"can run code that is in it; pass --trust-code \(trust_code=True\)")
    assert cli.run(["inspect", str(path)]) == 0  # reads the description alone
    assert "classes: 3 (ant, bee, cat)" in capsys.readouterr().out
    assert cli.run(["predict", str(path), __file__]) == 2
    path.write_bytes(path.read_bytes()[:-30])
    refused(path, r"truncated, damaged, or not a \.pt2 model")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../vitkit.json", "{}")
    refused(path, "an entry that leads out of it")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/extra/vitkit.json", b" " * 9_000_000)  # 9 kB of the file
    refused(path, "its description is damaged")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/extra/vitkit.json", text("torch"))
        archive.writestr("a/weights", b"1234")
    path.write_bytes(path.read_bytes().replace(b"1234", b"1204"))
    refused(path, "the checksum of a/weights differs")


def test_a_path_has_its_own_preprocessing(tmp_path):
    path = save_onnx(tmp_path / "a.onnx")
    with pytest.raises(SettingError, match="pass its path alone"):
        vitkit.Predictor(path, PREPROCESS)
    with pytest.raises(CheckpointError, match="expected a file that is there"):
        vitkit.Predictor(tmp_path / "b.onnx")

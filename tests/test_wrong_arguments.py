"""Arguments of another kind than a function takes: one line says what to write."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_checkpoint import save_tiny

import vitkit

pytestmark = pytest.mark.usefixtures("wrong_types_come_in")
IMAGE = np.zeros((8, 8), np.uint8)
TAKES_A_MODEL = r"takes a model, such as vitkit\.load\(path\)\.model, not a "
IS_NO_PATH = "is not the path, the address or the name of a checkpoint"
OF_MODELS: dict[str, Callable[[object], object]] = {
    "freeze": vitkit.freeze,
    "parameter_groups": lambda model: vitkit.parameter_groups(model, lr=1e-3, weight_decay=0.1),
    "checkpoint_gradients": vitkit.checkpoint_gradients,
    "summary": vitkit.summary,
    "find_artefacts": lambda model: vitkit.find_artefacts(model, torch.zeros(1, 1, 8, 8)),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("checkpoint") / "m.safetensors", ["a", "b"])


@pytest.fixture(scope="module")
def checkpoint(path) -> vitkit.Checkpoint:
    return vitkit.load(path)


@pytest.mark.parametrize("function", OF_MODELS)
def test_a_function_of_models_says_how_to_get_one(path, checkpoint, function):
    for wrong in (path, checkpoint):
        with pytest.raises(
            vitkit.UserError, match=f"^{function} {TAKES_A_MODEL}{type(wrong).__name__}$"
        ):
            OF_MODELS[function](wrong)
    OF_MODELS[function](checkpoint.model)


def test_a_vit_is_made_of_a_spec(path):
    for wrong in (path, {"width": 64}):
        with pytest.raises(vitkit.UserError, match=r"^ViT takes a ViTSpec \(vitkit\.load takes a"):
            vitkit.ViT(wrong)


def test_a_predictor_of_a_path_says_what_to_write(path, checkpoint, monkeypatch):
    monkeypatch.chdir(path.rpartition("/")[0])
    for wrong in ("m.safetensors", checkpoint):
        with pytest.raises(vitkit.UserError, match="takes a function from images to log") as caught:
            vitkit.Predictor(wrong)
        written = str(caught.value).rpartition("write ")[2]
        predictor = eval(written, {"vitkit": vitkit, "checkpoint": checkpoint})
        assert predictor([IMAGE])[0].label in ("a", "b")
    for further in ((), ("mean",)):
        with pytest.raises(vitkit.UserError, match=r"such as checkpoint\.preprocess, not a "):
            vitkit.Predictor(checkpoint.model, *further)
    vitkit.Predictor(checkpoint.model, checkpoint.preprocess)


@pytest.mark.parametrize("function", ["inspect", "load", "convert"])
def test_what_reads_a_file_takes_no_object(checkpoint, tmp_path, function):
    further = {"out": tmp_path / "out", "to": "timm"} if function == "convert" else {}
    with pytest.raises(vitkit.UserError, match=f"a Checkpoint {IS_NO_PATH}; vitkit.save"):
        getattr(vitkit, function)(checkpoint, **further)


@pytest.mark.parametrize(
    ("call", "message"),
    [(lambda c, p: vitkit.create_model(p), "is a path; write vitkit.load('PATH').model"),
     (lambda c, p: vitkit.create_model(c), "create_model takes the name of a model, such as"),
     (lambda c, p: vitkit.training_transform(c), "such as vitkit.load(path).preprocess, not a"),
     (lambda c, p: vitkit.report(c), "takes the path of a run folder, such as result.run"),
     (lambda c, p: vitkit.compare(c, p), "takes paths of runs or checkpoints, not a Checkpoint"),
     (lambda c, p: vitkit.find_artefacts(c.model, [IMAGE]), "takes preprocessed images, a ten")],
)  # fmt: skip
def test_other_objects_are_named_with_what_is_expected(path, checkpoint, call, message):
    with pytest.raises(vitkit.UserError, match=re.escape(message).replace("PATH", re.escape(path))):
        call(checkpoint, path)


def test_a_mistyped_or_a_short_name_of_a_model_is_answered_with_the_nearest_ones():
    with pytest.raises(vitkit.UserError, match="did you mean 'vit_tiny_patch16_224' or "):
        vitkit.create_model("vit_tny")
    with pytest.raises(vitkit.UserError, match="did you mean 'vit_small_patch14_dinov2' or "):
        vitkit.create_model("dinov2")

"""`benchmarks/versus` on tiny models: equal logits, then turns, ratios and their intervals."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from tiny_checkpoint import save_noisy

import vitkit

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from versus import per_second, turn_order  # noqa: E402
from versus.__main__ import main  # noqa: E402
from versus.baselines import BASELINES  # noqa: E402
from versus.child import Answers, Child, ChildError, answer  # noqa: E402

sys.path.remove(str(BENCHMARKS))  # it has modules with the names of folders of the tests

QUICK = ["--rounds", "2", "--seconds", "0.01", "--threads", "1", "--batch-size", "2"]
PLAIN = {"image_size": 16, "patch_size": 8, "width": 24, "depth": 2, "num_heads": 3,
         "mlp_width": 32, "num_classes": 5}  # fmt: skip


class InThisProcess:
    """A library without a process of its own, whose start would take seconds."""

    def __init__(self, threads: int) -> None:
        self.answers = Answers()

    def close(self) -> None:
        torch.set_flush_denormal(False)

    def ask(self, do: str, **request: object) -> dict:
        if do == "products":
            return {"torch": 1e13, "numpy": 1e12}
        sent = json.loads(json.dumps({"do": do, **request}))
        reply = json.loads(json.dumps(answer(self.answers, sent)))
        if "refused" in reply:
            raise ChildError(reply["refused"])
        return reply


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr("versus.measure.Child", InThisProcess)


def test_libraries_are_compared_in_all_tasks(in_this_process, monkeypatch, capsys):
    small = partial(vitkit.create_model, **PLAIN)
    monkeypatch.setattr("versus.measure.create_model", small)
    words = ["--against", "torchvision", "vit-pytorch", "--engines", "torch", "--peak", "--json",
             "--tasks", "inference", "latency", "training"]  # fmt: skip
    assert main(["ViT-Ti/16", *QUICK, *words]) == 0
    result = json.loads(capsys.readouterr().out)
    tasks = {task["task"]: task for task in result["tasks"]}
    assert list(tasks) == ["inference", "latency", "training"]
    for task in tasks.values():
        libraries = ["torchvision", "vit-pytorch", "vitkit torch", "torchvision, again"]
        assert [row["library"] for row in task["rows"]] == libraries, task["not_timed"]
        assert not task["not_timed"]
        assert task["fastest"]["vitkit"].startswith("vitkit")
        for row in task["rows"]:
            assert len(row["seconds"]) == 4
            value, low, high = row["faster"]
            assert 0 < low <= value <= high
            assert row["peak_mb"] > 1
            assert row["logits"]["difference"] < 1e-3
    row = tasks["inference"]["rows"][0]
    assert row["share_of_peak"] == pytest.approx(
        row["images_per_second"][0] * tasks["inference"]["operations_per_image"] / 1e13
    )


def test_another_model_is_named_and_not_timed(in_this_process, tmp_path, capsys):
    """Noise in the biases of query, key and value, which vit-pytorch lacks."""
    model = save_noisy(tmp_path / "m.safetensors", [*"abcdef"], std=0.3, image_size=16)
    words = ["--against", "vit-pytorch", "--engines", "torch", "optimized", "--tasks", "training"]
    assert main([model, *words, *QUICK]) == 0
    table = capsys.readouterr().out
    assert re.search(r"not timed: vit-pytorch: RuntimeError: .*to_qkv.bias", table)
    assert "not timed: vitkit optimized: does not train" in table
    assert re.search(r"vitkit torch, again +[\d,.]+ +\d\.\d\d x \[", table)


def test_a_process_that_ends_is_an_error_in_one_line():
    child = Child(1)
    with pytest.raises(ChildError, match=r"AttributeError: .*nothing"):
        child.ask("nothing")
    child._process.kill()
    with pytest.raises(ChildError, match="its process ended with exit code -9"):
        child.ask("fit")
    child.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "tim"], r"--against tim: must be one of timm, .* \(did you mean 'timm'\?\)"),
        (["--against", "timm:flot32"], "or NAME:PRECISION with one of float32"),
        (["--engines", "opnvino"], r"--engines opnvino: .* \(did you mean 'openvino'\?\)"),
        (["--engines", "torch:int8"], "--engines torch:int8: has only float32, bfloat16, not int8"),
        (["--batch-size", "0"], "--batch-size 0: must be 1 or more"),
        (["--rounds", "1"], "--rounds 1: must be 2 or more"),
        (["--seconds", "-1"], "--seconds -1.0: must be 0 or more"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_measured(words, message, capsys):
    assert main(["vit_tiny_patch16_224", "--against", "none", *words]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


def test_each_round_goes_forwards_and_backwards():
    names = ["base", "a", "b", "base, again"]
    turns = list(turn_order(names, 400))
    for start in range(0, len(turns), 8):
        order = turns[start : start + 4]
        assert sorted(order) == sorted(names)
        assert turns[start + 4 : start + 8] == order[::-1]
    assert turns == list(turn_order(names, 400))


def test_the_interval_of_a_median_is_the_one_of_order_statistics():
    """Its coverage is known without any bootstrap: binomial probabilities of ranks."""
    seconds = 1 / np.arange(1.0, 102.0)
    low, high = per_second(list(seconds), 1.0)[1:]
    # of 101 values the median lies between the 41st and the 61st with 95 %
    assert low == pytest.approx(41, abs=2)
    assert high == pytest.approx(61, abs=2)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_script_compares_all_libraries_in_processes_of_their_own(tmp_path):
    """The engines' figures of docs/benchmarks.md rest on it."""
    model = vitkit.create_model("vit_tiny_patch16_224", **PLAIN)
    fill_with_noise(model, std=0.3)
    for name, parameter in model.named_parameters():
        if name.endswith("qkv.bias"):  # vit-pytorch has none
            parameter.data.zero_()
    preprocess = vitkit.Preprocess(image_size=PLAIN["image_size"])
    file = vitkit.save(tmp_path / "m.safetensors", model, preprocess=preprocess, classes=[*"abcde"])
    command = [sys.executable, str(BENCHMARKS / "versus"), str(file)]
    words = ["--against", *BASELINES, "openvino:int8", "--peak", "--json"]
    done = subprocess.run(
        [*command, *words, *QUICK], check=False, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result["matrix_products"]["float32 torch"] > 1e8
    for task in result["tasks"]:
        assert task["not_timed"] == {}
        assert [row["library"] for row in task["rows"]] == [
            *BASELINES, "openvino int8", "vitkit torch", "vitkit optimized", "vitkit compile",
            "vitkit openvino", "vitkit onnxruntime", "timm, again",
        ]  # fmt: skip

"""The gate's decisions, and the process that it runs an exported model in."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit
from vitkit.exporting import fresh_process
from vitkit.exporting.artefact import ArtefactDescription
from vitkit.exporting.check import (
    GateBounds,
    LogitPairs,
    compare_outputs,
    refuse_fake_int8,
    refuse_other_batches,
    refuse_slower,
    refuse_worse,
)
from vitkit.exporting.check_images import GateImages, GeneratedImages
from vitkit.exporting.fresh_process import FreshProcess

CLASSES = ("ant", "bee")
INT8 = ArtefactDescription("openvino", vitkit.Preprocess(), CLASSES, 2, 1.0, int8=True)
FLOAT32 = ArtefactDescription("onnx", vitkit.Preprocess(), CLASSES, 2, 1.0)


class Labels(GeneratedImages):
    """The number of images, which these tests never read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


def judge(
    labels: list[int], torch_says: list[int], exported_says: list[int], description=INT8, **bounds
) -> None:
    """Run the gate on one-hot logits of these classes."""
    pairs = LogitPairs(
        *(torch.eye(2)[torch.tensor(said)] * 4 for said in (torch_says, exported_says))
    )
    images = GateImages(Labels(len(labels)), np.array(labels), "photos", "val")
    figures = compare_outputs(pairs, images, description)
    refuse_worse(figures, description, GateBounds(**bounds))


LABELS = [0] * 60 + [1] * 1000


def test_a_drop_within_the_bound_passes_and_one_beyond_is_refused():
    # 5 of 1,060 are 0.47 points
    judge(LABELS, LABELS, [*LABELS[:-5], *[0] * 5])
    with pytest.raises(vitkit.CheckpointError, match=r"by 0\.57 points \(bound 0\.5\)"):
        judge(LABELS, LABELS, [*LABELS[:-6], *[0] * 6])
    judge(LABELS, LABELS, [*LABELS[:-6], *[0] * 6], max_drop=0.6)


def test_a_class_of_fifty_images_has_a_bound_of_its_own():
    # 1 of 60 is 1.67 points, but only one image; 2 of 60 are 0.19 points of all
    judge(LABELS, LABELS, [1, *LABELS[1:]])
    message = r"accuracy of 'ant' falls from 100\.00% to 96\.67% .* by 3\.33 points and 2 images"
    with pytest.raises(vitkit.CheckpointError, match=message):
        judge(LABELS, LABELS, [1, 1, *LABELS[2:]])
    few = [0] * 49 + [1] * 1000
    judge(few, few, [1, 1, *few[2:]])
    # 2 of 200 are 1 point, 3 are more
    many = [0] * 200 + [1] * 1000
    judge(many, many, [1, 1, *many[2:]])
    with pytest.raises(vitkit.CheckpointError, match=r"by 1\.50 points and 3 images"):
        judge(many, many, [1, 1, 1, *many[3:]])


@pytest.mark.parametrize("with_preprocessing", [False, True])
def test_two_images_together_get_the_logits_of_each_alone(with_preprocessing):
    description = replace(FLOAT32, with_preprocessing=with_preprocessing)
    image = GeneratedImages().read(0)

    def run(images: np.ndarray) -> list[np.ndarray]:
        logits = images.reshape(len(images), -1)[:, 5:7].astype(np.float32)
        shares = np.exp(logits - logits.max(1, keepdims=True))
        return [shares / shares.sum(1, keepdims=True), logits]

    def first_alone(images: np.ndarray) -> list[np.ndarray]:
        return run(np.repeat(images[:1], len(images), axis=0))

    def nan_together(images: np.ndarray) -> list[np.ndarray]:
        return [part if len(images) == 1 else part * np.nan for part in run(images)]

    refuse_other_batches(run, image, description)
    with pytest.raises(vitkit.CheckpointError, match="two images in one batch do not get the"):
        refuse_other_batches(first_alone, image, description)
    with pytest.raises(vitkit.CheckpointError, match=r"\(1, 2\) for 2 images"):
        refuse_other_batches(lambda images: run(images[:1]), image, description)
    with pytest.raises(vitkit.CheckpointError, match="two images in one batch do not get the"):
        refuse_other_batches(nan_together, image, description)


def test_a_better_model_passes():
    judge(LABELS, [1] * 500 + LABELS[500:], LABELS)


def test_float32_is_bound_by_its_logits_even_where_the_classes_agree():
    labels = [0, 1] * 10
    judge(labels, labels, labels, FLOAT32)
    pairs = LogitPairs(torch.eye(2)[labels] * 4, torch.eye(2)[labels] * 4.1)
    figures = compare_outputs(pairs, GateImages(Labels(20), np.array(labels)), FLOAT32)
    with pytest.raises(vitkit.CheckpointError, match=r"logits differ .*bound 0\.001"):
        refuse_worse(figures, FLOAT32, GateBounds())


def test_nan_and_one_class_are_refused():
    images = GateImages(Labels(20))
    good = torch.eye(2)[[0, 1] * 10]
    for bad, message in (
        (good * torch.nan, "NaN or infinity for 20 of 20 images"),
        (good * 0 + torch.tensor([1.0, 0]), "same class for all 20 images"),
    ):
        figures = compare_outputs(LogitPairs(good, bad), images, FLOAT32)
        with pytest.raises(vitkit.CheckpointError, match=message):
            refuse_worse(figures, FLOAT32, GateBounds())


def test_int8_that_runs_in_float32_is_refused():
    refuse_fake_int8({"FullyConnected": 3, "MatMul": 1}, 4)
    with pytest.raises(vitkit.CheckpointError, match="executes 3 of 4 linear layers"):
        refuse_fake_int8({"FullyConnected": 3}, 4)


def test_slower_is_refused_unless_it_is_allowed():
    latency = {"exported_ms": 2.2, "baseline_ms": 2.0, "baseline": "float32", "ratio": 1.1}
    refuse_slower(latency | {"ratio": 1.04}, INT8, GateBounds())
    refuse_slower(latency, INT8, GateBounds(allow_slower=True))
    refuse_slower(latency | {"baseline": "torch"}, FLOAT32, GateBounds())
    with pytest.raises(vitkit.CheckpointError, match=r"1\.10 times as long as the same runtime"):
        refuse_slower(latency, INT8, GateBounds())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["sh", "-c", "exec sleep 60"], "does not answer within 0.3 s"),
        (["./not-there"], "no process can be started to check it in: No such file"),
        (["sh", "-c", "kill -ILL $$"], "SIGILL: this CPU lacks instructions"),
        (["sh", "-c", "kill -SEGV $$"], "ended by SIGSEGV"),
        (["sh", "-c", "echo no luck >&2; exit 4"], "ended with code 4: no luck"),
        (["sh", "-c", "echo not a message"], "ended with code 0"),
        (
            ["sh", "-c", "echo not a message; exec sleep 60"],
            "sends an invalid reply and does not exit",
        ),
    ],
)
def test_a_runtime_that_dies_or_hangs_is_one_line(command, message, monkeypatch):
    if "echo not a message; " in command[-1]:
        monkeypatch.setattr(fresh_process, "LEAVING_SECONDS", 0.3)
    seconds = 0.3 if command[-1].startswith("exec sleep") else 60.0
    with pytest.raises(vitkit.CheckpointError, match=message) as refused:
        FreshProcess(Path("a.onnx"), command=command, seconds=seconds)
    assert "\n" not in str(refused.value)


def test_sockets_of_python_are_refused_where_there_is_no_namespace():
    lines = (
        "import socket, sys",
        "from vitkit.exporting import child as no_network",
        "no_network._own_network = lambda: False",
        "print(no_network.cut_off_network())",
        "open_one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "for reach in (lambda: socket.create_connection(('127.0.0.1', 9)),",
        "              lambda: open_one.sendto(b'a', ('127.0.0.1', 9)),",
        "              lambda: open_one.connect(('127.0.0.1', 9)),",
        "              lambda: socket.gethostbyname('localhost')):",
        "    try:",
        "        reach()",
        "    except OSError as error:",
        "        print(error)",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    first, *refusals = done.stdout.splitlines()
    assert first == "audit hook"
    assert len(refusals) == 4
    assert all(line.startswith("no network here: socket.") for line in refusals)

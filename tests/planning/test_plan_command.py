"""`vitkit plan` as a person types it: the table, the JSON, what fits, and mistakes."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import save_tiny

from vitkit import cli

TEXT = """\
vit_tiny_patch16_224: 5.72 M parameters
an image: 224 x 224 pixels, 197 tokens
GFLOP of an image, forward: 2.507 (patches 0.058, projections 0.697, attention 0.358, mlp 1.394, \
head 0.000)
1 x Tesla T4, 4,000 images on each in a step
float16, adamw

parallel                           -           -
checkpointing                      -       block
GFLOP of an image              7.522       9.971
weights, GB                     0.02        0.02
gradients, GB                   0.02        0.02
optimizer, GB                   0.05        0.05
ema, GB                         0.00        0.00
copies, GB                      0.01        0.00
images, GB                      2.41        2.41
activations, GB                67.44       13.94
temporary, GB                   1.51        1.51
peak, GB                       71.44       17.93
fits in 14 GB                     no          no
largest batch                    780       3,119
ms of a step                 3,233.1     4,232.9
images/s                       1,237         945
hours, 300 epochs               86.3         113
days                            3.60        4.71

For more images in a step than the largest batch pass --grad-accum-steps to train. Speed is by \
shares of the data sheet that an H100 reached; small steps may take half or twice as long. \
Exchanges between GPUs are not counted; see docs/scaling.md.
"""


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(["plan", *words]) == 0
    return capsys.readouterr().out


def test_the_plan_fits_80_columns_and_agrees_with_its_json(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    words = ("ViT-B/16", "--gpus", "8", "--gpu", "h200", "--batch", "2048")
    text = plan(capsys, *words)
    assert max(map(len, text.splitlines())) <= 80
    found = json.loads(plan(capsys, *words, "--json"))
    assert (found["parameters"], found["tokens"]) == (86_567_656, 197)
    kinds = [(way["parallel"], way["recompute"]) for way in found["ways"]]
    assert kinds == [("ddp", False), ("ddp", True), ("fsdp", False), ("fsdp", True)]
    for way in found["ways"]:
        seconds, forward = way["step"]["total"], sum(found["forward_flops"].values())
        assert way["training_flops"] >= 3 * forward
        assert way["images_per_second"] == pytest.approx(2048 / seconds)
        assert way["days"] == pytest.approx(1_281_167 * 300 * seconds / 2048 / 86_400)
    (peaks,) = re.findall(r"^peak, GB +(.*)$", text, flags=re.MULTILINE)
    assert [float(peak) for peak in peaks.split()] == pytest.approx(
        [way["memory"]["peak"] / 1e9 for way in found["ways"]], abs=0.01
    )
    # twice the GPUs for the same images take about half as long
    more = json.loads(plan(capsys, *words, "--gpus", "16", "--json"))
    assert more["ways"][0]["days"] < 0.6 * found["ways"][0]["days"]


def test_the_text(capsys):
    assert plan(capsys, "vit_tiny_patch16_224", "--gpu", "t4", "--batch", "4000") == TEXT


def test_the_largest_batch_fits(capsys):
    words = ("ViT-L/16", "--gpu", "rtx4090", "--img-size", "384", "--json", "--batch-size")
    most = json.loads(plan(capsys, *words, "64"))["ways"][0]["largest_batch"]
    fits = []
    for batch in (most, most + 1):
        found = json.loads(plan(capsys, *words, str(batch)))
        fits.append(found["ways"][0]["memory"]["peak"] <= found["available_bytes"])
    assert fits == [True, False]


def test_short_and_slow_runs_have_three_digits(capsys):
    words = ("ViT-L/16", "--img-size", "1024", "--batch", "1", "--amp", "off", "--images", "10000")
    text = plan(capsys, *words, "--epochs", "1")
    ways = json.loads(plan(capsys, *words, "--epochs", "1", "--json"))["ways"]
    for title, wanted in (
        ("hours, 1 epochs", [24 * way["days"] for way in ways]),
        ("days", [way["days"] for way in ways]),
        ("images/s", [way["images_per_second"] for way in ways]),
    ):
        (row,) = re.findall(rf"^{title} +(.*)$", text, flags=re.MULTILINE)
        numbers = [float(number.replace(",", "")) for number in row.split()]
        assert numbers == pytest.approx(wanted, rel=5.1e-3)


def test_settings_change_what_they_name(capsys):
    base = json.loads(plan(capsys, "ViT-B/16", "--json"))["ways"]
    ema = json.loads(plan(capsys, "ViT-B/16", "--json", "--model-ema"))["ways"]
    assert ema[0]["memory"]["ema"] == base[0]["memory"]["weights"]
    compiled = json.loads(plan(capsys, "ViT-B/16", "--json", "--compile"))["ways"]
    assert compiled[0]["days"] < base[0]["days"]
    muon = json.loads(plan(capsys, "ViT-B/16", "--json", "--opt", "muon", "--gpus", "2"))["ways"]
    assert [way["parallel"] for way in muon] == ["ddp", "ddp"]
    full = json.loads(plan(capsys, "ViT-B/16", "--json", "--amp", "off"))["ways"]
    assert full[0]["step"]["products"] > 5 * base[0]["step"]["products"]
    deep = json.loads(plan(capsys, "ViT-B/16", "--json", "--spec.depth", "24"))["ways"]
    assert deep[0]["memory"]["activations"] == pytest.approx(
        2 * base[0]["memory"]["activations"], rel=0.02
    )
    half = json.loads(plan(capsys, "ViT-B/16", "--json", "--gpu", "t4"))
    assert half["amp"] == "float16"


def test_a_checkpoint_is_planned_as_the_model_in_it(tmp_path, capsys):
    path = save_tiny(tmp_path / "tiny.safetensors", ["a", "b"])
    found = json.loads(plan(capsys, str(path), "--json"))
    assert found["parameters"] > 0
    assert found["model"] == str(path)


def test_the_gpu_of_this_machine_by_its_own_figures(monkeypatch, capsys):
    here = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)
    found = json.loads(plan(capsys, "ViT-B/16", "--gpu", "this", "--json"))
    assert (found["gpu"], found["available_bytes"]) == ("NVIDIA H200", 148e9)
    here.name = "NVIDIA H20"
    assert cli.run(["plan", "ViT-B/16", "--gpu", "this"]) == 2
    assert "--gpu this: the peak of 'NVIDIA H20' is not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ViT-B/16 --gpu h20", r"--gpu h20: must be one of .*did you mean 'h200'"),
        ("ViT-B/16 --gpus 8 --batch 100", r"--batch-size 100: must be divisible by --gpus 8.* 96$"),
        ("ViT-B/16 --gpus 0", r"--gpus 0: must be 1 or more"),
        ("ViT-B/16 --epochs 0", r"--epochs 0: must be 1 or more"),
        ("ViT-B/16 --batch-size 0", r"--batch-size 0: must be 1 or more"),
        ("ViT-B/16 --img-size 0", r"--img-size 0: must be 1 or more"),
        ("ViT-B/16 --images 100", r"--batch-size 256: .* most --images 100; pass --batch-size 100"),
        ("ViT-B/16 --gpus 8 --batch 2048 --images 101", r"--images 101; pass --batch-size 96$"),
        ("ViT-B/16 --gpus 8 --images 5", r"--batch-size 2048: .*; pass --gpus 5$"),
        ("vit_bas_patch16_224", r"no model .*did you mean 'vit_base_patch16_224'"),
        ("ViT-B/16 --img-size 225", r"225 .* not divisible by patch_size 16"),
        ("ViT-B/16 --spec.num-heads 7", r"width 768 is not divisible by num_heads 7"),
        ("ViT-B/16 --gpu this", r"--gpu this: this machine has no CUDA GPU; pass one of h100, "),
        ("ViT-B/16 --measure", r"there is no flag --measure; .* by formula"),
        ("ViT-B/16 --amp bfloat16 --gpu t4", r"--amp bfloat16: t4 has none"),
        ("ViT-B/16 --parallel fsdp", r"there is no flag --parallel; .* plan shows ddp and fsdp"),
        ("ViT-B/16 --grad-checkpointing", r"no flag --grad-checkpointing; .* plan shows steps"),
        ("ViT-B/16 --attention-kernel plain", r"no flag --attention-kernel; .* plan assumes"),
        ("ViT-B/16 --opt lion", r"--opt lion: must be one of"),
        ("vit_base_r50_s16_224", r"the stem 'resnet' has a network before"),
        ("ViT-B/16 --spec.stem resnet", r"stem|stages"),
    ],
)
def test_mistakes_are_one_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1

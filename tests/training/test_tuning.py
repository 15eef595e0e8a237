"""Auto-tuning before the first step: learning rate, half precision, compiler."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training.tiny_runs import end_of, run, settings_of

import vitkit
from vitkit import SettingError, TrainConfig, TrainingStep, cli
from vitkit.data.augmentation.pipeline import BatchTransform
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.optimization.precision import LossScale
from vitkit.training.plan import Plan, make_plan, make_step

SPEC = {"image_size": 8, "patch_size": 4, "in_channels": 1, "width": 16, "depth": 1, "num_heads": 2,
        "mlp_width": 32}  # fmt: skip
SHORT = {"epochs": 1, "warmup_epochs": 0.0, "max_steps": 6, "save_every": 3}


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = TrainConfig(data="digits", model="vit_tiny_patch16_224", spec=SPEC, batch_size=32,
                         amp="off", device="cpu", crop_scale=1.0, flip=0.0)  # fmt: skip
    return make_plan(config)


def fresh(plan: Plan) -> vitkit.ViT:
    torch.manual_seed(0)
    return vitkit.ViT(plan.spec)


def stepping(plan: Plan, model: vitkit.ViT, **settings: object) -> TrainingStep:
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, **settings))
    optimizer = configured_optimizer(model, plan.config)
    return make_step(plan, model, optimizer, BatchTransform(plan.preprocess, plan.device))


def test_the_loss_scale_halves_at_once_and_doubles_in_time():
    scale = LossScale()
    assert scale.lower()
    assert scale.scale == 2.0**15
    for _ in range(LossScale.PATIENCE):
        scale.count_finite()
    assert (scale.scale, scale.finite_steps) == (2.0**16, 0)
    scale.count_finite()
    other = LossScale()
    other.load({}, scale.metadata())
    assert (other.scale, other.finite_steps) == (2.0**16, 1)
    other.scale = 1.0
    assert not other.lower()


def test_in_float16_the_gradient_is_that_of_float32_and_an_overflow_changes_nothing(plan):
    plain, half = fresh(plan), fresh(plan)
    expected = stepping(plan, plain, label_smoothing=0.0)(plan.steps[0], 0)
    step = stepping(plan, half, amp="float16", label_smoothing=0.0)
    assert step.scale is not None
    before = {name: value.clone() for name, value in half.state_dict().items()}
    step.scale.scale = 2.0**60
    made = step(plan.steps[0], 0)
    assert made.overflow
    assert made.bad is None
    assert step.scale.scale == 2.0**59
    assert all(torch.equal(value, before[name]) for name, value in half.state_dict().items())
    step.scale.scale = 2.0**10
    made = step(plan.steps[0], 0)
    assert (made.overflow, step.scale.finite_steps) == (False, 1)
    assert made.norm == pytest.approx(expected.norm, rel=0.01)
    step.scale.scale = 1.0  # an overflow that no scale can mend is a gradient that is not finite
    half.head.weight.register_hook(lambda gradient: gradient * torch.inf)
    assert step(plan.steps[0], 0).bad == "gradient norm"


FLOAT16 = {"amp": "float16", "model_ema": False}


@pytest.mark.parametrize(
    "settings",
    [
        {"opt": "lamb", "sched": "linear", "layer_decay": 0.7, "loss": "bce"},
        FLOAT16,
        {"attention_kernel": "plain", "amp": "bfloat16"},
        pytest.param({"opt": "sgd", "lr": 0.05, "sched": "constant"}, marks=pytest.mark.soak),
        pytest.param({"opt": "adam", "sched": "rsqrt", "warmup_epochs": 0.1},
                     marks=pytest.mark.soak),
        pytest.param({"opt": "muon", "layer_decay": 0.7}, marks=pytest.mark.soak),
        pytest.param({"opt": "adan"}, marks=pytest.mark.soak),
    ],
    ids=lambda settings: str(settings.get("opt", settings.get("amp"))),
)  # fmt: skip
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, settings):
    run(tmp_path / "straight", **SHORT | settings)
    run(tmp_path / "stopped", **SHORT | settings | {"max_steps": 3})
    run(tmp_path / "stopped", **SHORT | settings | {"resume": str(tmp_path / "stopped")})
    assert end_of(tmp_path / "stopped") == end_of(tmp_path / "straight")


def test_the_kernel_that_was_decided_is_kept(tmp_path):
    """`auto` is decided once per run; a run with a given precision has nothing to decide."""
    asked = SHORT | {"amp": "auto", "spec": SPEC, "max_steps": 2}
    run(tmp_path / "tried", **asked)
    before = settings_of(tmp_path / "tried")
    assert before["attention_kernel"] in ("fused", "plain")
    log = (tmp_path / "tried" / "train.log").read_text()
    assert f"precision: float32, {before['attention_kernel']} attention (" in log
    run(tmp_path / "tried", **asked | {"max_steps": 3, "resume": str(tmp_path / "tried")})
    assert settings_of(tmp_path / "tried") == before | {"max_steps": 3}
    other = "fused" if before["attention_kernel"] == "plain" else "plain"
    asked |= {"resume": str(tmp_path / "tried"), "attention_kernel": other}
    with pytest.raises(SettingError, match="differ from the run's: attention_kernel"):
        run(tmp_path / "tried", **asked)
    asked |= {"resume": None, "attention_kernel": "auto"}
    run(tmp_path / "named", **asked | {"amp": "off"})
    assert settings_of(tmp_path / "named")["attention_kernel"] == "fused"
    assert "precision:" not in (tmp_path / "named" / "train.log").read_text()


def compiled(output: Path) -> list[str]:
    """Return the command of a compiled run."""
    return ["train", "digits", "--recipe", "digits", "--device", "cpu", "--threads", "1",
            "--epochs", "6", "--save-every", "3", "--compile", "--output", str(output)]  # fmt: skip


def child(tmp_path, name: str, *flags: str) -> None:
    """Train in a fresh process without shape checks, which would break the compiled graph."""
    words = [sys.executable, "-m", "vitkit", *compiled(tmp_path / name), *flags]
    subprocess.run(words, capture_output=True, text=True, check=True)


@pytest.mark.soak
def test_a_compiled_run_resumes_with_the_same_bits_and_leaves_plain_names(tmp_path):
    child(tmp_path, "straight", "--max-steps", "6")
    child(tmp_path, "stopped", "--max-steps", "3")
    child(tmp_path, "stopped", "--max-steps", "6", "--resume", "auto")
    assert end_of(tmp_path / "stopped") == end_of(tmp_path / "straight")
    stored = vitkit.load(tmp_path / "straight" / "weights" / "last.safetensors").model
    assert "blocks.0.attn.qkv.weight" in stored.state_dict()


@pytest.mark.soak
def test_a_compiled_run_whose_images_grow_resumes_with_the_same_bits(tmp_path):
    growing = ("--progressive", "4", "6", "8", "--epochs", "3", "--spec.patch-size", "2")
    child(tmp_path, "straight", *growing)
    child(tmp_path, "stopped", *growing, "--max-steps", "12")
    child(tmp_path, "stopped", *growing, "--max-steps", "60", "--resume", "auto")
    assert end_of(tmp_path / "stopped") == end_of(tmp_path / "straight")


def test_without_a_compiler_a_run_goes_on_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert cli.run([*compiled(tmp_path / "run"), "--max-steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert "compile: there is no C++ compiler here; the training step is not compiled" in printed
    assert settings_of(tmp_path / "run")["compile"] is False

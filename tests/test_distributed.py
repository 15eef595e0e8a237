"""Several processes make the same run as one: gloo on the CPU, forked or launched."""

import errno
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training.tiny_runs import end_of, last_state
from training.worlds import Recorder, config_of, in_world, numbers, order, run, together

import vitkit
from vitkit.data.datasets.dataset import ArraySplit
from vitkit.distributed import ProcessGroup, is_sharded
from vitkit.evaluation.loop import count_predictions, predict_batches
from vitkit.training import step as fsdp
from vitkit.training.plan import make_plan

GREY = vitkit.Preprocess(image_size=(4, 4), mean=(0.0,), std=(1.0,), fit="squash")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run by one process."""
    return run(1, tmp_path_factory.mktemp("alone") / "run")


def elastic(output: Path, sizes: tuple[int, ...], ends=(7, 20, 30)) -> list[list]:
    """One run, its parts by as many processes each as `sizes` says."""
    parts = []
    for size, end in zip(sizes, ends, strict=True):
        resume = {"resume": str(output)} if parts else {}
        parts.append(run(size, output, max_steps=end, **resume))
        assert [one["error"] for one in parts[-1]] == [None] * size
    return parts


SOAK = [pytest.param(sizes, marks=pytest.mark.soak) for sizes in ((1, 2, 1), (4, 1, 4))]


@pytest.mark.parametrize("sizes", [(2, 1, 2), *SOAK])
def test_any_number_of_processes_makes_the_same_run(alone, tmp_path, sizes):
    """T7. Stopped in mid-epoch and at an epoch's end, and gone on with by another number."""
    parts = elastic(tmp_path / "run", sizes)
    together_order = {step: images for part in parts for step, images in order(part).items()}
    assert json.dumps(together_order) == json.dumps(order(alone))
    for epoch in range(3):
        images = [p for step in range(10 * epoch, 10 * epoch + 10) for p in together_order[step]]
        assert len(set(images)) == len(images) == 1280
    straight = numbers(alone)
    found = {step: both for part in parts for step, both in numbers(part).items()}
    assert found.keys() == straight.keys()
    apart = max(abs(found[step][0] - straight[step][0]) for step in straight)
    assert 0 < apart <= 1e-5
    assert all(found[step][1] == pytest.approx(straight[step][1], rel=1e-3) for step in straight)
    metrics = parts[-1][0]["metrics"]
    assert metrics["test"]["top1"] == pytest.approx(alone[0]["metrics"]["test"]["top1"], abs=0.003)


def test_accumulation_and_averages_are_those_of_one_process(tmp_path):
    settings = {"grad_accum_steps": 4, "model_ema": True, "max_steps": 12}
    one = run(1, tmp_path / "one", **settings)
    two = run(2, tmp_path / "two", **settings)
    assert order(one) == order(two)
    apart = [abs(a[0] - b[0]) for a, b in zip(numbers(one).values(), numbers(two).values(),
                                              strict=True)]  # fmt: skip
    assert max(apart) <= 1e-5
    assert two[0]["bits"] == two[1]["bits"] != one[0]["bits"]
    ours, theirs = (load_file(last_state(tmp_path / name) / "ema.safetensors")
                    for name in ("one", "two"))  # fmt: skip
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-3


def test_four_parts_of_a_batch_are_the_same_however_processes_and_micro_batches_make_them(tmp_path):
    """Mixing and dropout are drawn by a part's place in the whole batch."""
    spec = {"depth": 1, "width": 32, "patch_size": 4, "mlp_dropout": 0.1, "drop_path": 0.2}
    settings = {"spec": spec, "mixup": 0.8, "cutmix": 1.0, "max_steps": 2}
    one, two = (
        numbers(run(size, tmp_path / str(size), grad_accum_steps=4 // size, **settings))
        for size in (1, 2)
    )
    assert [two[step][0] for step in (0, 1)] == pytest.approx(
        [one[step][0] for step in (0, 1)], abs=1e-5
    )


def plural(images: int):
    """A split whose images say their own number, and a model that is right about some of them."""
    batch_images = np.zeros((images, 4, 4, 1), np.uint8)
    batch_images[:, 0, 0, 0] = np.arange(images)
    labels = np.arange(images) % 7
    split = ArraySplit(batch_images, labels, "numbers")
    logits = torch.randn(256, 7, generator=torch.Generator().manual_seed(1))

    def forward(batch):
        return logits[(batch[:, 0, 0, 0] * 255).round().long()]

    return split, forward


@pytest.mark.parametrize("images", [101, 3, 1])
def test_evaluation_counts_every_image_once(images):
    split, forward = plural(images)

    def scores(world: ProcessGroup | None = None) -> dict:
        predictions = predict_batches(forward, split, GREY, batch_size=16, world=world)
        return count_predictions(predictions, 7).counts(world).scores()

    alone, measure = scores(), in_world(scores)
    first, second = together(2, measure)
    assert first == second
    assert first["images"] == images
    assert first["top1"] == pytest.approx(alone["top1"], abs=1e-9)
    assert first["top5"] == pytest.approx(alone["top5"], abs=1e-9)
    assert first["loss"] == pytest.approx(alone["loss"], abs=1e-6)


@pytest.mark.parametrize(("rank", "images"), [(0, 3), (1, 2)])
def test_a_model_in_parts_is_called_equally_often_by_every_process(rank, images):
    split, forward = plural(5)
    calls = []

    def noted(batch):
        calls.append(len(batch))
        return forward(batch)

    made = predict_batches(
        noted, split, GREY, batch_size=1, world=ProcessGroup(rank, 2), collective=True
    )
    assert len(list(made)) == images
    assert len(calls) == 3


def test_a_model_in_parts_is_evaluated_in_parts_and_gathered_once_an_epoch(tmp_path, monkeypatch):
    def noted(model, world):
        if not fsdp.has_shards(model):  # by the other run
            return model
        assert all(is_sharded(p) for p in model.parameters())  # after evaluation, too
        with (tmp_path / f"gathered-{world.rank}").open("a") as file:
            file.write("x")
        return fsdp.unsharded_model(model, world)

    for module in ("callbacks", "saving"):
        monkeypatch.setattr(f"vitkit.training.{module}.unsharded_model", noted)
    settings = {"epochs": 2, "model_ema": True, "max_steps": 20, "warmup_epochs": 0.5}
    whole, parts = (run(2, tmp_path / parallel, parallel=parallel, **settings)
                    for parallel in ("ddp", "fsdp"))  # fmt: skip
    assert [one["error"] for one in parts] == [None, None]
    for split in ("val", "test"):
        ours, theirs = (found[0]["metrics"][split] for found in (parts, whole))
        assert ours == pytest.approx(theirs, abs=1e-3)
    again = vitkit.evaluate(tmp_path / "fsdp" / "weights" / "best.safetensors", "digits")
    assert again["loss"] == pytest.approx(parts[0]["metrics"]["test"]["loss"], abs=1e-6)
    assert (tmp_path / "gathered-1").read_text() == "xx"


def poisoned(where: str, rank: int, step: int) -> type[Recorder]:
    """A callback by which one process meets a number that is not finite."""

    class Poisoned(Recorder):
        def before_step(self, trainer, batch):
            super().before_step(trainer, batch)
            model, world = trainer.training_step.model, trainer.training_step.world
            if trainer.progress.step == step and world.rank == rank:
                weight = model.head.weight
                if where == "input":
                    embed = model.patch_embed
                    embed.register_forward_hook(lambda module, given, made: made / 0)
                elif where in ("loss", "mixed"):
                    head = model.head
                    head.register_forward_hook(lambda module, given, made: made * float("nan"))
                elif where == "gradient":
                    weight.register_hook(lambda gradient: gradient * float("inf"))
                else:
                    with torch.no_grad():
                        weight[0, 0] = float("nan")

    return Poisoned


def check_poisoned(output: Path, where: str, rank: int, step: int, **settings) -> None:
    found = run(2, output, poisoned(where, rank, step), save_every=5, **settings)
    errors = [one["error"] for one in found]
    assert errors[0] == errors[1]
    kind, text, code = errors[0]
    assert (kind, code) == ("NonFiniteError", 3)
    assert f"at step {step} " in text
    assert [len(one["steps"]) for one in found] == [step + 1] * 2
    if where != "gradient":  # that is everywhere before it can be looked at
        split = make_plan(config_of(output)).dataset.splits["train"]
        named = ", ".join(split.name(image) for image in found[rank]["steps"][-1][1][:3])
        assert f" on rank {rank} " in text
        assert f"images {named} ..." in text
    for path in [*(output / "state").rglob("*.safetensors"), *(output / "weights").glob("*")]:
        assert all(torch.isfinite(value).all() for value in load_file(path).values()), path
    assert last_state(output).name == f"step-{step // 5 * 5:08d}"


@pytest.mark.parametrize(
    "where",
    ["loss", "gradient",
     *(pytest.param(name, marks=pytest.mark.soak) for name in ("input", "parameter", "mixed"))],
)  # fmt: skip
def test_a_number_that_is_not_finite_on_one_process_stops_all(tmp_path, where):
    """T15."""
    amp = {"amp": "bfloat16"} if where == "mixed" else {}
    check_poisoned(tmp_path / "run", where, 1, 7, log_interval=5, **amp)


def stopping(rank: int, step: int) -> type[Recorder]:
    class Stopping(Recorder):
        def before_step(self, trainer, batch):
            super().before_step(trainer, batch)
            if trainer.progress.step == step and trainer.training_step.world.rank == rank:
                os.kill(os.getpid(), signal.SIGTERM)

    return Stopping


DROPOUT = {"spec": {"depth": 1, "width": 32, "patch_size": 4, "drop_path": 0.2}, "max_steps": 13}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> str:
    """The hash that two processes end with when nothing happens to them."""
    output = tmp_path_factory.mktemp("straight") / "run"
    run(2, output, **DROPOUT)
    return end_of(output)


@pytest.mark.parametrize("step", [4, 9])
def test_a_signal_to_one_process_stops_all_at_the_same_step(straight, tmp_path, step):
    """T12, in mid-epoch and in an epoch's last step; what is resumed ends with the same bits."""
    stopped = run(2, tmp_path / "run", stopping(1, step), **DROPOUT)
    assert [one["error"][2] for one in stopped] == [143, 143]
    assert f"stopped at step {step + 1} of 30" in stopped[0]["error"][1]
    assert stopped[0]["error"] == stopped[1]["error"]
    assert last_state(tmp_path / "run").name == f"step-{step + 1:08d}"
    run(2, tmp_path / "run", resume=str(tmp_path / "run"), **DROPOUT)
    assert end_of(tmp_path / "run") == straight


class ReadOnly(Recorder):
    """The disk of the first process takes no folder for a state."""

    def on_start(self, trainer):
        super().on_start(trainer)

        def refuse(event, arguments):
            if event == "os.mkdir" and ".tmp-" in str(arguments[0]):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(arguments[0]))

        if trainer.training_step.world.rank == 0:
            sys.addaudithook(refuse)  # which goes with this process


def test_a_disk_that_refuses_the_first_process_stops_all_with_its_words(tmp_path):
    first, second = (one["error"] for one in run(2, tmp_path / "run", ReadOnly, save_every=4))
    assert first == second
    assert first[0] == "OutputError"
    assert "the file system is read-only" in first[1]
    assert first[2] == 2


def test_a_head_that_is_not_read_keeps_no_process_waiting(tmp_path):
    spec = {"depth": 1, "width": 32, "patch_size": 4, "distillation_token": True}
    settings = {"spec": spec | {"distilled_readout": "cls"}, "max_steps": 4}
    one, two = (run(size, tmp_path / str(size), **settings) for size in (1, 2))
    assert [found["error"] for found in two] == [None, None]
    pairs = zip(numbers(one).values(), numbers(two).values(), strict=True)
    assert max(abs(ours[0] - theirs[0]) for ours, theirs in pairs) <= 1e-5


def test_a_batch_that_does_not_divide_is_refused_with_what_would(tmp_path):
    config = config_of(tmp_path / "run", batch_size=64, grad_accum_steps=2)
    with pytest.raises(vitkit.SettingError, match=(
        r"--batch-size 64 is not divisible by 3 processes x 2 accumulation steps; pass "
        r"--batch-size 60 or 66, or change --grad-accum-steps 2"
    )):  # fmt: skip
        make_plan(config, ProcessGroup(0, 3))
    assert make_plan(config, ProcessGroup(1, 4)).steps[0].pixels.shape[0] == 16


def test_muon_refuses_parts_of_weights_with_what_would_do(tmp_path):
    config = config_of(tmp_path / "run", opt="muon", parallel="fsdp")
    with pytest.raises(vitkit.SettingError, match=r"pass --parallel ddp or --opt adamw$"):
        make_plan(config, ProcessGroup(size=2))
    make_plan(config)  # one process has whole matrices


@pytest.mark.soak
def test_parts_of_the_weights_make_the_same_run_and_any_number_goes_on(alone, tmp_path):
    """FSDP2 with averages and accumulation: sharded states, whole weights, resumed by one."""
    settings = {"parallel": "fsdp", "model_ema": True, "grad_accum_steps": 2}
    output = tmp_path / "run"
    first = run(2, output, max_steps=13, save_every=5, **settings)
    assert [one["error"] for one in first] == [None, None]
    straight = numbers(alone)
    assert max(abs(found[0] - straight[step][0]) for step, found in numbers(first).items()) <= 1e-5
    state = last_state(output)
    assert state.name == "step-00000013"
    names = {path.relative_to(state).as_posix() for path in state.rglob("*.safetensors")}
    assert names == {f"{part}.safetensors" for part in ("model", "optimizer", "ema")}
    optimizer, average = (load_file(state / f"{part}.safetensors") for part in ("optimizer", "ema"))
    assert set(optimizer["0.step"].flatten().tolist()) == {13.0}
    last = load_file(output / "weights" / "last.safetensors")
    assert all(torch.equal(average[name], value) for name, value in last.items())
    again = {"resume": str(output), "model_ema": True, "grad_accum_steps": 2}
    second = run(1, output, max_steps=18, **again)
    third = run(2, output, max_steps=25, parallel="fsdp", **again)
    for part in (second, third):
        assert (
            max(abs(found[0] - straight[step][0]) for step, found in numbers(part).items()) < 2e-5
        )


def test_several_processes_cannot_all_have_one_device():
    with pytest.raises(vitkit.DeviceError, match="cuda:3: 2 processes need a CUDA device each"):
        ProcessGroup(0, 2, local_size=2).device(torch.device("cuda:3"))

"""The arithmetic of a step: accumulation, averages, numbers that are not finite, memory."""

import re
import weakref
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from training.faulty import On, on
from training.starts import bits
from training.tiny_runs import STEPS, TINY, counters, last_state, run

import vitkit
from vitkit import NonFiniteError
from vitkit.devices import seed_generators


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path):
    plain = {"model_ema": False, "spec": TINY["spec"] | {"mlp_dropout": 0.0, "drop_path": 0.0}}
    ends = []
    for parts in (1, 2, 4):
        run(tmp_path / str(parts), grad_accum_steps=parts, max_steps=5, **plain)
        ends.append(vitkit.load(tmp_path / str(parts) / "weights/last.safetensors").model)
    for other in ends[1:]:
        for mine, theirs in zip(ends[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-4)
    with pytest.raises(
        vitkit.VitkitError, match="3 accumulation steps; pass --batch-size 126 or 129"
    ):
        run(tmp_path / "three", grad_accum_steps=3)


def test_the_average_of_the_weights_is_what_is_shared(tmp_path):
    weights = []

    def watch(trainer, result):
        weights.append(trainer.training_step.model.head.weight.detach().clone())

    run(tmp_path / "run", on(after_step=watch), max_steps=12, model_ema_decay=0.5)
    torch.manual_seed(0)
    state = last_state(tmp_path / "run") / "ema.safetensors"
    average = safetensors.torch.load_file(state)["head.weight"]
    shared = vitkit.load(tmp_path / "run/weights/last.safetensors")
    assert torch.equal(shared.model.head.weight, average)
    assert shared.metadata["weights"] == "average"
    expected = torch.zeros_like(average)  # the head starts at zero
    for number, now in enumerate(weights):
        decay = min(0.5, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * now
    torch.testing.assert_close(average, expected, rtol=0, atol=1e-6)
    assert (average - weights[-1]).abs().max() > 1e-4


def poisoned(steps: set[int]) -> Callable[[], On]:
    """Put a NaN into the gradient of some steps."""

    def on_start(trainer):
        trainer.training_step.model.head.weight.register_hook(
            lambda g: g * float("nan") if trainer.progress.step in steps else g
        )

    return on(on_start=on_start)


def test_numbers_that_are_not_finite_stop_or_are_skipped_and_counted(tmp_path):
    with pytest.raises(NonFiniteError, match=r"gradient norm is nan at step 7 .*step-00000005"):
        run(tmp_path / "stop", poisoned({7}))
    run(tmp_path / "skip", poisoned({7, 8, 15}), on_nan="skip")
    progress = counters(last_state(tmp_path / "skip"))
    assert (progress["step"], progress["skipped"], progress["skipped_in_a_row"]) == (STEPS, 3, 0)
    assert "3 steps skipped" in (tmp_path / "skip/train.log").read_text()
    with pytest.raises(NonFiniteError, match="at step 9 "):
        run(tmp_path / "many", poisoned({7, 8, 9}), on_nan="skip")
    for file in tmp_path.rglob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()), file


def test_out_of_memory_names_the_settings_and_how_to_resume(tmp_path):
    held, first = [], 7

    def on_start(trainer):
        def refuse(module, inputs):
            held.append(weakref.ref(inputs[0]))
            if trainer.progress.step == first:
                raise torch.OutOfMemoryError("out of memory")

        trainer.training_step.model.register_forward_pre_hook(refuse)

    small = on(on_start=on_start)
    with pytest.raises(vitkit.VitkitError) as caught:
        run(tmp_path / "run", small)
    assert all(images() is None for images in held)  # the error holds no tensors
    assert re.fullmatch(
        r"cpu is out of memory with 64 images at once; pass --grad-checkpointing, or start afresh "
        r"with --grad-accum-steps 4, a lower --batch-size or --img-size, or a smaller model; the "
        r"newest state is .*step-00000005, resume with: vitkit train --resume .*/run",
        str(caught.value),
    )
    first = -1
    again = run(tmp_path / "run", small, resume=str(tmp_path / "run"))
    assert bits(again.last) == bits(run(tmp_path / "straight").last)
    first = 0
    with pytest.raises(vitkit.VitkitError, match=r"model; no state is saved in .*/none$"):
        run(tmp_path / "none", small)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mtia"])
def test_generators_of_every_kind_of_gpu_in_use_are_seeded(kind, monkeypatch):
    seeds: list[int] = []
    monkeypatch.setattr(getattr(torch, kind), "is_initialized", lambda: True)
    monkeypatch.setattr(getattr(torch, kind), "manual_seed_all", seeds.append)
    seed_generators(7)
    assert seeds == [7]

"""Several processes of one run, forked from the test's own: nothing has to be imported again."""

import gc
import hashlib
import json
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from training import tiny_runs

from vitkit import Callback, Interrupted, TrainConfig, Trainer, VitkitError
from vitkit.distributed import ProcessGroup, join_process_group, local_tensor

PLAIN = {
    "recipe": "digits", "epochs": 3, "warmup_epochs": 1.0, "amp": "off", "batch_size": 128,
    "quiet": True, "device": "cpu", "threads": 1, "timeout": 100.0, "plots": False, "report": False,
    "spec": {"depth": 1, "width": 32, "patch_size": 4, "mlp_dropout": 0.0, "drop_path": 0.0},
}  # fmt: skip
"""10 steps an epoch, and nothing random in the model: the loss depends on the images alone."""


def together(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns, a JSON value, in each of `size` processes; in rank order."""
    gc.collect()  # a store that is let go of in a child would wait for a thread it does not have
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside the store's thread
        start = os.pipe()
        pids = [
            os.fork() or _be(rank, size, store.port, Path(place), work, start)
            for rank in range(size)
        ]
        for end in start:
            os.close(end)
        for pid in pids:
            os.waitpid(pid, 0)
        found = [json.loads((Path(place) / str(rank)).read_text()) for rank in range(size)]
    for result in found:
        assert "fault" not in result, result["fault"]
    return [result["value"] for result in found]


def _be(
    rank: int, size: int, port: int, place: Path, work: Callable[[int], Any], start: tuple[int, int]
) -> int:
    gc.disable()
    # Until all are forked: while the store's thread serves one of them, it may hold a lock, which
    # a process that is forked then would wait for without end.
    os.close(start[1])
    os.read(start[0], 1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    try:
        try:
            text = json.dumps({"value": work(rank)})
        except BaseException:  # noqa: BLE001 - the other process shows it
            text = json.dumps({"fault": traceback.format_exc()})
        (place / str(rank)).write_text(text)
    finally:  # whatever happens, a fork must not go on with the tests
        os._exit(0)


class Recorder(Callback):
    """Remembers the images of each step, its loss and its gradient norm."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        Recorder.last = self

    def on_start(self, trainer: Trainer) -> None:
        averages = [one.ema.model for one in trainer.callbacks if hasattr(one, "ema")]
        self._models = [trainer.training_step.model, *averages]

    def before_step(self, trainer: Trainer, batch: Any) -> None:
        self._indices = batch.indices.tolist()

    def after_step(self, trainer: Trainer, result: Any) -> None:
        number = trainer.progress.step - 1
        self.seen.append([number, self._indices, result.loss, result.norm])

    def bits(self) -> str:
        """A hash over this process's own model and averages."""
        total = hashlib.sha256()
        for model in self._models:
            for value in model.parameters():
                total.update(local_tensor(value.detach()).numpy().tobytes())
        return total.hexdigest()


def config_of(output: Path, **settings: Any) -> TrainConfig:
    return tiny_runs.config_of({"data": "digits", "output": str(output)} | PLAIN | settings)


def run(size: int, output: Path, recorder: type[Recorder] = Recorder, **settings: Any) -> list[Any]:
    """A run by `size` processes: for each, its steps, its metrics, its error and its exit code."""

    def one(rank: int) -> Any:
        error, metrics = None, {}
        try:
            asked = {"data": "digits", "output": str(output)} | PLAIN | settings
            metrics = tiny_runs.trained(asked, recorder).metrics
        except VitkitError as raised:
            code = raised.exit_code
            if isinstance(raised, Interrupted):
                code = 128 + raised.signum
            error = [type(raised).__name__, str(raised), code]
        bits = Recorder.last.bits()
        return {"steps": Recorder.last.seen, "metrics": metrics, "error": error, "bits": bits}

    return together(size, one) if size > 1 else [one(0)]


def order(found: list[Any]) -> dict[int, list[int]]:
    """Step -> its images in the order of the whole batch, from what each process had."""
    steps: dict[int, list[int]] = {}
    for of_one_step in zip(*(one["steps"] for one in found), strict=True):
        places = zip(*(images for _, images, _, _ in of_one_step), strict=True)
        steps[of_one_step[0][0]] = [image for place in places for image in place]
    return steps


def numbers(found: list[Any]) -> dict[int, tuple[float, float]]:
    """Step -> loss and gradient norm; all processes must agree."""
    for one in found:
        assert [step[2:] for step in one["steps"]] == [step[2:] for step in found[0]["steps"]]
    return {step: (loss, norm) for step, _, loss, norm in found[0]["steps"]}


def in_world(work: Callable[[ProcessGroup], Any]) -> Callable[[int], Any]:
    """`work` with the world that `together` sets up."""

    def one(rank: int) -> Any:
        with join_process_group(torch.device("cpu"), 100.0) as world:
            return work(world)

    return one

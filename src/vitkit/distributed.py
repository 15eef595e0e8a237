"""Several processes of one run, by torchrun's environment: who one is, and what all agree on.

Every process knows the seed, the data and the step, so little has to be said: the gradients, one
short row of numbers a step, and what the first process decided or met when it touched the disk. A
single process has no group, and none of these functions communicates.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from vitkit import errors
from vitkit.errors import DeviceError, Interrupted, VitkitError

T = TypeVar("T")
PATIENCE = timedelta(hours=1)
"""How long others wait while the first process reads data, tries something, or writes."""
EXCHANGE = "VITKIT_EXCHANGE"
"""Names the folder in which a launched process leaves its step and how it ended."""
STEPS, RUN = "steps", "run"
STEP = struct.Struct("<q")


@dataclass
class World:
    """This process among those of the run.

    Attributes:
        rank: its number, from 0; the first one alone prints and writes.
        size: how many there are.
        local_rank: its number on this machine.
        local_size: how many there are on this machine.
        group: for what happens in every step, where nobody may be late for long.
        step: the last one that was made.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    group: dist.ProcessGroup | None = None
    step: int = 0
    _steps: int | None = field(default=None, repr=False)

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def device(self, asked: torch.device) -> torch.device:
        """This process's own of a kind. Raises `DeviceError` for too few, or where one is named."""
        if self.size == 1 or asked.type != "cuda":
            return asked
        if asked.index is not None:
            raise DeviceError(
                f"{asked} is one device, and {self.local_size} processes take one each; pass "
                f"--device cuda, with CUDA_VISIBLE_DEVICES for certain ones"
            )
        if self.local_rank >= (there := torch.cuda.device_count()):
            raise DeviceError(
                f"{self.local_size} processes on {there} CUDA devices; start {there}, one for each"
            )
        return torch.device("cuda", self.local_rank)

    def gathered(self, row: Sequence[float]) -> list[Sequence[float]]:
        """Everyone's numbers, a row each, in the order of the ranks."""
        if self.size == 1:
            return [row]
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group)
        return [one.tolist() for one in rows]

    def most(self, number: int) -> int:
        """The largest of everyone's numbers."""
        return int(max(row[0] for row in self.gathered([float(number)])))

    def summed(self, values: Tensor) -> Tensor:
        """The sums over all processes, the same bits for each; waits long for the last one."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def decided(self, decide: Callable[[], T]) -> T:
        """What the first process finds, for all: a JSON value, or an error that all raise."""
        if self.size == 1:
            return decide()
        if not self.first:
            document = json.loads(_received())
            if "error" in document:
                raise revived(document["error"])
            value: T = document["value"]
            return value
        try:
            value = decide()
        except VitkitError as error:
            _sent(json.dumps({"error": described(error)}))
            raise
        _sent(json.dumps({"value": value}))
        return value

    def note(self, step: int) -> None:
        """Remember the last step, and leave its number where whoever started us finds it."""
        self.step = step
        if self._steps is not None:
            os.pwrite(self._steps, STEP.pack(step), STEP.size * self.rank)

    def announce(self, run: Path) -> None:
        """Leave the run's folder there, too."""
        if self.first and (folder := os.environ.get(EXCHANGE)) is not None:
            (Path(folder) / RUN).write_text(str(run))


@contextmanager
def joined(device: torch.device, timeout: float) -> Iterator[World]:
    """The world that the environment describes, while the block runs.

    Args:
        device: where the model is; gradients on CUDA travel by NCCL, all else by gloo.
        timeout: seconds that a process waits in a step before it takes another one for dead.

    Raises:
        VitkitError: another process is gone, or silent for too long.
    """
    if not (in_world() and (size := int(os.environ["WORLD_SIZE"])) > 1):
        yield World()
        return
    rank = int(os.environ["RANK"])
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    world: World | None = None
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
        world = World(
            rank, size,
            int(os.environ.get("LOCAL_RANK", rank)),
            int(os.environ.get("LOCAL_WORLD_SIZE", size)),
            dist.new_group(timeout=timedelta(seconds=timeout)),
            _steps=_steps_file(),
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.set_device(world.device(device))
        yield world
        world.summed(torch.zeros(1))  # nobody leaves while another may still need it
    except (RuntimeError, ConnectionError) as error:
        if not is_lost_contact(error):
            raise
        raise LostContact(
            f"rank {rank} on {socket.gethostname()}, after step "
            f"{world.step if world else 0}: another "
            f"process is gone, or silent for {timeout:g} s; go on with --resume "
            f"({str(error).splitlines()[0][:200]})"
        ) from error
    finally:
        if world is not None and world._steps is not None:
            os.close(world._steps)
    dist.destroy_process_group()


class LostContact(VitkitError):
    """Another process of the run does not answer; why, that one knows."""


def in_world() -> bool:
    """Whether whoever started this process gave it a rank."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def is_launched() -> bool:
    """Whether `--devices` started this process: the launcher then speaks for all of them."""
    return EXCHANGE in os.environ


def is_lost_contact(error: BaseException) -> bool:
    """Whether an error says that another process does not answer; gloo has no class for it."""
    said = str(error)
    return isinstance(error, dist.DistError) or any(
        words in said for words in ("third_party/gloo", "Connection closed by peer", "NCCL error")
    )


def described(error: VitkitError) -> dict[str, Any]:
    """An error as JSON values."""
    kind = type(error).__name__
    return {"kind": kind, "text": str(error), "signum": getattr(error, "signum", None)}


def revived(document: dict[str, Any]) -> VitkitError:
    """The error that `described` made a document of; one that is not of ours is a `VitkitError`."""
    kind = getattr(errors, document["kind"], VitkitError)
    if kind is Interrupted:
        return Interrupted(document["signum"], document["text"])
    if kind is errors.ImageError:
        kind = errors.DataError
    error: VitkitError = kind(document["text"])
    return error


def _sent(text: str) -> None:
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    dist.broadcast(torch.tensor([len(content)]), 0)
    dist.broadcast(content, 0)


def _received() -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, 0)
    content = torch.zeros(int(length), dtype=torch.uint8)
    dist.broadcast(content, 0)
    return content.numpy().tobytes()


def _steps_file() -> int | None:
    if (folder := os.environ.get(EXCHANGE)) is None:
        return None
    return os.open(Path(folder) / STEPS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

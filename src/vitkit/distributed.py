"""Process group of one run, from torchrun's environment, and its collectives.

Ranks exchange gradients, one row of numbers per step, and the results or errors of rank 0's file
operations; seed, data and step are known to all. A single process has no group, and none of these
functions communicates.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from vitkit.errors import DeviceError, VitkitError

Decision = TypeVar("Decision")
LONG_TIMEOUT = timedelta(hours=1)
"""Time-out of the other ranks while rank 0 reads data, runs a trial, or writes."""
EXCHANGE = "VITKIT_EXCHANGE"
"""Variable with the folder that the processes of `--devices` share with their launcher."""
RUN_FILE = "run"
"""File in that folder: the path of the run folder."""
LOST_CONTACT_WORDS = ("third_party/gloo", "Connection closed by peer", "NCCL error")
"""Words in the messages of gloo and NCCL about a process that ended; gloo has no class for them."""


class LostContact(VitkitError):
    """A process of the run that does not answer; the cause is in that process's own error."""


@dataclass
class ProcessGroup:
    """The processes of a run, as seen from this one (torch's "world").

    Attributes:
        rank: number of this process, from 0; rank 0 alone prints and writes.
        size: number of processes.
        local_rank: number of this process on this machine.
        local_size: number of processes on this machine.
        group: process group with the short time-out, for collectives of every step.
        step: the last finished step.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    group: dist.ProcessGroup | None = None
    step: int = 0

    @property
    def is_main(self) -> bool:
        """True for rank 0, which prints and writes."""
        return self.rank == 0

    def device(self, requested: torch.device) -> torch.device:
        """Return the device of this process: one CUDA device for each local rank.

        Raises:
            DeviceError: fewer devices than processes, or one certain device for several of them.
        """
        if self.size == 1 or requested.type != "cuda":
            return requested
        count = torch.cuda.device_count()
        if requested.index is not None or self.local_rank >= count:
            raise DeviceError(
                f"--device {requested}: {self.local_size} processes need a CUDA device each, and "
                f"this machine has {count}; start as many processes with --device cuda, and choose "
                "devices with CUDA_VISIBLE_DEVICES"
            )
        return torch.device("cuda", self.local_rank)

    def all_gather(self, row: Sequence[float]) -> list[Sequence[float]]:
        """Gather a row of numbers from every rank, in the order of the ranks."""
        if self.size == 1:
            return [row]
        own = torch.tensor(row, dtype=torch.float64)  # exact for every float of Python
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, group=self.group)
        return [gathered.tolist() for gathered in rows]

    def all_reduce_max(self, number: int) -> int:
        """Return the largest number of all ranks."""
        return int(max(row[0] for row in self.all_gather([float(number)])))

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks; each gets the same bits. The long time-out applies."""
        if self.size > 1:
            values = values.clone()  # `all_reduce` writes into its argument
            # the default group, with the long time-out
            dist.all_reduce(values)
        return values

    def broadcast_from_main(self, decide: Callable[[], Decision]) -> Decision:
        """Call a function on rank 0 alone and return its result on every rank.

        Args:
            decide: returns a value that can be pickled; a `VitkitError` that it raises is raised on
                every rank.
        """
        if self.size == 1:
            return decide()
        answer: list[Any] = [None]
        if self.is_main:
            try:
                answer = [decide()]
            except VitkitError as error:
                answer = [error]  # the other ranks wait for an answer, also after a failure
        dist.broadcast_object_list(answer)
        if isinstance(answer[0], VitkitError):
            raise answer[0]
        return cast(Decision, answer[0])

    def announce(self, run: Path) -> None:
        """Write the path of the run folder for the launcher."""
        if self.is_main and (folder := os.environ.get(EXCHANGE)) is not None:
            (Path(folder) / RUN_FILE).write_text(str(run))


@contextmanager
def join_process_group(device: torch.device, timeout: float) -> Iterator[ProcessGroup]:
    """Join the process group that the environment describes, while the block runs.

    Args:
        device: device of the model; tensors on CUDA are exchanged by NCCL, all others by gloo.
        timeout: seconds that a rank waits in a step before it counts another one as dead.

    Raises:
        LostContact: another process has ended, or does not answer in time.
    """
    size = int(os.environ["WORLD_SIZE"]) if has_rank() else 1
    if size == 1:
        yield ProcessGroup()
        return
    rank = int(os.environ["RANK"])
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
    world: ProcessGroup | None = None
    try:
        # collectives outside of steps wait for long work of rank 0
        dist.init_process_group(backend, timeout=LONG_TIMEOUT)
        world = ProcessGroup(
            rank,
            size,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
            group=dist.new_group(timeout=timedelta(seconds=timeout)),
        )
        if device.type == "cuda":
            torch.cuda.set_device(world.device(device))
        yield world
        world.all_reduce_sum(torch.zeros(1))  # a barrier: no rank ends while another needs it
    except (RuntimeError, ConnectionError) as error:
        words = str(error)
        if not isinstance(error, dist.DistError) and not any(
            known in words for known in LOST_CONTACT_WORDS
        ):
            raise
        step = world.step if world else 0
        raise LostContact(
            f"rank {rank} on {socket.gethostname()}, after step {step}: another process has "
            f"ended or has not answered for {timeout:g} s; resume with --resume "
            f"({words.splitlines()[0][:200]})"
        ) from error
    dist.destroy_process_group()


def has_rank() -> bool:
    """Return True if the environment gives this process a rank."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process holds only a part of a tensor (a `DTensor`)."""
    return hasattr(tensor, "device_mesh")


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all processes; every process must call.

    A tensor that is not sharded is returned as it is.
    """
    if is_sharded(tensor):
        return cast(Any, tensor).full_tensor()
    return tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    if is_sharded(tensor):
        return cast(Any, tensor).to_local()
    return tensor


def distribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor in the same way as another one; every process must call."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = cast(Any, like).device_mesh, cast(Any, like).placements
    # Every process has the full tensor already, so nothing is sent.
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)

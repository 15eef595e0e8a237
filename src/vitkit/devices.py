"""Devices of this machine by name."""

import copy
from typing import TypeVar

import torch
from torch import nn

from vitkit.errors import DeviceError

Model = TypeVar("Model", bound=nn.Module)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error that means out of memory; on the CPU it has no class of its own.

    `allocate memory` is what torch's allocator says, `create a primitive` what oneDNN does.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in ("allocate memory", "create a primitive"))
    )


def _available_devices() -> list[str]:
    """Return the devices of this machine, best first: `cuda:0`, ..., `mps`, `cpu`."""
    names = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return [*names, "cpu"]


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device of this name; `auto` is the best one of this machine.

    Args:
        name: such as `cpu`, `cuda`, `cuda:1`, `mps` or `auto`; or a device of torch.

    Raises:
        DeviceError: a device that does not exist here, or an unknown name.
    """
    available = _available_devices()
    name = available[0] if name == "auto" else str(name)
    # torch treats `cuda` as the current device, which is the first here
    if name.replace("cuda", "cuda:0") not in available and name not in available:
        raise DeviceError(
            f"--device {name}: this machine has no such device; pass {' or '.join(available)}, or "
            "leave it out"
        )
    return torch.device(name)


def on_device(model: Model, device: torch.device) -> Model:
    """Return a model in eval mode on `device`: itself if it is there already, else a copy.

    The caller's model stays on its device.

    Args:
        model: any module with parameters; the result has its class.
        device: as `resolve_device` returns it.
    """
    current = next(model.parameters()).device
    # a device without an index, such as `cuda`, matches any of its type
    same = current.type == device.type and device.index in (None, current.index)
    if not same:
        model = copy.deepcopy(model).to(device)
    return model.eval()


def seed_generators(seed: int) -> None:
    """Seed torch's generators of the CPU and of each GPU in use, as `torch.manual_seed` does.

    That function also formats the whole call stack for each kind of GPU that is not in use (CUDA,
    XPU and MTIA), which takes a tenth of the time of a small model's step.

    >>> seed_generators(7)
    >>> drawn = torch.rand(3)
    >>> _ = torch.manual_seed(7)
    >>> torch.equal(drawn, torch.rand(3))
    True
    """
    torch.default_generator.manual_seed(seed)
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if kind.is_initialized():
            kind.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)

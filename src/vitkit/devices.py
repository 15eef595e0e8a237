"""Which device a name means on this machine."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from vitkit.errors import DeviceError

Model = TypeVar("Model", bound=nn.Module)


def available_devices() -> list[str]:
    """The names this machine answers to, best first: `cuda:0`, ..., `mps`, `cpu`."""
    names = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return [*names, "cpu"]


def resolve_device(name: str) -> torch.device:
    """`auto` is the best device there is; any other name must exist.

    Raises:
        DeviceError: a device that is not there, or no device's name.
    """
    there = available_devices()
    if name == "auto":
        return torch.device(there[0])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(
            f"device {name!r} is no device's name; here are: {', '.join(there)}"
        ) from None
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in there:
        raise DeviceError(f"device {name!r} is not on this machine; here are: {', '.join(there)}")
    return device


def on_device(model: Model, device: torch.device) -> Model:
    """The model in eval mode on `device`: itself where it is there already, else a copy.

    The caller's model stays where it was.
    """
    here = next(model.parameters()).device
    same = here.type == device.type and device.index in (None, here.index)
    return (model if same else copy.deepcopy(model).to(device)).eval()

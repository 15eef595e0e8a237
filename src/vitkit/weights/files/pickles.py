"""What torch's reader made of a pickle: the entry that holds the weights, and plain tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vitkit.errors import CheckpointError

CONTAINERS = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model_state",
              "model", "module", "net", "network", "weights", "params", "teacher", "student",
              "encoder")  # fmt: skip
"""Entries of a training checkpoint that hold the weights, best first."""


def unpacked(
    path: Path, content: object, records: set[int] | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The dictionary of tensors inside a training checkpoint, and through what it was reached.

    Args:
        path: the file, for messages.
        content: what torch's restricted reader made of it.
        records: the sizes of the file's records, as `pickle_records` has them.

    Raises:
        CheckpointError: no dictionary of tensors, several of them, or tensors that are not plain.
    """
    notes: list[str] = []
    while isinstance(content, dict):
        holding = [name for name, value in content.items() if _holds_tensors(value)]
        inner = next((n for n in CONTAINERS if _leads_to_tensors(content.get(n))), None)
        if inner is None and len(holding) == 1 and not _holds_tensors(content):
            (inner,) = holding
        elif inner is None and len(holding) > 1:
            shown = ", ".join(str(name)[:50] for name in holding[:5])
            raise CheckpointError(
                f"{path}: several of its entries hold tensors ({shown}); save one of them alone"
            )
        if inner is None:
            break
        if len(notes) == len(CONTAINERS):
            raise CheckpointError(f"{path}: its entry {inner!r} is nested without end")
        notes.append(f"weights taken from the entry {inner!r}")
        if others := [str(name)[:50] for name in holding if name != inner]:
            notes.append(f"other entries with tensors, left out: {', '.join(others[:5])}")
        content = content[inner]
    if not isinstance(content, dict) or not any(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"{path}: holds no dictionary of tensors; save a state_dict()")
    tensors = {name: _plain(path, name, value, records) for name, value in content.items()
               if isinstance(name, str) and isinstance(value, Tensor)}  # fmt: skip
    if sum(t.nbytes for t in tensors.values()) > 2 * path.stat().st_size + 16_000_000:
        raise CheckpointError(f"{path}: its tensors share so many numbers that they are no model")
    if others := [name for name in content if name not in tensors]:
        shown = ", ".join(name[:50] for name in others[:5] if isinstance(name, str))
        notes.append(f"no tensors, left out: {shown or len(others)}")
    return tensors, tuple(notes)


def _holds_tensors(value: object) -> bool:
    """Whether it is a dictionary with more than numbers: `{"decay": tensor(0.99)}` holds none."""
    parts = value.values() if isinstance(value, dict) else ()
    return any(isinstance(part, Tensor) and part.dim() > 0 for part in parts)


def _leads_to_tensors(value: object, levels: int = 3) -> bool:
    """Whether it holds tensors, in itself or through entries of `CONTAINERS`; settings do not."""
    if not isinstance(value, dict) or not levels or _holds_tensors(value):
        return isinstance(value, dict)
    return any(_leads_to_tensors(value.get(name), levels - 1) for name in CONTAINERS)


def _plain(path: Path, name: str, tensor: Tensor, records: set[int] | None) -> Tensor:
    """The tensor without what training hung on it, if its numbers are all there."""
    if tensor.is_nested:  # which has no shape
        raise CheckpointError(f"{path}: {name} is no plain tensor but a nested one")
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_quantized:
        raise CheckpointError(f"{path}: {name} is no plain tensor but {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        kind = f"{tensor.layout} on {tensor.device}"
        raise CheckpointError(f"{path}: {name} is no plain tensor but {kind}; save it dense")
    stored = tensor.untyped_storage().nbytes()
    if tensor.nbytes > stored or (records is not None and stored not in records):
        raise CheckpointError(
            f"{path}: {name} has the shape {tuple(tensor.shape)[:8]} and other numbers are stored"
        )
    return tensor.detach()

"""Rows of an evaluation, such as logits, gathered from all processes in the split's order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitkit.distributed import ProcessGroup


def gather_rows(own: Sequence[Tensor], dtype: torch.dtype, world: ProcessGroup) -> Tensor:
    """Return the rows of all processes (N, C) on the CPU, in the order of the split.

    Args:
        own: this process's rows (B, C), batch by batch; empty where it has no images.
        dtype: dtype of all rows.
        world: the processes; each must call. Process r of n has the images r, r + n, r + 2n ...
    """
    # a process without images does not know the number of columns
    shapes = torch.zeros(world.size, 2, dtype=torch.int64)
    if own:
        rows = torch.cat([*own]).cpu()
        shapes[world.rank] = torch.tensor(rows.shape)
    images, columns = world.all_reduce_sum(shapes).unbind(1)
    table = torch.zeros(int(images.sum()), int(columns.max()), dtype=dtype)
    if own:
        table[world.rank :: world.size] = rows
    # adding zeros changes no bit
    return world.all_reduce_sum(table)

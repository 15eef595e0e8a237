"""The parts of all resumable training state, also where it is sharded.

Saving, loading and hashing all go over one registry of parts by name, so that state that is not
registered cannot be saved by accident. A part is tensors and JSON values, which cannot run code.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import safe_open
from torch import Tensor, nn, optim

from vitkit import distributed, errors

Tensors = dict[str, Tensor]
Metadata = dict[str, Any]
"""The part of a state that is not tensors, as JSON values."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose content decides the next training step."""

    def tensors(self) -> Tensors:
        """Return its tensors by name."""
        return {}

    def metadata(self) -> Metadata:
        """Return everything else that it needs, as JSON values."""
        return {}

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Restore both; any error means that they belong to another object."""


Registry = dict[str, Stateful]
"""The parts of the state of a run, by name."""


@dataclass(frozen=True)
class ModelPart(Stateful):
    """The parameters and buffers of a model."""

    model: nn.Module

    def tensors(self) -> Tensors:
        """Return its `state_dict`."""
        return dict(self.model.state_dict())

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Fill the model in place."""
        own = self.model.state_dict()
        check_same_names("model", own, tensors)
        # stored tensors are whole; those of a sharded model are split again
        state = {
            name: distributed.distribute_like(tensors[name], tensor) for name, tensor in own.items()
        }
        self.model.load_state_dict(state)


@dataclass(frozen=True)
class OptimizerPart(Stateful):
    """The state of an optimizer: `17.exp_avg` is the mean gradient of its parameter 17."""

    optimizer: optim.Optimizer

    def tensors(self) -> Tensors:
        """Return the tensors in the state of every parameter."""
        tensors = {}
        for number, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    # safetensors stores contiguous tensors only.
                    tensors[f"{number}.{name}"] = value.contiguous()
        return tensors

    def metadata(self) -> Metadata:
        """Return the group settings, the tensor names of every parameter, and its numbers."""
        document = self.optimizer.state_dict()
        tensor_names: dict[str, list[str]] = {}
        numbers: dict[str, Metadata] = {}
        for number, state in document["state"].items():
            names, others = list[str](), Metadata()
            for name in sorted(state):
                if isinstance(state[name], Tensor):
                    names.append(name)
                else:
                    others[name] = state[name]
            # keys of JSON objects are strings
            tensor_names[str(number)], numbers[str(number)] = names, others
        metadata = {"groups": document["param_groups"], "kinds": tensor_names}
        # Most optimizers keep tensors only; their metadata has no entry for numbers.
        if any(numbers.values()):
            metadata["numbers"] = numbers
        return metadata

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Fill the optimizer in place."""
        state: dict[int, Metadata] = defaultdict(dict)
        for number, numbers in metadata.get("numbers", {}).items():
            state[int(number)] |= numbers
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            if tensor.ndim:  # scalars, such as step counts, are the same in every process
                tensor = distributed.distribute_like(tensor, parameters[int(number)])
            state[int(number)][name] = tensor
        document = {"state": dict(state), "param_groups": metadata["groups"]}
        self.optimizer.load_state_dict(document)


def check_all_registered(owner: object, parts: Registry) -> None:
    """Refuse an object with a stateful attribute that is no part of the run's state.

    The state of that attribute would be lost on resume.

    Raises:
        SettingError: an attribute is not registered; the message names it.
    """
    # a part, or the model or the optimizer in it; equal modules would be different states
    known = {id(one) for part in parts.values() for one in (part, *vars(part).values())}
    for name, value in vars(owner).items():
        stateful = callable(getattr(value, "state_dict", None)) or isinstance(value, Stateful)
        if stateful and id(value) not in known:
            raise errors.SettingError(
                f"{type(owner).__name__}.{name} has a state that would not be saved, so that "
                "a resumed run would end with other bits; create it in on_start"
            )


def check_same_names(part: str, own: Mapping[str, object], stored: Mapping[str, object]) -> None:
    """Raise `CheckpointError` if stored names are missing or unknown; at most 5 are listed."""
    missing = sorted(own.keys() - stored.keys())
    extra = sorted(stored.keys() - own.keys())
    if missing or extra:
        raise errors.CheckpointError(
            f"{part}: {', '.join(missing[:5]) or 'nothing'} missing, "
            f"{', '.join(extra[:5]) or 'nothing'} unknown"
        )


# `Progress`: the counters of a run, such as its steps, best epoch, patience and seconds.
#
# The number of the epoch follows from that of the step.


@dataclass
class Progress(Stateful):
    """The counters of the training loop.

    Attributes:
        step: optimizer steps done.
        loss_sum: sum of the training losses of this epoch's steps so far.
        losses: number of losses in that sum.
        best_top1: best validation top-1 so far; -1 before the first.
        best_loss: validation loss of the best epoch.
        best_epoch: number of the best epoch, counted from 1.
        stale: epochs without a higher top-1.
        skipped: steps left out because a number was not finite.
        skipped_in_a_row: the same, since the last step that was made.
        seconds: time spent training, over all sessions.
        data: fingerprint of the dataset.
        unvalidated: True if this step ends an epoch that still has to be validated and logged.
    """

    step: int = 0
    loss_sum: float = 0.0
    losses: int = 0
    best_top1: float = -1.0
    best_loss: float = 0.0
    best_epoch: int = 0
    stale: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    data: str = ""
    unvalidated: bool = False

    @property
    def mean_loss(self) -> float:
        """Mean training loss of this epoch's steps so far."""
        return self.loss_sum / max(self.losses, 1)

    def count_loss(self, loss: float) -> None:
        """Count a step whose numbers are all finite."""
        self.loss_sum += loss
        self.losses += 1
        self.skipped_in_a_row = 0

    def close_epoch(self) -> float:
        """Begin the next epoch; returns the mean training loss of this one."""
        mean = self.mean_loss
        self.loss_sum, self.losses, self.unvalidated = 0.0, 0, False
        return mean

    def count_best(self, epoch: int, validation: Mapping[str, float]) -> bool:
        """Return whether this epoch is the best so far, by validation top-1, then by loss."""
        if not validation:  # without a validation split the last epoch is the best
            return True
        top1, loss = validation["top1"], validation["loss"]
        self.stale = 0 if top1 > self.best_top1 else self.stale + 1
        if (top1, -loss) <= (self.best_top1, -self.best_loss):
            return False
        self.best_top1 = top1
        self.best_loss = loss
        self.best_epoch = epoch
        return True

    def metadata(self) -> Metadata:
        """Return all counters."""
        return dataclasses.asdict(self)

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Restore all counters."""
        check_same_names("progress", self.metadata(), metadata)
        vars(self).update(metadata)


# Sharded tensors as earlier versions stored them: each process wrote its own shards.

OFFSETS = "DCP_SHARDING_INFO"
"""Entry of the header with the offsets of each shard in its full tensor."""


def read_shards(folder: Path) -> dict[str, Tensor]:
    """Read the full tensors whose shards are in a folder; nothing if there is no such folder.

    Raises:
        CheckpointError: shards are missing.
    """
    shards: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()[OFFSETS])
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                shard = file.get_tensor(name)
                shards.setdefault(name, []).append((offsets[name]["saved_offsets"], shard))
    return {name: _merge(f"{folder}: {name}", parts) for name, parts in shards.items()}


def _merge(name: str, shards: list[tuple[list[int], Tensor]]) -> Tensor:
    """Put the shards of one tensor together, each at its offsets."""
    ends = [torch.tensor(offsets) + torch.tensor(shard.shape) for offsets, shard in shards]
    # The shape is not stored: it is where the last shard ends along each axis.
    full = torch.empty(torch.stack(ends).amax(0).tolist(), dtype=shards[0][1].dtype)
    # Shards do not overlap, so their sizes add up to that of the full tensor.
    if sum(shard.numel() for _, shard in shards) != full.numel():
        raise errors.CheckpointError(
            f"{name} of shape {tuple(full.shape)} is not covered by its parts"
        )
    for (offsets, shard), end in zip(shards, ends, strict=True):
        full[tuple(map(slice, offsets, end.tolist()))] = shard
    return full

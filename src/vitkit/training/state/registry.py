"""The registry of all resumable training state, by name, also where it is sharded.

Saving, loading, hashing and the tests that leave a part out all go over this one registry, so that
state that is not registered cannot be saved by accident. A part is tensors and JSON values: nothing
that is stored can run code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import safe_open
from torch import Tensor, nn, optim

from vitkit.distributed import distribute_like
from vitkit.errors import CheckpointError, SettingError, VitkitError

Tensors = dict[str, Tensor]
Metadata = dict[str, Any]
"""The part of a state that is not tensors, as JSON values."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose content decides the next training step."""

    def tensors(self) -> Tensors:
        """Return its tensors by name."""

    def metadata(self) -> Metadata:
        """Return everything else that it needs, as JSON values."""

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Restore both. Raises `CheckpointError` if they belong to another object."""


@dataclass(frozen=True)
class ModelPart:
    """The parameters and buffers of a model."""

    model: nn.Module

    def tensors(self) -> Tensors:
        """Return its `state_dict`."""
        return dict(self.model.state_dict())

    def metadata(self) -> Metadata:
        """Return no metadata."""
        return {}

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Fill the model in place. Raises `CheckpointError` for other names or shapes."""
        own = self.model.state_dict()
        _check_same_names("model", own, tensors)
        try:
            # Stored tensors are whole; those of a sharded model are split again.
            state = {}
            for name, tensor in tensors.items():
                state[name] = distribute_like(tensor, own[name])
            self.model.load_state_dict(state)
        except RuntimeError as error:  # the last line of torch's message names the tensor
            raise CheckpointError(f"model: {str(error).splitlines()[-1].strip()}") from None


@dataclass(frozen=True)
class OptimizerPart:
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
            names = list[str]()
            others: Metadata = {}
            for name, value in state.items():
                if isinstance(value, Tensor):
                    names.append(name)
                else:
                    others[name] = value
            # Keys of JSON objects are strings.
            tensor_names[str(number)] = sorted(names)
            numbers[str(number)] = others
        metadata = {"groups": document["param_groups"], "kinds": tensor_names}
        # Most optimizers keep tensors only; their metadata has no entry for numbers.
        if any(numbers.values()):
            metadata["numbers"] = numbers
        return metadata

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Fill the optimizer in place. Raises `CheckpointError` for another optimizer."""
        metadata = dict(metadata)
        metadata.setdefault("numbers", {})
        _check_same_names("optimizer", dict.fromkeys(("groups", "kinds", "numbers")), metadata)
        expected: dict[str, None] = {}
        for number, names in metadata["kinds"].items():
            for name in names:
                expected[f"{number}.{name}"] = None
        _check_same_names("optimizer", expected, tensors)
        state: dict[int, Metadata] = {}
        for number, numbers in metadata["numbers"].items():
            state[int(number)] = dict(numbers)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            if tensor.ndim:  # scalars, such as step counts, are the same in every process
                tensor = distribute_like(tensor, parameters[int(number)])
            state.setdefault(int(number), {})[name] = tensor
        try:
            self.optimizer.load_state_dict({"state": state, "param_groups": metadata["groups"]})
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"optimizer: {error}") from None


class Registry(Mapping[str, Stateful]):
    """The parts of the state of a run, by name."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}
        self._objects: list[object] = []

    def register(self, name: str, part: Stateful, stored: object = None) -> None:
        """Add a part.

        Args:
            name: name of the part, unique in the registry.
            part: reads and restores the state.
            stored: object whose state it is; `None` for the part itself.

        Raises:
            VitkitError: there is a part of this name.
        """
        if name in self._parts:
            raise VitkitError(f"the state has two parts {name!r}; rename one of them")
        self._parts[name] = part
        self._objects.append(part if stored is None else stored)

    def check_all_registered(self, owner: object) -> None:
        """Refuse an object with a stateful attribute that is not registered.

        The state of that attribute would be lost on resume.

        Raises:
            SettingError: an attribute is not registered; the message names it.
        """
        for name, value in vars(owner).items():
            stateful = callable(getattr(value, "state_dict", None)) or isinstance(value, Stateful)
            # Compared by identity: equal modules would be different states.
            if stateful and not any(value is known for known in self._objects):
                raise SettingError(
                    f"{type(owner).__name__}.{name} has a state that would not be saved, so that "
                    "a resumed run would end with other bits; create it in on_start"
                )

    def check_names(self, stored: Mapping[str, object]) -> None:
        """Raise `CheckpointError` unless exactly the registered parts are stored."""
        _check_same_names("state", self._parts, stored)

    def __getitem__(self, name: str) -> Stateful:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _check_same_names(part: str, own: Mapping[str, object], stored: Mapping[str, object]) -> None:
    """Raise `CheckpointError` if stored names are missing or unknown; at most 5 are listed."""
    missing = sorted(own.keys() - stored.keys())
    extra = sorted(stored.keys() - own.keys())
    if missing or extra:
        raise CheckpointError(
            f"{part}: {', '.join(missing[:5]) or 'nothing'} missing, "
            f"{', '.join(extra[:5]) or 'nothing'} unknown"
        )


# `Progress`: the counters of a run, such as its steps, best epoch, patience and seconds.
#
# The number of the epoch follows from that of the step.


@dataclass
class Progress:
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

    def tensors(self) -> Tensors:
        """Return no tensors."""
        return {}

    def metadata(self) -> Metadata:
        """Return all counters."""
        return dataclasses.asdict(self)

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Restore all counters. Raises `CheckpointError` for other names or types."""
        own = self.metadata()
        _check_same_names("progress", own, metadata)
        for name, value in metadata.items():
            # Compared exactly: True would pass for 1.
            if type(value) is not type(own[name]):
                raise CheckpointError(
                    f"progress: {name} is {value!r}; expected {type(own[name]).__name__}"
                )
            setattr(self, name, value)


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
    regions = []
    for offsets, shard in shards:
        ends = [offset + size for offset, size in zip(offsets, shard.shape, strict=True)]
        regions.append((tuple(map(slice, offsets, ends)), ends))
    # The shape is not stored: it is where the last shard ends along each axis.
    shape = [max(ends) for ends in zip(*(ends for _, ends in regions), strict=True)]
    full = torch.empty(shape, dtype=shards[0][1].dtype)
    # Shards do not overlap, so their sizes add up to that of the full tensor.
    if sum(shard.numel() for _, shard in shards) != full.numel():
        raise CheckpointError(f"{name} of shape {tuple(shape)} is not covered by its parts")
    for (region, _), (_, shard) in zip(regions, shards, strict=True):
        full[region] = shard
    return full

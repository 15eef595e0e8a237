"""Everything a run goes on from, by name: what is not here is no state.

Saving, loading, hashing and the tests that leave something out all go over this one registry. A
part is tensors and JSON values, so that nothing that is stored can run code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn, optim

from vitkit.errors import CheckpointError, VitkitError
from vitkit.training.parallel.fsdp import placed

Tensors = dict[str, Tensor]
Values = dict[str, Any]


@runtime_checkable
class Part(Protocol):
    """One thing whose content decides the next step."""

    def tensors(self) -> Tensors:
        """Its tensors by name."""

    def values(self) -> Values:
        """The rest of it, as JSON values."""

    def restore(self, tensors: Tensors, values: Values) -> None:
        """Take both in again. Raises `CheckpointError` where they are of something else."""


@dataclass
class Progress:
    """Where a run stands, besides its tensors. Everything the loop counts is here.

    Attributes:
        step: optimizer steps done.
        loss_sum: sum of the training losses of this epoch's steps so far.
        losses: how many those are.
        best_top1: best validation top-1 so far; -1 before the first.
        best_loss: its validation loss.
        best_epoch: its epoch, counted from 1.
        stale: epochs without a higher top-1.
        skipped: steps left out because a number was not finite.
        skipped_in_a_row: the same, since the last step that was made.
        seconds: time spent training, over all sessions.
        data: fingerprint of the data set the run is about.
        unvalidated: whether this step ends an epoch that is still to be validated and written down.
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
        """Whether this epoch is the best so far: by validation top-1, then by loss."""
        if not validation:
            return True
        top1, loss = validation["top1"], validation["loss"]
        self.stale = 0 if top1 > self.best_top1 else self.stale + 1
        if (top1, -loss) <= (self.best_top1, -self.best_loss):
            return False
        self.best_top1, self.best_loss, self.best_epoch = top1, loss, epoch
        return True

    def tensors(self) -> Tensors:
        """None."""
        return {}

    def values(self) -> Values:
        """All of it."""
        return dataclasses.asdict(self)

    def restore(self, tensors: Tensors, values: Values) -> None:
        """Every field there, of its type, and none besides."""
        mine = self.values()
        _same_names("progress", mine, values)
        for name, value in values.items():
            if type(value) is not type(mine[name]):
                raise CheckpointError(f"progress: {name} is {value!r}, no {type(mine[name])}")
            setattr(self, name, value)


@dataclass(frozen=True)
class ModelPart:
    """A model's parameters and buffers."""

    model: nn.Module

    def tensors(self) -> Tensors:
        """Its `state_dict`."""
        return dict(self.model.state_dict())

    def values(self) -> Values:
        """None."""
        return {}

    def restore(self, tensors: Tensors, values: Values) -> None:
        """Fill the model in place."""
        mine = self.model.state_dict()
        _same_names("model", mine, tensors)
        try:
            self.model.load_state_dict({n: placed(t, mine[n]) for n, t in tensors.items()})
        except RuntimeError as error:
            raise CheckpointError(f"model: {str(error).splitlines()[-1].strip()}") from None


@dataclass(frozen=True)
class OptimizerPart:
    """An optimizer: `17.exp_avg` is the mean gradient of its parameter 17."""

    optimizer: optim.Optimizer

    def tensors(self) -> Tensors:
        """The state of every parameter, as far as it is tensors."""
        return {
            f"{number}.{name}": value.contiguous()
            for number, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
            if isinstance(value, Tensor)
        }

    def values(self) -> Values:
        """The settings of its groups, which tensors every parameter has, and its numbers."""
        document = self.optimizer.state_dict()
        kinds, numbers = {}, {}
        for number, values in document["state"].items():
            kinds[str(number)] = sorted(n for n, v in values.items() if isinstance(v, Tensor))
            numbers[str(number)] = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
        stored = {"groups": document["param_groups"], "kinds": kinds}
        return stored | ({"numbers": numbers} if any(numbers.values()) else {})

    def restore(self, tensors: Tensors, values: Values) -> None:
        """Fill the optimizer in place."""
        numbers = values.get("numbers", {})
        _same_names("optimizer", dict.fromkeys(("groups", "kinds", "numbers")),
                    values | {"numbers": numbers})  # fmt: skip
        kinds = values["kinds"].items()
        _same_names("optimizer", {f"{number}.{n}": 0 for number, names in kinds for n in names},
                    tensors)  # fmt: skip
        state: dict[int, Values] = {int(number): dict(found) for number, found in numbers.items()}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            if tensor.ndim:
                tensor = placed(tensor, parameters[int(number)])
            state.setdefault(int(number), {})[name] = tensor
        try:
            self.optimizer.load_state_dict({"state": state, "param_groups": values["groups"]})
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"optimizer: {error}") from None


class Registry(Mapping[str, Part]):
    """The parts of a run's state, by name."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._objects: list[object] = []

    def register(self, name: str, part: Part, whose: object = None) -> None:
        """Add a part; `whose` is the object that it speaks for, where it is not itself.

        Raises:
            VitkitError: two parts of one name.
        """
        if name in self._parts:
            raise VitkitError(f"the state has two parts {name!r}; give one another name")
        self._parts[name] = part
        self._objects.append(part if whose is None else whose)

    def check_all_registered(self, owner: object) -> None:
        """Every attribute that has a state must be registered, else it would be lost on resume.

        Raises:
            VitkitError: one that is not, by name.
        """
        for name, value in vars(owner).items():
            stateful = callable(getattr(value, "state_dict", None)) or isinstance(value, Progress)
            if stateful and not any(value is one for one in self._objects):
                raise VitkitError(
                    f"{type(owner).__name__}.{name} has a state that no checkpoint would hold; "
                    f"call registry.register({name!r}, ...)"
                )

    def check_names(self, stored: Mapping[str, object]) -> None:
        """Raises `CheckpointError` unless exactly the registered parts are stored."""
        _same_names("state", self._parts, stored)

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _same_names(what: str, mine: Mapping[str, object], stored: Mapping[str, object]) -> None:
    missing, extra = sorted(mine.keys() - stored.keys()), sorted(stored.keys() - mine.keys())
    if missing or extra:
        raise CheckpointError(
            f"{what}: {', '.join(missing[:5]) or 'nothing'} missing, "
            f"{', '.join(extra[:5]) or 'nothing'} unknown"
        )

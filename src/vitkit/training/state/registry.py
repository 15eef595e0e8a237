"""The registry of all resumable training state, by name, and the state of model and optimizer.

Saving, loading, hashing and the tests that leave a part out all go over this one registry, so that
state that is not registered cannot be saved by accident. A part is tensors and JSON values: nothing
that is stored can run code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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
        check_same_names("model", own, tensors)
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
        check_same_names("optimizer", dict.fromkeys(("groups", "kinds", "numbers")), metadata)
        expected: dict[str, None] = {}
        for number, names in metadata["kinds"].items():
            for name in names:
                expected[f"{number}.{name}"] = None
        check_same_names("optimizer", expected, tensors)
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
        check_same_names("state", self._parts, stored)

    def __getitem__(self, name: str) -> Stateful:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def check_same_names(part: str, own: Mapping[str, object], stored: Mapping[str, object]) -> None:
    """Raise `CheckpointError` if stored names are missing or unknown; at most 5 are listed."""
    missing = sorted(own.keys() - stored.keys())
    extra = sorted(stored.keys() - own.keys())
    if missing or extra:
        raise CheckpointError(
            f"{part}: {', '.join(missing[:5]) or 'nothing'} missing, "
            f"{', '.join(extra[:5]) or 'nothing'} unknown"
        )

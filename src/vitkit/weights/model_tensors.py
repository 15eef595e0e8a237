"""A model's tensors by its spec: names, shapes, initial values, and a model filled with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec


@lru_cache(maxsize=4)
def blank_model(spec: ViTSpec) -> ViT:
    """Return a model on the meta device, which has shapes but no values; it must not be changed."""
    with torch.device("meta"):
        return ViT(spec)


@lru_cache(maxsize=4)
def tensor_shapes(spec: ViTSpec) -> Mapping[str, tuple[int, ...]]:
    """Return names and shapes of a model's tensors, without allocating them."""
    return {name: tuple(t.shape) for name, t in blank_model(spec).state_dict().items()}


def initial_values(spec: ViTSpec, names: Iterable[str]) -> dict[str, Tensor]:
    """Return initial values of some tensors, the same in every call; no generator is advanced."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed every GPU
        state = ViT(spec).state_dict()
    return {name: state[name].float() for name in names}


def filled_model(spec: ViTSpec, tensors: dict[str, Tensor]) -> tuple[ViT, str, list[str]]:
    """Return a model in eval mode with these weights as float32.

    It takes the tensors out of the dictionary, so that the model is the only copy of them.

    Returns:
        The model, the dtype that the weights had, and a note on rounding if there was any.
    """
    # No memory is allocated for initial values: assign=True puts the tensors in their place.
    with torch.device("meta"):
        model = ViT(spec)
    # Remembered, so that a file of half precision is written as one again.
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    floats: dict[str, Tensor] = {}
    rounded = 0
    for name in list(tensors):
        stored = tensors.pop(name)
        floats[name] = stored.float()
        # float32 may hold the same numbers: only those that change are worth a note.
        if stored.dtype == torch.float64:
            rounded += not torch.equal(floats[name].double(), stored)
    model.load_state_dict(floats, assign=True)
    notes: list[str] = []
    if rounded == 1:
        notes = ["1 tensor of float64 is rounded to float32"]
    elif rounded:
        notes = [f"{plural(rounded, 'tensor')} of float64 are rounded to float32"]
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    if dtype == "float64":
        dtype = "float32"
    return model.eval(), dtype, notes

"""Other libraries, and what the parity tests share: import, key map, comparison, control."""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from noise import fill_with_noise
from torch import Tensor, nn

import vitkit

TOLERANCE = 1e-5
"""Largest |difference| of float32 logits, as a part of their scale."""
Weights = dict[str, Tensor]


def peer(module: str, *names: str) -> Any:
    """A library of the `[parity]` extra, or some names of it, imported now.

    The test fails in one line where that is not possible: a package that is missing and one that is
    broken are both faults of the installation, not reasons to skip.
    """
    try:
        found = importlib.import_module(module)
        parts = [getattr(found, name) for name in names]
    except Exception as error:  # noqa: BLE001 - a broken install raises whatever it likes
        reason = " ".join(str(error).split()) or "no message"
        pytest.fail(
            f"{module} cannot be imported ({type(error).__name__}: {reason}); "
            "the parity tests need it: pip install -c constraints.txt -e '.[parity]'",
            pytrace=False,
        )
    return (parts[0] if len(parts) == 1 else parts) if names else found


def without_weights(make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` builds, in eval mode, with no memory for the weights it will be given."""
    with torch.device("meta"):
        return make().eval()


def noisy_vit(spec: vitkit.ViTSpec) -> vitkit.ViT:
    """Our model with every parameter off its identity, so that a swapped key shows."""
    model = without_weights(lambda: vitkit.ViT(spec)).to_empty(device="cpu")
    fill_with_noise(model)
    return model


def random_images(count: int, height: int, width: int | None = None) -> Tensor:
    """Seeded noise (B, 3, H, W)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, height, width or height, generator=generator)


def renamed(weights: Mapping[str, Tensor], table: Mapping[str, str]) -> Weights:
    """Our weights under another library's keys.

    Args:
        weights: ours.
        table: our module or parameter -> theirs; `*` stands for the number of the block. A key
            that no row covers is a `KeyError`.
    """
    made: Weights = {}
    for key, value in weights.items():
        block = re.match(r"blocks\.(\d+)\.", key)
        general = re.sub(r"^blocks\.\d+\.", "blocks.*.", key)
        if general in table:
            theirs = table[general]
        else:
            module, _, leaf = general.rpartition(".")
            theirs = f"{table[module]}.{leaf}"
        made[theirs.replace("*", block[1] if block else "*")] = value.detach()
    assert len(made) == len(weights), "two of our keys became one of theirs"
    return made


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest |difference| as a part of the largest |value|."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@torch.inference_mode()
def assert_parity(
    ours: nn.Module,
    theirs: nn.Module,
    weights: Weights,
    images: Tensor,
    *,
    swaps: Sequence[tuple[str, str]],
    read: Callable[[Any], Tensor] = lambda output: output,
    **settings: Any,
) -> None:
    """The same logits with the same weights, and others once two of them are swapped.

    Args:
        ours: with its weights.
        theirs: of the same architecture, its own weights unused.
        weights: ours by their keys; each key must be there, none too many.
        images: (B, 3, H, W).
        swaps: the control: pairs of their keys, of one shape.
        read: the logits in what their model returns.
        **settings: further arguments of their forward.
    """
    logits = ours(images)

    def difference(copied: Weights) -> float:
        theirs.load_state_dict(copied, strict=True, assign=True)
        return relative(logits, read(theirs(images, **settings)))

    assert difference(weights) <= TOLERANCE
    for one, other in swaps:
        swapped = weights | {one: weights[other], other: weights[one]}
        assert difference(swapped) > 10 * TOLERANCE, f"{one} and {other} swapped do not show"

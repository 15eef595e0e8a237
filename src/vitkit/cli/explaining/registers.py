"""`vitkit explain --test-time-registers`: neurons found in the first images, and their effect."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitkit.data.images.preprocess import preprocess_images
from vitkit.errors import ImageError
from vitkit.explaining.model.artefacts import Artefacts, find_artefacts
from vitkit.explaining.model.registers import (
    RegisterEffect,
    find_register_neurons,
    measure_registers,
    test_time_registers,
)
from vitkit.io.atomic import write_bytes
from vitkit.io.results import check_outputs, json_result
from vitkit.messages import plural

if TYPE_CHECKING:
    from vitkit.data.images.colour import RGBPixels
    from vitkit.prediction.images import FoundImage
    from vitkit.weights.checkpoint import Checkpoint

FAR = 2
"""Least ratio of largest to median norm for which registers pay off."""
MOST_IMAGES = 32
"""Images in which the neurons are looked for, the first ones."""
REGISTERS_FILE = json_result(
    "a report on registers", ["checkpoint", "threshold", "neurons", "images"]
)


def registers_file(folder: Path, inputs: Iterable[Path], *, overwrite: bool) -> Path:
    """Return the path of the report on registers in a folder.

    Args:
        folder: of the explanations.
        inputs: files that are never replaced.
        overwrite: replace another file, not only an earlier report.

    Raises:
        OutputError: a file that must not be written.
    """
    path = folder / "registers.json"
    check_outputs([path], REGISTERS_FILE, inputs=inputs, overwrite=overwrite, flag="--output")
    return path


class Registers:
    """Test-time registers of a model, and what they change in each image.

    Args:
        checkpoint: the model, on its device.
        images: those in which the neurons are looked for; broken ones are passed over.
    """

    def __init__(self, checkpoint: Checkpoint, images: Iterable[FoundImage]) -> None:
        self.checkpoint = checkpoint
        self.effect: RegisterEffect | None = None
        self.line = "no image to look for high-norm patch tokens in; explained without registers"
        self._images: list[dict[str, Any]] = []
        readable = [self._preprocessed(pixels) for pixels in _readable(images)]
        if readable:
            self._find(torch.cat(readable))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Move the neurons' activations to an extra token within the block, if there are any."""
        neurons = () if self.effect is None else self.effect.neurons
        with test_time_registers(self.checkpoint.model, neurons):
            yield

    def note(self, name: str, pixels: RGBPixels) -> tuple[str, ...]:
        """Count the high-norm patches of an image before and after, and return it as a caption.

        Args:
            name: of the image.
            pixels: (H, W, 3) uint8 RGB.
        """
        if self.effect is None:
            return ()
        found = measure_registers(
            self.checkpoint.model,
            self._preprocessed(pixels),
            self.effect.neurons,
            threshold=self.effect.before.threshold or None,
        )
        before, after = found.before, found.after
        counts = {"before": _counts(before), "after": _counts(after)}
        self._images.append({"image": name, **counts})
        return (
            f"test-time registers: high-norm patches {before.count} to {after.count}, largest norm "
            f"{before.norms.max():.3g} to {after.norms.max():.3g}, their share of the attention "
            f"{100 * before.attention:.1f} % to {100 * after.attention:.1f} %",
        )

    def write(self, path: Path) -> None:
        """Write the neurons, and the counts of each image that was explained."""
        neurons, threshold = [], None
        if self.effect is not None:
            threshold = self.effect.before.threshold
            neurons = [
                {"layer": neuron.layer, "neuron": neuron.neuron} for neuron in self.effect.neurons
            ]
        document = {
            "checkpoint": str(self.checkpoint.path),
            "threshold": threshold,
            "neurons": neurons,
            "images": self._images,
        }
        write_bytes(path, (json.dumps(document, indent=1) + "\n").encode())

    def _preprocessed(self, pixels: RGBPixels) -> torch.Tensor:
        device = next(self.checkpoint.model.parameters()).device
        return preprocess_images([pixels], self.checkpoint.preprocess).to(device)

    def _find(self, images: torch.Tensor) -> None:
        """Find the neurons, keep them if they take high norms away, and say so in a line."""
        model = self.checkpoint.model
        found = find_artefacts(model, images)
        where = f"in {plural(len(images), 'image')}"
        largest, median = found.norms.max(), np.median(found.norms)
        if not found.count or largest < FAR * median:
            self.line = (
                f"no patch token of very high norm {where} (largest {largest:.3g}, median "
                f"{median:.3g}); explained without registers"
            )
            return
        effect = measure_registers(model, images, find_register_neurons(model, images))
        if not effect.is_strong:
            self.line = (
                f"{found.count:,} of {plural(found.high.size, 'patch token')} {where} have a high "
                "norm, and it does not come from a few neurons; explained without registers"
            )
            return
        self.effect = effect
        self.line = f"{effect} ({where})"


def _counts(found: Artefacts) -> dict[str, Any]:
    return {
        "patch_tokens": found.high.size,
        "high_norm": found.count,
        "largest_norm": float(found.norms.max()),
        "share_of_attention": found.attention,
    }


def _readable(images: Iterable[FoundImage]) -> Iterator[RGBPixels]:
    for image in images:
        try:
            yield image.read()
        except ImageError:  # it is named when it is explained
            continue

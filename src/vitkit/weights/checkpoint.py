"""`Checkpoint`: a model with everything it needs to be used, wherever it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess
from vitkit.weights.imagenet_classes import ASSUMED, names_are_assumed
from vitkit.weights.publish import Hub, push_to_hub


@dataclass(frozen=True)
class Checkpoint:
    """A model with everything it needs to be used.

    Attributes:
        model: the ViT in eval mode, weights as stored.
        preprocess: what its images become.
        classes: the K class names in the order of the logits; empty where they are not known.
        format: which format the file has; `vitkit` for our own.
        metadata: the whole JSON document of the file.
        path: where it came from, or `None`.
        dtype: of the numbers in the file, `float32` or a half precision; the model has float32,
            to which float64 is rounded.
    """

    model: ViT
    preprocess: Preprocess
    classes: tuple[str, ...]
    format: str = "vitkit"
    metadata: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None
    dtype: str = "float32"

    @property
    def classes_assumed(self) -> bool:
        """Whether no file names the classes and they are assumed to be those of ImageNet-1k."""
        return names_are_assumed(self.classes, self.metadata)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the model is only guessed, random or left out, a line each."""
        lines = self.metadata.get("warnings")
        lines = lines if isinstance(lines, list) else []
        return tuple(str(line) for line in lines if line != ASSUMED or self.classes_assumed)

    @property
    def temperature(self) -> float:
        """What logits are divided by before they become probabilities; 1 where none was fitted.

        Raises:
            CheckpointError: a stored one that is no positive number.
        """
        stored = self.metadata.get("temperature", 1.0)
        if type(stored) not in (int, float) or not 0 < stored < math.inf:
            raise CheckpointError(
                f"{self.path or 'checkpoint'}: its temperature is {stored!r}, not a positive "
                f"number; take the file from where it came again"
            )
        return float(stored)

    def push_to_hub(
        self,
        name: str,
        *,
        to: str = "huggingface",
        private: bool = False,
        allow_lossy: bool = False,
        message: str = "Upload weights",
        hub: Hub | None = None,
    ) -> str:
        """Upload it to the Hugging Face Hub, as a folder with a model card. Needs `vitkit[hub]`.

        Args:
            name: `owner/name`; made if it is not there.
            to: the format: `huggingface` loads by `transformers` too, `timm` by timm, `vitkit`
                keeps everything that the checkpoint says of itself.
            private: make a new repository private.
            allow_lossy: as for `vitkit.convert`.
            message: of the commit.
            hub: where to upload; default `huggingface_hub.HfApi()`, which knows who you are.

        Returns:
            The address that `vitkit.load` takes, `hf://owner/name`.

        Raises:
            CheckpointError: a model that the format cannot hold.
            OutputError: the Hub refuses, or cannot be reached.
            MissingExtraError: `huggingface_hub` is not installed.
        """
        return push_to_hub(
            self, name, to=to, private=private, allow_lossy=allow_lossy, message=message, hub=hub
        )

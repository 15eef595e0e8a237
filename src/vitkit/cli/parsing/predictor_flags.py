"""Flags from which a predictor is opened: of a checkpoint, or of an exported model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitkit.cli.parsing.engine_flags import EngineFlags, open_checkpoint
from vitkit.errors import SettingError
from vitkit.exporting.files.endings import engine_refused, is_artefact, refuse_needless_trust
from vitkit.process import uncollected_imports

if TYPE_CHECKING:
    from vitkit.prediction.image_list import ImageList
    from vitkit.prediction.predictor import Predictor


@dataclass(frozen=True)
class PredictorFlags:
    """The flags, by their names.

    Attributes:
        choice: engine, precision and calibration of a checkpoint.
        device: device of a checkpoint.
        batch_size: images per batch.
        allow_partial: accept a checkpoint with unknown or missing tensors.
        trust_code: open an exported model of torch.
    """

    choice: EngineFlags
    device: str
    batch_size: int
    allow_partial: bool
    trust_code: bool

    def open(self, path: str, images: ImageList) -> tuple[Predictor, dict[str, str]]:
        """Return the predictor, and the true labels of the images in its classes.

        Args:
            path: a checkpoint, a run folder, or an exported model.
            images: images that will be predicted.

        Raises:
            SettingError: a flag that has no effect on this file.
        """
        # imported here: --help does not wait for torch
        with uncollected_imports():
            from vitkit.prediction.labels import match_labels, match_names
            from vitkit.prediction.predictor import Predictor

        refuse_needless_trust(path, trust_code=self.trust_code)
        if is_artefact(path):
            self._refuse_engine(path)
            predictor = Predictor(path, batch_size=self.batch_size, trust_code=self.trust_code)
            return predictor, match_names(predictor.classes, predictor.classes, images.classes)
        checkpoint, options = open_checkpoint(
            path, self.choice, images.total, allow_partial=self.allow_partial
        )
        predictor = Predictor.from_checkpoint(
            checkpoint, engine=options, device=self.device, batch_size=self.batch_size
        )
        return predictor, match_labels(checkpoint, images.classes)

    def _refuse_engine(self, path: str) -> None:
        """Refuse flags that have no effect on an exported model."""
        choice = self.choice
        plain = EngineFlags("auto", "float32", None, choice.data_root)
        if choice != plain or self.device not in ("auto", "cpu"):
            raise engine_refused(path)
        if self.allow_partial:
            raise SettingError(
                f"--allow-partial has no effect: {path} is an exported model, which is whole; "
                "leave it out"
            )

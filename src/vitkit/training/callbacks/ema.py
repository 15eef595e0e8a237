"""Callbacks that update the EMA of the weights, and set the mode of frozen parts."""

from __future__ import annotations

from vitkit.models.vit import ViT
from vitkit.training.optimization.ema import EMA
from vitkit.training.optimization.freezing import train_mode
from vitkit.training.step import StepResult
from vitkit.training.trainer import Callback, Trainer


class AverageWeights(Callback):
    """Updates the exponential moving average after each step that changed the weights.

    Args:
        ema: the average.
        model: whose weights are averaged.
    """

    def __init__(self, ema: EMA[ViT], model: ViT) -> None:
        self.ema, self._model = ema, model

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Update the average."""
        # a step that changed nothing would count the same weights twice
        if result.bad is None and not result.overflow:
            self.ema.update(self._model)


class TrainMode(Callback):
    """Sets the model to training mode before each epoch; validation sets it to eval mode.

    Args:
        model: the model; its frozen parts stay in eval mode.
    """

    def __init__(self, model: ViT) -> None:
        self._model = model

    def before_epoch(self, trainer: Trainer) -> None:
        """Set the mode."""
        train_mode(self._model)

"""The objective of a run with a teacher: a weighted sum of label loss and distillation loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitkit.data.augmentation.model_inputs import ModelInputs
from vitkit.shapes import Loss
from vitkit.training.distillation.losses import Distillation, student_logits
from vitkit.training.optimization.precision import Precision, autocast
from vitkit.training.step import Objective


class DistillingObjective(Objective):
    """Model and loss on labels and teacher targets; a distillation head learns the latter.

    Args:
        model: a student with one head or two; see `student_logits`.
        loss: loss on logits and labels.
        precision: as for `Objective`.
        device: device of the model.
        distillation: temperature, weights, soft or hard targets.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        precision: Precision,
        device: torch.device,
        distillation: Distillation,
    ) -> None:
        super().__init__(model, loss, precision, device)
        self.distillation = distillation

    def forward(self, fed: ModelInputs) -> Tensor:
        """Return the mean loss of a batch with teacher targets."""
        assert fed.soft is not None, "transformed by `TeacherTargets`"
        with autocast(self.precision, self.device):
            label_logits, distillation_logits = student_logits(self.model, fed.images)
        # The losses are computed in float32, whatever the precision of the model.
        return self.distillation.combine(
            self.label_loss(label_logits.float(), fed),
            self.distillation.distillation_loss(distillation_logits.float(), fed.soft),
        )

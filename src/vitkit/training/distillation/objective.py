"""The objective of a run with a teacher: labels and the teacher's targets, by their shares."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitkit.data.loading.batch_transform import ModelInputs
from vitkit.training.distillation.losses import Distillation, student_logits
from vitkit.training.optimization.losses import Loss
from vitkit.training.optimization.precision import Precision, autocast
from vitkit.training.step import Objective


class DistillingObjective(Objective):
    """Model, loss and teacher's targets; the distillation head learns these, where there is one.

    Args:
        model: a student with one head or two; see `student_logits`.
        loss: of logits and labels.
        precision: as for `Objective`.
        device: where the model is.
        distillation: temperature, shares, soft or hard targets.
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
        """Return the mean loss of a batch that has the teacher's targets."""
        assert fed.soft is not None, "transformed by `TeacherTargets`"
        with autocast(self.precision, self.device):
            logits, taught = student_logits(self.model, fed.images)
        return self.distillation.mixed(
            self.label_loss(logits.float(), fed),
            self.distillation.distillation_loss(taught.float(), fed.soft),
        )

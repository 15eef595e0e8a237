"""Losses of knowledge distillation, computed from the logits of a teacher.

Soft targets: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network" (arXiv
1503.02531). Hard targets and the distillation token: Touvron et al., "Training data-efficient image
transformers" (DeiT, arXiv 2012.12877), Eq. 2 and 3.
"""

from __future__ import annotations

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.models.vit import ViT
from vitkit.shapes import Images, Logits


@frozen(raises=SettingError)
class Distillation:
    """Settings and losses of distillation. Raises `SettingError` for a value out of range.

    With student logits Z_s, teacher logits Z_t, labels y, softmax psi, temperature T and alpha a
    (DeiT's tau and lambda):

        soft, Eq. 2: (1 - a) CE(psi(Z_s), y) + a T^2 KL(psi(Z_t / T) || psi(Z_s / T))
        hard, Eq. 3: (1 - a) CE(psi(Z_s), y) + a CE(psi(Z_s), argmax Z_t)

    The divergence is the mean over the images, as in both papers. DeiT's published code divides it
    by the number of classes, too: with soft targets, its alpha is not comparable to this one.
    """

    temperature: float = Field(3.0, gt=0.0)
    """T; used with soft targets only."""
    alpha: float = Field(0.5, ge=0.0, le=1.0)
    """a, the weight of the teacher's loss."""
    hard: bool = False
    """Learn the teacher's most probable class instead of its probabilities."""

    def targets(self, teacher: Logits) -> Float[Tensor, "B K"]:
        """Turn a teacher's logits into a probability for every class; mixed as labels are."""
        if self.hard:
            return F.one_hot(teacher.argmax(1), teacher.shape[1]).to(teacher.dtype)
        return F.softmax(teacher / self.temperature, dim=1)

    def distillation_loss(
        self, student: Logits, targets: Float[Tensor, "B K"]
    ) -> Float[Tensor, ""]:
        """Return the loss of a student's logits (B, K) against `targets`, not yet weighted."""
        if self.hard:
            return F.cross_entropy(student, targets)  # mixed targets are probabilities, too
        log_probabilities = F.log_softmax(student / self.temperature, dim=1)
        # T^2 keeps the size of the gradient, which a temperature divides by T^2.
        divergence = F.kl_div(log_probabilities, targets, reduction="batchmean")
        return divergence * self.temperature**2

    def combine(self, label_loss: Tensor, distillation_loss: Tensor) -> Tensor:
        """Return the weighted sum of both losses."""
        return (1 - self.alpha) * label_loss + self.alpha * distillation_loss


def student_logits(student: nn.Module, images: Images) -> tuple[Logits, Logits]:
    """Return the logits that learn from the labels and those that learn from the teacher.

    They are different for a `ViT` with a distillation token and for a module that returns a pair
    (the distilled models of timm and DeiT in training mode); otherwise they are the same tensor.

    Args:
        student: images (B, C, H, W) -> logits (B, K), a pair of them, or an object with `.logits`.
        images: normalised for the student.

    Raises:
        SettingError: a `ViT` with two heads is wrapped in a module that returns only their mean.
    """
    if isinstance(student, ViT) and student.spec.distillation_token:
        return student.forward_heads(student.forward_features(images))
    output = student(images)
    if isinstance(output, tuple):
        label_logits, distillation_logits = output
        return label_logits, distillation_logits
    if any(isinstance(m, ViT) and m.spec.distillation_token for m in student.modules()):
        raise SettingError(
            f"the two heads of the student cannot be reached through {type(student).__name__}; "
            "pass the student itself, and compile or wrap the DistillWrapper instead"
        )
    logits = getattr(output, "logits", output)  # transformers returns an object
    return logits, logits

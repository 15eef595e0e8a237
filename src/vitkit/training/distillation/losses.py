"""Losses of knowledge distillation: what a student learns from a teacher's logits.

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
    """How a student learns from a teacher. Raises `SettingError` for a value out of range.

    With student logits Z_s, teacher logits Z_t, labels y, softmax psi, temperature T and alpha a
    (DeiT's tau and lambda):

        soft, Eq. 2: (1 - a) CE(psi(Z_s), y) + a T^2 KL(psi(Z_t / T) || psi(Z_s / T))
        hard, Eq. 3: (1 - a) CE(psi(Z_s), y) + a CE(psi(Z_s), argmax Z_t)

    The divergence is the mean over the images, as in both papers. DeiT's published code divides
    it by the number of classes too: its alpha with soft targets is not this one.
    """

    temperature: float = Field(3.0, gt=0.0)
    """T, with soft targets alone."""
    alpha: float = Field(0.5, ge=0.0, le=1.0)
    """a, the teacher's share of the loss."""
    hard: bool = False
    """Learn the teacher's first choice instead of its probabilities."""

    def targets(self, teacher: Logits) -> Float[Tensor, "B K"]:
        """What the student is to say: a probability for every class, to be mixed as labels are."""
        if self.hard:
            return F.one_hot(teacher.argmax(1), teacher.shape[1]).to(teacher.dtype)
        return F.softmax(teacher / self.temperature, dim=1)

    def distillation_loss(
        self, student: Logits, targets: Float[Tensor, "B K"]
    ) -> Float[Tensor, ""]:
        """The teacher's part of the loss, without its share."""
        if self.hard:
            return F.cross_entropy(student, targets)
        said = F.log_softmax(student / self.temperature, dim=1)
        return F.kl_div(said, targets, reduction="batchmean") * self.temperature**2

    def mixed(self, label_loss: Tensor, distillation_loss: Tensor) -> Tensor:
        """Both parts by their shares."""
        return (1 - self.alpha) * label_loss + self.alpha * distillation_loss


def student_logits(student: nn.Module, images: Images) -> tuple[Logits, Logits]:
    """What learns from the labels and what from the teacher; one and the same with one head.

    A `ViT` with a distillation token, and any module that returns a pair (timm's and DeiT's
    distilled models in training), has two.

    Raises:
        SettingError: a `ViT` with two heads in another module, which gives their mean alone.
    """
    if isinstance(student, ViT) and student.spec.distillation_token:
        return student.forward_heads(student.forward_features(images))
    said = student(images)
    if isinstance(said, tuple):
        label_loss, distillation_loss = said
        return label_loss, distillation_loss
    if any(isinstance(m, ViT) and m.spec.distillation_token for m in student.modules()):
        raise SettingError(
            f"the two heads of the student cannot be reached through {type(student).__name__}; "
            f"give the student itself, and compile or wrap the DistillWrapper"
        )
    logits = getattr(said, "logits", said)
    return logits, logits

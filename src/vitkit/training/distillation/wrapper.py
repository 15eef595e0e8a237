"""Knowledge distillation: what a teacher says of the pictures is learned beside their labels.

Soft targets: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network" (arXiv
1503.02531). Hard targets and the distillation token: Touvron et al., "Training data-efficient image
transformers" (DeiT, arXiv 2012.12877), Eq. 2 and 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.models.vit import ViT
from vitkit.shapes import Images, Logits
from vitkit.spec import Preprocess
from vitkit.training.distillation.teacher import Teacher, TeacherSource


@frozen(raises=SettingError)
class Distillation:
    """How a student learns from a teacher. Raises `SettingError` for a value out of range.

    With student logits Z_s, teacher logits Z_t, labels y, softmax psi, temperature T and alpha a
    (DeiT's tau and lambda):

        soft, Eq. 2: (1 - a) CE(psi(Z_s), y) + a T^2 KL(psi(Z_t / T) || psi(Z_s / T))
        hard, Eq. 3: (1 - a) CE(psi(Z_s), y) + a CE(psi(Z_s), argmax Z_t)

    The divergence is the mean over the pictures, as in both papers. DeiT's published code divides
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

    def of_teacher(self, student: Logits, targets: Float[Tensor, "B K"]) -> Float[Tensor, ""]:
        """The teacher's part of the loss, without its share."""
        if self.hard:
            return F.cross_entropy(student, targets)
        said = F.log_softmax(student / self.temperature, dim=1)
        return F.kl_div(said, targets, reduction="batchmean") * self.temperature**2

    def mixed(self, of_labels: Tensor, of_teacher: Tensor) -> Tensor:
        """Both parts by their shares."""
        return (1 - self.alpha) * of_labels + self.alpha * of_teacher


def two_logits(student: nn.Module, images: Images) -> tuple[Logits, Logits]:
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
        of_labels, of_teacher = said
        return of_labels, of_teacher
    if any(isinstance(m, ViT) and m.spec.distillation_token for m in student.modules()):
        raise SettingError(
            f"the two heads of the student cannot be reached through {type(student).__name__}; "
            f"give the student itself, and compile or wrap the DistillWrapper"
        )
    logits = getattr(said, "logits", said)
    return logits, logits


class DistillWrapper(nn.Module):
    """A student that learns from a teacher: (images, labels) -> loss.

    Where the student has a distillation token (`spec.distillation_token`), its class head learns
    from the labels and its distillation head from the teacher; token and head are the student's
    own, so an optimizer over the student trains them and its state has them. Elsewhere one head
    learns both. The teacher moves with the wrapper, but is no part of it: it is always in eval
    mode, has no gradient, and is in neither `parameters()` nor `state_dict()`.

    Args:
        student: a `ViT`, or any module that gives logits (B, K).
        teacher: a module that does, of vitkit, timm, torchvision, transformers or elsewhere; a
            checkpoint or its path; or a `Teacher`, which also says what its pictures become.
        temperature: of soft targets; see `Distillation`.
        alpha: the teacher's share of the loss, [0, 1].
        hard: learn the teacher's first choice.
        preprocess: how the student's images are normalised. With it they are brought to the size,
            mean and std that the teacher wants, on their device; without, it sees them as they are.

    Raises:
        SettingError: a value out of range.
        CheckpointError: a teacher that cannot be read.

    >>> import torch
    >>> spec = dict(image_size=8, patch_size=4, width=16, depth=1, num_heads=2, mlp_width=16)
    >>> from vitkit.spec import ViTSpec
    >>> student, teacher = (ViT(ViTSpec(**spec, num_classes=3)) for _ in range(2))
    >>> loss = DistillWrapper(student, teacher)(torch.zeros(2, 3, 8, 8), torch.tensor([0, 2]))
    >>> loss.shape
    torch.Size([])
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: TeacherSource,
        temperature: float = 3.0,
        alpha: float = 0.5,
        hard: bool = False,
        *,
        preprocess: Preprocess | None = None,
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, Teacher.of(teacher)
        self.distillation = Distillation(temperature=temperature, alpha=alpha, hard=hard)
        self.preprocess = preprocess
        if preprocess is None and self.teacher.preprocess is not None:
            warnings.warn(
                "the teacher sees the student's images as they are; pass preprocess=, how they are "
                "normalised, to have them brought to what the teacher wants",
                stacklevel=2,
            )
        two = getattr(student, "set_distilled_training", None)
        if callable(two):  # timm's models average their heads without it
            two(True)

    def forward(
        self, images: Images, labels: Int64[Tensor, " B"] | Float[Tensor, "B K"]
    ) -> Float[Tensor, ""]:
        """The mean loss.

        Args:
            images: (B, C, H, W), normalised for the student.
            labels: class numbers (B,), or a probability for every class (B, K).

        Raises:
            SettingError: the teacher gives no logits, or of another number of classes; the student
                is a module around a `ViT` with two heads, and gives their mean alone.
        """
        taught = self.teacher(images, self.preprocess)
        of_labels, of_teacher = two_logits(self.student, images)
        if taught.shape != of_teacher.shape:
            raise SettingError(
                f"the teacher tells {taught.shape[1]} classes apart and the student "
                f"{of_teacher.shape[1]}; give a teacher of the student's classes"
            )
        return self.distillation.mixed(
            F.cross_entropy(of_labels, labels),
            self.distillation.of_teacher(of_teacher, self.distillation.targets(taught)),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistillWrapper:
        """`to`, `cuda` and the like take the teacher along."""
        self.teacher.model._apply(fn)
        applied: Any = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return applied

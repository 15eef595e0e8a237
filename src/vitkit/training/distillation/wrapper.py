"""`DistillWrapper`: a student and its teacher in one module, for a training loop of one's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import SettingError
from vitkit.shapes import Images
from vitkit.spec import Preprocess
from vitkit.training.distillation.losses import Distillation, student_logits
from vitkit.training.distillation.teacher import Teacher, TeacherSource


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
            checkpoint or its path; or a `Teacher`, which also says what its images become.
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
        label_loss, distillation_loss = student_logits(self.student, images)
        if taught.shape != distillation_loss.shape:
            raise SettingError(
                f"the teacher tells {taught.shape[1]} classes apart and the student "
                f"{distillation_loss.shape[1]}; give a teacher of the student's classes"
            )
        return self.distillation.mixed(
            F.cross_entropy(label_loss, labels),
            self.distillation.distillation_loss(
                distillation_loss, self.distillation.targets(taught)
            ),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistillWrapper:
        """`to`, `cuda` and the like take the teacher along."""
        self.teacher.model._apply(fn)
        applied: Any = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return applied

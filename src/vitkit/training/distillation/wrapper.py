"""`DistillWrapper`: a student and its teacher in one module, for a custom training loop."""

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
from vitkit.training.distillation.teacher_source import TeacherSource, as_teacher


class DistillWrapper(nn.Module):
    """Module of a student that learns from a teacher: (images, labels) -> loss.

    If the student has a distillation token (`spec.distillation_token`), its class head learns from
    the labels and its distillation head from the teacher; token and head belong to the student, so
    an optimizer of the student trains them and its `state_dict` has them. Otherwise one head learns
    from both. The teacher moves between devices with the wrapper, but is not a submodule: it is
    always in eval mode, has no gradient, and is in neither `parameters()` nor `state_dict()`.

    Args:
        student: a `ViT`, or any module that returns logits (B, K).
        teacher: a module that returns logits (B, K), of vitkit, timm, torchvision, transformers or
            another library; a checkpoint or its path; or a `Teacher`, which also has the
            preprocessing of its images.
        temperature: temperature of soft targets; see `Distillation`.
        alpha: weight of the teacher's loss, [0, 1].
        hard: learn the teacher's most probable class.
        preprocess: normalisation of the student's images. With it, images are converted to the
            size, mean and std of the teacher, on their device; without it, the teacher gets them
            unchanged.

    Raises:
        SettingError: a value is out of range.
        CheckpointError: the teacher cannot be read.

    >>> import torch
    >>> spec = dict(image_size=8, patch_size=4, width=16, depth=1, num_heads=2, mlp_width=16)
    >>> from vitkit import ViT, ViTSpec
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
        self.student = student
        self.teacher = as_teacher(teacher)
        self.distillation = Distillation(temperature=temperature, alpha=alpha, hard=hard)
        self.preprocess = preprocess
        if preprocess is None and self.teacher.preprocess is not None:
            warnings.warn(
                "the teacher gets the student's images unchanged; pass preprocess= with the "
                "student's normalisation, so that they are converted to the teacher's",
                stacklevel=2,
            )
        set_distilled = getattr(student, "set_distilled_training", None)
        if callable(set_distilled):  # without it, timm's models return the mean of their heads
            set_distilled(True)

    def forward(
        self, images: Images, labels: Int64[Tensor, " B"] | Float[Tensor, "B K"]
    ) -> Float[Tensor, ""]:
        """Return the mean loss.

        Args:
            images: (B, C, H, W), normalised for the student.
            labels: class numbers (B,), or a probability for every class (B, K).

        Raises:
            SettingError: the teacher returns no logits, or logits of another number of classes; or
                the student is a module around a `ViT` with two heads that returns only their mean.
        """
        # without gradients, in the teacher's own size and normalisation
        teacher_logits = self.teacher(images, self.preprocess)
        label_logits, distillation_logits = student_logits(self.student, images)
        if teacher_logits.shape != distillation_logits.shape:
            raise SettingError(
                f"the teacher has {teacher_logits.shape[1]} classes and the student "
                f"{distillation_logits.shape[1]}; use a teacher with the student's classes"
            )
        targets = self.distillation.targets(teacher_logits)
        return self.distillation.combine(
            F.cross_entropy(label_logits, labels),
            self.distillation.distillation_loss(distillation_logits, targets),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistillWrapper:
        """Apply `to`, `cuda` and the like to the teacher as well."""
        # The teacher is no submodule, so that nn.Module does not find it.
        self.teacher.model._apply(fn)
        # torch's method has no types
        applied: Any = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return applied

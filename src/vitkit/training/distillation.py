"""Knowledge distillation: losses, the teacher, its part in a run, and `DistillWrapper`.

Soft targets: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network" (arXiv
1503.02531). Hard targets and the distillation token: Touvron et al., "Training data-efficient image
transformers" (DeiT, arXiv 2012.12877), Eq. 2 and 3.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, get_args

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.data.augmentation.pipeline import BatchTransform, ModelInputs
from vitkit.data.datasets.splitting import match_classes
from vitkit.data.loading.loader import Batch
from vitkit.errors import CheckpointError, Interrupted, SettingError, UserError
from vitkit.frozen import frozen
from vitkit.io.results import import_by_name
from vitkit.messages import quote_list
from vitkit.models.vit import ViT
from vitkit.shapes import Images, Logits
from vitkit.spec import Interpolation, Preprocess
from vitkit.training.optimization.precision import Precision, autocast
from vitkit.training.state.registry import Metadata, Tensors
from vitkit.training.step import Objective
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.files import tensor_digests
from vitkit.weights.load import load

REC_601 = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the luma of ITU-R BT.601."""
IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_<][\w.<>]*(\(\))?")
"""`package.module:function`, a function that returns a teacher."""


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
        """Turn a teacher's logits into a probability for every class."""
        if self.hard:
            return F.one_hot(teacher.argmax(1), teacher.shape[1]).to(teacher.dtype)
        return F.softmax(teacher / self.temperature, dim=1)

    def loss(
        self, label_loss: Tensor, student: Logits, targets: Float[Tensor, "B K"]
    ) -> Float[Tensor, ""]:
        """Return the weighted sum of the label loss and the loss of a student's logits (B, K)."""
        if self.hard:
            teacher_loss = F.cross_entropy(student, targets)
        else:
            log_probabilities = F.log_softmax(student / self.temperature, dim=1)
            divergence = F.kl_div(log_probabilities, targets, reduction="batchmean")
            # T^2 keeps the size of the gradient, which a temperature divides by T^2.
            teacher_loss = divergence * self.temperature**2
        return (1 - self.alpha) * label_loss + self.alpha * teacher_loss


def _student_logits(student: nn.Module, images: Images) -> tuple[Logits, Logits]:
    """Return the logits that learn from the labels and those that learn from the teacher."""
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


@dataclass(frozen=True)
class Teacher:
    """A frozen classifier, evaluated without gradients; never part of the training state.

    Attributes:
        model: images (B, C, h, w) -> logits (B, K), or an object with `.logits` as of transformers.
        preprocess: normalisation and size of its images; `None` for those of the student.
        classes: class names in the order of its logits; empty if they are not known.
        columns: indices of the logits to return, in this order; `None` for all of them.
    """

    model: nn.Module
    preprocess: Preprocess | None = None
    classes: tuple[str, ...] = ()
    columns: tuple[int, ...] | None = None

    @torch.no_grad()
    def __call__(self, images: Images, preprocess: Preprocess | None = None) -> Logits:
        """Return the logits (B, K), float32, of images (B, C, H, W) normalised by `preprocess`.

        By default that is the teacher's own. Other results than logits are a `SettingError`.
        """
        if preprocess is not None and self.preprocess is not None:
            images = renormalise(images, preprocess, self.preprocess)
        # Images in the precision of the weights: a teacher may be stored in half precision.
        dtypes = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        output = self.model.eval()(images.to(next(dtypes, images.dtype)))
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            found = f"{type(logits).__name__} {tuple(getattr(logits, 'shape', ()))}"
            raise SettingError(
                f"the teacher {type(self.model).__name__} returns {found}; expected logits (B, K): "
                "wrap it in a module whose forward returns them"
            )
        logits = logits.float()
        if self.columns is None:
            return logits
        return logits[:, list(self.columns)]

    def for_classes(
        self, classes: tuple[str, ...], preprocess: Preprocess, device: torch.device
    ) -> tuple[Teacher, list[str]]:
        """Return this teacher on a device, with logits of the data's classes in order, and notes.

        It is tried on a grey image of its own, or of the student's `preprocess`: a teacher that
        fails should fail before the first step. Raise `SettingError` if it does not know a class,
        or cannot take the image.
        """
        teacher = replace(self, model=self.model.to(device).requires_grad_(False), columns=None)
        own = self.preprocess or preprocess
        image = torch.zeros(1, own.channels, *own.image_size, device=device)
        try:
            num_logits = teacher(image).shape[1]
        except (SettingError, Interrupted):  # they have messages of their own
            raise
        except Exception as why:  # noqa: BLE001 - whatever a model raises for such images
            raise SettingError(
                f"the teacher {type(self.model).__name__} cannot take images "
                f"{tuple(image.shape)} ({why}); describe its input: Teacher(model, "
                "Preprocess(image_size=..., mean=..., std=...))"
            ) from None
        known = self.classes or classes
        # By name: the teacher may count its classes in another order.
        match, problem = match_classes(classes, known), ""
        if num_logits != len(known):
            whose = "names of" if self.classes else "the data have"
            problem = f"has {num_logits} classes and {whose} {len(known)}"
        elif match.ambiguous:
            problem = f"has several classes called {match.ambiguous[0]!r}"
        elif match.unknown:
            problem = f"lacks the classes {quote_list(match.unknown)}; it has {quote_list(known)}"
        if problem:
            raise SettingError(
                f"the teacher {problem}; train it on this data first, or use another teacher"
            )
        if not self.classes:
            note = f"the teacher has no class names; its {num_logits} logits are assumed to be the "
            return teacher, [f"{note}data's classes: {quote_list(classes)}"]
        notes = []
        if match.unused:
            left_out = len(match.unused)
            notes.append(f"classes of the teacher that the data lack, left out: {left_out}")
        return replace(teacher, columns=match.indices), notes


def renormalise(
    images: Images, current: Preprocess, wanted: Preprocess
) -> Float[Tensor, "B c h w"]:
    """Convert images normalised for one model to the channels, size, mean and std of another.

    The images are (B, C, H, W) of any size; the whole image is squashed to the wanted size (h, w).
    """

    def per_channel(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=images.dtype, device=images.device).view(-1, 1, 1)

    if (current.mean, current.std) != (wanted.mean, wanted.std):
        images = images * per_channel(current.std) + per_channel(current.mean)
        if current.channels == 3 and wanted.channels == 1:
            images = (images * per_channel(REC_601)).sum(1, keepdim=True)
        # Grey images become colour images here, by broadcasting.
        images = (images - per_channel(wanted.mean)) / per_channel(wanted.std)
    if images.shape[-2:] == wanted.image_size:
        return images
    smooth = wanted.interpolation != "nearest"  # antialiasing needs a filter
    return F.interpolate(images, wanted.image_size, mode=wanted.interpolation, antialias=smooth)


TeacherSource: TypeAlias = Teacher | Checkpoint | nn.Module | str | Path
"""Types of which `as_teacher` makes a teacher."""


def as_teacher(
    source: TeacherSource, argument: str = "the teacher", *, trust_pickle: bool = False
) -> Teacher:
    """Make a teacher from a model, a checkpoint, a path or an import path.

    `package.module:function` is called, and returns a teacher, a checkpoint or a module. A timm
    module has the preprocessing of its `pretrained_cfg`: pass `Teacher(module, Preprocess(...))`
    for one that was trained on other images.

    Args:
        source: one of these; a path may be any argument of `vitkit.load`.
        argument: names the teacher in messages.
        trust_pickle: as for `vitkit.load`.

    Raises:
        CheckpointError: a file cannot be read as a model.
        SettingError: a function cannot be imported or called, or something is of another type.
    """
    made: Any = source
    if isinstance(source, str) and IMPORTED.fullmatch(source):
        try:
            made = import_by_name(source)
            if not isinstance(made, Teacher | Checkpoint | nn.Module):
                made = made()
        except Interrupted:
            raise
        except Exception as error:  # whatever a user's own function raises
            raise SettingError(
                f"{argument} {source} cannot be built: {type(error).__name__}: {error}; pass a "
                "checkpoint, or package.module:function of a function without arguments that "
                "returns a module"
            ) from error
    elif isinstance(source, str | Path):
        try:
            made = load(source, trust_pickle=trust_pickle)
        except UserError as error:
            raise CheckpointError(f"{argument}: {error}") from None
    if isinstance(made, Checkpoint):
        # Assumed names would be matched with those of the data, so they do not count.
        classes = () if made.classes_assumed else made.classes
        return Teacher(made.model, made.preprocess, classes)
    if isinstance(made, nn.Module):
        return Teacher(made, _own_preprocess(made))
    if isinstance(made, Teacher):
        return made
    kind = type(made).__name__
    raise SettingError(f"{argument} {source} gives {kind}; expected a Teacher or a module")


def _own_preprocess(model: nn.Module) -> Preprocess | None:
    """Return the preprocessing that a ViT or a timm module has; `None` for another module."""
    if isinstance(model, ViT):  # the usual statistics are not known to be those of its training
        if model.origin:
            return model.origin.preprocess
        return None
    # Read from attributes, without importing timm.
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, dict) or not {"mean", "std", "input_size"} <= config.keys():
        return None
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is not None and first.in_channels != len(config["mean"]):
        return None  # rebuilt for another number of channels than the mean has
    interpolation: Any = config.get("interpolation")
    if interpolation not in get_args(Interpolation):  # timm has more of them
        interpolation = "bicubic"
    # of a model that was built for another size
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return Preprocess(
        image_size=size or config["input_size"][1:],
        mean=config["mean"],
        std=config["std"],
        interpolation=interpolation,
    )


@dataclass(eq=False)
class TeacherTargets:
    """A batch transform that asks the teacher, too; its digest is part of the run's state.

    The teacher is on the device, its logits in the order of the data's classes. It gets the images
    of the student's `transform`, normalised by `preprocess`. `source` names it in messages.
    """

    teacher: Teacher
    distillation: Distillation
    transform: BatchTransform
    preprocess: Preprocess
    precision: Precision
    source: str

    def __post_init__(self) -> None:
        teacher = self.teacher
        preprocess = None if teacher.preprocess is None else teacher.preprocess.to_json()
        document = [tensor_digests(teacher.model.state_dict()), preprocess, teacher.columns]
        self._digest = hashlib.sha256(json.dumps(document).encode()).hexdigest()

    def __call__(self, batch: Batch, step: int, part: int = 0) -> ModelInputs:
        """Transform a batch, and add the teacher's targets for its images, mixed ones included."""
        fed = self.transform(batch, step, part)
        with autocast(self.precision, fed.images.device):
            logits = self.teacher(fed.images, self.preprocess)
        return replace(fed, soft=self.distillation.targets(logits))

    def tensors(self) -> Tensors:
        """Return no tensors: the teacher is not part of the run's state."""
        return {}

    def metadata(self) -> Metadata:
        """Return a SHA-256 of the teacher's weights, its preprocessing, and the selected logits."""
        return {"sha256": self._digest}

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Raise `CheckpointError` if the run began with another teacher."""
        if metadata != self.metadata():
            raise CheckpointError(
                f"--teacher {self.source} is not the teacher that the run started with; "
                "pass that one, or start afresh with another --output"
            )


class DistillingObjective(Objective):
    """Model and loss on labels and teacher targets; a distillation head learns the latter."""

    def __init__(self, plain: Objective, distillation: Distillation) -> None:
        super().__init__(plain.model, plain.loss, plain.precision, plain.device)
        self.distillation = distillation

    def forward(self, fed: ModelInputs) -> Tensor:
        """Return the mean loss of a batch with teacher targets."""
        assert fed.soft is not None, "transformed by `TeacherTargets`"
        with autocast(self.precision, self.device):
            label_logits, distillation_logits = _student_logits(self.model, fed.images)
        # The losses are computed in float32, whatever the precision of the model.
        label_loss = self.label_loss(label_logits.float(), fed)
        return self.distillation.loss(label_loss, distillation_logits.float(), fed.soft)


class DistillWrapper(nn.Module):
    """Module of a student that learns from a teacher: (images, labels) -> loss.

    With a distillation token (`spec.distillation_token`), the class head of the student learns from
    the labels and its distillation head from the teacher; without it, one head learns from both.
    The teacher moves between devices with the wrapper, but is no submodule: it is always in eval
    mode, has no gradient, and is in neither `parameters()` nor `state_dict()`.

    Args:
        student: a `ViT`, or any module that returns logits (B, K).
        teacher: a module of any library that returns logits (B, K); a checkpoint or its path; or a
            `Teacher`, which also has the preprocessing of its images.
        temperature: temperature of soft targets; see `Distillation`.
        alpha: weight of the teacher's loss, [0, 1].
        hard: learn the teacher's most probable class.
        preprocess: normalisation of the student's images, which are converted to the size, mean and
            std of the teacher; without it, the teacher gets them unchanged.

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
            SettingError: the teacher returns no logits, or those of another number of classes; or
                two heads of the student are hidden by a module around it.
        """
        # without gradients, in the teacher's own size and normalisation
        teacher_logits = self.teacher(images, self.preprocess)
        label_logits, distillation_logits = _student_logits(self.student, images)
        if teacher_logits.shape != distillation_logits.shape:
            raise SettingError(
                f"the teacher has {teacher_logits.shape[1]} classes and the student "
                f"{distillation_logits.shape[1]}; use a teacher with the student's classes"
            )
        targets = self.distillation.targets(teacher_logits)
        label_loss = F.cross_entropy(label_logits, labels)
        return self.distillation.loss(label_loss, distillation_logits, targets)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistillWrapper:
        """Apply `to`, `cuda` and the like to the teacher as well."""
        # The teacher is no submodule, so that nn.Module does not find it.
        self.teacher.model._apply(fn)
        # torch's method has no types
        applied: Any = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return applied

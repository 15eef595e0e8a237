"""`Teacher`: a frozen classifier that gives logits for the images of a student."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.data.datasets.class_names import match_classes
from vitkit.errors import SettingError, UserError
from vitkit.io.digests import tensor_digests
from vitkit.messages import quote_list
from vitkit.shapes import Images, Logits
from vitkit.spec import Preprocess

REC_601 = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the luma of ITU-R BT.601."""

CANNOT_TAKE = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    UserError,
)
"""Exceptions that a model raises for images which it cannot take, or by a mistake of its own."""


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
        """Return the teacher's logits of a batch, float32.

        Args:
            images: (B, C, H, W), normalised for the student.
            preprocess: normalisation of these images; `None` if it is the teacher's own.

        Raises:
            SettingError: the model returns no logits.
        """
        if preprocess is not None and self.preprocess is not None:
            images = renormalise(images, preprocess, self.preprocess)
        # Images in the precision of the weights: a teacher may be stored in half precision.
        dtypes = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        output = self.model.eval()(images.to(next(dtypes, images.dtype)))
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise SettingError(
                f"the teacher {type(self.model).__name__} returns {describe_value(logits)}; "
                f"expected logits (B, K): wrap it in a module whose forward returns them"
            )
        logits = logits.float()
        return logits if self.columns is None else logits[:, list(self.columns)]

    def fingerprint(self) -> str:
        """Return a SHA-256 (hex) of its weights, its preprocessing, and the selected logits."""
        preprocess = None if self.preprocess is None else self.preprocess.to_json()
        document = [tensor_digests(self.model.state_dict()), preprocess, self.columns]
        return hashlib.sha256(json.dumps(document).encode()).hexdigest()

    def for_classes(
        self,
        classes: tuple[str, ...],
        preprocess: Preprocess,
        device: torch.device,
        sides: Sequence[int] = (),
    ) -> tuple[Teacher, list[str]]:
        """Return this teacher on a device, with its logits in the order of the given classes.

        Args:
            classes: class names of the data.
            preprocess: preprocessing of the student's images.
            device: device of the student.
            sides: sides of square images that the student also gets, in pixels.

        Returns:
            The teacher, and lines to print.

        Raises:
            SettingError: it does not know a class, or cannot take the images.
        """
        model = self.model.to(device).eval().requires_grad_(False)
        teacher = replace(self, model=model, columns=None)
        # Tried now: a teacher that fails should fail before the first step.
        num_logits = teacher._count_logits(preprocess, device)
        for side in sides:
            teacher._count_logits(preprocess.replace(image_size=side), device)
        notes = teacher._image_notes(preprocess)
        if not self.classes:
            if num_logits != len(classes):
                raise SettingError(
                    f"the teacher has {num_logits} classes and the data have {len(classes)}; "
                    "train it on these classes first, or use another teacher"
                )
            notes.append(
                f"the teacher has no class names; its {num_logits} logits are assumed to be the "
                f"data's classes: {quote_list(classes)}"
            )
            return teacher, notes
        columns = self._columns(classes, num_logits)
        extra = num_logits - len(classes)
        if extra:
            notes.append(f"classes of the teacher that the data lack, left out: {extra}")
        return replace(teacher, columns=columns), notes

    def _columns(self, classes: tuple[str, ...], num_logits: int) -> tuple[int, ...]:
        """Return the logits of these classes; refuse a teacher that does not have each once."""
        # By name: the teacher may count its classes in another order.
        match = match_classes(classes, self.classes)
        if match.ambiguous:
            raise SettingError(
                f"the teacher has several classes called {match.ambiguous[0]!r}; rename them, or "
                f"use another teacher"
            )
        if match.unknown:
            raise SettingError(
                f"the teacher lacks the classes {quote_list(match.unknown)}; it has "
                f"{quote_list(self.classes)}; train it on this data first, or use another teacher"
            )
        if num_logits != len(self.classes):
            raise SettingError(
                f"the teacher has {num_logits} logits and {len(self.classes)} class names; "
                "name all classes"
            )
        return match.indices

    def _image_notes(self, preprocess: Preprocess) -> list[str]:
        """Return a line if its images differ in size or normalisation from the student's."""
        own = _described_images(self.preprocess or preprocess)
        student = _described_images(preprocess)
        if own == student:
            return []
        return [f"the teacher takes images of {own}; the student, of {student}"]

    def _count_logits(self, preprocess: Preprocess, device: torch.device) -> int:
        """Call the model on one grey image, and return the number of logits."""
        image = torch.zeros(1, preprocess.channels, *preprocess.image_size, device=device)
        if self.preprocess is not None:
            image = renormalise(image, preprocess, self.preprocess)
        try:
            return self(image).shape[1]
        except SettingError:  # it has a message of its own
            raise
        except CANNOT_TAKE as why:
            raise SettingError(
                f"the teacher {type(self.model).__name__} cannot take images "
                f"{tuple(image.shape)} ({why}); describe its input: Teacher(model, "
                "Preprocess(image_size=..., mean=..., std=...))"
            ) from None


def renormalise(
    images: Images, current: Preprocess, wanted: Preprocess
) -> Float[Tensor, "B c h w"]:
    """Convert images normalised for one model to the channels, size, mean and std of another.

    Args:
        images: (B, C, H, W) of any size, normalised by `current`.
        current: mean and std of the images.
        wanted: size (h, w), interpolation, mean and std; the whole image is squashed to that size.
    """
    if (current.mean, current.std) != (wanted.mean, wanted.std):
        images = images * _per_channel(current.std, images) + _per_channel(current.mean, images)
        if current.channels == 3 and wanted.channels == 1:
            images = (images * _per_channel(REC_601, images)).sum(1, keepdim=True)
        # Grey images become colour images here, by broadcasting.
        images = (images - _per_channel(wanted.mean, images)) / _per_channel(wanted.std, images)
    if images.shape[-2:] == wanted.image_size:
        return images
    smooth = wanted.interpolation != "nearest"  # antialiasing needs a filter
    return F.interpolate(images, wanted.image_size, mode=wanted.interpolation, antialias=smooth)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, 1, 1)


def _described_images(preprocess: Preprocess) -> str:
    """Return size, mean and std in words; the rest is decided by the student's preprocessing."""
    height, width = preprocess.image_size
    mean = ", ".join(f"{value:g}" for value in preprocess.mean)
    std = ", ".join(f"{value:g}" for value in preprocess.std)
    return f"{height} x {width} px with mean {mean} and std {std}"


def describe_value(value: object) -> str:
    """Return the shape of a tensor, or the type of anything else, for messages."""
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

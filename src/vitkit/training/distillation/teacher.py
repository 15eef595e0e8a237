"""Teachers of a distillation: any frozen classifier, its preprocessing and its classes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import CheckpointError, SettingError, UserError
from vitkit.io.digests import tensor_digests
from vitkit.io.import_path import import_by_name
from vitkit.messages import quote_list
from vitkit.shapes import Images, Logits
from vitkit.spec import Preprocess
from vitkit.training.config.train_config import TrainConfig
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load

REC_601 = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the luma of ITU-R BT.601."""
IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`package.module:function`, a function that returns a teacher."""


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

    @classmethod
    def of(cls, source: TeacherSource, *, trust_pickle: bool = False) -> Teacher:
        """Make a teacher from a model, a checkpoint, a path or an import path.

        Args:
            source: a teacher; a checkpoint; an argument of `vitkit.load`;
                `package.module:function`, which is called and returns a teacher, a checkpoint or a
                module; or a module. The preprocessing of a timm module is that of its
                `pretrained_cfg`, except for the image size, which is that of the module where it is
                known. A timm module without pretrained weights has a `pretrained_cfg`, too, which
                may be wrong for it: pass `Teacher(module, Preprocess(...))` for a module that was
                trained on other images.
            trust_pickle: as for `vitkit.load`.

        Raises:
            CheckpointError: a file cannot be read as a model.
            SettingError: a function cannot be imported, or returns another type.
        """
        if isinstance(source, str) and IMPORTED.fullmatch(source):
            source = _import_source(source)
        if isinstance(source, Teacher):
            return source
        if isinstance(source, str | Path):
            try:
                source = load(source, trust_pickle=trust_pickle)
            except UserError as error:
                raise CheckpointError(f"the teacher cannot be read: {error}") from None
        if isinstance(source, Checkpoint):
            # Assumed names would be matched with those of the data, so they do not count.
            classes = () if source.classes_assumed else source.classes
            return cls(source.model, source.preprocess, classes)
        return cls(source, _timm_preprocess(source))

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
                f"the teacher {type(self.model).__name__} returns {_described(logits)}; expected "
                f"logits (B, K): wrap it in a module whose forward returns them"
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
                    f"train it on these classes first, or take another"
                )
            notes.append(
                f"the teacher names no classes; its {num_logits} logits are taken for the data's: "
                f"{quote_list(classes)}"
            )
            return teacher, notes
        self._check_classes(classes, num_logits)
        extra = num_logits - len(classes)
        if extra:
            notes.append(f"the teacher knows {extra} classes more; they are left out")
        columns = tuple(self.classes.index(name) for name in classes)
        return replace(teacher, columns=columns), notes

    def _check_classes(self, classes: tuple[str, ...], num_logits: int) -> None:
        """Refuse a teacher without some of these classes, or with more logits than names."""
        # By name: the teacher may count its classes in another order.
        unknown = [name for name in classes if name not in self.classes]
        if unknown:
            raise SettingError(
                f"the teacher does not know the classes {quote_list(unknown)}; it knows "
                f"{quote_list(self.classes)}: train it on this data first, or take another"
            )
        if num_logits != len(self.classes):
            raise SettingError(
                f"the teacher has {num_logits} logits and {len(self.classes)} class names; name all"
            )

    def _image_notes(self, preprocess: Preprocess) -> list[str]:
        """Return a line if its images differ in size or normalisation from the student's."""
        own = _described_images(self.preprocess or preprocess)
        student = _described_images(preprocess)
        if own == student:
            return []
        return [f"the teacher sees images of {own}; the student of {student}"]

    def _count_logits(self, preprocess: Preprocess, device: torch.device) -> int:
        """Call the model on one grey image, and return the number of logits."""
        image = torch.zeros(1, preprocess.channels, *preprocess.image_size, device=device)
        if self.preprocess is not None:
            image = renormalise(image, preprocess, self.preprocess)
        try:
            return self(image).shape[1]
        except SettingError:  # it has a message of its own
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AssertionError, UserError) as why:
            raise SettingError(
                f"the teacher {type(self.model).__name__} cannot take images "
                f"{tuple(image.shape)} ({why}); name what it expects: Teacher(model, "
                f"Preprocess(image_size=..., mean=..., std=...))"
            ) from None


TeacherSource: TypeAlias = Teacher | Checkpoint | nn.Module | str | Path
"""Types of which `Teacher.of` makes a teacher."""


def check_distillation(config: TrainConfig) -> None:
    """Refuse contradicting settings of distillation. Raises `SettingError`."""
    softened = config.distill_temperature != TrainConfig.distill_temperature
    if config.distill == "hard" and softened:
        raise SettingError(
            f"distill_temperature {config.distill_temperature:g} softens probabilities, and "
            f"distill hard learns the teacher's first choice; leave one of them out"
        )
    # Cached logits are of images of one size.
    if config.distill_views and config.progressive:
        raise SettingError(
            f"the teacher looks at each of {config.distill_views} distill_views once, and "
            f"progressive {config.progressive} changes their size; pass --distill-views 0"
        )


def load_teacher(
    config: TrainConfig, classes: tuple[str, ...], preprocess: Preprocess, device: torch.device
) -> tuple[Teacher | None, list[str]]:
    """Load the teacher of a run, if it has one; as `Teacher.for_classes` returns it."""
    if config.teacher is None:
        return None, []
    teacher = Teacher.of(config.teacher, trust_pickle=config.trust_pickle)
    return teacher.for_classes(classes, preprocess, device, config.progressive or ())


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


def _import_source(name: str) -> Teacher | Checkpoint | nn.Module:
    """Import the function of that name and call it."""
    try:
        source = import_by_name(name)()
    except Exception as error:  # noqa: BLE001 - whatever a user's own function raises
        raise SettingError(
            f"the teacher {name} cannot be made: {error}; give a checkpoint, or the "
            f"package.module:function of a function without arguments that returns a module"
        ) from None
    if not isinstance(source, Teacher | Checkpoint | nn.Module):
        raise SettingError(f"{name} returns {_described(source)}; expected a Teacher or a module")
    return source


def _timm_preprocess(model: nn.Module) -> Preprocess | None:
    """Return the preprocessing of a timm module; `None` for a module of another library."""
    # Read from attributes, without importing timm.
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, dict) or not {"mean", "std", "input_size"} <= config.keys():
        return None
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            if module.in_channels != len(config["mean"]):
                return None  # rebuilt for another number of channels than the mean has
            break
    built_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    interpolation: Any = config.get("interpolation")
    if interpolation not in ("nearest", "bilinear", "bicubic"):
        interpolation = "bicubic"
    return Preprocess(
        image_size=built_size if isinstance(built_size, tuple) else tuple(config["input_size"][1:]),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=interpolation,
    )


def _described_images(preprocess: Preprocess) -> str:
    """Return size, mean and std in words; the rest is decided by the student's preprocessing."""
    height, width = preprocess.image_size
    mean = ", ".join(f"{value:g}" for value in preprocess.mean)
    std = ", ".join(f"{value:g}" for value in preprocess.std)
    return f"{height} x {width} px with mean {mean} and std {std}"


def _described(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

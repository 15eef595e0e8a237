"""A teacher: any classifier, in eval mode, with the images it wants and the classes it knows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.data.datasets.class_names import quote_list
from vitkit.errors import CheckpointError, SettingError, UserError
from vitkit.io.digests import digests
from vitkit.io.import_path import import_by_name
from vitkit.shapes import Images, Logits
from vitkit.spec import Preprocess
from vitkit.training.config.train_config import TrainConfig
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load

REC_601 = (0.299, 0.587, 0.114)
IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`package.module:function`, which makes a teacher."""


@dataclass(frozen=True)
class Teacher:
    """A model that is only asked. No gradient reaches it, and it belongs to nobody's state.

    Attributes:
        model: images (B, C, h, w) -> logits (B, K), or an object with `.logits` as of transformers.
        preprocess: what its images become; `None` for the student's own.
        classes: its class names in the order of its logits; empty where they are not known.
        columns: which logits are answered with, in this order; `None` for all as they are.
    """

    model: nn.Module
    preprocess: Preprocess | None = None
    classes: tuple[str, ...] = ()
    columns: tuple[int, ...] | None = None

    @classmethod
    def of(cls, source: TeacherSource, *, trust_pickle: bool = False) -> Teacher:
        """A teacher from whatever one has.

        Args:
            source: a teacher; a checkpoint; what `vitkit.load` takes; `package.module:function`,
                which is called and returns a teacher, a checkpoint or a module; a module. Of timm's
                modules the size is that which they were built for, where they say so, and mean, std
                and else the size are those of `pretrained_cfg`. A module that was built without
                pretrained weights has one, too: that is right only where nothing else is known, so
                give `Teacher(module, Preprocess(...))` for one that was trained on other images.
            trust_pickle: as for `vitkit.load`.

        Raises:
            CheckpointError: a file that cannot be read as a model.
            SettingError: a function that cannot be imported, or returns something else.
        """
        if isinstance(source, str) and IMPORTED.fullmatch(source):
            source = _imported(source)
        if isinstance(source, Teacher):
            return source
        if isinstance(source, str | Path):
            try:
                source = load(source, trust_pickle=trust_pickle)
            except UserError as error:
                raise CheckpointError(f"the teacher cannot be read: {error}") from None
        if isinstance(source, Checkpoint):
            classes = () if source.classes_assumed else source.classes
            return cls(source.model, source.preprocess, classes)
        return cls(source, _timm_preprocess(source))

    @torch.no_grad()
    def __call__(self, images: Images, seen: Preprocess | None = None) -> Logits:
        """What it says of some images, float32.

        Args:
            images: (B, C, H, W), normalised for the student.
            seen: how they were normalised; `None` takes them for the teacher's own.

        Raises:
            SettingError: the model returns no logits.
        """
        if seen is not None and self.preprocess is not None:
            images = brought(images, seen, self.preprocess)
        floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        said = self.model.eval()(images.to(next(floats, images.dtype)))
        logits = getattr(said, "logits", said)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise SettingError(
                f"the teacher {type(self.model).__name__} returns {_described(logits)}; expected "
                f"logits (B, K): wrap it in a module whose forward returns them"
            )
        return logits.float() if self.columns is None else logits.float()[:, list(self.columns)]

    def fingerprint(self) -> str:
        """A sha256 over its weights, what its images become, and which logits are taken."""
        about = None if self.preprocess is None else self.preprocess.to_json()
        said = [digests(self.model.state_dict()), about, self.columns]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def for_classes(
        self,
        classes: tuple[str, ...],
        seen: Preprocess,
        device: torch.device,
        sides: Sequence[int] = (),
    ) -> tuple[Teacher, list[str]]:
        """The same teacher on a device, its logits in the order of these classes, by their names.

        Args:
            classes: of the data.
            seen: how the student's images are normalised.
            device: where the student is.
            sides: of square images that the student also sees, in pixels.

        Returns:
            The teacher, and lines to print.

        Raises:
            SettingError: it does not know some class, or cannot take the images.
        """
        model = self.model.to(device).eval().requires_grad_(False)
        teacher = replace(self, model=model, columns=None)
        found = teacher._tried(seen, device)
        for side in sides:
            teacher._tried(seen.replace(image_size=side), device)
        sight = teacher._sight(seen)
        if not self.classes:
            if found != len(classes):
                raise SettingError(
                    f"the teacher tells {found} classes apart and the data have {len(classes)}; "
                    f"train it on these classes first, or take another"
                )
            return teacher, [
                *sight,
                f"the teacher names no classes; its {found} logits are taken for the data's: "
                f"{quote_list(classes)}",
            ]
        unknown = [name for name in classes if name not in self.classes]
        if unknown or found != len(self.classes):
            raise SettingError(
                f"the teacher does not know the classes {quote_list(unknown)}; it knows "
                f"{quote_list(self.classes)}: train it on this data first, or take another"
                if unknown
                else f"the teacher has {found} logits and {len(self.classes)} class names; name all"
            )
        more = found - len(classes)
        left = f"the teacher knows {more} classes more; they are left out"
        notes = [*sight, left] if more else sight
        return replace(teacher, columns=tuple(self.classes.index(n) for n in classes)), notes

    def _sight(self, seen: Preprocess) -> list[str]:
        """A line where it sees the images otherwise than the student."""
        mine, its = (_described_images(one) for one in (self.preprocess or seen, seen))
        return [] if mine == its else [f"the teacher sees images of {mine}; the student of {its}"]

    def _tried(self, seen: Preprocess, device: torch.device) -> int:
        """How many logits it gives, by one grey image."""
        image = torch.zeros(1, seen.channels, *seen.image_size, device=device)
        if self.preprocess is not None:
            image = brought(image, seen, self.preprocess)
        try:
            return self(image).shape[1]
        except (RuntimeError, TypeError, ValueError, LookupError, AssertionError, UserError) as why:
            if isinstance(why, SettingError):
                raise
            raise SettingError(
                f"the teacher {type(self.model).__name__} cannot take images "
                f"{tuple(image.shape)} ({why}); say what it wants: Teacher(model, "
                f"Preprocess(image_size=..., mean=..., std=...))"
            ) from None


TeacherSource: TypeAlias = Teacher | Checkpoint | nn.Module | str | Path
"""What a teacher is made of."""


def check_teaching(config: TrainConfig) -> None:
    """What a teacher says once must be of the same images ever after. Raises `SettingError`."""
    softened = config.distill_temperature != TrainConfig.distill_temperature
    if config.distill == "hard" and softened:
        raise SettingError(
            f"distill_temperature {config.distill_temperature:g} softens probabilities, and "
            f"distill hard learns the teacher's first choice; leave one of them out"
        )
    if config.distill_views and config.progressive:
        raise SettingError(
            f"the teacher looks at each of {config.distill_views} distill_views once, and "
            f"progressive {config.progressive} changes their size; pass --distill-views 0"
        )


def opened_teacher(
    config: TrainConfig, classes: tuple[str, ...], seen: Preprocess, device: torch.device
) -> tuple[Teacher | None, list[str]]:
    """The teacher of a run, as `Teacher.for_classes` gives it, if it has one."""
    if config.teacher is None:
        return None, []
    teacher = Teacher.of(config.teacher, trust_pickle=config.trust_pickle)
    return teacher.for_classes(classes, seen, device, config.progressive or ())


def brought(images: Images, seen: Preprocess, wanted: Preprocess) -> Float[Tensor, "B c h w"]:
    """Images normalised for one model as another wants them: channels, size, mean, std.

    Args:
        images: (B, C, H, W) of any size, normalised by `seen`.
        seen: its mean and std.
        wanted: size (h, w), filter, mean and std; the whole image is squashed to that size.
    """
    if (seen.mean, seen.std) != (wanted.mean, wanted.std):
        images = images * _per_channel(seen.std, images) + _per_channel(seen.mean, images)
        if seen.channels == 3 and wanted.channels == 1:
            images = (images * _per_channel(REC_601, images)).sum(1, keepdim=True)
        images = (images - _per_channel(wanted.mean, images)) / _per_channel(wanted.std, images)
    if images.shape[-2:] == wanted.image_size:
        return images
    smooth = wanted.interpolation != "nearest"
    return F.interpolate(images, wanted.image_size, mode=wanted.interpolation, antialias=smooth)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, 1, 1)


def _imported(name: str) -> Teacher | Checkpoint | nn.Module:
    """What the function of that name returns."""
    try:
        made = import_by_name(name)()
    except Exception as error:  # noqa: BLE001 - whatever a user's own function raises
        raise SettingError(
            f"the teacher {name} cannot be made: {error}; give a checkpoint, or the "
            f"package.module:function of a function without arguments that returns a module"
        ) from None
    if not isinstance(made, Teacher | Checkpoint | nn.Module):
        raise SettingError(f"{name} returns {_described(made)}; expected a Teacher or a module")
    return made


def _timm_preprocess(model: nn.Module) -> Preprocess | None:
    """What timm says that images become; `None` for a module of another kind."""
    said = getattr(model, "pretrained_cfg", None)
    if not isinstance(said, dict) or not {"mean", "std", "input_size"} <= said.keys():
        return None
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    if first is not None and first.in_channels != len(said["mean"]):
        return None  # rebuilt for other channels than the mean is of
    built = getattr(getattr(model, "patch_embed", None), "img_size", None)
    filters = ("nearest", "bilinear", "bicubic")
    named = said.get("interpolation")
    return Preprocess(
        image_size=built if isinstance(built, tuple) else tuple(said["input_size"][1:]),
        mean=tuple(said["mean"]),
        std=tuple(said["std"]),
        interpolation=named if named in filters else "bicubic",
    )


def _described_images(preprocess: Preprocess) -> str:
    """Their size, mean and std; what else there is, the student's transform has decided."""
    height, width = preprocess.image_size
    mean, std = (", ".join(f"{v:g}" for v in part) for part in (preprocess.mean, preprocess.std))
    return f"{height} x {width} px with mean {mean} and std {std}"


def _described(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

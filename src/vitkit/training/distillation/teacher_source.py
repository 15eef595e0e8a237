"""Sources of a teacher: a checkpoint, a module of another library, or a user's own function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from vitkit.errors import CheckpointError, SettingError, UserError
from vitkit.io.import_path import import_by_name
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess
from vitkit.training.config.sections.distillation import DistillationSettings
from vitkit.training.distillation.teacher import Teacher, describe_value
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load

TeacherSource: TypeAlias = Teacher | Checkpoint | nn.Module | str | Path
"""Types of which `as_teacher` makes a teacher."""
IMPORTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_<][\w.<>]*(\(\))?")
"""`package.module:function`, a function that returns a teacher."""


def as_teacher(source: TeacherSource, *, trust_pickle: bool = False) -> Teacher:
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
    return _make_teacher(source, "the teacher", trust_pickle=trust_pickle)


def _make_teacher(source: TeacherSource, argument: str, *, trust_pickle: bool) -> Teacher:
    """Make a teacher as `as_teacher`; messages name it by its argument."""
    if isinstance(source, str) and IMPORTED.fullmatch(source):
        source = _import_source(source, argument)
    if isinstance(source, Teacher):
        return source
    if isinstance(source, str | Path):
        try:
            source = load(source, trust_pickle=trust_pickle)
        except UserError as error:
            raise CheckpointError(f"{argument}: {error}") from None
    if isinstance(source, Checkpoint):
        # Assumed names would be matched with those of the data, so they do not count.
        classes = () if source.classes_assumed else source.classes
        return Teacher(source.model, source.preprocess, classes)
    return Teacher(source, _timm_preprocess(source))


def load_teacher(
    settings: DistillationSettings,
    classes: tuple[str, ...],
    preprocess: Preprocess,
    device: torch.device,
    *,
    sides: tuple[int, ...] = (),
    trust_pickle: bool = False,
) -> tuple[Teacher | None, list[str]]:
    """Load the teacher of a run, if it has one.

    Args:
        settings: name the teacher.
        classes: class names of the data.
        preprocess: preprocessing of the student's images.
        device: device of the student.
        sides: as for `Teacher.for_classes`.
        trust_pickle: as for `vitkit.load`.

    Returns:
        The teacher and lines to print, as of `Teacher.for_classes`.
    """
    if settings.teacher is None:
        return None, []
    teacher = _make_teacher(settings.teacher, "--teacher", trust_pickle=trust_pickle)
    return teacher.for_classes(classes, preprocess, device, sides)


def _import_source(name: str, argument: str) -> Teacher | Checkpoint | nn.Module:
    """Import the function of that name and call it."""
    try:
        source = import_by_name(name)
        if not isinstance(source, Teacher | Checkpoint | nn.Module):
            source = source()
    except Exception as error:  # whatever a user's own function raises
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ImportError | UserError):  # their messages are sentences
            reason = str(error)
        raise SettingError(
            f"{argument} {name} cannot be built: {reason}; pass a checkpoint, or "
            "package.module:function of a function without arguments that returns a module"
        ) from error
    if not isinstance(source, Teacher | Checkpoint | nn.Module):
        raise SettingError(
            f"{argument} {name} returns {describe_value(source)}; expected a Teacher or a module"
        )
    return source


def _timm_preprocess(model: nn.Module) -> Preprocess | None:
    """Return the preprocessing of a timm module; `None` for a module of another library."""
    if isinstance(model, ViT):  # the usual statistics are not known to be those of its training
        return model.origin.preprocess if model.origin else None
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

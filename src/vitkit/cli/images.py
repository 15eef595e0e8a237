"""Images among the arguments of a verb: which files they are, and which cannot be used."""

from __future__ import annotations

import itertools
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vitkit import errors, process
from vitkit.data.images.integrity import IMAGE_ENDINGS
from vitkit.messages import plural, progress_bar
from vitkit.prediction.find import STDIN, find_images
from vitkit.prediction.images import FoundImage, ImageList

if TYPE_CHECKING:
    from vitkit.engines.choose import EngineOptions

ImageOutput = TypeVar("ImageOutput")
REPORT_ENDINGS = (".csv", ".json", ".svg")
"""Endings of results that may lie beside the images of a folder."""


def find_arguments(
    arguments: Iterable[str],
    *,
    split: str | None = None,
    data_root: str | None = None,
    strict: bool = False,
) -> ImageList:
    """Find the images that arguments name, as `vitkit.find_images`; print its warnings.

    `-` stands for paths on the standard input. A missing image among others is found, and broken,
    unless `strict`.

    Args:
        arguments: the names.
        split: as for `find_images`.
        data_root: as for `find_images`.
        strict: a missing image among others ends the command.

    Raises:
        DataError: nothing found, or a standard input that no paths can come from.
    """
    names, stdin = list(arguments), None
    if STDIN in names:
        if sys.stdin is None or sys.stdin.isatty():  # None where the shell has closed it
            raise errors.DataError(
                "-: the standard input is closed or a terminal; send paths to it, one per line, "
                "such as: find photos -name '*.jpg' | vitkit ..."
            )
        stdin = sys.stdin.fileno()
    images = find_images(
        *names, split=split, data_root=data_root, stdin=stdin, missing_ok=not strict
    )
    for warning in images.warnings:
        sys.stderr.write(f"vitkit: {warning}\n")
    return images


def files_of_checkpoint(checkpoint: str) -> list[Path]:
    """Return the files that a checkpoint may consist of and that an output could be named like."""
    path = Path(checkpoint)
    return [path, path / "model.npz"]


def files_of_data(data: str, output: Path, *, data_root: str | None = None) -> Iterator[Path]:
    """Yield the files of DATA that an existing output could be, for `check_outputs`."""
    # imported here: --help waits for no data source
    from vitkit.data.sources.huggingface import is_saved

    source = Path(os.path.expanduser(data))  # as `open_dataset` reads it
    yield source
    is_report = output.suffix.lower() in REPORT_ENDINGS and not is_saved(source)
    parent = Path(os.path.realpath(output.parent))
    if Path(os.path.realpath(source)) in (parent, *parent.parents) and not is_report:
        yield output
    # a list, or a link in a folder, may name images anywhere
    if output.suffix.lower() in IMAGE_ENDINGS and os.path.exists(source):
        yield from find_images(str(source), data_root=data_root).files()


def refuse_images_first(verb: str, checkpoint: str, others: str) -> None:
    """Raise `CheckpointError` if images are named in the place of the checkpoint.

    Args:
        verb: the command.
        checkpoint: its first argument.
        others: the name of its second argument, such as IMAGES.
    """
    path = Path(checkpoint)
    if path.suffix.lower() in IMAGE_ENDINGS and os.path.isfile(path):
        kind = "an image"
    elif os.path.isdir(path) and _is_image_folder(path):
        kind = "an image folder"
    else:
        return
    raise errors.CheckpointError(
        f"{path} is {kind}; the checkpoint comes first: vitkit {verb} CHECKPOINT {others}"
    )


def _is_image_folder(folder: Path) -> bool:
    """Return True for a folder with images, and no file of a run or a checkpoint."""
    # a checkpoint may have a folder of example images, and a run its plots
    checkpoints = ("config.yaml", "config.json", "weights", "*/config.yaml", "*/*/config.yaml")
    endings = ("*.safetensors", "*.npz", "*.pth", "*.pth.tar", "*.pt", "*.bin", "*.ckpt")
    if any(True for pattern in (*checkpoints, *endings) for _ in folder.glob(pattern)):
        return False
    # *.jpg, <class>/*.jpg or train/<class>/*.jpg
    inside = itertools.chain.from_iterable(map(folder.glob, ("*", "*/*", "*/*/*")))
    return any(path.suffix.lower() in IMAGE_ENDINGS for path in inside)


def engine_options(
    engine: str,
    precision: str,
    calibrate: str | None,
    data_root: str | None,
    images: int | None = None,
) -> EngineOptions:
    """Return the options of an engine by its flags; lines about trials go to stderr.

    Args:
        engine: a name of the registry, or `auto`.
        precision: as for `EngineOptions`.
        calibrate: as for `EngineOptions`.
        data_root: as for `EngineOptions`.
        images: number of images that it will run; None if unknown.

    Raises:
        SettingError: values that do not exist, or not together.
    """
    # imported here: --help and wrong paths do not wait for torch
    with process.uncollected_imports():
        from vitkit.engines.choose import EngineOptions

    options = EngineOptions(
        engine=engine,
        precision=precision,
        calibrate=calibrate,
        data_root=data_root,
        images=images,
        report=lambda line: sys.stderr.write(f"vitkit: {line}\n"),
    )
    options.check()
    return options


class StreamedImages:
    """Found images that are read once, with their outputs; broken ones are named and counted.

    A predictor iterates over them; only those without an output yet are kept.

    Args:
        images: the found images.
        strict: stop at the first broken image.

    Attributes:
        labelled: whether some have a label.
        first: name of the first image that could be used.
    """

    def __init__(self, images: ImageList, *, strict: bool) -> None:
        self.total = images.total
        self.labelled = bool(images.classes)
        self.first = ""
        self.strict = strict
        self.count = 0
        self.broken = 0
        self._images = images
        self._sent: deque[FoundImage] = deque()

    def __iter__(self) -> Iterator[FoundImage]:
        for image in self._images:
            self._sent.append(image)
            yield image

    def with_outputs(
        self, outputs: Iterable[ImageOutput | errors.ImageError]
    ) -> Iterator[tuple[FoundImage, ImageOutput]]:
        """Yield the images that could be used with their outputs.

        Raises:
            ImageError: a broken image, if `strict`, or if it is the only one.
            DataError: none of them could be used.
        """
        with progress_bar(self.total) as advance:
            for output in outputs:
                image = self._sent.popleft()
                advance(1)
                self.count += 1
                if not isinstance(output, errors.ImageError):
                    self.first = self.first or image.name
                    yield image, output
                    continue
                # the error of a single image is the error of the command
                if self.strict or self.total == 1:
                    raise output
                sys.stderr.write(f"vitkit: {output}\n")
                self.broken += 1
        # otherwise the outputs would be an empty file
        if self.broken == self.count:
            raise errors.DataError("none of the images could be used; the reasons are above")

    def refuse_broken(self) -> None:
        """Raise `DataError` if an image could not be used."""
        if self.broken:
            raise errors.DataError(
                f"{self.broken:,} of {plural(self.count, 'image')} could not be used, for the "
                "reasons above; the others were processed"
            )

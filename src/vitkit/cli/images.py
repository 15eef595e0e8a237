"""Images among the arguments of a verb: which files they are, and which cannot be used."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from vitkit.data.images.file_types import IMAGE_ENDINGS
from vitkit.data.sources.folder_listing import list_folder
from vitkit.errors import CheckpointError, DataError, ImageError
from vitkit.io.progress import progress_bar
from vitkit.io.results import ResultKind
from vitkit.messages import nearest_parent

ImageOutput = TypeVar("ImageOutput")


def find_images(arguments: Iterable[str]) -> list[Path]:
    """Return files as they are, and the images of folders, sorted; hidden ones are left out.

    Files with an ending that is not read but usual for images are counted on stderr.

    Raises:
        DataError: no argument, a path that does not exist, a folder without images, or one that
            cannot be listed.
    """
    images: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if not os.path.exists(path):
            raise DataError(f"{path}: no such image; {nearest_parent(path)}")
        if not os.path.isdir(path):
            images.append(path)  # also a file without an image's ending: it was named
            continue
        # every link is followed, as the user named the folder
        listing = list_folder(path, follow_links=True)
        for warning in listing.warnings():
            sys.stderr.write(f"vitkit: {path}: {warning}\n")
        inside = [path.joinpath(*parts) for parts in listing.paths()]
        if not inside:
            raise DataError(
                f"{path}: no images in this folder; expected files ending in "
                f"{', '.join(IMAGE_ENDINGS)}"
            )
        images += inside
    if not images:
        raise DataError("no images given; name files or folders")
    return images


def files_of_checkpoint(checkpoint: str) -> list[Path]:
    """Return the files that a checkpoint may consist of and that an output could be named like."""
    path = Path(checkpoint)
    return [path, path / "model.npz"]


def files_of_data(
    data: str, output: Path, kind: ResultKind, *, data_root: str | None = None
) -> Iterator[Path]:
    """Yield the files of DATA that an existing output could be, for `check_outputs`.

    Args:
        data: as for `open_dataset`.
        output: the existing file. Inside the folder DATA it counts as a part of the data, unless
            it is an earlier result.
        kind: of the output.
        data_root: as for `open_dataset`.
    """
    source = Path(data)
    yield source
    if kind.is_result(output) or not source.exists():
        return
    folder = output.parent.resolve()
    if source.resolve() in (folder, *folder.parents):
        yield output
    # a list, or a link in the folder, may name images anywhere
    if output.suffix.lower() in IMAGE_ENDINGS:
        # imported here: --help waits for no data source
        from vitkit.data.datasets.dataset import FileSplit
        from vitkit.data.sources.open import open_dataset

        dataset = open_dataset(
            data, data_root=data_root, ignore_extra_classes=True, follow_links=True
        )
        for split in dataset.splits.values():
            files = split.original()
            if isinstance(files, FileSplit):
                yield from files.paths


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
    raise CheckpointError(
        f"{path} is {kind}; the checkpoint comes first: vitkit {verb} CHECKPOINT {others}"
    )


def _is_image_folder(folder: Path) -> bool:
    """Return True for a folder with class folders, and no file of a run or a checkpoint."""
    # a checkpoint may have a folder of example images, and a run its plots
    checkpoints = ("config.yaml", "config.json", "weights", "*/config.yaml")
    endings = ("*.safetensors", "*.npz", "*.pth", "*.pth.tar", "*.pt", "*.bin", "*.ckpt")
    if any(True for pattern in (*checkpoints, *endings) for _ in folder.glob(pattern)):
        return False
    # <class>/*.jpg or train/<class>/*.jpg
    inside = itertools.chain(folder.glob("*/*"), folder.glob("*/*/*"))
    return any(path.suffix.lower() in IMAGE_ENDINGS for path in inside)


class UsableImages:
    """Images with their outputs; those that cannot be used are named on stderr and counted.

    Args:
        paths: all images.
        strict: stop at the first broken image.
    """

    def __init__(self, paths: Sequence[Path], *, strict: bool) -> None:
        self.paths = paths
        self.strict = strict
        self.broken = 0

    def with_outputs(
        self, outputs: Iterable[ImageOutput | ImageError]
    ) -> Iterator[tuple[Path, ImageOutput]]:
        """Yield the images that could be used with their outputs.

        Raises:
            ImageError: a broken image, if `strict`, or if it is the only one.
            DataError: none of them could be used.
        """
        with progress_bar(len(self.paths)) as advance:
            for path, output in zip(self.paths, outputs, strict=True):
                advance(1)
                if not isinstance(output, ImageError):
                    yield path, output
                    continue
                # the error of a single image is the error of the command
                if self.strict or len(self.paths) == 1:
                    raise output
                sys.stderr.write(f"vitkit: {output}\n")
                self.broken += 1
        # otherwise the outputs would be an empty file
        if self.broken == len(self.paths):
            raise DataError(
                f"none of the {self.broken:,} images could be used; the reasons are above"
            )

    def refuse_broken(self) -> None:
        """Raise `DataError` if an image could not be used."""
        if self.broken:
            raise DataError(
                f"{self.broken:,} of {len(self.paths):,} images could not be used, for the "
                "reasons above; the others were processed"
            )

"""Images among the arguments of a verb, and images that cannot be used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from vitkit.data.images.file_types import IMAGE_ENDINGS
from vitkit.data.sources.folder_listing import list_folder
from vitkit.errors import DataError, ImageError
from vitkit.io.progress import progress_bar
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
        listing = list_folder(path, follow_links=True)
        for warning in listing.warnings():
            sys.stderr.write(f"vitkit: {path}: {warning}\n")
        inside = [path.joinpath(*parts) for parts in listing.paths()]
        if not inside:
            raise DataError(f"{path}: no images in this folder ({', '.join(IMAGE_ENDINGS)})")
        images += inside
    if not images:
        raise DataError("no images were named; give files or folders")
    return images


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
        if self.broken == len(self.paths):
            raise DataError(f"none of the {self.broken:,} images could be used, see above")

    def refuse_broken(self) -> None:
        """Raise `DataError` if an image could not be used."""
        if self.broken:
            raise DataError(
                f"{self.broken:,} of {len(self.paths):,} images could not be used, see above; "
                f"the others are done"
            )

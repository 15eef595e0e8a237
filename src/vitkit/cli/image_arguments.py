"""Which images the arguments of a command mean, and what happens to those that are broken."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vitkit.data.sources.image_folder import ENDINGS, list_folder
from vitkit.errors import DataError, ImageError, nearest_parent
from vitkit.io.progress import bar

Output = TypeVar("Output")


def find_images(arguments: Iterable[str]) -> list[Path]:
    """Files as they are, folders as the images in them, sorted; hidden ones are left out.

    Files with an ending that is not read but usual for images are counted on stderr.

    Raises:
        DataError: nothing named, a path that is not there, a folder without images, or one that
            cannot be listed.
    """
    found: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if not os.path.exists(path):
            raise DataError(f"{path}: no such image; {nearest_parent(path)}")
        if not os.path.isdir(path):
            found.append(path)
            continue
        listing = list_folder(path, follow_links=True)
        for warning in listing.warnings():
            sys.stderr.write(f"vitkit: {path}: {warning}\n")
        inside = [path.joinpath(*parts) for parts in listing.paths()]
        if not inside:
            raise DataError(f"{path}: no images in this folder ({', '.join(ENDINGS)})")
        found += inside
    if not found:
        raise DataError("no images were named; give files or folders")
    return found


@dataclass
class Usable:
    """Goes through the outputs for some images; names and counts those that cannot be used."""

    names: Sequence[Path]
    strict: bool
    """Whether to stop at the first broken image."""
    broken: int = 0

    def of(self, outputs: Iterable[Output | ImageError]) -> Iterator[tuple[Path, Output]]:
        """Yield the images that could be used with their outputs.

        Raises:
            ImageError: a broken image, if `strict`, or if it is the only one.
            DataError: none of them could be used.
        """
        with bar(len(self.names)) as advance:
            for name, output in zip(self.names, outputs, strict=True):
                advance(1)
                if not isinstance(output, ImageError):
                    yield name, output
                    continue
                if self.strict or len(self.names) == 1:
                    raise output
                sys.stderr.write(f"vitkit: {output}\n")
                self.broken += 1
        if self.broken == len(self.names):
            raise DataError(f"none of the {self.broken:,} images could be used, see above")

    def refuse_broken(self) -> None:
        """Raise `DataError` if an image could not be used."""
        if self.broken:
            raise DataError(
                f"{self.broken:,} of {len(self.names):,} images could not be used, see above; "
                f"the others are done"
            )

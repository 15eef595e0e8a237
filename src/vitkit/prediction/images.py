"""The images that are predicted, one by one: paths, addresses, bytes, arrays, lines of a stream."""

from __future__ import annotations

import os
import re
import select
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

from vitkit.data.datasets.split import Split
from vitkit.data.images.colour import RGBPixels
from vitkit.data.images.decode import as_rgb, decode
from vitkit.data.images.read import ImageSource, read_image
from vitkit.errors import ImageError
from vitkit.io.download import is_web_address

if TYPE_CHECKING:
    from vitkit.io.web_image import WebFile


@dataclass(kw_only=True, eq=False)
class FoundImage(ABC):
    """An image that `find_images` found; its pixels are read on demand.

    Attributes:
        name: its path as it was found, its address, or its name in the dataset.
        place: a relative path for a result of this image, such as `cats/1.jpg`.
        label: its class, where it comes from a dataset with labels; else empty.
        split: `train`, `val` or `test`, where it comes from a dataset with splits; else empty.
    """

    name: str
    place: PurePath
    label: str = ""
    split: str = ""

    @abstractmethod
    def read(self) -> RGBPixels:
        """Return the pixels, (H, W, 3) RGB, uint8 [0, 255].

        Raises:
            ImageError: an image that cannot be used, by name.
        """


@dataclass(kw_only=True, eq=False)
class FileImage(FoundImage):
    """An image in a file, whose name is its path."""

    def __fspath__(self) -> str:
        return self.name

    def read(self) -> RGBPixels:
        return decode(self.name)


@dataclass(kw_only=True, eq=False)
class UnusableImage(FileImage):
    """A name without an image: reading it raises its error."""

    error: ImageError

    def read(self) -> RGBPixels:
        raise self.error


@dataclass(kw_only=True, eq=False)
class WebImage(FoundImage):
    """An image at a web address, downloaded when it is first read, and kept with this object."""

    # kept, so that a drawing shows the bytes that were predicted
    _file: WebFile | None = field(default=None, init=False, repr=False)

    @classmethod
    def at(cls, address: str) -> WebImage:
        """Return the image at an http(s) address, not downloaded yet.

        Args:
            address: the last part of its path is the name of results.
        """
        # host and path, without the query
        path = re.split(r"[?#]", address.partition("://")[2])[0]
        last = unquote(path.rstrip("/").rpartition("/")[2])
        return cls(name=address, place=PurePath(last.replace("\0", "")))

    def read(self) -> RGBPixels:
        # imported here: files on disk need no connections
        from vitkit.io.web_image import fetch_image, wrong_type

        if self._file is None:
            self._file = fetch_image(self.name)
        try:
            return decode(self._file.content, name=self.name)
        except ImageError as error:
            # Content-Type is more informative than the magic bytes
            media_type = self._file.media_type
            is_other = bool(media_type) and not media_type.startswith("image/")
            if error.reason == "not an image" and is_other:
                raise wrong_type(self.name, media_type) from None
            raise


@dataclass(kw_only=True, eq=False)
class DatasetImage(FoundImage):
    """An image of an opened dataset, by its index in a split."""

    images: Split
    index: int

    def read(self) -> RGBPixels:
        try:
            pixels = self.images.read(self.index)
        except ImageError as error:
            raise ImageError(self.name, error.reason, error.detail) from error
        return as_rgb(pixels, self.name)


AnyImage: TypeAlias = ImageSource | FoundImage
"""A path, an http(s) address, an encoded file's bytes, a PIL image, (H, W, 3) or (H, W) uint8, or
an image of `find_images`."""


def read_any_image(image: AnyImage, name: str = "image") -> RGBPixels:
    """Read an image as (H, W, 3) uint8 RGB, as `read_image` does, or from an http(s) address.

    Args:
        image: an image of any kind.
        name: its name in messages; a path, an address and a found image name themselves.

    Raises:
        ImageError: an image that cannot be used.
        SettingError: not an image, such as a list of images.
    """
    if isinstance(image, FoundImage):
        return image.read()
    if isinstance(image, str) and not image:
        raise ImageError("''", "missing", "the path is empty")
    if isinstance(image, str) and is_web_address(image):
        return WebImage.at(image).read()
    return read_image(image, name)


def name_in_messages(image: AnyImage, number: int) -> str:
    """Return the name of an image for messages: its path or address, or its number.

    Args:
        image: an image of any kind.
        number: its place in the list, from 0.
    """
    if isinstance(image, FoundImage):
        return image.name
    if isinstance(image, str | PathLike):
        return str(image)
    return f"image {number}"


# Lines of a stream written by another program, each as soon as it arrives.

CHUNK_SIZE = 1 << 16


class LineStream:
    """The lines of a file descriptor, without empty ones and line breaks.

    If a zero byte comes with the first separator, as `find -print0` writes them, it separates the
    lines.

    Args:
        descriptor: open for reading.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._complete: deque[bytes] = deque()
        self._rest = b""
        self._separator = b""
        self._ended = False

    def __iter__(self) -> Iterator[str]:
        while self.wait():
            yield os.fsdecode(self._complete.popleft())

    def wait(self) -> bool:
        """Wait for the next line; return False at the end of the stream."""
        while not self._complete and not self._ended:
            self._read()
        return bool(self._complete)

    @property
    def is_waiting(self) -> bool:
        """True if the next line has not come yet, so that `wait` would wait for it."""
        while not self._complete and not self._ended:
            try:
                ready, _, _ = select.select([self._descriptor], [], [], 0)
            except (OSError, ValueError):
                return False  # `select` does not support every kind of file
            if not ready:
                return True
            self._read()
        return False

    def _read(self) -> None:
        chunk = os.read(self._descriptor, CHUNK_SIZE)
        self._ended = not chunk
        if not self._separator:
            # a name may have a line break, but no zero byte
            self._separator = next((byte for byte in (b"\0", b"\n") if byte in chunk), b"")
        *lines, self._rest = (self._rest + chunk).split(self._separator or b"\n")
        if self._ended:
            lines.append(self._rest)  # the last line may have no end
            self._rest = b""
        # lines of other systems end in "\r\n"
        stripped = (line.removesuffix(b"\r") for line in lines)
        self._complete += (line for line in stripped if line.strip())

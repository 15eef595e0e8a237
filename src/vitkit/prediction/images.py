"""Images to predict: files, addresses, images of datasets, lines of a stream, and lists of them."""

from __future__ import annotations

import functools
import os
import re
import select
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

from vitkit.data.datasets.splitting import natural_order
from vitkit.data.images.decode import RGBPixels, as_rgb, decode
from vitkit.data.images.read import ImageSource, read_image
from vitkit.errors import DataError, ImageError
from vitkit.io.download import is_web_address
from vitkit.messages import did_you_mean

if TYPE_CHECKING:
    from vitkit.data.datasets.dataset import Dataset
    from vitkit.data.datasets.split import Split


@dataclass(kw_only=True, eq=False)
class FoundImage:
    """An image that `find_images` found; its pixels are read on demand.

    Attributes:
        name: its path as it was found, its address, or its name in the dataset.
        place: a relative path for a result of this image, such as `cats/1.jpg`.
        pixels: the function that reads it.
        label: its class, where it comes from a dataset with labels; else empty.
        split: `train`, `val` or `test`, where it comes from a dataset with splits; else empty.
    """

    name: str
    place: PurePath
    pixels: Callable[[], RGBPixels] = field(repr=False)
    label: str = ""
    split: str = ""

    def read(self) -> RGBPixels:
        """Return the pixels, (H, W, 3) RGB, uint8 [0, 255].

        Raises:
            ImageError: an image that cannot be used, by name.
        """
        return self.pixels()


def _read_file(path: str) -> RGBPixels:
    return decode(path)


def _raise(error: ImageError) -> RGBPixels:
    raise error


def _read_stored(images: Split, index: int, name: str) -> RGBPixels:
    try:
        return as_rgb(images.read(index), name)
    except ImageError as error:
        raise ImageError(name, error.reason, error.detail) from error


def _web_image(address: str) -> FoundImage:
    """Return the image at an http(s) address, downloaded when it is first read, and kept."""
    # host and path, without the query; the last part of the path is the name of results
    path = re.split(r"[?#]", address.partition("://")[2])[0]
    last = unquote(path.rstrip("/").rpartition("/")[2]).replace("\0", "")

    @functools.cache  # a drawing shows the bytes that were predicted
    def read() -> RGBPixels:
        # imported here: files on disk need no connections
        from vitkit.io.web_image import fetch_image, wrong_type

        file = fetch_image(address)
        try:
            return decode(file.content, name=address)
        except ImageError as error:
            # Content-Type is more informative than the magic bytes
            is_other = file.media_type and not file.media_type.startswith("image/")
            if error.reason == "not an image" and is_other:
                raise wrong_type(address, file.media_type) from None
            raise

    return FoundImage(name=address, place=PurePath(last), pixels=read)


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
        return _web_image(image).read()
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


# The images of one name, and the list of all.


@dataclass(kw_only=True, eq=False)
class ImageGroup:
    """The images of one name; none is read.

    Attributes:
        total: how many; None if unknown.
        images: called with a folder, yields the images; their places are in this folder.
        classes: the classes of their labels; empty where they have none.
        base: folder on disk that the places are relative to; None where there is none.
        paths: the files that are read, as far as they are known.
        source: the list that names the files, or the file or folder of their dataset, if any.
        error: why the name stands for no image, if that is so.
        stream: the lines that they come from, if any.
    """

    total: int | None
    images: Callable[[PurePath], Iterable[FoundImage]]
    classes: Sequence[str] = ()
    base: Path | None = None
    paths: Sequence[str] = ()
    source: Path | None = None
    error: ImageError | None = None
    stream: LineStream | None = None


def files_group(
    paths: Sequence[str],
    base: Path | None = None,
    labels: Sequence[str] = (),
    splits: Sequence[str] = (),
    source: Path | None = None,
) -> ImageGroup:
    """Return files on disk.

    Args:
        paths: paths of the files.
        base: folder that the places of results are relative to; default that of the only file.
        labels: the class of each file; none where absent.
        splits: the split of each file; none where absent.
        source: the list that names the files, or the folder of their dataset, if any.
    """
    root = Path(paths[0]).parent if base is None else base

    def images(prefix: PurePath) -> Iterator[FoundImage]:
        for number, path in enumerate(paths):
            yield FoundImage(
                name=str(Path(path)),
                place=prefix / Path(path).relative_to(root),
                pixels=partial(_read_file, path),
                label=labels[number] if labels else "",
                split=splits[number] if splits else "",
            )

    classes = natural_order({*labels} - {""})  # a list may lack some labels
    return ImageGroup(
        total=len(paths), images=images, classes=classes, base=root, paths=paths, source=source
    )


def unusable_group(error: ImageError) -> ImageGroup:
    """Return a name without an image: reading it raises its error."""
    name = error.name
    image = FoundImage(name=name, place=PurePath(Path(name).name), pixels=partial(_raise, error))
    return ImageGroup(total=1, images=lambda prefix: [image], error=error)


def address_group(address: str) -> ImageGroup:
    """Return one image on the web."""
    image = _web_image(address)
    return ImageGroup(total=1, images=lambda prefix: [image])


def lines_group(stream: LineStream) -> ImageGroup:
    """Return paths and addresses that come one by one; they can be read once."""

    def images(prefix: PurePath) -> Iterator[FoundImage]:
        for line in stream:
            if is_web_address(line):
                yield _web_image(line)
            else:
                # the folders that will come are not known, so each place has its folder
                yield FoundImage(name=line, place=PurePath(line), pixels=partial(_read_file, line))

    return ImageGroup(total=None, images=images, stream=stream)


def _stored_group(
    stored: Split, split: str, classes: Sequence[str], source: Path | None
) -> ImageGroup:
    """Return a split of a dataset whose images are in memory or in larger files."""

    def images(prefix: PurePath) -> Iterator[FoundImage]:
        for index, label in enumerate(stored.labels.tolist()):
            name = stored.name(index)
            # a name such as `../a.png` must not lead out of the folder of the results
            inside = [part for part in PurePath(name).parts if part not in (os.sep, os.pardir)]
            yield FoundImage(
                name=name,
                place=PurePath(*inside),
                pixels=partial(_read_stored, stored, index, name),
                label=classes[label],
                split=split,
            )

    return ImageGroup(total=len(stored), images=images, classes=classes, source=source)


def dataset_groups(
    dataset: Dataset, split: str | None, source: Path | None = None
) -> Iterator[ImageGroup]:
    """Yield the splits of an opened dataset, or one of them.

    Args:
        dataset: the dataset.
        split: the split; all where None.
        source: the file or folder that it was opened from, if any.

    Raises:
        DataError: a split that does not exist.
    """
    if split is not None and split not in dataset.splits:
        raise DataError.about(
            "split",
            split,
            f"{dataset.name} has no split of that name{did_you_mean(split, dataset.splits)}; "
            f"it has {', '.join(dataset.splits)}",
        )
    for part, images in dataset.splits.items():
        if split not in (None, part):
            continue
        # splits made by vitkit do not belong to the data
        shown = "" if dataset.cut and split is None else part
        original = images.original()  # unwraps a cache, down to the files
        if (files := original.files()) is not None:
            labels = [dataset.classes[label] for label in images.labels]
            yield files_group(files, original.folder(), labels, [shown] * len(labels), source)
        else:
            yield _stored_group(images, shown, dataset.classes, source)


class ImageList:
    """Images found by their names; each is read when it is needed, so that any number fits.

    Iterating yields a `FoundImage` each: an image for `Predictor` and `embed`, with its `name`, and
    its `label` if a dataset gives one.

    Attributes:
        total: how many images; None if their paths still come from a stream.
        classes: the classes of the labels, each once; empty without labels.
        warnings: a line on each folder with files that may be images but are not read.
    """

    def __init__(self, groups: Sequence[ImageGroup], warnings: Sequence[str] = ()) -> None:
        self._groups = tuple(groups)
        self._current: ImageGroup | None = None
        self.warnings = tuple(warnings)
        # unknown as soon as one group is a stream
        totals = [group.total for group in groups]
        self.total = None if None in totals else sum(filter(None, totals))
        self.classes = tuple(dict.fromkeys(name for group in groups for name in group.classes))

    def __iter__(self) -> Iterator[FoundImage]:
        # images of several folders have places with their folder, below the common folder
        folders = {os.path.abspath(group.base) for group in self._groups if group.base is not None}
        shared = os.path.commonpath(folders) if len(folders) > 1 else None
        for group in self._groups:
            self._current = group  # `is_waiting` asks it
            prefix = PurePath()
            if shared is not None and group.base is not None:
                prefix = PurePath(os.path.relpath(os.path.abspath(group.base), shared))
            yield from group.images(prefix)

    @property
    def is_waiting(self) -> bool:
        """True if the next image comes from a stream that has not sent its path yet."""
        stream = None if self._current is None else self._current.stream
        return stream is not None and stream.is_waiting

    def files(self) -> Iterator[Path]:
        """Iterate over the files that are read; those that a stream names are not known."""
        for group in self._groups:
            if group.source is not None:
                yield group.source
            yield from map(Path, group.paths)


def batches_of(
    images: Iterable[AnyImage], size: int
) -> Iterator[tuple[list[tuple[int, AnyImage]], bool]]:
    """Yield numbered batches of at most `size` images, and True if the next images are available.

    What has come of a slow stream, which has `is_waiting`, is not kept back until more comes.
    """
    chunk: list[tuple[int, AnyImage]] = []
    for numbered in enumerate(images):
        chunk.append(numbered)
        is_waiting = bool(getattr(images, "is_waiting", False))
        if len(chunk) == size or is_waiting:
            yield chunk, not is_waiting
            chunk = []
    if chunk:
        yield chunk, True


CHUNK_SIZE = 1 << 16


class LineStream:
    """The lines of a file descriptor, each as soon as it arrives, without empty ones.

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
        # lines of other systems end in "\r\n"
        self._complete += (line.removesuffix(b"\r") for line in lines if line.strip())

"""Images to predict: files, addresses, images of datasets, and lists of them."""

from __future__ import annotations

import functools
import io
import os
import re
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
from vitkit.errors import DataError, ImageError, ImageReason
from vitkit.io.download import TooLarge, WebError, is_web_address, receive
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


LONGEST_DOWNLOAD = 120.0
"""Seconds that one image may take, however many bytes come in between."""
LARGEST_DOWNLOAD = 100_000_000
"""Most bytes of a download; decodable images are smaller in all usual formats."""


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
        content = io.BytesIO()
        try:
            kind = receive(
                address, content, plain_http=True,
                most_bytes=LARGEST_DOWNLOAD, seconds=LONGEST_DOWNLOAD,
            )  # fmt: skip
            return decode(content.getvalue(), name=address)
        except WebError as error:
            reason: ImageReason = "too large" if isinstance(error, TooLarge) else "missing"
            raise ImageError(address, reason, str(error)) from None
        except ImageError as error:
            # Content-Type is more informative than the magic bytes
            if error.reason == "not an image" and kind and not kind.startswith("image/"):
                detail = f"the server sent {kind}, not an image"
                raise ImageError(address, "not an image", detail) from None
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
        total: how many.
        images: called with a folder, yields the images; their places are in this folder.
        classes: the classes of their labels; empty where they have none.
        base: folder on disk that the places are relative to; None where there is none.
        paths: the files that are read, as far as they are known.
        source: the list that names the files, or the file or folder of their dataset, if any.
    """

    total: int
    images: Callable[[PurePath], Iterable[FoundImage]]
    classes: Sequence[str] = ()
    base: Path | None = None
    paths: Sequence[str] = ()
    source: Path | None = None


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
                pixels=partial(decode, path),
                label=labels[number] if labels else "",
                split=splits[number] if splits else "",
            )

    classes = natural_order({*labels} - {""})  # a list may lack some labels
    return ImageGroup(
        total=len(paths), images=images, classes=classes, base=root, paths=paths, source=source
    )


def named_group(names: Sequence[str]) -> ImageGroup:
    """Return paths and addresses as they are; a file that is missing is found when it is read."""

    def images(prefix: PurePath) -> Iterator[FoundImage]:
        for name in names:
            if is_web_address(name):
                yield _web_image(name)
            else:
                yield FoundImage(name=name, place=PurePath(name), pixels=partial(decode, name))

    return ImageGroup(total=len(names), images=images, paths=names)


def unusable_group(error: ImageError) -> ImageGroup:
    """Return a name without an image: reading it raises its error."""

    def pixels() -> RGBPixels:
        raise error

    image = FoundImage(name=error.name, place=PurePath(error.name), pixels=pixels)
    return ImageGroup(total=1, images=lambda prefix: [image])


def _stored_group(
    stored: Split, split: str, classes: Sequence[str], source: Path | None
) -> ImageGroup:
    """Return a split of a dataset whose images are in memory or in larger files."""

    def images(prefix: PurePath) -> Iterator[FoundImage]:
        for index, label in enumerate(stored.labels.tolist()):
            name = stored.name(index)
            yield FoundImage(
                name=name,
                place=PurePath(name),
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
        total: how many images.
        classes: the classes of the labels, each once; empty without labels.
        warnings: a line on each folder with files that may be images but are not read.
    """

    def __init__(self, groups: Sequence[ImageGroup], warnings: Sequence[str] = ()) -> None:
        self._groups = tuple(groups)
        self.warnings = tuple(warnings)
        self.total = sum(group.total for group in groups)
        self.classes = tuple(dict.fromkeys(name for group in groups for name in group.classes))

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[FoundImage]:
        # images of several folders have places with their folder, below the common folder
        folders = {os.path.abspath(group.base) for group in self._groups if group.base is not None}
        shared = os.path.commonpath(folders) if len(folders) > 1 else None
        for group in self._groups:
            prefix = PurePath()
            if shared is not None and group.base is not None:
                prefix = PurePath(os.path.relpath(os.path.abspath(group.base), shared))
            yield from group.images(prefix)

    def files(self) -> Iterator[Path]:
        """Iterate over the files that are read."""
        for group in self._groups:
            if group.source is not None:
                yield group.source
            yield from map(Path, group.paths)

"""Lists of images that were found, and their true labels."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Protocol, runtime_checkable

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import natural_order
from vitkit.errors import DataError, ImageError, ImageReason
from vitkit.io.download import is_web_address
from vitkit.messages import did_you_mean
from vitkit.prediction.images import (
    AnyImage,
    DatasetImage,
    FileImage,
    FoundImage,
    LineStream,
    UnusableImage,
    WebImage,
)


class ImageGroup(ABC):
    """The images of one argument.

    Attributes:
        total: how many; None if unknown.
        classes: the classes of their labels; empty where they have none.
    """

    total: int | None
    classes: Sequence[str] = ()

    @abstractmethod
    def __iter__(self) -> Iterator[FoundImage]:
        """Iterate over the images; none is read."""

    @abstractmethod
    def files(self) -> Iterator[Path]:
        """Iterate over the files that are read, as far as they are known."""


class Files(ImageGroup):
    """Files on disk.

    Args:
        paths: paths of the files.
        base: folder that the places of results are relative to; default that of the only file.
        labels: the class of each file; none where absent.
        splits: the split of each file; none where absent.
        source: the list that names the files, or the folder of their dataset, if any.
    """

    def __init__(
        self,
        paths: Sequence[str],
        base: Path | None = None,
        labels: Sequence[str] = (),
        splits: Sequence[str] = (),
        source: Path | None = None,
    ) -> None:
        self.total = len(paths)
        self.classes = natural_order({*labels} - {""})  # a list may lack some labels
        self._paths = paths
        self.base = Path(paths[0]).parent if base is None else base
        # what places of results begin with, where images come from several folders
        self.prefix = PurePath()
        self._labels = labels
        self._splits = splits
        self._source = source

    def __iter__(self) -> Iterator[FoundImage]:
        for number, path in enumerate(map(Path, self._paths)):
            yield FileImage(
                name=str(path),
                place=self.prefix / path.relative_to(self.base),
                label=self._labels[number] if self._labels else "",
                split=self._splits[number] if self._splits else "",
            )

    def files(self) -> Iterator[Path]:
        if self._source is not None:
            yield self._source
        yield from map(Path, self._paths)


class UnusableFile(Files):
    """A named file or folder without an image: reading it raises `ImageError`.

    Args:
        name: name of the file.
        reason: why, as for `ImageError`.
        detail: what was expected and what was found.
    """

    def __init__(self, name: str, reason: ImageReason, detail: str) -> None:
        super().__init__([name])
        self._error = ImageError(name, reason, detail)

    def __iter__(self) -> Iterator[FoundImage]:
        for image in super().__iter__():
            yield UnusableImage(name=image.name, place=image.place, error=self._error)


class Address(ImageGroup):
    """One image on the web.

    Args:
        address: http or https.
    """

    total = 1

    def __init__(self, address: str) -> None:
        self.address = address

    def __iter__(self) -> Iterator[FoundImage]:
        yield WebImage.at(self.address)

    def files(self) -> Iterator[Path]:
        return iter(())


class Stored(ImageGroup):
    """A split of a dataset whose images are in memory or in larger files.

    Args:
        images: the split.
        split: its name for the images.
        classes: names of the classes.
        source: the file of the dataset, if there is one.
    """

    def __init__(
        self, images: Split, split: str, classes: Sequence[str], source: Path | None
    ) -> None:
        self.total = len(images)
        self.classes = classes
        self._images = images
        self._split = split
        self._source = source

    def __iter__(self) -> Iterator[FoundImage]:
        for index, label in enumerate(self._images.labels.tolist()):
            name = self._images.name(index)
            # a name such as `../a.png` must not lead out of the folder of the results
            inside = [part for part in PurePath(name).parts if part not in (os.sep, os.pardir)]
            yield DatasetImage(
                name=name,
                place=PurePath(*inside),
                label=self.classes[label],
                split=self._split,
                images=self._images,
                index=index,
            )

    def files(self) -> Iterator[Path]:
        if self._source is not None:
            yield self._source


class Lines(ImageGroup):
    """Paths and addresses that come one by one; they can be read once.

    Args:
        stream: the lines.
    """

    total = None

    def __init__(self, stream: LineStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[FoundImage]:
        for line in self.stream:
            if is_web_address(line):
                yield WebImage.at(line)
            else:
                # the folders that will come are not known, so each place has its folder
                yield FileImage(name=line, place=PurePath(line))

    def files(self) -> Iterator[Path]:
        return iter(())


@runtime_checkable
class SlowStream(Protocol):
    """Images that come one by one, perhaps with pauses."""

    @property
    def is_waiting(self) -> bool:
        """True if the next image has not come yet."""


class ImageList:
    """Images found by their names; each is read when it is needed, so that any number fits.

    Iterating yields a `FoundImage` each: an image for `Predictor` and `embed`, with its `name`, and
    its `label` if a dataset gives one.

    Attributes:
        total: how many images; None if their paths still come from a stream.
        classes: the classes of the labels, each once; empty without labels.
        warnings: a line on each folder with files that may be images but are not read.
    """

    def __init__(self, parts: Sequence[ImageGroup], warnings: Sequence[str] = ()) -> None:
        self._parts = tuple(parts)
        _set_apart(
            [
                part
                for part in parts
                if isinstance(part, Files) and not isinstance(part, UnusableFile)
            ]
        )
        self._current: ImageGroup | None = None
        self.warnings = tuple(warnings)
        # unknown as soon as one part is a stream
        totals = [part.total for part in parts]
        self.total = None if None in totals else sum(filter(None, totals))
        self.classes = tuple(dict.fromkeys(name for part in parts for name in part.classes))

    def __iter__(self) -> Iterator[FoundImage]:
        for part in self._parts:
            self._current = part  # `is_waiting` asks it
            yield from part

    @property
    def is_waiting(self) -> bool:
        """True if the next image comes from a stream that has not sent its path yet."""
        return isinstance(self._current, Lines) and self._current.stream.is_waiting

    def files(self) -> Iterator[Path]:
        """Iterate over the files that are read; those that a stream names are not known."""
        for part in self._parts:
            yield from part.files()


def _set_apart(groups: Sequence[Files]) -> None:
    """Give images of several folders output paths with their folder, below the common folder."""
    folders = [os.path.abspath(group.base) for group in groups]
    if len({*folders}) > 1:
        shared = os.path.commonpath(folders)
        for group, folder in zip(groups, folders, strict=True):
            group.prefix = PurePath(os.path.relpath(folder, shared))


def dataset_parts(
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
        shown = part
        if dataset.cut and split is None:
            shown = ""  # splits made by vitkit do not belong to the data
        # unwraps a cache, down to the files
        original = images.original()
        if (files := original.files()) is not None:
            labels = [dataset.classes[label] for label in images.labels]
            yield Files(files, original.folder(), labels, [shown] * len(labels), source)
        else:
            yield Stored(images, shown, dataset.classes, source)


def batches_of(
    images: Iterable[AnyImage], size: int
) -> Iterator[tuple[list[tuple[int, AnyImage]], bool]]:
    """Yield numbered batches of at most `size` images, and True if the next images are available.

    What has come of a slow stream is not kept back until more comes.
    """
    stream = images if isinstance(images, SlowStream) else None
    chunk: list[tuple[int, AnyImage]] = []
    for numbered in enumerate(images):
        chunk.append(numbered)
        is_waiting = stream is not None and stream.is_waiting
        if len(chunk) == size or is_waiting:
            yield chunk, not is_waiting
            chunk = []
    if chunk:
        yield chunk, True

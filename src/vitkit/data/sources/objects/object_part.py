"""`ObjectPart`: the images of one split of a dataset object, before classes have numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt8

from vitkit.data.datasets.build import NamedImages
from vitkit.data.datasets.split import Split
from vitkit.data.sources.objects.items import Label, named


@dataclass(frozen=True, eq=False)
class ObjectPart:
    """The images of one split, or of all.

    Attributes:
        kind: how they were given, in a word, such as `arrays`.
        images: its labels are ignored.
        labels: each image's class number or class name (N,).
        digests: SHA-256 of each image (N, 32).
        classes: the names of the class numbers, where the object has them.
        notes: lines for the user.
    """

    kind: str
    images: Split
    labels: Sequence[Label]
    digests: UInt8[np.ndarray, "N 32"] = field(repr=False)
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def named(self, classes: Sequence[str]) -> NamedImages:
        """Return the images with their class names.

        Raises:
            DataError: a label outside of the classes.
        """
        # `assemble` matches the classes of the splits by name, so numbers become names here.
        names = named(self.labels, classes, self.images.name)
        return NamedImages(self.images, names, [row.tobytes() for row in self.digests])

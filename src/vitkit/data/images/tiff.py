"""What the first directory of a TIFF says of its pixels, for what Pillow alone does not tell."""

from __future__ import annotations

import io

from PIL import Image, TiffImagePlugin

from vitkit.data.images.pillow_errors import PILLOW_ERRORS, PillowKeptQuiet

BITS, COMPRESSION, PHOTOMETRIC, ORIENTATION, SAMPLES, KIND = 258, 259, 262, 274, 277, 339
"""Tags (TIFF 6.0, Sec. 8 and 19)."""
WHITE_IS_ZERO = 0
KINDS = {1: "unsigned integers", 2: "signed integers", 3: "floats", 4: "bits of no type",
         5: "complex integers", 6: "complex floats"}  # fmt: skip
HEAD, WIDE_HEAD, WIDE = 8, 16, b"+"
"""Bytes of the header, of that of a BigTIFF, and what tells a BigTIFF."""


def pixel_layout(handle: io.BytesIO | io.BufferedReader) -> str | None:
    """Describe the pixels of a TIFF, such as "5 samples of 8 bits (unsigned integers) a pixel".

    Returns:
        None where the directory cannot be read, or does not say how the pixels are stored.
    """
    try:
        with PillowKeptQuiet():
            handle.seek(0)
            head = handle.read(HEAD)
            if WIDE in head[2:4]:
                head += handle.read(WIDE_HEAD - HEAD)
            directory = TiffImagePlugin.ImageFileDirectory_v2(head)
            handle.seek(directory.next)
            directory.load(handle)
            bits, samples = directory.get(BITS, (1,)), directory.get(SAMPLES, 1)
            (kind,) = {*directory.get(KIND, (1,))}
    except PILLOW_ERRORS:
        return None
    said = " or ".join(map(str, sorted({*bits})))
    return (
        f"{samples} samples of {said} bits ({KINDS.get(kind, 'of an unknown type')}) a pixel, "
        f"photometric {directory.get(PHOTOMETRIC)}, compression {directory.get(COMPRESSION, 1)}"
    )


def orientation(image: Image.Image) -> int:
    """The orientation of a TIFF that was opened and not yet loaded; 1 where there is none.

    Pillow turns TIFFs itself while it loads them, and then forgets that it did.
    """
    found = getattr(image, "tag_v2", {}).get(ORIENTATION, 1)
    return found if isinstance(found, int) else 1

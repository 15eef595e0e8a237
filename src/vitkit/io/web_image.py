"""Images on a web server: one address, one image, with limits."""

from __future__ import annotations

import io
from dataclasses import dataclass

from vitkit.errors import ImageError
from vitkit.io.download import TooLarge, WebError, receive

LONGEST_DOWNLOAD = 120.0
"""Seconds that one image may take, however many bytes come in between."""
LARGEST_DOWNLOAD = 100_000_000
"""Most bytes of a download; decodable images are smaller in all usual formats."""


@dataclass(frozen=True)
class WebFile:
    """A downloaded file.

    Attributes:
        content: its bytes.
        media_type: the server's word for its type, such as `image/png`; may be empty or wrong.
    """

    content: bytes
    media_type: str


def fetch_image(address: str) -> WebFile:
    """Download one image.

    Args:
        address: `http://` or `https://`; redirections to other such addresses are followed.

    Raises:
        ImageError: "missing" if there is no such file, or no answer in time; "too large" above
            `LARGEST_DOWNLOAD` bytes.
    """
    content = io.BytesIO()
    try:
        media_type = receive(
            address,
            content,
            most_bytes=LARGEST_DOWNLOAD,
            seconds=LONGEST_DOWNLOAD,
            plain_http=True,
        )
    except TooLarge as error:
        detail = f"{error}; at most {LARGEST_DOWNLOAD:,} bytes are downloaded"
        raise ImageError(address, "too large", detail) from None
    except WebError as error:
        raise ImageError(address, "missing", str(error)) from None
    return WebFile(content.getvalue(), media_type)


def wrong_type(address: str, media_type: str) -> ImageError:
    """Return the error for a file of another type than an image."""
    return ImageError(address, "not an image", f"the server sent {media_type}, not an image")

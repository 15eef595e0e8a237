"""Addresses on the web, recognised by their text."""

from __future__ import annotations

WEB_SCHEMES = ("http", "https")


def is_web_address(text: str) -> bool:
    """Return True for an http or https address.

    >>> is_web_address("https://example.com/a.jpg"), is_web_address("photos/a.jpg")
    (True, False)
    """
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.lower() in WEB_SCHEMES

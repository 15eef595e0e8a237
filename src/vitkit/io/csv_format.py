"""The encoding and the separator of a CSV file that a person or a spreadsheet wrote."""

from __future__ import annotations

UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""First bytes of a file in UTF-16, such as Excel's "Unicode text"."""
SEPARATORS = ",;\t"


def csv_encoding(start: bytes) -> str:
    """Return the encoding of a file by its first bytes: UTF-16 with a byte order mark, or UTF-8.

    >>> csv_encoding(b"path,label"), csv_encoding("path".encode("utf-16"))
    ('utf-8-sig', 'utf-16')
    """
    # "utf-8-sig" reads files with and without the byte order mark that Excel writes.
    return "utf-16" if start[:2] in UTF_16 else "utf-8-sig"


def csv_separator(header: str) -> str:
    """Return the most frequent separator of the first line.

    >>> csv_separator("path;old_class;new_class")
    ';'
    """
    return max(SEPARATORS, key=header.count)

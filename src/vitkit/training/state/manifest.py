"""The manifest of a saved state: its files, its values, its settings, sealed by a sha256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitkit.io.atomic import write_bytes

MANIFEST, DOCUMENT = "MANIFEST.json", "state.json"
FORMAT_VERSION = 3
READABLE = (2, 3)
"""Format 2 had the values in a file of their own, and no settings."""


def manifest_of(state: Path) -> dict[str, Any]:
    """Read what a whole state says of itself, its `values` and `settings` among it.

    The settings are `None` in a state of format 2.
    """
    manifest = read_manifest(state)
    return {"settings": None, **manifest, "values": stored_values(state, manifest)}


def read_manifest(state: Path) -> dict[str, Any]:
    """Read a manifest as it was written; its seal is `damage`'s to check."""
    manifest: dict[str, Any] = json.loads((state / MANIFEST).read_bytes())["manifest"]
    return manifest


def stored_values(state: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Read the values of every part; one that format 2 did not have is filled in."""
    if manifest["format_version"] == FORMAT_VERSION:
        return dict(manifest["values"])
    values: dict[str, Any] = json.loads((state / DOCUMENT).read_bytes())["parts"]
    if "progress" in values:
        values["progress"] = {"unvalidated": False} | values["progress"]
    return values


def write_manifest(state: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a state; an older one is replaced in one rename."""
    write_bytes(state / MANIFEST, sealed(manifest))


def sealed(manifest: dict[str, Any]) -> bytes:
    """Put a manifest and its sha256 into one JSON document."""
    return json.dumps({"manifest": manifest, "sha256": seal(manifest)}).encode()


def seal(manifest: dict[str, Any]) -> str:
    """Hash a manifest (SHA-256, hex)."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def digest_of(path: Path) -> str:
    """Hash a file (SHA-256, hex)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

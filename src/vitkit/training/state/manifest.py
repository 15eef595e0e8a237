"""The manifest of a saved state: its files, its values and its settings, sealed by a SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitkit.io.atomic import write_bytes
from vitkit.io.caches import file_sha256

MANIFEST, DOCUMENT = "MANIFEST.json", "state.json"
FORMAT_VERSION = 3
READABLE = (2, 3)
"""Format 2 had the values in a file of their own, and no settings."""


def step_of(state: Path) -> int:
    """Return the step that a state's folder is named after."""
    return int(state.name.removeprefix("step-"))


def manifest_of(state: Path) -> dict[str, Any]:
    """Read the manifest of an intact state, with its `values` and `settings`.

    The settings are `None` in a state of format 2.
    """
    manifest = read_manifest(state)
    return {"settings": None, **manifest, "values": stored_metadata(state, manifest)}


def read_manifest(state: Path) -> dict[str, Any]:
    """Read a manifest as it was written; `find_damage` checks its seal."""
    manifest: dict[str, Any] = json.loads((state / MANIFEST).read_bytes())["manifest"]
    return manifest


def stored_metadata(state: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Read the values of every part; a value that format 2 did not have gets its default."""
    if manifest["format_version"] == FORMAT_VERSION:
        return dict(manifest["values"])
    metadata: dict[str, Any] = json.loads((state / DOCUMENT).read_bytes())["parts"]
    if "progress" in metadata:
        metadata["progress"] = {"unvalidated": False} | metadata["progress"]
    return metadata


def write_manifest(state: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a state; an older one is replaced in one rename."""
    write_bytes(state / MANIFEST, sealed_document(manifest))


def sealed_document(manifest: dict[str, Any]) -> bytes:
    """Put a manifest and its SHA-256 into one JSON document."""
    return json.dumps({"manifest": manifest, "sha256": _manifest_digest(manifest)}).encode()


def _manifest_digest(manifest: dict[str, Any]) -> str:
    """Hash a manifest (SHA-256, hex)."""
    # Sorted keys: the hash must not depend on the order of a dictionary.
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def find_damage(state: Path) -> str | None:
    """Check a state's files against its manifest; return one line on the first problem, if any."""
    try:
        document = json.loads((state / MANIFEST).read_bytes())
        manifest = document["manifest"]
        if _manifest_digest(manifest) != document["sha256"]:
            return f"{MANIFEST} does not match its own checksum"
        if manifest["format_version"] not in READABLE:
            readable = " and ".join(map(str, READABLE))
            return f"format {manifest['format_version']}, and this vitkit reads {readable}"
        for name, expected in manifest["files"].items():
            problem = _file_damage(state / name, name, expected)
            if problem is not None:
                return problem
        progress = stored_metadata(state, manifest).get("progress", {})
        step = progress.get("step", step_of(state))
        if step != step_of(state):  # the folder was renamed by hand
            return f"it holds the state of step {step}, not of the step in its name"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"incomplete ({error})"
    return None


def _file_damage(file: Path, name: str, expected: Mapping[str, Any]) -> str | None:
    """Compare a file with its entry in the manifest."""
    # The size first: it is known without reading the file.
    size = file.stat().st_size
    if size != expected["size"]:
        return f"{name} has {size} bytes, expected {expected['size']}"
    digest = file_sha256(file)
    if digest != expected["sha256"]:
        return f"{name} has sha256 {digest}, expected {expected['sha256']}"
    return None


def is_of_another_format(state: Path) -> bool:
    """Return whether a state was written in a format that this version does not read."""
    try:
        return read_manifest(state)["format_version"] not in READABLE
    except (OSError, ValueError, LookupError, TypeError):
        return False

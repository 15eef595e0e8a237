"""The manifest of a saved state: its files, its values and its settings, sealed by a SHA-256."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vitkit.io.atomic import write_bytes
from vitkit.io.caches import file_sha256

MANIFEST = "MANIFEST.json"
FORMAT_VERSION = 3


def step_of(state: Path) -> int:
    """Return the step that a state's folder is named after."""
    return int(state.name.removeprefix("step-"))


def read_manifest(state: Path) -> dict[str, Any]:
    """Read a manifest, with its `values` and `settings`; `find_damage` checks its seal."""
    manifest: dict[str, Any] = json.loads((state / MANIFEST).read_bytes())["manifest"]
    return manifest


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
        version = manifest["format_version"]
        if version != FORMAT_VERSION:
            return f"format {version}, and this vitkit reads {FORMAT_VERSION}"
        for name, expected in manifest["files"].items():
            # The size first: it is known without reading the file.
            found = {"size": (state / name).stat().st_size}
            if found["size"] == expected["size"]:
                found = {"sha256": file_sha256(state / name)}
            for kind, value in found.items():
                if value != expected[kind]:
                    return f"{name} has {kind} {value}, expected {expected[kind]}"
        step = manifest["values"].get("progress", {}).get("step", step_of(state))
        if step != step_of(state):  # the folder was renamed by hand
            return f"it holds the state of step {step}, not of the step in its name"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"incomplete ({error})"
    return None

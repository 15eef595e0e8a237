"""Sections about the data: the findings of the check, and images as training saw them."""

from __future__ import annotations

import json
from typing import Any

from PIL import Image

from vitkit.data.images.decode import decode
from vitkit.errors import ImageError
from vitkit.messages import escape
from vitkit.reporting.images import data_address
from vitkit.reporting.missing import Missing
from vitkit.reporting.reported_run import ReportedRun

NAMED = 8
"""Images that the page names of a finding."""
WIDEST = 1200
"""Pixels of the grid of augmented images at most."""
LARGEST = 400_000
"""Bytes of the grid that stays a PNG file."""


def check_findings(run: ReportedRun) -> dict[str, Any]:
    """Return the findings of the check of the data. Raises `Missing` without check.json."""
    command = run.command("check", run.data, *run.relabel_words, "--output", run.folder.check)
    try:
        document = json.loads(run.folder.check.read_bytes())
        findings = [_finding(found) for found in document["findings"]]
        checked = sum(sum(counts.values()) for counts in document["images"].values())
    except FileNotFoundError:
        raise Missing(
            "The folder has no report of a check of the data. This command writes one; make this "
            "report again afterwards.",
            command,
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Missing(
            f"{run.folder.check.name} is not a report of vitkit check.", command
        ) from None
    return {"findings": findings, "checked": checked}


def _finding(found: dict[str, Any]) -> dict[str, Any]:
    """Return a finding of the JSON report as the page shows it."""
    images = [" = ".join(map(str, names)) for names in found["images"]]
    return {
        "severity": str(found["severity"]),
        "message": escape(str(found["message"])),
        "images": [escape(name) for name in images[:NAMED]],
        # the report of training names only the first images
        "more": max(0, len(images) - NAMED) + int(found.get("more", 0)),
    }


def augmented(run: ReportedRun) -> dict[str, Any]:
    """Return the grid of augmented images of the first step. Raises `Missing` without it."""
    path = run.folder.augmented
    again = run.root.with_name(f"{run.root.resolve().name}-augmented")
    command = run.command(
        "train", run.data, "--recipe", run.folder.config, "--output", again, "--max-steps", "1",
        "--save-augmented-grid",
    )  # fmt: skip
    if not path.exists():
        raise Missing(
            "The run has not written a sample of its augmented images. This command writes one, "
            f"{escape(again / path.name)}; copy it into the folder of this run.",
            command,
        )
    try:
        image = Image.fromarray(decode(path, name=path.name))
    except ImageError as error:
        raise Missing(f"The sample cannot be read: {error}.", command) from None
    if path.stat().st_size <= LARGEST:
        return {"image": data_address(image, "png")}
    image.thumbnail((WIDEST, 2 * WIDEST))
    return {"image": data_address(image, "jpeg")}

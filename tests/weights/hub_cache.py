"""A local folder laid out as the Hub's cache is, and a Hub that must not be asked."""

import hashlib
from pathlib import Path

import pytest

import vitkit

REVISION = "a" * 40


def empty(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, and no way to the Hub itself."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    return place


def put(cache: Path, name: str, made: Path, file: str, revision: str = "main") -> None:
    """Move a file into a repository of the cache, as a link to a blob of its digest."""
    place = cache / f"models--{name.replace('/', '--')}"
    for folder in ("refs", "blobs", "snapshots"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    (place / "refs" / revision).write_text(REVISION)
    blob = place / "blobs" / hashlib.sha256(made.read_bytes()).hexdigest()
    made.rename(blob)
    link = place / "snapshots" / REVISION / file
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(blob)


def published(own: Path, cache: Path, name: str, to: str, folder: str = "") -> None:
    """A checkpoint of ours in the cache, as a repository (or a folder of it) in another format."""
    made = own.parent / to
    vitkit.convert(own, made, to=to)
    for file in made.iterdir():
        put(cache, name, file, f"{folder}{file.name}")

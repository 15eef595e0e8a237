"""Addresses of weights, and the local file or folder that each of them becomes.

    hf://owner/name                  a repository on the Hugging Face Hub
    hf://owner/name@revision         at a branch, tag or commit
    hf://owner/name:path/in/repo     one file of it; `@revision` goes before the colon
    timm://name                      the checkpoint that timm calls so; as a rule hf://timm/name
    https://host/path/file.npz       a file on the web

`huggingface_hub` downloads, resumes and caches what is on the Hub, `download` what is not; where
`HF_HUB_OFFLINE=1` forbids it, what the caches hold is used. Pickles are not even fetched without
trust.
"""

from __future__ import annotations

import re
from pathlib import Path

from vitkit.errors import CheckpointError, MissingExtraError
from vitkit.io.download import download, file_sha256
from vitkit.io.strict_json import BESIDE
from vitkit.weights.catalogue import PICKLES, TRUST, known

REVISION, FILE = r"(?:@(?P<revision>[\w./-]+))?", r"(?::(?P<file>[\w.+/-]+))?"
ADDRESS = re.compile(rf"hf://(?P<name>[\w.-]+/[\w.-]+){REVISION}{FILE}")
TIMM = re.compile(rf"timm://(?P<name>[\w.-]+){REVISION}{FILE}")
SCHEMES = ("hf://", "timm://", "https://", "http://")
SAFE = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "model.npz",
        *BESIDE.values()]  # fmt: skip
"""What is fetched of a repository; many hold the same weights once more under other names."""
TRUSTED = ["pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"]
ENDINGS = (".safetensors", ".npz", *PICKLES)


def is_address(path: str | Path) -> bool:
    """Whether this names a place on the Hub or on the web, and no file."""
    return str(path).startswith(SCHEMES)


def fetch(address: str, *, trust_pickle: bool = False) -> Path:
    """The local file or folder of an address, downloaded if it is not in the cache.

    Args:
        address: as at the head of this module.
        trust_pickle: also fetch pickles: a `.pth` file, or the `.bin` of a repository that has
            nothing else.

    Returns:
        The folder of a repository; the file where the address names one.

    Raises:
        CheckpointError: no such address, not there, not reachable, or not what it should be.
        MissingExtraError: `huggingface_hub` is not installed.
        OutputError: the cache cannot be written.
    """
    entry = known(address)
    if address.startswith("timm://") and entry is not None and entry.address != address:
        return fetch(entry.address, trust_pickle=trust_pickle)
    sha256 = entry.sha256 if entry is not None else ""
    if address.startswith(("https://", "http://")):
        _check_ending(address, address, trust_pickle)
        return download(address, sha256=sha256)
    path = _from_hub(address, trust_pickle)
    if sha256:
        verify_hub_file(path / "model.safetensors" if path.is_dir() else path, sha256)
    return path


def _from_hub(address: str, trust_pickle: bool) -> Path:
    """The folder of a repository, or the one file of it that the address names."""
    match = ADDRESS.fullmatch(address) or TIMM.fullmatch(address)
    parts = [] if match is None else (match["file"] or ".").split("/")
    if match is None or not parts[0] or ".." in parts:
        raise CheckpointError(
            f"{address}: expected hf://owner/name, hf://owner/name@revision, "
            f"hf://owner/name:file, timm://name or https://host/file"
        )
    name, revision, file = match["name"], match["revision"], match["file"]
    if address.startswith("timm://"):
        name = f"timm/{name}"
    if file:
        _check_ending(address, file, trust_pickle)
        documents = [str(Path(file).parent / document) for document in BESIDE.values()]
        path = _snapshot(address, name, revision, [file, *documents]) / file
        if not path.is_file():
            raise CheckpointError(f"{address}: no such file in the repository, or in the cache")
        return path
    folder = _snapshot(address, name, revision, SAFE)
    if [*folder.glob("model*.safetensors"), *folder.glob("model.npz")]:
        return folder
    if not trust_pickle:
        raise CheckpointError(
            f"{address}: holds no model.safetensors; name one of its files ({address}:FILE), "
            f"or, if you trust its pickle, {TRUST}"
        )
    return _snapshot(address, name, revision, [*SAFE, *TRUSTED])


def verify_hub_file(path: Path, sha256: str = "") -> None:
    """Hold a file of the Hub's cache against its SHA-256.

    The cache names what the Hub stores as a large file by its digest: that is the whole of it.
    Loading does not ask for this: `huggingface_hub` gives a file that name only once it is whole,
    and a ViT-H would cost seconds each time.

    Args:
        path: a file of a snapshot, or the blob itself.
        sha256: leading hex digits that are expected besides.

    Raises:
        CheckpointError: another digest; the file must be deleted to be fetched again.
    """
    blob = path.resolve()
    named = blob.name if re.fullmatch("[0-9a-f]{64}", blob.name) else ""
    expected = [digits.lower() for digits in (named, sha256) if digits]
    if not expected:
        return
    digest = file_sha256(blob)
    for digits in expected:
        if not digest.startswith(digits):
            raise CheckpointError(
                f"{path}: expected SHA-256 {digits}, got {digest[: len(digits)]}; delete {blob} "
                f"to fetch it again"
            )


def _check_ending(address: str, file: str, trust_pickle: bool) -> None:
    """Refuse what is no file of weights, and a pickle without trust, before anything is fetched."""
    if not file.endswith(ENDINGS):
        raise CheckpointError(f"{address}: ends in none of {', '.join(ENDINGS)}")
    if file.endswith(PICKLES) and not trust_pickle:
        raise CheckpointError(
            f"{address}: a pickle, which can run code when it is read; if you trust where it comes "
            f"from, {TRUST}"
        )


def _snapshot(address: str, name: str, revision: str | None, wanted: list[str]) -> Path:
    """The folder of a repository in the Hub's cache, with those of its files that are wanted."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise MissingExtraError(
            f"{address} needs huggingface_hub; install it: pip install 'vitkit[hub]'"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except RevisionNotFoundError:
        raise CheckpointError(f"{address}: there is no revision {revision!r} of it") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{address}: no such repository, or a private one; `hf auth login` opens yours"
        ) from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{address}: not in the cache, and the Hub cannot be reached; check the network and "
            f"HF_HUB_OFFLINE, or give a file"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CheckpointError(f"{address}: cannot be fetched: {reason}") from None

"""Addresses of pretrained weights, and the local file that each of them is downloaded to.

    hf://owner/name                  a repository on the Hugging Face Hub
    hf://owner/name@revision         at a branch, tag or commit
    hf://owner/name:path/in/repo     one file of it; `@revision` goes before the colon
    timm://name                      the checkpoint of that name in timm; as a rule hf://timm/name
    https://host/path/file.npz       a file on the web

`huggingface_hub` downloads, resumes and caches files of the Hub, `download` all others; where
`HF_HUB_OFFLINE=1` forbids it, only the caches are used. Pickles are not even fetched without
trust.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vitkit.errors import CheckpointError, MissingExtraError
from vitkit.io.caches import file_sha256
from vitkit.io.results import DOCUMENT_FILES
from vitkit.weights.catalogue import PUBLISHED_PICKLES, CatalogueEntry, known, suggested
from vitkit.weights.pickles import TRUST

REVISION_PART = r"(?:@(?P<revision>[\w./-]+))?"
FILE_PART = r"(?::(?P<file>[\w.+/-]+))?"
HUB_ADDRESS = re.compile(rf"hf://(?P<name>[\w.-]+/[\w.-]+){REVISION_PART}{FILE_PART}")
TIMM_ADDRESS = re.compile(rf"timm://(?P<name>[\w.-]+){REVISION_PART}{FILE_PART}")
WEB_SCHEMES = ("https://", "http://")
ADDRESS_SCHEMES = ("hf://", "timm://", *WEB_SCHEMES)
SAFE_FILES = [
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "model.npz",
    *DOCUMENT_FILES.values(),
]
"""Files fetched from a repository; many also have the same weights under other names."""
PICKLED_FILES = ["pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"]
"""Pickles, fetched only with trust, from a repository without other weights."""
WEIGHTS_ENDINGS = (".safetensors", ".npz", *PUBLISHED_PICKLES)


def is_address(path: str | Path) -> bool:
    """Return True for an address on the Hub or on the web, False for a file."""
    return str(path).startswith(ADDRESS_SCHEMES)


def locate(name: str | Path, *, trust_pickle: bool = False) -> tuple[Path, CatalogueEntry | None]:
    """Return the local file or folder of a checkpoint, and its entry in the catalogue if any.

    Args:
        name: a file, a folder, an address, or a name in the catalogue.
        trust_pickle: as for `fetch`.

    Raises:
        CheckpointError: no name, or an empty one; else as for `fetch`.
    """
    if not isinstance(name, str | os.PathLike):
        raise CheckpointError(
            f"a {type(name).__name__} is not the path, the address or the name of a checkpoint; "
            "vitkit.save and checkpoint.save_pretrained write one"
        )
    if not str(name):
        raise CheckpointError(
            "the name of the weights is empty; pass a file, a folder or an address"
        )
    # The catalogue has facts that the file lacks, for its names and addresses.
    entry = known(name)
    if entry is not None:
        return _fetch(entry.address, entry.sha256, trust_pickle), entry
    if is_address(name):
        return _fetch(str(name), "", trust_pickle), None
    path = Path(name)
    is_bare = path.name == str(name) and not path.name.endswith(WEIGHTS_ENDINGS)
    if is_bare and not os.path.lexists(path):
        raise CheckpointError(
            f"{name}: no such file or folder, and no published checkpoint has that name"
            f"{suggested(str(name))}; `vitkit models --pretrained` lists all"
        )
    return path, None


def fetch(address: str, *, trust_pickle: bool = False) -> Path:
    """Return the local file or folder of an address, downloaded if it is not in the cache.

    Args:
        address: as at the head of this module.
        trust_pickle: also fetch pickles: a `.pth` file, or the `.bin` of a repository that has
            nothing else.

    Returns:
        The folder of a repository; the file where the address names one.

    Raises:
        CheckpointError: no such address, not there, not reachable, or another digest.
        MissingExtraError: `huggingface_hub` is not installed.
        OutputError: the cache cannot be written.
    """
    return locate(address, trust_pickle=trust_pickle)[0]


def _fetch(address: str, sha256: str, trust_pickle: bool) -> Path:
    """Fetch an address, and check the digest that the catalogue has for it."""
    if address.startswith(WEB_SCHEMES):
        # as the Hub's link to a file, .../resolve/main/model.safetensors?download=true
        _check_ending(address, re.split(r"[?#]", address)[0], trust_pickle)
        # imported here: a local file needs no connections
        from vitkit.io.download import download

        return download(address, sha256=sha256)
    path = _from_hub(address, trust_pickle)
    if sha256:
        verify_hub_file(path / "model.safetensors" if path.is_dir() else path, sha256)
    return path


def _from_hub(address: str, trust_pickle: bool) -> Path:
    """Return the folder of a repository, or the one file of it that the address names."""
    match = HUB_ADDRESS.fullmatch(address) or TIMM_ADDRESS.fullmatch(address)
    parts = [] if match is None else (match["file"] or ".").split("/")
    # A file must be inside the repository: neither absolute nor with "..".
    if match is None or not parts[0] or ".." in parts:
        raise CheckpointError(
            f"{address}: expected hf://owner/name, hf://owner/name@revision, "
            f"hf://owner/name:file, timm://name or https://host/file"
        )
    name, revision, file = match["name"], match["revision"], match["file"]
    if address.startswith("timm://"):  # timm's own organisation on the Hub
        name = f"timm/{name}"
    if file:
        _check_ending(address, file, trust_pickle)
        # config.json and the like lie beside the file, in its own folder.
        documents = [str(Path(file).parent / document) for document in DOCUMENT_FILES.values()]
        path = _snapshot(address, name, revision, [file, *documents]) / file
        if not path.is_file():
            raise CheckpointError(f"{address}: no such file in the repository or in the cache")
        return path
    # Pickles are fetched in a second step, and only where there is nothing else.
    folder = _snapshot(address, name, revision, SAFE_FILES)
    if [*folder.glob("model*.safetensors"), *folder.glob("model.npz")]:
        return folder
    if not trust_pickle:
        raise CheckpointError(
            f"{address}: has no model.safetensors; name one of its files ({address}:FILE), or, "
            f"if you trust the source of its pickle, {TRUST}"
        )
    return _snapshot(address, name, revision, [*SAFE_FILES, *PICKLED_FILES])


def verify_hub_file(path: Path, sha256: str = "") -> None:
    """Check a file of the Hub's cache against its SHA-256.

    The cache names large files of the Hub by their digest, all 64 digits of it. Loading does not
    need this check: `huggingface_hub` gives a file that name only once it is complete, and a ViT-H
    would cost seconds each time.

    Args:
        path: a file of a snapshot, or the blob itself.
        sha256: leading hex digits that are expected besides.

    Raises:
        CheckpointError: another digest; the file must be deleted to be fetched again.
    """
    blob = path.resolve()
    blob_digits = blob.name if re.fullmatch("[0-9a-f]{64}", blob.name) else ""
    expected = [digits.lower() for digits in (blob_digits, sha256) if digits]
    if not expected:
        return
    # The digests of the blob's name and of the catalogue are checked by reading the file once.
    digest = file_sha256(blob)
    for digits in expected:
        if not digest.startswith(digits):
            raise CheckpointError(
                f"{path}: expected SHA-256 {digits}, got {digest[: len(digits)]}; delete {blob} "
                "to download it again"
            )


def _check_ending(address: str, file: str, trust_pickle: bool) -> None:
    """Refuse other files than weights, and pickles without trust, before anything is fetched."""
    if not file.endswith(WEIGHTS_ENDINGS):
        raise CheckpointError(
            f"{address}: expected a name that ends in one of {', '.join(WEIGHTS_ENDINGS)}"
        )
    if file.endswith(PUBLISHED_PICKLES) and not trust_pickle:
        raise CheckpointError(
            f"{address}: is a pickle, and loading a pickle can run code; if you trust the "
            f"source, {TRUST}"
        )


def _snapshot(address: str, name: str, revision: str | None, patterns: list[str]) -> Path:
    """Return the folder of a repository in the Hub's cache, with its files of these patterns."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise MissingExtraError(
            f"{address} needs huggingface_hub; install it: pip install 'vitkit[hub]'"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except RevisionNotFoundError:
        raise CheckpointError(f"{address}: has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{address}: does not exist, or is private; log in with `hf auth login` to read "
            "your own"
        ) from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{address}: not in the cache, and the Hub cannot be reached; check the network and "
            "HF_HUB_OFFLINE, or pass a file"
        ) from None
    # Last, as the exceptions above are subclasses of these.
    except hub_errors() as error:
        reason = str(error).strip() or repr(error)
        raise CheckpointError(
            f"{address}: cannot be downloaded: {reason.splitlines()[0]}; try again, or pass a file"
        ) from None


def hub_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions of the Hub's client, for an `except`; `huggingface_hub` is installed.

    Its own, those of its HTTP library (httpx or httpx2, by its version), `OSError`, and
    `ValueError` for a wrong name or a wrong model card.
    """
    from huggingface_hub.errors import HfHubHTTPError

    # The error of the HTTP library is a base of the client's own.
    return (HfHubHTTPError, *HfHubHTTPError.__bases__, OSError, ValueError)

"""Weights from the Hugging Face Hub: `hf://owner/name`, `hf://owner/name@revision`, `timm://name`.

`huggingface_hub` downloads, resumes and caches; where it is told to stay offline
(`HF_HUB_OFFLINE=1`), what the cache holds is used. Pickles are not even fetched without trust.
"""

from __future__ import annotations

import re
from pathlib import Path

from vitkit.errors import CheckpointError, MissingExtraError

ADDRESS = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
TIMM = re.compile(r"timm://(?P<name>[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
SAFE = ["*.safetensors", "*.safetensors.index.json", "config.json", "preprocessor_config.json"]


def is_address(path: str | Path) -> bool:
    """Whether this names a place on the Hub and no file."""
    return str(path).startswith(("hf://", "timm://"))


def fetch(address: str, *, trust_pickle: bool = False) -> Path:
    """The local folder of a repository on the Hub, downloaded if it is not in the cache.

    Args:
        address: `hf://owner/name`, with `@revision` for a branch, tag or commit; `timm://name` is
            short for `hf://timm/name`.
        trust_pickle: also fetch `.bin` files, for repositories that have nothing else.

    Raises:
        CheckpointError: no such address, not there, or not reachable.
        MissingExtraError: `huggingface_hub` is not installed.
    """
    match = ADDRESS.fullmatch(address) or TIMM.fullmatch(address)
    if match is None:
        raise CheckpointError(
            f"{address}: expected hf://owner/name, hf://owner/name@revision or timm://name"
        )
    name, revision = match["name"], match["revision"]
    if address.startswith("timm://"):
        name = f"timm/{name}"
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
    wanted = [*SAFE, "*.bin", "*.bin.index.json"] if trust_pickle else SAFE
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

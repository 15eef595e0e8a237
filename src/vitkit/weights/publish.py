"""Writing a checkpoint as a folder with a model card, or uploading that to the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.errors import CheckpointError, MissingExtraError, OutputError
from vitkit.io.atomic import refuse_existing, write_bytes
from vitkit.io.results import nonempty_path
from vitkit.models.interface.pretrained import Origin, default_preprocess
from vitkit.spec import Preprocess
from vitkit.weights.checkpoint import Checkpoint, Hub
from vitkit.weights.converting.write import (
    FILE_ENDINGS,
    prepare_files,
    refuse_unknown_format,
    write_checkpoint,
)
from vitkit.weights.download_weights import hub_errors
from vitkit.weights.formats.description import OWN_FORMAT
from vitkit.weights.formats.saved_model import as_saved, unwrapped
from vitkit.weights.formats.timm.architecture import timm_architecture
from vitkit.weights.formats.vitkit import class_names
from vitkit.weights.model_card import CARD_LIBRARIES, model_card


def publish(
    checkpoint: Checkpoint,
    name: str,
    *,
    to: str,
    private: bool,
    allow_lossy: bool,
    message: str,
    hub: Hub | None,
) -> str:
    """Upload a checkpoint; `Checkpoint.push_to_hub` has the arguments, defaults and errors."""
    refuse_unknown_format(to)
    # The folder is complete before the first call to the Hub, which gets one commit.
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "repository"
        _write_folder(checkpoint, folder, to, allow_lossy, name)
        return _upload(hub, name, folder, private, message)


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    to: str,
    preprocess: Preprocess | None,
    classes: Sequence[str] | None,
    allow_lossy: bool,
) -> tuple[Path, ...]:
    """Write a model as a folder; `ViT.save_pretrained` has the arguments and errors."""
    path = nonempty_path(folder, "folder")
    if path.name.endswith(FILE_ENDINGS):
        raise OutputError(f"{path}: expected a folder; vitkit.save writes a single file")
    vit = unwrapped(model, path)
    if to != "auto":
        refuse_unknown_format(to)
    spec, _ = as_saved(vit, path)
    origin = vit.origin
    if origin is None:
        origin = Origin(source="", format=OWN_FORMAT, preprocess=default_preprocess(spec))
    names: tuple[str, ...] = ()
    if classes is not None:
        names = class_names(classes, path)
    elif len(origin.classes) == spec.num_classes:  # a head that was replaced has other classes
        names = origin.classes
    metadata: dict[str, Any] = {}
    if origin.licence:
        metadata["licence"] = origin.licence
    # Where parts differ in precision, the one that holds them all.
    dtype = reduce(torch.promote_types, (weight.dtype for weight in vit.parameters()))
    checkpoint = Checkpoint(
        model=vit,
        preprocess=preprocess or origin.preprocess,
        classes=names,
        metadata=metadata,
        path=path,
        dtype=str(dtype).removeprefix("torch."),
    )
    if to == "auto":
        to = _lossless_format(checkpoint)
    return _write_folder(checkpoint, path, to, allow_lossy)


def _lossless_format(checkpoint: Checkpoint) -> str:
    """Return the format that most libraries read, of those that hold the model as it is."""
    for to in CARD_LIBRARIES:  # transformers first, then timm
        with suppress(CheckpointError):
            prepare_files(checkpoint, to, allow_lossy=False)
            # timm finds the class of a folder by the architecture that it names.
            if to != "timm" or timm_architecture(checkpoint.model.spec):
                return to
    return OWN_FORMAT


def _write_folder(
    checkpoint: Checkpoint, folder: Path, to: str, allow_lossy: bool, name: str = ""
) -> tuple[Path, ...]:
    """Write the files of a format and the model card.

    Args:
        checkpoint: the model.
        folder: created if it does not exist.
        to: the format.
        allow_lossy: as for `convert`.
        name: `owner/name` on the Hub; default: the folder is read where it is.

    Raises:
        CheckpointError: as for `write_checkpoint`.
        OutputError: a file exists already, or cannot be written.
    """
    card = folder / "README.md"
    refuse_existing([card])  # before the weights are written; those refuse their own names
    stored = write_checkpoint(checkpoint, folder, to, allow_lossy, {})
    text = model_card(checkpoint, name or str(folder), to, stored.spec, stored.steps, bool(name))
    write_bytes(card, text.encode())
    return (*stored.files, card)


def _upload(hub: Hub | None, name: str, folder: Path, private: bool, message: str) -> str:
    """Create the repository, upload the folder in one commit, and return the address."""
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingExtraError(
            f"uploading {name} needs huggingface_hub; install it: pip install 'vitkit[hub]'"
        ) from None
    # The default client has the login of this machine.
    if hub is None:
        hub = HfApi()
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except hub_errors() as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OutputError(
            f"{name}: cannot be uploaded: {reason}; log in with `hf auth login`, and write the "
            "name as owner/name"
        ) from None
    return f"hf://{name}"

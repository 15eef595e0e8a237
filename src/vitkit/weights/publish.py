"""Write a checkpoint as a folder with a model card, or upload that to the Hugging Face Hub."""

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit import errors, messages
from vitkit.io import atomic, results
from vitkit.models.interface.pretrained import Origin, default_preprocess
from vitkit.spec import Preprocess
from vitkit.weights import catalogue, write
from vitkit.weights.checkpoint import OWN_FORMAT, Checkpoint, texts, with_assumption
from vitkit.weights.formats import timm_config, vitkit


def publish(
    checkpoint: Checkpoint,
    name: str,
    *,
    to: str,
    private: bool,
    allow_lossy: bool,
    message: str,
    hub: Any,
) -> str:
    """Upload a checkpoint; `Checkpoint.push_to_hub` has the arguments, defaults and errors."""
    write.refuse_unknown_format(to)
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
    path = results.nonempty_path(folder, "folder")
    if path.name.endswith(write.FILE_ENDINGS):
        raise errors.OutputError(f"{path}: expected a folder; vitkit.save writes a single file")
    vit = vitkit.unwrapped(model, path)
    if to != "auto":
        write.refuse_unknown_format(to)
    spec, _ = vitkit.as_saved(vit, path)
    origin = vit.origin
    if origin is None:
        origin = Origin(source="", format=OWN_FORMAT, preprocess=default_preprocess(spec))
    names: tuple[str, ...] = ()
    if classes is not None:
        names = vitkit.class_names(classes, path)
    elif len(origin.classes) == spec.num_classes:  # a head that was replaced has other classes
        names = origin.classes
    metadata: dict[str, Any] = {}
    if origin.licence:
        metadata["licence"] = origin.licence
    if origin.classes_assumed and classes is None:
        metadata = with_assumption(metadata)
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
        with suppress(errors.CheckpointError):
            write.prepare_files(checkpoint, to, allow_lossy=False)
            # timm finds the class of a folder by the architecture that it names.
            if to != "timm" or timm_config.timm_architecture(checkpoint.model.spec):
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
    atomic.refuse_existing([card])  # before the weights are written; those refuse their own names
    stored = write.write_checkpoint(checkpoint, folder, to, allow_lossy, {})
    atomic.write_bytes(card, _model_card(checkpoint, folder, name, to, stored).encode())
    return (*stored.files, card)


def _upload(hub: Any, name: str, folder: Path, private: bool, message: str) -> str:
    """Create the repository, upload the folder in one commit, and return the address."""
    # The default client has the login of this machine.
    if hub is None:
        from huggingface_hub import HfApi

        hub = HfApi()
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except catalogue.hub_errors() as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise errors.OutputError(
            f"{name}: cannot be uploaded: {reason}; log in with `hf auth login`, and write the "
            "name as owner/name"
        ) from None
    return f"hf://{name}"


# Model cards: the README of a published checkpoint, with front matter for the Hub.

CARD_LIBRARIES = {"huggingface": "transformers", "timm": "timm"}
"""Format -> the other library that loads a repository of it by its name alone."""
LICENCES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m
bigscience-bloom-rail-1.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear
bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0
cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 creativeml-openrail-m ecl-2.0 epl-1.0 epl-2.0 etalab-2.0
eupl-1.1 eupl-1.2 fair-noncommercial-research-license gpl gpl-2.0 gpl-3.0 intel-research isc
lgpl lgpl-2.1 lgpl-3.0 mit mpl-2.0 ms-pl ncsa odbl odc-by openmdw-1.0 openrail openrail++
osl-3.0 unknown unlicense wtfpl zlib
"""
"""Licences that the Hub knows; any other is `other` with a name of its own
(https://huggingface.co/docs/hub/repositories-licenses)."""
MOST_CLASSES = 20
"""Class names that a card lists; the file has all."""


def _model_card(
    checkpoint: Checkpoint, folder: Path, name: str, to: str, stored: write.WrittenCheckpoint
) -> str:
    """Return the README: front matter for the Hub, then the checkpoint's metadata as text."""
    from huggingface_hub import ModelCard, ModelCardData  # here: it takes most of a second

    spec, preprocess = stored.spec, checkpoint.preprocess
    task = "image-feature-extraction"
    if spec.num_classes:
        task = "image-classification"
    # "Apache 2.0" -> "apache-2.0", as the Hub writes it.
    licence = "-".join(str(checkpoint.metadata.get("licence", "")).lower().split())
    other = licence if licence not in LICENCES.split() else ""
    data = ModelCardData(
        license="other" if other else licence or None,
        license_name=other or None,
        library_name=CARD_LIBRARIES.get(to, "vitkit"),
        pipeline_tag=task,
        tags=["vitkit", "vision-transformer"],
    )
    timm_address = ""
    # Without an architecture of its registry, timm cannot load the folder by its name.
    if to == "timm" and timm_config.timm_architecture(spec):
        timm_address = f"hf-hub:{name}" if name else f"local-dir:{folder}"
    size = _by(preprocess.image_size)
    ratio = f"{preprocess.crop_ratio:g}"
    template = resources.files("vitkit.weights").joinpath("model_card.md")
    card = ModelCard.from_template(
        data,
        template_str=template.read_text(encoding="utf-8"),
        name=name or folder,
        address=f"hf://{name}" if name else folder,
        timm_address=timm_address,
        to=to,
        task=task,
        spec=spec,
        preprocess=preprocess,
        millions=sum(map(torch.numel, checkpoint.model.parameters())) / 1e6,
        blocks=messages.plural(spec.depth, "block"),
        head=messages.plural(spec.num_classes, "class") if spec.num_classes else "no head",
        resizing={
            "squash": f"squashed to {size}",
            "crop": f"the centre {size} of a shorter side resized by 1 / {ratio}",
            "squash-crop": f"squashed to 1 / {ratio} of its size, the centre {size}",
        }[preprocess.fit],
        lists=_lists(checkpoint, stored),
        by=_by,
        numbers=lambda values: ", ".join(map("{:g}".format, values)),
        # as Python and the shell write it: a folder's name may hold quotes
        quoted=lambda text: json.dumps(str(text), ensure_ascii=False),
        shell=lambda text: shlex.quote(str(text)),
    )
    return str(card)


def _lists(checkpoint: Checkpoint, stored: write.WrittenCheckpoint) -> dict[str, list[str]]:
    """Return title -> lines of the lists of a card; those without lines are not shown."""
    metadata, classes = checkpoint.metadata, list(checkpoint.classes)
    if len(classes) > MOST_CLASSES:
        more = len(classes) - MOST_CLASSES
        classes = [*classes[:MOST_CLASSES], f"... and {more} more, in the file"]
    assumed = ""
    if checkpoint.classes_assumed:
        assumed = " (assumed: those of ImageNet-1k)"
    return {
        f"Classes{assumed}": classes,
        "Metrics": _pairs(metadata.get("metrics")),
        "Training": _pairs(metadata.get("recipe")),
        "Data": _pairs(metadata.get("data")),
        "Changes": [*texts(metadata, "adapted"), *map(str, stored.steps)],
    }


def _pairs(values: object) -> list[str]:
    """Return `key: value` for each value of a mapping that is set."""
    if not isinstance(values, Mapping):
        return []
    shown = {key: f"{v:.4g}" if isinstance(v, float) else v for key, v in values.items()}
    return [f"{key}: {value}" for key, value in shown.items() if value is not None]


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} pixels"

"""Write a checkpoint as a folder with a model card, or upload that to the Hugging Face Hub."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.errors import CheckpointError, MissingExtraError, OutputError
from vitkit.io.atomic import refuse_existing, write_bytes
from vitkit.io.results import nonempty_path
from vitkit.messages import plural
from vitkit.models.interface.pretrained import Origin, default_preprocess
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.catalogue import with_assumption
from vitkit.weights.checkpoint import Checkpoint, Hub, texts
from vitkit.weights.download_weights import hub_errors
from vitkit.weights.formats.format import OWN_FORMAT, Step
from vitkit.weights.formats.timm_config import timm_architecture
from vitkit.weights.formats.vitkit import as_saved, class_names, unwrapped
from vitkit.weights.write import (
    FILE_ENDINGS,
    prepare_files,
    refuse_unknown_format,
    write_checkpoint,
)


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
    text = _model_card(checkpoint, name or str(folder), to, stored.spec, stored.steps, bool(name))
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


# Model cards: the README of a published checkpoint, with front matter for the Hub.

CARD_LIBRARIES = {"huggingface": "transformers", "timm": "timm"}
"""Format -> the other library that loads a repository of it by its name alone."""
LICENCES = frozenset(
    [
        "afl-3.0",
        "agpl-3.0",
        "apache-2.0",
        "apple-amlr",
        "apple-ascl",
        "artistic-2.0",
        "bigcode-openrail-m",
        "bigscience-bloom-rail-1.0",
        "bigscience-openrail-m",
        "bsd",
        "bsd-2-clause",
        "bsd-3-clause",
        "bsd-3-clause-clear",
        "bsl-1.0",
        "c-uda",
        "cc",
        "cc-by-2.0",
        "cc-by-2.5",
        "cc-by-3.0",
        "cc-by-4.0",
        "cc-by-nc-2.0",
        "cc-by-nc-3.0",
        "cc-by-nc-4.0",
        "cc-by-nc-nd-3.0",
        "cc-by-nc-nd-4.0",
        "cc-by-nc-sa-2.0",
        "cc-by-nc-sa-3.0",
        "cc-by-nc-sa-4.0",
        "cc-by-nd-4.0",
        "cc-by-sa-3.0",
        "cc-by-sa-4.0",
        "cc0-1.0",
        "creativeml-openrail-m",
        "ecl-2.0",
        "epl-1.0",
        "epl-2.0",
        "etalab-2.0",
        "eupl-1.1",
        "eupl-1.2",
        "fair-noncommercial-research-license",
        "gpl",
        "gpl-2.0",
        "gpl-3.0",
        "intel-research",
        "isc",
        "lgpl",
        "lgpl-2.1",
        "lgpl-3.0",
        "mit",
        "mpl-2.0",
        "ms-pl",
        "ncsa",
        "odbl",
        "odc-by",
        "openmdw-1.0",
        "openrail",
        "openrail++",
        "osl-3.0",
        "unknown",
        "unlicense",
        "wtfpl",
        "zlib",
    ]
)
"""Licences that the Hub knows; any other is `other` with a name of its own
(https://huggingface.co/docs/hub/repositories-licenses)."""


def _model_card(
    checkpoint: Checkpoint,
    name: str,
    to: str,
    spec: ViTSpec,
    steps: Sequence[Step],
    on_hub: bool = True,
) -> str:
    """Return the README: front matter for the Hub, then the checkpoint's metadata as text."""
    use = list(_snippets(name, to, spec, on_hub))
    body = _body(checkpoint, name, spec, use, list(map(str, steps)))
    return "\n".join([*_front_matter(checkpoint, to), *body, ""])


def _front_matter(checkpoint: Checkpoint, to: str) -> Iterator[str]:
    """Yield the card's YAML block, from which the Hub takes licence, library and task."""
    yield "---"
    # "Apache 2.0" -> "apache-2.0", as the Hub writes it.
    licence = "-".join(str(checkpoint.metadata.get("licence", "")).lower().split())
    if licence in LICENCES:
        yield f"license: {licence}"
    elif licence:
        # Quoted, as the text of a file may mean something in YAML: `[mine]` would be a list.
        yield f"license: other\nlicense_name: {json.dumps(licence)}"
    yield f"library_name: {CARD_LIBRARIES.get(to, 'vitkit')}"
    if checkpoint.model.spec.num_classes:
        yield "pipeline_tag: image-classification"
    else:
        yield "pipeline_tag: image-feature-extraction"
    yield "tags: [vitkit, vision-transformer]"
    yield "---"


def _body(
    checkpoint: Checkpoint, name: str, spec: ViTSpec, use: Sequence[str], steps: Sequence[str]
) -> Iterator[str]:
    """Yield the card's paragraphs."""
    preprocess = checkpoint.preprocess
    count = sum(map(torch.numel, checkpoint.model.parameters()))
    head = "no head"
    if spec.num_classes:
        head = plural(spec.num_classes, "class")
    yield f"# {name}\n"
    yield (
        f"A Vision Transformer: {count / 1e6:.1f} million parameters, "
        f"{plural(spec.depth, 'block')} of width {spec.width}, images of "
        f"{_by(preprocess.image_size)} in patches of {_by(spec.patch_size)}, {head}.\n"
    )
    yield "## Use\n"
    yield from use
    yield "## Images\n"
    yield f"{_preprocessing(checkpoint)}\n"
    title = "Classes"
    if checkpoint.classes_assumed:
        title = "Classes (assumed: those of ImageNet-1k)"
    # An empty list has no heading.
    yield from _list(title, _classes(checkpoint))
    yield from _list("Metrics", _pairs(checkpoint.metadata.get("metrics")))
    yield from _list("Training", _pairs(checkpoint.metadata.get("recipe")))
    yield from _list("Data", _pairs(checkpoint.metadata.get("data")))
    yield from _list("Changes", [*texts(checkpoint.metadata, "adapted"), *steps])


def _snippets(name: str, to: str, spec: ViTSpec, on_hub: bool) -> Iterator[str]:
    """Yield code that uses the model: here, and by the library that reads its format."""
    address = name
    if on_hub:
        address = f"hf://{name}"
    # A predictor gives labels; without a head there are only features.
    if spec.num_classes:
        task = "image-classification"
        yield _python(
            "import vitkit",
            f"predictor = vitkit.Predictor.from_checkpoint({_quoted(address)})\n"
            'predictor(["image.jpg"])',
        )
    else:
        task = "image-feature-extraction"
        yield f"```sh\nvitkit embed {shlex.quote(address)} image.jpg --out features.npz\n```\n"
    if to == "huggingface":
        yield _python(
            "from transformers import pipeline", f'pipeline("{task}", {_quoted(name)})("image.jpg")'
        )
    # Without an architecture of its registry, timm cannot load the folder by its name.
    elif to == "timm" and timm_architecture(spec):
        timm_address = f"hf-hub:{name}" if on_hub else f"local-dir:{name}"
        code = f"timm.create_model({_quoted(timm_address)}, pretrained=True)"
        yield _python("import timm", code)


def _quoted(text: str) -> str:
    """Return a text as Python writes it, in double quotes: a folder's name may hold some."""
    return json.dumps(text, ensure_ascii=False)


def _python(imports: str, code: str) -> str:
    return f"```python\n{imports}\n\n{code}\n```\n"


def _preprocessing(checkpoint: Checkpoint) -> str:
    """Return one sentence on how images are resized and normalised."""
    preprocess = checkpoint.preprocess
    size, ratio = _by(preprocess.image_size), preprocess.crop_ratio
    resizing = {
        "squash": f"squashed to {size}",
        "crop": f"the centre {size} of a shorter side resized by 1 / {ratio:g}",
        "squash-crop": f"squashed to 1 / {ratio:g} of its size, the centre {size}",
    }[preprocess.fit]
    mean = ", ".join(map("{:g}".format, preprocess.mean))
    std = ", ".join(map("{:g}".format, preprocess.std))
    colour = "grey" if preprocess.channels == 1 else "RGB"
    return (
        f"{colour}, {resizing} ({preprocess.interpolation}), divided by 255, mean {mean}, "
        f"std {std}."
    )


def _classes(checkpoint: Checkpoint, most: int = 20) -> list[str]:
    names = list(checkpoint.classes)
    if len(names) <= most:
        return names
    return [*names[:most], f"... and {len(names) - most} more, in the file"]


def _pairs(values: object) -> list[str]:
    """Return `key: value` for each value of a mapping that is set."""
    if not isinstance(values, Mapping):
        return []
    return [f"{key}: {_short(value)}" for key, value in values.items() if value is not None]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _list(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"## {title}\n"
        yield "\n".join(f"- {line}" for line in lines) + "\n"


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} pixels"

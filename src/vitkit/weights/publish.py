"""A checkpoint as a repository on the Hugging Face Hub, with a card that says what it is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vitkit.errors import MissingExtraError, OutputError
from vitkit.weights.writing import refuse_unknown, written

if TYPE_CHECKING:
    from vitkit.weights.checkpoint import Checkpoint

LIBRARIES = {"huggingface": "transformers", "timm": "timm"}
"""Format -> who else loads a repository of it by its name alone."""
LICENCES = {
    "apache 2.0": "apache-2.0",
    "bsd 3-clause": "bsd-3-clause",
    "cc by-nc 4.0": "cc-by-nc-4.0",
}


@runtime_checkable
class Hub(Protocol):
    """What is asked of `huggingface_hub.HfApi`."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> object:
        """Make the repository, if it is not there."""

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> object:
        """One commit with all files of a folder."""


def push_to_hub(
    checkpoint: Checkpoint,
    name: str,
    *,
    to: str,
    private: bool,
    allow_lossy: bool,
    message: str,
    hub: Hub | None,
) -> str:
    """Upload a checkpoint; `Checkpoint.push_to_hub` has the arguments and their defaults."""
    refuse_unknown(to)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "repository"
        written(checkpoint, folder, to, allow_lossy, {})
        (folder / "README.md").write_text(card(checkpoint, name, to), encoding="utf-8")
        return _upload(hub, name, folder, private, message)


def _upload(hub: Hub | None, name: str, folder: Path, private: bool, message: str) -> str:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise MissingExtraError(
            f"pushing {name} needs huggingface_hub; install it: pip install 'vitkit[hub]'"
        ) from None
    hub = HfApi() if hub is None else hub
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, ValueError, OSError) as error:  # a ValueError: a name, or the card
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OutputError(
            f"{name}: cannot be pushed: {reason}; `hf auth login` says who you are, and a name is "
            f"owner/name"
        ) from None
    return f"hf://{name}"


def card(checkpoint: Checkpoint, name: str, to: str) -> str:
    """The README: front matter for the Hub, then what the checkpoint says of itself."""
    return "\n".join([*_front(checkpoint, to), *_body(checkpoint, name, to), ""])


def _front(checkpoint: Checkpoint, to: str) -> Iterator[str]:
    licence = str(checkpoint.metadata.get("licence", ""))
    yield "---"
    if licence:
        yield f"license: {LICENCES.get(licence.lower(), licence.lower())}"
    yield f"library_name: {LIBRARIES.get(to, 'vitkit')}"
    features = checkpoint.model.spec.num_classes == 0
    yield f"pipeline_tag: image-{'feature-extraction' if features else 'classification'}"
    yield "tags: [vitkit, vision-transformer]"
    yield "---"


def _body(checkpoint: Checkpoint, name: str, to: str) -> Iterator[str]:
    spec, pixels = checkpoint.model.spec, checkpoint.preprocess
    count = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    yield f"# {name}\n"
    yield (
        f"A Vision Transformer: {count / 1e6:.1f} million parameters, {spec.depth} blocks of width "
        f"{spec.width}, pictures of {_by(pixels.image_size)} in patches of {_by(spec.patch_size)}, "
        f"{f'{spec.num_classes} classes' if spec.num_classes else 'no head'}.\n"
    )
    yield "## Use\n"
    yield from _snippets(name, to)
    yield "## Pictures\n"
    yield f"{_preprocessing(checkpoint)}\n"
    yield from _list("Classes", _classes(checkpoint))
    yield from _list("Metrics", _pairs(checkpoint.metadata.get("metrics")))
    yield from _list("Training", _pairs(checkpoint.metadata.get("recipe")))
    yield from _list("Data", _pairs(checkpoint.metadata.get("data")))
    yield from _list("Changes", list(checkpoint.metadata.get("adapted", ())))


def _snippets(name: str, to: str) -> Iterator[str]:
    yield (
        "```python\nimport vitkit\n\n"
        f'predictor = vitkit.Predictor.from_checkpoint("hf://{name}")\n'
        'predictor(["picture.jpg"])\n```\n'
    )
    if to == "huggingface":
        yield (
            "```python\nfrom transformers import pipeline\n\n"
            f'pipeline("image-classification", "{name}")("picture.jpg")\n```\n'
        )
    elif to == "timm":
        yield (
            f'```python\nimport timm\n\ntimm.create_model("hf-hub:{name}", pretrained=True)\n```\n'
        )


def _preprocessing(checkpoint: Checkpoint) -> str:
    pixels = checkpoint.preprocess
    size = _by(pixels.image_size)
    fitted = f"squashed to {size}"
    if pixels.fit == "crop":
        fitted = f"the centre {size} of a shorter side resized by 1 / {pixels.crop_ratio:g}"
    mean, std = (", ".join(f"{v:g}" for v in values) for values in (pixels.mean, pixels.std))
    colour = "grey" if pixels.channels == 1 else "RGB"
    return f"{colour}, {fitted} ({pixels.interpolation}), divided by 255, mean {mean}, std {std}."


def _classes(checkpoint: Checkpoint, most: int = 20) -> list[str]:
    names = list(checkpoint.classes)
    more = [f"... and {len(names) - most} more, in the file"] if len(names) > most else []
    return names[:most] + more


def _pairs(values: object) -> list[str]:
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

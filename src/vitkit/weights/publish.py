"""A checkpoint as a repository on the Hugging Face Hub, with a card that says what it is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vitkit.errors import MissingExtraError, OutputError
from vitkit.spec import ViTSpec
from vitkit.weights.converting.write import refuse_unknown, written
from vitkit.weights.formats.timm import config

if TYPE_CHECKING:
    from vitkit.weights.checkpoint import Checkpoint

LIBRARIES = {"huggingface": "transformers", "timm": "timm"}
"""Format -> who else loads a repository of it by its name alone."""
LICENCES = frozenset({
    "afl-3.0", "agpl-3.0", "apache-2.0", "apple-amlr", "apple-ascl", "artistic-2.0",
    "bigcode-openrail-m", "bigscience-bloom-rail-1.0", "bigscience-openrail-m", "bsd",
    "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "bsl-1.0", "c-uda", "cc", "cc-by-2.0",
    "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0",
    "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0",
    "cc-by-nd-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0", "creativeml-openrail-m", "ecl-2.0",
    "epl-1.0", "epl-2.0", "etalab-2.0", "eupl-1.1", "eupl-1.2",
    "fair-noncommercial-research-license", "gpl", "gpl-2.0", "gpl-3.0", "intel-research", "isc",
    "lgpl", "lgpl-2.1", "lgpl-3.0", "mit", "mpl-2.0", "ms-pl", "ncsa", "odbl", "odc-by",
    "openmdw-1.0", "openrail", "openrail++", "osl-3.0", "unknown", "unlicense", "wtfpl", "zlib",
})  # fmt: skip
"""What the Hub takes as a licence; any other is `other` with a name of its own
(https://huggingface.co/docs/hub/repositories-licenses)."""


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
        _, spec, steps, _ = written(checkpoint, folder, to, allow_lossy, {})
        text = card(checkpoint, name, to, spec, [str(step) for step in steps])
        (folder / "README.md").write_text(text, encoding="utf-8")
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


def card(checkpoint: Checkpoint, name: str, to: str, spec: ViTSpec, steps: Sequence[str]) -> str:
    """The README: front matter for the Hub, then what the checkpoint says of itself.

    Args:
        checkpoint: what is pushed.
        name: `owner/name`.
        to: the format of the files.
        spec: the model as the files hold it.
        steps: what was done to it on the way there.
    """
    body = _body(checkpoint, name, to, spec, steps)
    return "\n".join([*_front(checkpoint, to), *body, ""])


def _front(checkpoint: Checkpoint, to: str) -> Iterator[str]:
    yield "---"
    licence = "-".join(str(checkpoint.metadata.get("licence", "")).lower().split())
    if licence:
        listed = licence in LICENCES
        yield f"license: {licence}" if listed else f"license: other\nlicense_name: {licence}"
    yield f"library_name: {LIBRARIES.get(to, 'vitkit')}"
    features = checkpoint.model.spec.num_classes == 0
    yield f"pipeline_tag: image-{'feature-extraction' if features else 'classification'}"
    yield "tags: [vitkit, vision-transformer]"
    yield "---"


def _body(
    checkpoint: Checkpoint, name: str, to: str, spec: ViTSpec, steps: Sequence[str]
) -> Iterator[str]:
    pixels = checkpoint.preprocess
    count = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    yield f"# {name}\n"
    yield (
        f"A Vision Transformer: {count / 1e6:.1f} million parameters, {spec.depth} blocks of width "
        f"{spec.width}, images of {_by(pixels.image_size)} in patches of {_by(spec.patch_size)}, "
        f"{f'{spec.num_classes} classes' if spec.num_classes else 'no head'}.\n"
    )
    yield "## Use\n"
    yield from _snippets(name, to, spec)
    yield "## Images\n"
    yield f"{_preprocessing(checkpoint)}\n"
    title = "Classes (assumed: those of ImageNet-1k)" if checkpoint.classes_assumed else "Classes"
    yield from _list(title, _classes(checkpoint))
    yield from _list("Metrics", _pairs(checkpoint.metadata.get("metrics")))
    yield from _list("Training", _pairs(checkpoint.metadata.get("recipe")))
    yield from _list("Data", _pairs(checkpoint.metadata.get("data")))
    yield from _list("Changes", [*checkpoint.metadata.get("adapted", ()), *steps])


def _snippets(name: str, to: str, spec: ViTSpec) -> Iterator[str]:
    """How it is used, here and by the library that reads its format, if that can compute it."""
    if spec.num_classes:
        yield _python(
            "import vitkit",
            f'predictor = vitkit.Predictor.from_checkpoint("hf://{name}")\n'
            'predictor(["image.jpg"])',
        )
    else:
        yield f"```sh\nvitkit embed hf://{name} image.jpg --out features.npz\n```\n"
    task = "image-classification" if spec.num_classes else "image-feature-extraction"
    if to == "huggingface":
        yield _python(
            "from transformers import pipeline", f'pipeline("{task}", "{name}")("image.jpg")'
        )
    elif to == "timm" and config.architecture(spec):
        yield _python("import timm", f'timm.create_model("hf-hub:{name}", pretrained=True)')


def _python(imports: str, code: str) -> str:
    return f"```python\n{imports}\n\n{code}\n```\n"


def _preprocessing(checkpoint: Checkpoint) -> str:
    pixels = checkpoint.preprocess
    size = _by(pixels.image_size)
    fitted = {
        "squash": f"squashed to {size}",
        "crop": f"the centre {size} of a shorter side resized by 1 / {pixels.crop_ratio:g}",
        "squash-crop": f"squashed to 1 / {pixels.crop_ratio:g} of its size, the centre {size}",
    }[pixels.fit]
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

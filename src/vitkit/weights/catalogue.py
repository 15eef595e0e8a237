"""Published checkpoints by name, and their download.

Names are timm's where timm has one (`vit_base_patch16_224.augreg2_in21k_ft_in1k`), else the source
and its own name (`google/sam/ViT-B_16`); a preset's name alone means the first of its checkpoints.
"""

import csv
import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Literal

from vitkit import errors, messages, other_names
from vitkit.io.untrusted import refuse
from vitkit.models.presets import preset as preset_spec
from vitkit.models.presets import table
from vitkit.spec import Preprocess, ViTSpec

IMAGE_STATISTICS = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "satellite": ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143)),
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
"""Name in the column `images` -> mean and standard deviation of each channel on [0, 1]."""
Terms = Literal["permissive", "non-commercial", "own terms", "not stated"]
TERMS: dict[str, Terms] = {
    "": "not stated",
    "apache-2.0": "permissive",
    "mit": "permissive",
    "cc-by-nc-4.0": "non-commercial",
    "fair-noncommercial-research-license": "non-commercial",
    "apple-amlr": "non-commercial",  # research purposes only
}
"""Licence -> its kind; any other licence has special terms, to be read first."""
PUBLISHED_PICKLES = (".pth", ".pth.tar", ".pt", ".bin")
"""Endings of pickles that are published; others are read as local files only."""


@dataclass(frozen=True)
class CatalogueEntry:
    """One published checkpoint.

    Attributes:
        name: in the catalogue, unique.
        preset: the vitkit model that it is for.
        source: title of the publisher.
        format: format of its file, one of `vitkit.formats()`.
        address: `timm://`, `hf://` or `https://`, as `vitkit.load` takes it.
        licence: as its publisher names it; empty where none is stated.
        classes: K of its head; 0 for none.
        image_size: side of its images, in pixels.
        preprocess: resizing and normalisation of its images, or `None` where only the file has it.
        stated: fields of `ViTSpec` to take from the preset, because the file does not have them.
        sha256: leading hex digits of the file's SHA-256, as far as its publisher states them.
        note: the data that it was trained on.
    """

    name: str
    preset: str
    source: str
    format: str
    address: str
    licence: str
    classes: int
    image_size: int
    preprocess: Preprocess | None
    stated: tuple[str, ...]
    sha256: str
    note: str

    @property
    def spec(self) -> ViTSpec:
        """The preset with this checkpoint's classes and image size."""
        return preset_spec(self.preset, num_classes=self.classes, image_size=self.image_size)

    @property
    def fields(self) -> dict[str, Any]:
        """The keywords with which `vitkit.load(entry.address, ...)` understands the file."""
        spec = self.spec
        return {name: getattr(spec, name) for name in self.stated}

    @property
    def terms(self) -> Terms:
        """The kind of its licence, as a first orientation; the licence itself decides."""
        return TERMS.get(self.licence, "own terms")

    @property
    def pickle(self) -> bool:
        """True for a pickle, which is not fetched without trust."""
        return self.address.endswith(PUBLISHED_PICKLES)


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Return every entry by its name, in the order of the file, which is read at the first call."""
    text = resources.files("vitkit.weights").joinpath("catalogue.tsv").read_text(encoding="utf-8")
    # Lines that begin with # are comments; the first other line names the columns.
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    entries: dict[str, CatalogueEntry] = {}
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        assert row["name"] not in entries, f"catalogue.tsv has {row['name']} twice"
        entries[row["name"]] = _entry(row)
    return MappingProxyType(entries)


def list_models(
    pattern: str | Iterable[str] = "*",
    *,
    pretrained: bool = False,
    exclude_filters: str | Iterable[str] = (),
    include_tags: bool | None = None,
) -> list[str]:
    """Return the names that `create_model` knows, sorted.

    Args:
        pattern: shell-style, such as `"vit_base*"`, or several; a name is listed if one matches.
        pretrained: list only models with published weights.
        exclude_filters: one or several patterns of names to leave out.
        include_tags: list checkpoints, such as `vit_base_patch16_224.augreg_in1k`, in the place of
            their models; default: the value of `pretrained`. Patterns may then name the model or
            the checkpoint.

    >>> list_models("vit_huge_patch??_224")
    ['vit_huge_patch14_224', 'vit_huge_patch16_224', 'vit_huge_patch32_224']
    >>> list_models(["deit3_tiny*", "deit_tiny*"], exclude_filters="*distilled*")
    ['deit_tiny_patch16_224']
    >>> list_models("vit_tiny_patch16_224.*", pretrained=True)
    ['vit_tiny_patch16_224.augreg_in21k', 'vit_tiny_patch16_224.augreg_in21k_ft_in1k']
    """
    included = [pattern or "*"] if isinstance(pattern, str) else list(pattern)
    excluded = [exclude_filters] if isinstance(exclude_filters, str) else list(exclude_filters)
    presets_with_weights = {entry.preset for entry in catalogue().values()}
    tagged = pretrained if include_tags is None else include_tags
    # Name of a list entry -> name of its model.
    names = dict(zip(table(), table(), strict=True))
    if tagged:
        names |= {name: entry.preset for name, entry in catalogue().items()}
    listed: list[str] = []
    for name, model in names.items():
        has_weights = model in presets_with_weights
        # Models with weights are listed by their checkpoints, or by themselves.
        is_left_out = tagged and name == model if has_weights else pretrained
        matches = functools.partial(_matches, name, model)
        if not is_left_out and matches(included or ["*"]) and not matches(excluded):
            listed.append(name)
    return sorted(listed)


def _matches(name: str, model: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(model, pattern) for pattern in patterns)


def find(name: str) -> CatalogueEntry:
    """Return the entry of this name; for a preset's name, its first.

    Raises:
        SettingError: no such entry, with those that are nearest; a model without published weights.
    """
    entries = catalogue()
    name = other_names.usual_name(name, table())
    if name in entries:
        return entries[name]
    of_preset = published(name)
    if of_preset:
        return of_preset[0]  # the default comes first
    model, _, tag = name.partition(".")
    tags = [other.partition(".")[2] for other in entries if other.startswith(f"{model}.")]
    problem = f"there is no checkpoint {name!r}{suggested(name)}"
    if tags:
        near = messages.did_you_mean(tag, tags)
        problem = f"{model} has no checkpoint {tag!r}{near}; it has {', '.join(tags)}"
    elif model in table():
        problem = f"no weights are published for {model}"
    raise errors.SettingError(f"{problem}; `vitkit models --pretrained` lists all")


def suggested(name: str) -> str:
    """Return a hint with the names that are nearest, empty if none is near."""
    entries = catalogue()
    presets = {entry.preset: None for entry in entries.values()}
    return messages.did_you_mean(name, [*entries, *presets], count=3)


def published(preset: str) -> list[CatalogueEntry]:
    """Return the checkpoints of a preset, the default first; none where nothing is published."""
    return [entry for entry in catalogue().values() if entry.preset == preset]


def known(path: str | Path) -> CatalogueEntry | None:
    """Return the entry of a name or an address; `None` for files and unlisted addresses.

    A file or a folder of that name goes first. Nothing is fetched.
    """
    address = str(path)
    if os.path.exists(address):
        return None
    name = address.removeprefix("timm://")
    is_listed = name in catalogue() or bool(published(name))
    # A name with a slash, such as google/sam/ViT-B_16, is no model of timm.
    if is_listed and (name == address or "/" not in name):
        return find(name)
    return _by_address().get(address)


@functools.cache
def _by_address() -> dict[str, CatalogueEntry]:
    # Two models of timm may be the same file: the first in the catalogue is the one meant.
    return {entry.address: entry for entry in reversed([*catalogue().values()])}


def _entry(row: Mapping[str, str]) -> CatalogueEntry:
    """Return the entry of a line, column -> text."""
    image_size = int(row["pixels"])
    preprocess = None
    # An empty column: the file itself has its preprocessing, or nothing is published on it.
    if row["images"]:
        mean, std = IMAGE_STATISTICS[row["images"]]
        transform = {
            "image_size": image_size,
            "mean": mean,
            "std": std,
            "interpolation": row["interpolation"],
            "fit": row["fit"],
            "crop_ratio": float(row["crop_ratio"]),
        }
        preprocess = Preprocess.from_json(transform)
    return CatalogueEntry(
        name=row["name"],
        preset=row["preset"],
        source=row["source"],
        format=row["format"],
        address=row["address"],
        licence=row["licence"],
        classes=int(row["classes"]),
        image_size=image_size,
        preprocess=preprocess,
        stated=tuple(row["stated"].split()),  # separated by spaces
        sha256=row["sha256"],
        note=row["note"],
    )


# Addresses of pretrained weights, and the local file that each of them is downloaded to.
#
#     hf://owner/name                  a repository on the Hugging Face Hub
#     hf://owner/name@revision         at a branch, tag or commit
#     hf://owner/name:path/in/repo     one file of it; `@revision` goes before the colon
#     timm://name                      the checkpoint of that name in timm; as a rule hf://timm/name
#     https://host/path/file.npz       a file on the web
#
# `huggingface_hub` downloads, resumes, checks and caches files of the Hub, `io.download` all
# others. Pickles are not even fetched without trust.

HUB_ADDRESS = re.compile(
    r"(?:hf://(?P<name>[\w.-]+/[\w.-]+)|timm://(?P<timm>[\w.-]+))"
    r"(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w.+/-]+))?"
)
ADDRESS_SCHEMES = ("hf://", "timm://", "https://", "http://")
DOCUMENTS = ("config.json", "preprocessor_config.json")
"""Files of a repository that describe its weights."""
SAFE_FILES = [
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "model.npz",
    *DOCUMENTS,
]
"""Files fetched from a repository; many also have the same weights under other names."""
PICKLED_FILES = ["pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"]
"""Pickles, fetched only with trust, from a repository without other weights."""
WEIGHTS_ENDINGS = (".safetensors", ".npz", *PUBLISHED_PICKLES)
HUB_REASONS = {
    "RevisionNotFoundError": "has no such revision",
    "RepositoryNotFoundError": (
        "does not exist, or is private; log in with `hf auth login` to read your own"
    ),
    "LocalEntryNotFoundError": (
        "not in the cache, and the Hub cannot be reached; check the network and HF_HUB_OFFLINE, "
        "or pass a file"
    ),
}
"""Exception of `huggingface_hub` -> what it means for an address."""


def is_address(path: str | Path) -> bool:
    """Return True for an address on the Hub or on the web, False for a file."""
    return str(path).startswith(ADDRESS_SCHEMES)


def locate(name: str | Path, *, trust_pickle: bool = False) -> tuple[Path, CatalogueEntry | None]:
    """Return the local file or folder of a checkpoint, and its entry in the catalogue if any.

    Args:
        name: a file, a folder, an address, or a name in the catalogue.
        trust_pickle: also fetch pickles: a `.pth` file, or the `.bin` of a repository that has
            nothing else.

    Returns:
        The file, or the folder of a repository; its entry.

    Raises:
        CheckpointError: no name, or an empty one; no such address, not reachable, another digest.
        OutputError: the cache cannot be written.
    """
    if not isinstance(name, str | os.PathLike) or not str(name):
        kind = f"a {type(name).__name__} is not the path, the address or the name of a checkpoint"
        if not str(name):
            kind = "the name of the weights is empty"
        raise errors.CheckpointError(f"{kind}; vitkit.save and model.save_pretrained write one")
    # The catalogue has facts that the file lacks, for its names and addresses.
    entry = known(name)
    if entry is not None:
        return _fetch(entry.address, entry.sha256, trust_pickle), entry
    if is_address(name):
        return _fetch(str(name), "", trust_pickle), None
    path = Path(name)
    is_bare = path.name == str(name) and not path.name.endswith(WEIGHTS_ENDINGS)
    problem = (
        f"no such file or folder, and no published checkpoint has that name{suggested(str(name))}; "
        "`vitkit models --pretrained` lists all"
    )
    refuse(name, {problem: is_bare and not os.path.lexists(path)})
    return path, None


def _fetch(address: str, sha256: str, trust_pickle: bool) -> Path:
    """Fetch an address; the catalogue has digests of files on the web."""
    if not address.startswith(("https://", "http://")):
        return _from_hub(address, trust_pickle)
    # as the Hub's link to a file, .../resolve/main/model.safetensors?download=true
    _check_ending(address, re.split(r"[?#]", address)[0], trust_pickle)
    # by its name: a reader of local files needs no connections
    path: Path = resolve_name("vitkit.io.download:download")(address, sha256=sha256)
    return path


def _from_hub(address: str, trust_pickle: bool) -> Path:
    """Return the folder of a repository, or the one file of it that the address names."""
    match = HUB_ADDRESS.fullmatch(address)
    parts = [] if match is None else (match["file"] or ".").split("/")
    # A file must be inside the repository: neither absolute nor with "..".
    if match is None or not parts[0] or ".." in parts:
        raise errors.CheckpointError(
            f"{address}: expected hf://owner/name, hf://owner/name@revision, "
            f"hf://owner/name:file, timm://name or https://host/file"
        )
    # timm has its own organisation on the Hub
    name, revision, file = (
        match["name"] or f"timm/{match['timm']}",
        match["revision"],
        match["file"],
    )
    if file:
        _check_ending(address, file, trust_pickle)
        # config.json and the like lie beside the file, in its own folder.
        documents = [str(Path(file).parent / document) for document in DOCUMENTS]
        path = _snapshot(address, name, revision, [file, *documents]) / file
        refuse(address, {"no such file in the repository or in the cache": not path.is_file()})
        return path
    # Pickles are fetched in a second step, and only where there is nothing else.
    folder = _snapshot(address, name, revision, SAFE_FILES)
    if [*folder.glob("model*.safetensors"), *folder.glob("model.npz")]:
        return folder
    problem = (
        f"has no model.safetensors; name one of its files ({address}:FILE), or, if you trust the "
        f"source of its pickle, {messages.TRUST}"
    )
    refuse(address, {problem: not trust_pickle})
    return _snapshot(address, name, revision, [*SAFE_FILES, *PICKLED_FILES])


def _check_ending(address: str, file: str, trust_pickle: bool) -> None:
    """Refuse other files than weights, and pickles without trust, before anything is fetched."""
    untrusted = (
        f"is a pickle, and loading a pickle can run code; if you trust the source, {messages.TRUST}"
    )
    problems = {
        f"expected a name that ends in one of {', '.join(WEIGHTS_ENDINGS)}": (
            not file.endswith(WEIGHTS_ENDINGS)
        ),
        untrusted: file.endswith(PUBLISHED_PICKLES) and not trust_pickle,
    }
    refuse(address, problems)


def _snapshot(address: str, name: str, revision: str | None, patterns: list[str]) -> Path:
    """Return the folder of a repository in the Hub's cache, with its files of these patterns."""
    from huggingface_hub import snapshot_download  # here: it takes most of a second

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except hub_errors() as error:
        first = str(error).strip().partition("\n")[0] or repr(error)
        reason = f"cannot be downloaded: {first}; try again, or pass a file"
        for kind in type(error).__mro__:
            reason = HUB_REASONS.get(kind.__name__, reason)
        raise errors.CheckpointError(f"{address}: {reason}") from None


def hub_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions of the Hub's client, for an `except`.

    Its own, those of its HTTP library (httpx or httpx2, by its version), `OSError`, and
    `ValueError` for a wrong name or a wrong model card.
    """
    from huggingface_hub.errors import HfHubHTTPError

    # The error of the HTTP library is a base of the client's own.
    return (HfHubHTTPError, *HfHubHTTPError.__bases__, OSError, ValueError)

"""Writes docs/weights.md from the catalogue: `python scripts/weights_table.py`."""

from __future__ import annotations

import tomllib
from pathlib import Path

from vitkit.weights.catalogue import SOURCES, CatalogueEntry, catalogue

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "weights.md"
DATA = tomllib.loads(
    (ROOT / "src" / "vitkit" / "weights" / "catalogue.toml").read_text(encoding="utf-8")
)
INTRODUCTION = """# Published weights

The {count} checkpoints that vitkit knows by name; `vitkit models --pretrained 'vit_base*'` lists
them with their addresses. A model's name alone means the first of its checkpoints.
`scripts/weights_table.py` writes this page from `src/vitkit/weights/catalogue.toml`.

## Addresses

| address | what it is |
| --- | --- |
| `hf://owner/name` | a repository on the Hugging Face Hub |
| `hf://owner/name@revision` | the same at a branch, tag or commit |
| `hf://owner/name@revision:path/file.npz` | one file of it; `@revision` may be left out |
| `timm://name` | what timm calls so, as a rule `hf://timm/name` |
| `https://host/path/file.npz` | a file on the web |

Of a repository, `model.safetensors` (or its shards, or `model.npz`) and its two descriptions are
fetched. Pickles (`.pth`, `.bin`) are neither fetched nor read without `--trust-pickle`.

The Hub's files lie in `huggingface_hub`'s cache, the others in `$VITKIT_CACHE`, else in
`$XDG_CACHE_HOME/vitkit`, else in `~/.cache/vitkit`. A download that broke off is continued where
the server still has the same file. It counts only once its length is right and, where a part of
the SHA-256 is published, that too. With `HF_HUB_OFFLINE=1` the network is left alone, and what is
in the caches is used.

## Class names

A head of 1,000 classes whose file names none gets ImageNet-1k's names, in the order of the sorted
WordNet ids (`src/vitkit/weights/imagenet.tsv`, from torchvision's and timm's lists). It is an
assumption: `load` puts it into `metadata["warnings"]`, and `inspect`, `predict` and `convert` say
it in one line. Names that a file has are kept, and other heads get none.

## Files of others

A training checkpoint (`.pth`, `.pth.tar`, `.ckpt`) may hold the weights under any entry
(`state_dict`, `model_state_dict`, `model`, `teacher`, ...). The names may have a common prefix
(`module.`, `model.`, `student.vit.`, ...): it is taken off where a known layout lies behind it.
What lies outside of it, such as a head or a second network, is left out and listed in
`metadata["warnings"]`; two ViTs in one file are refused. Unknown or missing tensors are refused,
unless `strict=False` (`--allow-partial`) says to go on without them.

## What was checked

- timm's and torchvision's lines are held against timm 1.0.31 and torchvision 0.28 by
  `tests/weights/test_catalogue.py`: address, classes, pixels, images, licence.
- The other lines are from the pages named below. Nothing of theirs was fetched: that an address
  still answers, and what the file holds, is not verified.
- Of no file is the whole SHA-256 known here. torchvision and DeiT put its first eight hex digits
  into the name of the file; those are checked after a download. Of Google's, DINOv2's and I-JEPA's
  files nothing is published to check against, so their length alone is.
- A licence is what the publisher states, and nothing where none is stated. Read it before use.

Images: mean and standard deviation by name, then the filter, then the part of the shorter side
that the crop keeps, or "squash".

| name | mean | standard deviation |
| --- | --- | --- |
{images}
"""
HEADER = """
| checkpoint | classes | pixels | images | licence | trained on |
| --- | ---: | ---: | --- | --- | --- |
"""


def page() -> str:
    """The whole document."""
    named = (
        f"| {name} | {', '.join(map(str, mean))} | {', '.join(map(str, std))} |"
        for name, (mean, std) in DATA["images"].items()
    )
    said = INTRODUCTION.format(count=len(catalogue()), images="\n".join(named))
    return "\n".join([said, *(section(name) for name in SOURCES)])


def section(name: str) -> str:
    """One source: heading, page, a row for each of its checkpoints."""
    facts = DATA[name]
    entries = [entry for entry in catalogue().values() if entry.source == facts["title"]]
    said = f"From {facts['page']}. Format `{facts['format']}`."
    return f"## {facts['title']}\n\n{said}\n{HEADER}" + "".join(map(row, entries))


def row(entry: CatalogueEntry) -> str:
    """One checkpoint."""
    cells = (
        f"`{entry.name}`",
        entry.classes,
        entry.image_size,
        images(entry),
        entry.licence or "not stated",
        entry.note,
    )
    return f"| {' | '.join(map(str, cells))} |\n"


def images(entry: CatalogueEntry) -> str:
    """`half, bicubic, 0.9`."""
    given = entry.preprocess
    if given is None:
        return "as its file says"
    name = next(
        name
        for name, (mean, std) in DATA["images"].items()
        if (tuple(mean), tuple(std)) == (given.mean, given.std)
    )
    fit = "squash" if given.fit == "squash" else f"{given.crop_ratio:.3g}"
    return f"{name}, {given.interpolation}, {fit}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

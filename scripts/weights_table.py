"""Write docs/weights.md from the catalogue: `python scripts/weights_table.py`."""

from __future__ import annotations

from pathlib import Path

from vitkit.weights.catalogue import IMAGE_STATISTICS, CatalogueEntry, catalogue

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "weights.md"
PAGES = {
    "timm": "timm 1.0.31, models/{vision_transformer,vision_transformer_hybrid,deit,eva}.py",
    "torchvision": "torchvision 0.28, models/vision_transformer.py",
    "Google": "google-research/vision_transformer, README.md; SAM's from timm",
    "DeiT": "facebookresearch/deit, README_deit.md",
    "DINOv2": "facebookresearch/dinov2, README.md",
    "Hugging Face": "the model cards of google and facebook on the Hub",
}
"""Publisher -> the page that its lines are from."""
INTRODUCTION = """# Published weights

vitkit knows {count} checkpoints by name; `vitkit models --pretrained 'vit_base*'` lists them with
their addresses. The name of a model alone means the first of its checkpoints.
`scripts/weights_table.py` writes this page from `src/vitkit/weights/catalogue.tsv`.

## Addresses

| address | meaning |
| --- | --- |
| `hf://owner/name` | a repository on the Hugging Face Hub |
| `hf://owner/name@revision` | the same at a branch, tag or commit |
| `hf://owner/name@revision:path/file.npz` | one file of it; `@revision` is optional |
| `timm://name` | a checkpoint of timm, usually `hf://timm/name` |
| `https://host/path/file.npz` | a file on the web |

From a repository, vitkit downloads `model.safetensors` (or its shards, or `model.npz`) and the two
JSON files that describe it. It downloads and reads pickles (`.pth`, `.bin`) only with
`--trust-pickle`.

## Downloads and caches

`huggingface_hub` downloads, resumes and checks files of the Hub, and keeps them in its own cache;
`HF_HOME` and `HF_ENDPOINT` work as it has them. Other files are in `$VITKIT_CACHE`, else in
`$XDG_CACHE_HOME/vitkit`, else in `~/.cache/vitkit`. They are downloaded whole, and used only if
their length is right and, where a part of their SHA-256 is published, the digest too; a file that
was damaged since is downloaded again. With `HF_HUB_OFFLINE=1` vitkit uses the caches and no
network.

## Class names

A head of 1,000 classes without class names gets those of ImageNet-1k, in the order of the sorted
WordNet ids (`src/vitkit/weights/imagenet.tsv`, from the lists of torchvision and timm). This is an
assumption: `load` adds it to `metadata["warnings"]`, and `inspect`, `predict` and `convert` print
it in one line. Class names in the file are kept, and other heads get none.

## Checkpoints of other programs

A training checkpoint (`.pth`, `.pth.tar`, `.ckpt`) may hold the state dict under any entry
(`state_dict`, `model_state_dict`, `model`, `teacher`, ...). vitkit removes a common prefix of the
names (`module.`, `model.`, `student.vit.`, ...) if the rest matches a known layout. It leaves out
other tensors, such as a head or a second network, and lists them in `metadata["warnings"]`. It
refuses files with two ViTs. It refuses unknown or missing tensors, unless `strict=False`
(`--allow-partial`) is given.

## Verified and unverified facts

- `tests/weights/test_catalogue.py` compares the rows of timm and torchvision with timm 1.0.31 and
  torchvision 0.28: address, classes, image size, preprocessing, licence.
- The other rows are from the pages named below. Their files were not downloaded: whether an address
  still works, and what the file holds, is not verified.
- vitkit does not know the whole SHA-256 of any file. torchvision and DeiT put its first eight hex
  digits into the file name; vitkit checks them after a download. For the files of Google, DINOv2
  and I-JEPA nothing is published; vitkit checks the length only.
- The licence is the one that the publisher states. Read it before use. `vitkit models --pretrained
  --licence permissive` lists the weights under Apache-2.0 or MIT; the other kinds are
  `non-commercial`, `own terms` and `not stated`. What you train from scratch is yours.
- None of these addresses asks for a login, as far as their publishers state. Meta's own
  repositories of DINOv3 (`facebook/dinov3-*`) do: accept their terms on the Hub and set `HF_TOKEN`.
  The copies of timm, which are listed here, do not (facebookresearch/dinov3, issue 145).

## Preprocessing

The column "preprocessing" has the name of mean and standard deviation, the resampling filter, and
the part of the shorter side that the centre crop keeps, or "squash".

| name | mean | standard deviation |
| --- | --- | --- |
{images}
"""
HEADER = """
| checkpoint | classes | image size | preprocessing | licence | kind | trained on |
| --- | ---: | ---: | --- | --- | --- | --- |
"""


def page() -> str:
    """Return the whole page."""
    named = (
        f"| {name} | {', '.join(map(str, mean))} | {', '.join(map(str, std))} |"
        for name, (mean, std) in IMAGE_STATISTICS.items()
    )
    introduction = INTRODUCTION.format(count=len(catalogue()), images="\n".join(named))
    return "\n".join([introduction, *map(section, PAGES)])


def section(source: str) -> str:
    """Return one source: heading, page, a row for each of its checkpoints."""
    entries = [entry for entry in catalogue().values() if entry.source == source]
    origin = f"Source: {PAGES[source]}. Format `{entries[0].format}`."
    return f"## {source}\n\n{origin}\n{HEADER}" + "".join(map(row, entries))


def row(entry: CatalogueEntry) -> str:
    """Return the row of one checkpoint."""
    cells = (
        f"`{entry.name}`",
        entry.classes,
        entry.image_size,
        images(entry),
        entry.licence or "not stated",
        entry.terms,
        entry.note,
    )
    return f"| {' | '.join(map(str, cells))} |\n"


def images(entry: CatalogueEntry) -> str:
    """Return the preprocessing of a checkpoint, such as `half, bicubic, 0.9`."""
    given = entry.preprocess
    if given is None:
        return "as in its file"
    name = next(
        name
        for name, statistics in IMAGE_STATISTICS.items()
        if statistics == (given.mean, given.std)
    )
    fit = "squash" if given.fit == "squash" else f"{given.crop_ratio:.3g}"
    return f"{name}, {given.interpolation}, {fit}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

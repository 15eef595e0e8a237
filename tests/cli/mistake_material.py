"""The folders and files of tests/cli/mistakes.tsv, made once."""

import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

import vitkit
from vitkit import cli

TINY = {"image_size": 16, "patch_size": 8, "width": 32, "depth": 1, "num_heads": 2, "mlp_width": 32}
FAST = (
    " ".join(f"--spec.{name.replace('_', '-')} {value}" for name, value in TINY.items())
    + " --epochs 1 --warmup-epochs 0 --batch-size 4 --amp off --workers 0 --device cpu --quiet"
    " --no-plots --no-report"
)
"""Flags of a run of a second, which stand in the table as FAST."""
FILES = {
    "badkey.yaml": "epochs: 1\nlearningrate: 1e-3\n",
    "badsyntax.yaml": "epochs: 1\nlr: [1\n",
    "badspec.yaml": "spec: 3\n",
    "fiverecipe.yaml": "recipe: 5\n",
    "badtype.yaml": "epochs: many\n",
    "badlist.yaml": "- epochs\n",
    "tab.yaml": "\tepochs: 1\n",
    "range.yaml": "epochs: 1\nbatch_size: 0\n",
    "twice.yaml": "epochs: 1\nepochs: 2\n",
    "badrecipe.yaml": "recipe: digit\n",
    "empty.yaml": "",
    "nocol.csv": "file,class\ntwo/a/0.png,a\ntwo/b/0.png,b\n",
    "nohead.csv": "two/a/0.png,a\ntwo/b/0.png,b\n",
    "headeronly.csv": "path,label\n",
    "empty.csv": "",
    "nolabel.csv": "path,label\ntwo/a/0.png,\ntwo/b/0.png,b\n",
    "h.py": "print('hello')\n",
    "notes.txt": "hello\n",
    "not.safetensors": "hello",
    "not.npz": "hello",
    "not.pth": "hello",
    "not.parquet": "hello",
    "data.json": "{}",
    "image.png": "words, not pixels",
}
"""Text files by name."""
IMAGES = [f"two/{label}/{number}.png,{label}" for label in "ab" for number in range(10)]
TABLES = {
    "ok.csv": ["path,label", *IMAGES],
    "missing.csv": ["path,label", "two/a/99.png,a", *IMAGES],
    "badsplit.csv": ["path,label,split", *(f"{row},first" for row in IMAGES)],
}
"""Lists of the images of `two`."""


def noise(path: Path, number: int, size: tuple[int, int] = (20, 24)) -> None:
    """Write an image of noise; each number gives another one."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def make_material(root: Path) -> None:
    """Write everything into `root`, which is the working folder of the commands."""
    for name, text in FILES.items():
        (root / name).write_text(text, encoding="utf-8")
    for name, rows in TABLES.items():
        (root / name).write_text("\n".join(rows), encoding="utf-8")
    sets = {
        "two": ("a", "b"), "one": ("only",), "names": ("Cat", "cat"), "sp aces": ("a", "b"),
        "broken": ("a", "b"), "dangling": ("a", "b"), "other": ("a", "c"), "flat": (".",),
        "splits": ("train/a", "train/b", "val/a", "val/dog"), "onlytest": ("test/a", "test/b"),
        "small": ("a", "b"),
    }  # fmt: skip
    for number, (name, classes) in enumerate(sets.items()):
        for offset, label in enumerate(classes):
            for image in range(3 if name == "small" else 10):
                noise(root / name / label / f"{image}.png", 1000 * number + 100 * offset + image)
    (root / "empty").mkdir()
    (root / "folders" / "a" / "b").mkdir(parents=True)
    (root / "heic" / "a").mkdir(parents=True)
    (root / "heic" / "a" / "x.heic").touch()
    whole = root / "broken" / "a" / "0.png"
    (root / "broken" / "a" / "bad.png").write_bytes(whole.read_bytes()[:300])
    (root / "broken" / "b" / "zero.jpg").touch()
    (root / "dangling" / "a" / "x.png").symlink_to("nowhere.png")
    for label in "ab":
        (root / "links" / label).mkdir(parents=True)
        for image in range(3):
            target = root / "two" / label / f"{image}.png"
            (root / "links" / label / f"{image}.png").symlink_to(target)
    bytes_folder = os.fsencode(root / "bytes") + b"/caf\xe9"
    os.makedirs(bytes_folder)
    os.link(root / "two/a/0.png", bytes_folder + b"/0.png")
    (root / "bytes" / "b").mkdir()
    os.link(root / "two/b/0.png", root / "bytes" / "b" / "0.png")
    (root / "tars").mkdir()
    with tarfile.open(root / "tars" / "x-0.tar", "w") as archive:
        archive.add(root / "two/a/0.png", "0.png")
    _weights(root)


def _weights(root: Path) -> None:
    """Write a run, a stopped one, and weights with something wrong."""
    assert cli.run(["train", "two", *FAST.split(), "--output", "ra"]) == 0
    (root / "filled").mkdir()
    (root / "filled" / "keep.txt").write_text("mine")
    tensors = {"head.weight": torch.zeros(2, 3), "strange": torch.zeros(4)}
    save_file(tensors, root / "strange.safetensors")
    torch.save({"a": torch.zeros(1)}, root / "net.pth")
    model = vitkit.create_model("vit_tiny_patch16_224", num_classes=4, **TINY)
    preprocess = vitkit.Preprocess(image_size=16)
    vitkit.save(root / "four.safetensors", model, preprocess=preprocess, classes=[*"abcd"])
    vitkit.save(root / "nohead.safetensors", vitkit.create_model(
        "vit_tiny_patch16_224", **{**TINY, "num_classes": 0}), preprocess=preprocess)  # fmt: skip
    whole = (root / "four.safetensors").read_bytes()
    (root / "cut.safetensors").write_bytes(whole[: len(whole) // 2])

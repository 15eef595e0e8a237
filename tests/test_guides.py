"""The pages of docs/: every Python and console block runs, in order, or says why not.

Only training is made shorter: two steps of a model of one block.
"""

import doctest
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<kind>[^\n`]*)\n(?P<text>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)
RUN = ("python", "console", "yaml")
SHORT: dict[str, Any] = {
    "spec": {"image_size": 32, "patch_size": 8, "width": 32, "depth": 1, "num_heads": 2,
             "mlp_width": 64},
    "batch_size": 16, "max_steps": 2, "warmup_epochs": 0, "workers": 0, "report": False,
    "plots": False,
}  # fmt: skip
FLAGS = [
    "--spec.depth", "1", "--batch-size", "16", "--warmup-epochs", "0", "--workers", "0", "--quiet",
    "--no-report", "--no-plots",
]  # fmt: skip


class Block(NamedTuple):
    """A fenced block of a page."""

    kind: str
    text: str
    reason: str | None


def blocks(page: Path) -> Iterator[Block]:
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if found["kind"] in RUN:
            yield Block(found["kind"], found["text"], found["reason"])


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if any(blocks(page))]
LATER = ("export", "fast")
"""Pages of what other tests call: exports and engines, each in processes of their own."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take as given: images, a table of them, weights, and trained runs."""
    folder = tmp_path_factory.mktemp("material")
    generator = np.random.default_rng(0)
    rows = ["path,label"]
    for number, label in enumerate(("cat", "dog")):
        (folder / "photos" / label).mkdir(parents=True)
        for index in range(1, 33):
            pixels = generator.integers(0, 128, (40, 48, 3)) + 127 * number
            name = f"{label}/{index:03}.jpg"
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "photos" / name, quality=95)
            rows.append(f"{name},{label}")
    (folder / "photos.csv").write_text("\n".join(rows), encoding="utf-8")
    torch.manual_seed(0)
    model = vitkit.create_model("vit_tiny_patch16_224", num_classes=5, image_size=32, depth=1)
    vitkit.save(folder / "weights.safetensors", model, preprocess=vitkit.Preprocess(image_size=32))
    for name, seed in (("pets", 0), ("other", 1)):
        vitkit.train(
            folder / "photos", output=folder / "runs" / name, seed=seed, quiet=True, **SHORT
        )
    return folder


def short_train(*data: Any, **settings: Any) -> Any:
    short = SHORT
    if "recipe" in settings:  # of digits: a whole epoch, after which there are best weights
        short = SHORT | {"max_steps": None, "epochs": 1, "batch_size": 256}
    return vitkit.train(*data, **{**short, **settings})


def run_python(text: str, names: dict[str, Any], page: Path) -> None:
    shorter = text.replace("vitkit.train(", "short_train(")
    names["short_train"] = short_train
    if ">>>" not in shorter:
        exec(compile(shorter, page.name, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(shorter, names, page.name, str(page), 0)
    failures: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(test, out=failures.append, clear_globs=False)
    assert not failures, "".join(failures)
    names.update(test.globs)


def run_console(text: str) -> None:
    for line in re.findall(r"^\$ (.+)", text.replace("\\\n", " "), flags=re.MULTILINE):
        program, *words = shlex.split(line, comments=True)
        assert program == "vitkit", f"{line}: only vitkit runs here; give a reason for the others"
        if words[0] == "train" and "--resume" not in words:
            words += FLAGS
            words += [] if {"--max-steps", "--probe"} & {*words} else ["--max-steps", "2"]
        assert cli.run(words) == 0, line


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=[pytest.mark.soak] * (page.stem in LATER))
             for page in PAGES]
)  # fmt: skip
def test_the_blocks_of_a_page_run(page, material, tmp_path, monkeypatch):
    shutil.copytree(material, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "docs").symlink_to(DOCS)
    if page.stem == "quickstart":
        shutil.rmtree("runs")
    names: dict[str, Any] = {}
    for block in blocks(page):
        if block.reason is not None:
            continue
        if block.kind == "yaml":
            Path(block.text.split()[1]).write_text(block.text, encoding="utf-8")  # `# mine.yaml`
        elif block.kind == "python":
            run_python(block.text, names, page)
        else:
            run_console(block.text)


def test_most_blocks_are_run():
    found = [block for page in PAGES for block in blocks(page)]
    ran = [block for block in found if block.reason is None]
    assert len(ran) >= 0.6 * len(found)
    assert all(len(block.reason.split()) >= 4 for block in found if block.reason is not None)


def not_finite(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.sum() * float("nan")


def test_the_questions_quote_messages_that_exist(material, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "guides" / "questions.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^## `([^`]+)`", page, flags=re.MULTILINE)
    quoted.remove("out of memory")  # tests/training/test_step.py has it
    torch.save({"weight": torch.zeros(2)}, "weights.pth")
    assert cli.run(["inspect", "weights.pth"]) == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    run = str(material / "runs" / "pets")
    assert cli.run(["predict", run, str(material / "photos"), "--device", "cuda"]) == 2
    with pytest.raises(vitkit.NonFiniteError) as stopped:
        vitkit.train(material / "photos", loss=not_finite, output="run", quiet=True, **SHORT)
    messages = capsys.readouterr().err + str(stopped.value)
    assert [text for text in quoted if text not in messages] == []

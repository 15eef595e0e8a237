"""Images that go missing, or become others, while a run is on."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shards import as_csv, as_folder, as_tars, samples
from training import faulty
from training.faulty import on

from vitkit.errors import CheckpointError, DataError, ImageError, Interrupted, SettingError
from vitkit.training import train as session
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.state.manifest import step_of
from vitkit.training.state.state_folder import newest_state, run_hash
from vitkit.training.trainer import Callback


def train(
    data: Path | str, output: Path, callback: Callable[[], Callback] | None = None, **settings: Any
) -> session.TrainResult:
    spec = {"width": 16, "depth": 1, "num_heads": 2, "patch_size": 4}
    config: dict[str, Any] = {
        "spec": spec, "img_size": 8, "epochs": 2, "warmup_epochs": 0.0, "batch_size": 6,
        "device": "cpu", "amp": "off", "attention_kernel": "fused", "workers": 0, "quiet": True,
        "log_examples": False, "log_histograms": False,
        "plots": False, "report": False, "flip": 0.5, "threads": 1,
    }  # fmt: skip
    config |= {"data": str(data), "output": str(output)} | settings
    return session.train(TrainConfig(**config), [callback] if callback else [])


def at(step: int, do: Callable[[], object]) -> Callable[[], Callback]:
    """Call a function before a step, counted from 0."""
    return faulty.at(step, lambda trainer: do())


def end_of(output: Path) -> str:
    return run_hash(newest_state(output / "state")[0])


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
    state, _ = newest_state(output / "state")
    assert step_of(state) == 4  # the next batch has an image of every class
    assert "no such file; the run stopped at step 4, everything is saved" in str(caught.value)
    assert f"vitkit train --resume {output}" in str(caught.value)
    assert "--bad-images skip" in str(caught.value)
    with pytest.raises(DataError, match=r"differ from those .* by adding --bad-images skip"):
        train(images, output, resume=str(output))
    for path, content in taken.items():
        path.write_bytes(content)
        os.utime(path, ns=(0, times[path]))
    train(images, output, resume=str(output))
    assert end_of(output) == end_of(tmp_path / "through")
    teacher = tmp_path / "through" / "weights" / "best.safetensors"
    with pytest.raises(ImageError, match="resume with: vitkit train --resume") as caught:
        train(images, tmp_path / "taught", at(3, take_away), teacher=str(teacher))
    assert "skip" not in str(caught.value)  # a teacher has not seen the images that would come


def test_an_image_that_is_missing_at_the_end_or_on_resuming_says_how_to_go_on(
    images: Path, tmp_path: Path
) -> None:
    """In the test split; in validation that a signal had stopped, when it is made again."""
    output, last = tmp_path / "run", tmp_path / "run" / "weights" / "last.safetensors"
    test, val = gone(images, "test")[0], gone(images, "val")[0]
    hint = rf"step 6, everything is saved: .* --resume {output}; or, to continue without it"
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


def test_an_image_that_becomes_another_is_refused(images: Path, tmp_path: Path) -> None:
    first = gone(images)[0]
    other = gone(images, label="10")[0].read_bytes()
    with pytest.raises(ImageError, match=f"{first.name}: missing: the file was changed after"):
        train(images, tmp_path / "run", at(2, lambda: first.write_bytes(other)))


@pytest.mark.parametrize("workers", [0, 2])
def test_with_skip_another_image_of_the_class_takes_the_place(
    images: Path, tmp_path: Path, workers: int
) -> None:
    lost = [gone(images)[1], gone(images)[2], gone(images, "val", "10")[0]]

    def lose() -> None:
        for path in lost:
            path.unlink()

    output = tmp_path / "run"
    train(images, output, at(1, lose), bad_images="skip", workers=workers, epochs=3)
    log = log_of(output)
    for path in lost:
        name = path.relative_to(images).as_posix()
        assert log.count(f"{name}: missing: no such file; another image of its class") == 1
    assert "epoch 3: " in log
    assert "an image could not be read" in log


@pytest.mark.parametrize("form", [as_folder, as_csv])
def test_a_run_with_fewer_images_goes_on_with_the_same_bits(
    tmp_path: Path, form: Callable[..., Path]
) -> None:
    """The files are gone from the same step on; one run goes through, the other one is stopped."""
    for name in ("through", "stopped"):
        data = form(tmp_path / f"{name} data", samples())
        root = data if data.is_dir() else data.parent
        lost = [gone(root)[1], gone(root)[2], gone(root, "val", "10")[0]]
        trainer = at(4, lambda lost=lost: [path.unlink() for path in lost])
        limit = {"max_steps": 5} if name == "stopped" else {}
        train(data, tmp_path / name, trainer, bad_images="skip", **limit)
    train(data, tmp_path / name, bad_images="skip", resume=str(tmp_path / name), max_steps=None)
    assert end_of(tmp_path / "stopped") == end_of(tmp_path / "through")
    assert "2 of 18 images of train are missing or changed since" in log_of(tmp_path / name)
    assert "1 of 6 images of val are missing or changed since" in log_of(tmp_path / name)


def test_a_run_that_refused_goes_on_without_the_image_where_the_user_asks_for_it(
    images: Path, tmp_path: Path
) -> None:
    output, lost = tmp_path / "run", gone(images)[1]
    train(images, output, max_steps=1)
    os.replace(gone(images, label="10")[0], lost)  # one is another, one is gone
    with pytest.raises(DataError, match="differ from those that the run"):
        train(images, output, resume=str(output), max_steps=None)
    train(images, output, resume=str(output), max_steps=None, bad_images="skip")
    assert "bad_images refuse -> skip" in log_of(output)
    assert "2 of 18 images of train are missing or changed" in log_of(output)
    assert "2/1.png: missing: the file was changed after it was opened; another" in log_of(output)


def test_a_damaged_list_of_images_is_refused_in_a_line(images: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    train(images, output, max_steps=1)
    place = output / "images.npz"
    content = place.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(b"train/names.npy") + 100] ^= 1
    for damaged in (b"", content[:-40], bytes(flipped)):
        place.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"images\.npz: the list .* is damaged"):
            train(images, output, resume=str(output), max_steps=2, bad_images="skip")
    place.write_bytes(content)
    with pytest.raises(SettingError, match="not digits; leave out DATA"):
        train("digits", output, resume=str(output), max_steps=2, bad_images="skip")


def test_a_class_of_which_nothing_is_left_ends_the_run(images: Path, tmp_path: Path) -> None:
    def lose() -> None:
        for path in gone(images):
            path.unlink()

    with pytest.raises(ImageError, match="missing: no such file; the run stopped at step"):
        train(images, tmp_path / "run", at(3, lose), bad_images="skip")


@pytest.mark.parametrize("form", [as_folder, as_tars])
def test_a_disk_that_fails_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Callable[..., Path | str]
) -> None:
    data = form(tmp_path / "data", samples())
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    opened, failing = Path.open, [0]

    def fail(path: Path, *args: Any, **options: Any) -> Any:
        if failing[0] and tmp_path / "data" in path.parents:
            failing[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, *args, **options)

    def hiccup(times: int) -> Callable[[], Callback]:
        return at(2, lambda: failing.__setitem__(0, times))

    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    train(data, tmp_path / "run", hiccup(2))
    assert pauses == [0.2, 1.0]
    with pytest.raises(ImageError, match="Input/output error; the run stopped at step 3"):
        train(data, tmp_path / "ended", hiccup(4))

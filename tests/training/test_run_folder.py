"""Folders that a run may use: files of the user are never moved, whatever flag is passed."""

import errno
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from training.faulty import On, on
from training.tiny_runs import QUICK, edit_manifest, last_state, settings_of, trained

import vitkit
from vitkit import Interrupted, OutputError, SettingError, TrainConfig, cli
from vitkit.training.run_folder import new_folder, resumed_folder

SMALL = QUICK | {
    "epochs": 1, "max_steps": 1, "warmup_epochs": 0.0, "batch_size": 4, "val_fraction": 0.0,
    "spec": {"image_size": 8, "patch_size": 4, "width": 16, "depth": 1, "num_heads": 2,
             "mlp_width": 16},
}  # fmt: skip


@pytest.fixture
def images(tmp_path) -> Path:
    """Write two classes of four images."""
    for number in range(8):
        folder = tmp_path / "images" / "train" / ("ant", "bee")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 30 * number, np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "images"


def yaml(settings: dict) -> str:
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())


def everything(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else b""
        for path in sorted(place.rglob("*"))
    }


STRANGE = [{"overwrite": True}, {"resume": "auto"}, {}]


@pytest.mark.parametrize("asked", STRANGE, ids=["overwrite", "auto", "plain"])
def test_a_folder_that_is_no_run_is_left_alone(images, tmp_path, monkeypatch, asked):
    """Test the data, a folder above or inside them, the working folder, and a foreign folder."""
    thesis, work = tmp_path / "thesis", tmp_path / "work"
    for folder in (thesis, work):
        folder.mkdir()
        (folder / "chapter1.txt").write_text("x")
    (thesis / "config.yaml").write_text("data: images\nlr: 0.1\n")  # a recipe, by hand
    before = everything(tmp_path)
    monkeypatch.chdir(work)
    for output, message in {
        str(thesis): "contains chapter1.txt and is not a run of vitkit, so",
        ".": "contains chapter1.txt and is not a run of vitkit",
        "": "contains chapter1.txt and is not a run of vitkit|--resume auto needs --output",
        "x" * 300: "cannot write|--resume auto needs --output",
        str(images): f"--output {images} contains the data {images}; choose another",
        str(tmp_path): f"--output {tmp_path} contains the data",
        str(images / "run"): f"--output {images}/run lies inside the data",
    }.items():
        with pytest.raises(vitkit.VitkitError, match=message):
            vitkit.train(images, output=output, **SMALL, **asked)
    monkeypatch.chdir(images)
    with pytest.raises(OutputError, match=r"to runs, which lies inside the data \.; choose an"):
        vitkit.train(".", **SMALL)
    assert everything(tmp_path) == before


def test_overwrite_puts_a_run_aside_and_says_so(images, tmp_path, monkeypatch):
    run = vitkit.train(images, output=str(tmp_path / "run"), **SMALL).run
    (run / "notes.txt").write_text("mine")
    monkeypatch.chdir(run)
    with pytest.raises(OutputError, match=r"--output \. is or contains the working folder"):
        vitkit.train(images, output=".", overwrite=True, **SMALL)
    monkeypatch.chdir(tmp_path)
    vitkit.train(images, output="run", overwrite=True, **SMALL)
    assert (tmp_path / "run.old-1" / "notes.txt").read_text() == "mine"
    assert f"renamed: the files of run are now in {tmp_path}/run.old-1" in log_of(run)


def log_of(run: Path) -> str:
    return (run / "train.log").read_text()


def test_a_run_that_failed_before_its_first_state_is_not_to_be_resumed(images, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml(TrainConfig(data=str(images)).to_json()))
    with pytest.raises(OutputError, match=r"run exists; resume with --resume .*, or pass"):
        vitkit.train(images, output=run, **SMALL)
    vitkit.train(images, output=run, overwrite=True, **SMALL)
    assert (tmp_path / "run.old-1").is_dir()


def test_resume_auto_puts_a_run_without_a_state_aside(images, tmp_path):
    run = tmp_path / "run"
    (run / "tensorboard").mkdir(parents=True)
    (run / ".metrics.csv.4711.tmp").touch()
    (run / "config.yaml").write_text(yaml(TrainConfig(data=str(images)).to_json()))
    settings = SMALL | {"output": str(run), "resume": "auto"}
    vitkit.train(images, **settings)
    assert "run.old-1" in log_of(run)
    assert "nothing to resume" in log_of(run)
    for state in (run / "state").iterdir():
        state.rename(tmp_path / state.name)
    vitkit.train(images, **settings)
    assert vitkit.load(tmp_path / "run.old-2" / "weights" / "last.safetensors")


def test_resume_auto_sees_the_output_of_a_yaml_file(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(yaml(SMALL | {"output": "runs/mine"}))
    words = ["train", str(images), "--recipe", "mine.yaml", "--resume", "auto"]
    assert cli.run(words) == 0
    assert cli.run([*words, "--max-steps", "2"]) == 0
    assert "resuming from step 1" in log_of(Path("runs/mine"))


@pytest.fixture
def saved(images, tmp_path) -> tuple[Path, dict]:
    """Make a run with the states of steps 3 and 4 of 6, and the settings to resume it."""
    settings = SMALL | {"output": str(tmp_path / "run"), "epochs": 3, "save_every": 1}
    vitkit.train(images, **settings | {"max_steps": 4})
    return tmp_path / "run", settings | {"data": str(images), "resume": "auto", "max_steps": 6}


def state(run: Path, step: int) -> Path:
    return run / "state" / f"step-{step:08d}"


def test_a_state_is_known_by_its_name_and_holds_what_it_says(saved):
    """Copies and notes beside the states are ignored and kept."""
    run, settings = saved
    shutil.copytree(state(run, 4), run / "state" / "step-00000004.bak")
    (run / "state" / "step-notes.txt").write_text("mine")
    state(run, 4).rename(state(run, 9))
    vitkit.train(**settings)
    assert "resuming from step 3" in log_of(run)
    assert "it holds the state of step 4, not of the step in its name" in log_of(run)
    assert [state(run, n).is_dir() for n in (3, 5, 6, 9)] == [False, True, True, False]
    assert (run / "state" / "step-notes.txt").read_text() == "mine"
    assert (run / "state" / "step-00000004.bak" / "MANIFEST.json").is_file()
    rows = (run / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["step", "2", "4", "6"]


def test_two_whole_states_are_kept_whatever_else_lies_there(saved):
    run, settings = saved
    later = [state(run, step) for step in (8, 9)]
    for folder in later:
        shutil.copytree(state(run, 4), folder)
        (folder / "model.safetensors").write_bytes(b"")
    vitkit.train(**settings | {"max_steps": 5})
    assert {path.name for path in (run / "state").glob("step-*")} == {
        "step-00000004", "step-00000005"
    }  # fmt: skip
    assert last_state(run) == state(run, 5)
    assert log_of(run).count("; skipped") == 2
    assert not any(folder.exists() for folder in later)
    assert len([*(run / "state").glob("damaged-step-*")]) == 2


def test_the_settings_of_a_run_are_in_its_state_too(saved):
    """A change in config.yaml is a change; one that makes it another run is refused by name."""
    run, settings = saved
    settings = {"data": settings["data"], "resume": str(run), "quiet": True}
    stored = settings_of(run) | {"max_steps": 5}
    for name, value in {"seed": 1, "batch_size": 2, "mixup": 0.8}.items():
        (run / "config.yaml").write_text(yaml(stored | {name: value}))
        with pytest.raises(SettingError, match=rf"differ from the run's: {name}: .* -> {value}"):
            vitkit.train(**settings)
    (run / "config.yaml").write_text(yaml(stored | {"lr": 0.1}))
    vitkit.train(**settings)
    assert f"changed since the run started: lr {stored['lr']:g} -> 0.1" in log_of(run)


def test_other_versions_are_noted(saved):
    run, settings = saved
    versions = {"torch": "1.8.0", "vitkit": "0.0.1"}
    edit_manifest(state(run, 4), lambda manifest: manifest.update(versions=versions))
    vitkit.train(**settings)
    assert "resuming from step 4" in log_of(run)
    for name, old in versions.items():
        words = f"{name} was {old} when the state was saved and is {version(name)} now"
        assert words in log_of(run)


def test_resuming_a_finished_run_logs_that_it_is_finished_and_keeps_its_config(saved):
    run, settings = saved
    vitkit.train(**settings)
    kept, weights = (run / "config.yaml").read_text(), (run / "weights/last.safetensors")
    before = weights.read_bytes()
    vitkit.train(**settings | {"lr": 0.1})
    assert (run / "config.yaml").read_text() == kept
    assert weights.read_bytes() == before
    assert "this run is finished: nothing is trained, and config.yaml is unchanged" in log_of(run)
    assert "-> 0.1 has no effect: the run has ended" in log_of(run)
    assert "raise --epochs" in log_of(run)
    vitkit.train(**settings | {"epochs": 1})
    *_, end = log_of(run).split("this run is finished")
    assert "epochs 3 -> 1 has no effect" in end
    assert "ended after all" in end
    assert "ended after 1 epoch" not in end


def test_half_written_files_of_killed_runs_go_at_the_next_start(saved):
    run, settings = saved
    left = [run / ".config.yaml.11.tmp", run / "weights" / ".best.safetensors.12.tmp"]
    for file in (*left, run / "weights" / ".mine.tmp"):
        file.write_bytes(b"half")
    vitkit.train(**settings)
    assert not any(file.exists() for file in left)
    assert (run / "weights" / ".mine.tmp").exists()


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_goes_on_where_what_it_prints_meets_a_full_disk(images, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", Full())
    settings = SMALL | {"quiet": False}
    assert "ended after" in log_of(vitkit.train(images, output=tmp_path / "run", **settings).run)


class Terminal(io.StringIO):
    """A terminal that can be closed."""

    open = True

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self.open:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


@pytest.fixture
def hang_up() -> Iterator[signal.Signals]:
    """SIGHUP as it comes to a process by default, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield signal.SIGHUP
    signal.signal(signal.SIGHUP, before)


def test_a_run_goes_on_and_logs_a_signal_when_the_terminal_is_closed(
    images, tmp_path, monkeypatch, hang_up
):
    """The bar can no longer be drawn; a hang-up ends the run by the signal, not by that error."""
    monkeypatch.setattr("vitkit.training.monitoring.run_log.REFRESH", 0.0)
    settings = {"data": str(images)} | SMALL | {"quiet": False, "epochs": 2, "max_steps": None}

    def closing(signum: int) -> Callable[[], On]:
        def before_step(trainer, batch):
            if trainer.progress.step == 1:
                terminal.open = False
            if trainer.progress.step == 3 and signum:
                signal.raise_signal(signum)

        return on(before_step=before_step)

    for name, signum in {"through": 0, "signalled": hang_up}.items():
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        asked = settings | {"output": str(tmp_path / name)}
        with pytest.raises(Interrupted, match="everything is saved") if signum else nullcontext():
            trained(asked, closing(signum))
        assert "\x1b[" in terminal.getvalue()  # there was a bar
        assert "epoch   2/2" in log_of(tmp_path / name)


def test_an_error_message_that_cannot_be_printed_leaves_the_exit_code(monkeypatch):
    terminal = Terminal()
    terminal.open = False
    monkeypatch.setattr("sys.stderr", terminal)
    assert cli.run(["no-such-verb"]) == 2


def test_run_folders_are_numbered_and_never_taken_twice(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(data="some/images", model="vit_tiny_patch16_224")
    assert new_folder(config, print).root == Path("runs/images-vit_tiny_patch16_224-1")
    assert new_folder(config, print).root == Path("runs/images-vit_tiny_patch16_224-2")


def test_resume_names_a_run_that_is_not_there(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingError, match="--resume auto needs --output"):
        resumed_folder("auto", None)
    assert resumed_folder("auto", str(tmp_path / "empty")) is None
    # a search has no state of its own, and its candidates have theirs
    search, candidate = tmp_path / "search", tmp_path / "search" / "scratch"
    (candidate / "state" / "step-00000001").mkdir(parents=True)
    (search / "search.json").write_text("[]")
    with pytest.raises(OutputError, match=r"no saved state .*; start without --resume .* --auto$"):
        resumed_folder(str(search), None)


def test_a_run_is_not_resumed_on_other_named_data(saved):
    _, settings = saved
    with pytest.raises(SettingError, match="not digits; leave out DATA"):
        vitkit.train(**settings | {"data": "digits"})


def test_the_home_folder_is_meant_by_a_tilde(images, tmp_path, monkeypatch):
    """A shell leaves the one of `--output=~/runs` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    made = vitkit.train(images, output="~/runs/a", **SMALL)
    assert made.run == tmp_path / "home" / "runs" / "a"
    assert vitkit.train(images, resume="~/runs/a").run == made.run
    assert not (tmp_path / "~").exists()

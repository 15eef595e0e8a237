"""A loaded model is independent of its file, whatever is done to that file afterwards."""

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from weights.round_trips import noisy

import vitkit
from vitkit import CheckpointError
from vitkit.weights.files import open_source

SPEC = vitkit.ViTSpec(image_size=32, patch_size=8, width=64, depth=2, num_heads=1, mlp_width=96,
                      num_classes=7, activation="gelu_tanh")  # fmt: skip
IMAGES = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def in_a_child(work: Callable[[], None], folder: Path) -> None:
    """Run `work` in a forked process, so that a signal that it dies of fails the test only."""
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the parent reads it
            (folder / "failure").write_text(traceback.format_exc())
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(status), f"died of signal {os.WTERMSIG(status)}"
    assert status == 0, (folder / "failure").read_text()


def checkpoints(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Kind -> what is loaded, and the file of weights that is then changed."""
    model = noisy(SPEC)
    folder.mkdir()
    own = vitkit.save(
        folder / "own.safetensors", model, preprocess=vitkit.Preprocess(image_size=32)
    )
    state = model.state_dict()
    save_file(state, folder / "theirs.safetensors")
    torch.save({"state_dict": state}, folder / "theirs.pth")
    vitkit.convert(own, folder / "theirs.npz", to="google")
    sharded = folder / "sharded"
    sharded.mkdir()
    places = {name: f"model-{1 + ('blocks.1' in name)}-of-2.safetensors" for name in state}
    for place in set(places.values()):
        save_file({name: state[name] for name in state if places[name] == place}, sharded / place)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    files = {kind: (place, place) for kind, place in {
        "own": own, "safetensors": folder / "theirs.safetensors", "pth": folder / "theirs.pth",
        "npz": folder / "theirs.npz"}.items()}  # fmt: skip
    return files | {"sharded": (sharded, sharded / "model-2-of-2.safetensors")}


def overwritten(file: Path) -> bytes:
    """Other bytes in the same place, as `cp new.safetensors best.safetensors` does."""
    content = b"\1" * file.stat().st_size
    with file.open("r+b") as opened:
        opened.write(content)
    return content


def cut_off(file: Path) -> bytes:
    content = file.read_bytes()[:100]
    os.truncate(file, 100)
    return content


@torch.inference_mode()
def check_all_ways(folder: Path) -> None:
    for number, change in enumerate((overwritten, cut_off)):
        for kind, (place, file) in checkpoints(folder / str(number)).items():
            stored = vitkit.load(place, trust_pickle=kind == "pth")
            expected, written = stored.model(IMAGES), change(file)
            assert torch.equal(stored.model(IMAGES), expected), (kind, change.__name__)
            assert file.read_bytes() == written, (kind, change.__name__)


@torch.inference_mode()
def check_saving_over_itself(folder: Path) -> None:
    for kind, (place, _) in checkpoints(folder / "itself").items():
        if kind in ("safetensors", "pth"):
            stored = vitkit.load(place, trust_pickle=True)
            save: Callable[..., None] = torch.save if kind == "pth" else save_file
            save(stored.model.state_dict(), place)
            again = vitkit.load(place, trust_pickle=True)
            assert torch.equal(again.model(IMAGES), stored.model(IMAGES)), kind


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_model_stays_as_it_was_loaded_whatever_happens_to_its_file(tmp_path):
    def all_ways() -> None:
        check_all_ways(tmp_path)
        check_saving_over_itself(tmp_path)

    in_a_child(all_ways, tmp_path)


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    save_file(noisy(SPEC).state_dict(), tmp_path / "w.safetensors")

    def reading() -> None:
        with open_source(tmp_path / "w.safetensors") as source:
            os.truncate(tmp_path / "w.safetensors", 9000)
            with pytest.raises(CheckpointError, match=r"the file is truncated"):
                dict(source)

    in_a_child(reading, tmp_path)

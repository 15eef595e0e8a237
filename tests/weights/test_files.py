"""Files of weights that are damaged, hostile, or not what they seem: one line each, no code run."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from weights.round_trips import noisy

import vitkit
from vitkit.errors import CheckpointError
from vitkit.weights import array_files as safetensors_file
from vitkit.weights.formats.first_paper import TORCHVISION
from vitkit.weights.formats.key_table import write_tensors

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 1,
         "mlp_width": 96, "num_classes": 7}  # fmt: skip


def safetensors_bytes(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


BROKEN = {
    "empty": b"",
    "seven bytes": b"1234567",
    "header longer than the file": safetensors_bytes({}, size=10**9),
    "header of 2^63 bytes": safetensors_bytes({}, size=2**63),
    "no JSON": safetensors_bytes(b"{not json"),
    "JSON list": safetensors_bytes([1, 2]),
    "not UTF-8": safetensors_bytes(b"\xff\xfe{}"),
    "data cut off": safetensors_bytes({"a": entry([4], 0, 16)}, b"\0" * 8),
    "more data than declared": safetensors_bytes({"a": entry([1], 0, 4)}, b"\0" * 64),
    "shape larger than its bytes": safetensors_bytes({"a": entry([100], 0, 16)}, b"\0" * 16),
    "shape overflows": safetensors_bytes({"a": entry([2**62, 2**62], 0, 16)}, b"\0" * 16),
    "negative side": safetensors_bytes({"a": entry([-1], 0, 4)}, b"\0" * 4),
    "overlap": safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12),
    "hole": safetensors_bytes({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12),
    "unknown dtype": safetensors_bytes({"a": entry([1], 0, 4, "F33")}, b"\0" * 4),
    "deep JSON": safetensors_bytes(b"[" * 100_000),
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "web page": b"<!doctype html><html>sign in</html>",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_safetensors_file_is_refused_in_one_line(tmp_path, what):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(BROKEN[what])
    for read in (vitkit.load, vitkit.inspect):
        with pytest.raises(CheckpointError) as error:
            read(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def npz(path: Path, arrays: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in arrays.items():
            archive.writestr(name, content)
    return path


def npy(array: np.ndarray, *, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def header_of(shape: str, dtype: str = "'<f4'") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def test_a_broken_npz_file_is_refused_in_one_line(tmp_path):
    whole = npz(tmp_path / "whole.npz", {"a.npy": npy(np.zeros(300))}).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[:-40])
    (tmp_path / "text.npz").write_bytes(b"not a zip at all")
    objects = npy(np.array([{}], dtype=object), allow_pickle=True)
    cases = {
        tmp_path / "cut.npz": "not a complete .npz file",
        tmp_path / "text.npz": "not a complete .npz file",
        npz(tmp_path / "objects.npz", {"a.npy": objects}): "holds Python objects",
        npz(tmp_path / "lie.npz", {"a.npy": header_of("(10**9,)")}): "not a complete .npz file",
        npz(tmp_path / "large.npz", {"a.npy": header_of("(1000000000,)")}): "declares 4000000000",
        npz(tmp_path / "none.npz", {"a.npy": b"what"}): "not a complete .npz file",
        npz(tmp_path / "bomb.npz", {"a.npy": header_of("(25000000,)") + b"\0" * 10**8},
            zipfile.ZIP_DEFLATED): "bytes declare 1000000",
    }  # fmt: skip
    for path, message in cases.items():
        with pytest.raises(CheckpointError, match=message) as error:
            vitkit.load(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_a_duplicate_array_is_refused(tmp_path):
    path = tmp_path / "twice.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", npy(np.zeros(3)))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.npy", npy(np.ones(3)))
    with pytest.raises(CheckpointError, match="'a' occurs twice"):
        vitkit.load(path)


class Canary:
    """What a hostile pickle would do."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_a_pickle_runs_no_code_whether_trusted_or_not(tmp_path):
    canary = tmp_path / "canary"
    hostile = {
        "plain.pth": pickle.dumps(Canary(canary)),
        "in_a_dict.bin": pickle.dumps({"state_dict": {"w": Canary(canary)}}),
    }
    file = io.BytesIO()
    torch.save({"w": torch.zeros(2), "evil": Canary(canary)}, file)
    hostile["zipped.pt"] = file.getvalue()
    for name, content in hostile.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a pickle can run code.*--trust-pickle"):
            vitkit.load(path)
        with pytest.raises(CheckpointError, match="refuses it with weights_only=True") as error:
            vitkit.load(path, trust_pickle=True)
        assert "\n" not in str(error.value)
        renamed = tmp_path / "renamed.safetensors"
        renamed.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"not a (complete )?safetensors file"):
            vitkit.load(renamed)
    assert not canary.exists()


def published(folder: Path) -> tuple[vitkit.ViT, dict[str, torch.Tensor]]:
    """A model, and its tensors as torchvision would publish them."""
    model = noisy(vitkit.ViTSpec(**SMALL))
    return model, write_tensors(TORCHVISION.table(model.spec), model.spec, model.state_dict())


def test_containers_and_prefixes_are_unwrapped_and_noted(tmp_path):
    model, state = published(tmp_path)
    state = {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 3, "model_ema": state, "model": {}}, tmp_path / "run.pth")
    checkpoint = vitkit.load(tmp_path / "run.pth", trust_pickle=True)
    assert torch.equal(checkpoint.model.head.weight, model.head.weight)
    notes = "; ".join(checkpoint.metadata["notes"])
    assert "weights read from the entry 'model_ema'" in notes
    assert "prefix 'module.' removed" in notes
    assert "prefix '_orig_mod.' removed" in notes


def test_shards_are_read_as_one_and_must_lie_beside_their_index(tmp_path):
    model, state = published(tmp_path)
    folder = tmp_path / "sharded"
    folder.mkdir()
    names = sorted(state)
    places = {name: f"model-{1 + (number % 2):05}-of-00002.safetensors"
              for number, name in enumerate(names)}  # fmt: skip
    for place in set(places.values()):
        save_file({name: state[name] for name in names if places[name] == place}, folder / place)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert torch.equal(vitkit.load(folder).model.head.weight, model.head.weight)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../a.safetensors")}))
    with pytest.raises(CheckpointError, match="lies outside of the folder"):
        vitkit.load(folder)
    index.write_text(json.dumps({"weight_map": {**places, "more": places[names[0]]}}))
    with pytest.raises(CheckpointError, match="more is not in model-00001"):
        vitkit.load(folder)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    _, state = published(tmp_path)
    name = "encoder.layers.encoder_layer_1.mlp.0.bias"
    for change, message in [
        ({name: None}, f"as torchvision: tensor {name} is missing"),
        ({"decoder.weight": torch.zeros(3)}, "1 unknown tensor: decoder.weight"),
        (
            {name: torch.zeros(5)},
            r"blocks.1.mlp.fc1.bias the shape \(5,\); the model needs \(96,\)",
        ),
    ]:
        broken = {n: t for n, t in {**state, **change}.items() if t is not None}
        save_file(broken, tmp_path / "broken.safetensors")
        with pytest.raises(CheckpointError, match=message):
            vitkit.load(tmp_path / "broken.safetensors")
    save_file({"something": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensor \(something\) in no known format"):
        vitkit.load(tmp_path / "other.safetensors")


def test_weights_come_to_the_processor_whatever_the_default_device_is(tmp_path):
    model, place = noisy(vitkit.ViTSpec(**SMALL)), tmp_path / "w.safetensors"
    save_file(model.state_dict(), place)
    with torch.device("meta"):  # in the place of a GPU, as by torch.set_default_device
        found = vitkit.load(place).model
    assert torch.equal(found.head.weight, model.head.weight)


def test_a_file_that_is_replaced_while_it_is_opened_is_read_as_it_was(tmp_path, monkeypatch):
    """A run puts new files in the place of its weights while others read them."""
    place, images = tmp_path / "best.safetensors", vitkit.Preprocess(image_size=32)
    first = noisy(vitkit.ViTSpec(**SMALL))
    vitkit.save(place, first, preprocess=images)
    opened = safetensors_file.safe_open

    def replaced(path, **options):
        vitkit.save(path, noisy(vitkit.ViTSpec(**SMALL)), preprocess=images, epoch=2)
        return opened(path, **options)

    monkeypatch.setattr(safetensors_file, "safe_open", replaced)
    found = vitkit.load(place)
    assert torch.equal(found.model.head.weight, first.head.weight)
    assert "epoch" not in found.metadata

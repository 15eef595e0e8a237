"""Containers, shards and plain data around weights; what does not fit is named."""

import json
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from weights.round_trips import noisy, same_bits, stored, written

import vitkit
from vitkit import CheckpointError
from vitkit.weights import files as safetensors_file

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 1,
         "mlp_width": 96, "num_classes": 7}  # fmt: skip


PLAIN = {
    "numpy scalars": [np.float64(1.5), np.float32(1), np.int64(3), np.bool_(True)],
    "numpy arrays": [np.arange(5), np.array(["a", "b"]), np.zeros((2, 2), np.float16)],
    "random states": [np.random.get_state(), np.random.RandomState(0)],
    "paths": [Path("/x/y"), PurePosixPath("x")],
    "times": [datetime.now(UTC), datetime(2026, 1, 2), timedelta(1)],
    "dictionaries": [defaultdict(list, {"a": [1.0]}), OrderedDict(a=1), Counter("aab")],
    "settings": [Namespace(model="deit", seed=np.int64(3), output=Path("runs"))],
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_data_beside_the_weights_are_no_reason_to_refuse(tmp_path, kind):
    model, state = published(tmp_path)
    torch.save({"model": state, "beside": PLAIN[kind]}, tmp_path / "w.pth")
    found = vitkit.load(tmp_path / "w.pth", trust_pickle=True).model
    assert torch.equal(found.head.weight, model.head.weight)


def published(folder: Path) -> tuple[vitkit.ViT, dict[str, torch.Tensor]]:
    """A model, and its tensors as torchvision would publish them."""
    model = noisy(vitkit.ViTSpec(**SMALL))
    return model, stored(written("torchvision", model, folder / "published"))


def test_containers_and_prefixes_are_unwrapped_and_noted(tmp_path):
    model, state = published(tmp_path)
    state = {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}
    torch.save({"epoch": 3, "model_ema": state, "model": {}}, tmp_path / "run.pth")
    checkpoint = vitkit.load(tmp_path / "run.pth", trust_pickle=True)
    assert torch.equal(checkpoint.model.head.weight, model.head.weight)
    notes = "; ".join(checkpoint.metadata["notes"])
    assert "weights read from the entry 'model_ema'" in notes
    assert "prefix 'module.' removed" in notes
    assert "'_orig_mod.' removed from 32 names" in notes


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


def test_the_names_of_torchvision_s_first_version_are_understood(tmp_path):
    model, state = published(tmp_path)
    old = {n.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): tensor
           for n, tensor in state.items()}  # fmt: skip
    save_file(old, tmp_path / "old.safetensors")
    same_bits(model.state_dict(), vitkit.load(tmp_path / "old.safetensors").model.state_dict())

"""The Hub, against a local folder laid out as its cache is; nothing here reaches a network."""

from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from weights.hub_cache import REVISION, empty, put
from weights.hub_cache import published as published_as
from weights.round_trips import noisy, same_bits

import vitkit
from vitkit import CheckpointError
from vitkit.weights.catalogue import find, locate

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 1,
         "mlp_width": 96, "num_classes": 7}  # fmt: skip


@pytest.fixture
def cache(tmp_path, monkeypatch):
    return empty(tmp_path / "hub", monkeypatch)


def published(
    cache: Path, owner: str, name: str, file: str = "model.safetensors", revision: str = "main"
) -> vitkit.ViT:
    """A model in a repository of the cache, its file a link to a blob of that digest."""
    model = noisy(vitkit.ViTSpec(**SMALL))
    made = cache.parent / "made.safetensors"
    vitkit.save(made, model, preprocess=vitkit.Preprocess(image_size=32))
    put(cache, f"{owner}/{name}", made, file, revision)
    return model


@pytest.mark.parametrize(
    ("owner", "address"),
    [("someone", "hf://someone/small"), ("timm", "timm://small"),
     ("someone", f"hf://someone/small@{REVISION}")],
)  # fmt: skip
def test_what_the_cache_holds_is_loaded(cache, owner, address):
    model = published(cache, owner, "small")
    checkpoint = vitkit.load(address)
    same_bits(model.state_dict(), checkpoint.model.state_dict())
    assert vitkit.inspect(address).spec == model.spec


def test_one_file_of_a_repository(cache):
    model = published(cache, "someone", "many", "large/vit+1.safetensors", revision="v2")
    for address in ("hf://someone/many@v2:large/vit+1.safetensors",
                    f"hf://someone/many@{REVISION}:large/vit+1.safetensors"):  # fmt: skip
        assert locate(address)[0].name == "vit+1.safetensors"
        same_bits(model.state_dict(), vitkit.load(address).model.state_dict())
    with pytest.raises(CheckpointError, match=r"large/vit\.npz: no such file in the repository"):
        locate("hf://someone/many@v2:large/vit.npz")
    with pytest.raises(CheckpointError, match="not in the cache, and the Hub cannot be reached"):
        locate("hf://someone/many@v3:large/vit+1.safetensors")
    with pytest.raises(CheckpointError, match=r"many@v2: has no model\.safetensors; name one of"):
        locate("hf://someone/many@v2")


def test_a_file_of_a_folder_comes_with_the_documents_beside_it(cache, tmp_path):
    model = noisy(vitkit.ViTSpec(**SMALL | {"num_heads": 4, "norm_eps": 1e-5}))
    preprocess = vitkit.Preprocess(image_size=32, mean=(0.1, 0.2, 0.3))
    own = vitkit.save(tmp_path / "own.safetensors", model, preprocess=preprocess)
    published_as(own, cache, "someone/many", "huggingface", folder="large/")
    checkpoint = vitkit.load("hf://someone/many:large/model.safetensors")
    assert checkpoint.model.spec == model.spec
    assert checkpoint.preprocess.mean == preprocess.mean


def test_the_catalogue_says_where_timms_names_are(cache):
    first = "vit_base_patch16_224.augreg2_in21k_ft_in1k"
    published(cache, "timm", first)
    published(cache, "timm", "vit_base_patch16_clip_224.openai")
    published(cache, "belfner", "vit_small_patch16_lingbot.robbyant")
    for address, repository in {
        f"timm://{first}": f"models--timm--{first}",
        "timm://vit_base_patch16_224": f"models--timm--{first}",
        "timm://vit_base_patch16_clip_quickgelu_224.openai":
            "models--timm--vit_base_patch16_clip_224.openai",
        "timm://vit_small_patch16_lingbot": "models--belfner--vit_small_patch16_lingbot.robbyant",
    }.items():  # fmt: skip
        assert locate(address)[0] == cache / repository / "snapshots" / REVISION
    with pytest.raises(CheckpointError, match="not in the cache"):
        locate("timm://vit_base_patch16_224.dino")


def test_an_entry_is_all_that_its_file_needs(cache, tmp_path):
    entry = find("test_vit2")
    model = noisy(entry.spec)
    vitkit.save(tmp_path / "ours.safetensors", model, preprocess=entry.preprocess)
    place = cache / "models--timm--test_vit2.r160_in1k"
    vitkit.convert(tmp_path / "ours.safetensors", place / "snapshots" / REVISION, to="timm")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(REVISION)
    checkpoint = vitkit.load(entry.address, **entry.fields)
    same_bits(model.state_dict(), checkpoint.model.state_dict())
    assert checkpoint.model.spec == entry.spec
    assert checkpoint.preprocess == entry.preprocess
    assert checkpoint.format == entry.format


def test_what_the_cache_does_not_hold_is_an_error(cache):
    published(cache, "someone", "small")
    with pytest.raises(CheckpointError, match=r"hf://someone/other: not in the cache, and the Hub"):
        vitkit.load("hf://someone/other")
    with pytest.raises(CheckpointError, match="not in the cache, and the Hub"):
        vitkit.load(f"hf://someone/small@{'b' * 40}")
    for address in (
        "hf://small",
        "hf://../etc/passwd",
        "hf://someone/small:../../x.npz",
        "timm://",
    ):
        with pytest.raises(CheckpointError, match="expected hf://owner/name"):
            vitkit.load(address)
    with pytest.raises(CheckpointError, match="expected a name that ends in one of"):
        vitkit.load("hf://someone/small:README.md")


@pytest.mark.usefixtures("cache")
def test_a_download_that_breaks_off_is_one_line(monkeypatch):
    """Its client passes on the errors of its HTTP library, which are no `OSError`."""

    def broken(*arguments: object, **keywords: object) -> str:
        raise HfHubHTTPError.__bases__[0]("peer closed connection\nwithout a complete body")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(CheckpointError, match=r"someone/x: cannot be downloaded: peer closed conn"):
        vitkit.load("hf://someone/x")


def test_a_pickle_waits_for_trust(cache):
    published(cache, "someone", "small")
    folder = cache / "models--someone--small" / "snapshots" / REVISION
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")
    for address in ("hf://someone/small", "hf://someone/small:pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"if you trust .*--trust-pickle"):
            locate(address)
    assert locate("hf://someone/small", trust_pickle=True)[0] == folder
    file = locate("hf://someone/small:pytorch_model.bin", trust_pickle=True)[0]
    assert file == folder / "pytorch_model.bin"

"""The Hub, against a local folder laid out as its cache is; nothing here reaches a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from weights.round_trips import noisy, same_bits

import vitkit
from vitkit.errors import CheckpointError

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 1,
         "mlp_width": 96, "num_classes": 7}  # fmt: skip
REVISION = "a" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache that holds one repository, and a Hub that must not be asked."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def published(cache: Path, owner: str, name: str) -> vitkit.ViT:
    model = noisy(vitkit.ViTSpec(**SMALL))
    place = cache / f"models--{owner}--{name}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(REVISION)
    file = place / "snapshots" / REVISION / "model.safetensors"
    vitkit.save(file, model, preprocess=vitkit.Preprocess(image_size=32))
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


def test_what_it_does_not_hold_is_said(cache):
    published(cache, "someone", "small")
    with pytest.raises(CheckpointError, match=r"hf://someone/other: not in the cache, and the Hub"):
        vitkit.load("hf://someone/other")
    with pytest.raises(CheckpointError, match="expected hf://owner/name"):
        vitkit.load("hf://small")
    with pytest.raises(CheckpointError, match="expected hf://owner/name"):
        vitkit.load("hf://../etc/passwd")


def test_it_is_only_imported_where_it_is_asked_for():
    code = "import sys, vitkit; vitkit.load; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

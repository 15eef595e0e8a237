"""Every ViT-like name of timm: its files read by vitkit, and the logits held against timm's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers import TOLERANCE, peer
from torch import nn

import vitkit
from vitkit import UserError
from vitkit.models.presets import table

MODULES = ("vision_transformer", "deit", "vision_transformer_hybrid", "eva")
DEPTH = 1
HYBRIDS = ("_r_", "_r26", "_r50", "_resnet", "_mci")


def names() -> list[str]:
    timm = peer("timm")
    return [name for module in MODULES for name in timm.list_models(module=module)]


def theirs(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """timm's model of the name, with one block.

    Each tensor is drawn anew, tables and tokens too: what starts at zero or one would hide faults.
    Queries and keys are large, so that attention is far from even and positions matter.
    """
    timm, generator = peer("timm"), torch.Generator().manual_seed(0)
    arguments: dict[str, Any] = {"num_classes": 5, "depth": DEPTH}
    if "sapiens" in name:  # theirs are a list, one for each block
        arguments["num_kv_heads"] = 1
    model = timm.create_model(name, **arguments).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim < 2 and key.endswith("weight"):
                tensor.copy_(1 + 0.3 * noise)
            elif tensor.ndim < 2 or "token" in key or "pos_embed" in key:
                tensor.copy_(0.5 * noise)
            else:
                fan = max(tensor[0].numel(), 1)
                tensor.copy_(noise * (3.0 if "qkv" in key or ".q." in key else 1.0) / fan**0.5)
    return model, arguments


def as_folder(name: str, model: nn.Module, folder: Path) -> Path:
    """A folder as timm puts it on the Hub; with the depth of the sweep in it."""
    peer("timm").models.save_for_hf(model, folder, safe_serialization=True)
    config = json.loads((folder / "config.json").read_text())
    config["architecture"] = name
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_training(name: str, model: nn.Module, place: Path, *, arch: bool = True) -> Path:
    """A checkpoint as timm's train.py writes it."""
    content: dict[str, Any] = {"epoch": 3, "state_dict": model.state_dict(), "metric": 0.5,
                               "args": argparse.Namespace(model=name, lr=0.1)}  # fmt: skip
    torch.save(content | ({"arch": name} if arch else {}), place)
    return place


def bare(model: nn.Module, place: Path) -> Path:
    torch.save(model.state_dict(), place)
    return place


Reader = Callable[[str, nn.Module, Path], vitkit.ViT]


def by_folder(name: str, model: nn.Module, folder: Path) -> vitkit.ViT:
    return vitkit.load(as_folder(name, model, folder / "hub")).model


def by_arch(name: str, model: nn.Module, folder: Path) -> vitkit.ViT:
    return vitkit.load(as_training(name, model, folder / "t.pth"), trust_pickle=True).model


def by_name(name: str, model: nn.Module, folder: Path) -> vitkit.ViT:
    """The bare file with the preset's name; where there is no such preset, it is refused."""
    sizes = {"depth": DEPTH, "num_classes": 5}
    place = bare(model, folder / "bare.pth")
    return vitkit.create_model(name, pretrained=place, trust_pickle=True, **sizes)


READERS: dict[str, Reader] = {"folder": by_folder, "arch": by_arch, "name": by_name}


@torch.inference_mode()
def difference(ours: vitkit.ViT, model: nn.Module, name: str) -> float:
    """Largest |difference| of the logits, as a part of their largest, on one image.

    Patches of 14 cover 378 of 384 pixels: timm's convolution leaves out the rest, and ours gets
    the part that is covered.
    """
    sides = getattr(model.patch_embed, "img_size", None) or ours.spec.image_size
    images = torch.randn(1, 3, *sides, generator=torch.Generator().manual_seed(1))
    if any(mark in name for mark in HYBRIDS):  # a ResNet's stages magnify float32's rounding
        images, ours, model = images.double(), ours.double(), model.double()
    expected = model(images)
    height, width = ours.spec.image_size
    return float((ours(images[..., :height, :width]) - expected).abs().max() / expected.abs().max())


def outcomes(name: str, folder: Path, readers: Iterator[str]) -> dict[str, str | float]:
    """Reader -> the difference, or the refusal."""
    model, _ = theirs(name)
    found: dict[str, str | float] = {}
    for reader in readers:
        try:
            ours = READERS[reader](name, model, folder)
        except UserError as error:
            found[reader] = str(error)
        else:
            found[reader] = difference(ours, model, name)
    return found


def wrong(found: dict[str, str | float]) -> dict[str, float]:
    return {reader: value for reader, value in found.items()
            if not isinstance(value, str) and not value <= TOLERANCE}  # fmt: skip


def known(name: str) -> bool:
    return name in table()

"""Ours against transformers beyond what tests/weights compares: other sizes, maps, single heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peers import TOLERANCE, noisy_vit, peer, random_images, relative
from torch import nn

import vitkit

SMALL = {"image_size": 96, "patch_size": 16, "width": 192, "depth": 2, "num_heads": 3,
         "mlp_width": 768, "num_classes": 11, "norm_eps": 1e-12,
         "position_resampling": "bicubic"}  # fmt: skip
DINO = SMALL | {"patch_size": 14, "image_size": 98, "norm_eps": 1e-6, "layer_scale": 1.0,
                "pooling": "cls_mean"}  # fmt: skip
GATED = DINO | {"mlp": "swiglu_packed", "activation": "silu", "mlp_width": 512}
REGISTERS = DINO | {"num_registers": 4, "positions_cover_prefix": False,
                    "position_resampling": "bicubic_antialias"}  # fmt: skip
BASE = {"width": 768, "depth": 12, "num_heads": 12, "mlp_width": 3072}
LARGE = {"image_size": 518} | BASE


def both(folder: Path, fields: dict[str, Any], **settings: Any) -> tuple[vitkit.ViT, nn.Module]:
    """Our model, and theirs of the files that it is written to."""
    ours = noisy_vit(vitkit.ViTSpec(**fields))
    ours.save_pretrained(folder, to="huggingface")
    make = peer("transformers", "AutoModelForImageClassification")
    return ours, make.from_pretrained(folder, **settings).eval()


@torch.inference_mode()
def check(folder: Path, fields: dict[str, Any], *pixels: int, **call: Any) -> None:
    ours, theirs = both(folder, fields)
    images = random_images(1, *pixels)
    assert relative(ours(images), theirs(images, **call).logits) <= TOLERANCE
    # The control: what no head reads must show through attention.
    token = ours.reg_token if ours.spec.num_registers else ours.cls_token
    token.neg_()
    assert relative(ours(images), theirs(images, **call).logits) > 1e-4


def test_vit_at_another_size(tmp_path):
    check(tmp_path, SMALL, 128, 80, interpolate_pos_encoding=True)


@pytest.mark.parametrize("pixels", [(98, 98), (140, 56)])
@pytest.mark.parametrize("fields", [DINO, GATED, REGISTERS], ids=["plain", "gated", "registers"])
def test_dinov2_at_two_sizes(tmp_path, fields, pixels):
    check(tmp_path, fields, *pixels)


def test_vit_s_attention_maps_are_those_of_our_record(tmp_path):
    """Theirs come out of the eager kernel only."""
    ours, theirs = both(tmp_path, SMALL, attn_implementation="eager")
    record, images = vitkit.Record(attention=[0, 1], tokens=[0]), random_images(2, 96)
    with torch.inference_mode():
        ours(images, record)
        output = theirs(images, output_attentions=True, output_hidden_states=True)
    for layer, maps in enumerate(output.attentions):
        torch.testing.assert_close(record.attention[layer], maps, rtol=0, atol=1e-6)
    torch.testing.assert_close(record.tokens[0], output.hidden_states[1], rtol=1e-5, atol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fields", "pixels"),
    [(SMALL | BASE | {"image_size": 224}, 224), (DINO | LARGE, 224), (REGISTERS | LARGE, 518)],
)
def test_full_size(tmp_path, fields, pixels):
    check(tmp_path, fields, pixels)

"""The tables of docs/formats.md, and the folds and choices that they show."""

from pathlib import Path

import pytest
import torch
from weights.cells import KINDS, SMALL, cell, document, small
from weights.round_trips import noisy

import vitkit
from vitkit import CheckpointError
from vitkit.weights.verify import fit_to_format

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "formats.md"


def test_the_document_is_the_table_as_it_is():
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run scripts/formats_table.py"


@pytest.mark.parametrize(
    ("kind", "form", "expected"),
    [
        *(("ViT", name, "exact") for name in ("huggingface", "torchvision", "jeonsworld", "timm")),
        ("DeiT distilled", "deit", "exact"),
        ("DINOv2", "huggingface", "exact"),
        ("DINOv2 with registers", "dinov2", "folded"),
        ("DeiT III", "torchvision", "folded"),
        ("DeiT III", "huggingface", "folded"),
        ("DeiT III", "dinov2", "folded"),
        ("DeiT distilled", "torchvision", "lossy"),
        ("SigLIP (MAP)", "google", "lossy"),
        ("DINOv3", "torchvision", "no"),
    ],
)
def test_cells_that_are_known_by_other_ways(kind, form, expected):
    how, why = cell(small(KINDS[kind]), form)
    assert how == expected, why


TABLES = [{"positions": kind} for kind in ("sincos_1d", "sincos_2d", "sincos_2d_mae", "none")]
UNCOVERED = {"positions_cover_prefix": False, "num_registers": 2}
FOLDS = [
    ({}, {"layer_scale": 1.0}),
    ({}, {"positions_cover_prefix": False}),
    ({"num_registers": 2, "distillation_token": True}, {"positions_cover_prefix": False}),
    ({}, {"qkv_bias": "no_key"}),
    ({"qkv_bias": False}, {"qkv_bias": "no_key"}),
    ({"mlp": "swiglu_split", "activation": "silu"}, {"mlp": "swiglu_packed"}),
    ({"mlp": "swiglu_packed", "activation": "silu"}, {"mlp": "swiglu_split"}),
    ({}, {"norm_before_pool": False}),
    ({}, {"pooling": ("cls_mean",)}),
    ({"pooling": "mean"}, {"pooling": ("cls_mean",)}),
    ({"representation_width": 6}, {"pooling": ("cls_mean",)}),
    ({"distillation_token": True, "distilled_readout": "cls"}, {"distilled_readout": ("mean",)}),
    *(
        (fields | more, {"positions": ("learned",)})
        for fields in TABLES
        for more in ({}, UNCOVERED)
    ),
]


@pytest.mark.parametrize(("fields", "capabilities"), FOLDS, ids=str)
def test_a_fold_computes_the_same(fields, capabilities):
    model = noisy(vitkit.ViTSpec(**SMALL | fields, image_size=(32, 48), num_classes=5))
    spec, state, steps = fit_to_format(model.spec, model.state_dict(), capabilities)
    made = vitkit.ViT(spec).eval()
    made.load_state_dict(state)
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    assert [step.kind for step in steps] == ["folded"]
    torch.testing.assert_close(made(images), model(images), rtol=0, atol=1e-5)


def test_the_class_that_costs_least_is_taken():
    model = noisy(vitkit.ViTSpec(**SMALL, image_size=32, norm_eps=1e-5, layer_scale=0.5))
    lossy, folded = {"norm_eps": (1e-6,)}, {"layer_scale": (None,)}
    no = {"num_registers": (3,), "pooling": ("map",)}
    spec, _, steps = fit_to_format(model.spec, model.state_dict(), no, lossy, folded)
    assert (spec.layer_scale, [step.kind for step in steps]) == (None, ["folded"])
    assert fit_to_format(model.spec, model.state_dict(), folded, {}).steps == []
    with pytest.raises(CheckpointError, match=r"^it cannot hold num_registers = 0, only 3$"):
        fit_to_format(model.spec, model.state_dict(), no, {"num_registers": (3,)})

"""The layer table against the figures worked out by hand."""

from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import vitkit
from vitkit import ShapeError


def test_patch_embedding_figures():
    table = vitkit.summary(vitkit.PatchEmbedding(), input_size=(1, 3, 224, 224))
    whole = table.rows[0]
    assert whole.mult_adds == 196 * 768 * 768
    assert whole.mult_adds + whole.bias_adds == 115_756_032  # 115.76 M with the bias counted
    sizes = (table.input_mb, table.activation_mb, table.parameter_mb, table.total_mb)
    assert [round(mb, 2) for mb in sizes] == [0.60, 1.20, 2.36, 4.17]


def test_one_block_and_the_whole_of_vit_b16():
    block = vitkit.summary(vitkit.EncoderBlock(768, 12, 3072), input_size=(1, 197, 768))
    assert round(block.mult_adds / 1e6) == 1454
    with torch.device("meta"):
        model = vitkit.create_model("vit_base_patch16_224")
    table = vitkit.summary(model)
    tokens, width = 197, 768
    by_hand = 196 * 768 * width + width * 1000
    by_hand += 12 * (12 * tokens * width**2 + 2 * tokens**2 * width)
    assert table.mult_adds == by_hand
    assert round(table.mult_adds / 1e6) == 17_564
    assert table.parameters == 86_567_656
    assert round(table.parameter_mb, 2) == 346.27


def test_rows_name_every_module_with_its_sizes():
    model = vitkit.create_model("vit_tiny_patch16_224")
    rows = {row.name: row for row in vitkit.summary(model, (2, 3, 224, 224)).rows}
    assert rows["blocks.3.attn.qkv"].output_size == (2, 197, 576)
    assert rows["blocks.3.attn.qkv"].mult_adds == 2 * 197 * 192 * 576
    assert rows["blocks.3.attn"].mult_adds == 2 * (4 * 197 * 192**2 + 2 * 197**2 * 192)
    assert rows["head"].input_size == (2, 192)
    model.patch_embed.requires_grad_(False)
    frozen = {row.name: row for row in vitkit.summary(model).rows}["patch_embed"]
    assert (frozen.parameters, frozen.trainable) == (147_648, 0)


def test_the_table_draws_and_leaves_the_module_alone():
    model = vitkit.create_model("vit_tiny_patch16_224").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text = str(vitkit.summary(model))
    assert "PatchEmbedding (patch_embed)" in text
    assert "parameters 5,717,416" in text
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.usefixtures("wrong_types_come_in")
def test_any_module_works_and_a_wrong_input_is_named():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 2))
    assert vitkit.summary(net, (1, 3, 8, 8)).mult_adds == 36 * 8 * 27 + 8 * 36 * 2
    bare = nn.Sequential(nn.BatchNorm2d(3, affine=False))  # no layer with parameters
    assert vitkit.summary(bare, (1, 3, 8, 8)).activation_mb == 0
    with pytest.raises(ShapeError, match="Sequential does not take an input of"):
        vitkit.summary(net, (1, 3, 9, 9))
    with pytest.raises(ShapeError, match="Sequential has no spec; pass input_size"):
        vitkit.summary(net)
    with pytest.raises(ShapeError, match="input_size 9 is one number; pass input_size, a shape"):
        vitkit.summary(net, 9)


@pytest.mark.parametrize("pooling", ["map", "cls_mean"])
def test_every_readout_can_be_summarised(pooling):
    spec = vitkit.ViTSpec(image_size=32, patch_size=8, width=32, depth=1, num_heads=4,
                          mlp_width=64, num_classes=7, pooling=pooling)  # fmt: skip
    model = vitkit.ViT(spec)
    vitkit.freeze(model, "blocks")
    table = vitkit.summary(model)
    assert table.parameters == sum(p.numel() for p in model.parameters())
    assert table.rows[0].trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert table.rows[0].trainable < table.parameters


def test_a_notebook_shows_the_table_as_html():
    table = vitkit.summary(vitkit.create_model("vit_tiny_patch16_224", depth=2))
    shown = ElementTree.fromstring(f"<body>{table._repr_html_().replace('<br>', ' ')}</body>")
    head, *rows = [[cell.text or "" for cell in row] for row in shown.iter("tr")]
    assert head == ["layer (variable)", "input", "output", "parameters", "trainable", "mult-adds"]
    text = str(table)
    for row in rows:
        assert all(cell in text for cell in row), row
    (patches,) = [row for row in rows if row[0] == "PatchEmbedding (patch_embed)"]
    assert patches[2:4] == ["1 x 196 x 192", "147,648"]
    assert f"{table.parameters:,}" in (shown.find("p").text or "")
    assert table.to_html(depth=0).count("<tr>") == 2

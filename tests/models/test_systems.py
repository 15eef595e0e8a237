"""The figures of the notebooks and pages that people learn Vision Transformers from.

What other tests hold already is not repeated: one block against torch's own, the patch arithmetic,
the encoder alone, lucidrains' counts, the layer table.
"""

import math

import pytest
import torch
from noise import fill_with_noise
from torch import nn

import vitkit
from vitkit.models.embedding import patchify

FROM_SCRATCH = {  # the einops notebook's ViT: norms around the patch matrix, torch's epsilon
    "stem": "normed_linear",
    "norm_eps": 1e-5,
    "initialisation": "xavier_normal",
}
TORCH_S = {  # a block's keys, ours -> theirs
    f"{ours}{leaf}": f"{theirs}{'_' if 'in_proj' in theirs else '.'}{leaf}"
    for leaf in ("weight", "bias")
    for ours, theirs in (
        ("norm1.", "norm1"),
        ("attn.qkv.", "self_attn.in_proj"),
        ("attn.proj.", "self_attn.out_proj"),
        ("norm2.", "norm2"),
        ("mlp.fc1.", "linear1"),
        ("mlp.fc2.", "linear2"),
    )
}
LARGE = {"width": 1024, "depth": 24, "num_heads": 16, "mlp_width": 4096}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_torch_s_layer_has_as_many_parameters_and_so_has_a_stack_of_twelve():
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.1, "gelu", batch_first=True)
        ours = vitkit.Encoder(width=768, depth=12, num_heads=12, mlp_width=3072, final_norm=False)
    assert count(layer) == 7_087_872
    assert count(ours) == 12 * 7_087_872


def test_the_epsilon_alone_is_a_hundredth_on_small_inputs():
    """torch's default is 1e-5 and ours 1e-6; on tokens of scale 0.02 the variance is 4e-4."""
    tokens = 0.02 * torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(0))
    ours = vitkit.EncoderBlock(width=64, num_heads=4, mlp_width=128).eval()
    fill_with_noise(ours, std=0.2)
    same = vitkit.EncoderBlock(width=64, num_heads=4, mlp_width=128, norm_eps=1e-5).eval()
    same.load_state_dict(ours.state_dict())
    theirs = nn.TransformerEncoderLayer(64, 4, 128, 0.1, "gelu", batch_first=True, norm_first=True)
    theirs.load_state_dict({TORCH_S[key]: value for key, value in ours.state_dict().items()})
    expected = theirs.eval()(tokens)
    assert (same(tokens) - expected).abs().max() <= 1e-5
    assert (ours(tokens) - expected).abs().max() > 1e-2


def test_the_tiny_model_of_cifar_10():
    sizes = {"image_size": 32, "patch_size": 4, "width": 512, "depth": 4, "num_heads": 8,
             "mlp_width": 1024, "num_classes": 10}  # fmt: skip
    with torch.device("meta"):
        model = vitkit.ViT(vitkit.ViTSpec(**sizes, qkv_bias=False))
        assert model(torch.empty(4, 3, 32, 32)).shape == (4, 10)
    assert count(model) == 8_470_026


def test_vit_l16_from_scratch_gives_class_token_patches_and_logits():
    with torch.device("meta"):
        model = vitkit.ViT(vitkit.ViTSpec(**LARGE, **FROM_SCRATCH))
        features = model.forward_features(torch.empty(32, 3, 224, 224))
        logits = model.forward_head(features)
    assert count(model) == 304_330_216
    assert features.cls.shape == (32, 1024)
    assert features.patches.shape == (32, 196, 1024)
    assert logits.shape == (32, 1000)


def test_each_projection_from_scratch_is_xavier_normal_by_itself():
    """The fused matrix as one would have std 0.022; positions were Xavier too, at 0.003."""
    torch.manual_seed(0)
    model = vitkit.ViT(vitkit.ViTSpec(**LARGE | {"depth": 1}, **FROM_SCRATCH))
    for matrix in model.blocks[0].attn.qkv.weight.chunk(3):
        assert matrix.std().item() == pytest.approx(math.sqrt(2 / (1024 + 1024)), rel=0.01)
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.01)
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_rectangular_images_and_patches(pooling):
    spec = vitkit.ViTSpec(
        image_size=(32, 48), patch_size=(8, 4), width=32, depth=1, num_heads=2, mlp_width=64,
        num_classes=5, pooling=pooling, **FROM_SCRATCH,
    )  # fmt: skip
    assert vitkit.ViT(spec).forward_features(torch.zeros(2, 3, 32, 48)).grid == (4, 12)


def test_the_maps_of_every_layer_are_handed_out():
    """The explanation's shapes: qkv 197 x 2304, attention 12 x 197 x 197, output 197 x 768."""
    with torch.device("meta"):
        model = vitkit.create_model("vit_base_patch16_224").eval()
        record = vitkit.Record(attention=range(12), tokens=range(12))
        model(torch.empty(2, 3, 224, 224), record)
        assert model.blocks[0].attn.qkv(torch.empty(2, 197, 768)).shape == (2, 197, 2304)
    assert [maps.shape for maps in record.attention.values()] == [(2, 12, 197, 197)] * 12
    assert [tokens.shape for tokens in record.tokens.values()] == [(2, 197, 768)] * 12
    assert sorted(record.attention) == list(range(12))


def test_the_explanation_s_mlp_starts_xavier_uniform_with_small_biases():
    torch.manual_seed(0)
    spec = vitkit.ViTSpec(depth=1, initialisation="xavier_uniform")
    mlp, bound = vitkit.ViT(spec).blocks[0].mlp, math.sqrt(6 / (768 + 3072))
    for linear in (mlp.fc1, mlp.fc2):
        assert bound * 0.999 < linear.weight.abs().max().item() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
        assert linear.bias.std().item() == pytest.approx(1e-6, rel=0.1)


def test_patches_of_mnist_are_patches():
    """(N, 1, 28, 28) -> (N, 49, 16) -> (N, 50, 8), and each of the 49 is 4 x 4 pixels in a square:
    a `reshape` makes strips of 1 x 16 instead."""
    images = torch.arange(2 * 28 * 28.0).reshape(2, 1, 28, 28)
    patches = patchify(images, (4, 4))
    assert patches.shape == (2, 49, 16)
    for row in range(7):
        for column in range(7):
            square = images[:, 0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert torch.equal(patches[:, 7 * row + column], square.flatten(1))
    spec = vitkit.ViTSpec(
        image_size=28, patch_size=4, in_channels=1, width=8, depth=1, num_heads=2, mlp_width=32,
        activation="relu", positions="sincos_1d", num_classes=10,
    )  # fmt: skip
    model, record = vitkit.ViT(spec), vitkit.Record(tokens=[0], attention=[0])
    assert model(images, record).shape == (2, 10)
    assert record.tokens[0].shape == (2, 50, 8)
    assert record.attention[0].shape == (2, 2, 50, 50)
    assert model.pos_embed is None


def test_what_the_mnist_notebook_registers_and_what_the_model_has():
    """E: its attention sits in a Python list, its norms span tokens and width: 4,990 parameters.

    A ViT of these sizes has its heads, an output projection, norms over the width and a last norm.
    """
    registered = [
        nn.Linear(16, 20),  # patches of 4 x 4
        nn.LayerNorm((50, 20)),
        nn.LayerNorm((50, 20)),
        nn.Linear(20, 20),
        nn.Linear(20, 10),
    ]
    count = sum(p.numel() for module in registered for p in module.parameters())
    assert count + 20 == 4_990  # and the class token
    model = vitkit.create_model("vit_mnist_patch4_28")
    assert sum(p.numel() for p in model.parameters()) == 5_670
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    heads = {name: p.shape for name, p in model.named_parameters() if "attn" in name}
    assert heads["blocks.0.attn.qkv.weight"] == (60, 20)


@pytest.mark.parametrize(("pixels", "patch", "patches"), [(448, 32, 196), (160, 16, 100)])
def test_a_hybrid_counts_the_positions_that_its_convolution_gives(pixels, patch, patches):
    """D: 448 pixels in a grid of 14 are 196 positions, not 784; 160 pixels have a kernel of 1."""
    spec = vitkit.ViTSpec(
        image_size=pixels, patch_size=patch, stem="resnet", resnet_layers=(3, 4, 9), width=32,
        depth=1, num_heads=2, mlp_width=32,
    )  # fmt: skip
    with torch.device("meta"):
        model = vitkit.ViT(spec)
        tokens = model.patch_embed(torch.zeros(1, 3, pixels, pixels))
    assert tokens.shape == (1, patches, 32)
    assert model.pos_embed.shape == (1, 1 + patches, 32)
    assert model.patch_embed.proj.weight.shape[2:] == (patch // 16, patch // 16)

"""The parts by themselves, against torch's own: one block, attention, patches."""

import pytest
import torch
from models.test_systems import TORCH_S
from noise import fill_with_noise
from torch import nn

import vitkit
from vitkit import SpecError
from vitkit.models.attention import Context, attention_weights, plain_attention, use_attention


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(2, 197, 768, generator=torch.Generator().manual_seed(1))


def torch_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        768, 12, 3072, 0.1, "gelu", batch_first=True, norm_first=True, layer_norm_eps=1e-6
    )


def test_a_block_equals_torch_s_encoder_layer(tokens):
    ours, theirs = vitkit.EncoderBlock(width=768, num_heads=12, mlp_width=3072), torch_layer()
    fill_with_noise(ours)
    theirs.load_state_dict({TORCH_S[key]: value for key, value in ours.state_dict().items()})
    assert sum(p.numel() for p in ours.parameters()) == 7_087_872
    difference = (ours.eval()(tokens) - theirs.eval()(tokens)).abs().max()
    assert difference <= 1e-5

    with torch.no_grad():  # the control: one swapped pair must show
        theirs.norm1.weight.copy_(ours.norm2.weight)
        theirs.norm2.weight.copy_(ours.norm1.weight)
    assert (ours(tokens) - theirs(tokens)).abs().max() > 1e-3


def test_fused_and_explicit_attention_agree_with_and_without_a_mask():
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6)
    causal = torch.ones(5, 7, dtype=torch.bool).tril()
    for mask in (None, causal):
        mixed, weights = vitkit.scaled_dot_product_attention(
            q, k, v, mask=mask, return_weights=True
        )
        torch.testing.assert_close(vitkit.scaled_dot_product_attention(q, k, v, mask=mask), mixed)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    assert (weights[..., ~causal] == 0).all()


def test_a_query_that_may_look_at_no_key_gets_zeros():
    """With and without weights, by both kernels, in a record, and in the gradients."""
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    mixed, weights = vitkit.scaled_dot_product_attention(q, k, v, mask=mask, return_weights=True)
    assert (weights[:, :, 1] == 0).all()
    assert (mixed[:, :, 1] == 0).all()
    torch.testing.assert_close(vitkit.scaled_dot_product_attention(q, k, v, mask=mask), mixed)
    torch.testing.assert_close(plain_attention(q, k, v, mask), mixed)
    for gradient in torch.autograd.grad(mixed.sum(), [q, k, v]):
        assert gradient.isfinite().all()
    record = vitkit.Record(attention=[0])
    record.begin(depth=1)
    attention = vitkit.MultiHeadSelfAttention(16, 2)
    attention(torch.randn(1, 4, 16), Context(mask=mask, attend=record.attend(0)))
    assert (record.attention[0].sum(-1)[:, :, 1] == 0).all()


@pytest.mark.parametrize("heads_differ", [False, True])
def test_both_kernels_have_the_same_outputs_and_gradients(tokens, heads_differ):
    """A setting chooses one of the two; the mask and a width of its own per head hold for both."""
    torch.manual_seed(0)
    width = 20 if heads_differ else None
    attention = vitkit.MultiHeadSelfAttention(96, 3, head_width=width, attention_dropout=0.0)
    causal = torch.ones(197, 197, dtype=torch.bool).tril()
    given = tokens[..., :96].clone().requires_grad_()
    made = {}
    for kernel in ("fused", "plain"):
        use_attention(attention, kernel)
        out = attention(given, Context(mask=causal))
        made[kernel] = out, *torch.autograd.grad(out.square().sum(), [given, attention.qkv.weight])
    assert attention.attend is plain_attention
    for fused, plain in zip(made["fused"], made["plain"], strict=True):
        torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-5)


def test_the_plain_kernel_drops_weights_and_keeps_their_mean():
    torch.manual_seed(0)
    q, k = torch.zeros(1, 1, 400, 100), torch.zeros(1, 1, 100, 100)
    weights = plain_attention(q, k, torch.eye(100)[None, None], None, 0.25)
    kept = weights[weights > 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 0.01 / 0.75))
    assert (weights == 0).float().mean() == pytest.approx(0.25, abs=0.01)


def test_the_encoder_alone_has_the_notebook_s_size():
    encoder = vitkit.Encoder(width=512, depth=6, num_heads=8, mlp_width=2048)
    assert sum(p.numel() for p in encoder.parameters()) == 18_915_328
    assert encoder(torch.randn(16, 128, 512)).shape == (16, 128, 512)


def test_parts_name_what_is_wrong():
    with pytest.raises(SpecError, match="width 510 is not divisible by num_heads 12"):
        vitkit.MultiHeadSelfAttention(width=510, num_heads=12)
    with pytest.raises(SpecError, match=r"activation 'gelo' is none of .*did you mean 'gelu'"):
        vitkit.MLP(width=8, mlp_width=8, activation="gelo")


@pytest.mark.parametrize("tokens", [5, 31])
def test_short_rows_in_bfloat16_are_the_softmax_rounded_once(tokens: int):
    q, k = torch.randn(2, 1, 3, tokens, 8, dtype=torch.bfloat16)
    scores = q @ k.mT / 8**0.5
    assert torch.equal(attention_weights(q, k), scores.float().softmax(dim=-1).bfloat16())


@pytest.mark.parametrize(("patch", "bias"), [(4, True), ((2, 8), False)])
def test_patches_are_the_same_by_convolution_and_by_a_matrix(patch, bias):
    """A GPU takes the matrix; both must give one map, and the same gradients."""
    torch.manual_seed(0)
    proj = vitkit.PatchEmbedding(3, patch, width=10, bias=bias).proj.double()
    images = torch.randn(2, 3, 16, 24, dtype=torch.float64, requires_grad=True)
    found = []
    for way in (proj, proj.as_product):
        output = way(images)
        gradients = torch.autograd.grad(output.pow(3).sum(), [images, *proj.parameters()])
        found.append([output, *gradients])
    assert found[0][0].shape == (2, 10, 16 // proj.kernel_size[0], 24 // proj.kernel_size[1])
    for by_convolution, by_product in zip(*found, strict=True):
        torch.testing.assert_close(by_product, by_convolution)

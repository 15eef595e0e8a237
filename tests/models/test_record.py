"""A `Record`: maps by the explicit softmax, gradients, memory, and what it refuses."""

import math

import pytest
import torch
from noise import fill_with_noise

import vitkit
from vitkit import SettingError
from vitkit.explaining.methods.attention import attention
from vitkit.models.attention import Context, attention_weights

SMALL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "num_heads": 4,
         "mlp_width": 64, "num_classes": 7}  # fmt: skip
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
VARIATIONS = [
    {},
    {"block": "post_norm"},
    {"block": "res_post_norm", "norm": "rms"},
    {"qk_norm": True, "num_registers": 2},
    {"qkv_bias": "no_key", "layer_scale": 0.5},
    {"distillation_token": True, "head_width": 12},
    {"positions": "sincos_2d", "class_token": False, "pooling": "map"},
]


def small(**overrides: object) -> vitkit.ViT:
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL | overrides)).eval()
    fill_with_noise(model, std=0.3)
    return model


@pytest.mark.parametrize("fields", VARIATIONS)
def test_maps_are_the_explicit_softmax_of_what_each_layer_was_given(fields):
    """Each layer's input is found with a forward hook, which the library does not use."""
    model = small(**fields)
    given = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    record = vitkit.Record(attention=range(3), tokens=range(3))
    logits = model(IMAGES, record)
    assert torch.equal(logits, model(IMAGES))
    for layer, block in enumerate(model.blocks):
        attention, z = block.attn, given[layer]
        q, k, _ = attention.qkv(z).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q, k = attention.q_norm(q), attention.k_norm(k)
        scores = torch.einsum("bknh,bkmh->bknm", q, k) / math.sqrt(q.shape[-1])
        maps = (scores - scores.amax(-1, keepdim=True)).exp()
        maps = maps / maps.sum(-1, keepdim=True)
        torch.testing.assert_close(record.attention[layer], maps, rtol=0, atol=1e-6)
    assert record.tokens[2].shape == given[0].shape


def test_rotary_maps_are_of_the_turned_queries_and_keys():
    model, images = small(positions="rope", num_registers=1).double(), IMAGES.double()
    seen = []

    def watch(q, k, v, mask=None, dropout=0.0):
        seen.append(attention_weights(q, k))
        return seen[-1] @ v

    record = vitkit.Record(attention=[1])
    logits = model(images, record)
    model.run_block = lambda block, tokens, context: block(tokens, context._replace(attend=watch))
    torch.testing.assert_close(model(images), logits)
    torch.testing.assert_close(record.attention[1], seen[1], rtol=0, atol=1e-6)


def test_gradients_of_maps_are_those_of_a_finite_difference():
    model = small().double()
    images = IMAGES.double()
    record = vitkit.Record(attention=[1], gradients=True)
    logits = model(images, record)
    torch.testing.assert_close(logits, model(images))
    logits[0, 3].backward()
    gradient = record.attention[1].grad
    assert gradient.shape == (2, 4, 17, 17)
    assert gradient[1].abs().max() == 0  # the other image has no part in this logit
    head, row, column = 2, 5, 11

    def logit_with(change: float) -> float:
        def attend(q, k, v, mask=None, dropout=0.0):
            weights = attention_weights(q, k)
            weights[0, head, row, column] += change
            return weights @ v

        def run(block, tokens, context):
            return block(tokens, Context(attend=attend) if block is model.blocks[1] else context)

        model.run_block = run
        with torch.no_grad():
            return model(images)[0, 3].item()

    expected = (logit_with(1e-5) - logit_with(-1e-5)) / 2e-5
    assert gradient[0, head, row, column].item() == pytest.approx(expected, rel=1e-5)


def test_without_gradients_nothing_of_the_graph_changes():
    model = small().train()
    record = vitkit.Record(attention=[0])
    model(IMAGES, record).sum().backward()
    recorded = model.blocks[0].attn.qkv.weight.grad.clone()
    model.zero_grad()
    model(IMAGES).sum().backward()
    assert torch.equal(model.blocks[0].attn.qkv.weight.grad, recorded)


def test_only_what_was_asked_for_is_computed():
    """The softmax of narrowed maps is of that many rows, not of all and then cut."""
    sizes = []
    softmax = torch.Tensor.softmax
    model = small()
    record = vitkit.Record(attention=[2], heads=[1], queries=[0, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "softmax", lambda t, **k: (sizes.append(t.shape), softmax(t, **k))[1]
        )
        model(IMAGES, record)
    assert sizes == [(2, 1, 2, 17)]
    assert set(record.attention) == {2}
    assert record.tokens == {}


def test_masks_of_a_record_are_narrowed_with_its_rows():
    encoder = vitkit.Encoder(32, 1, 4, 64).eval()
    fill_with_noise(encoder, std=0.3)
    tokens, mask = torch.randn(2, 6, 32), torch.ones(6, 6, dtype=torch.bool).tril()
    record = vitkit.Record(attention=[0], heads=[3], queries=[1, 4])
    encoder(tokens, record, Context(mask=mask))
    maps = record.attention[0]
    assert maps.shape == (2, 1, 2, 6)
    assert maps[:, 0, 0, 2:].abs().max() == 0
    assert maps[:, 0, 1, 5:].abs().max() == 0
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 1, 2))


def test_what_is_not_there_is_named():
    model = small()
    with pytest.raises(SettingError, match=r"layer 3 does not exist; layers are 0 to 2"):
        model(IMAGES, vitkit.Record(attention=[3]))
    with pytest.raises(SettingError, match=r"layer -4 does not exist; layers are 0 to 2"):
        model(IMAGES, vitkit.Record(tokens=[-4]))
    with pytest.raises(SettingError, match=r"query row 17 does not exist; rows are 0 to 16"):
        model(IMAGES, vitkit.Record(attention=[0], queries=[17]))
    with pytest.raises(SettingError, match="cross_attention cannot be recorded"):
        model(IMAGES, vitkit.Record(cross_attention=[0]))
    with pytest.raises(SettingError, match=r"pooling cannot be recorded: this model's is 'cls'"):
        model(IMAGES, vitkit.Record(pooling=True))
    with pytest.raises(SettingError, match="keeps whole maps"):
        vitkit.Record(attention=[0], heads=[1], gradients=True)


def test_the_query_of_a_map_head_can_be_recorded():
    model = small(class_token=False, pooling="map", num_registers=1)
    record = vitkit.Record(pooling=True, heads=[0, 2])
    assert torch.equal(model(IMAGES, record), model(IMAGES))
    pool, patches = model.attn_pool, model.forward_features(IMAGES).patches
    q = (pool.latent @ pool.q.weight.T + pool.q.bias).reshape(1, 1, 4, 8).transpose(1, 2)
    k = (patches @ pool.kv.weight[:32].T + pool.kv.bias[:32]).reshape(2, 16, 4, 8).transpose(1, 2)
    expected = (q @ k.transpose(2, 3) / math.sqrt(8)).softmax(-1)[:, [0, 2]]
    torch.testing.assert_close(record.pooling[0], expected, rtol=0, atol=1e-6)
    heat = attention(model, IMAGES)
    whole = (q @ k.transpose(2, 3) / math.sqrt(8)).softmax(-1)
    torch.testing.assert_close(heat.flatten(1), whole.mean(dim=(1, 2)), rtol=0, atol=1e-6)
    assert (attention(model, IMAGES, layer=0) - heat).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["attention", "tokens", "cross_attention", "heads", "queries"])
@pytest.mark.parametrize("value", [[0.5], [1.0], ["1"], [True], [None]])
@pytest.mark.usefixtures("wrong_types_come_in")
def test_numbers_that_are_not_whole_are_refused_by_name(name, value):
    with pytest.raises(SettingError, match=rf"^{name} = .*must be a list of whole numbers"):
        vitkit.Record(**{name: value})


@pytest.mark.parametrize("gradients", [False, True])
def test_maps_of_float16_are_finite_where_their_products_are_not(gradients):
    spec = vitkit.ViTSpec(
        image_size=8, patch_size=4, width=16, depth=1, num_heads=1, mlp_width=16, num_classes=2
    )
    torch.manual_seed(0)
    model = vitkit.ViT(spec).eval()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(6000)
    images = torch.randn(1, 3, 8, 8)
    exact, rounded = vitkit.Record(attention=[0]), vitkit.Record(attention=[0], gradients=gradients)
    model(images, record=exact)
    model.half()(images.half(), record=rounded)
    (q, k, _) = model.blocks[0].attn.heads(model.blocks[0].norm1(model.embed(images.half())[0]))
    assert (q.float() @ k.float().transpose(-2, -1)).abs().max() > 65_504
    found = rounded.attention[0]
    assert found.dtype == torch.float16
    assert found.isfinite().all()
    assert torch.allclose(found.float().sum(-1), torch.ones(()), atol=2e-3)
    assert torch.equal(found.argmax(-1), exact.attention[0].argmax(-1))

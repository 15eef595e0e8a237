"""Artefacts and test-time registers, on models whose artefacts are planted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from noise import fill_with_noise

import vitkit
from vitkit.errors import SettingError
from vitkit.explaining.methods.attention import attention
from vitkit.explaining.model import artefacts, registers

WIDTH, NEURON, LAYER = 32, 5, 1
SIZE = (32, 48)
READOUTS = {
    "class token": {},
    "registers": {"num_registers": 2},
    "distilled": {"distillation_token": True},
    "mean": {"class_token": False, "pooling": "mean"},
    "mean of all": {"pooling": "mean_all"},
    "MAP": {"class_token": False, "pooling": "map"},
    "both": {"pooling": "cls_mean"},
    "rotary": {"positions": "rope"},
    "LayerScale": {"layer_scale": 0.5},
    "packed SwiGLU": {"mlp": "swiglu_packed", "activation": "silu"},
    "split SwiGLU": {"mlp": "swiglu_split", "activation": "silu"},
}


def planted(seed: int = 0, **fields) -> vitkit.ViT:
    """A model with a neuron that fires on patches of ones, and writes a high norm there."""
    vit = vitkit.ViT(
        vitkit.ViTSpec(
            image_size=SIZE, patch_size=8, width=WIDTH, depth=3, num_heads=2, mlp_width=16,
            num_classes=4, **{"activation": "relu"} | fields,
        )
    )  # fmt: skip
    fill_with_noise(vit, seed, std=0.05)
    with torch.no_grad():
        # the first channel of a token is the mean of its patch, and nothing else writes it
        kernel = vit.patch_embed.proj.weight
        kernel -= kernel.mean(dim=(1, 2, 3), keepdim=True)
        kernel[0] = 1.0 / kernel[0].numel()
        vit.patch_embed.proj.bias[0] = 0.0
        if vit.pos_embed is not None:
            vit.pos_embed[..., 0] = 0.0
        for block in vit.blocks:
            for last in (block.attn.proj, block.mlp.fc2):
                last.weight[0] = 0.0
                last.bias[0] = 0.0
        mlp = vit.blocks[LAYER].mlp
        first = getattr(mlp, "fc1", None) or mlp.fc1_g
        first.weight[NEURON] = 0.0
        # a bright token is about 5 there after the norm, others are below 2
        first.weight[NEURON, 0] = 4.0
        first.bias[NEURON] = -12.0
        if vit.spec.mlp != "plain":  # a value of -1 at all tokens: the neuron fires with -8
            value, row = (mlp.fc1, 16 + NEURON) if hasattr(mlp, "fc1") else (mlp.fc1_x, NEURON)
            value.weight[row] = 0.0
            value.bias[row] = -1.0
        mlp.fc2.weight[:, NEURON] = 0.0
        mlp.fc2.weight[1, NEURON] = 50.0
    return vit


def pixels(bright: list[tuple[int, int, int]], count: int = 4) -> torch.Tensor:
    """Noise, with some patches (image, row, column) that are 1 everywhere."""
    generator = torch.Generator().manual_seed(1)
    images = 0.1 * torch.randn(count, 3, *SIZE, generator=generator)
    for image, row, column in bright:
        images[image, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 1.0
    return images


BRIGHT = [(0, 0, 1), (0, 3, 5), (1, 2, 2)]


@pytest.mark.parametrize("readout", READOUTS)
def test_artefacts_are_counted_with_their_share_of_the_attention(readout):
    vit, images = planted(**READOUTS[readout]).eval(), pixels(BRIGHT)
    found = vitkit.find_artefacts(vit, images)
    record = vitkit.Record(tokens=[-1])
    with torch.no_grad():
        vit.forward_features(images, record)
        weights = attention(vit, images)
    norms = record.tokens[2][:, vit.spec.num_prefix_tokens :].double().norm(dim=2).numpy()
    median = np.median(norms)
    limit = median + 4 * np.median(abs(norms - median))
    share = count = 0
    for image in range(4):
        for patch in range(24):
            if norms[image, patch] > limit:
                count += 1
                share += float(weights[image].flatten()[patch]) / 4
                assert found.high[image, patch // 6, patch % 6]
    assert found.threshold == pytest.approx(limit, rel=1e-6)
    assert found.count == count == found.high.sum()
    assert found.attention == pytest.approx(share, abs=1e-6)
    assert {tuple(place) for place in np.argwhere(found.norms > 100).tolist()} == set(BRIGHT)
    assert f"{count} of 96 patch tokens" in str(found)


@pytest.mark.parametrize("readout", READOUTS)
def test_the_norms_leave_the_patches_and_clean_images_keep_their_logits(readout):
    vit, images = planted(**READOUTS[readout]), pixels(BRIGHT)
    weights = {name: value.clone() for name, value in vit.state_dict().items()}
    neurons = vitkit.find_register_neurons(vit, images, threshold=100.0)
    assert [(neuron.layer, neuron.neuron) for neuron in neurons] == [(LAYER, NEURON)]
    before = vitkit.find_artefacts(vit, images, threshold=100.0)
    vit.eval()
    with torch.no_grad():
        plain = vit(images)
        with vitkit.test_time_registers(vit, neurons) as with_register:
            moved = with_register(images)
            after = vitkit.find_artefacts(vit, images, threshold=100.0)
            record = vitkit.Record(tokens=[-1])
            vit.forward_features(images, record)
    assert (before.count, after.count) == (3, 0)
    assert after.norms.max() < 20
    place = vit.spec.num_prefix_tokens  # the extra token, behind the model's own
    norms = record.tokens[2][:, place].norm(dim=1)
    assert (norms[:2] > 100).all()  # which has them now
    torch.testing.assert_close(moved[2:], plain[2:], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(moved[:2], plain[:2], atol=1e-3)
    assert vit.spec.num_registers == READOUTS[readout].get("num_registers", 0)
    for name, value in vit.state_dict().items():
        assert torch.equal(value, weights[name])
    with torch.no_grad():
        assert torch.equal(vit(images), plain)  # nothing stays behind


def test_an_image_does_not_depend_on_the_others():
    vit, images = planted().eval(), pixels(BRIGHT)
    neurons = vitkit.find_register_neurons(vit, images)
    with torch.no_grad(), vitkit.test_time_registers(vit, neurons):
        together = vit(images)
        alone = torch.cat([vit(image[None]) for image in images])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)


def test_the_extra_token_acts_as_the_patches_did():
    """The class token, computed by hand from the moved activation."""
    vit, images = planted().eval(), pixels([(0, 0, 1)], count=1)
    neurons = vitkit.find_register_neurons(vit, images)
    with torch.no_grad():
        with vitkit.test_time_registers(vit, neurons):
            found = vit(images)
        tokens = vit.embed(images).tokens
        tokens = torch.cat([tokens[:, :1], torch.zeros(1, 1, WIDTH), tokens[:, 1:]], dim=1)
        for layer, block in enumerate(vit.blocks):
            hide = torch.zeros(26)
            hide[1] = 0 if layer > LAYER else -torch.inf
            q, k, v = block.attn.heads(block.norm1(tokens))
            weights = torch.softmax(q @ k.mT / 4.0 + hide, dim=-1)
            tokens = tokens + block.attn.mix(weights @ v)
            hidden = torch.relu(block.mlp.fc1(block.norm2(tokens)))
            if layer == LAYER:
                hidden[0, 1, NEURON] = hidden[0, 2:, NEURON].max()
                hidden[0, 2:, NEURON] = 0.0
            tokens = tokens + block.mlp.fc2(hidden)
        expected = vit.head(vit.norm(tokens)[:, 0])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_maps_and_gradients_within_the_block():
    vit, images = planted(pooling="mean_all", num_registers=1).train(), pixels(BRIGHT)
    neurons = vitkit.find_register_neurons(vit, images)
    images.requires_grad_()
    with vitkit.test_time_registers(vit, neurons):
        assert not vit.training
        grid = attention(vit, images.detach())
        logits = vit(images)
    assert vit.training
    assert grid.shape == (4, 4, 6)
    torch.testing.assert_close(grid.sum(dim=(1, 2)), torch.ones(4))
    (gradient,) = torch.autograd.grad(logits.sum(), images)
    assert gradient.isfinite().all()


def test_the_effect_in_one_line():
    vit, images = planted(), pixels(BRIGHT)
    neurons = vitkit.find_register_neurons(vit, images)
    effect = vitkit.measure_registers(vit, images, neurons, threshold=100.0)
    assert (effect.before.count, effect.after.count) == (3, 0)
    assert effect.before.attention > 0.01 > effect.after.attention == 0.0
    text = str(effect)
    assert "1 neuron moved to an extra token: high-norm patch tokens 3 -> 0" in text
    by_default = vitkit.measure_registers(vit, images, neurons)
    assert by_default.before.threshold == by_default.after.threshold
    assert by_default.after.norms.max() < by_default.before.norms.max() / 10
    assert str(neurons[0]) == "block 1 neuron 5"


def test_no_artefacts_no_neurons():
    vit, images = planted().eval(), pixels([])
    assert vitkit.find_register_neurons(vit, images, threshold=100.0) == ()
    with torch.no_grad(), vitkit.test_time_registers(vit, ()):
        assert vit.spec.num_registers == 0
        vit(images)
    found = vitkit.find_artefacts(vit, images, threshold=100.0)
    assert (found.count, found.share, found.attention) == (0, 0.0, 0.0)
    assert str(found) == "0 of 96 patch tokens (0.0 %) have a norm above 100"


def test_what_is_wrong_is_named():
    vit, images = planted(), pixels(BRIGHT)
    with pytest.raises(SettingError, match=r"count = 0: must be 1 or more"):
        vitkit.find_register_neurons(vit, images, count=0)
    with pytest.raises(SettingError, match=r"threshold = -1\.0: must be a positive number"):
        vitkit.find_artefacts(vit, images, threshold=-1.0)
    with pytest.raises(SettingError, match=r"no images; pass one image or more"):
        artefacts.count_artefacts(torch.zeros(0, 2, 2), torch.zeros(0, 2, 2))
    for layer, neuron in ((3, 0), (0, 16), (-1, 0)):
        wrong = registers.RegisterNeuron(layer, neuron, 1.0, 0.0, 1.0)
        with (
            pytest.raises(SettingError, match=r"blocks are 0 to 2, neurons 0 to 15"),
            vitkit.test_time_registers(vit, [wrong]),
        ):
            pass

"""examples/research/test_time_registers.py: norms leave the patches, and clean images stay."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from explaining.test_artefacts import BRIGHT, LAYER, NEURON, READOUTS, pixels, planted

import vitkit

SCRIPT = Path(__file__).parents[2] / "examples/research/test_time_registers.py"
pytestmark = pytest.mark.soak
registers = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.mark.parametrize("readout", READOUTS)
def test_the_norms_leave_the_patches_and_clean_images_keep_their_logits(readout):
    vit, images = planted(**READOUTS[readout]), pixels(BRIGHT)
    weights = {name: value.clone() for name, value in vit.state_dict().items()}
    neurons = registers.find_register_neurons(vit, images, threshold=100.0)
    assert [(neuron.layer, neuron.neuron) for neuron in neurons] == [(LAYER, NEURON)]
    before = vitkit.find_artefacts(vit, images, threshold=100.0)
    vit.eval()
    with torch.no_grad():
        plain = vit(images)
        with registers.test_time_registers(vit, neurons) as with_register:
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


def test_the_effect_in_one_line_and_faithfulness_within_the_block():
    vit, images = planted(), pixels(BRIGHT)
    assert registers.find_register_neurons(vit, pixels([]), threshold=100.0) == ()
    neurons = registers.find_register_neurons(vit, images)
    line = registers.effect_of_registers(vit, images, neurons, threshold=100.0)
    assert line.startswith("high-norm patch tokens 3 -> 0 (largest norm ")
    checkpoint = vitkit.Checkpoint(vit, vitkit.Preprocess(image_size=(32, 48)), tuple("abcd"))
    image = (images[0].permute(1, 2, 0).clamp(0, 1) * 255).byte().numpy()
    with registers.test_time_registers(vit, neurons):
        made = vitkit.explain(checkpoint, image, method="occlusion", faithfulness=True)
    assert made.faithfulness is not None


def test_the_script_prints_what_is_known_of_its_own_model(capsys):
    registers.main()
    assert "neurons: block 1 neuron 5\n" in capsys.readouterr().out

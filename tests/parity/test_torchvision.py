"""torchvision's named models have our keys and shapes; tests/weights compares their logits."""

import pytest
from peers import peer, renamed, without_weights
from torchvision_vit import TABLE

import vitkit

NAMES = {  # theirs -> ours
    "vit_b_16": "vit_base_patch16_224",
    "vit_b_32": "vit_base_patch32_224",
    "vit_l_16": "vit_large_patch16_224",
    "vit_h_14": "vit_huge_patch14_224",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_named_models_have_our_keys_and_shapes(name):
    theirs = without_weights(peer("torchvision.models", name))
    ours = without_weights(lambda: vitkit.create_model(NAMES[name]))
    expected = {key: value.shape for key, value in theirs.state_dict().items()}
    made = renamed(ours.state_dict(), TABLE)
    assert {key: value.shape for key, value in made.items()} == expected
    heads = {block.self_attention.num_heads for block in theirs.encoder.layers}
    assert heads == {ours.spec.num_heads}

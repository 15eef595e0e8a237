"""Our LeGrad against torchcam's.

torchcam holds none of our models: it wants blocks with an `nn.MultiheadAttention`. It runs on
torchvision's ViT here, with our weights, and our own readout for the score of each layer.
"""

from functools import partial

import pytest
import torch
from peers import noisy_vit, peer, random_images, relative, renamed
from torchvision_vit import TABLE, shallow

from vitkit.explaining.methods import METHODS
from vitkit.models.presets import preset

CLASSES = torch.tensor([3, 10])


@pytest.mark.parametrize("depth", [1, 3])
def test_legrad(depth):
    spec = preset("vit_base_patch32_224", depth=depth, num_classes=11)
    ours = noisy_vit(spec)
    theirs = shallow(spec)
    theirs.load_state_dict(renamed(ours.state_dict(), TABLE), strict=True, assign=True)
    images = random_images(2, 224)

    def class_logits(tokens: torch.Tensor) -> torch.Tensor:
        return theirs.heads(theirs.encoder.ln(tokens)[:, 0])

    extractor = peer("torchcam.methods", "LeGrad")
    layers = list(theirs.encoder.layers)
    with extractor(theirs, layers, score_projection=class_logits) as method:
        theirs(images)
        (expected,) = method(CLASSES.tolist(), normalized=False)
    compute = partial(METHODS["legrad"].compute, gradients="plain")
    assert relative(compute(ours, images, classes=CLASSES), expected) <= 1e-5
    # the control: the classes swapped
    assert relative(compute(ours, images, classes=CLASSES.flip(0)), expected) > 1e-3

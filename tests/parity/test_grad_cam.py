"""Grad-CAM against pytorch-grad-cam, with its `reshape_transform` for tokens."""

import numpy as np
import pytest
import torch
from peers import peer, random_images
from single_image_vit import CASES, noisy_model
from torch import Tensor

from vitkit.explaining.methods import METHODS

CLASSES = torch.tensor([2, 3])
PRE_NORM = [case for case, fields in CASES.items() if "block" not in fields]


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("case", PRE_NORM)
def test_the_map_of_a_first_norm_is_that_of_pytorch_grad_cam(case, layer):
    grad_cam = peer("pytorch_grad_cam", "GradCAM")
    target = peer("pytorch_grad_cam.utils.model_targets", "ClassifierOutputTarget")
    model = noisy_model(case).float()
    images = random_images(2, 24, 32)
    prefix = model.spec.num_prefix_tokens

    def as_maps(tokens: Tensor) -> Tensor:
        return tokens[:, prefix:].unflatten(1, (3, 4)).permute(0, 3, 1, 2)

    layers = [model.blocks[layer].norm1]
    targets = [target(number) for number in CLASSES.tolist()]
    with grad_cam(model, layers, reshape_transform=as_maps) as cam:
        cam(images, targets)
        hooks = cam.activations_and_grads
        # before it is enlarged to the image and scaled to [0, 1]
        theirs = cam.get_cam_image(
            images, layers[0], targets, hooks.activations[0].numpy(), hooks.gradients[0].numpy()
        )
    theirs = torch.from_numpy(np.maximum(theirs, 0))
    ours = METHODS["grad-cam"].compute(model, images, classes=CLASSES, layer=layer)
    assert theirs.max() > 0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.max().item())

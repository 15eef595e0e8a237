"""Grad-CAM, similarity and PCA: equal to a loop over plain tensors, on every readout."""

import numpy as np
import pytest
import torch
from own_methods import METHODS
from single_image_vit import CASES, PlainViT, assert_close, noisy_model, some_images
from torch import Tensor

IMAGES = some_images()
CLASSES = torch.tensor([2, 3])
grad_cam = METHODS["grad-cam"].compute
similarity = METHODS["similarity"].compute
pca = METHODS["pca"].compute


def plain_grad_cam(plain: PlainViT, image: Tensor, number: int, layer: int) -> Tensor:
    made = plain.run(image)
    (gradient,) = torch.autograd.grad(made.logits[number], made.input_shifts[layer])
    prefix = plain.spec.num_prefix_tokens
    values = []
    for token in range(prefix, len(gradient)):
        value = 0.0
        for channel in range(plain.spec.width):
            weight = gradient[prefix:, channel].mean().item()
            value += weight * made.inputs[layer][token, channel].item()
        values.append(max(value, 0.0))
    return torch.tensor(values, dtype=torch.float64).reshape(plain.rows, plain.columns)


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("case", CASES)
def test_grad_cam_is_the_channels_by_their_mean_gradient(case, layer):
    model = noisy_model(case)
    plain = PlainViT(model)
    pairs = zip(IMAGES, CLASSES.tolist(), strict=True)
    expected = torch.stack([plain_grad_cam(plain, *pair, layer % 3) for pair in pairs])
    assert expected.amax(dim=(1, 2)).gt(0).all()  # patches have a gradient in the last layer too
    assert_close(grad_cam(model, IMAGES, classes=CLASSES, layer=layer), expected)


def plain_similarity(plain: PlainViT, image: Tensor, layer: int, query: int | None) -> Tensor:
    made = plain.run(image)
    prefix = plain.spec.num_prefix_tokens
    tokens = made.normed[layer].detach()
    one = torch.zeros(plain.spec.width, dtype=torch.float64)
    for token, weight in enumerate(made.read.detach()):
        one += weight * tokens[token]
    if query is not None:
        one = tokens[prefix + query]
    values = [(one @ other / one.norm() / other.norm()).item() for other in tokens[prefix:]]
    return torch.tensor(values, dtype=torch.float64).reshape(plain.rows, plain.columns)


@pytest.mark.parametrize("options", [{}, {"layer": 1}, {"query": 6}, {"query": 11, "layer": 0}])
@pytest.mark.parametrize("case", CASES)
def test_similarity_is_the_cosine_with_each_patch(case, options):
    model = noisy_model(case)
    plain = PlainViT(model)
    layer, query = options.get("layer", -1), options.get("query")
    expected = torch.stack([plain_similarity(plain, image, layer, query) for image in IMAGES])
    found = similarity(model, IMAGES, **options)
    assert_close(found, expected)
    if query is not None:
        torch.testing.assert_close(found.flatten(1)[:, query], torch.ones(2).double())


def plain_components(rows: np.ndarray) -> np.ndarray:
    """Coordinates along three eigenvectors of the covariance, whose largest entry is positive."""
    centred = rows - rows.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    columns = []
    for index in np.argsort(values)[::-1][:3]:
        vector = vectors[:, index]
        columns.append(centred @ (vector * np.sign(vector[np.abs(vector).argmax()])))
    return np.stack(columns, axis=1)


def plain_pca(plain: PlainViT, image: Tensor, layer: int) -> Tensor:
    tokens = plain.run(image).normed[layer].detach()
    patches = tokens[plain.spec.num_prefix_tokens :].numpy()
    first = plain_components(patches)[:, 0].reshape(plain.rows, plain.columns)
    inner = first[1:-1, 1:-1]
    outer = (first.sum() - inner.sum()) / (first.size - inner.size)
    if outer > inner.mean():
        first = -first
    foreground = first.ravel() > 0
    parts = plain_components(patches[foreground])
    made = np.zeros((len(patches), 3))
    made[foreground] = (parts - parts.min(axis=0)) / (parts.max(axis=0) - parts.min(axis=0))
    return torch.from_numpy(made).reshape(plain.rows, plain.columns, 3)


@pytest.mark.parametrize("layer", [1, -1])
@pytest.mark.parametrize("case", CASES)
def test_pca_is_three_components_of_the_foreground(case, layer):
    images = some_images(2, 48, 64)  # 48 patches: enough for three components of the foreground
    model = noisy_model(case, image_size=(48, 64))
    plain = PlainViT(model)
    expected = torch.stack([plain_pca(plain, image, layer) for image in images])
    found = pca(model, images, layer=layer)
    assert_close(found, expected)
    assert (found.amin(), found.amax()) == (0, 1)


def test_pca_puts_the_object_in_the_middle_in_front():
    """A square of other patches in the middle is coloured, and the rest is black, either way."""
    for sign in (1.0, -1.0):
        model = noisy_model(image_size=(48, 64), positions="none", depth=1)
        images = some_images(1, 48, 64) * 0.01 - sign
        images[:, :, 16:32, 16:48] += 2 * sign
        front = pca(model, images)[0].amax(dim=-1) > 0
        assert front[2:4, 2:6].all()
        assert not front[[0, 1, 4, 5]].any()


@pytest.mark.parametrize("size", [(8, 8), (8, 16), (16, 16)])
def test_pca_of_few_patches_is_finite(size):
    colours = pca(noisy_model(image_size=size), some_images(2, *size))
    assert torch.isfinite(colours).all()
    assert colours.shape == (2, size[0] // 8, size[1] // 8, 3)

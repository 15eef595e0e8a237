"""Attention, rollout and gradient rollout: equal to a loop over plain tensors, on every readout."""

import pytest
import torch
from own_methods import METHODS
from single_image_vit import CASES, Pass, PlainViT, assert_close, noisy_model, some_images
from torch import Tensor

IMAGES = some_images()
CLASSES = torch.tensor([4, 1])
attention = METHODS["attention"].compute
rollout = METHODS["rollout"].compute
gradient_rollout = METHODS["gradient-rollout"].compute


def patches_of(row: Tensor, plain: PlainViT) -> Tensor:
    """The grid of a row over all tokens."""
    return row[plain.spec.num_prefix_tokens :].reshape(plain.rows, plain.columns)


def plain_attention(plain: PlainViT, image: Tensor, layer: int, head: int | None) -> Tensor:
    made = plain.run(image)
    heads = range(plain.spec.num_heads) if head is None else [head]
    if plain.spec.pooling == "map" and layer == plain.spec.depth - 1:
        total = sum(made.pooling[0][k] for k in heads) / len(heads)
        return total.detach().reshape(plain.rows, plain.columns)
    read = made.read
    if plain.spec.pooling == "map":
        read = torch.ones_like(read)
        read[: plain.spec.num_prefix_tokens] = 0
    row = torch.zeros_like(read)
    for k in heads:
        for token, weight in enumerate(read):
            row += weight * made.maps[layer][k, token].detach()
    grid = patches_of(row, plain)
    return grid / grid.sum()


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("head", [None, 1])
@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_what_the_head_reads(case, layer, head):
    model = noisy_model(case)
    plain = PlainViT(model)
    expected = torch.stack([plain_attention(plain, image, layer, head) for image in IMAGES])
    assert_close(attention(model, IMAGES, layer=layer, head=head), expected)


@pytest.mark.parametrize("case", ["class token", "registers", "MAP", "RoPE"])
def test_attention_of_a_patch_is_its_row(case):
    model = noisy_model(case)
    plain = PlainViT(model)
    expected = []
    for image in IMAGES:
        row = plain.run(image).maps[2].mean(0)[model.spec.num_prefix_tokens + 7]
        grid = patches_of(row.detach(), plain)
        expected.append(grid / grid.sum())
    assert_close(attention(model, IMAGES, query=7), torch.stack(expected))


def plain_rollout(plain: PlainViT, image: Tensor, ratio: float, fusion: str) -> Tensor:
    """The product of whole matrices from the first layer to the last, entry by entry."""
    made = plain.run(image)
    count = len(made.read)
    product = torch.eye(count, dtype=torch.float64)
    for maps in made.maps:
        maps = maps.detach()
        fused = {"mean": maps.mean(0), "max": maps.amax(0), "min": maps.amin(0)}[fusion]
        layer = torch.zeros_like(fused)
        for query in range(count):
            ranked = sorted(range(count), key=lambda token: fused[query, token].item())
            for token in ranked[int(ratio * count) :]:
                layer[query, token] = fused[query, token]
            layer[query, query] += 1
            layer[query] /= layer[query].sum()
        product = layer @ product
    return patches_of(made.read.detach() @ product, plain)


@pytest.mark.parametrize("case", CASES)
def test_rollout_is_the_product_of_the_layers(case):
    model = noisy_model(case)
    plain = PlainViT(model)
    expected = torch.stack([plain_rollout(plain, image, 0.0, "mean") for image in IMAGES])
    assert_close(rollout(model, IMAGES), expected)


@pytest.mark.parametrize("ratio", [0.5, 0.99])
@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
def test_rollout_discards_the_smallest_weights_of_each_row(ratio, fusion):
    model = noisy_model("registers")
    plain = PlainViT(model)
    expected = torch.stack([plain_rollout(plain, image, ratio, fusion) for image in IMAGES])
    assert_close(rollout(model, IMAGES, discard_ratio=ratio, head_fusion=fusion), expected)


def test_rollout_of_uniform_attention_is_known():
    """Without queries each token attends to all alike, and keeps a half in each of three layers."""
    model = noisy_model()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:16] = 0
            block.attn.qkv.bias[:16] = 0
    share = (1 - 0.5**3) / 13  # of one class token and 12 patches
    torch.testing.assert_close(rollout(model, IMAGES), torch.full((2, 3, 4), share).double())


def plain_gradient_rollout(plain: PlainViT, image: Tensor, number: int) -> Tensor:
    """Eq. 5 and 6 with whole matrices, R from the first layer to the last."""
    made: Pass = plain.run(image)
    shifts = [shift for heads in made.shifts for shift in heads] + made.pooling[1:]
    gradients = iter(torch.autograd.grad(made.logits[number], shifts))
    count = len(made.read)
    relevance = torch.eye(count, dtype=torch.float64)
    for maps in made.maps:
        mean = torch.zeros(count, count, dtype=torch.float64)
        for weights in maps:
            mean += (next(gradients) * weights.detach()).clamp(min=0) / len(maps)
        relevance = relevance + mean @ relevance
    self_less = relevance - torch.eye(count)
    if not made.pooling:
        return patches_of(made.read.detach() @ self_less, plain)
    # Eq. 8 to 10: the query of a MAP head is the one token of a decoder
    for query in range(count):
        self_less[query] /= self_less[query].sum()
    row = torch.zeros(count, dtype=torch.float64)
    prefix = plain.spec.num_prefix_tokens
    row[prefix:] = (next(gradients) * made.pooling[0].detach()).clamp(min=0).mean(0)
    return patches_of(row @ (self_less + torch.eye(count)), plain)


@pytest.mark.parametrize("case", CASES)
def test_gradient_rollout_is_the_recursion_over_the_layers(case):
    model = noisy_model(case)
    plain = PlainViT(model)
    pairs = zip(IMAGES, CLASSES.tolist(), strict=True)
    expected = torch.stack([plain_gradient_rollout(plain, *pair) for pair in pairs])
    found = gradient_rollout(model, IMAGES, classes=CLASSES, gradients="plain")
    assert_close(found, expected)


@pytest.mark.parametrize("case", ["class token", "mean", "MAP"])
def test_gradient_rollout_of_small_gradients_keeps_its_digits(case):
    """In single precision a gradient of a millionth would be lost beside a 1."""
    model = noisy_model(case)
    with torch.no_grad():
        model.head.weight *= 1e-6
    expected = gradient_rollout(model, IMAGES, classes=CLASSES)
    found = gradient_rollout(model.float(), IMAGES.float(), classes=CLASSES)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * expected.max())

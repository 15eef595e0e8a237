"""Numbers of what a model has learned, against plain loops over images, heads and tokens."""

import math

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from torch import nn

import vitkit

SIZE = (24, 40)
"""A rectangle of 3 x 5 patches."""
MODELS = {
    "class token": {},
    "mean": {"class_token": False, "pooling": "mean"},
    "MAP": {"class_token": False, "pooling": "map"},
    "registers": {"num_registers": 2, "pooling": "cls_mean"},
    "distilled": {"distillation_token": True},
    "rotary": {"positions": "rope", "positions_cover_prefix": True},
    "post-norm": {"block": "post_norm"},
    "hybrid": {"stem": "resnet", "resnet_layers": ()},
}


def model(**fields) -> vitkit.ViT:
    spec = {
        "image_size": SIZE, "patch_size": 8, "width": 16, "depth": 2, "num_heads": 2,
        "mlp_width": 24, "num_classes": 3,
    }  # fmt: skip
    vit = vitkit.ViT(vitkit.ViTSpec(**spec | fields))
    fill_with_noise(vit, std=0.4)
    return vit.eval()


def images(count: int = 5) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (*SIZE, 3), dtype=np.uint8) for _ in range(count)]


def explained(vit: vitkit.ViT, size: tuple[int, int] = SIZE) -> vitkit.ModelExplanation:
    preprocess = vitkit.Preprocess(image_size=size, fit="squash")
    return vitkit.explain_model(vitkit.Checkpoint(vit, preprocess, ()), images(), name="tiny")


def learned(vit: vitkit.ViT) -> vitkit.ModelExplanation:
    """What the weights alone say."""
    return vitkit.explain_model(vitkit.Checkpoint(vit, vitkit.Preprocess(image_size=SIZE), ()))


def recorded(vit: vitkit.ViT, size: tuple[int, int] = SIZE) -> vitkit.Record:
    preprocess = vitkit.Preprocess(image_size=size, fit="squash")
    record = vitkit.Record(attention=[0, 1], tokens=[0, 1])
    with torch.no_grad():
        vit(torch.stack([preprocess(image) for image in images()]), record)
    return record


def entropy_of(row: list[float]) -> float:
    return -sum(weight * math.log(weight) for weight in row if weight > 0)


def distance_of(row: list[float], query: int, columns: int, side: int = 8) -> float:
    total = walked = 0.0
    for key, weight in enumerate(row):
        down = side * (query // columns - key // columns)
        across = side * (query % columns - key % columns)
        walked += weight * math.hypot(down, across)
        total += weight
    return walked / total


@pytest.mark.parametrize("kind", MODELS)
def test_distance_and_entropy_by_plain_loops(kind):
    vit = model(**MODELS[kind])
    found = explained(vit).depth
    prefix, record = vit.spec.num_prefix_tokens, recorded(vit)
    for layer in range(2):
        maps = record.attention[layer].double().numpy()
        for head in range(2):
            entropies, distances = [], []
            for image in range(5):
                rows = maps[image, head].tolist()
                entropies += [entropy_of(row) for row in rows]
                distances += [
                    distance_of(rows[prefix + query][prefix:], query, columns=5)
                    for query in range(15)
                ]
            assert found.entropy[layer, head] == pytest.approx(np.mean(entropies), rel=1e-6)
            assert found.distance[layer, head] == pytest.approx(np.mean(distances), rel=1e-6)
    assert found.images == 5
    assert found.largest_entropy == pytest.approx(math.log(15 + prefix))
    np.testing.assert_allclose(found.relative_entropy, found.entropy / math.log(15 + prefix))
    equal = [distance_of([1.0] * 15, query, columns=5) for query in range(15)]
    assert found.uniform_distance == pytest.approx(np.mean(equal))


def test_batches_make_no_difference(monkeypatch):
    vit = model()
    together = explained(vit)
    monkeypatch.setattr("vitkit.explaining.measure.LARGEST_BATCH", 2)
    alone = explained(vit)
    np.testing.assert_allclose(alone.depth.distance, together.depth.distance, rtol=1e-6)
    np.testing.assert_allclose(alone.depth.entropy, together.depth.entropy, rtol=1e-6)
    assert alone.artefacts.count == together.artefacts.count


def test_the_artefacts_are_those_of_find_artefacts():
    vit = model()
    preprocess = vitkit.Preprocess(image_size=SIZE, fit="squash")
    expected = vitkit.find_artefacts(vit, torch.stack([preprocess(image) for image in images()]))
    found = explained(vit).artefacts
    np.testing.assert_array_equal(found.high, expected.high)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-6)
    assert found.attention == pytest.approx(expected.attention, abs=1e-6)


def test_equal_attention_and_attention_to_oneself():
    """Heads whose numbers are known: all queries zero, or queries equal to far longer keys."""
    vit = model(class_token=False, pooling="mean", width=32, depth=1, positions="none", num_heads=1)
    with torch.no_grad():
        vit.blocks[0].attn.qkv.weight.zero_()
    found = explained(vit).depth
    assert found.entropy[0, 0] == pytest.approx(math.log(15), rel=1e-6)
    assert found.relative_entropy[0, 0] == pytest.approx(1)
    assert found.distance[0, 0] == pytest.approx(found.uniform_distance, rel=1e-6)
    with torch.no_grad():
        vit.blocks[0].attn.qkv.weight[:32] = 1e3 * torch.eye(32)
        vit.blocks[0].attn.qkv.weight[32:64] = torch.eye(32)
        vit.blocks[0].attn.qkv.bias.zero_()
        vit.blocks[0].norm1.weight.fill_(1.0)
        vit.blocks[0].norm1.bias.zero_()
    found = explained(vit).depth
    assert found.entropy[0, 0] == pytest.approx(0, abs=1e-6)
    assert found.distance[0, 0] == pytest.approx(0, abs=1e-6)


def plain_components(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return components and shares by the eigenvectors of the covariance matrix."""
    rows = kernel.reshape(len(kernel), -1)
    values, vectors = np.linalg.eigh(np.cov(rows, rowvar=False))
    order = np.argsort(-values)
    return vectors.T[order], values[order] / values.sum()


@pytest.mark.parametrize("stem", ["convolution", "linear", "normed_linear"])
@pytest.mark.parametrize("channels", [1, 3])
def test_filters_are_principal_components(stem, channels):
    vit = model(stem=stem, in_channels=channels, patch_size=(2, 4), width=64)
    found = learned(vit).filters
    kernel = vit.patch_embed.proj.weight.detach().double().reshape(64, channels, 2, 4)
    if stem == "normed_linear":
        scale = vit.patch_embed.norm_patches.weight.detach().double()
        kernel = kernel * scale.reshape(channels, 2, 4)
    expected, shares = plain_components(kernel.numpy())
    assert found.components.shape == (8 * channels, 2, 4, channels)
    np.testing.assert_allclose(found.shares, shares, rtol=1e-6)
    for component, direction in zip(found.components[:5], expected, strict=False):
        flat = component.transpose(2, 0, 1).ravel()
        assert abs(flat @ direction) == pytest.approx(1, abs=1e-6)
        assert flat[abs(flat).argmax()] > 0
    assert not found.missing


def test_directions_in_which_the_filters_do_not_differ_are_no_components():
    vit = model()
    weight = vit.patch_embed.proj.weight.data
    filters, values = len(weight), weight[0].numel()
    assert filters < values
    assert len(learned(vit).filters.shares) == filters - 1  # around their mean
    weight[3:] = weight[0]
    found = learned(vit).filters
    assert found.components.shape[0] == len(found.shares) == 2
    assert found.shares.sum() == pytest.approx(1)
    weight[:] = weight[0]
    equal = learned(vit).filters
    assert equal.components.size == equal.shares.size == 0
    assert equal.missing.startswith("All first-layer filters are equal")


def test_filters_of_hybrids():
    resnet = model(**MODELS["hybrid"])
    found = learned(resnet).filters
    first = resnet.patch_embed.backbone.conv
    kernel = first.weight.detach().double()
    axes = {"dim": (1, 2, 3), "keepdim": True}
    kernel = (kernel - kernel.mean(**axes)) / kernel.std(**axes, correction=0)
    expected, shares = plain_components(kernel.numpy())
    assert (found.components.shape, found.layer) == ((28, 7, 7, 3), "first convolution")
    np.testing.assert_allclose(found.shares, shares[:28], rtol=1e-5)
    flat = found.components[0].transpose(2, 0, 1).ravel()
    assert abs(flat @ expected[0]) == pytest.approx(1, abs=1e-5)

    spec = resnet.spec.replace(stem="backbone")
    convolutions = nn.Sequential(nn.Identity(), nn.Conv2d(3, 8, 4, 4))
    found = learned(vitkit.ViT(spec, convolutions)).filters
    assert found.components.shape == (7, 4, 4, 3)  # 8 filters around their mean
    pool = learned(vitkit.ViT(spec, nn.AvgPool2d(4))).filters
    assert pool.components.size == 0
    assert pool.missing == "The backbone has no convolution that takes the image."


@pytest.mark.parametrize("fields", [{}, {"num_registers": 2}, {"positions_cover_prefix": False}])
def test_similarity_of_learned_positions_by_plain_loops(fields):
    vit = model(**fields)
    found = learned(vit).positions
    table = vit.pos_embed[0, -15:].detach().double().numpy()
    assert found.cosine.shape == (3, 5, 3, 5)
    for one in range(15):
        for other in range(15):
            a, b = table[one], table[other]
            cosine = a @ b / math.sqrt((a @ a) * (b @ b))
            place = (one // 5, one % 5, other // 5, other % 5)
            assert found.cosine[place] == pytest.approx(cosine, abs=1e-6)
    assert found.kind == "learned position embedding"


def test_similarity_of_rotary_positions_is_the_product_of_turned_equal_vectors():
    """A product of equal vectors falls by the cosine of the angle between them."""
    vit = model(positions="rope", width=16, num_heads=2)
    found = learned(vit).positions.cosine.reshape(15, 15)
    sin, cos = vit.rope((3, 5), torch.zeros(1, 16, 16))
    angles = torch.atan2(sin, cos)[-15:].double()
    products = (angles[:, None] - angles).cos().mean(-1).numpy()
    np.testing.assert_allclose(found, products, atol=1e-6)


@pytest.mark.parametrize("kind", ["sincos_1d", "sincos_2d", "sincos_2d_moco", "sincos_2d_mae"])
def test_similarity_of_fixed_positions(kind):
    vit = model(positions=kind)
    found = learned(vit).positions
    tokens = torch.zeros(1, 16, 16)
    table = vit.embedding.positions(None, (3, 5), tokens)[0, -15:].double().numpy()
    lengths = np.linalg.norm(table, axis=1)
    expected = table @ table.T / np.outer(lengths, lengths)
    np.testing.assert_allclose(found.cosine.reshape(15, 15), expected, atol=1e-6)
    assert found.kind == f"fixed positions ({kind})"

"""Token merging (examples/research) against loops, and models whose patches are equal."""

import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from noise import fill_with_noise

import vitkit
from vitkit import SettingError

SCRIPT = Path(__file__).parents[1] / "examples/research/token_merging.py"
merging = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
pytestmark = pytest.mark.soak
SMALL = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 3, "num_heads": 2,
         "mlp_width": 24, "num_classes": 5}  # fmt: skip


def small(**overrides: object) -> vitkit.ViT:
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL | overrides)).eval()
    fill_with_noise(model, std=0.4)
    return model


def random_images(count: int, size: int = 32) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7))


def norm(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def merging_block(
    tokens: list[np.ndarray], sizes: list[float], weights: dict[str, np.ndarray],
    block: str, heads: int, prefix: int, r: int,
) -> tuple[list[np.ndarray], list[float]]:  # fmt: skip
    """One block of one image, from the paper's Sec. 3, token by token."""
    z = np.array(tokens)
    count, width = z.shape
    h = width // heads
    qkv = linear(norm(z, weights, f"{block}.norm1"), weights, f"{block}.attn.qkv")
    q, k, v = qkv.reshape(count, 3, heads, h).transpose(1, 2, 0, 3)
    mixed = np.zeros((count, width))
    for head in range(heads):
        for query in range(count):
            terms = [sizes[key] * math.exp(q[head, query] @ k[head, key] / math.sqrt(h))
                     for key in range(count)]  # fmt: skip
            row = sum(term * value for term, value in zip(terms, v[head], strict=True))
            mixed[query, head * h : (head + 1) * h] = row / sum(terms)
    z = z + linear(mixed, weights, f"{block}.attn.proj")

    metric = k.mean(axis=0)
    edges = []
    for a in range(prefix, count, 2):
        cosines = {b: metric[a] @ metric[b] / np.linalg.norm(metric[a]) / np.linalg.norm(metric[b])
                   for b in range(prefix + 1, count, 2)}  # fmt: skip
        b = max(cosines, key=lambda b: cosines[b])
        edges.append((cosines[b], a, b))
    edges.sort(reverse=True)
    groups = {b: [b] for b in range(prefix + 1, count, 2)}
    for _, a, b in edges[:r]:
        groups[b].append(a)
    kept = [[i] for i in range(prefix)] + [[a] for _, a, _ in edges[r:]] + list(groups.values())
    merged_sizes = [sum(sizes[i] for i in group) for group in kept]
    merged = [sum(sizes[i] * z[i] for i in group) / size
              for group, size in zip(kept, merged_sizes, strict=True)]  # fmt: skip

    z = np.array(merged)
    hidden = linear(norm(z, weights, f"{block}.norm2"), weights, f"{block}.mlp.fc1")
    erf = np.vectorize(math.erf)
    hidden = hidden * (1 + erf(hidden / math.sqrt(2))) / 2
    return list(z + linear(hidden, weights, f"{block}.mlp.fc2")), merged_sizes


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_logits_are_those_of_the_algorithm_in_loops(pooling):
    model = small(pooling=pooling, num_registers=1).double()
    images = random_images(3).double()
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    expected = []
    for z_0 in model.embed(images).tokens.detach().numpy():
        tokens, sizes = list(z_0), [1.0] * 18  # class token, register, 16 patches
        for layer in range(3):
            tokens, sizes = merging_block(tokens, sizes, weights, f"blocks.{layer}", 2, 2, 3)
        assert len(tokens) == 9
        assert sum(sizes) == 18
        assert max(sizes) > 2
        z = norm(np.array(tokens), weights, "norm")
        patches = zip(sizes[2:], z[2:], strict=True)
        y = z[0] if pooling == "cls" else sum(size * token for size, token in patches) / 16
        expected.append(linear(y, weights, "head"))
    logits = merging.merge_tokens(model, 3)(images).detach().numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-9)


def test_nothing_changes_without_merging():
    model = small(layer_scale=0.5, image_size=(8, 16))
    images = random_images(2)
    assert torch.equal(merging.merge_tokens(model, 0)(images), model(images))
    # a single patch has no partner
    single = images[:, :, :8, :8]
    torch.testing.assert_close(merging.merge_tokens(model, 1)(single), model(single))


@pytest.mark.parametrize("pooling", ["cls", "mean", "mean_all", "cls_mean", "map"])
def test_merging_equal_patches_changes_no_logits(pooling):
    model = small(positions="none", pooling=pooling, num_registers=2)
    images = torch.zeros(2, 3, 32, 32)
    images[0, :, :8, :8] = 2.0  # one patch of another kind
    images[1, :, 16:24, 8:24] = -2.0  # two: in each block, 3 pairs of A and B are of equal ones
    expected = model(images)
    assert not torch.allclose(expected[0], expected[1], atol=0.1)
    torch.testing.assert_close(
        merging.merge_tokens(model, 3)(images), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.filterwarnings("ignore")  # of the exporter, about its own insides
def test_an_exported_program_gives_the_same_logits_for_any_batch():
    merged = merging.merge_tokens(small(pooling="cls_mean", depth=2), 3)
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(merged, (random_images(2),), dynamic_shapes=(batch,)).module()
    for images in map(random_images, (1, 2, 5)):
        torch.testing.assert_close(program(images), merged(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("r", "expected"), [(3, [15, 12, 9]), (5, [13, 8, 5]), (8, [10, 6, 4])])
def test_tokens_of_each_layer_are_as_computed(r, expected):
    model = small(distillation_token=True)
    merged = merging.merge_tokens(model, r)
    counts = []
    for block in merged.blocks:
        block.register_forward_hook(lambda *_: pytest.fail("a block ran without merging"))
        block.mlp.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].shape[1]))
    features = merged.forward_features(random_images(2))
    assert counts == merging.tokens_per_layer(model.spec, r) == expected
    assert features.patches.shape == (2, 16, 16)
    assert len(features.patches[0].unique(dim=0)) == expected[-1] - 2


def test_fewer_multiply_adds_are_expected():
    # qkv, proj, MLP and attention of 17 -> 9 and 9 -> 5 tokens, stem and head; matching adds more
    blocks = [4 * 256 * t + 2 * t * t * 16 + 2 * 16 * 24 * m for t, m in ((17, 17), (17, 17))]
    merged = [4 * 256 * t + 2 * t * t * 16 + 2 * 16 * 24 * m for t, m in ((17, 9), (9, 5))]
    others = 16 * 192 * 16 + 16 * 5
    least = (sum(merged) + others) / (sum(blocks) + others)
    assert least < merging.compute_share(small(depth=2), 8) < least + 0.1


def test_weights_are_shared_and_modules_are_not():
    model = small()
    merged = merging.merge_tokens(model, 2)
    assert merged.head.weight is model.head.weight
    assert list(merged.state_dict()) == list(model.state_dict())
    merged.train()
    assert not model.blocks[0].training
    merged(random_images(2)).sum().backward()
    assert model.patch_embed.proj.weight.grad.abs().sum() > 0


def test_impossible_requests_are_refused():
    for wrong in (-1, True, 9):
        with pytest.raises(SettingError, match=r"merge = .* whole number from 0 to 8, half of the"):
            merging.merge_tokens(small(), wrong)
    for fields, word in (({"positions": "rope"}, "rotary"), ({"block": "post_norm"}, "post_norm")):
        with pytest.raises(SettingError, match=word):
            merging.merge_tokens(small(**fields), 2)
    merged = merging.merge_tokens(small(), 2)
    with pytest.raises(SettingError, match="no Record can be kept"):
        merged(random_images(1), vitkit.Record(tokens=[0]))
    with pytest.raises(SettingError, match="no inner layer"):
        merged.get_intermediate_layers(random_images(1))


def test_the_script_compares_predictions_with_and_without(tmp_path, monkeypatch, capsys):
    model = small(image_size=8, patch_size=2, in_channels=1, num_classes=10)
    preprocess = vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.5,))
    classes = tuple("0123456789")
    path = vitkit.save(tmp_path / "m.safetensors", model, preprocess=preprocess, classes=classes)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(path), "digits", "--merge", "1"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["top-1", "same", "multiply-adds:"]

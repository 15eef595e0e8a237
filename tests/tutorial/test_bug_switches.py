"""Chapter 14: each switch makes its mistake, and nothing else; without one it is the plain ViT."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial"
REFERENCES = ("correct", "dropout", "sines", "sgd")
MODULES = ("bug_variants", "buggy_vit", "html_table", "measure_bugs", "plain_vit", "experiment")


@pytest.fixture(scope="module", autouse=True)
def tutorial() -> Iterator[None]:
    """The folder of the chapters, for imports."""
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.syspath_prepend(TUTORIAL)
        yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def variants():
    from bug_variants import FOLLOW_UPS, VARIANTS

    return VARIANTS | FOLLOW_UPS


def names() -> list[str]:
    """The variants with a bug, read from the file: its names are not known before the import."""
    results = json.loads((TUTORIAL / "results" / "bugs.json").read_text())
    return [row["variant"] for row in results["variants"] if row["variant"] not in REFERENCES]


def made(variant, seed: int = 0):
    torch.manual_seed(seed)
    return variant.model()


def few(count: int = 8) -> tuple[Tensor, Tensor]:
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return images, torch.arange(count) % 10


def trained(variant, steps: int = 3) -> tuple[list[float], Tensor, list[tuple[int, ...]]]:
    """Losses of a few steps, logits after them, and the shapes of what the optimizer has."""
    model, (images, labels) = made(variant).train(), few()
    optimizer, losses = variant.optimize(model, 0.01), []
    for _ in range(steps):
        loss = variant.loss(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    variant.prepare_to_evaluate(model)
    torch.manual_seed(0)
    with torch.no_grad():
        return losses, model(images), [tuple(p.shape) for p in model.parameters()]


@pytest.mark.parametrize("sizes", [{}, {"image_size": 12, "patch_size": 3, "width": 24}])
def test_without_a_bug_it_is_the_plain_vit_bit_for_bit(variants, sizes):
    from buggy_vit import SIZES
    from plain_vit import PlainViT

    torch.manual_seed(3)
    plain = PlainViT(**SIZES | sizes)
    torch.manual_seed(3)
    model = variants["correct"].model(**sizes)
    assert plain.state_dict().keys() == model.state_dict().keys()
    side = (SIZES | sizes)["image_size"]
    images = torch.rand(4, 1, side, side)
    for a, b in ((plain.train(), model.train()), (plain.eval(), model.eval())):
        assert torch.equal(a(images), b(images))
    plain(images).sum().backward()
    model(images).sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("name", names())
def test_a_switch_changes_the_training_or_the_logits(variants, name):
    variant = variants[name]
    losses, logits, shapes = trained(variant)
    right_losses, right_logits, right_shapes = trained(variants[variant.against])
    assert losses != right_losses or shapes != right_shapes or not torch.equal(logits, right_logits)
    assert variants[variant.against].bugs == frozenset()


def test_a_reference_is_the_same_twice(variants):
    for name in REFERENCES:
        first, second = trained(variants[name]), trained(variants[name])
        assert first[0] == second[0]
        assert torch.equal(first[1], second[1])


def test_each_switch_in_the_code_is_a_variant_and_each_variant_a_switch(variants):
    code = "".join((TUTORIAL / f"{name}.py").read_text() for name in ("buggy_vit", "bug_variants"))
    switches = set(re.findall(r'"(\w+)" (?:not )?in (?:self\.)?bugs', code))
    switches |= {"no_final_norm"}  # beside no_norm in one set
    assert switches == set().union(*(variant.bugs for variant in variants.values()))


@torch.no_grad()
def test_the_switches_make_the_mistakes_that_they_name(variants):
    images, _ = few()
    one = made(variants["one_head"])
    one(images)
    assert one.blocks[0].attn.weights.shape == (8, 1, 17, 17)
    assert len(made(variants["exponent_zero"]).pos_embed[0].T.unique(dim=0)) == 2
    assert len(made(variants["sines"]).pos_embed[0].T.unique(dim=0)) == 32
    assert made(variants["ones"]).pos_embed.unique().tolist() == [1.0]
    assert 0.9 < made(variants["large_normal"]).pos_embed.std() < 1.1
    assert not made(variants["zero_positions"]).pos_embed.any()
    careless = made(variants["careless_dropout"]).eval()
    assert not torch.equal(careless(images), careless(images))
    right = made(variants["correct"]).eval()
    assert torch.equal(right(images), right(images))
    perfect = 100.0 * torch.eye(10)
    assert variants["double_softmax"].loss(perfect, torch.arange(10)) == pytest.approx(
        1.4612, abs=1e-4
    )
    assert variants["loss_divided"].loss(
        torch.zeros(16, 10), torch.zeros(16).long()
    ) == pytest.approx(2.302585 / 16)


@torch.no_grad()
def test_strips_are_consecutive_pixels(variants):
    model = made(variants["reshape"])
    pixels = torch.arange(64.0).view(1, 1, 8, 8)
    weight = torch.zeros(32, 4)
    weight[:4] = torch.eye(4)
    model.patch_embed.proj.weight.copy_(weight.view(32, 1, 2, 2))
    model.patch_embed.proj.bias.zero_()
    assert model._patches(pixels)[0, 1, :4].tolist() == [4.0, 5.0, 6.0, 7.0]
    model.bugs = frozenset()
    assert model._patches(pixels)[0, 1, :4].tolist() == [2.0, 3.0, 10.0, 11.0]


def test_heads_in_a_list_stay_as_they_were(variants):
    variant = variants["heads_in_a_list"]
    model, (images, labels) = made(variant), few()
    before = model.blocks[0].attn.hidden[0].weight.clone()
    optimizer = variant.optimize(model, 0.01)
    variant.loss(model(images), labels).backward()
    optimizer.step()
    assert torch.equal(before, model.blocks[0].attn.hidden[0].weight)


def test_adam_with_decay_moves_weights_without_gradient_by_the_rate(variants):
    weights = torch.nn.Linear(4, 4)
    for parameter in weights.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = weights.weight.detach().clone()
    variants["coupled_decay"].optimize(weights, 0.01).step()
    moved = (before - weights.weight.detach()).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-3, atol=0)


def test_the_committed_measurements_are_of_these_variants(variants):
    from bug_variants import FOLLOW_UPS, RATES, VARIANTS
    from measure_bugs import FASHION_VARIANTS

    for name, listed in (
        ("bugs", VARIANTS),
        ("bugs-positions", FOLLOW_UPS),
        ("bugs-fashion", FASHION_VARIANTS),
    ):
        results = json.loads((TUTORIAL / "results" / f"{name}.json").read_text())
        assert [row["variant"] for row in results["variants"]] == list(listed)
        for row in results["variants"]:
            rates = RATES[variants[row["variant"]].optimizer]
            assert {run["lr"] for run in row["rows"]} == set(rates)
            means = {
                rate: sum(run["validation"] for run in row["rows"] if run["lr"] == rate)
                for rate in rates
            }
            assert row["lr"] == max(rates, key=means.get), "the rate is chosen on validation"


def test_a_table_escapes_and_wraps():
    from html_table import Link, Table

    table = Table(("a<b", "c"), [(Link("x & y", "p.html#q"), "1"), ("word " * 40, "2")], (1,))
    html = table._repr_html_()
    assert '<a href="p.html#q">x &amp; y</a>' in html
    assert "a&lt;b" in html
    assert max(map(len, repr(table).splitlines())) <= 88

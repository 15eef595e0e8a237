"""The expensive parts: weights and class matter, a map is stable, the test fits the model."""

from __future__ import annotations

import io
import json
import zlib

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from own_methods import own_method
from PIL import Image

import vitkit
from vitkit.data.images.preprocess import preprocess_images
from vitkit.errors import SettingError
from vitkit.explaining.methods import METHODS
from vitkit.explaining.token_subset import TokenSubsets
from vitkit.explaining.truth.class_matters import MosaicViT, build_mosaics, class_matters
from vitkit.explaining.truth.maps import MapMaker
from vitkit.explaining.truth.measure import measure_truth
from vitkit.explaining.truth.model_fit import ModelFit, model_fit
from vitkit.explaining.truth.stability import stability
from vitkit.explaining.truth.weights_matter import weights_matter, with_random_top


def model(**fields) -> vitkit.ViT:
    fields = {"image_size": (16, 24), "num_classes": 5, "depth": 4} | fields
    vit = vitkit.ViT(vitkit.ViTSpec(patch_size=8, width=16, num_heads=2, mlp_width=16, **fields))
    fill_with_noise(vit, std=0.4)
    return vit.eval()


def some_images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 16, 24, generator=torch.Generator().manual_seed(seed))


def grid_of(vit, images) -> tuple[int, int, int]:
    return (len(images), images.shape[2] // 8, images.shape[3] // 8)


def brightness(vit, images):
    """A map that ignores the model: the mean of each patch."""
    return images.mean(1).unfold(1, 8, 8).unfold(2, 8, 8).mean((3, 4))


def hash_of_weights(vit, images):
    """A map that is nothing but the model: numbers seeded by its weights."""
    numbers = b"".join(p.detach().numpy().tobytes() for p in vit.parameters())
    generator = torch.Generator().manual_seed(zlib.crc32(numbers))
    return torch.rand(grid_of(vit, images), generator=generator)


CLASSES = torch.tensor([0, 1, 2, 3, 4] * 20)


def test_weights_do_not_matter_to_a_method_that_ignores_them():
    vit, images = model(), some_images(100)
    blind = MapMaker(own_method(brightness))
    assert weights_matter(blind, vit, images, CLASSES) == pytest.approx(1.0)
    hashed = MapMaker(own_method(hash_of_weights))
    assert abs(weights_matter(hashed, vit, images, CLASSES)) < 0.15
    assert weights_matter(hashed, vit, images, CLASSES, blocks=0) != 1  # the head alone, too
    constant = MapMaker(own_method(lambda vit, images: torch.ones(grid_of(vit, images))))
    assert weights_matter(constant, vit, images, CLASSES) is None


def test_a_random_top_is_a_copy_and_keeps_the_values_and_the_bottom():
    vit = model()
    before = {name: value.clone() for name, value in vit.state_dict().items()}
    random = with_random_top(vit, 1)
    for name, value in random.state_dict().items():
        assert torch.equal(vit.state_dict()[name], before[name])
        top = name.startswith(("blocks.3.", "norm.", "head."))
        assert torch.equal(value, before[name]) != (top and value.numel() > 1), name
        assert torch.equal(value.flatten().sort().values, before[name].flatten().sort().values)
    again = with_random_top(vit, 1).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in random.state_dict().items())
    with pytest.raises(SettingError, match="blocks = 5: must be from 0 to 4"):
        with_random_top(vit, 5)


def coloured(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose every pixel is the number of their class."""
    labels = torch.arange(count) % 6
    return labels.float().view(-1, 1, 1, 1).expand(-1, 3, 16, 24).contiguous(), labels


def oracle(vit, images, *, classes):
    return (brightness(vit, images) == classes.view(-1, 1, 1)).float()


def against_the_others(vit, images, *, classes):
    """Everywhere the same positive values, and as many negative ones outside the class's cell."""
    inside = oracle(vit, images, classes=classes)
    is_even = torch.arange(inside.shape[1]).unsqueeze(1) % 2 == 0  # a cell has two rows of patches
    return torch.where(is_even, 1.0, -0.9 * (1 - inside))


def test_an_oracle_points_at_its_class_always_and_a_constant_map_a_quarter():
    images, labels = coloured(30)
    vit = model(num_classes=6)
    found = class_matters(MapMaker(own_method(oracle, by_class=True)), vit, images, labels)
    assert (found.mosaics, found.pointing, found.mass, found.high) == (100, 1.0, 1.0, 1.0)
    assert 0.95 < found.low < 1
    constant = MapMaker(own_method(lambda vit, images: torch.ones(grid_of(vit, images))))
    found = class_matters(constant, vit, images, labels, count=400)
    assert found.mass == pytest.approx(0.25)
    assert found.low < 0.25 < found.high
    assert found.pointing == pytest.approx(0.25, abs=0.07)
    # what a patch says against the class counts against its cell
    signed = MapMaker(own_method(against_the_others, by_class=True))
    found = class_matters(signed, vit, images, labels)
    assert found.pointing == 1.0
    assert found.positive_pointing < 0.5
    negative = MapMaker(own_method(lambda vit, images: -torch.ones(grid_of(vit, images))))
    found = class_matters(negative, vit, images, labels)
    assert (found.pointing, found.mass) == (0.0, 0.25)  # it points nowhere
    three = labels < 3
    assert class_matters(constant, vit, images[three], labels[three]) is None


def test_mosaics_are_four_classes_and_seeded():
    images, labels = coloured(30)
    sheets = []

    def keep(vit, images, *, classes):
        sheets.append(images)
        return brightness(vit, images)

    maps = MapMaker(own_method(keep, by_class=True))
    first = class_matters(maps, model(num_classes=6), images, labels, count=10, seed=4)
    assert all(sheet.shape[1:] == (3, 32, 48) for sheet in sheets)
    for sheet in torch.cat(sheets):
        corners = {float(sheet[0, row, column]) for row in (0, 31) for column in (0, 47)}
        assert len(corners) == 4
    assert first == class_matters(maps, model(num_classes=6), images, labels, count=10, seed=4)


@pytest.mark.parametrize(
    "fields",
    [{}, {"num_registers": 2}, {"class_token": False, "pooling": "mean"}, {"positions": "rope"}],
    ids=["class token", "registers", "mean", "rope"],
)
def test_a_cell_of_a_mosaic_has_the_tokens_of_a_whole_image(fields):
    vit = model(num_classes=6, **fields)
    numbers = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])
    images = some_images(4)
    seen = MosaicViT(vit)
    sheets = build_mosaics(images, numbers)
    assert torch.equal(sheets[0, :, 16:, :24], images[2])
    prefix = vit.spec.num_prefix_tokens
    with torch.inference_mode():
        tokens, context, grid = seen.embed(sheets)
        alone, angles, _ = vit.embed(images)
        patches = tokens[:, prefix:].unflatten(1, grid)
        assert grid == (4, 6)
        for row, column, cell in ((0, 0, 0), (0, 3, 1), (2, 0, 2), (2, 3, 3)):
            part = patches[:, row : row + 2, column : column + 3].flatten(1, 2)
            torch.testing.assert_close(part, alone[numbers[:, cell], prefix:])
        # with the tokens of one cell alone the model sees one image
        own = torch.tensor([[3, 4, 5, 9, 10, 11]] * 2)
        found = TokenSubsets(seen, sheets).logits(own)
        torch.testing.assert_close(found, vit(images[numbers[:, 1]]), atol=1e-5, rtol=1e-4)
    assert (angles.rotation is None) == (context.rotation is None)
    assert vit(images).shape == (4, 6)  # the model itself sees images as before


def test_the_model_itself_needs_the_cell_of_the_class():
    """A model of one linear block that reads the mean colour: class k is channel k."""
    vit = vitkit.ViT(
        vitkit.ViTSpec(
            image_size=(16, 24), patch_size=8, width=4, num_heads=1, mlp_width=4, num_classes=4,
            depth=1, class_token=False, pooling="mean", final_norm=False, positions="none",
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.zero_()
        vit.patch_embed.proj.weight[:3] = torch.eye(3).view(3, 3, 1, 1) / 64
        vit.head.weight[:3, :3] = 10 * torch.eye(3)
        vit.head.bias[3] = 1.0
    labels = torch.arange(24) % 4
    images = torch.zeros(24, 3, 16, 24)
    for row, label in enumerate(labels.tolist()):
        if label < 3:
            images[row, label] = 1
    constant = MapMaker(own_method(lambda vit, images: torch.ones(grid_of(vit, images))))
    assert class_matters(constant, vit.eval(), images, labels, count=60).model_pointing == 1
    vit.head.weight.data.neg_()  # now each class is the colour that is not there
    assert class_matters(constant, vit, images, labels, count=60).model_pointing == 0


def test_stability_compares_with_the_shifted_and_the_compressed_image():
    preprocess = vitkit.Preprocess(
        image_size=(16, 24), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), fit="squash"
    )
    generator = np.random.default_rng(0)
    pixels = [generator.integers(0, 256, (16, 24, 3), np.uint8) for _ in range(3)]
    images = preprocess_images(pixels, preprocess)
    seen = []

    def keep(vit, images):
        seen.append(images.clone())
        return brightness(vit, images)

    found = stability(MapMaker(own_method(keep)), model(), images, CLASSES[:3], preprocess)
    before, jpeg, shifted = seen
    assert torch.equal(before, images)
    assert torch.equal(shifted[..., 1:], images[..., :-1])
    assert torch.equal(shifted[..., 0], images[..., 0])
    for row, image in enumerate(pixels):
        file = io.BytesIO()
        Image.fromarray(image).save(file, format="JPEG", quality=90)
        expected = preprocess_images([np.asarray(Image.open(file))], preprocess)[0]
        torch.testing.assert_close(jpeg[row], expected)
    assert 0 < found.shift <= 1
    assert 0.5 < found.jpeg <= 1
    without = stability(MapMaker(own_method(keep)), model(), images, CLASSES[:3])
    assert without.jpeg is None
    assert without.shift == found.shift


def test_a_grey_image_is_compressed_as_grey():
    preprocess = vitkit.Preprocess(image_size=(16, 24), mean=(0.5,), std=(0.5,), fit="squash")
    images = preprocess_images([np.full((16, 24, 1), 77, np.uint8)], preprocess)
    seen = []

    def keep(vit, images):
        seen.append(images.clone())
        return brightness(vit, images)

    stability(MapMaker(own_method(keep)), model(in_channels=1), images, CLASSES[:1], preprocess)
    torch.testing.assert_close(seen[1], images)


def test_the_fit_counts_predictions_on_random_patches():
    vit, images = model(), some_images(40)
    fit = model_fit(vit, images)
    assert (fit.labelled, fit.full) == (False, 1.0)
    assert 0 < fit.half_dropped <= 1
    with torch.inference_mode():
        labels = vit(images).argmax(1)
    labelled = model_fit(vit, images, labels)
    assert labelled == ModelFit(True, fit.full, fit.quarter_dropped, fit.half_dropped)
    assert model_fit(vit, images, (labels + 1) % 5).full == 0
    assert model_fit(vit, images[:7]) == model_fit(vit, images[:7])
    # a model that looks at one pixel value alone needs one patch alone
    torch.nn.init.zeros_(vit.head.weight)
    assert model_fit(vit, images).half_dropped == 1
    assert ModelFit(True, 0.9, 0.46, 0.1).fits
    assert not ModelFit(True, 0.9, 0.44, 0.1).fits


def test_a_report_has_all_parts_and_is_the_same_again():
    vit, images = model(), some_images(40)
    preprocess = vitkit.Preprocess(image_size=(16, 24))
    with torch.inference_mode():
        labels = vit(images).argmax(1)
    method = METHODS["attention"]
    report = measure_truth(
        method, vit, images, labels=labels, options={"layer": 0}, preprocess=preprocess, mosaics=20
    )
    plain = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert plain["method"] == "attention"
    assert plain["options"] == {"layer": 0}
    assert len(plain["scores"]) == plain["images"] == 40
    assert plain["model_fit"]["full"] == 1.0
    assert plain["stability"]["jpeg"] > 0
    assert -1 <= plain["weights_matter"] <= 1
    assert report.lines[0] == report.line
    kinds = ["images", "weights", "class", "stability", "model", "removal"]
    if report.class_matters is None:
        kinds.remove("class")
    assert [line.partition(":")[0] for line in report.lines[1:]] == kinds
    again = measure_truth(
        method, vit, images, labels=labels, options={"layer": 0}, preprocess=preprocess, mosaics=20
    )
    assert again == report
    cheap = measure_truth(method, vit, images, parts=())
    assert len(cheap.lines) == 2
    assert cheap.weights_matter is cheap.stability is cheap.model_fit is None


def test_p_of_a_report_is_over_the_images():
    vit, images = model(), some_images(40)
    one = measure_truth(own_method(brightness), vit, images, parts=())
    gains = [score.insertion_area - score.deletion_area for score in one.scores]
    flipped = measure_truth(own_method(lambda *a: -brightness(*a)), vit, images, parts=())
    # the reverse order has the opposite gains
    assert [score.insertion_area - score.deletion_area for score in flipped.scores] == (
        pytest.approx([-gain for gain in gains], abs=1e-6)
    )
    assert one.p + flipped.p == pytest.approx(1, abs=0.05)


def test_methods_that_cannot_be_measured_are_refused():
    vit, images = model(), some_images(2)
    with pytest.raises(SettingError, match="'own' cannot be measured: its maps are colours"):
        measure_truth(own_method(brightness, colours=True), vit, images)
    with pytest.raises(SettingError, match="'attention' has no option 'block'; it has layer, head"):
        measure_truth(METHODS["attention"], vit, images, options={"block": 1})
    with pytest.raises(SettingError, match="the model has no head"):
        measure_truth(METHODS["attention"], model(num_classes=0), images)

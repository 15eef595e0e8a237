"""Figures of explanations: no pixel lost, honest colours, and captions that say what was drawn."""

import numpy as np
import pytest
from noise import fill_with_noise
from PIL import Image
from plots.figures import svg_text

import vitkit

WHOLE = (0.0, 0.0, 40.0, 60.0)


def explanation(grid: np.ndarray, image: np.ndarray | None = None, **fields) -> vitkit.Explanation:
    if image is None:
        image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    heat = np.zeros((*image.shape[:2], *grid.shape[2:]), np.float32)
    fields = {"viewport": (0.0, 0.0, *map(float, image.shape[:2])), **fields}
    return vitkit.Explanation(image, heat, grid=grid.astype(np.float32), **fields)


@pytest.mark.parametrize("size", [(40, 60), (300, 200), (400, 600)])
def test_a_png_file_has_a_dot_for_every_pixel_of_the_image(tmp_path, size):
    image = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    made = explanation(np.arange(6.0).reshape(2, 3), image)
    drawn = made.plot()
    for axes in drawn.axes:
        if axes.get_label() == "image":
            assert axes.get_images()[0].get_size() == made.overlay().size[::-1]
            share = axes.get_position().width
    with Image.open(made.save(tmp_path / "e.png")) as saved:
        assert saved.width * share >= made.overlay().width - 1


def test_patches_of_a_small_image_are_flat_and_those_of_a_photograph_are_not():
    grid = np.arange(16.0).reshape(4, 4)
    small = np.full((8, 8, 3), 90, np.uint8)
    flat = np.asarray(explanation(grid, small).overlay())
    assert flat.shape[:2] == (224, 224)
    assert len(np.unique(flat.reshape(-1, 3), axis=0)) == 16
    assert (flat[:56, :56] == flat[0, 0]).all()
    assert len(np.unique(np.asarray(explanation(grid, small).overlay(smooth=True)))) > 16
    large = np.asarray(explanation(grid, np.full((300, 300, 3), 90, np.uint8)).overlay())
    assert len(np.unique(large.reshape(-1, 3), axis=0)) > 100


def test_a_signed_map_is_symmetric_about_0_and_a_positive_one_is_not():
    for values, ends in (([-1.0, 3.0, np.nan], [-3.0, 3.0]), ([0.5, 3.0, 4.0], [0.5, 4.0])):
        figure = explanation(np.array([values])).plot()
        (bar,) = (axes for axes in figure.axes if axes.get_label() == "bar")
        assert bar.get_images()[0].get_extent()[2:] == ends
    grey = np.full((40, 60, 3), 128, np.uint8)
    drawn = np.asarray(explanation(np.array([[2.0, 0.0, -2.0]]), grey).overlay(smooth=False))
    height, width = drawn.shape[:2]
    red, zero, blue = (drawn[height // 2, width * n // 6].astype(int) for n in (1, 3, 5))
    assert red[0] > red[2] + 50
    assert blue[2] > blue[0] + 50
    assert np.ptp(zero) <= 2  # no colour at 0


def test_what_the_model_does_not_see_is_pale_and_has_a_border():
    image = np.full((300, 400, 3), 100, np.uint8)
    made = explanation(np.ones((2, 2)), image, viewport=(50.0, 100.0, 200.0, 200.0))
    drawn = np.asarray(made.overlay())
    assert (drawn[:50] == round(0.3 * 100 + 0.7 * 255)).all()
    assert (drawn[60:240, 110:290].max(axis=2) < 110).all()
    left = made.original()
    assert (left[:50] == 100).all()
    for picture in (drawn, left):
        assert (picture[50, 100:300] == 255).all()
        assert (picture[51, 102:298] == 0).all()
    assert "the model sees 200 x 200 of 400 x 300 pixels" in made.caption


def test_a_rounding_error_of_the_crop_leaves_out_nothing():
    model = vitkit.ViT(
        vitkit.ViTSpec(image_size=28, patch_size=14, width=8, depth=1, num_heads=1, mlp_width=8)
    )
    preprocess = vitkit.Preprocess(image_size=28, crop_ratio=1.0)
    checkpoint = vitkit.Checkpoint(model.eval(), preprocess, ())
    for side in (29, 58):  # 28 * (29 / 28) is below 29
        made = vitkit.explain(checkpoint, np.zeros((side, side, 3), np.uint8), method="rollout")
        assert not any("the model sees" in line for line in made.caption)


def test_three_values_are_red_green_and_blue():
    grid = np.zeros((1, 2, 3))
    grid[0, 0] = (1.0, 0.5, 0.0)
    grid[0, 1] = (0.0, 0.0, 1.0)
    made = explanation(grid, np.full((300, 300, 3), 90, np.uint8), method="pca")
    drawn = np.asarray(made.overlay(smooth=False))
    assert drawn[10, 10].tolist() == [255, 128, 0]
    assert drawn[290, 290].tolist() == [0, 0, 255]
    assert [axes.get_label() for axes in made.plot().axes].count("bar") == 0


def test_values_that_are_not_finite_are_named_and_have_no_colour():
    grey = np.full((300, 300, 3), 128, np.uint8)
    made = explanation(np.array([[np.nan, 1.0], [0.0, np.inf]]), grey)
    assert "values that are not finite have no colour" in made.caption
    assert np.ptp(np.asarray(made.overlay(smooth=False))[10, 10].astype(int)) == 0
    assert "the most important patch is in row 1 of 2, column 2 of 2" in made.description
    made.plot()


def test_the_figure_has_class_probability_method_options_unit_and_notes(tmp_path):
    made = explanation(
        np.arange(4.0).reshape(2, 2),
        label="cat $x$ <b>", probability=0.123, predicted="dog", predicted_probability=0.8,
        options={"layer": 3, "head": None, "discard_ratio": 0.5}, notes=("a note",),
    )  # fmt: skip
    text = svg_text(made.plot())
    for words in (
        "cat $x$ <b>: 12.3 % (predicted: dog, 80.0 %)",
        "attention, layer 3, mean of the heads, discard ratio 0.5, the same for every class",
        "a note",
        "share of attention",
    ):
        assert "".join(words.split()) in text
    svg = made.save(tmp_path / "e.svg").read_text(encoding="utf-8")
    assert "vitkit explain" in svg


def test_an_existing_file_is_replaced_only_if_allowed(tmp_path):
    made = explanation(np.eye(2))
    path = tmp_path / "photo.png"
    Image.new("RGB", (4, 4)).save(path)
    before = path.read_bytes()
    with pytest.raises(vitkit.OutputError, match=r"photo\.png: .*overwrite=True"):
        made.save(path)
    assert path.read_bytes() == before
    made.save(path, overwrite=True)
    assert path.read_bytes() != before
    with pytest.raises(vitkit.OutputError, match=r"ends in \.png or \.svg"):
        made.save(tmp_path / "photo.jpg", overwrite=True)


def test_several_explanations_stand_below_their_image_once():
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    first = explanation(np.eye(2), image, label="cat", probability=0.5)
    other = explanation(np.eye(3), image, label="dog", probability=0.25, method="my-method")
    third = explanation(np.eye(2), image[::-1])
    figure = vitkit.plot_explanations([first, other, third], across=3, title="T")
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_label() == "image"]
    assert titles == ["image", "attention", "my-method", "image", "attention"]
    text = svg_text(figure)
    assert text.count("cat:50.0%") == 1
    assert "dog:25.0%" in text, "another class than that below the image"
    with pytest.raises(vitkit.SettingError, match="at least one explanation"):
        vitkit.plot_explanations([])


@pytest.mark.parametrize("fields", [{}, {"class_token": False, "pooling": "map"}])
def test_the_sheet_has_the_map_of_every_layer_and_head(fields, tmp_path):
    spec = vitkit.ViTSpec(
        image_size=(16, 24), patch_size=8, width=16, depth=2, num_heads=4, mlp_width=16,
        num_classes=3, **fields,
    )  # fmt: skip
    model = vitkit.ViT(spec).eval()
    fill_with_noise(model, std=0.6)
    preprocess = vitkit.Preprocess(image_size=(16, 24))
    path = vitkit.save(tmp_path / "m.safetensors", model, preprocess=preprocess)
    image = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    figure = vitkit.plot_attention_sheet(path, image)
    text = svg_text(figure)
    for words in ("layer0", "layer1", "head0", "head3", "largestshareofattention"):
        assert words in text
    maps = [axes for axes in figure.axes if axes.get_label() == "image"]
    for axes, (layer, head) in zip(maps, np.ndindex(2, 4), strict=True):
        options = {"method": "attention", "layer": layer, "head": head, "faithfulness": False}
        largest = 100 * vitkit.explain(path, image, **options).grid.max()
        assert f"{largest:.3g} %" in [one.get_text() for one in axes.texts]

"""`explain_model`: its figures, files and lines."""

import json
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from noise import fill_with_noise
from PIL import Image
from plots.figures import svg_text

import vitkit
from vitkit import cli

PANELS = ("filters", "positions", "distance")
TITLES = {
    "filters": ["First-layerfilters", "principalcomponents", "relativeweight", "oftheva"],
    "positions": ["Positionsimilarity", "patchcolumn", "patchrow", "cosinesimilarity", "learned"],
    "distance": ["Meanattentiondistance", "encoderblock", "distance(pixels)", "meanoverheads"],
}


def checkpoint(path, **fields) -> str:
    spec = {
        "image_size": (16, 24), "patch_size": 8, "width": 32, "depth": 3, "num_heads": 2,
        "mlp_width": 24, "num_classes": 3,
    }  # fmt: skip
    model = vitkit.ViT(vitkit.ViTSpec(**spec | fields))
    fill_with_noise(model, std=0.3)
    channels = model.spec.in_channels
    preprocess = vitkit.Preprocess(
        image_size=(16, 24), fit="squash", mean=(0.5,) * channels, std=(0.5,) * channels
    )
    return str(vitkit.save(path / "tiny.safetensors", model, preprocess=preprocess))


def pixels(count: int = 4) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (20, 30, 3), dtype=np.uint8) for _ in range(count)]


@pytest.fixture(scope="module")
def explained(tmp_path_factory) -> vitkit.ModelExplanation:
    return vitkit.explain_model(checkpoint(tmp_path_factory.mktemp("model")), pixels())


def test_each_figure_has_titles_units_and_a_caption(explained):
    assert explained.panels == PANELS
    for panel in PANELS:
        text = svg_text(explained.plot(panel))
        for title in TITLES[panel]:
            assert title in text, (panel, text)
        assert "tiny:ViTwith3blocksofwidth32,2heads,patchesof8x8pixels;4images" in text


def test_points_and_lines_are_the_numbers(explained):
    axes = explained.plot("distance").axes[0]
    heads = axes.collections[0].get_offsets()
    np.testing.assert_allclose(heads[:, 1].reshape(3, 2), explained.depth.distance)
    np.testing.assert_array_equal(heads[:, 0], [0, 0, 1, 1, 2, 2])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), explained.depth.distance.mean(axis=1))
    assert axes.lines[1].get_ydata()[0] == explained.depth.uniform_distance


def test_filters_and_positions_are_drawn_in_their_places(explained):
    (image,) = explained.plot("filters").axes[0].get_images()
    sheet = np.asarray(image.get_array())
    components = explained.filters.components  # 28 of 8 x 8 pixels, two cells a pixel
    assert sheet.shape == (5 * 17 - 1, 6 * 17 - 1, 3)
    tile = sheet[17 : 17 + 16 : 2, 34 : 34 + 16 : 2]  # row 1, column 2
    expected = 0.5 + 0.5 * components[8] / abs(components[8]).max()
    np.testing.assert_allclose(tile, expected)
    (image,) = explained.plot("positions").axes[0].get_images()
    maps = np.asarray(image.get_array())  # 2 x 3 maps of 2 x 3 cells of 6 x 6
    high, wide = 2 * 6 + 1, 3 * 6 + 1
    np.testing.assert_allclose(
        maps[high : high + 12 : 6, 2 * wide : 2 * wide + 18 : 6], explained.positions.cosine[1, 2]
    )


def test_saved_files_are_complete_and_replace_nothing_unasked(explained, tmp_path):
    files = explained.save(tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(
        [f"{name}.{end}" for name in ("sheet", *PANELS) for end in ("png", "svg")]
        + ["numbers.json"]
    )
    assert files[0].name == "sheet.png"
    with Image.open(files[0]) as sheet:
        assert sheet.info["Software"] == "vitkit explain --model"
        assert 1800 < sheet.width < 2600  # as wide as a page, 300 dots per inch
    numbers = json.loads((tmp_path / "a" / "numbers.json").read_text())
    assert numbers["depth"]["attention_entropy_nats"] == explained.depth.entropy.tolist()
    assert numbers["artefacts"]["patch_tokens"] == 24
    filters = (tmp_path / "a" / "filters.svg").read_bytes()
    of_weights = replace(explained, depth=None, artefacts=None)
    assert set(of_weights.save(tmp_path / "a", overwrite=True)) < set(files)
    for name in ("sheet.png", "numbers.json", "filters.svg"):
        own = tmp_path / name / name
        own.parent.mkdir()
        own.write_text("{}")
        with pytest.raises(vitkit.OutputError, match=f"{name}: this file exists; choose"):
            explained.save(own.parent)
        assert [path.name for path in own.parent.iterdir()] == [name]
        assert own.read_text() == "{}"
    of_weights.save(own.parent, overwrite=True)
    assert own.read_bytes() == (tmp_path / "a" / "filters.svg").read_bytes()  # the same bytes
    assert own.read_bytes() != filters  # its caption has no number of images


def test_notebooks_show_the_sheet_and_the_numbers(explained):
    html = explained._repr_html_()
    assert html.count("<img") == 1
    for line in explained.lines():
        assert line in html
    assert Image.open(BytesIO(explained._repr_png_())).width > 900
    text = "\n".join(explained.lines())
    assert "filters: 28 components have" in text
    assert f"{explained.depth.distance[0].mean():.1f} pixels in the first block" in text
    assert "of 24 patch tokens" in text


def test_without_images_there_are_the_weights_alone(tmp_path):
    found = vitkit.explain_model(checkpoint(tmp_path), name="<mine> $x$")
    assert (found.images, found.depth, found.artefacts) == (0, None, None)
    assert found.panels == ("filters", "positions")
    assert found.caption == "<mine> $x$"
    assert "<mine>$x$" in svg_text(found.plot())
    assert found.notes == ("Attention over depth is measured on images, and none were given.",)
    with pytest.raises(vitkit.SettingError, match=r"panel = 'distance': must be one of filters"):
        found.plot("distance")
    assert [path.name for path in found.save(tmp_path / "out")][-1] == "numbers.json"
    assert "&lt;mine&gt;" in found._repr_html_()


def test_one_patch_in_one_block_of_one_grey_channel(tmp_path):
    fields = {"image_size": (16, 24), "patch_size": (16, 24), "in_channels": 1, "depth": 1,
              "num_heads": 1, "class_token": False, "pooling": "mean"}  # fmt: skip
    found = vitkit.explain_model(checkpoint(tmp_path, **fields), pixels(1))
    assert found.depth.relative_entropy.tolist() == [[0.0]]
    assert found.depth.distance.tolist() == [[0.0]]
    assert found.artefacts.count == 0
    assert list(found.plot("distance").axes[0].get_xticks()) == [0]
    assert "ViTwith1blockofwidth32,1head,patchesof16x24" in svg_text(found.plot("distance"))


def test_what_cannot_be_drawn_is_named(tmp_path):
    found = vitkit.explain_model(checkpoint(tmp_path, positions="none"), pixels(2))
    assert "positions" not in found.panels
    assert found.notes == ("The model has no positions.",)
    assert found.notes[0] in found.lines()
    with pytest.raises(vitkit.SettingError, match=r"panel = 'positions': .* filters, dist"):
        found.plot("positions")


@pytest.mark.parametrize(
    ("part", "message"),
    [("patch_embed.proj", "weights of the patch embedding are not finite"),
     ("blocks.1.mlp.fc2", "the model's tokens are not finite")],
)  # fmt: skip
def test_numbers_that_are_not_finite_are_refused(tmp_path, part, message):
    broken = vitkit.load(checkpoint(tmp_path))
    broken.model.get_submodule(part).weight.data.fill_(float("nan"))
    images = pixels(2) if "mlp" in part else ()
    with pytest.raises(vitkit.CheckpointError, match=message):
        vitkit.explain_model(broken, images)


def test_a_large_grid_shows_some_of_its_positions(tmp_path):
    found = vitkit.explain_model(checkpoint(tmp_path, image_size=(160, 96), positions="rope"))
    text = svg_text(found.plot("positions"))
    assert "rotarypositions(sineandcosineoftheangles),168of240patches" in text


def test_the_command_draws_writes_and_counts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path)
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(pixels(3)):
        Image.fromarray(image).save(f"photos/{number}.png")
    assert cli.run(["explain", "tiny.safetensors", "photos", "--model", "--output", "out"]) == 0
    numbers = json.loads((tmp_path / "out" / "numbers.json").read_text())
    found = vitkit.explain_model("tiny.safetensors", "photos")
    assert numbers == found.to_json()
    printed = capsys.readouterr().out
    for line in found.lines():
        assert line in printed
    assert "9 files in out, sheet.png first" in printed
    (tmp_path / "photos" / "broken.png").write_bytes(b"no image")
    words = ["explain", "tiny.safetensors", "photos", "--model", "--output", "out", "--overwrite"]
    assert cli.run(words) == 2
    assert "1 of 4 images could not be used" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "numbers.json").read_text()) == numbers


def test_the_command_refuses_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sheet.png").write_bytes(b"mine")
    for words, message in (
        (["--output", "own"], "--output own/sheet.png: this file exists; choose another place"),
        (["--method", "rollout"], "--method has no effect with --model"),
        (["--format", "svg"], "--format has no effect with --model"),
    ):
        assert cli.run(["explain", "tiny.safetensors", "--model", *words]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "own" / "sheet.png").read_bytes() == b"mine"
    assert not (tmp_path / "explanations").exists()

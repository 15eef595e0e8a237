"""The model of "Draw a digit" in JavaScript gives what vitkit gives, in a real browser."""

import hashlib
import json
import math

import numpy as np
import pytest
import torch
from reporting.browser import NEEDS_BROWSER
from tutorial.digit_pages import bare_page, interactive

import vitkit
from vitkit.data.images.preprocess import normalise

pytestmark = NEEDS_BROWSER
RUN_MODEL = """
const model = vit.decode(digitModel);
return %s.map((counts) => {
  const pixels = strokes.grey(counts);
  const image = strokes.normalise(pixels, model);
  const { logits, attention, afterBlock } = vit.forward(model, image, { positions: %s });
  const maps = attention.map((heads) => heads.map((rows) => rows.map((row) => [...row])));
  return { pixels, logits: [...logits], maps, last: [...afterBlock.at(-1)] };
});
"""
DRAW = """
return %s.map(([drawn, centred]) => {
  const bits = strokes.bitmap(drawn, { centred });
  return { bits: [...bits], counts: strokes.count(bits) };
});
"""


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    browser.open(bare_page(tmp_path_factory.mktemp("bare")))
    assert browser.console() == []
    return browser


def random_strokes(random: np.random.Generator) -> list[list[dict[str, float]]]:
    """One to three walks of a pen over the bitmap."""
    strokes = []
    for _ in range(random.integers(1, 4)):
        steps = random.normal(0, 3, (random.integers(1, 12), 2)).cumsum(0)
        points = random.uniform(4, 28, 2) + steps
        strokes.append([{"x": float(x), "y": float(y)} for x, y in points])
    return strokes


def images_of_three_kinds(page) -> list[list[int]]:
    """200 images as counts: test images, drawings, noise, the empty one and the full one."""
    random = np.random.default_rng(0)
    test = vitkit.open_dataset("digits").splits["test"]
    known = [np.rint(test.read(i)[..., 0] / 255 * 16).astype(int).ravel() for i in range(80)]
    asked = [(random_strokes(random), bool(i % 2)) for i in range(90)]
    drawn = [done["counts"] for done in page.run(DRAW % json.dumps(asked))]
    noise = random.integers(0, 17, (28, 64))
    return [*(x.tolist() for x in [*known, *noise]), *drawn, [0] * 64, [16] * 64]


def of_vitkit(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits (B, 10) and maps (B, L, h, T, T) of the same checkpoint in Python."""
    checkpoint = vitkit.load(interactive.CHECKPOINT)
    record = vitkit.Record(attention=list(range(checkpoint.model.spec.depth)))
    with torch.inference_mode():
        images = normalise(torch.from_numpy(pixels), checkpoint.preprocess)
        logits = checkpoint.model.eval()(images, record=record)
    maps = torch.stack([record.attention[layer] for layer in sorted(record.attention)], dim=1)
    return logits.numpy(), maps.numpy()


def test_logits_and_maps_of_200_drawings_equal_vitkit_s(page):
    images = images_of_three_kinds(page)
    assert len(images) == 200
    found = page.run(RUN_MODEL % (json.dumps(images), "true"))
    pixels = np.array([one["pixels"] for one in found], dtype=np.uint8).reshape(-1, 8, 8, 1)
    assert len(np.unique(pixels, axis=0)) > 190
    logits, maps = of_vitkit(pixels)
    assert np.abs(logits - [one["logits"] for one in found]).max() <= 1e-4
    assert np.abs(maps - [one["maps"] for one in found]).max() <= 1e-5
    assert all(one["last"] == one["logits"] for one in found)


def test_without_positions_the_order_of_the_patches_is_lost(page):
    """The four patches turned around give the same logits if no position is added, only then."""
    image = np.arange(64).reshape(8, 8) % 17
    turned = np.block([[image[4:, 4:], image[4:, :4]], [image[:4, 4:], image[:4, :4]]])
    pair = json.dumps([image.ravel().tolist(), turned.ravel().tolist()])
    one, other = (np.array(x["logits"]) for x in page.run(RUN_MODEL % (pair, "false")))
    assert np.abs(one - other).max() < 1e-9
    one, other = (np.array(x["logits"]) for x in page.run(RUN_MODEL % (pair, "true")))
    assert np.abs(one - other).max() > 0.1


def test_a_drawing_is_counted_as_the_dataset_was_made(page):
    """As drawn: a pixel is black whose centre is within 2.5 of a line; blocks of 4 x 4 counted."""
    random = np.random.default_rng(1)
    asked = [(random_strokes(random), False) for _ in range(20)]
    for (drawn, _), done in zip(asked, page.run(DRAW % json.dumps(asked)), strict=True):
        bits = np.array(done["bits"]).reshape(32, 32)
        y, x = np.mgrid[:32, :32] + 0.5
        expected = np.zeros((32, 32), dtype=bool)
        for stroke in drawn:
            ends = [(p["x"], p["y"]) for p in stroke]
            for start, end in zip([ends[0], *ends], ends, strict=False):
                for t in np.linspace(0, 1, 100):
                    at = (1 - t) * np.array(start) + t * np.array(end)
                    expected |= np.hypot(x - at[0], y - at[1]) <= 2.5
        assert (bits != expected).sum() <= 2  # a centre just on the edge
        blocks = bits.reshape(8, 4, 8, 4).sum((1, 3))
        assert done["counts"] == blocks.ravel().tolist()


@pytest.mark.parametrize(("across", "down"), [(3, 5), (20, 26), (8, 30)])
def test_a_centred_digit_has_the_height_and_the_black_of_the_dataset(page, across, down):
    """Wherever and however large it is drawn; 312 of 1,024 pixels are the training images' mean."""
    train = vitkit.open_dataset("digits").splits["train"]
    counts = [train.read(i).sum() / 255 * 16 for i in range(len(train))]
    assert np.mean(counts) == pytest.approx(312, abs=0.6)
    ring = [
        {"x": 1 + across * (1 + math.cos(a)) / 2, "y": 1 + down * (1 + math.sin(a)) / 2}
        for a in np.linspace(0, 2 * math.pi, 40)
    ]
    (done,) = page.run(DRAW % json.dumps([([ring], True)]))
    bits = np.array(done["bits"]).reshape(32, 32)
    rows, columns = np.flatnonzero(bits.any(1)), np.flatnonzero(bits.any(0))
    assert rows[0] <= 1
    assert rows[-1] >= 30
    assert abs(rows[0] + rows[-1] - 31) <= 1
    assert abs(columns[0] + columns[-1] - 31) <= 1
    assert abs(bits.sum() - 312) <= 25


def ends(bits: np.ndarray) -> tuple[int, int]:
    """Return the first black columns of the first and the last row with any."""
    rows = np.flatnonzero(bits.any(1))
    return int(bits[rows[0]].argmax()), int(bits[rows[-1]].argmax())


def test_the_training_images_stand_upright():
    """As the page says: the first inked columns of the first and the last row."""
    train = vitkit.open_dataset("digits").splits["train"]
    images = [train.read(i)[..., 0] > 0 for i in range(len(train))]
    assert all(image[0].any() and image[7].any() for image in images)
    near = [abs(image[0].argmax() - image[7].argmax()) <= 1 for image in images]
    assert round(100 * np.mean(near), 1) == 99.9


@pytest.mark.parametrize("slant", [-0.5, -0.2, 0.3, 0.6])
def test_a_slanted_digit_is_set_upright(page, slant):
    """A slanted seven: first black pixels of the first and the last row in line."""
    corners = [(8, 4), (20, 4), (12, 26)]
    line = [{"x": x - slant * (y - 15), "y": y} for x, y in corners]
    (as_drawn,) = page.run(DRAW % json.dumps([([line], False)]))
    (done,) = page.run(DRAW % json.dumps([([line], True)]))
    first, last = ends(np.array(as_drawn["bits"]).reshape(32, 32))
    assert abs(first - last) >= 3
    first, last = ends(np.array(done["bits"]).reshape(32, 32))
    assert abs(first - last) <= 1


def test_an_empty_drawing_is_an_empty_image(page):
    found = page.run(DRAW % json.dumps([([], True), ([[]], False)]))
    assert all(sum(done["bits"]) == 0 == sum(done["counts"]) for done in found)
    (dot,) = page.run(DRAW % json.dumps([([[{"x": 3, "y": 3}]], True)]))
    assert dot["bits"][16 * 32 + 16] == 1


def test_the_checkpoint_is_the_one_of_its_receipt():
    receipt = json.loads(interactive.CHECKPOINT.with_suffix(".json").read_text())
    assert hashlib.sha256(interactive.CHECKPOINT.read_bytes()).hexdigest() == receipt["sha256"]
    checkpoint = vitkit.load(interactive.CHECKPOINT)
    test = vitkit.open_dataset("digits").splits["test"]
    pixels = np.stack([test.read(i) for i in range(len(test))])
    logits, _ = of_vitkit(pixels)
    assert np.mean(logits.argmax(1) == test.labels) == pytest.approx(receipt["test_top1"], abs=1e-4)
    assert sum(p.numel() for p in checkpoint.model.parameters()) == receipt["parameters"]
    low, high = receipt["test_top1_95"]
    assert low < receipt["test_top1"] < high


def test_a_model_that_the_page_does_not_compute_stops_the_build():
    spec = vitkit.load(interactive.CHECKPOINT).model.spec
    with pytest.raises(ValueError, match=r"vit\.js does not compute"):
        interactive.check_supported(vitkit.ViTSpec(**{**spec.to_json(), "activation": "relu"}))

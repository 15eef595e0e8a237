"""The parts of the site that answer the reader: with a pointer, with the keyboard, and without
JavaScript.
"""

import html
import json
import math
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import torch
from processes import wait_until
from reporting.browser import NEEDS_BROWSER, Browser
from reporting.page_checks import RATIOS
from tutorial.digit_pages import CHAPTERS, DOCS, built_site, interactive

import vitkit
from vitkit.data.images.preprocess import normalise

pytestmark = NEEDS_BROWSER
LARGEST_PAGE = 1_500_000  # bytes, with all that it loads
PAGES = ("draw_a_digit", *CHAPTERS)
READ_ANSWER = """
const part = (name) => document.querySelector(`[data-part="${name}"]`);
const texts = (selector) => [...document.querySelectorAll(selector)].map((e) => e.textContent);
return {
  digit: part("digit").textContent, words: part("words").textContent,
  logits: texts('[data-part="bars"] .logit').map((text) => Number(text.replace("\\u2212", "-"))),
  shares: texts('[data-part="bars"] .share').map(parseFloat),
  counts: texts('[data-part="grid"] td').map(Number),
  map: texts('[data-part="map"] tbody td').map(Number),
};
"""
NEXT_FRAME = """
return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))));
"""
DRAG = """
const box = document.querySelector('[data-part="pad"]');
box.scrollIntoView({ behavior: "instant", block: "center" });
const { left, top, width, height } = box.getBoundingClientRect();
return [left, top, width, height];
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_site(tmp_path_factory.mktemp("site"))


def opened(browser: Browser, site: Path, page: str, width: int = 1280) -> Browser:
    browser.show(width)
    browser.open(site / f"tutorial/{page}.html")
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")  # clicks do not wait
    return browser


def answer(browser: Browser) -> dict:
    """Read the page when the answer is shown: it comes with the next frame."""
    browser.run(NEXT_FRAME)
    return browser.run(READ_ANSWER)


def drag(browser: Browser, points: list[tuple[float, float]]) -> None:
    """Draw a line with the mouse, in parts of the surface."""
    left, top, width, height = browser.run(DRAG)
    for number, (x, y) in enumerate([*points, points[-1]]):
        kind = "mouseMoved" if number else "mousePressed"
        kind = "mouseReleased" if number == len(points) else kind
        browser.devtools(
            "Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1,
            x=left + width * x, y=top + height * y,
        )  # fmt: skip


def press(browser: Browser, *keys: str) -> None:
    for key in keys:
        text = {} if len(key) > 1 else {"text": key}
        browser.devtools("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        browser.devtools("Input.dispatchKeyEvent", type="keyUp", key=key)


def logits_of(counts: list[int], *, positions: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return vitkit's logits, and its attention maps (L, h, T, T), of 64 counts."""
    checkpoint = vitkit.load(interactive.CHECKPOINT)
    pixels = (torch.tensor(counts).view(1, 8, 8, 1) * 255 + 8) // 16
    record = vitkit.Record(attention=list(range(checkpoint.model.spec.depth)))
    if not positions:
        checkpoint.model.pos_embed.data.zero_()
    with torch.inference_mode():
        images = normalise(pixels.to(torch.uint8), checkpoint.preprocess)
        logits = checkpoint.model(images, record=record)[0].numpy()
    return logits, np.stack([record.attention[layer][0].numpy() for layer in range(4)])


@pytest.mark.parametrize("page", PAGES)
def test_no_error_no_request_and_legible_on_small_and_dark_screens(browser, site, page):
    size = 0
    for width in (390, 1280):
        for scheme in ("light", "dark"):
            browser.show(width, scheme)
            browser.open(site / f"tutorial/{page}.html")
            loaded = set(browser.requests())
            assert all(urlsplit(address).scheme == "file" for address in loaded)
            size = sum(Path(unquote(urlsplit(url).path)).stat().st_size for url in loaded)
            assert size < LARGEST_PAGE
            assert browser.console() == []
            assert browser.run("return document.documentElement.scrollWidth") <= width
            beyond = (
                "return [...document.querySelectorAll('.interactive *')].filter((one) =>"
                "one.getBoundingClientRect().right > innerWidth).map((one) => one.outerHTML)"
            )
            assert browser.run(beyond) == []
            cut_off = (
                "return [...document.querySelectorAll('.interactive input[type=number]')]"
                ".filter((one) => one.scrollWidth > one.clientWidth).length"
            )
            assert browser.run(cut_off) == 0
            lowest, texts = browser.run(RATIOS.replace('"body *"', '".interactive *"'))
            assert texts > 50
            assert lowest >= 4.5
    assert (size > 700_000) == (page == "draw_a_digit")  # the weights are loaded there alone


def test_what_is_drawn_is_answered_with_vitkit_s_numbers(browser, site):
    opened(browser, site, "draw_a_digit")
    before = answer(browser)
    drag(browser, [(0.5, 0.2), (0.5, 0.5), (0.5, 0.8)])
    drawn = answer(browser)
    assert drawn["counts"] != before["counts"]
    logits, maps = logits_of(drawn["counts"])
    assert np.abs(logits - drawn["logits"]).max() <= 0.0051  # two decimals are shown
    assert drawn["digit"] == str(logits.argmax()) == "1"
    assert np.abs(maps[3, 0].ravel() - drawn["map"]).max() <= 0.0051
    spoken = "return document.querySelector('[aria-live]').textContent"
    wait_until(lambda: browser.run(spoken) == drawn["words"])  # after a pause
    browser.click('[data-part="undo"]')
    assert answer(browser)["counts"] == before["counts"]


def test_a_finger_draws_and_does_not_scroll(browser, site):
    opened(browser, site, "draw_a_digit", width=390)
    left, top, width, height = browser.run(DRAG)
    scrolled = browser.run("return scrollY")
    for kind, share in (("touchStart", 0.2), ("touchMove", 0.5), ("touchMove", 0.8)):
        point = {"x": left + width / 2, "y": top + height * share}
        browser.devtools("Input.dispatchTouchEvent", type=kind, touchPoints=[point])
    browser.devtools("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    assert answer(browser)["digit"] == "1"
    assert abs(browser.run("return scrollY") - scrolled) <= 2  # of the browser's rounding


def test_undo_goes_back_line_by_line_and_clear_is_empty(browser, site):
    opened(browser, site, "draw_a_digit")
    drag(browser, [(0.3, 0.2), (0.7, 0.2)])
    one = answer(browser)
    drag(browser, [(0.7, 0.2), (0.4, 0.9)])
    two = answer(browser)
    browser.click('[data-part="clear"]')
    empty = answer(browser)
    assert sum(empty["counts"]) == 0
    assert "Nothing is drawn" in empty["words"]
    logits, _ = logits_of(empty["counts"])
    assert np.abs(logits - empty["logits"]).max() <= 0.0051
    browser.click('[data-part="undo"]')
    assert answer(browser) == two
    browser.click('[data-part="undo"]')
    assert answer(browser) == one


def test_a_line_as_drawn_stays_where_it_is(browser, site):
    opened(browser, site, "draw_a_digit")
    browser.click('[data-part="centred"]')
    drag(browser, [(0.1, 0.1), (0.1, 0.3)])
    counts = np.array(answer(browser)["counts"]).reshape(8, 8)
    assert counts[:3, :2].sum() == counts.sum() > 0
    browser.click('[data-part="centred"]')
    counts = np.array(answer(browser)["counts"]).reshape(8, 8)
    assert counts[:, 2:6].sum() > 0.9 * counts.sum()
    assert counts[0].sum() > 0 < counts[7].sum()


def test_the_keyboard_alone_edits_the_image(browser, site):
    opened(browser, site, "draw_a_digit")
    browser.run("document.querySelector('[data-part=\"grid\"] td').focus()")
    before = answer(browser)["counts"]
    press(browser, "ArrowDown", "ArrowRight", "1", "6")  # row 2, column 2
    press(browser, "ArrowRight", "7", "+", "ArrowRight", " ", "ArrowLeft", "ArrowUp", "9", "-")
    after = answer(browser)
    expected = np.array(before).reshape(8, 8)
    assert expected[1, 3] > 0
    expected[1, 1:4] = [16, 8, 0]
    expected[0, 2] = 8
    assert after["counts"] == expected.ravel().tolist()
    assert np.abs(logits_of(after["counts"])[0] - after["logits"]).max() <= 0.0051
    label = "return document.activeElement.getAttribute('aria-label')"
    assert browser.run(label) == "8, row 1, column 3"
    press(browser, "ArrowUp", "ArrowUp")  # the edge
    assert browser.run(label) == "8, row 1, column 3"


def test_test_images_say_their_label(browser, site):
    opened(browser, site, "draw_a_digit")
    test = vitkit.open_dataset("digits").splits["test"]
    wrong = 0
    for digit in range(10):
        browser.click(f'[data-part="examples"] [value="{digit}"]')
        shown = answer(browser)
        name = browser.run(
            'return document.querySelector(\'[data-part="examples"] [aria-pressed="true"]\')'
            ".getAttribute('aria-label')"
        )
        index = int(re.search(r"\d+", name)[0])
        assert test.labels[index] == digit
        pixels = (np.array(shown["counts"]) * 255 + 8) // 16
        assert pixels.tolist() == test.read(index).ravel().tolist()
        assert f"The label of this test image is {digit}" in shown["words"]
        wrong += shown["digit"] != str(digit)
    text = (site / "tutorial/draw_a_digit.html").read_text(encoding="utf-8")
    assert f"It misreads {['none', 'one', 'two'][wrong]} of the ten." in text


SET = "const e = document.querySelector('[data-part=\"%s\"]'); e.value = %s; \
e.dispatchEvent(new Event('input'));"


def test_temperature_layer_head_and_positions(browser, site):
    opened(browser, site, "draw_a_digit")
    plain = answer(browser)
    logits, maps = logits_of(plain["counts"])
    browser.run(SET % ("temperature", 2))  # 2 ** 2
    soft = torch.tensor(logits / 4).softmax(0).numpy() * 100
    assert np.abs(soft - answer(browser)["shares"]).max() <= 0.51
    browser.run(SET % ("layer", 2) + "{" + SET % ("head", 3) + "}")
    assert np.abs(maps[1, 2].ravel() - answer(browser)["map"]).max() <= 0.0051
    browser.click('[data-part="maps"] .layer:nth-child(1) button:nth-of-type(4)')
    assert np.abs(maps[0, 3].ravel() - answer(browser)["map"]).max() <= 0.0051
    browser.click('[data-part="tokens"] input[value="2"]')
    browser.run(NEXT_FRAME)
    shown = browser.run(
        "return [...document.querySelectorAll('.over b')].map((e) => parseFloat(e.textContent))"
    )
    assert np.abs(100 * maps[0, 3, 2, 1:] - shown).max() <= 0.51
    browser.click('[data-part="positions"]')
    without, _ = logits_of(plain["counts"], positions=False)
    assert np.abs(without - answer(browser)["logits"]).max() <= 0.0051


def tables(browser: Browser, part: str) -> np.ndarray:
    """Return the numbers of a table, of its fields where it has some."""
    texts = browser.run(
        f"return [...document.querySelectorAll('[data-part=\"{part}\"] tbody tr')].map((row) =>"
        "[...row.querySelectorAll('td')].map((cell) =>"
        "(cell.querySelector('input')?.value ?? cell.textContent)))"
    )
    return np.array([[float(text.replace("\N{MINUS SIGN}", "-")) for text in row] for row in texts])


def test_the_numbers_of_chapter_2_can_be_changed(browser, site):
    opened(browser, site, "02_attention")
    expected = {name: np.array(rows) for name, rows in interactive.attention_numbers().items()}
    for name, rows in expected.items():
        assert np.abs(tables(browser, name) - rows).max() <= 0.0051, name
    field = "document.querySelector('[data-part=\"%s\"] tbody tr:nth-child(%d) td:nth-of-type(%d) \
input')"
    browser.run(
        f"for (const [e, value] of [[{field % ('q', 4, 2)}, 2.5], [{field % ('v', 2, 1)}, -3]])"
        "{ e.value = value; e.dispatchEvent(new Event('input')); }"
    )
    q, k, v = (torch.tensor(tables(browser, name)) for name in "qkv")
    assert q[3, 1] == 2.5
    assert v[1, 0] == -3
    outputs, weights = vitkit.scaled_dot_product_attention(q, k, v, return_weights=True)
    assert np.abs(tables(browser, "weights") - weights.numpy()).max() <= 0.000051
    assert np.abs(tables(browser, "outputs") - outputs.numpy()).max() <= 0.0051
    browser.click('[data-part="divided"]')
    plain = (q @ k.T).softmax(-1).numpy()
    assert np.abs(tables(browser, "weights") - plain).max() <= 0.000051
    browser.click('[data-part="reset"]')
    assert np.abs(tables(browser, "weights") - expected["weights"]).max() <= 0.000051
    labels = browser.run(
        "return [...document.querySelectorAll('.attention-example input')].every((e) =>"
        "e.labels.length || e.getAttribute('aria-label'))"
    )
    assert labels


MASKS = {
    "none": torch.ones(6, 6).bool(),
    "causal": torch.ones(6, 6).tril().bool(),
    "padding": (torch.arange(6) < 4).expand(6, 6),
    "both": torch.ones(6, 6).tril().bool() & (torch.arange(6) < 4),
    "front": torch.ones(6, 6).tril().bool() & (torch.arange(6) >= 2),
}


def weights_under(mask: torch.Tensor) -> np.ndarray:
    scores = torch.tensor(interactive.SCORES)
    keys = torch.eye(6)
    _, weights = vitkit.scaled_dot_product_attention(
        scores * math.sqrt(6), keys, keys, mask=mask, return_weights=True
    )
    return weights.numpy()


def test_the_mask_of_chapter_10_gives_vitkit_s_weights(browser, site):
    opened(browser, site, "10_transformer")
    for name, mask in MASKS.items():
        browser.click(f'[data-part="presets"] [value="{name}"]')
        assert np.abs(tables(browser, "weights") - weights_under(mask)).max() <= 0.0051, name
    message = "return document.querySelector('[data-part=\"message\"]').textContent"
    assert "Queries 1, 2 have no key" in browser.run(message)
    cell = '[data-part="mask"] tbody tr:nth-child(2) td:nth-of-type(5) button'
    browser.run(f"document.querySelector('{cell}').focus()")
    browser.press("space")
    mask = MASKS["front"].clone()
    mask[1, 4] = True
    assert np.abs(tables(browser, "weights") - weights_under(mask)).max() <= 0.0051
    assert "Query 1 has no key" in browser.run(message)
    pressed = f"return document.querySelector('{cell}').getAttribute('aria-pressed')"
    assert browser.run(pressed) == "true"


def numbers_of(page: str, part: str) -> list[float]:
    """Return the numbers of a static table."""
    (table,) = re.findall(rf'<table data-part="{part}".*?</table>', page, flags=re.S)
    body = table.partition("<tbody>")[2]
    texts = re.findall(r"<td[^>]*>(.*?)</td>", body)
    return [float(text.replace("\N{MINUS SIGN}", "-")) for text in texts]


def test_without_javascript_pictures_and_numbers_stand(site):
    page = (site / "tutorial/02_attention.html").read_text(encoding="utf-8")
    for name, rows in interactive.attention_numbers().items():
        assert np.abs(np.ravel(rows) - numbers_of(page, name)).max() <= 0.0051, name
    page = (site / "tutorial/10_transformer.html").read_text(encoding="utf-8")
    found = numbers_of(page, "weights")
    assert np.abs(weights_under(MASKS["causal"]).ravel() - found).max() <= 0.0051
    page = (site / "tutorial/draw_a_digit.html").read_text(encoding="utf-8")
    assert 'id="digit-app" hidden' in page
    still = page.partition('id="digit-still"')[2].partition('id="digit-app"')[0]
    assert still.count('class="map"') == 16
    shares = [float(x) for x in re.findall(r'class="share">([\d.]+) %', still)]
    test = vitkit.open_dataset("digits").splits["test"]
    index = int(re.search(r"test image (\d+)", still)[1])
    counts = np.rint(test.read(index)[..., 0] / 255 * 16).astype(int).ravel().tolist()
    expected = torch.tensor(logits_of(counts)[0]).softmax(0).numpy() * 100
    assert np.abs(expected - shares).max() <= 0.051


def test_a_page_without_a_part_loads_no_script_of_one(site):
    page = (site / "tutorial/01_patches.html").read_text(encoding="utf-8")
    assert "interactive/" not in page


def test_the_page_quotes_the_receipt():
    text = (DOCS / "tutorial/draw_a_digit.md").read_text(encoding="utf-8")
    receipt = json.loads(interactive.CHECKPOINT.with_suffix(".json").read_text())
    low, high = receipt["test_top1_95"]
    for share in (receipt["test_top1"], low, high):
        assert f"{100 * share:.2f}" in text
    assert f"{receipt['parameters']:,} parameters" in html.unescape(text)
    assert f"{receipt['test_images']} test images" in text

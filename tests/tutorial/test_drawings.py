"""The drawings of the tutorial: words for readers who do not see them, links, and their layout."""

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from reporting.browser import Browser, needs_browser
from tutorial.test_coverage import heading_anchors

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

import drawings  # noqa: E402

sys.path.pop(0)
SVG = "{http://www.w3.org/2000/svg}"
NAMES = list(drawings.DRAWINGS)
OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll("svg.drawing")) {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBBox()]);
  for (const [name, box] of texts) {
    if (box.x < 0 || box.y < 0 || box.x + box.width > width || box.y + box.height > height)
      found.push(`${name}: leaves the drawing`);
  }
  const touch = (a, b) => Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > 1
    && Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 4;
  texts.forEach(([name, box], n) => texts.slice(n + 1).forEach(([other, second]) => {
    if (touch(box, second)) found.push(`${name}: lies on ${other}`);
  }));
  for (const rect of svg.querySelectorAll("rect[rx='5']:not(.frame, .head1, .head2)")) {
    const around = rect.getBBox();
    for (const [name, box] of texts) {
      const middle = [box.x + box.width / 2, box.y + box.height / 2];
      const inside = middle[0] > around.x && middle[0] < around.x + around.width
        && middle[1] > around.y && middle[1] < around.y + around.height;
      if (inside && (box.x < around.x || box.x + box.width > around.x + around.width))
        found.push(`${name}: wider than its box`);
    }
  }
}
return found;
"""


SMALLEST = """
const widths = [...document.querySelectorAll("svg.drawing")].map((svg) => svg.clientWidth);
return 11 * Math.min(...widths) / 400;
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_has_a_title_and_a_description(name):
    root = ElementTree.fromstring(drawings.svg(name))
    assert root.get("role") == ("group" if root.findall(".//*[@tabindex]") else "img")
    texts = {
        child.get("id"): child.text for child in root if child.tag in (f"{SVG}title", f"{SVG}desc")
    }
    assert set(root.attrib["aria-labelledby"].split()) == set(texts)
    assert all(text is not None and len(text) > 10 for text in texts.values())
    assert "{link" not in drawings.svg(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_part_leads_to_a_heading_that_exists(name):
    body = drawings.DRAWINGS[name]().body
    for page, anchor in drawings.LINK.findall(body):
        slugs = heading_anchors(ROOT / f"docs/tutorial/{page}.py")
        assert not anchor or anchor[1:] in slugs, (page, anchor)


@pytest.mark.parametrize("name", NAMES)
def test_colours_are_those_of_the_theme(name):
    body = drawings.DRAWINGS[name]().body
    assert re.findall(r'(?:fill|stroke)="', body) == []
    classes = set(re.findall(r'class="([^"]+)"', body)) - {"", "line", "edge"}
    unknown = {kind for kind in classes if f".{kind}" not in drawings.RULES + body}
    assert unknown == set(), "they have no rule"


def contrast(first: str, second: str) -> float:
    """The contrast of two colours (WCAG 2.1, 1.4.3)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
def test_words_are_readable_on_every_box(theme):
    colours: dict[str, Any] = getattr(drawings, theme)
    for background in ("paper", "blue", "green", "orange", "violet", "grey"):
        assert contrast(colours["ink"], colours[background]) >= 4.5, background
    for background in ("paper", "grey"):  # remarks stand beside boxes, and in a frame
        assert contrast(colours["muted"], colours[background]) >= 4.5, background


@needs_browser
def test_no_words_leave_a_drawing_or_lie_on_others(tmp_path: Path, browser: Browser):
    drawn = "".join(drawings.element(name, lambda page, anchor: f"#{page}") for name in NAMES)
    page = tmp_path / "page.html"
    style = f"<!doctype html><meta charset=utf-8><style>{drawings.site_style()}</style>"
    page.write_text(style + drawn, encoding="utf-8")
    browser.show(1280)
    browser.open(page)
    assert browser.run(OVERLAPS) == []
    browser.show(390)
    assert browser.run(SMALLEST) >= 9, "pixels of the remarks"


SEEN = """
const share = SHARE;
document.getAnimations().forEach((one) => {
  one.pause();
  one.currentTime = share * one.effect.getComputedTiming().duration;
});
const opacity = (one) =>
  one ? Number(getComputedStyle(one).opacity) * opacity(one.parentElement) : 1;
return [...document.querySelectorAll("svg :is(rect, path)")]
  .filter((one) => one.getClientRects().length && opacity(one) > 0)
  .map((one) => {
    const { x, y, width, height } = one.getBoundingClientRect();
    return `${[x, y, width, height].map((n) => n.toFixed(1))} ${one.getAttribute("class")}`;
  });
"""


@pytest.fixture
def moving_page(tmp_path: Path) -> Path:
    style = f"<!doctype html><meta charset=utf-8><style>{drawings.site_style()}</style>"
    page = tmp_path / "moving.html"
    page.write_text(style + drawings.element("patches-to-tokens", None), encoding="utf-8")
    return page


def seen(browser: Browser, page: Path, share: float, motion: str = "no-preference") -> set[str]:
    """Return the shapes that are seen at a share of the time, each with its place."""
    browser.show(1280)
    wanted = [{"name": "prefers-reduced-motion", "value": motion}]
    browser.devtools("Emulation.setEmulatedMedia", media="screen", features=wanted)
    browser.open(page)
    return set(browser.run(SEEN.replace("SHARE", str(share))))


@needs_browser
def test_the_animation_ends_as_the_drawing_without_motion(browser: Browser, moving_page: Path):
    at_rest = seen(browser, moving_page, 0, "reduce")
    assert browser.run("return document.getAnimations().length") == 0
    steps = [seen(browser, moving_page, share) for share in (0, 0.3, 0.6, 0.79, 0.95)]
    assert browser.run("return document.getAnimations().length") > 4
    assert steps[-1] == at_rest
    numbers = [len(step) for step in steps]
    assert numbers == sorted(numbers)  # nothing that was reached vanishes
    assert len(set(numbers)) == len(numbers)
    for share in (0.965, 0.975, 0.979):  # it fades where it stands
        assert seen(browser, moving_page, share) == at_rest


@needs_browser
def test_focus_stops_the_animation(browser: Browser, moving_page: Path):
    seen(browser, moving_page, 0)
    browser.open(moving_page)
    states = "return [...new Set(document.getAnimations().map((one) => one.playState))]"
    assert browser.run(states) == ["running"]
    browser.press("tab")
    assert browser.run(states) == ["paused"]

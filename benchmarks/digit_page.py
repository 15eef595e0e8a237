"""Measure the page "Draw a digit" in a headless Chromium: size, times, and drawings.

    python benchmarks/digit_page.py build/docs/tutorial/draw_a_digit.html

It prints the results and writes them to benchmarks/results/digit-page-<processor>-<date>.json. The
drawings are made, not drawn by people: one skeleton for each digit, whose size, place, slant and
corners are random. They compare "centred" with "as drawn", and say little about anyone's hand.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from urllib.parse import unquote, urlsplit

from demo import processor, write_results

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reporting.browser import IS_INSTALLED, Browser, started_browser

LOADS = 15
EACH = 30
"""Drawings of each digit."""
Point = tuple[float, float]

LISTEN = """
window.times = {};
document.addEventListener("pointerdown", (event) => {
  times.down ??= event.timeStamp;
}, { capture: true });
document.getElementById("digit-app").addEventListener("answered", () => {
  if (times.down) times.answered ??= performance.now();
});
const box = document.querySelector('[data-part="pad"]');
box.scrollIntoView({ behavior: "instant", block: "center" });
const { left, top, width, height } = box.getBoundingClientRect();
return [left + width / 2, top + height / 2];
"""
MODEL = """
const model = vit.decode(digitModel);
const image = strokes.normalise(strokes.grey(model.examples[7].counts), model);
const taken = [];
for (let i = 0; i < 200; i++) {
  const start = performance.now();
  vit.forward(model, image);
  taken.push(performance.now() - start);
}
return taken.slice(20);
"""
READ = """
const model = vit.decode(digitModel);
return %s.map((drawn) => [true, false].map((centred) => {
  const counts = strokes.count(strokes.bitmap(drawn, { centred }));
  const { logits } = vit.forward(model, strokes.normalise(strokes.grey(counts), model));
  return logits.indexOf(Math.max(...logits));
}));
"""


def arc(x: float, y: float, across: float, down: float, start: float, end: float) -> list[Point]:
    """Return points of an ellipse's arc; angles in degrees, clockwise from the right."""
    angles = [math.radians(start + (end - start) * step / 16) for step in range(17)]
    return [(x + across * math.cos(angle), y + down * math.sin(angle)) for angle in angles]


SKELETONS: list[list[list[Point]]] = [
    [arc(0.5, 0.5, 0.35, 0.5, -90, 270)],
    [[(0.3, 0.25), (0.55, 0), (0.55, 1)]],
    [[*arc(0.5, 0.28, 0.33, 0.28, -170, 40), (0.2, 1), (0.85, 1)]],
    [[*arc(0.45, 0.25, 0.33, 0.25, -150, 90), *arc(0.45, 0.74, 0.38, 0.26, -90, 150)]],
    [[(0.6, 0), (0.1, 0.65), (0.9, 0.65)], [(0.65, 0.35), (0.65, 1)]],
    [[(0.8, 0), (0.25, 0), (0.2, 0.45), *arc(0.45, 0.68, 0.36, 0.3, -110, 140)]],
    [[(0.7, 0), (0.35, 0.3), *arc(0.48, 0.72, 0.3, 0.28, 180, -180)]],
    [[(0.15, 0), (0.85, 0), (0.4, 1)]],
    [[*arc(0.5, 0.25, 0.27, 0.25, 90, -270), *arc(0.5, 0.75, 0.33, 0.25, -90, 270)]],
    [[*arc(0.48, 0.28, 0.3, 0.28, 0, -360), (0.78, 0.28), (0.7, 1)]],
]


def made(digit: int, chance: random.Random) -> list[list[dict[str, float]]]:
    """Return a digit as strokes in the bitmap's 32 x 32 pixels."""
    size, wide = chance.uniform(12, 28), chance.uniform(0.55, 0.9)
    slant, left, top = chance.gauss(0, 0.1), chance.uniform(10, 22), chance.uniform(0, 32 - size)
    bend = [chance.gauss(0, 0.03) for _ in range(2)]

    def place(point: Point) -> dict[str, float]:
        x = point[0] + bend[0] * math.sin(5 * point[1])
        y = point[1] + bend[1] * math.sin(5 * point[0])
        return {"x": left + size * (wide * (x - 0.5) - slant * (y - 0.5)), "y": top + size * y}

    return [[place(point) for point in stroke] for stroke in SKELETONS[digit]]


def drawings(browser: Browser) -> dict[str, object]:
    """Return how many made drawings are read right, centred and as drawn."""
    chance = random.Random(0)
    digits = [digit for digit in range(10) for _ in range(EACH)]
    found = browser.run(READ % json.dumps([made(digit, chance) for digit in digits]))
    right = [
        sum(answers[way] == digit for digit, answers in zip(digits, found, strict=True))
        for way in (0, 1)
    ]
    return {"drawings": len(digits), "right_centred": right[0], "right_as_drawn": right[1]}


def first_drawing(browser: Browser, page: Path) -> float:
    """Return milliseconds from the first touch of the pen to the answer, on a fresh page."""
    browser.open(page)
    x, y = browser.run(LISTEN)
    for kind, at in (("mousePressed", y), ("mouseMoved", y + 60), ("mouseReleased", y + 60)):
        browser.devtools(
            "Input.dispatchMouseEvent", type=kind, x=x, y=at, button="left", buttons=1, clickCount=1
        )
    for _ in range(100):
        times = browser.run("return times")
        if "answered" in times:
            return float(times["answered"] - times["down"])
        time.sleep(0.05)
    raise SystemExit(f"{page}: a drawing was not answered")


def measure(browser: Browser, page: Path) -> dict[str, object]:
    """Return all numbers."""
    browser.show(1280)
    browser.open(page)
    loaded = {Path(unquote(urlsplit(address).path)) for address in browser.requests()}
    answered = [first_drawing(browser, page) for _ in range(LOADS)]
    return {
        "bytes_with_all_that_it_loads": sum(path.stat().st_size for path in loaded),
        "loads": LOADS,
        "first_drawing_ms": {"median": round(median(answered), 1), "most": round(max(answered), 1)},
        "model_ms": round(median(browser.run(MODEL)), 2),
        **drawings(browser),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, help="the built page")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if not IS_INSTALLED:
        raise SystemExit("chromium and chromedriver are not installed")
    with tempfile.TemporaryDirectory() as folder, started_browser(Path(folder)) as browser:
        results = {"processor": processor(), "date": time.strftime("%Y-%m-%d")}
        results |= measure(browser, given.page)
    print(json.dumps(results, indent=2))
    write_results("digit-page-", results, given.output)


if __name__ == "__main__":
    main()

"""The figure of a confusion matrix: every name in full, the right numbers, equal bytes."""

import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from plots.figures import drawn_part, svg_text

from vitkit.plots.confusion import draw_confusion

LONG = "a rather long class name that differs from the others at its very end "


def counts(classes: int, images: int = 40) -> np.ndarray:
    """Eight of ten images right; the others are taken for one of the next three classes."""
    generator = np.random.default_rng(classes)
    table = np.zeros((classes, classes), np.int64)
    for row in range(classes):
        wrong = generator.binomial(images, 0.2)
        table[row, row] = images - wrong
        for step in generator.integers(1, 4, wrong):
            table[row, (row + step) % classes] += 1
    return table


def numbers_in(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize(
    ("name", "classes"),
    [("class ", 2), ("class ", 60), (LONG, 10), (LONG, 25),
     pytest.param(LONG, 60, marks=pytest.mark.soak)],
)  # fmt: skip
def test_every_name_is_there_in_full_twice(name, classes):
    names = [f"{name}{number}" for number in range(classes)]
    figure = draw_confusion(counts(classes), names, "photos & more")
    text = svg_text(figure)
    for one in names:
        # also at the end of a longer number
        assert text.count("".join(one.split())) >= 2, one
    for title in ("trueclass", "predictedclass", "shareofthetrueclass'simages(%)", "photos&more:"):
        assert title in text
    assert min(drawn_part(figure)) > 0.9  # neither cut nor with an empty third
    box, size = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert (box.x1, box.y1) <= tuple(size)


@pytest.mark.parametrize("classes", [2, 10, 60])
def test_the_cells_are_the_shares_of_the_true_classes(classes):
    table = counts(classes)
    drawn = draw_confusion(table, [str(n) for n in range(classes)], "").axes[0].images[0]
    shares = drawn.get_array()
    np.testing.assert_allclose(shares.filled(0), 100 * table / table.sum(1, keepdims=True))
    assert (shares.mask == (table == 0)).all()
    assert drawn.get_clim() == (0, 100)


def test_numbers_and_per_cent_stand_where_they_fit():
    table = np.array([[30, 10], [0, 40]])
    assert numbers_in(draw_confusion(table, ["a", "b"], "x")) == [
        "30\n75.0 %",
        "10\n25.0 %",
        "40\n100.0 %",
    ]
    many = counts(25)
    found = numbers_in(draw_confusion(many, [str(n) for n in range(25)], "x"))
    assert found == [str(n) for n in many[many > 0]]
    assert numbers_in(draw_confusion(counts(60), [str(n) for n in range(60)], "x")) == []


def test_the_title_counts_the_images():
    title = draw_confusion(np.array([[3, 1], [0, 1000]]), ["a", "b"], "pets").axes[0].get_title()
    assert title == "pets: 1,003 of 1,004 images right (99.9 %)"
    empty = draw_confusion(np.zeros((2, 2), np.int64), ["a", "b"], "").axes[0].get_title()
    assert empty == "0 of 0 images right"


def test_a_thousand_classes_have_numbers_and_their_confusions_by_name():
    table = counts(1000, images=20)
    table[7, 500] = 19
    figure = draw_confusion(table, [f"{LONG}{number}" for number in range(1000)], "big")
    text = svg_text(figure)
    assert "trueclass(number)" in text
    images = table[7].sum()
    first = f"7 {LONG}7 as 500 {LONG}500: 19 of {images} images"
    assert "mostfrequentconfusions" + "".join(first.split()) in text
    assert min(drawn_part(figure)) > 0.9
    assert figure.get_size_inches()[0] * 300 > 1000


def test_equal_data_give_equal_bytes_in_any_style_which_stays_as_it_was(monkeypatch):
    def files() -> tuple[bytes, str]:
        figure = draw_confusion(counts(4), ["a", "b", "c", "d"], "x")
        return figure._repr_png_(), svg_text(figure)

    plain = files()
    own = {"font.size": 30, "axes.facecolor": "black", "text.usetex": True, "svg.hashsalt": None}
    with matplotlib.rc_context(own):
        before = dict(matplotlib.rcParams)
        assert files() == plain
        assert dict(matplotlib.rcParams) == before


def test_drawing_neither_imports_pyplot_nor_chooses_a_backend():
    code = (
        "import sys, numpy, matplotlib\n"
        "before = matplotlib.rcParams._get('backend')\n"
        "from vitkit.plots.confusion import draw_confusion\n"
        "from vitkit.plots.figure import encode_png, encode_svg\n"
        "figure = draw_confusion(numpy.eye(2, dtype='int64'), ['a', 'b'], 'x')\n"
        "encode_png(figure), encode_svg(figure), figure._repr_png_()\n"
        "print('matplotlib.pyplot' in sys.modules, matplotlib.rcParams._get('backend') is before)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("False True\n", "")


def test_names_are_drawn_as_they_are():
    """A dollar begins no formula; a letter that no font has is no warning."""
    figure = draw_confusion(np.eye(3, dtype=np.int64), ["$a_b$", "\\frac{", "\U00012000"], "$ é")
    for name in ("$a_b$", "\\frac{", "\U00012000"):
        assert svg_text(figure).count(name) == 2
    assert figure._repr_png_().startswith(b"\x89PNG")

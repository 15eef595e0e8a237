"""What a notebook shows: HTML that is escaped, small and complete, and figures."""

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from plots.figures import svg_text
from tiny_checkpoint import save_tiny
from training.logged_runs import train

import vitkit
from vitkit import SettingError
from vitkit.evaluation.comparison import compare_evaluations

NAMES = tuple(f"<script>{n}</script>" for n in range(10))
VOID = {"img", "br"}


class Reader(HTMLParser):
    """Checks that every element is closed, and collects texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def shown(value: object, most: int = 10_000) -> list[str]:
    """Return the texts that a notebook shows for a value; it loads nothing and sets no colours."""
    html = value._repr_html_()
    assert len(html) < most
    reader = Reader(html)
    assert not {"script", "style", "link", "iframe"} & reader.tags
    for name, text in reader.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "href") or text.startswith("data:image/png;base64,")
        # text has the notebook's own colour, light or dark
        assert not re.search(r"(^|;)color:", text)
    return reader.texts


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "run", epochs=2)


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory):
    torch.manual_seed(0)
    path = save_tiny(tmp_path_factory.mktemp("checkpoint") / "m.safetensors", tuple("0123456789"))
    return vitkit.evaluate(path, "digits")


def test_a_result_shows_its_scores_and_where_it_is(result):
    texts = shown(result)
    for split in ("val", "test"):
        assert split in texts
        assert f"{result.metrics[split]['top1']:.4f}" in texts
    assert {str(result.run), str(result.best), "all 2 epochs"} <= set(texts)


def test_curves_show_their_figure(result):
    assert "data:image/png;base64," in result.curves._repr_html_()
    assert result.plot()._repr_png_().startswith(b"\x89PNG")


def test_an_evaluation_shows_scores_with_intervals_and_escaped_names(evaluation):
    texts = shown(evaluation)
    interval = f"{evaluation['top1_low']:.4f} to {evaluation['top1_high']:.4f}"
    assert texts[texts.index("top1") + 1 :][:2] == [f"{evaluation['top1']:.4f}", interval]
    evaluation.classes = NAMES
    texts = shown(evaluation)
    assert set(NAMES) & set(texts)
    losses = evaluation.top_losses(3)
    texts = shown(losses)
    for one in losses:
        assert {one.path, one.label, f"{one.loss:.3f}"} <= set(texts)


def test_a_prediction_shows_its_classes_and_per_cent():
    top = (("<b>cat", 0.75), ("dog", 0.25), ("emu", float("nan")))
    assert shown(vitkit.Prediction("<b>cat", 0.75, top)) == [
        "<b>cat", "75.0 %", "dog", "25.0 %", "emu", "nan %"
    ]  # fmt: skip


def test_a_comparison_shows_models_and_verdicts(evaluation):
    comparison = compare_evaluations({"<i>first": evaluation, "second": evaluation})
    texts = shown(comparison)
    assert {"<i>first", "second", comparison.pairs[0].verdict} <= set(texts)
    assert f"{evaluation['top1']:.4f}" in texts


SETTINGS = {"recipe": "digits", "shift": 0, "flip": 0.0, "crop_scale": 1.0, "batch_size": 32}


def test_a_batch_shows_images_of_the_training_split_with_their_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figure = vitkit.show_batch("digits", **SETTINGS, max_images=10)
    train_split = vitkit.open_dataset("digits").splits["train"]
    stored = {train_split.read(n).tobytes(): n for n in range(len(train_split))}
    assert len(figure.axes) == 10
    for axes in figure.axes:
        pixels = np.asarray(axes.images[0].get_array())[..., :1].astype(np.uint8)
        number = stored[pixels.tobytes()]
        (caption,) = (text.get_text() for text in axes.texts)
        assert caption == str(train_split.labels[number])
    assert "digits:firsttrainingbatch" in svg_text(figure)
    assert list(Path.cwd().iterdir()) == []
    again = vitkit.show_batch("digits", **SETTINGS, max_images=10)
    assert again._repr_png_() == figure._repr_png_()
    other = vitkit.show_batch("digits", **SETTINGS, max_images=10, seed=1)
    assert other._repr_png_() != figure._repr_png_()


def test_mixed_images_have_both_labels():
    figure = vitkit.show_batch("digits", **SETTINGS, mixup=0.8, max_images=4)
    caption = figure.axes[0].texts[0].get_text()
    weights = [float(share) for share in re.findall(r"\(([\d.]+) %\)", caption)]
    assert len(weights) == 2
    assert sum(weights) == pytest.approx(100, abs=0.11)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_images": 0}, "max_images = 0: must be 1 or more"),
     ({"probe": "linear"}, "show-batch draws the augmented images of a single run; leave out"),
     ({"auto": True}, "leave out --auto"), ({"aa": "trivail"}, "did you mean 'trivial'")],
)  # fmt: skip
def test_a_batch_that_cannot_be_drawn_is_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        vitkit.show_batch("digits", **settings)

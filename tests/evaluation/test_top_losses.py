"""The images with the highest losses: the right ones, in order, and their figure."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from plots.figures import drawn_part, svg_text
from torch.nn import functional as F

import vitkit
from vitkit import SettingError

CLASSES = ("ant <b>", "bee", "a cat with a name that is longer than a line")
TEMPERATURE = 0.5


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for index in range(5):
                pixels = generator.integers(0, 256, (8, 12), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> vitkit.Checkpoint:
    torch.manual_seed(0)
    model = vitkit.create_model(
        "vit_tiny_patch16_224", image_size=8, patch_size=4, in_channels=1, depth=1, width=24,
        num_heads=2, mlp_width=32, num_classes=3,
    )  # fmt: skip
    with torch.no_grad():
        model.head.weight.normal_(0, 2)
    preprocess = vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.25,), fit="squash")
    path = tmp_path_factory.mktemp("checkpoint") / "m.safetensors"
    vitkit.save(path, model, preprocess=preprocess, classes=CLASSES, temperature=TEMPERATURE)
    return vitkit.load(path)


def test_the_highest_losses_come_first_with_all_that_is_known_of_them(images, checkpoint):
    evaluation = vitkit.evaluate(checkpoint, images)
    files = [images / "test" / name / f"{n}.png" for name in sorted(CLASSES) for n in range(5)]
    logits = vitkit.Predictor.from_checkpoint(checkpoint).logits(files) / TEMPERATURE
    labels = torch.tensor([CLASSES.index(file.parent.name) for file in files])
    losses = F.cross_entropy(logits, labels, reduction="none")
    order = losses.argsort(descending=True).tolist()
    found = evaluation.top_losses(4)
    assert len(found) == 4
    for one, number in zip(found, order, strict=False):
        probabilities = logits[number].softmax(0)
        assert one.path == files[number].relative_to(images).as_posix()
        assert one.label == files[number].parent.name
        assert one.predicted == CLASSES[int(logits[number].argmax())]
        assert one.loss == pytest.approx(float(losses[number]), rel=1e-4)
        assert one.probability == pytest.approx(float(probabilities.max()), rel=1e-4)
        expected = float(probabilities[labels[number]])
        assert one.label_probability == pytest.approx(expected, rel=1e-4)
    assert [one.path for one in evaluation.top_losses(100)][:4] == [one.path for one in found]
    assert len(evaluation.top_losses(100)) == 15
    assert evaluation.losses.mean() == pytest.approx(evaluation["calibrated_loss"], rel=1e-5)
    with pytest.raises(SettingError, match="count = 0: must be 1 or more"):
        evaluation.top_losses(0)


def test_scores_are_those_of_the_logits_and_broken_logits_are_refused(images, checkpoint):
    found = vitkit.evaluate(checkpoint, images)
    assert not any(name.startswith("top3") for name in found)  # of three classes it is always 1
    assert found["top1"] == found.right.mean()
    model = copy.deepcopy(checkpoint.model)
    model.head.bias.data[1] = torch.nan
    broken = vitkit.Checkpoint(model, checkpoint.preprocess, CLASSES)
    with pytest.raises(vitkit.CheckpointError, match=r"NaN or infinity for 15 of 15 images, so"):
        vitkit.evaluate(broken, images)


def test_their_figure_shows_the_images_with_their_names(images, checkpoint):
    found = vitkit.evaluate(checkpoint, images).top_losses(8)
    figure = found.plot()
    assert len(figure.axes) == 8
    text = svg_text(figure)
    for one, axes in zip(found, figure.axes, strict=True):
        stored = np.asarray(Image.open(images / one.path).convert("RGB"))
        assert (axes.images[0].get_array() == stored).all()
        assert "".join(f"label {one.label}: {100 * one.label_probability:.1f} %".split()) in text
        caption = axes.texts[0].get_text()
        assert caption.splitlines()[0] == Path(one.path).name
        # the class once if it is right, and no number is broken
        wrong = [] if one.predicted == one.label else [one.probability]
        shown = [f"{100 * p:.1f} %" for p in (one.label_probability, *wrong)]
        assert re.findall(r"[\d.]+ %", caption) == shown
        predicted = "".join(f"predicted {one.predicted}: ".split())
        assert (predicted in "".join(caption.split())) == bool(wrong)
        assert f"loss{one.loss:.2f}" in text
    assert {one.predicted == one.label for one in found} == {True, False}
    assert min(drawn_part(figure)) > 0.85


def test_a_list_that_was_changed_is_drawn_with_its_own_images(images, checkpoint):
    found = vitkit.evaluate(checkpoint, images).top_losses(6)
    found.sort(key=lambda one: one.path)
    del found[0]
    drawn = [axes.images[0].get_array() for axes in found.plot().axes]
    assert len(drawn) == 5
    for one, pixels in zip(found, drawn, strict=True):
        assert (pixels == np.asarray(Image.open(images / one.path).convert("RGB"))).all()


def test_a_loss_that_is_not_a_number_is_the_highest(images, checkpoint):
    evaluation = vitkit.evaluate(checkpoint, images)
    evaluation.losses = evaluation.losses.copy()
    evaluation.losses[7] = np.nan
    assert evaluation.loss_ranks[7] == 1
    assert sorted(evaluation.loss_ranks) == list(range(1, 16))

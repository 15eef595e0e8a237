"""`vitkit compare` and what `vitkit eval` says beyond top-1, on models made in a moment."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest
from sklearn.metrics import balanced_accuracy_score, confusion_matrix

import vitkit
from vitkit import cli

CLASSES = ("ant", "bee", "cat")
GREY = vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.25,), fit="squash")


def write_images(folder: Path, each: int, seed: int) -> None:
    """Noise, `each` images a class, and in the last class one more."""
    generator = np.random.default_rng(seed)
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for i in range(each + (number == 2)):
            pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """With a test split of its own: 37 images."""
    root = tmp_path_factory.mktemp("images")
    for seed, (split, each) in enumerate([("train", 2), ("test", 12)]):
        write_images(root / split, each, seed)
    return root


@pytest.fixture(scope="module")
def saved(tmp_path_factory, images):
    """Models of random weights; `saved(seed, classes=..., ...)` gives a path."""
    root = tmp_path_factory.mktemp("models")

    def make(seed: int, classes: tuple[str, ...] = CLASSES, **metadata) -> str:
        torch.manual_seed(seed)
        model = vitkit.create_model(
            "vit_tiny_patch16_224", image_size=8, patch_size=4, width=32, num_heads=2, depth=1,
            num_classes=len(classes), in_channels=1,
        )  # fmt: skip
        torch.nn.init.normal_(model.head.weight)
        place = root / f"{len(list(root.iterdir()))}.safetensors"
        recipe = {"data": str(images), "seed": seed, "lr": 0.1}
        metadata = {"recipe": recipe} | metadata
        return str(vitkit.save(place, model, preprocess=GREY, classes=classes, **metadata))

    return make


def predictions_of(path: str, images: Path) -> tuple[list[str], list[str], list[float]]:
    """Of the test images in their order: true class, predicted class, probability."""
    files = sorted((images / "test").glob("*/*.png"))
    found = vitkit.Predictor.from_checkpoint(path, device="cpu")(files)
    return [f.parent.name for f in files], [p.label for p in found], [p.probability for p in found]


def test_two_checkpoints_against_a_count_by_hand(saved, images, capsys):
    first, second = saved(0), saved(1)
    labels, one, _ = predictions_of(first, images)
    other = predictions_of(second, images)[1]
    right = [[a == b for a, b in zip(labels, guess, strict=True)] for guess in (one, other)]
    only_first = sum(a and not b for a, b in zip(*right, strict=True))
    only_second = sum(b and not a for a, b in zip(*right, strict=True))
    assert min(only_first, only_second) > 0
    assert cli.run(["compare", first, second, "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    (pair,) = found["pairs"]
    assert (pair["only_first"], pair["only_second"]) == (only_first, only_second)
    assert pair["both"] == sum(right[0]) - only_first
    assert pair["both"] + pair["neither"] + only_first + only_second == len(labels) == 37
    p = binomtest(only_first, only_first + only_second).pvalue
    assert pair["p"] == pytest.approx(p, rel=1e-9)
    assert found["scores"][first]["top1"] == pytest.approx(np.mean(right[0]))
    top1 = [np.mean(each) for each in right]
    (group,) = found["repeats"]
    assert group["names"] == [first, second]
    assert (group["low"], group["high"]) == (min(top1), max(top1))
    assert (group["mean"], group["spread"]) == pytest.approx((np.mean(top1), np.std(top1, ddof=1)))
    assert cli.run(["compare", first, second, "--device", "cpu", "--data", str(images)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == pair["verdict"]
    assert lines[2].split()[:2] == [second, f"{top1[1]:.4f}"]


@pytest.mark.parametrize(
    ("differs", "together"),
    [({"amp": "bfloat16", "attention_kernel": "plain", "compile": False}, 2), ({"lr": 0.2}, 0),
     ({"workers": 3, "pretrained": "b", "start": {"sha256": "s", "path": "b"}}, 2),
     ({"start": {"sha256": "t", "path": "a"}}, 0)],
)  # fmt: skip
def test_what_a_trial_decides_parts_no_seeds(saved, images, differs, together):
    decided = {"amp": "off", "attention_kernel": "fused", "compile": True}
    decided |= {"pretrained": "a", "start": {"sha256": "s", "path": "a"}}
    recipe = {"data": str(images), "lr": 0.1} | decided
    paths = [saved(seed, recipe=recipe | {"seed": seed} | more) for seed, more in
             enumerate([{}, differs])]  # fmt: skip
    found = vitkit.compare(*paths, device="cpu").repeats
    assert [len(group.names) for group in found] == [together] * bool(together)


def test_one_seed_is_one_run_and_a_run_is_no_other(saved, images):
    recipe = {"data": str(images), "lr": 0.1}
    best, last, other = (saved(weights, recipe=recipe | {"seed": seed})
                         for weights, seed in ((0, 0), (1, 0), (2, 1)))  # fmt: skip
    assert vitkit.compare(best, last, device="cpu").repeats == ()
    (group,) = vitkit.compare(best, last, other, device="cpu").repeats
    assert group.names == (best, other)
    with pytest.raises(vitkit.SettingError, match="expected two or more different checkpoints"):
        vitkit.compare(best, f"{Path(best).parent}/./{Path(best).name}", device="cpu")


def test_the_order_of_the_classes_is_each_checkpoint_s_own(saved, images):
    """The same model with its head's rows in another order is the same model."""
    path = saved(3)
    held = vitkit.load(path)
    state = held.model.state_dict()
    for name in ("head.weight", "head.bias"):
        state[name].copy_(state[name].flip(0))
    turned = Path(path).with_name("turned.safetensors")
    vitkit.save(turned, held.model, preprocess=GREY, classes=CLASSES[::-1],
                recipe=held.metadata["recipe"])  # fmt: skip
    pair = vitkit.compare(path, turned, device="cpu").pairs[0]
    assert (pair.only_first, pair.only_second, pair.p) == (0, 0, 1.0)
    assert pair.both == round(vitkit.evaluate(path, images, device="cpu")["top1"] * 37)
    assert pair.verdict.startswith("No significant difference")


def test_what_cannot_be_compared_is_named(saved, images, tmp_path):
    first, second = saved(0), saved(1)
    with pytest.raises(vitkit.SettingError, match="two or more different"):
        vitkit.compare(first)
    with pytest.raises(vitkit.OutputError, match=r"--report \. is a folder; name a file"):
        vitkit.compare(first, second, data="digits", report="")
    with pytest.raises(vitkit.SettingError, match="name the data to compare on with --data"):
        vitkit.compare(first, saved(0, recipe={"data": "digits"}))
    four = saved(0, classes=(*CLASSES, "dog"))
    with pytest.raises(vitkit.DataError, match="different classes: only one of them has dog"):
        vitkit.compare(first, four, device="cpu")
    write_images(tmp_path / "flat", 10, 3)
    changed = saved(0, data={"fingerprint": "0" * 64})
    with pytest.raises(vitkit.DataError, match="differ from those the checkpoint was trained on"):
        vitkit.compare(second, changed, data=tmp_path / "flat", device="cpu")


def test_eval_says_everything_as_json(saved, images, capsys):
    path = saved(5, temperature=2.0)
    labels, predicted, _ = predictions_of(path, images)
    assert cli.run(["eval", path, str(images), "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"top1", "loss", "images", "brier", "ece", "top1_low", "top1_high",
            "temperature", "calibrated_loss", "calibrated_ece"} <= found.keys()  # fmt: skip
    assert found["confusion"] == confusion_matrix(labels, predicted, labels=CLASSES).tolist()
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert [(one["class"], one["images"]) for one in found["per_class"]] == [
        ("ant", 12), ("bee", 12), ("cat", 13),
    ]  # fmt: skip
    accuracies = [one["accuracy"] for one in found["per_class"]]
    rights = [found["confusion"][i][i] for i in range(3)]
    assert accuracies == pytest.approx([rights[0] / 12, rights[1] / 12, rights[2] / 13])
    assert found["top1_low"] < found["top1"] < found["top1_high"]
    assert found["temperature"] == 2.0
    assert found["calibrated_loss"] != found["loss"]


def test_eval_names_the_classes_that_have_no_images(saved, images, capsys):
    path = saved(0, classes=("ant", "bee", "cat", "dog", "elk"))
    assert cli.run(["eval", path, str(images), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert (
        "no images of 2 of the 5 classes: dog, elk; balanced_accuracy is over the others" in printed
    )
    assert cli.run(["eval", path, str(images), "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["classes_without_images"] == ["dog", "elk"]
    losses = [one["loss"] for one in found["top_losses"]]
    assert len(losses) == 37
    assert losses == sorted(losses, reverse=True)
    assert found["top1"] == sum(row[i] for i, row in enumerate(found["confusion"])) / 37
    assert found["balanced_accuracy"] == pytest.approx(
        np.mean([one["accuracy"] for one in found["per_class"]])
    )
    assert cli.run(["eval", saved(0), str(images), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["classes_without_images"] == []


def test_eval_prints_a_table_and_writes_files(saved, images, tmp_path, capsys):
    path = saved(5, temperature=2.0)
    labels, predicted, probabilities = predictions_of(path, images)
    files = {end: tmp_path / f"confusion.{end}" for end in ("png", "svg", "csv")}
    rows = tmp_path / "rows.csv"
    words = ["eval", path, str(images), "--overwrite", "--predictions", str(rows)]
    for file in files.values():
        assert cli.run([*words, "--confusion", str(file)]) == 0
    table = capsys.readouterr().out
    for line in ("top1", "95 %:", "balanced_accuracy", "calibrated:", "worst classes"):
        assert line in table
    with Image.open(files["png"]) as image:
        assert image.width >= 3 * 40
    drawn = files["svg"].read_text()
    assert all(drawn.count(f">{name}<") == 2 for name in CLASSES)
    with files["csv"].open() as file:
        header, *body = csv.reader(file)
    assert header == [r"true\predicted", *CLASSES]
    assert [[int(n) for n in row[1:]] for row in body] == confusion_matrix(
        labels, predicted, labels=CLASSES
    ).tolist()
    with rows.open() as file:
        written = list(csv.DictReader(file))
    assert [row["label"] for row in written] == labels
    assert [row["predicted"] for row in written] == predicted
    assert [float(r["probability"]) for r in written] == pytest.approx(probabilities, abs=2e-6)
    assert len({row["image"] for row in written}) == 37
    assert list(written[0]) == ["image", "label", "predicted", "probability", "label_probability",
                                "loss", "loss_rank"]  # fmt: skip
    ranked = sorted(written, key=lambda row: -float(row["loss"]))
    assert [int(row["loss_rank"]) for row in ranked] == list(range(1, 38))
    for row in written:
        label = float(row["label_probability"])
        assert label == pytest.approx(np.exp(-float(row["loss"])), rel=1e-4)
        is_first = label == pytest.approx(float(row["probability"]), rel=1e-4)
        assert is_first == (row["label"] == row["predicted"])
    assert cli.run(["eval", path, str(images), "--confusion", "matrix.pdf"]) == 2
    assert "expected a name that ends in .png or .svg or .csv" in capsys.readouterr().err


def test_checkpoints_of_different_data_are_named(saved):
    other = saved(2, recipe={"data": "digits"})
    with pytest.raises(vitkit.SettingError, match=f"not trained on the same .*{other} on digits"):
        vitkit.compare(saved(0), other)


def test_of_other_data_the_classes_are_the_first_problem(saved, tmp_path):
    write_images(tmp_path, 4, 7)
    trained = {"data": {"fingerprint": "of other images"}}
    with pytest.raises(vitkit.DataError, match="has no test folder"):
        vitkit.evaluate(saved(3, **trained), tmp_path)
    with pytest.raises(vitkit.DataError, match="the checkpoint lacks: 'ant', 'bee', 'cat'; it"):
        vitkit.evaluate(saved(3, ("x", "y", "z"), **trained), tmp_path)

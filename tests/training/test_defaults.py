"""Settings that nobody gave follow from the training images; what is given always wins."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from training.tiny_runs import last_state, settings_of

import vitkit
from vitkit import SettingError, cli

USUAL = {"epochs": 10, "batch_size": 128, "last_batch": "drop", "lr": 1e-3, "warmup_epochs": 1.0,
         "opt": "adamw", "beta2": 0.999, "flip": 0.5, "shift": 0, "crop_scale": 0.35}  # fmt: skip
QUICK = {"quiet": True, "device": "cpu", "threads": 1, "workers": 0, "test": False,
         "plots": False, "report": False}  # fmt: skip
SMALL = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "num_heads": 1,
         "mlp_width": 16}  # fmt: skip


def write_images(root: Path, each: int, classes: int = 2, *, grey: bool = False, side: int = 12):
    """Write a folder with `train` and `val`, all images different."""
    rng = np.random.default_rng(0)
    for split, count in (("train", each), ("val", 1)):
        for label in range(classes):
            folder = root / split / f"{label:05}"
            folder.mkdir(parents=True)
            for number in range(count):
                shape = (side, side) if grey else (side, side, 3)
                pixels = rng.integers(0, 255, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images", 42)


def chosen_for(data: Path | str, output: Path, **given: object) -> dict:
    """The settings that a run of one step has in its config.yaml."""
    asked = QUICK | {"max_steps": 1, "output": output} | given
    return settings_of(vitkit.train(data, **asked).run)


def steps_of(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def test_a_small_set_gets_a_small_model_and_enough_steps(images, tmp_path):
    found = chosen_for(images, tmp_path / "run")
    assert (found["batch_size"], found["last_batch"]) == (8, "fill")
    steps_an_epoch = -(-84 // 8)
    assert 2000 <= found["epochs"] * steps_an_epoch < 2000 + steps_an_epoch
    assert found["warmup_epochs"] == pytest.approx(found["epochs"] / 20)
    assert (found["spec"]["width"], found["spec"]["image_size"]) == (64, 12)
    assert (found["lr"], found["beta2"], found["opt"]) == (4e-3, 0.95, "adamw")
    assert (found["flip"], found["shift"], found["crop_scale"]) == (0.5, 1, 1.0)
    (line,) = [line for line in (tmp_path / "run" / "train.log").read_text().splitlines()
               if "chosen for 84 training images" in line]  # fmt: skip
    words = "width 64 and depth", "at 12 px", "batch 8", "182 epochs", "--auto", "--pretrained"
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_grey_images_are_not_flipped_however_they_are_stored(tmp_path, mode):
    data = write_images(tmp_path / "grey", 4, grey=True)
    for file in data.rglob("*.png"):
        Image.open(file).convert(mode).save(file)
    found = chosen_for(data, tmp_path / "run")
    assert (found["flip"], found["spec"]["in_channels"]) == (0.0, 1)


def test_a_named_set_has_defaults_too_and_the_recipe_is_named(tmp_path):
    found = chosen_for("digits", tmp_path / "run")
    assert (found["batch_size"], found["epochs"], found["spec"]["image_size"]) == (128, 155, 8)
    assert (
        "a recipe exists for this data: --recipe digits"
        in (tmp_path / "run" / "train.log").read_text()
    )


def test_what_is_given_wins_though_it_is_a_usual_value(images, tmp_path):
    given = {name: USUAL[name] for name in USUAL if name != "batch_size"} | {"batch_size": 16}
    found = chosen_for(images, tmp_path / "run", img_size=24, **given)
    assert {name: found[name] for name in given} == given
    assert (found["img_size"], found["spec"]["image_size"]) == (24, 24)


def test_a_named_model_keeps_the_usual_rate_and_augmentation(images, tmp_path):
    named = {"model": "vit_tiny_patch16_224", "spec": SMALL}
    found = chosen_for(images, tmp_path / "run", **named)
    steps = ("epochs", "batch_size", "last_batch", "warmup_epochs")
    assert {name: found[name] for name in USUAL if name not in steps} == {
        name: USUAL[name] for name in USUAL if name not in steps
    }
    assert found["spec"] == SMALL
    assert found["epochs"] == 46, "500 steps of 11"
    given = named | {"epochs": 5, "batch_size": 32}
    found = chosen_for(images, tmp_path / "given", **given)
    assert (found["last_batch"], found["warmup_epochs"]) == ("drop", 1.0)
    log = (tmp_path / "given" / "train.log").read_text()
    assert "chosen for" not in log
    assert "5 epochs of 2 steps" in log


@pytest.mark.parametrize("given", [{}, {"model": "vit_tiny_patch16_224", "spec": SMALL}],
                         ids=["model chosen", "model named"])  # fmt: skip
def test_epochs_that_are_typed_give_the_run_that_chose_them(images, tmp_path, given):
    chosen = chosen_for(images, tmp_path / "chosen", **given)
    typed = chosen_for(images, tmp_path / "typed", epochs=chosen["epochs"], **given)
    assert typed | {"output": chosen["output"]} == chosen
    assert chosen["warmup_epochs"] > 1, "a warm-up of one epoch would show no difference"


def test_a_field_of_the_model_changes_the_one_that_is_chosen(images, tmp_path):
    chosen = chosen_for(images, tmp_path / "chosen")
    found = chosen_for(images, tmp_path / "run", spec={"patch_size": 6, "width": 32})
    assert found["spec"] == chosen["spec"] | {"patch_size": 6, "width": 32}
    differing = {name for name in chosen if found[name] != chosen[name]}
    assert differing <= {"spec", "output", "threads", "amp", "attention_kernel"}
    larger = chosen_for(images, tmp_path / "larger", spec={"image_size": 24})
    assert (larger["spec"]["image_size"], larger["spec"]["patch_size"]) == (24, 6)


def test_the_command_and_python_choose_the_same(images, tmp_path):
    flags = ["--max-steps", "1", "--device", "cpu", "--threads", "1", "--quiet", "--no-test"]
    flags += ["--no-plots", "--no-report"]
    assert cli.run(["train", str(images), "--output", str(tmp_path / "a"), *flags]) == 0
    first = settings_of(tmp_path / "a")
    second = chosen_for(images, tmp_path / "b")
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {"output", "workers"}


def test_a_resumed_run_decides_nothing_anew(images, tmp_path):
    first = chosen_for(images, tmp_path / "run")
    write_images(tmp_path / "more", 200)
    vitkit.train(images, resume=tmp_path / "run", max_steps=2, **QUICK)
    second = settings_of(tmp_path / "run")
    assert second == first | {"max_steps": 2}


def test_the_same_command_goes_on_with_fields_and_a_size_of_its_own(images, tmp_path):
    given = {"img_size": 12, "spec": {"width": 32}, "output": tmp_path / "run"} | QUICK
    first = vitkit.train(images, max_steps=1, **given)
    again = vitkit.train(images, max_steps=2, resume="auto", **given)
    assert again.run == first.run
    assert last_state(again.run).name == "step-00000002"


def test_no_image_is_left_out_of_an_epoch(tmp_path):
    """39 images in batches of 8: five steps, and one image comes twice, in another view."""
    data = write_images(tmp_path / "data", 37, classes=1)
    write_images(tmp_path / "other", 2, classes=1)
    (tmp_path / "other" / "train" / "00000").rename(data / "train" / "other")
    (tmp_path / "other" / "val" / "00000").rename(data / "val" / "other")
    seen: list[tuple[int, int, int]] = []

    class Seen(vitkit.Callback):
        def before_step(self, trainer, batch):
            images = zip(batch.indices.tolist(), batch.views.tolist(), strict=True)
            seen.extend((batch.epoch, index, view) for index, view in images)

    done = vitkit.train(data, output=tmp_path / "run", epochs=2, callbacks=[Seen()], **QUICK)
    config = settings_of(done.run)
    assert (config["batch_size"], config["last_batch"]) == (8, "fill")
    assert [line["step"] for line in steps_of(done.run)] == [5, 10]
    for epoch in range(2):
        views = [one[1:] for one in seen if one[0] == epoch]
        assert len(views) == len(set(views)) == 40, "an image that comes twice is another view"
        assert {index for index, _ in views} == set(range(39))


def test_a_run_shorter_than_the_interval_has_curves(images, tmp_path):
    done = vitkit.train(images, output=tmp_path / "run", spec=SMALL, epochs=2, **QUICK)
    lines = steps_of(done.run)
    assert [line["step"] for line in lines] == [11, 22]
    assert all({"train_loss", "lr"} <= set(line) for line in lines)
    done = vitkit.train(images, output=tmp_path / "one", spec=SMALL, max_steps=3, **QUICK)
    assert [line["step"] for line in steps_of(done.run)] == [3]


def test_of_few_classes_there_is_no_top_k(images, tmp_path):
    done = vitkit.train(images, output=tmp_path / "run", spec=SMALL, epochs=1, **QUICK)
    assert not [name for name in done.metrics["val"] if name.startswith("top") and "1" not in name]
    assert "val_top2" not in (done.run / "metrics.csv").read_text()


def test_images_larger_than_the_model_are_shrunk(tmp_path):
    data = write_images(tmp_path / "data", 2, side=400)
    found = chosen_for(data, tmp_path / "run")
    assert (found["spec"]["image_size"], found["crop_scale"]) == (64, 0.35)


@pytest.mark.parametrize(
    ("given", "batch_size"),
    [({"grad_accum_steps": 3}, 6), ({"grad_accum_steps": 5, "mixup": 0.5}, 10),
     ({"repeated_aug": 8}, 9)],
)  # fmt: skip
def test_the_batch_fits_the_other_settings(given, batch_size, images, tmp_path):
    assert chosen_for(images, tmp_path / "run", **given)["batch_size"] == batch_size


@pytest.mark.parametrize("side", [1, 3, 5, 9, 11])
def test_a_model_for_images_of_any_small_size(side, tmp_path):
    found = chosen_for("digits", tmp_path / "run", img_size=side)
    assert found["spec"]["patch_size"] <= side


@pytest.mark.parametrize(("side", "better"), [(97, 96), (13, 12), (62, 64), (502, 504)])
def test_a_side_that_only_large_patches_divide_is_refused_with_a_better_one(side, better, tmp_path):
    with pytest.raises(SettingError, match=f"--img-size {side}: .* such as {better}"):
        chosen_for("digits", tmp_path / "run", img_size=side)
    found = chosen_for("digits", tmp_path / "run", img_size=better)
    assert better // found["spec"]["patch_size"] >= 3

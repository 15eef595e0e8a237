"""Settings without effect: refused where the user gives them, reset where only a recipe does."""

import numpy as np
import pytest
from image_files import folder
from PIL import Image
from training.starts import a_checkpoint

from vitkit import SettingError, TrainConfig
from vitkit.training.config.contradictions import notes_on_settings
from vitkit.training.config.merging import layered
from vitkit.training.plan import Plan, make_plan
from vitkit.training.recipes import recipe_settings

OWN = "training.test_losses:hard_only"


def planned(recipe: str | None = None, **settings: object) -> Plan:
    small = {"data": "digits", "recipe": recipe, "batch_size": 16, "epochs": 1, "device": "cpu"}
    spec = {"spec": {"image_size": 8, "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2,
                     "mlp_width": 32, "in_channels": 1}, "mean": None, "std": None}  # fmt: skip
    base = layered(recipe_settings(recipe), small | ({} if recipe == "digits" else spec))
    return make_plan(TrainConfig(**layered(base, settings)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 0.1, "opt": "muon"}, "--momentum 0.1 has no effect on --opt muon"),
        ({"beta2": 0.9, "opt": "sgd"}, "--beta2 0.9 has no effect on --opt sgd"),
        ({"loss": OWN, "label_smoothing": 0.4}, "--label-smoothing 0.4 has no effect on your own"),
        ({"mixup": 0.8, "mixup_switch_prob": 0.1}, "add --mixup and --cutmix"),
        ({"mixup_off_epoch": 3}, "--mixup-off-epoch 3 has no effect without --mixup or --cutmix"),
        ({"model_ema_decay": 0.5}, "has no effect without --model-ema; add"),
        ({"bce_threshold": 0.2}, "--bce-threshold 0.2 has no effect without --loss bce"),
        ({"sched": "constant", "min_lr": 5e-4}, "--min-lr 0.0005 has no effect with --sched"),
        ({"fit": "squash", "crop_ratio": 0.5}, "--crop-ratio 0.5 has no effect with --fit squash"),
        ({"teacher": "T", "distill_alpha": 0.0}, "--distill-alpha 0 removes the teacher"),
        ({"teacher": "T", "distill_alpha": 1.0, "label_smoothing": 0.2},
         "--label-smoothing 0.2 has no effect with --distill-alpha 1"),
        ({"repeated_aug": 3, "flip": 0.0, "crop_scale": 1.0}, "no augmentation is on"),
        ({"freeze": ("backbone",)}, "train a head on features of random weights; .*--pretrained"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        planned(**settings)


@pytest.mark.parametrize(
    ("settings", "mend"),
    [
        ({"batch_size": 1}, "raise --batch-size"),
        ({"batch_size": 4, "grad_accum_steps": 4},
         "raise --batch-size, or lower --grad-accum-steps 4"),
    ],
)  # fmt: skip
def test_an_image_is_mixed_with_another_one(settings, mend):
    with pytest.raises(SettingError, match=f"at least 2 images .* there is 1; {mend}$"):
        planned(mixup=0.8, **settings)


def test_settings_beyond_the_end_or_for_other_data_are_noted():
    notes = planned(
        epochs=2, mixup=0.8, mixup_off_epoch=2, patience=5, max_steps=10**6, val_fraction=0.3,
        parallel="fsdp", timeout=30.0, lr=1e-6,
    ).notes  # fmt: skip
    end = "the run ends after 2 epochs"
    assert f"mixup_off_epoch 2 and patience 5 without effect: {end}" in notes
    assert any(line.startswith(f"max_steps 1000000 without effect: {end}, ") for line in notes)
    assert "parallel fsdp and timeout 30.0 without effect: the run has one process" in notes
    assert "min_lr 1e-05 lowered to 1e-08, as lr is small" in notes
    assert not any("without effect" in line for line in planned(epochs=2, patience=1).notes)


@pytest.mark.parametrize(
    "settings",
    [{"sched": "constant", "lr": 1e-6},
     {"repeated_aug": 3, "flip": 0.0, "crop_scale": 1.0, "mixup": 0.8},
     {"repeated_aug": 3, "flip": 0.0, "crop_scale": 1.0, "cutmix": 1.0},
     {"repeated_aug": 3, "flip": 0.0, "crop_scale": 1.0, "transform": "PIL.ImageOps:mirror"}],
)  # fmt: skip
def test_a_setting_that_has_an_effect_or_is_as_usual_is_not_refused(settings):
    plan = planned(epochs=2, **settings)
    assert plan.config.min_lr == TrainConfig.min_lr


def test_a_part_of_train_for_validation_is_not_cut_where_there_is_a_split(tmp_path):
    folder(tmp_path, {"train/a": 2, "train/b": 2, "val/a": 2, "val/b": 2})
    notes = planned(data=str(tmp_path), val_fraction=0.3, batch_size=2).notes
    assert "--val-fraction 0.3 has no effect: the data have a val split" in notes


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_another_part_for_validation_is_refused_where_all_images_were_divided(tmp_path, fraction):
    folder(tmp_path, {"a": 20, "b": 20})
    with pytest.raises(SettingError, match="always divided into 70% train, 10% val, 20% test"):
        planned(data=str(tmp_path), val_fraction=fraction, batch_size=2)
    usual = planned(data=str(tmp_path), val_fraction=0.1, batch_size=2)
    assert [len(usual.dataset.splits[name]) for name in ("train", "val", "test")] == [28, 4, 8]


def test_a_recipe_of_one_channel_warns_of_lost_colours_and_of_no_grey_ones(tmp_path):
    pixels = np.random.default_rng(0)
    for kind, shape in (("grey", (8, 8)), ("colour", (8, 8, 3))):
        for number in range(40):
            file = tmp_path / kind / "ab"[number % 2] / f"{number}.png"
            file.parent.mkdir(exist_ok=True, parents=True)
            Image.fromarray(pixels.integers(0, 256, shape, np.uint8)).save(file)
    warning = "warning: recipe digits has a model of one channel, so the colour images become grey"
    recipe = layered(recipe_settings("digits"), {"data": "", "recipe": "digits", "batch_size": 4})
    for kind, count in (("grey", 0), ("colour", 1)):
        notes = make_plan(TrainConfig(**recipe | {"data": str(tmp_path / kind)})).notes
        assert sum(note.startswith(warning) for note in notes) == count
    # not where the user chose one channel
    own = {"recipe": "cifar10", "spec": {"in_channels": 1}, "batch_size": 4, "mean": (0.5,)}
    own |= {"std": (0.5,), "data": str(tmp_path / "colour"), "crop_scale": 1.0}
    notes = make_plan(TrainConfig(**layered(recipe_settings("cifar10"), own))).notes
    assert not any("one channel" in note for note in notes)


def test_a_width_that_leaves_the_mlp_behind_is_noted():
    narrow = "--spec.width 48 leaves the MLP width at 768, 16 times the width instead of the model"
    spec = {"depth": 1, "num_heads": 3, "image_size": 8, "patch_size": 4, "in_channels": 1}
    named = {"data": "digits", "model": "vit_tiny_patch16_224"}
    for more, count in (({"width": 48}, 1), ({"width": 48, "mlp_width": 96}, 0), ({}, 0)):
        notes = make_plan(TrainConfig(spec=spec | more, **named)).notes
        assert sum(note.startswith(narrow) for note in notes) == count
    # the model of a resumed run cannot be changed
    notes = make_plan(TrainConfig(spec=spec | {"width": 48}, **named), resumes=True).notes
    assert not any(note.startswith(narrow) for note in notes)


@pytest.mark.parametrize(
    ("recipe", "settings", "left_out"),
    [("cifar10", {"mixup": 0.0, "cutmix": 0.0}, {"mixup_prob": 1.0}),
     ("cifar10", {"loss": OWN, "mixup": 0.0, "cutmix": 0.0}, {"mixup_prob": 1.0}),
     ("deit3", {"loss": "cross-entropy", "opt": "adamw"}, {"bce_threshold": None}),
     ("digits", {"opt": "sgd"}, {"beta2": 0.999}), ("mnist", {"opt": "lion"}, {"beta2": 0.999})],
)  # fmt: skip
def test_what_a_recipe_has_for_something_that_is_off_goes_with_it(recipe, settings, left_out):
    if settings.get("opt") == "lion":
        pytest.importorskip("pytorch_optimizer")
    plan = planned(recipe, **settings)
    assert {name: getattr(plan.config, name) for name in left_out} == left_out
    (line,) = [line for line in plan.notes if "without effect here" in line]
    assert line.startswith(f"from recipe {recipe}, without effect here: {next(iter(left_out))} ")


def test_a_recipe_of_training_can_be_probed(tmp_path):
    a_checkpoint(tmp_path / "a.safetensors")
    settings = {"data": "digits", "pretrained": str(tmp_path / "a.safetensors"), "probe": "linear"}
    plan = make_plan(TrainConfig(**layered(recipe_settings("finetune"), settings | {
        "recipe": "finetune", "device": "cpu"})))  # fmt: skip
    assert plan.config.layer_decay == 1.0
    assert any("layer_decay" in line for line in plan.notes)
    with pytest.raises(SettingError, match="layer_decay cannot be combined with --probe"):
        make_plan(TrainConfig(**settings, layer_decay=0.5))


def test_details_of_a_recipe_s_mixing_go_with_it_where_it_is_probed(tmp_path):
    a_checkpoint(tmp_path / "a.safetensors")
    settings = {"data": "digits", "pretrained": str(tmp_path / "a.safetensors"), "probe": "linear",
             "recipe": "cifar10", "model": None, "mean": None, "std": None}  # fmt: skip
    recipe = recipe_settings("cifar10")
    plan = make_plan(TrainConfig(**layered(recipe, settings | {"device": "cpu"})))
    assert (plan.config.mixup, plan.config.mixup_prob) == (0.0, TrainConfig.mixup_prob)
    (line,) = [line for line in plan.notes if "without effect here" in line]
    assert "mixup 0.8" in line
    assert "mixup_prob 0.5" in line


def test_a_probe_names_what_it_ignores():
    config = TrainConfig(
        data="digits", probe="knn", pretrained="a", drop_path=0.1, on_nan="skip", lr=0.1
    )
    (line,) = notes_on_settings(config, 1, 1)
    assert line == "--probe makes no training steps: drop_path, lr, on_nan without effect"


def test_classes_without_images_are_noted_once(tmp_path):
    folder(tmp_path, {"a": 20, "b": 20, "c": 0})
    notes = planned(data=str(tmp_path), batch_size=2).notes
    assert [note for note in notes if "'c'" in note] == ["train has no images of class 'c'"]

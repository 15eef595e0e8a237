"""Other images, patches, channels, classes: exact steps stay exact, and each step is reported."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from weights.round_trips import noisy

import vitkit
from vitkit import SpecError, cli

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 2,
         "mlp_width": 96, "num_classes": 5}  # fmt: skip
NAMES = ("ant", "bee", "cat", "dog", "eel")
HALF = vitkit.Preprocess(image_size=32, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2), fit="squash")
IMAGE = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
GREY = np.repeat(IMAGE[:, :, :1], 3, axis=2)


def checkpoint(preprocess: vitkit.Preprocess = HALF, **fields: object) -> vitkit.Checkpoint:
    model = noisy(vitkit.ViTSpec(**SMALL | fields))
    return vitkit.Checkpoint(model, preprocess, NAMES if model.spec.num_classes == 5 else ())


def logits(given: vitkit.Checkpoint, image: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return given.model(given.preprocess([image]))


@pytest.mark.parametrize("fields", [{}, {"patch_bias": False}, {"stem": "linear"}])
def test_another_normalisation_is_folded_into_the_patch_projection(fields):
    given = checkpoint(**fields)
    made = vitkit.adapt(given, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    assert made.preprocess.std == (0.229, 0.224, 0.225)
    torch.testing.assert_close(logits(made, IMAGE), logits(given, IMAGE), rtol=0, atol=2e-5)
    assert (made.model.patch_embed.proj.weight - given.model.patch_embed.proj.weight).abs().max()
    (line,) = made.metadata["adapted"]
    assert line.startswith("folded: patch_embed.proj.weight: takes images with mean 0.485 0.456")


def test_grey_images_give_the_same_with_one_channel():
    given = checkpoint()
    made = vitkit.adapt(given, in_channels=1)
    assert (made.model.spec.in_channels, made.preprocess.channels) == (1, 1)
    torch.testing.assert_close(logits(made, GREY[:, :, :1]), logits(given, GREY), rtol=0, atol=2e-5)


def test_grey_images_give_the_same_with_three_channels():
    given = checkpoint(
        vitkit.Preprocess(image_size=32, mean=(0.4,), std=(0.3,), fit="squash"), in_channels=1
    )
    made = vitkit.adapt(given, in_channels=3)
    torch.testing.assert_close(logits(made, GREY), logits(given, GREY[:, :, :1]), rtol=0, atol=2e-5)
    with pytest.raises(SpecError, match="in_channels"):
        vitkit.adapt(given, in_channels=4)


def test_another_image_resamples_positions_by_the_mode_that_is_named():
    given = checkpoint()
    made = vitkit.adapt(given, image_size=(48, 64))
    assert (made.preprocess.image_size, made.model.spec.grid) == ((48, 64), (6, 8))
    assert made.metadata["adapted"] == [
        "approximated: pos_embed: 4 x 4 -> 6 x 8 by bicubic_antialias"
    ]
    aligned = vitkit.adapt(given, image_size=(48, 64), resampling="bilinear_aligned")
    assert aligned.metadata["adapted"][0].endswith("by bilinear_aligned")
    table = given.model.pos_embed[:, 1:].reshape(1, 4, 4, 64).permute(0, 3, 1, 2)
    expected = F.interpolate(table, size=(6, 8), mode="bilinear", align_corners=True)
    torch.testing.assert_close(
        aligned.model.pos_embed[:, 1:], expected.flatten(2).transpose(1, 2), rtol=0, atol=1e-6
    )
    with pytest.raises(SpecError, match="resampling"):
        vitkit.adapt(given, resampling="bicubik")


def test_other_patches_are_flexivit_s():
    given = checkpoint()
    made = vitkit.adapt(given, patch_size=4, image_size=16)
    assert made.model.patch_embed.proj.weight.shape[2:] == (4, 4)
    assert made.metadata["adapted"] == [
        "approximated: patch_embed.proj.weight: 8 x 8 -> 4 x 4 by FlexiViT's pseudo-inverse"
    ]


def test_classes_that_it_knows_keep_their_rows():
    given = checkpoint(distillation_token=True)
    made = vitkit.adapt(given, classes=("dog", "bee"))
    assert (made.classes, made.model.spec.num_classes) == (("dog", "bee"), 2)
    torch.testing.assert_close(
        logits(made, IMAGE), logits(given, IMAGE)[:, [3, 1]], rtol=0, atol=1e-6
    )
    assert made.metadata["adapted"] == ["lost: head: the rows of 3 of 5 classes"]
    with pytest.raises(SpecError, match=r"lacks 1 of the classes: dgo .did you mean 'dog'"):
        vitkit.adapt(given, classes=("dgo", "bee"))


def test_a_head_of_another_size_is_fresh_and_the_features_stay():
    given = checkpoint(initialisation="timm")
    torch.manual_seed(0)
    made = vitkit.adapt(given, num_classes=np.int64(9))  # as `labels.max() + 1` gives it
    assert (made.model.spec.num_classes, made.classes) == (9, ())
    assert 0.01 < made.model.head.weight.std() < 0.03
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(
        made.model.forward_features(images).cls, given.model.forward_features(images).cls
    )
    bare = vitkit.adapt(given, num_classes=0)
    assert bare.model(images).shape == (2, 64)
    assert bare.metadata["adapted"] == [
        "lost: the head of 5 classes is left out, so that the model returns features"
    ]


def test_a_fresh_head_of_the_same_size_is_fresh_and_has_no_names():
    given = checkpoint()
    made = vitkit.adapt(given, num_classes=5)
    assert made.classes == ()
    assert not torch.equal(made.model.head.weight, given.model.head.weight)
    assert (
        "the head of 5 classes is replaced by an untrained one of 5" in made.metadata["adapted"][0]
    )


def test_a_class_named_twice_is_refused():
    given = checkpoint()
    with pytest.raises(SpecError, match="classes names 'dog' twice"):
        vitkit.adapt(given, classes=("dog", "dog"))
    with pytest.raises(SpecError, match="classes is empty; to remove the head, pass num_cl"):
        vitkit.adapt(given, classes=[])
    cranes = replace(given, classes=("crane", "cat", "crane", "bee", "ant"))
    with pytest.raises(SpecError, match="several classes called 'crane'"):
        vitkit.adapt(cranes, classes=("crane", "cat"))
    assert vitkit.adapt(cranes, classes=("bee", "cat")).classes == ("bee", "cat")


def test_the_checkpoint_itself_stays_as_it_is():
    given = checkpoint()
    before = {name: tensor.clone() for name, tensor in given.model.state_dict().items()}
    made = vitkit.adapt(given, image_size=48, num_classes=2, mean=(0.0,) * 3, std=(1.0,) * 3)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.zero_()
    for name, tensor in given.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert "adapted" not in given.metadata
    assert vitkit.adapt(given).metadata["adapted"] == []


def test_stems_whose_tokens_are_not_linear_in_the_pixels_are_refused():
    given = checkpoint(stem="normed_linear")
    for change in ({"in_channels": 1}, {"mean": (0.1, 0.1, 0.1)}):
        with pytest.raises(SpecError, match="not linear in the pixels"):
            vitkit.adapt(given, **change)


def test_conversion_adapts_on_the_way_and_reports_it(tmp_path, capsys):
    given = checkpoint()
    own = vitkit.save(tmp_path / "own.safetensors", given.model, preprocess=HALF, classes=NAMES)
    line = ["convert", str(own), str(tmp_path / "tv"), "--to", "torchvision"]
    flags = ["--adapt.image-size", "[16, 64]", "--adapt.num-classes", "0", "--adapt.mean",
             "[0.485, 0.456, 0.406]", "--adapt.std", "[0.229, 0.224, 0.225]"]  # fmt: skip
    assert cli.run([*line, *flags]) == 0
    printed = capsys.readouterr().out
    for part in ("folded: patch_embed.proj.weight: takes", "4 x 4 -> 2 x 8 by bicubic_antialias",
                 "is left out, so that"):  # fmt: skip
        assert part in printed
    again = vitkit.load(tmp_path / "tv")
    assert (again.model.spec.grid, again.model.spec.num_classes) == ((2, 8), 0)
    assert again.preprocess.mean == (0.485, 0.456, 0.406)
    assert cli.run([*line[:2], str(tmp_path / "x"), *line[3:], "--adapt.width", "7"]) == 2
    assert "width" in capsys.readouterr().err


WHOLE = {"metrics": {"test": {"top1": 0.98}}, "temperature": 1.3, "licence": "mit"}


@pytest.mark.parametrize("changes", [
    {"num_classes": 3}, {"classes": ("dog", "bee")}, {"image_size": 48}, {"patch_size": 4},
    {"fit": "crop"}, {"in_channels": 1},
])  # fmt: skip
def test_measured_accuracy_is_not_kept_for_another_function(changes):
    given = replace(checkpoint(), metadata=WHOLE)
    made = vitkit.adapt(given, **changes).metadata
    assert made.pop("adapted")
    assert made == {"licence": "mit"}
    assert given.metadata == WHOLE


def test_measured_accuracy_is_kept_where_the_function_is():
    given = replace(checkpoint(), metadata=WHOLE)
    for changes in ({}, {"mean": (0.1, 0.2, 0.3)}, {"fit": "squash"}):
        assert vitkit.adapt(given, **changes).metadata.items() >= WHOLE.items()


CHANGES = [
    {"mean": (0.1, 0.2, 0.3)}, {"std": (0.5, 0.5, 0.5)}, {"in_channels": 1}, {"num_classes": 3},
    {"classes": ("dog", "bee")}, {"image_size": 48}, {"patch_size": 4}, {"resampling": "bilinear"},
]  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_it_works_on_any_device_and_in_any_dtype(changes):
    """`meta` in a GPU's place; the fresh head has the same numbers on every device."""
    given = checkpoint(distillation_token=True)

    def adapted(model: vitkit.ViT) -> vitkit.ViT:
        torch.manual_seed(0)
        return vitkit.adapt(replace(given, model=model), **changes).model

    expected = adapted(given.model)
    far = adapted(copy.deepcopy(given.model).to("meta"))
    assert {p.device.type for p in far.parameters()} == {"meta"}
    assert {n: p.shape for n, p in far.named_parameters()} == {
        n: p.shape for n, p in expected.named_parameters()
    }
    half = adapted(copy.deepcopy(given.model).bfloat16())
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    torch.set_default_dtype(torch.float64)
    try:
        other = adapted(given.model)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name

"""What holds for every method of the registry: options, batches, modes, gradients, wrong input."""

import inspect

import pytest
import torch
from own_methods import METHODS
from single_image_vit import CASES, noisy_model, some_images
from torch import Tensor, nn

import vitkit

CLASSES = torch.tensor([4, 1])


def compute(name: str, model: vitkit.ViT, images: Tensor, **options: object) -> Tensor:
    if METHODS[name].by_class:
        options.setdefault("classes", CLASSES[: len(images)])
    if "steps" in METHODS[name].options:
        options.setdefault("steps", 5)
    return METHODS[name].compute(model, images, **options)


@pytest.mark.parametrize("name", METHODS)
def test_the_registry_lists_the_options_of_the_function(name):
    method = METHODS[name]
    parameters = inspect.signature(method.compute).parameters.values()
    keywords = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert [p.name for p in parameters][:2] == ["model", "images"]
    assert {p.name for p in keywords} - {"classes"} == set(method.options)
    assert ("classes" in {p.name for p in keywords}) == method.by_class
    assert all(p.default is not p.empty for p in keywords if p.name != "classes")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_an_image_has_the_same_map_alone_and_in_a_batch(case, name):
    """On a rectangle of another size than the model's, whose positions are resampled."""
    model, images = noisy_model(case), some_images(2, 40, 24)
    both = compute(name, model, images)
    assert both.shape == (2, 5, 3, 3) if METHODS[name].colours else (2, 5, 3)
    assert not both.requires_grad
    for number in range(2):
        only = {"classes": CLASSES[number : number + 1]} if METHODS[name].by_class else {}
        alone = compute(name, model, images[number : number + 1], **only)[0]
        torch.testing.assert_close(both[number], alone, rtol=1e-6, atol=1e-9)
    if METHODS[name].by_class:
        assert not torch.allclose(compute(name, model, images, classes=CLASSES.roll(1)), both)


@pytest.mark.parametrize("name", METHODS)
def test_modes_and_gradients_are_left_as_they_are(name):
    fields = {"mlp_dropout": 0.5, "patch_dropout": 0.5, "drop_path": 0.5}
    images = some_images().requires_grad_()
    expected = compute(name, noisy_model(), images)
    model = noisy_model(**fields).train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    torch.testing.assert_close(compute(name, model, images), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert images.grad is None
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.requires_grad_(False)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            options = {"classes": CLASSES.clone()} if METHODS[name].by_class else {}
            copy = images.clone()
            torch.testing.assert_close(compute(name, model, copy, **options), expected)
        torch.testing.assert_close(compute(name, model, copy, **options), expected)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("case", ["registers", "mean", "MAP"])
@pytest.mark.parametrize("name", METHODS)
def test_half_precision_gives_maps_in_single(case, name):
    model, images = noisy_model(case).bfloat16(), some_images().bfloat16()
    found = compute(name, model, images)
    assert found.dtype == torch.float32
    assert torch.isfinite(found).all()


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 6, 3, 4, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.layer(images))


@pytest.mark.parametrize("name", METHODS)
def test_hybrids_have_maps_of_their_cells(name):
    resnet = noisy_model(stem="resnet", resnet_layers=(1,), patch_size=8, image_size=(24, 32))
    spec = vitkit.ViTSpec(
        image_size=(24, 32), patch_size=8, width=16, depth=2, num_heads=2, mlp_width=8,
        num_classes=5, stem="backbone",
    )  # fmt: skip
    foreign = vitkit.ViT(spec, Backbone()).double()
    for model in (resnet, foreign):
        found = compute(name, model, some_images())
        assert found.shape[:3] == (2, 3, 4)
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("name", METHODS)
def test_a_model_without_a_head_and_a_class_that_is_not_there(name):
    headless, images = noisy_model(num_classes=0), some_images()
    if not METHODS[name].by_class:
        assert torch.isfinite(compute(name, headless, images)).all()
        return
    able = [other for other, method in METHODS.items() if not method.by_class]
    with pytest.raises(vitkit.SettingError, match=f"no head.*: {', '.join(able)}"):
        compute(name, headless, images)
    for number in (5, -1):
        with pytest.raises(vitkit.SettingError, match=f"class {number} does .*; .* are 0 to 4"):
            compute(name, noisy_model(), images, classes=torch.tensor([0, number]))


@pytest.mark.parametrize("name", METHODS)
def test_images_that_do_not_fit_are_named(name):
    with pytest.raises(vitkit.ShapeError, match=r"sides divisible by the patch, 8 x 8"):
        compute(name, noisy_model(), some_images(2, 20, 32))


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize("name", [name for name in METHODS if "layer" in METHODS[name].options])
@pytest.mark.parametrize("wrong", [3, -4, 0.5, [0], True])
def test_a_layer_that_is_not_there_is_named(name, wrong):
    with pytest.raises(vitkit.SettingError, match=r"layer = .*: must be .* from -3 to 2"):
        compute(name, noisy_model(), some_images(), layer=wrong)


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize("name", ["attention", "similarity"])
@pytest.mark.parametrize("wrong", [12, -1, 1.5, True, "3"])
def test_a_patch_that_is_not_there_is_named(name, wrong):
    with pytest.raises(vitkit.SettingError, match=r"query = .*: must be .* from 0 to 11"):
        compute(name, noisy_model(), some_images(), query=wrong)


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discard_ratio": 1.0}, r"discard_ratio = 1.0: must be at least 0 and below 1"),
        ({"discard_ratio": -0.1}, r"discard_ratio = -0.1: must be"),
        ({"discard_ratio": float("nan")}, r"discard_ratio = nan: must be"),
        ({"discard_ratio": "half"}, r"discard_ratio = 'half': must be"),
        ({"head_fusion": "median"}, r"head_fusion = 'median': must be one of mean, max, min"),
    ],
)
def test_wrong_options_of_rollout_are_named(options, message):
    with pytest.raises(vitkit.SettingError, match=message):
        compute("rollout", noisy_model(), some_images(), **options)

"""`training_transform` gives the very tensors that a run gives its model."""

import inspect
import pickle
from typing import ClassVar

import numpy as np
import pytest
import torch

import vitkit
from vitkit import Callback, SettingError
from vitkit.training.config.train_config import USUAL, AugmentationSettings

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (40, 57, 3), np.uint8)
GREY = RNG.integers(0, 256, (40, 57), np.uint8)


class Inputs(Callback):
    """Keeps the model's inputs of every step."""

    kept: ClassVar[list[tuple[int, int, torch.Tensor]]] = []

    def before_step(self, trainer, batch):
        images = trainer.training_step.transform.images(batch)
        for row, index in enumerate(batch.indices.tolist()):
            self.kept.append((batch.epoch, index, images[row].clone()))


AUGMENTED = [
    {},
    {"aa": "rand-m9-mstd0.5-inc1", "reprob": 0.6},
    {"aa": "3", "color_jitter": 0.3, "shift": 2, "crop_scale": 1.0},
]


@pytest.mark.parametrize("settings", AUGMENTED)
def test_the_training_transform_gives_the_inputs_of_a_run(tmp_path, settings):
    from vitkit import TrainConfig
    from vitkit.training.train import train

    Inputs.kept = []
    config = TrainConfig(
        data="digits", model="vit_tiny_patch16_224", spec={"image_size": 16, "patch_size": 8,
        "width": 8, "num_heads": 1, "mlp_width": 8, "depth": 1}, seed=3,
        batch_size=400, epochs=2, amp="off", output=str(tmp_path / "run"), quiet=True,
        threads=1, log_examples=False, log_histograms=False, plots=False, report=False, **settings,
    )  # fmt: skip
    run = train(config, [Inputs])
    checkpoint = vitkit.load(run.best)
    transform = vitkit.training_transform(checkpoint.preprocess, **settings)
    images = vitkit.open_dataset("digits").splits["train"]
    # The validation images are cut from train, so an index is matched by its pixels below.
    from vitkit.data.datasets.splitting import with_validation

    train_split = with_validation(vitkit.open_dataset("digits"), 0.1).splits["train"]
    assert len(train_split) < len(images)
    assert {epoch for epoch, _, _ in Inputs.kept} == {0, 1}
    for epoch, index, tensor in Inputs.kept[::29]:
        image = train_split.read(index)
        assert torch.equal(transform(image, (3, epoch, index)), tensor), (epoch, index)


def test_without_a_key_torch_s_generator_decides():
    transform = vitkit.training_transform(vitkit.Preprocess(image_size=32))
    torch.manual_seed(5)
    first, second = transform(COLOUR), transform(COLOUR)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(transform(COLOUR), first)


@pytest.mark.parametrize("size", [1, 2, (1, 7)])
def test_images_of_a_few_pixels_go_through_every_operation(size):
    preprocess = vitkit.Preprocess(image_size=size)
    transform = vitkit.training_transform(preprocess, aa="rand-m9-n15-p1", color_jitter=0.4)
    for index in range(8):
        assert transform(COLOUR[:2, : index + 1], (0, 0, index)).isfinite().all()


def test_it_can_be_sent_to_a_spawned_worker():
    transform = vitkit.training_transform(vitkit.Preprocess(image_size=32), aa="trivial")
    again = pickle.loads(pickle.dumps(transform))
    assert torch.equal(again(COLOUR, (0, 1, 2)), transform(COLOUR, (0, 1, 2)))


def test_its_defaults_are_those_of_training():
    for name, parameter in inspect.signature(vitkit.training_transform).parameters.items():
        if name != "preprocess":
            usual = USUAL.get(name, getattr(AugmentationSettings, name))
            assert parameter.default == usual, name


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize(
    "key", [(0, 1), (0, 1, 2, 3, 4), (0, -1, 2), (0, 2**32, 1), (0, 0, 2**64), (0, 0, float("inf"))]
)
def test_a_key_of_another_form_is_refused(key):
    transform = vitkit.training_transform(vitkit.Preprocess(image_size=32))
    with pytest.raises(SettingError, match=r"^key"):
        transform(COLOUR, key)


def test_wrong_settings_are_refused_before_the_first_image():
    preprocess = vitkit.Preprocess(image_size=32)
    with pytest.raises(SettingError, match="not a policy"):
        vitkit.training_transform(preprocess, aa="rnd")
    with pytest.raises(SettingError, match="flip"):
        vitkit.training_transform(preprocess, flip=2.0)

"""Temperature scaling finds the temperature, stores it, and predictions use it."""

import math

import numpy as np
import pytest
import torch

import vitkit
from vitkit import CheckpointError, SettingError
from vitkit.evaluation.temperature import calibrate, fit_temperature

N, K = 3000, 6


def drawn(temperature: float, images: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels that are drawn from softmax(logits / temperature)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(images, K, generator=generator) * 3
    labels = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)[:, 0]
    return logits, labels


def loss(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> float:
    """The loss of all images, and of one more that is like them and may be of any class."""
    scaled = logits.double() / temperature
    labelled = float(torch.nn.functional.cross_entropy(scaled, labels))
    return labelled - float(scaled.log_softmax(1).mean()) / len(labels)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_temperature_that_made_the_labels_is_found(temperature):
    logits, labels = drawn(temperature)
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(temperature, rel=0.08)
    least = loss(logits, labels, found)
    assert all(least < loss(logits, labels, found * f) for f in (0.98, 0.999, 1.001, 1.02))


def test_images_that_are_all_right_give_a_temperature_that_falls_with_their_number():
    logits = torch.randn(200, K, generator=torch.Generator().manual_seed(0))
    few, many = (fit_temperature(part, part.argmax(1)) for part in (logits[:20], logits))
    assert 0.05 < many < few < 1


def test_a_model_that_is_worse_than_a_guess_has_no_temperature():
    logits = torch.randn(20, K, generator=torch.Generator().manual_seed(0))
    assert fit_temperature(logits, logits.argmin(1)) is None
    assert fit_temperature(logits[:0], logits.argmin(1)[:0]) is None


@pytest.mark.parametrize("temperature", [0.5, 2.5])
def test_a_temperature_is_kept_where_it_helps_out_of_fold(temperature):
    logits, labels = drawn(temperature, 400)
    found = calibrate(logits, labels)
    assert found.temperature == fit_temperature(logits, labels)
    assert found.message.startswith(
        f"temperature {found.temperature:.3f}, fitted on the validation split;"
    )


@pytest.mark.parametrize(
    ("temperature", "images", "message"),
    [
        (0.5, 124, "temperature left at 1: fitting it needs 125 validation images, and there are"),
        (
            1.1,  # a gain of 0.0018 that is less than its standard error
            400,
            "temperature left at 1: no significant gain in 5-fold cross-validation on 400 images",
        ),
    ],
)
def test_else_it_stays_at_1_and_the_message_names_the_reason(temperature, images, message):
    found = calibrate(*drawn(temperature, images))
    assert found.temperature is None
    assert found.message.startswith(message)


def test_a_model_that_is_worse_than_a_guess_stays_at_1_with_a_message():
    logits, _ = drawn(1.0, 200)
    found = calibrate(logits, logits.argmin(1))
    assert found.temperature is None
    assert "not within 0.05 to 20" in found.message


@pytest.mark.parametrize("wrong", [0, 1])
def test_whether_one_is_fitted_does_not_depend_on_how_many_are_right(wrong):
    """Two threads gave other bits than one, and all of 144 images right instead of 143."""
    logits, _ = drawn(1.0, 144)
    labels = logits.argmax(1)
    labels[:wrong] = (labels[:wrong] + 1) % K
    assert calibrate(logits, labels).temperature is not None


@pytest.fixture
def tiny() -> vitkit.ViT:
    torch.manual_seed(0)
    model = vitkit.create_model(
        "vit_tiny_patch16_224", image_size=8, patch_size=4, width=32, num_heads=2, depth=1,
        num_classes=3, in_channels=1,
    )  # fmt: skip
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


GREY = vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.5,))
IMAGE = np.arange(64, dtype=np.uint8).reshape(8, 8)


def test_a_stored_temperature_softens_what_is_predicted(tiny, tmp_path):
    path = vitkit.save(tmp_path / "a.safetensors", tiny, preprocess=GREY, temperature=2.0)
    plain = vitkit.save(tmp_path / "b.safetensors", tiny, preprocess=GREY)
    predictor = vitkit.Predictor.from_checkpoint(path, device="cpu")
    (prediction,) = predictor([IMAGE], top_k=3)
    (logits,) = predictor.logits([IMAGE])
    assert dict(prediction.top) == pytest.approx(
        {str(i): p for i, p in enumerate((logits / 2).softmax(0).tolist())}
    )
    other = vitkit.Predictor.from_checkpoint(plain, device="cpu")
    assert torch.equal(other.logits([IMAGE])[0], logits)
    assert other([IMAGE])[0].label == prediction.label
    assert other([IMAGE])[0].probability > prediction.probability + 0.01
    assert (vitkit.load(path).temperature, vitkit.load(plain).temperature) == (2.0, 1.0)


@pytest.mark.parametrize("wrong", [0, -1.5, "warm", True, None, [1]])
def test_a_temperature_that_is_none_is_named(tiny, tmp_path, wrong):
    path = vitkit.save(tmp_path / "a.safetensors", tiny, preprocess=GREY, temperature=wrong)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: its temperature is"):
        vitkit.Predictor.from_checkpoint(path, device="cpu")


@pytest.mark.parametrize("wrong", [0.0, -1.5, math.inf, math.nan])
def test_a_predictor_refuses_it_too(tiny, wrong):
    with pytest.raises(SettingError, match=r"temperature .* must be a positive number"):
        vitkit.Predictor(tiny, GREY, temperature=wrong)

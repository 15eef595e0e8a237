"""`Predictor`: any kind of image, in order, by the preprocessing of the checkpoint."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from noise import fill_with_noise

import vitkit

PREPROCESS = vitkit.Preprocess(image_size=16, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = vitkit.create_model(
        "vit_tiny_patch16_224", image_size=16, patch_size=4, depth=1, width=24, num_heads=2,
        mlp_width=32, num_classes=6,
    )  # fmt: skip
    fill_with_noise(model, std=0.4)
    path = tmp_path_factory.mktemp("m") / "m.safetensors"
    return vitkit.load(vitkit.save(path, model, preprocess=PREPROCESS, classes=tuple("abcdef")))


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    sizes = [(20, 30), (40, 17), (16, 16), (33, 33), (64, 20)]
    return [generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def test_top_k_is_the_softmax_sorted(checkpoint, images):
    predictor = vitkit.Predictor.from_checkpoint(checkpoint)
    for each, logits in zip(predictor(images, top_k=99), predictor.logits(images), strict=True):
        probabilities = logits.softmax(0)
        order = probabilities.argsort(descending=True)
        assert [label for label, _ in each.top] == ["abcdef"[i] for i in order]
        assert [p for _, p in each.top] == pytest.approx(probabilities[order].tolist())
        assert (each.label, each.probability) == each.top[0]
        assert sum(p for _, p in each.top) == pytest.approx(1.0)
    assert len(predictor(images[:1], top_k=2)[0].top) == 2


def test_classes_whose_probability_is_zero_are_in_the_order_of_their_logits(images):
    logits = torch.tensor([[-300.0, 0, -200, -400, -150, -500, -450]])
    predictor = vitkit.Predictor(lambda x: logits.expand(len(x), -1), PREPROCESS)
    (prediction,) = predictor(images[:1], top_k=7)
    assert prediction.top[1][1] == 0
    assert "".join(label for label, _ in prediction.top) == "1420365"


@pytest.mark.parametrize("logits", [[0.0] * 12, [1.0, 0, 2, 0, 2, 0, 0, 0, 0, 0, 0, 0]])
def test_of_equal_logits_the_first_class_comes_first_as_in_an_evaluation(logits, images):
    scores = torch.tensor([logits])
    predictor = vitkit.Predictor(lambda x: scores.expand(len(x), -1), PREPROCESS)
    for count in (1, 3, 12):
        (prediction,) = predictor(images[:1], top_k=count)
        expected = sorted(range(12), key=lambda index: -logits[index])[:count]
        assert [label for label, _ in prediction.top] == [str(index) for index in expected]
    assert predictor(images[:1])[0].label == str(int(scores.argmax()))


def test_no_images_give_no_rows_of_as_many_columns_as_ever(checkpoint, images):
    assert vitkit.embed(checkpoint, []).shape == (0, *vitkit.embed(checkpoint, images).shape[1:])
    assert vitkit.Predictor.from_checkpoint(checkpoint).logits(iter(())).shape == (0, 6)


def test_a_stream_names_broken_images_and_goes_on(checkpoint, images, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"words")
    predictor = vitkit.Predictor.from_checkpoint(checkpoint, batch_size=2)
    predictions = [*predictor.stream([broken, images[0], broken, broken, *images[1:]], top_k=2)]
    assert [n for n, each in enumerate(predictions) if isinstance(each, vitkit.ImageError)] == [
        0,
        2,
        3,
    ]
    assert predictions[0].reason == "not an image"
    good = [each for each in predictions if not isinstance(each, vitkit.ImageError)]
    assert [each.label for each in good] == [each.label for each in predictor(images)]
    assert [len(each.top) for each in good] == [2] * 5
    with pytest.raises(vitkit.ImageError, match=r"broken\.png: not an image"):
        predictor([images[0], broken])
    with pytest.raises(vitkit.ImageError, match=r"broken\.png"):
        predictor.logits([broken])


def test_a_stream_is_read_and_kept_a_few_batches_at_a_time(images):
    taken, given = 0, []

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield images[0]

    def forward(images: torch.Tensor) -> torch.Tensor:
        given.append(len(images))
        return torch.zeros(len(images), 3)

    stream = vitkit.Predictor(forward, PREPROCESS, batch_size=2).stream(endless())
    assert [next(stream).label for _ in range(4)] == ["0"] * 4
    assert (taken, given) == (6, [2, 2])
    stream.close()


def test_what_is_wrong_is_named(checkpoint, images):
    predictor = vitkit.Predictor.from_checkpoint(checkpoint)
    with pytest.raises(vitkit.ImageError, match="image 1: mode"):
        predictor([images[0], np.zeros((4, 4, 3), np.float32)])
    with pytest.raises(vitkit.SettingError, match=r"got one ndarray; write \[image\]"):
        predictor(images[0])  # it could be iterated over by rows
    with pytest.raises(vitkit.DataError, match=r"nowhere\.png: no such image"):
        predictor("nowhere.png")
    with pytest.raises(vitkit.SettingError, match="precision 'float8' does not exist"):
        vitkit.Predictor.from_checkpoint(checkpoint, precision="float8")
    with pytest.raises(vitkit.SettingError, match="engine 'onx' does not exist"):
        vitkit.Predictor.from_checkpoint(checkpoint, engine="onx")
    with pytest.raises(vitkit.ImageError, match="'': missing: the path is empty"):
        predictor([images[0], ""])


@pytest.mark.parametrize("classes", [["a"], list("abcd")])
def test_classes_are_as_many_as_logits(images, classes):
    predictor = vitkit.Predictor(lambda x: x.mean(dim=(2, 3)), PREPROCESS, classes)
    with pytest.raises(vitkit.SettingError, match=r"given, but the model returns 3 logits"):
        predictor(images)


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize(
    ("forward", "found"),
    [(lambda x: x.mean(dim=(1, 2, 3)), r"a Tensor of shape \(5,\)"),
     (lambda x: x.mean(dim=(2, 3))[:1], r"a Tensor of shape \(1, 3\)"),
     (lambda x: x.mean(dim=(2, 3)).numpy(), r"a ndarray of shape \(5, 3\)"),
     (lambda x: None, r"a NoneType of shape \(\)")],
)  # fmt: skip
def test_an_engine_returns_a_row_for_each_image(images, forward, found):
    with pytest.raises(
        vitkit.UserCodeError, match=rf"forward returned {found}; expected .* \(5, K\)"
    ):
        vitkit.Predictor(forward, PREPROCESS)(images)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_outputs_that_are_not_finite_are_no_class(images, number):
    def forward(pixels):
        logits = pixels.mean(dim=(2, 3))
        logits[1:3] = torch.tensor([number, 0.0, 0.0])
        return logits

    predictor = vitkit.Predictor(forward, PREPROCESS)
    names = r"NaN or infinity for 2 of 5 images \(first: image 1\)"
    for call in (predictor, predictor.logits):
        with pytest.raises(vitkit.CheckpointError, match=names):
            call(images)
    with pytest.raises(vitkit.CheckpointError, match="for 5 of 5 images"):
        vitkit.Predictor(lambda x: x.mean(dim=(2, 3)) * torch.nan, PREPROCESS)(images)


def test_a_class_that_is_ruled_out_may_have_a_logit_of_minus_infinity(images):
    ruled_out = torch.tensor([0.0, -torch.inf, 0.0])
    predictor = vitkit.Predictor(lambda x: x.mean(dim=(2, 3)) + ruled_out, PREPROCESS)
    assert "1" not in {each.label for each in predictor(images)}


def test_features_that_overflow_are_not_written_as_such(checkpoint, images):
    broken = replace(checkpoint, model=copy.deepcopy(checkpoint.model))
    broken.model.norm.bias.data.fill_(torch.nan)
    with pytest.raises(vitkit.CheckpointError, match="NaN or infinity for 5 of 5 images"):
        vitkit.embed(broken, images)


def test_a_model_of_half_precision_predicts_and_embeds_nearly_the_same(checkpoint, images):
    half = replace(checkpoint, model=copy.deepcopy(checkpoint.model).bfloat16())
    predict = vitkit.Predictor.from_checkpoint
    exact, rough = predict(checkpoint).logits(images), predict(half).logits(images)
    assert 0 < (exact - rough).abs().max() < 0.1 * exact.abs().max()
    features = vitkit.embed(checkpoint, images)
    assert np.abs(features - vitkit.embed(half, images)).max() < 0.1 * np.abs(features).max()


def test_embed_is_what_the_head_reads(checkpoint, images):
    features = vitkit.embed(checkpoint, images)
    assert features.shape == (5, 24)
    head = checkpoint.model.head
    logits = torch.from_numpy(features) @ head.weight.T + head.bias
    expected = vitkit.Predictor.from_checkpoint(checkpoint).logits(images)
    torch.testing.assert_close(logits.detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("wrong_types_come_in")
def test_the_error_for_a_wrong_argument_names_the_right_one(checkpoint, images):
    image = images[0]
    predictor = vitkit.Predictor.from_checkpoint(checkpoint)
    found = next(iter(vitkit.find_images("digits")))
    cases = [
        (lambda: vitkit.explain(checkpoint, images), "image is a list; pass an image"),
        (lambda: vitkit.explain(checkpoint, image, layer=[0, 1]),
         r"layer = \[0, 1\]: must be a whole"),
        (lambda: vitkit.explain(checkpoint, image, head="all"),
         "head = 'all': must be a whole number"),
        (lambda: vitkit.explain(checkpoint.model, image), "a ViT is not a checkpoint; pass the"),
        (lambda: vitkit.embed(checkpoint.model, images), "a ViT is not a checkpoint"),
        (lambda: vitkit.Predictor.from_checkpoint(checkpoint.model), "a ViT is not a checkpoint"),
        (lambda: vitkit.evaluate(checkpoint.model, "digits"), "a ViT is not a checkpoint"),
        (lambda: vitkit.adapt(checkpoint.model, num_classes=2), "not a ViT; .* vitkit.resized"),
        (lambda: vitkit.train(images), r"items\[0\] is a ndarray; expected \(image, label\)"),
        (lambda: vitkit.evaluate(checkpoint, np.zeros(3)),
         r"a ndarray; it has the shape \(3,\); pass \(images, labels\)"),
        (lambda: vitkit.check(images), r"items\[0\] is a ndarray; expected"),
        (lambda: vitkit.find_images(["a.png"]), r"a list is not a name; .* find_images\(\*names\)"),
        (lambda: vitkit.find_images(b"a.png"), "a bytes is not a name"),
        (lambda: predictor(7), "got one int; write"),
        (lambda: predictor.logits(found), "got one FoundImage; write"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises(vitkit.UserError, match=message) as error:
            call()
        assert len(str(error.value)) < 200

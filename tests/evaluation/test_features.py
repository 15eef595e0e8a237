"""Features that are computed once, nearest neighbours, and linear probes."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch.nn import functional as F
from training.starts import a_checkpoint, log_of, train

import vitkit
from vitkit import DataError, SettingError, open_dataset
from vitkit.evaluation.features import extract_features, fit_linear, knn
from vitkit.training.finish import among_voted


def blobs(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Three clouds that overlap, one of their five features on another scale, one constant."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres = torch.randn(3, 5, generator=torch.Generator().manual_seed(9))
    points = centres[labels] + 0.9 * torch.randn(count, 5, generator=generator)
    return points * torch.tensor([1.0, 100.0, 1.0, 1.0, 0.0]) + 3.0, labels


def test_the_linear_head_is_the_minimum_that_scikit_learn_finds():
    (train_, labels), (held, held_labels) = blobs(300), blobs(90, seed=1)
    ours = fit_linear(train_, labels, held, held_labels, 3, strengths=(0.01,))
    scaler = StandardScaler().fit(train_.numpy())
    theirs = LogisticRegression(C=1 / (0.01 * 300), tol=1e-8, max_iter=1000)
    theirs.fit(scaler.transform(train_.numpy()), labels.numpy())
    expected = theirs.predict_proba(scaler.transform(held.numpy()))
    assert np.abs(ours(held).softmax(1).numpy() - expected).max() < 2e-3
    assert ours.top1 == pytest.approx((expected.argmax(1) == held_labels.numpy()).mean())


def test_the_strength_is_the_best_on_validation():
    (train_, labels), (held, held_labels) = blobs(24), blobs(300, seed=1)
    found = fit_linear(train_, labels, held, held_labels, 3)
    alone = [fit_linear(train_, labels, held, held_labels, 3, strengths=(s,))
             for s in (10.0, 1e-6)]  # fmt: skip
    assert 1e-6 <= found.strength <= 10.0
    assert all((found.top1, -found.loss) >= (one.top1, -one.loss) for one in alone)


def test_neighbours_vote_by_their_similarity():
    train_, labels = blobs(60)
    queries, _ = blobs(7, seed=2)
    votes = knn(train_, labels, queries, 3, neighbours=4, temperature=0.5)
    for query, voted in zip(queries, votes, strict=True):
        similar = F.cosine_similarity(query[None], train_)
        nearest = similar.argsort(descending=True)[:4]
        expected = torch.zeros(3)
        for place in nearest:
            expected[labels[place]] += (similar[place] / 0.5).exp()
        torch.testing.assert_close(voted, expected / expected.sum())
    assert torch.allclose(knn(train_[:2], labels[:2], queries, 3).sum(1), torch.ones(7))


def test_a_class_that_no_neighbour_is_of_is_not_among_the_first():
    votes = torch.tensor([[0.7, 0.3, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    for labels, share in (([1, 0], 1.0), ([1, 1], 0.5), ([2, 3], 0.0)):
        assert among_voted(votes, torch.tensor(labels)) == {"top5": share}


def test_one_class_cannot_be_separated():
    points, labels = blobs(9)
    with pytest.raises(DataError, match="all images have the same class"):
        fit_linear(points, labels * 0, points, labels, 3)


def test_features_are_what_the_head_reads_and_are_kept_for_the_same_weights_and_images(tmp_path):
    stored = a_checkpoint(tmp_path / "a.safetensors", pooling="mean")
    dataset = open_dataset("digits")
    lines: list[str] = []

    def made(stored, split="test", preprocess=stored.preprocess, dataset=dataset):
        return extract_features(
            stored.model, dataset, split, preprocess, cache=tmp_path / "kept", log=lines.append
        )

    found, labels = made(stored)
    assert found.shape == (359, 16)
    assert labels.tolist() == dataset.splits["test"].labels.tolist()
    predictor = vitkit.Predictor.from_checkpoint(stored, device="cpu")
    logits = predictor.logits([dataset.splits["test"].read(n) for n in range(20)])
    with torch.no_grad():
        torch.testing.assert_close(stored.model.head(found[:20]), logits)
    assert torch.equal(made(stored)[0], found)
    assert "computed" in lines[0]
    assert "from" in lines[1]
    backwards = dataset.splits["test"].subset(np.arange(359)[::-1])
    turned = made(stored, dataset=dataclasses.replace(dataset, splits={"test": backwards}))
    assert torch.equal(turned[0], found.flip(0))
    other_head = vitkit.adapt(stored, num_classes=4)
    assert torch.equal(made(other_head)[0], found)
    other = a_checkpoint(tmp_path / "b.safetensors", seed=8, pooling="mean")
    assert not torch.equal(made(other)[0], found)
    made(stored, preprocess=stored.preprocess.replace(mean=(0.1,)))
    made(stored, split="train")
    for damaged in (tmp_path / "kept").glob("*.safetensors"):
        damaged.write_bytes(damaged.read_bytes()[:-64] + bytes(64))
    assert torch.equal(made(stored)[0], found)
    computed = ["computed" in line for line in lines]
    assert computed == [True, False, True, False, True, True, True, True]


@pytest.mark.parametrize("fields", [{}, {"distillation_token": True}])
def test_a_linear_probe_leaves_a_checkpoint_like_any_other(tmp_path, fields):
    stored = a_checkpoint(tmp_path / "a.safetensors", num_classes=3, **fields)
    settings = {"pretrained": tmp_path / "a.safetensors", "recipe": "linear-probe"}
    settings |= {"probe": "linear", "batch_size": 100_000}  # no batch is needed
    result = train(tmp_path / "run", **settings)
    assert result.metrics["val"]["top1"] > 0.5  # weights without training; chance is 0.1
    again = vitkit.evaluate(result.best, "digits", split="val")
    assert again["top1"] == result.metrics["val"]["top1"]
    assert again["loss"] == pytest.approx(result.metrics["val"]["loss"], rel=1e-3)
    assert result.metrics["test"]["top1"] > 0.5
    probed = vitkit.load(result.best)
    for name, weight in stored.model.state_dict().items():
        if not name.startswith("head"):
            assert torch.equal(probed.model.state_dict()[name], weight), name
    assert probed.metadata["started_from"]["sha256"]
    assert "features of train: 1,294 x 16, computed" in log_of(result.run)
    (idle,) = [
        line
        for line in log_of(result.run).splitlines()
        if "--probe makes no training steps" in line
    ]
    assert "batch_size" in idle
    second = train(tmp_path / "second", **settings)
    assert "features of train: 1,294 x 16, from" in log_of(second.run)
    assert second.metrics["val"] == result.metrics["val"]


def test_nearest_neighbours_are_looked_at_and_nothing_is_written(tmp_path):
    a_checkpoint(tmp_path / "a.safetensors", num_classes=3)
    result = train(tmp_path / "run", pretrained=tmp_path / "a.safetensors", probe="knn")
    assert result.metrics["val"]["top1"] > 0.5
    assert result.metrics["test"]["top1"] > 0.5
    assert not result.best.exists()
    assert set(result.metrics["val"]) >= {"top1", "top5", "balanced_accuracy", "images"}
    assert "20 nearest neighbours, val: top1" in log_of(result.run)
    rows = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    kept = {row["kind"]: row[f"{row['kind']}_top1"] for row in rows}
    assert kept == {split: result.metrics[split]["top1"] for split in ("val", "test")}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"mixup": 0.8},
            "mixup cannot be combined with --probe, which computes the features of each image once",
        ),
        ({"aa": "3", "max_steps": 3}, "max_steps and aa cannot be combined with --probe"),
        (
            {"cutmix": 1.0, "model_ema": True},
            "model_ema and cutmix cannot be combined with --probe",
        ),
        ({"mixup_prob": 0.5}, "mixup_prob cannot be combined with --probe"),
        ({"pretrained": None}, "pass --pretrained"),
        (
            {"val_fraction": 0.0},
            "--probe needs a validation split, and the data have none",
        ),
    ],
)
def test_what_a_probe_cannot_have_is_refused(tmp_path, settings, words):
    a_checkpoint(tmp_path / "a.safetensors")
    asked = {"pretrained": tmp_path / "a.safetensors", "probe": "linear"} | settings
    with pytest.raises(SettingError, match=words):
        train(tmp_path / "run", **asked)

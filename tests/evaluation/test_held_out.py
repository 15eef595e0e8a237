"""Validation logits of models that were chosen without the images that they are of."""

import pytest
import torch
from training.worlds import in_world, together

from vitkit.distributed import ProcessGroup
from vitkit.evaluation.temperature import FOLDS, HeldOutLogits

N, K = 23, 3


def outputs(model: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of one of some models on the same images, and the labels."""
    labels = torch.arange(N) % K
    generator = torch.Generator().manual_seed(model)
    return torch.randn(N, K, generator=generator), labels


def score(logits: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> tuple[float, float]:
    loss = torch.nn.functional.cross_entropy(logits[rows], labels[rows])
    return float((logits[rows].argmax(1) == labels[rows]).float().mean()), -float(loss)


def expected(models: range) -> torch.Tensor:
    """For each fold, the logits of the model that is best on all other images."""
    whole = torch.zeros(N, K)
    folds = torch.arange(N) % FOLDS
    for fold in range(FOLDS):
        best = max(models, key=lambda model: score(*outputs(model), folds != fold))
        whole[folds == fold] = outputs(best)[0][folds == fold]
    return whole


def watched(held_out: HeldOutLogits, model: int, world) -> None:
    logits, labels = outputs(model)
    mine = slice(world.rank, None, world.size)
    batches = zip(logits[mine].split(4), labels[mine].split(4), strict=True)
    seen = list(held_out.watched(batches, world))
    assert torch.equal(torch.cat([batch for batch, _ in seen]), logits[mine])
    held_out.add(world)


@pytest.mark.parametrize("size", [1, 2])
def test_the_logits_of_a_fold_are_those_of_the_model_that_the_others_choose(size):
    models = range(8)
    wanted = expected(models)
    alone = [torch.equal(wanted, outputs(model)[0]) for model in models]
    assert not any(alone), "the folds choose different models"

    def kept(world):
        held_out = HeldOutLogits(N, K)
        for model in models:
            watched(held_out, model, world)
        logits, labels = held_out.predictions()
        return logits.tolist(), labels.tolist()

    for logits, labels in together(size, in_world(kept)):
        assert torch.equal(torch.tensor(logits), wanted)
        assert labels == outputs(0)[1].tolist()


def test_what_is_saved_goes_on(tmp_path):
    first, second = HeldOutLogits(N, K), HeldOutLogits(N, K)
    for model in range(4):
        watched(first, model, ProcessGroup())
    first.save(tmp_path / "state" / "validation.safetensors")
    second.load(tmp_path / "state" / "validation.safetensors")
    for model in range(4, 8):
        watched(second, model, ProcessGroup())
    assert second.is_complete
    assert torch.equal(second.predictions()[0], expected(range(8)))


@pytest.mark.parametrize("content", [None, b"", b"torn", "other"])
def test_a_file_that_is_missing_or_of_another_run_is_not_complete(content, tmp_path):
    path = tmp_path / "validation.safetensors"
    if content == "other":
        HeldOutLogits(N + 1, K).save(path)
    elif content is not None:
        path.write_bytes(content)
    held_out = HeldOutLogits(N, K)
    held_out.load(path)
    assert not held_out.is_complete
    held_out.save(path)
    assert content == "other" or path.exists() == (content is not None)


def test_of_many_logits_those_of_every_nth_image_are_kept(monkeypatch):
    monkeypatch.setattr("vitkit.evaluation.temperature.MOST_LOGITS", N * K // 2)
    kept = HeldOutLogits(N, K)
    watched(kept, 0, ProcessGroup())
    logits, labels = kept.predictions()
    assert torch.equal(logits, outputs(0)[0][::3])
    assert labels.tolist() == outputs(0)[1][::3].tolist()

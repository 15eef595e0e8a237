"""A user's own metrics: their names, and the outputs of all processes in their order."""

import pytest
import torch
from training.worlds import in_world, together

import vitkit
from vitkit import SettingError
from vitkit.evaluation.loop import KeptOutputs


@pytest.mark.parametrize("images", [7, 2, 1])
def test_every_process_has_the_score_of_all_images_also_one_without_any(images):
    logits = torch.randn(images, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(images) % 3

    def weighted(logits: torch.Tensor, labels: torch.Tensor) -> float:
        """A score that depends on the order of the images."""
        return float((torch.arange(1, images + 1) * (logits.sum(1) + labels)).sum())

    def scored(world):
        mine = slice(world.rank, None, world.size)
        own = logits[mine], labels[mine]
        # a loader without images yields no batch
        outputs = KeptOutputs(zip(*(part.split(2) for part in own if len(part)), strict=True))
        assert sum(len(batch) for batch, _ in outputs) == len(labels[mine])
        return outputs.scores({"weighted": weighted}, world)

    first, second = together(2, in_world(scored))
    assert first == second == {"weighted": pytest.approx(weighted(logits, labels))}


def named(name: str):
    def metric(logits: torch.Tensor, labels: torch.Tensor) -> float:
        return 0.25

    metric.__name__ = name
    return metric


@pytest.mark.parametrize(
    "name", ["top1", "top5", "top1_low", "balanced_accuracy_high", "calibrated_ece", "temperature"]
)
def test_the_name_of_a_score_is_taken(name, tmp_path):
    with pytest.raises(SettingError, match=f"there is a score {name} already; rename it"):
        vitkit.train("digits", output=tmp_path / "run", metrics=[named(name)])


def test_a_name_that_begins_like_one_is_free(tmp_path, tiny):
    names = ("top_two_margin", "gap", "gap_low")
    found = vitkit.evaluate(tiny, "digits", metrics=[*map(named, names)])
    assert [found[name] for name in names] == [0.25] * 3
    shown = found._repr_html_()
    assert all(f">{name}<" in shown for name in names)
    assert ">top1_low<" not in shown


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    from tiny_checkpoint import save_tiny

    folder = tmp_path_factory.mktemp("checkpoint")
    return save_tiny(folder / "m.safetensors", tuple("0123456789"))

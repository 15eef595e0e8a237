"""Losses against plain algebra, and a user's own loss."""

import sys

import pytest
import torch
from torch.nn import functional as F

from vitkit import SettingError, TrainConfig
from vitkit.training.optimization.losses import BinaryCrossEntropy, CrossEntropy, make_loss
from vitkit.training.plan import make_plan

HERE = "training.test_losses"


def logits(images: int = 6, classes: int = 4) -> torch.Tensor:
    return torch.randn(images, classes, generator=torch.Generator().manual_seed(0)) * 3


LABELS = torch.tensor([0, 3, 1, 1, 2, 0])
MIXED = torch.tensor([[0.7, 0.0, 0.3, 0.0]]).repeat(6, 1)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("targets", [LABELS, MIXED])
def test_both_losses_are_their_equations(targets, smoothing):
    wanted = F.one_hot(targets, 4).float() if targets.ndim == 1 else targets
    t, y = wanted * (1 - smoothing) + smoothing / 4, logits()
    softmax = y.exp() / y.exp().sum(1, keepdim=True)
    found = CrossEntropy(smoothing)(y, targets)
    assert found == pytest.approx(-(t * softmax.log()).sum(1).mean().item(), rel=1e-5)
    sigmoid = 1 / (1 + (-y).exp())
    each = -(t * sigmoid.log() + (1 - t) * (1 - sigmoid).log())
    found = BinaryCrossEntropy(smoothing)(y, targets)
    assert found == pytest.approx(each.sum(1).mean().item(), rel=1e-5)


def test_with_a_threshold_both_images_of_a_mixture_count_in_full():
    both = torch.tensor([[1.0, 0.0, 1.0, 0.0]]).repeat(6, 1)
    y = logits()
    assert torch.equal(BinaryCrossEntropy(threshold=0.0)(y, MIXED), BinaryCrossEntropy()(y, both))
    first = BinaryCrossEntropy(threshold=0.5)(y, MIXED)
    assert torch.equal(first, BinaryCrossEntropy()(y, torch.zeros(6, dtype=torch.int64)))


def hard_only(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(y.log_softmax(1), labels)


def not_a_mean(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y, labels, reduction="none")


def test_a_loss_of_one_s_own():
    own = make_loss(f"{HERE}:hard_only")
    assert own(logits(), LABELS) == pytest.approx(CrossEntropy()(logits(), LABELS).item())


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "losses_of_mine.py").write_text(
        "from torch.nn.functional import cross_entropy as mine\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", ".")])
    assert make_loss("losses_of_mine:mine")(logits(), LABELS) > 0
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize("name", ["teacher", "loss"])
def test_an_object_where_a_name_belongs_is_one_line(name):
    with pytest.raises(SettingError, match=r"a Linear cannot be stored .* name of a function") as e:
        TrainConfig(data="digits", **{name: torch.nn.Linear(2, 2)})
    assert len(str(e.value)) < 250


def planned(**settings: object) -> None:
    make_plan(TrainConfig(data="digits", spec={"in_channels": 1}, **settings))


def test_a_loss_that_cannot_take_mixed_targets_is_refused_before_the_start():
    planned(loss=f"{HERE}:hard_only")
    with pytest.raises(
        SettingError,
        match=r"takes class numbers only, and --mixup 0\.8 gives it .*pass --mixup 0 --cutmix 0",
    ):
        planned(loss=f"{HERE}:hard_only", mixup=0.8)
    with pytest.raises(SettingError, match=r"must return one number .*it returned Tensor \[2\]"):
        planned(loss=f"{HERE}:not_a_mean")
    planned(loss="bce", mixup=0.8, cutmix=1.0)

"""Small parts of training: schedule, parameter groups, evaluation, precision, run folders."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit
from vitkit.data.sources.open import ArraySplit
from vitkit.errors import DataError, OutputError, SettingError
from vitkit.evaluation.predict import evaluate_model
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.optimization.optimizers import make_optimizer
from vitkit.training.optimization.parameter_groups import parameter_groups
from vitkit.training.optimization.precision import choose_kernel, choose_precision
from vitkit.training.optimization.schedule import learning_rate
from vitkit.training.run_folder import new_folder, resumed_folder


def test_the_learning_rate_rises_to_its_peak_and_ends_at_its_low():
    rates = [learning_rate(s, peak=1e-3, low=1e-5, warmup=10, total=100) for s in range(100)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-5)
    assert max(rates) == rates[9]
    assert all(b < a for a, b in pairwise(rates[9:]))
    middle = learning_rate(54, peak=1e-3, low=1e-5, warmup=10, total=100)
    assert middle == pytest.approx((1e-3 + 1e-5) / 2, rel=1e-6)


def test_biases_norms_tokens_and_positions_do_not_decay():
    model = vitkit.create_model("vit_tiny_patch16_224", depth=1, num_classes=2)
    decayed, free = parameter_groups(model, lr=0.5, weight_decay=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "head.weight",
    }  # fmt: skip
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(free["params"]) == len(names)
    optimizer = make_optimizer(model, "adamw", lr=0.5, weight_decay=0.1, betas=(0.9, 0.999))
    with torch.no_grad():
        model.head.weight.fill_(1.0)
        model.norm.weight.fill_(1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model.head.weight, torch.tensor(1 - 0.5 * 0.1))
    assert torch.equal(model.norm.weight, torch.ones_like(model.norm.weight))


def test_evaluation_against_a_count_by_hand():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 7, 101)
    images = np.zeros((101, 4, 4, 1), np.uint8)
    images[:, 0, 0, 0] = np.arange(101)
    table = torch.randn(101, 7, generator=torch.Generator().manual_seed(1))
    identity = vitkit.Preprocess(image_size=4, mean=(0.0,), std=(1.0,), fit="squash")

    def forward(batch: torch.Tensor) -> torch.Tensor:
        return table[(batch[:, 0, 0, 0] * 255).round().long()]

    split = ArraySplit(images, labels, "x")
    found = evaluate_model(forward, split, identity, num_classes=7, batch_size=16)
    best = table.argsort(dim=1, descending=True).numpy()
    assert found["top1"] == pytest.approx((best[:, 0] == labels).mean())
    assert found["top5"] == pytest.approx((best[:, :5] == labels[:, None]).any(1).mean())
    losses = -table.log_softmax(1).numpy()[np.arange(101), labels]
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert found["images"] == 101


def test_with_two_classes_the_k_of_top_k_is_two():
    split = ArraySplit(np.zeros((3, 4, 4, 1), np.uint8), np.array([0, 1, 0]), "x")
    grey = vitkit.Preprocess(image_size=4, mean=(0.0,), std=(1.0,), fit="squash")
    found = evaluate_model(lambda x: x.new_zeros(len(x), 2), split, grey, num_classes=2)
    assert set(found) == {"top1", "top2", "loss", "balanced_accuracy", "brier", "ece", "images"}
    with pytest.raises(DataError, match="the split is empty"):
        evaluate_model(lambda x: x, split.subset(np.array([], int)), grey, num_classes=2)


AMD, INTEL, AMX = (
    {"cpu_name": "AMD EPYC", "avx512_bf16": True, "amx_bf16": False},
    {"cpu_name": "Intel(R) Xeon(R)", "avx512_bf16": True, "amx_bf16": False},
    {"cpu_name": "Intel(R) Xeon(R)", "avx512_bf16": True, "amx_bf16": True},
)


@pytest.mark.parametrize(
    ("features", "batch_size", "precision"),
    [(AMD, 64, "bfloat16"), (AMX, 64, "bfloat16"), (AMD, 2, "off"), (INTEL, 64, "off"),
     ({}, 64, "off")],
)  # fmt: skip
def test_precision_follows_the_processor_the_model_and_the_batch(
    monkeypatch, features, batch_size, precision
):
    """A step of 64 images has 1.3e9 operations here, a step of 2 images 4e7."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    cpu, model = torch.device("cpu"), vitkit.create_model(
        "vit_tiny_patch16_224", image_size=8, patch_size=2, width=64, depth=4, num_heads=4,
        mlp_width=256, num_classes=10,
    )  # fmt: skip
    chosen, reason = choose_precision(model, batch_size, cpu)
    assert chosen == precision
    assert "bfloat16" in reason
    assert choose_kernel(model, chosen, cpu) == ("fused" if precision == "off" else "plain")


def test_long_sequences_keep_the_fused_kernel():
    model = vitkit.create_model("vit_tiny_patch16_224", image_size=528, depth=1, num_classes=3)
    assert choose_kernel(model, "bfloat16", torch.device("cpu")) == "fused"


def test_run_folders_are_numbered_and_never_taken_twice(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(data="some/images", model="vit_tiny_patch16_224")
    assert new_folder(config, print).root == Path("runs/images-vit_tiny_patch16_224-1")
    assert new_folder(config, print).root == Path("runs/images-vit_tiny_patch16_224-2")


def test_an_output_that_is_a_file_is_refused(tmp_path: Path):
    file = tmp_path / "mine.txt"
    file.write_text("precious")
    with pytest.raises(OutputError, match="is a file"):
        new_folder(TrainConfig(data="digits", output=str(file), overwrite=True), print)
    assert file.read_text() == "precious"


def test_resume_names_a_run_that_is_not_there(tmp_path: Path):
    with pytest.raises(OutputError, match="no such run folder; the nearest folder that exists is"):
        resumed_folder(str(tmp_path / "none" / "run"), None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutputError, match="no saved state"):
        resumed_folder(str(tmp_path / "empty"), None)
    with pytest.raises(SettingError, match="--resume auto needs --output"):
        resumed_folder("auto", None)
    assert resumed_folder("auto", str(tmp_path / "empty")) is None


def filled_with_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def small_model() -> vitkit.ViT:
    torch.manual_seed(0)
    return vitkit.create_model(
        "vit_tiny_patch16_224", depth=1, width=24, num_heads=2, mlp_width=48, num_classes=2
    )


def test_muon_moves_each_of_q_k_v_by_an_orthogonal_matrix_and_the_rest_as_adamw_does():
    muon, adamw = small_model(), small_model()
    before = {name: value.clone() for name, value in muon.state_dict().items()}
    for model, name in ((muon, "muon"), (adamw, "adamw")):
        optimizer = make_optimizer(model, name, lr=0.1, weight_decay=0.0, betas=(0.9, 0.95))
        filled_with_gradients(model, seed=1)
        optimizer.step()
    moved = {name: before[name] - value for name, value in muon.state_dict().items()}
    for matrix in moved["blocks.0.attn.qkv.weight"].chunk(3):
        singular = torch.linalg.svdvals(matrix)  # lr * 0.2 * sqrt(24), Newton-Schulz is rough
        assert singular.min() > 0.5 * 0.1 * 0.2 * 24**0.5
        assert singular.max() < 1.3 * 0.1 * 0.2 * 24**0.5
    for name, value in adamw.state_dict().items():
        same = torch.equal(value, muon.state_dict()[name])
        assert same == (not (name.startswith("blocks.") and value.ndim == 2)), name


def test_muon_s_state_goes_on_where_it_was():
    whole, stopped = small_model(), small_model()
    settings = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    one = make_optimizer(whole, "muon", **settings)
    two = make_optimizer(stopped, "muon", **settings)
    for step in range(4):
        if step == 2:
            state = two.state_dict()
            two = make_optimizer(stopped, "muon", **settings)
            two.load_state_dict(state)
        for model, optimizer in ((whole, one), (stopped, two)):
            filled_with_gradients(model, seed=step)
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
    for name, value in whole.state_dict().items():
        assert torch.equal(value, stopped.state_dict()[name]), name

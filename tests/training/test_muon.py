"""Muon: orthogonal moves of matrices, and a state that is restored."""

from __future__ import annotations

import torch

import vitkit
from vitkit.training.optimization.optimizers import make_optimizer


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

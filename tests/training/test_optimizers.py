"""Every optimizer against its equation, and its state stored as tensors and JSON."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn, optim

import vitkit
from vitkit import MissingExtraError, SettingError
from vitkit.training.optimization.optimizers import BatchedMuon, check_optimizer, make_optimizer
from vitkit.training.state.registry import OptimizerPart

LR, DECAY, BETAS = 0.01, 0.1, (0.9, 0.95)


def small_model(seed: int = 0) -> vitkit.ViT:
    torch.manual_seed(seed)
    spec = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2,
            "mlp_width": 32, "num_classes": 3}  # fmt: skip
    return vitkit.ViT(vitkit.ViTSpec(**spec))


def made(model: vitkit.ViT, name: str, **settings: float) -> torch.optim.Optimizer:
    return make_optimizer(model, name, lr=LR, weight_decay=DECAY, betas=BETAS, **settings)


def gradients(model: vitkit.ViT, seed: int) -> dict[str, torch.Tensor]:
    """Fill in random gradients, and return copies of them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def weights(model: vitkit.ViT) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_sgd_has_its_momentum_and_its_decay_in_the_gradient():
    model = small_model()
    optimizer, expected = made(model, "sgd", momentum=0.8), weights(model)
    velocity = {name: torch.zeros_like(w) for name, w in expected.items()}
    for step in range(3):
        for name, g in gradients(model, step).items():
            decay = DECAY if name in ("head.weight", "patch_embed.proj.weight") else 0.0
            velocity[name] = 0.8 * velocity[name] + g + decay * expected[name]
            expected[name] -= LR * velocity[name]
        optimizer.step()
    for name in ("head.weight", "patch_embed.proj.weight", "head.bias", "cls_token"):
        assert torch.allclose(model.get_parameter(name), expected[name], atol=1e-6), name


def test_adam_is_the_paper_s_with_its_decay_beside_the_gradient():
    model = small_model()
    optimizer, expected = made(model, "adam"), weights(model)
    mean = {name: torch.zeros_like(w) for name, w in expected.items()}
    square = {name: torch.zeros_like(w) for name, w in expected.items()}
    for step in range(3):
        for name, g in gradients(model, step).items():
            mean[name] = BETAS[0] * mean[name] + (1 - BETAS[0]) * g
            square[name] = BETAS[1] * square[name] + (1 - BETAS[1]) * g**2
            m = mean[name] / (1 - BETAS[0] ** (step + 1))
            v = square[name] / (1 - BETAS[1] ** (step + 1))
            decay = DECAY if name == "head.weight" else 0.0
            expected[name] -= LR * (m / (v.sqrt() + 1e-8) + decay * expected[name])
        optimizer.step()
    for name in ("head.weight", "head.bias", "cls_token"):
        assert torch.allclose(model.get_parameter(name), expected[name], atol=1e-5), name


@pytest.mark.parametrize("name", ["adamw", "sgd", "adam", "muon", "lion"])
def test_with_layer_decay_an_early_layer_moves_less_by_its_factor(name):
    plain, slowed = small_model(), small_model()
    before = weights(plain)
    for model, decay in ((plain, 1.0), (slowed, 0.5)):
        optimizer = made(model, name, layer_decay=decay)
        for group in optimizer.param_groups:
            group["lr"] = LR * group.get("lr_scale", 1.0)  # as the loop does
        gradients(model, seed=1)
        optimizer.step()
    for parameter, factor in {
        "patch_embed.proj.weight": 0.5**3, "blocks.0.attn.qkv.weight": 0.5**2,
        "blocks.1.mlp.fc1.weight": 0.5, "head.weight": 1.0,
    }.items():  # fmt: skip
        whole = plain.get_parameter(parameter) - before[parameter]
        part = slowed.get_parameter(parameter) - before[parameter]
        assert torch.allclose(part, factor * whole, atol=1e-6), parameter


@pytest.mark.parametrize("name", ["adamw", "sgd", "adam", "muon", "lamb", "lion", "adan", "laprop"])
def test_a_stored_and_restored_optimizer_makes_the_same_bits(name):
    """`laprop` has numbers in its state, `lamb`, `lion` and `adan` their steps in their groups."""
    straight, stopped = small_model(), small_model()
    one, two = made(straight, name, layer_decay=0.5), made(stopped, name, layer_decay=0.5)
    for step in range(5):
        if step == 3:
            part = OptimizerPart(two)
            tensors = {key: tensor.clone() for key, tensor in part.tensors().items()}
            metadata = json.loads(json.dumps(part.metadata()))
            two = made(stopped, name, layer_decay=0.5)
            OptimizerPart(two).load(tensors, metadata)
        for model, optimizer in ((straight, one), (stopped, two)):
            gradients(model, seed=step)
            optimizer.step()
    for key, value in weights(straight).items():
        assert torch.equal(value, stopped.get_parameter(key)), key


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "lbfgs": "--opt lbfgs evaluates the loss several times per step",
        "sam": "--opt sam evaluates the loss several times per step",
        "sophiah": "asks for second derivatives",
        "schedulefreeadamw": "trains other weights than it evaluates",
        "soap": "--opt soap cannot be used here: its state holds more than tensors and numbers",
        "stablespam": "a resumed run would not continue in the same way",
        "lomo": "opt lomo cannot be used here",
        "lyon": "--opt 'lyon' does not exist .did you mean 'lion'",
        "admw": "did you mean 'adamw'",
        "adamw2": "did you mean 'adamw' or 'adam'",
    }.items(),
)
def test_what_a_run_cannot_use_is_refused_by_name(name, message):
    with pytest.raises(SettingError, match=message):
        check_optimizer(name)


def test_the_library_is_asked_for_only_where_it_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    for name in ("adamw", "sgd", "adam", "muon"):
        check_optimizer(name)
    with pytest.raises(MissingExtraError, match=r"pip install 'vitkit\[optim\]'"):
        check_optimizer("lamb")
    with pytest.raises(MissingExtraError, match="did you mean 'adamw'"):
        check_optimizer("adamww")


def test_muon_without_a_matrix_to_train_is_refused():
    model = small_model()
    vitkit.freeze(model, "blocks")
    with pytest.raises(SettingError, match="all of them are frozen; pass --opt adamw"):
        made(model, "muon")


def test_batched_muon_has_the_bits_of_torch_s():
    """Several shapes, one matrix alone of its shape, one above the size that is batched."""
    shapes = [(24, 24)] * 4 + [(48, 24), (24, 48)] * 2 + [(8, 40), (300, 20), (20, 300)]
    ends = []
    for make in (
        lambda p: BatchedMuon(p, lr=1e-2, weight_decay=0.1),
        lambda p: optim.Muon(p, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ):
        draw = torch.Generator().manual_seed(0)
        matrices = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
        optimizer = make(matrices)
        for number in range(4):
            for matrix in matrices:
                matrix.grad = torch.randn(matrix.shape, generator=draw)
            matrices[number].grad = None
            optimizer.step()
        ends.append((matrices, optimizer.state_dict()["state"]))
    (ours, our_state), (theirs, their_state) = ends
    assert all(map(torch.equal, ours, theirs))
    assert our_state.keys() == their_state.keys()
    assert all(torch.equal(state["momentum_buffer"], their_state[number]["momentum_buffer"])
               for number, state in our_state.items())  # fmt: skip

"""Optimizers against their equations, their groups, rates and states; the choice of precision."""

import json
import math
import sys
from itertools import pairwise

import pytest
import torch
from noise import fill_with_noise

import vitkit
from vitkit.training.config.train_config import USUAL, RunConfig
from vitkit.training.optimization.optimizers import check_optimizer, configured_optimizer
from vitkit.training.optimization.parameters import learning_rate
from vitkit.training.optimization.precision import choose_kernel, choose_precision
from vitkit.training.state.registry import OptimizerPart

LR, DECAY, BETAS = 0.01, 0.1, (0.9, 0.95)


def small_model(seed: int = 0) -> vitkit.ViT:
    torch.manual_seed(seed)
    spec = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2,
            "mlp_width": 32, "num_classes": 3}  # fmt: skip
    return vitkit.ViT(vitkit.ViTSpec(**spec))


def made(model: vitkit.ViT, name: str, **settings: float) -> torch.optim.Optimizer:
    """Make an optimizer by the settings of a run."""
    usual = USUAL | {"lr": LR, "weight_decay": DECAY, "beta1": BETAS[0], "beta2": BETAS[1]}
    return configured_optimizer(model, RunConfig(data="", **usual | {"opt": name} | settings))


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
        "lbfgs": "--opt lbfgs cannot be used here",
        "sophiah": "--opt sophiah cannot be used here",
        "schedulefreeadamw": "trains other weights than it evaluates",
        "soap": "--opt soap cannot be used here: TypeError",
        "stablespam": "a resumed run would not continue in the same way",
        "lomo": "opt lomo cannot be used here",
        "lyon": "--opt 'lyon' does not exist .did you mean 'lion'",
        "admw": "did you mean 'adamw'",
        "adamw2": "did you mean 'adamw' or 'adam'",
    }.items(),
)
def test_what_a_run_cannot_use_is_refused_by_name(name, message):
    with pytest.raises(vitkit.SettingError, match=message):
        check_optimizer(name)


def test_the_library_is_asked_for_only_where_it_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    for name in ("adamw", "sgd", "adam", "muon"):
        check_optimizer(name)
    with pytest.raises(vitkit.MissingExtraError, match=r"pip install 'vitkit\[optim\]'"):
        check_optimizer("lamb")
    with pytest.raises(vitkit.MissingExtraError, match="did you mean 'adamw'"):
        check_optimizer("adamww")


def test_muon_moves_each_of_q_k_v_by_an_orthogonal_matrix_and_the_rest_as_adamw_does():
    muon, adamw = small_model(), small_model()
    before = {name: value.clone() for name, value in muon.state_dict().items()}
    for model, name in ((muon, "muon"), (adamw, "adamw")):
        optimizer = made(model, name, lr=0.1, weight_decay=0.0)
        gradients(model, seed=1)
        optimizer.step()
    moved = {name: before[name] - value for name, value in muon.state_dict().items()}
    for matrix in moved["blocks.0.attn.qkv.weight"].chunk(3):
        singular = torch.linalg.svdvals(matrix)  # lr * 0.2 * sqrt(16), Newton-Schulz is rough
        assert singular.min() > 0.5 * 0.1 * 0.2 * 16**0.5
        assert singular.max() < 1.3 * 0.1 * 0.2 * 16**0.5
    for name, value in adamw.state_dict().items():
        same = torch.equal(value, muon.state_dict()[name])
        assert same == (not (name.startswith("blocks.") and value.ndim == 2)), name


# Parameter groups, layer-wise learning rate decay, and freezing.


def small(**fields: object) -> vitkit.ViT:
    spec = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 3, "num_heads": 2,
            "mlp_width": 32, "num_classes": 5}  # fmt: skip
    return vitkit.ViT(vitkit.ViTSpec(**spec | fields))


def test_layer_decay_slows_the_early_layers():
    model = small(distillation_token=True, num_registers=2, layer_scale=0.1, embedding_norm=True)
    groups = vitkit.parameter_groups(model, lr=1.0, weight_decay=0.3, layer_decay=0.5)
    of = {id(p): group for group in groups for p in group["params"]}
    assert len(of) == len(list(model.parameters()))

    def group(name: str) -> dict:
        return of[id(model.get_parameter(name))]

    for name, rate in {
        "cls_token": 0.5**4, "reg_token": 0.5**4, "pos_embed": 0.5**4, "norm_pre.weight": 0.5**4,
        "patch_embed.proj.weight": 0.5**4, "blocks.0.attn.qkv.weight": 0.5**3,
        "blocks.2.mlp.fc1.bias": 0.5, "norm.weight": 1.0, "head_dist.weight": 1.0,
    }.items():  # fmt: skip
        assert group(name)["lr"] == pytest.approx(rate), name
        assert group(name)["lr_scale"] == group(name)["lr"]
    for name in ("cls_token", "dist_token", "reg_token", "pos_embed", "blocks.1.ls1.gamma",
                 "blocks.1.norm1.weight", "head.bias"):  # fmt: skip
        assert group(name)["weight_decay"] == 0.0, name
    for name in ("patch_embed.proj.weight", "blocks.1.mlp.fc2.weight", "head.weight"):
        assert group(name)["weight_decay"] == 0.3, name
    torch.optim.AdamW(groups).step()
    with pytest.raises(vitkit.SettingError, match=r"layer_decay 1\.5 must lie in \(0, 1\]"):
        vitkit.parameter_groups(small(), lr=0.1, weight_decay=0.3, layer_decay=1.5)


def test_frozen_parameters_stay_and_get_no_group():
    model = small()
    fill_with_noise(model)
    frozen = vitkit.freeze(model, "head", blocks=2)
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight", "head.bias"} <= set(frozen)
    assert not any(name.startswith(("blocks.2", "norm")) for name in frozen)
    groups = vitkit.parameter_groups(model, lr=0.5, weight_decay=0.1)
    taken = {id(p) for group in groups for p in group["params"]}
    assert taken == {id(p) for p in model.parameters() if p.requires_grad}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(groups)
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        if name in frozen:
            assert torch.equal(value, before[name]), name
    assert not torch.equal(model.norm.weight, before["norm.weight"])


def test_freezing_takes_patterns():
    model = small()
    assert vitkit.freeze(model, "blocks.*.attn.qkv") == [
        f"blocks.{layer}.attn.qkv.{kind}" for layer in range(3) for kind in ("weight", "bias")
    ]


def test_the_backbone_is_everything_but_the_head():
    model = small(distillation_token=True)
    frozen = vitkit.freeze(model, "backbone")
    left = [name for name, p in model.named_parameters() if p.requires_grad]
    assert left == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]
    assert sorted([*frozen, *left]) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("pattern", "message"),
    {
        "bakbone": "'bakbone' .did you mean 'backbone'\\?.; the model has backbone, cls_token, ",
        "blocks.9": "'blocks.9'.*; the model has .*, blocks.0 to blocks.2, norm, head$",
        "block.1": "did you mean 'blocks.1'",
        "blocks.2.atn": "did you mean 'blocks.2.attn'",
    }.items(),
)
def test_a_part_that_is_not_there_is_likened_to_those_that_are(pattern, message):
    with pytest.raises(vitkit.SettingError, match=message):
        vitkit.freeze(small(), pattern)


def test_biases_norms_tokens_and_positions_do_not_decay():
    model = vitkit.create_model("vit_tiny_patch16_224", depth=1, num_classes=2)
    decayed, free = vitkit.parameter_groups(model, lr=0.5, weight_decay=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "head.weight",
    }  # fmt: skip
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(free["params"]) == len(names)
    optimizer = made(model, "adamw", lr=0.5, weight_decay=0.1)
    with torch.no_grad():
        model.head.weight.fill_(1.0)
        model.norm.weight.fill_(1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model.head.weight, torch.tensor(1 - 0.5 * 0.1))
    assert torch.equal(model.norm.weight, torch.ones_like(model.norm.weight))


# The learning rate as a function of the step.

PEAK, LOW, WARMUP, TOTAL = 0.4, 0.1, 4, 16


def rates(schedule: str, low: float = LOW) -> list[float]:
    return [learning_rate(s, schedule, peak=PEAK, low=low, warmup=WARMUP, total=TOTAL)
            for s in range(TOTAL)]  # fmt: skip


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "rsqrt"])
def test_every_schedule_rises_linearly_to_its_peak(schedule):
    assert rates(schedule)[:WARMUP] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_what_comes_after_the_peak():
    t = [n / 12 for n in range(1, 13)]
    assert rates("cosine")[WARMUP:] == pytest.approx(
        [LOW + (PEAK - LOW) * 0.5 * (1 + math.cos(math.pi * x)) for x in t]
    )
    assert rates("linear")[WARMUP:] == pytest.approx([PEAK - 0.3 * x for x in t])
    assert rates("constant")[WARMUP:] == [PEAK] * 12
    assert rates("rsqrt")[WARMUP:] == pytest.approx([PEAK * 2 / n**0.5 for n in range(5, 17)])
    assert rates("rsqrt", low=0.3)[-1] == 0.3


def test_the_reciprocal_root_does_not_look_at_the_end_and_needs_a_warm_up():
    short = learning_rate(9, "rsqrt", peak=PEAK, low=0.0, warmup=4, total=10)
    assert short == learning_rate(9, "rsqrt", peak=PEAK, low=0.0, warmup=4, total=1000)
    with pytest.raises(vitkit.SettingError, match="pass --warmup-epochs above 0"):
        vitkit.show_batch("digits", sched="rsqrt", warmup_epochs=0.0)


def test_without_warm_up_the_first_step_is_at_the_peak_and_the_last_at_the_lowest():
    rates = [learning_rate(s, peak=PEAK, low=1e-5, warmup=0, total=TOTAL) for s in range(TOTAL)]
    assert rates[0] == PEAK
    assert rates[-1] == pytest.approx(1e-5)
    assert all(earlier > later for earlier, later in pairwise(rates))
    assert learning_rate(0, peak=PEAK, low=0.0, warmup=0, total=1) == PEAK


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"epochs": 1, "warmup_epochs": 0.95}, "--warmup-epochs 0.95 covers all 6 steps of the run"),
     ({"sched": "rsqrt", "warmup_epochs": 0.05}, "--warmup-epochs 0.05 rounds to no step, "
      ".* raise it to 0.17 or more")],
)  # fmt: skip
def test_a_warm_up_is_looked_at_in_steps(settings, message):
    with pytest.raises(vitkit.SettingError, match=message):
        vitkit.show_batch("digits", batch_size=200, device="cpu", **settings)


# Precision and attention kernel, chosen by processor, model and batch.

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
    if batch_size == 2:
        assert "a step of 4e+07 operations is too small" in reason
    assert choose_kernel(model, chosen, cpu) == ("fused" if precision == "off" else "plain")


def test_long_sequences_keep_the_fused_kernel():
    model = vitkit.create_model("vit_tiny_patch16_224", image_size=528, depth=1, num_classes=3)
    assert choose_kernel(model, "bfloat16", torch.device("cpu")) == "fused"

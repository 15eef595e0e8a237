"""The formulas of a plan against what torch counts: operations, parameters, activations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from vitkit.errors import SettingError
from vitkit.models.presets import preset, table
from vitkit.planning.activations import Arithmetic, image_activations
from vitkit.planning.flops import forward_flops, training_flops
from vitkit.planning.hardware import GPUS
from vitkit.planning.measure import kept_bytes
from vitkit.planning.memory import (
    MUON_BATCHED,
    Memory,
    Training,
    kept_copies,
    largest_batch,
    training_memory,
)
from vitkit.planning.sizes import PLANNED_STEMS, check_planned, count_parameters
from vitkit.planning.throughput import gpu_rates, step_time
from vitkit.training.optimization.muon import LARGEST
from vitkit.training.optimization.optimizers import make_optimizer

SMALL = {"image_size": 48, "patch_size": 4, "width": 64, "depth": 2, "num_heads": 4,
         "mlp_width": 256, "num_classes": 10}  # fmt: skip
DESIGNS = {
    "plain": {},
    "swiglu": {"mlp": "swiglu_packed", "activation": "silu"},
    "split swiglu, registers, LayerScale": {
        "mlp": "swiglu_split", "activation": "silu", "num_registers": 4, "layer_scale": 0.1},
    "MAP": {"pooling": "map", "class_token": False},
    "no class token": {"class_token": False, "pooling": "mean", "positions": "sincos_2d"},
    "distilled": {"distillation_token": True, "representation_width": 32},
    "narrow heads, RMSNorm": {"head_width": 8, "qkv_bias": "no_key", "norm": "rms",
                              "embedding_norm": True},
    "rotary, norms of queries": {"positions": "rope", "qk_norm": True},
    "norms of patches": {"stem": "normed_linear", "pooling": "cls_mean",
                         "norm_before_pool": False},
    "post-norm": {"block": "post_norm", "activation": "relu"},
    "norms of branches": {"block": "res_post_norm", "activation": "quick_gelu"},
}  # fmt: skip
MEASURED = {
    path.name.split("-")[2]: json.loads(path.read_text(encoding="utf-8"))
    for path in (Path(__file__).parents[2] / "benchmarks/results").glob("gpu-nvidia-*.json")
}
"""Results of `benchmarks/gpu.py`, by the names that `--gpu` has for them."""
NAMES = {"Ti": "vit_tiny_patch16_224", "S": "vit_small_patch16_224", "B": "vit_base_patch16_224"}


def without_images(memory: Memory) -> int:
    """Return the peak as it was measured: the images were there before."""
    return memory.peak - memory.images


def design(name: str) -> vitkit.ViTSpec:
    return vitkit.ViTSpec(**SMALL | DESIGNS[name])


@pytest.mark.parametrize(
    ("name", "giga"),
    [("vit_tiny_patch16_224", 2.507), ("vit_small_patch16_224", 9.198),
     ("vit_base_patch16_224", 35.13), ("vit_large_patch16_224", 123.1),
     ("vit_huge_patch14_224", 334.6)],
)  # fmt: skip
def test_operations_of_the_usual_models(name, giga):
    assert forward_flops(preset(name)).total / 1e9 == pytest.approx(giga, rel=4e-4)
    assert training_flops(preset(name)) == 3 * forward_flops(preset(name)).total


@pytest.mark.parametrize("name", DESIGNS)
def test_operations_and_parameters_are_those_that_torch_counts(name):
    spec = design(name)
    counted = vitkit.summary(vitkit.ViT(spec))
    assert forward_flops(spec).total == 2 * counted.mult_adds
    assert count_parameters(spec).total == counted.parameters


def test_parameters_of_every_named_model():
    wrong = {}
    for name, entry in table().items():
        spec = preset(name)
        if spec.stem in PLANNED_STEMS:
            wrong[name] = count_parameters(spec).total - entry.parameters
    assert len(wrong) > 150
    assert set(wrong.values()) == {0}


def test_patch_dropout_saves_operations_in_training():
    spec = vitkit.ViTSpec(patch_dropout=0.5)
    assert training_flops(spec) < 0.52 * training_flops(vitkit.ViTSpec())
    assert forward_flops(spec) == forward_flops(vitkit.ViTSpec())


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize(
    ("amp", "kernel", "recompute"),
    [("off", "fused", False), ("off", "fused", True), ("off", "plain", False),
     ("bfloat16", "plain", False)],
)  # fmt: skip
def test_activations_are_what_autograd_keeps(name, amp, kernel, recompute):
    arithmetic = Arithmetic(amp, kernel, on_gpu=False)
    training = Training(spec=design(name), arithmetic=arithmetic, recompute=recompute)
    each = image_activations(training.spec, arithmetic).stored(recompute)
    formula = 4 * each + kept_copies(training)
    assert formula == pytest.approx(kept_bytes(training, 4), rel=0.1)


@pytest.mark.parametrize("gpu", MEASURED)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_memory_and_time_of_a_step_on_a_gpu(gpu, name, how):
    measured = MEASURED[gpu]["training"][name]["rows"][f"vitkit {how}"]
    training = Training(spec=preset(NAMES[name]))
    compare_with_gpu(training, 256, gpu, measured, compiled=how == "compiled")


@pytest.mark.parametrize("gpu", MEASURED)
@pytest.mark.parametrize("images", ["64", "128", "256"])
@pytest.mark.parametrize("row", ["nothing recomputed", "block"])
def test_checkpointing_on_a_gpu(gpu, images, row):
    training = Training(spec=preset(NAMES["B"]), recompute=row == "block")
    compare_with_gpu(training, int(images), gpu, MEASURED[gpu]["checkpointing"][images][row])


def compare_with_gpu(
    training: Training, images: int, gpu: str, measured: dict[str, float], compiled: bool = False
) -> None:
    peak = without_images(training_memory(training, images))
    assert peak / 1e9 == pytest.approx(measured["peak_gb"], rel=0.1)
    step = step_time(training, images, gpu_rates(GPUS[gpu], Arithmetic()), compiled=compiled)
    # launches depend on the processor beside the GPU, and the formula has that of the H100's
    if gpu == "h100" or step.launches < step.products + step.attention + step.traffic:
        assert step.total == pytest.approx(measured["seconds"], rel=0.25)


def test_optimizers_and_shards():
    spec = preset(NAMES["B"])
    parameters = count_parameters(spec)
    states = {}
    for name in ("adamw", "sgd", "muon"):
        states[name] = training_memory(Training(spec=spec, optimizer=name), 1).optimizer
    assert states["adamw"] == 8 * parameters.total == 2 * states["sgd"]
    # one momentum for each number of the blocks' matrices
    assert states["adamw"] - states["muon"] == 4 * 12 * (4 * 768**2 + 2 * 768 * 3072)
    whole = training_memory(Training(spec=spec, devices=8, ema=True), 1)
    parts = training_memory(Training(spec=spec, devices=8, ema=True, parallel="fsdp"), 1)
    for part in ("weights", "gradients", "optimizer", "ema"):
        assert getattr(whole, part) == pytest.approx(8 * getattr(parts, part), abs=8)
    assert parts.peak < whole.peak
    assert parts.activations == whole.activations


@pytest.mark.parametrize("name", ["plain", "swiglu", "split swiglu, registers, LayerScale"])
def test_operations_of_an_update_by_muon_are_those_that_torch_counts(name):
    spec, rates = design(name).replace(depth=1), gpu_rates(GPUS["h100"], Arithmetic())
    model = vitkit.ViT(spec)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(model, "muon", lr=1e-3, weight_decay=0.0, betas=(0.9, 0.99))
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    seconds = {}
    for opt in ("adamw", "muon"):
        seconds[opt] = step_time(Training(spec=spec, optimizer=opt), 1, rates).products
    more = (seconds["muon"] - seconds["adamw"]) * rates.products
    assert more == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_muon_orthogonalises_large_matrices_one_by_one():
    assert MUON_BATCHED == LARGEST
    more = {}
    for name in ("Ti", "B"):
        spec = preset(NAMES[name]).replace(mlp_width=256 if name == "Ti" else 3072)
        # no activations, so that the update is the peak
        training = Training(spec=spec, optimizer="muon", arithmetic=Arithmetic("off"))
        memory = training_memory(training, 0)
        more[name] = memory.peak - memory.weights - memory.gradients - memory.optimizer
    # a direction in float32 and three copies in bfloat16
    assert more == {"Ti": 10 * 12 * 4 * 192 * 192, "B": 10 * 768 * 3072}


def test_the_peak_has_the_images_in_float32():
    spec = design("plain").replace(in_channels=1, image_size=(48, 64))
    few, many = (training_memory(Training(spec=spec), images) for images in (1, 10_000))
    assert (few.images, many.images) == (4 * 48 * 64, 4 * 48 * 64 * 10_000)
    # all else that an image needs follows from its tokens and patches
    each = (many.peak - many.images) / 10_000
    kept = (many.activations + many.temporary) / 10_000
    assert each == pytest.approx(kept, rel=1e-3)


def test_the_largest_batch_is_the_largest():
    training = Training(spec=preset(NAMES["B"]))
    most = largest_batch(training, 22e9)
    assert training_memory(training, most).peak <= 22e9 < training_memory(training, most + 1).peak
    # gradients of earlier micro-batches need room
    assert largest_batch(training, 22e9, accumulated=True) < most
    assert largest_batch(training, 1e9) == 0


def test_exchanges_take_time_where_the_link_is_slow():
    rates = gpu_rates(GPUS["t4"], Arithmetic("float16"))
    steps = {}
    for parallel in ("ddp", "fsdp"):
        training = Training(spec=preset(NAMES["B"]), devices=8, parallel=parallel)
        steps[parallel] = step_time(training, 1, rates, link=1e9)
        fast = step_time(training, 64, rates, link=1e12)
        assert fast.waiting < 0.01 * fast.total
    # 7/8 of 4 bytes a parameter, sent twice or three times at 80 % of the link
    once = 7 / 8 * 4 * count_parameters(preset(NAMES["B"])).total / 0.8e9
    assert steps["ddp"].exchange == pytest.approx(2 * once)
    assert steps["fsdp"].exchange == pytest.approx(3 * once)
    assert steps["ddp"].waiting > 0.4 * steps["ddp"].exchange


def test_a_network_before_the_patches_is_refused():
    spec = vitkit.ViTSpec(stem="resnet", resnet_layers=(3, 4, 9))
    with pytest.raises(SettingError, match=re.escape("'resnet' has a network before")):
        check_planned(spec)

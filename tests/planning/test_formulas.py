"""The formulas of a plan against what torch counts: operations, parameters, activations."""

import runpy
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from vitkit.models.presets import preset, table
from vitkit.planning import (
    GPUS,
    PRODUCTS_SHARE,
    Training,
    count_parameters,
    forward_flops,
    largest_batch,
    step_time,
    training_flops,
    training_memory,
)
from vitkit.training.config.train_config import USUAL, RunConfig
from vitkit.training.optimization.optimizers import configured_optimizer

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/scaling.py"))
NAMES = BENCHMARK["NAMES"]
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


# The formulas are those of a GPU. There RMSNorm is one operation, and autocast keeps float32 copies
# of what norms take: of tokens without learned ones, of query and key, and of branches.
OTHERS_ON_A_PROCESSOR = {
    False: {"narrow heads, RMSNorm"},
    True: {"narrow heads, RMSNorm", "no class token", "rotary, norms of queries",
           "norms of branches"},
}  # fmt: skip


def design(name: str) -> vitkit.ViTSpec:
    return vitkit.ViTSpec(**SMALL | DESIGNS[name])


@pytest.mark.parametrize(
    ("name", "giga"),
    [("vit_tiny_patch16_224", 2.507), ("vit_small_patch16_224", 9.198),
     ("vit_base_patch16_224", 35.13), ("vit_large_patch16_224", 123.1),
     ("vit_huge_patch14_224", 334.6)],
)  # fmt: skip
def test_operations_of_the_usual_models(name, giga):
    assert sum(forward_flops(preset(name))) / 1e9 == pytest.approx(giga, rel=4e-4)
    run = Training(spec=preset(name))
    assert training_flops(run) == 3 * sum(forward_flops(run.spec))


@pytest.mark.parametrize("name", DESIGNS)
def test_operations_and_parameters_are_those_that_torch_counts(name):
    spec = design(name)
    counted = vitkit.summary(vitkit.ViT(spec))
    assert sum(forward_flops(spec)) == 2 * counted.mult_adds
    assert count_parameters(spec).total == counted.parameters


def test_parameters_of_every_named_model():
    wrong = {}
    for name, entry in table().items():
        spec = preset(name)
        if spec.stem != "resnet":
            wrong[name] = count_parameters(spec).total - entry.parameters
    assert len(wrong) > 150
    assert set(wrong.values()) == {0}


def test_patch_dropout_saves_operations_in_training():
    spec = vitkit.ViTSpec(patch_dropout=0.5)
    assert training_flops(Training(spec=spec)) < 0.52 * training_flops(
        Training(spec=vitkit.ViTSpec())
    )
    assert forward_flops(spec) == forward_flops(vitkit.ViTSpec())


@pytest.mark.parametrize(
    ("name", "mixed", "recompute"),
    [(name, mixed, recompute)
     for mixed, recompute in ((False, False), (False, True), (True, False))
     for name in DESIGNS if name not in OTHERS_ON_A_PROCESSOR[mixed]],
)  # fmt: skip
def test_activations_are_what_autograd_keeps(name, mixed, recompute):
    run = Training(spec=design(name), mixed=mixed, recompute=recompute)
    counted = BENCHMARK["kept_bytes"](run, 4)
    assert BENCHMARK["kept_by_formula"](run, 4) == pytest.approx(counted, rel=0.06)


@pytest.mark.parametrize(
    "case", list(BENCHMARK["gpu_cases"]()), ids=lambda case: " ".join(case[:2])
)
def test_memory_and_time_of_a_step_on_a_gpu(case):
    gpu, _, run, images, measured = case
    peak = BENCHMARK["peak_without_images"](run, images)
    assert peak / 1e9 == pytest.approx(measured["peak_gb"], rel=0.1)
    step = step_time(run, images, GPUS[gpu])
    # launches depend on the processor beside the GPU, and the formula has that of the H100's
    if gpu == "h100" or step["launches"] < step["products"] + step["attention"] + step["traffic"]:
        assert step["total"] == pytest.approx(measured["seconds"], rel=0.25)


def test_optimizers_and_shards():
    spec = preset(NAMES["B"])
    parameters = count_parameters(spec)
    states = {}
    for name in ("adamw", "sgd", "muon"):
        states[name] = training_memory(Training(spec=spec, opt=name), 1)["optimizer"]
    assert states["adamw"] == 8 * parameters.total == 2 * states["sgd"]
    # one momentum for each number of the blocks' matrices
    matrices = 12 * (4 * 768**2 + 2 * 768 * 3072)
    assert states["adamw"] - states["muon"] == pytest.approx(4 * matrices, rel=2e-3)
    whole = training_memory(Training(spec=spec, gpus=8, model_ema=True), 1)
    parts = training_memory(Training(spec=spec, gpus=8, model_ema=True, shards=8), 1)
    for part in ("weights", "gradients", "optimizer", "ema"):
        assert whole[part] == pytest.approx(8 * parts[part], abs=8)
    assert parts["peak"] < whole["peak"]
    assert parts["activations"] == whole["activations"]


@pytest.mark.parametrize("name", ["plain", "swiglu", "split swiglu, registers, LayerScale"])
def test_operations_of_an_update_by_muon_are_those_that_torch_counts(name):
    spec = design(name).replace(depth=1)
    model = vitkit.ViT(spec)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = configured_optimizer(model, RunConfig(data="", **USUAL | {"opt": "muon"}))
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    muon, adamw = (
        step_time(Training(spec=spec, opt=opt), 1, GPUS["h100"])["products"]
        for opt in ("muon", "adamw")
    )
    operations = (muon - adamw) * PRODUCTS_SHARE * 1e12 * GPUS["h100"].half_tflops
    assert operations == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_the_peak_has_the_images_in_float32():
    spec = design("plain").replace(in_channels=1, image_size=(48, 64))
    few, many = (training_memory(Training(spec=spec), images) for images in (1, 10_000))
    assert (few["images"], many["images"]) == (4 * 48 * 64, 4 * 48 * 64 * 10_000)
    # all else that an image needs follows from its tokens and patches
    each = (many["peak"] - many["images"]) / 10_000
    kept = (many["activations"] + many["temporary"]) / 10_000
    assert each == pytest.approx(kept, rel=1e-3)


def test_the_largest_batch_is_the_largest():
    run = Training(spec=preset(NAMES["B"]))
    most = largest_batch(run, 22e9)
    peaks = [training_memory(run, images)["peak"] for images in (most, most + 1)]
    assert peaks[0] <= 22e9 < peaks[1]
    assert largest_batch(run, 1e9) == 0

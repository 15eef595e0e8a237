"""Engines of torch: the same outputs to rounding, in float64, for every kind of model."""

import copy
from collections.abc import Callable

import pytest
import torch
from noise import fill_with_noise
from torch import nn

import vitkit
from vitkit import SettingError
from vitkit.engines import inference_folds as kernels
from vitkit.engines.engine import SingleImageGraph, build_engine

SMALL = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 2, "num_heads": 2,
         "mlp_width": 24, "num_classes": 5, "layer_scale": 0.1}  # fmt: skip
KINDS = {
    "plain": {},
    "post_norm": {"block": "post_norm"},
    "res_post_norm": {"block": "res_post_norm"},
    "swiglu_packed": {"mlp": "swiglu_packed", "activation": "silu", "num_registers": 2},
    "swiglu_split": {"mlp": "swiglu_split", "activation": "silu"},
    "no_qkv_bias": {"qkv_bias": False},
    "no_key_bias": {"qkv_bias": "no_key"},
    "qk_norm": {"qk_norm": True},
    "rope": {"positions": "rope", "class_token": False, "pooling": "mean"},
    "rms": {"norm": "rms", "qk_norm": True},
    "distilled": {"distillation_token": True},
    "map": {"pooling": "map", "class_token": False},
    "resnet": {"stem": "resnet", "resnet_layers": (1, 1), "embedding_norm": True},
}


def noisy(**fields: object) -> vitkit.ViT:
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL | fields)).double().eval()
    fill_with_noise(model, std=0.4)
    return model


def some_images(count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 32, 32, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folded_model_computes_the_same(kind):
    model, images = noisy(**KINDS[kind]), some_images()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fast = vitkit.optimized(model, measure=False)
    records = [vitkit.Record(attention=[0, 1], tokens=[0]) for _ in range(2)]
    with torch.inference_mode():
        torch.testing.assert_close(fast(images), model(images), rtol=1e-9, atol=1e-9)
        ours, theirs = fast.forward_features(images), model.forward_features(images)
        torch.testing.assert_close(ours.patches, theirs.patches, rtol=1e-9, atol=1e-9)
        fast(images, records[0])
        model(images, records[1])
    for layer in (0, 1):
        torch.testing.assert_close(records[0].attention[layer], records[1].attention[layer])
    torch.testing.assert_close(records[0].tokens[0], records[1].tokens[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_operations_are_gone():
    fast = kernels.fold_for_inference(noisy())
    for block in fast.blocks:
        assert block.norm1.weight is None
        assert block.norm2.weight is None
        assert isinstance(block.ls1, nn.Identity)
        assert isinstance(block.ls2, nn.Identity)
    assert fast.norm.weight is not None, "features after the last norm stay the same"


@pytest.mark.parametrize("fields", [{}, {"stem": "linear", "patch_bias": False}])
def test_pixels_go_in_where_the_normalisation_is_folded(fields):
    model = noisy(**fields)
    preprocess = vitkit.Preprocess(image_size=32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1))
    fast = vitkit.optimized(model, preprocess=preprocess, measure=False)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mean = torch.tensor(preprocess.mean, dtype=torch.float64)[:, None, None]
    std = torch.tensor(preprocess.std, dtype=torch.float64)[:, None, None]
    with torch.inference_mode():
        expected = model((pixels.double() / 255 - mean) / std)
        torch.testing.assert_close(fast(pixels), expected, rtol=1e-9, atol=1e-9)


def test_the_normalisation_cannot_go_into_a_resnet():
    with pytest.raises(SettingError, match="the stem of this model is 'resnet'"):
        vitkit.optimized(noisy(**KINDS["resnet"]), preprocess=vitkit.Preprocess(image_size=32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"precision": "int8"}, "use float32 or bfloat16"), ({"model": "b.pt"}, "not a str")],
)
@pytest.mark.usefixtures("wrong_types_come_in")
def test_wrong_arguments(arguments, message):
    with pytest.raises(SettingError, match=message):
        vitkit.optimized(**{"model": noisy()} | arguments)


def test_measured_kernels_compute_the_same():
    model, images = noisy().float(), some_images().float()
    for precision, tolerance in (("float32", 1e-4), ("bfloat16", 0.2)):
        fast = vitkit.optimized(model, precision=precision, batch_size=2)
        with torch.inference_mode():
            torch.testing.assert_close(
                fast(images).float(), model(images), rtol=tolerance, atol=tolerance
            )
        assert next(fast.parameters()).dtype == getattr(torch, precision)
        assert not any(parameter.requires_grad for parameter in fast.parameters())


@pytest.mark.skipif(not kernels.can_pack(torch.float32), reason="torch has no oneDNN here")
@pytest.mark.parametrize(("slower", "bias"), [(1.05, True), (1.2, True), (1.2, False)])
def test_other_kernels_are_taken_only_where_they_are_clearly_faster(monkeypatch, slower, bias):
    def times(calls: dict[str, object]) -> dict[str, float]:
        return {name: slower if name in ("fused", "torch") else 1.0 for name in calls}

    monkeypatch.setattr(kernels, "in_turns", times)
    model, images = noisy(qkv_bias=bias).float(), some_images().float()
    fast = vitkit.optimized(model, batch_size=2)
    layers = [m for m in fast.blocks.modules() if isinstance(m, nn.Linear | kernels.PackedLinear)]
    assert {type(layer) is kernels.PackedLinear for layer in layers} == {slower > 1.1}
    assert ("plain" in fast.blocks[0].attn.attend.__name__) == (slower > 1.1)
    with torch.inference_mode():
        torch.testing.assert_close(fast(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mlp", ["plain", "swiglu_packed"])
def test_a_fused_gelu_is_that_of_the_layer_before(mlp):
    activation = "gelu" if mlp == "plain" else "silu"
    model, images = noisy(mlp=mlp, activation=activation), some_images()
    hooked = model.blocks[1].mlp.fc1.register_forward_hook(lambda *_: None)
    with torch.inference_mode():
        expected = model(images)
        kernels.fuse_gelu(model)
        torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-9)
    fused = [type(block.mlp.fc1) is kernels.GeluLinear for block in model.blocks]
    assert fused == [mlp == "plain", False]  # hooks see the output of the layer
    hooked.remove()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("engine", ["torch", "compile"])
def test_engines_on_a_gpu_fuse_gelu_in_bfloat16(engine):
    model, images = noisy(width=64, mlp_width=256).float().cuda(), some_images(8).float().cuda()
    with torch.inference_mode():
        made = build_engine(engine, model, precision="bfloat16")(images)
        fast = vitkit.optimized(model, precision="bfloat16")(images).float()
        plain = copy.deepcopy(model).bfloat16()(images.bfloat16()).float()
        expected = model(images)
        names = record_kernels(lambda: build_engine("torch", model, precision="bfloat16")(images))
    for logits in (made, fast):
        assert (logits - expected).abs().max() <= 3 * (plain - expected).abs().max()
    assert not any("gelucudakernel" in name for name in names), names  # torch's own


def record_kernels(call: Callable[[], object]) -> set[str]:
    """Return the names of the kernels that a call starts on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return {event.key.lower() for event in seen.key_averages()}


class Adapted(nn.Linear):
    """A layer of the user's own: W x + b, and more."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 0.1 * input.mean(-1, keepdim=True)


@pytest.mark.parametrize("part", ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"])
def test_layers_of_others_stay_as_they_are(part):
    model, images = noisy(), some_images()
    for block in model.blocks:
        block.get_submodule(part).__class__ = Adapted
    with torch.inference_mode():
        fast = vitkit.optimized(model, measure=False)
        torch.testing.assert_close(fast(images), model(images), rtol=1e-9, atol=1e-9)
    hooked = noisy()
    hooked.blocks[0].get_submodule(part).register_forward_hook(lambda *call: 2 * call[2])
    with torch.inference_mode():
        fast = vitkit.optimized(hooked, measure=False)
        torch.testing.assert_close(fast(images), hooked(images), rtol=1e-9, atol=1e-9)


def test_features_take_images_of_any_dtype():
    fast = vitkit.optimized(noisy().float(), precision="bfloat16", measure=False)
    with torch.inference_mode():
        features = fast.forward_features(some_images().float())
    assert features.patches.dtype == torch.bfloat16


def test_the_second_single_image_of_a_kind_makes_the_graph():
    captured: list[tuple[torch.Size, torch.dtype]] = []
    replayed: list[torch.Tensor] = []

    def double(images: torch.Tensor) -> torch.Tensor:
        return 2 * images.flatten(1)

    def capture(forward, images):
        captured.append((images.shape, images.dtype))

        def replay(images: torch.Tensor) -> torch.Tensor:
            replayed.append(images)
            return forward(images)

        return replay

    run = SingleImageGraph(double, capture)
    small, large, many = torch.rand(1, 3, 8, 8), torch.rand(1, 3, 16, 16), torch.rand(2, 3, 8, 8)
    # a graph of the first kind that comes twice in turn; no other one after it
    calls = [many, many, large, small, small, small.double(), large, large, many, small]
    for images in calls:
        assert torch.equal(run(images), double(images))
    assert captured == [(small.shape, torch.float32)]
    assert [images is small for images in replayed] == [True, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_replays_give_the_logits_of_the_model_each_in_memory_of_its_own():
    model = noisy().float().cuda()
    images = torch.randn(5, 3, 32, 32, device="cuda")
    with torch.inference_mode():
        run = build_engine("torch", model)
        outputs = [run(image[None]) for image in images]
        torch.testing.assert_close(torch.cat(outputs), model(images), rtol=1e-4, atol=1e-4)

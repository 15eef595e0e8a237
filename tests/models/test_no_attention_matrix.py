"""Without a record no (T, T) matrix is made, seen by what a forward pass allocates."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from noise import fill_with_noise
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import vitkit

B, HEADS, TOKENS = 2, 4, 577
SPEC = vitkit.ViTSpec(image_size=192, patch_size=8, width=64, depth=2, num_heads=HEADS,
                      mlp_width=128, num_classes=3)  # fmt: skip
FEWEST = 576
"""Tokens without a class token."""
MATRIX = FEWEST**2
"""Numbers in the matrix of one head of one image; nothing else of this model has as many."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The fused kernel's scratch space is per thread: 65,536 numbers each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def large(work: Callable[[], object]) -> list[int]:
    """Numbers in each tensor that `work` allocates, or an operator takes, of MATRIX or more."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True
    ) as seen:
        work()
    events = seen.profiler.kineto_results.events()
    allocated = [event.nbytes() // 4 for event in events if event.name() == "[memory]"]
    assert max(allocated) > B * TOKENS * 64, "the detector must see the tokens themselves"
    taken = [math.prod(shape) for event in seen.events() for shape in event.input_shapes if shape]
    return [numbers for numbers in (*allocated, *taken) if numbers >= MATRIX]


def model_of(**changes: object) -> vitkit.ViT:
    model = vitkit.ViT(SPEC.replace(**changes)).eval()
    fill_with_noise(model)
    return model


VARIATIONS = {
    "plain": {},
    "registers": {"num_registers": 4},
    "rope": {"positions": "rope", "num_registers": 4, "layer_scale": 1e-5},
    "gated": {"mlp": "swiglu_packed", "activation": "silu", "qk_norm": True},
    "map": {"pooling": "map", "class_token": False},
    "distilled": {"distillation_token": True},
    "post_norm": {"block": "post_norm", "qkv_bias": "no_key"},
}


@pytest.fixture
def images() -> Tensor:
    return torch.randn(B, 3, 192, 192, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", VARIATIONS)
@torch.inference_mode()
def test_a_forward_pass_allocates_no_matrix(name, images):
    model = model_of(**VARIATIONS[name])
    assert large(lambda: model(images)) == []
    # The control: a record of one layer is seen, all heads and images of it.
    record = vitkit.Record(attention=[1])
    found = large(lambda: model(images, record))
    tokens = record.attention[1].shape[-1]
    assert tokens >= FEWEST
    assert B * HEADS * tokens**2 in found


@torch.inference_mode()
def test_only_the_layers_asked_for_make_one_and_rows_are_small(images):
    model = model_of()
    whole = B * HEADS * TOKENS**2

    def made(record: vitkit.Record) -> int:
        return large(lambda: model(images, record)).count(whole)

    assert made(vitkit.Record(attention=[0, 1])) == 2 * made(vitkit.Record(attention=[0])) > 0
    assert large(lambda: model(images, vitkit.Record(attention=[0, 1], queries=[0]))) == []
    assert large(lambda: model(images, vitkit.Record(tokens=[0, 1]))) == []


def test_a_training_step_allocates_none_either(images):
    model = model_of().train()

    def step() -> None:
        model(images).sum().backward()

    assert large(step) == []

"""Single images on a GPU, whose kernels one graph starts."""

from __future__ import annotations

import pytest
import torch
from noise import fill_with_noise

import vitkit
from vitkit.engines.engine import build_engine
from vitkit.engines.torch_engines import SingleImageGraph

SMALL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "num_heads": 2,
         "mlp_width": 64, "num_classes": 5}  # fmt: skip


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
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL)).eval().cuda()
    fill_with_noise(model, std=0.2)
    images = torch.randn(5, 3, 32, 32, device="cuda")
    with torch.inference_mode():
        run = build_engine("torch", model)
        outputs = [run(image[None]) for image in images]
        torch.testing.assert_close(torch.cat(outputs), model(images), rtol=1e-4, atol=1e-4)

"""Tools that people bring along work on a ViT as they are: each a small example, and a figure."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from peers import noisy_vit, peer, random_images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import vitkit

SPEC = vitkit.ViTSpec(image_size=(32, 48), patch_size=8, width=32, depth=2, num_heads=2,
                      mlp_width=64, num_classes=5)  # fmt: skip


@pytest.fixture
def model() -> vitkit.ViT:
    model = noisy_vit(SPEC).eval()
    with torch.no_grad():  # larger matrices than noise gives, so that images matter
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.weight.mul_(10)
    return model


@pytest.fixture
def images() -> Tensor:
    return random_images(2, *SPEC.image_size)


@pytest.mark.parametrize("changes", [{}, {"num_registers": 4, "distillation_token": True}])
def test_torchinfo_counts_the_same_parameters(changes, images):
    """Its mult-adds are another matter: it leaves attention out."""
    summary = peer("torchinfo", "summary")
    model = noisy_vit(SPEC.replace(**changes))
    table = summary(model, input_data=images, verbose=0)
    assert table.total_params == sum(p.numel() for p in model.parameters())
    assert table.total_params == vitkit.summary(model).parameters
    assert list(table.summary_list[0].output_size) == [2, SPEC.num_classes]


def test_grad_cam_draws_a_map_of_the_image_s_size(model, images):
    cam_class = peer("pytorch_grad_cam", "GradCAM")
    target = peer("pytorch_grad_cam.utils.model_targets", "ClassifierOutputTarget")

    def as_map(tokens: Tensor) -> Tensor:
        """(B, T, D) -> (B, D, gh, gw): the patches, where the grid has them."""
        patches = tokens[:, model.spec.num_prefix_tokens :]
        return patches.transpose(1, 2).unflatten(2, model.spec.grid)

    layers = [model.blocks[-1].norm1]
    with cam_class(model=model, target_layers=layers, reshape_transform=as_map) as cam:
        maps = [cam(input_tensor=images, targets=[target(k)] * 2) for k in range(2)]
    assert maps[0].shape == (2, *SPEC.image_size)
    for drawn in np.concatenate(maps):
        assert np.isfinite(drawn).all()
        assert np.ptp(drawn) > 0.1
    assert not np.allclose(maps[0], maps[1]), "another class, the same map"


def test_captum_s_integrated_gradients_are_complete(model, images):
    """Axiom 1 of arXiv 1703.01365: attributions sum up to f(x) - f(0)."""
    method = peer("captum.attr", "IntegratedGradients")
    with torch.no_grad():
        differences = model(images) - model(torch.zeros_like(images))
    target = differences.abs().argmax(dim=1)
    expected = differences[range(2), target]
    assert expected.abs().min() > 0.1
    attributions = method(model).attribute(images, baselines=0.0, target=target, n_steps=64)
    assert attributions.shape == images.shape
    sums = attributions.sum(dim=(1, 2, 3)).float()
    torch.testing.assert_close(sums, expected, rtol=0.02, atol=0)


def test_peft_trains_lora_beside_frozen_weights_and_merges_it(model, images, tmp_path):
    """`proj` is the attention's output and the patch convolution: LoRA takes both."""
    config, wrap = peer("peft", "LoraConfig", "get_peft_model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(images).detach()
    settings = config(r=4, target_modules=["qkv", "proj"], modules_to_save=["head"])
    tuned = wrap(model, settings)
    trained = [name for name, p in tuned.named_parameters() if p.requires_grad]
    assert all("lora_" in name or "head.modules_to_save" in name for name in trained)
    assert sum("lora_" in name for name in trained) == 2 * (2 * SPEC.depth + 1)
    torch.testing.assert_close(tuned(images), logits)

    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):  # the first step only moves B, which starts at zero
        optimizer.zero_grad()
        F.cross_entropy(tuned(images), torch.tensor([1, 2])).backward()
        optimizer.step()
    after = tuned.eval()(images).detach()
    assert (after - logits).abs().max() > 0.01

    merged = tuned.merge_and_unload()
    assert isinstance(merged, vitkit.ViT)
    torch.testing.assert_close(merged(images), after, rtol=1e-5, atol=1e-5)
    assert list(merged.state_dict()) == list(before)
    changed = {n for n, value in merged.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {
        "patch_embed.proj.weight", "head.weight", "head.bias",
        *(f"blocks.{i}.attn.{part}.weight" for i in range(SPEC.depth) for part in ("qkv", "proj")),
    }  # fmt: skip
    path = vitkit.save(tmp_path / "merged.safetensors", merged, preprocess=vitkit.Preprocess())
    torch.testing.assert_close(vitkit.load(path).model(images), merged(images), rtol=0, atol=0)


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """accelerate keeps the process's set-up in a global, which outlives a test."""
    state = peer("accelerate.state", "AcceleratorState")
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_state")
def test_accelerate_runs_a_step_and_its_model_saves(model, images, tmp_path):
    accelerator = peer("accelerate", "Accelerator")(cpu=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(images, torch.tensor([1, 2])), batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    steps = 0
    for batch, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(prepared(batch), labels))
        optimizer.step()
        steps += 1
    assert steps == 1
    unwrapped = accelerator.unwrap_model(prepared)
    assert isinstance(unwrapped, vitkit.ViT)
    assert not any(torch.equal(v, before[name]) for name, v in unwrapped.state_dict().items())
    path = vitkit.save(tmp_path / "last.safetensors", unwrapped, preprocess=vitkit.Preprocess())
    stored = vitkit.load(path).model
    torch.testing.assert_close(stored(images), unwrapped.eval()(images), rtol=0, atol=0)

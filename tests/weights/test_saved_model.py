"""What `save` writes, `load` reads with the same logits; what no file can hold is refused."""

import logging
from pathlib import Path

import pytest
import torch
from noise import fill_with_noise
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import vitkit
from vitkit import CheckpointError

SPEC = vitkit.ViTSpec(
    image_size=16, patch_size=4, num_classes=3, width=16, depth=2, num_heads=2, mlp_width=32
)
PIXELS = vitkit.Preprocess(image_size=16)
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> vitkit.ViT:
    model = vitkit.ViT(SPEC)
    fill_with_noise(model, std=0.3)
    return model.eval()


def watched(model: vitkit.ViT) -> nn.Module:
    """Hooks that only look on: of features, and of gradients."""
    model.blocks[0].register_forward_hook(lambda block, inputs, output: None)
    model.blocks[1].attn.register_forward_pre_hook(lambda block, inputs: None)
    model.head.register_full_backward_hook(lambda module, gradients, outputs: None)
    return model


def of_class(kind: type[vitkit.ViT], model: vitkit.ViT) -> nn.Module:
    own = kind(SPEC).eval()
    own.load_state_dict(model.state_dict())
    return own


def put(model: vitkit.ViT, name: str, layer: nn.Module) -> nn.Module:
    """The model with another layer in this place."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
    return model


def compiled(layer: nn.Module) -> nn.Module:
    return torch.compile(layer, backend="eager")


class Shouting(vitkit.ViT):
    """A class of the user's own with the same logits."""

    def shout(self) -> str:
        return "logits!"


STORED = {
    "linear head": lambda m: put(m, "head", nn.Linear(16, 7)),
    "head without bias": lambda m: put(m, "head", nn.Linear(16, 5, bias=False)),
    "no head": lambda m: put(m, "head", nn.Identity()),
    "data parallelism": nn.DataParallel,
    "compiled": compiled,
    "averaged": torch.optim.swa_utils.AveragedModel,
    "compiled block": lambda m: put(m, "blocks.0", compiled(m.blocks[0])),
    "compiled head": lambda m: put(m, "head", compiled(nn.Linear(16, 4))),
    "watched": watched,
    "more dropout": lambda m: put(m, "blocks.0.mlp.drop1", nn.Dropout1d(0.2)),
    "own class": lambda m: of_class(Shouting, m),
    "backbone": lambda m: vitkit.FeatureMaps(m, [0], norm=True).model,
}


@pytest.mark.parametrize("change", STORED)
@torch.no_grad()
def test_what_is_saved_comes_back_with_the_same_bits(tmp_path: Path, model, change):
    given = STORED[change](model)
    path = vitkit.save(tmp_path / "m.safetensors", given, preprocess=PIXELS)
    with torch.compiler.set_stance("force_eager"):  # tests do not wait for a compiler
        assert torch.equal(vitkit.load(path).model(IMAGES), given.eval()(IMAGES))


@torch.no_grad()
def test_a_model_compiled_in_place_is_saved(tmp_path: Path, model):
    expected = model(IMAGES)
    model.compile(backend="eager")
    path = vitkit.save(tmp_path / "m.safetensors", model, preprocess=PIXELS)
    assert torch.equal(vitkit.load(path).model(IMAGES), expected)


def test_the_mode_of_each_part_is_as_before(tmp_path: Path, model):
    model.train()
    model.blocks[0].eval()
    watched(model)
    before = [module.training for module in model.modules()]
    vitkit.save(tmp_path / "m.safetensors", model, preprocess=PIXELS)
    assert [module.training for module in model.modules()] == before


def flipping(model: vitkit.ViT, block: int = 1) -> nn.Module:
    model.blocks[block].register_forward_hook(lambda module, inputs, output: output.flip(-1))
    return model


class Doubled(vitkit.ViT):
    def forward(self, images: Tensor, record: vitkit.Record | None = None) -> Tensor:
        return 2 * super().forward(images, record)


class Pair(vitkit.ViT):
    def forward(self, images: Tensor, record: vitkit.Record | None = None) -> object:
        features = self.forward_features(images, record)
        return self.forward_head(features), features


class WithLabels(vitkit.ViT):
    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(images), labels)


class CosineHead(nn.Linear):
    """A linear layer's tensors, and another product."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x) @ nn.functional.normalize(self.weight).T


def weight_norm(model: vitkit.ViT) -> nn.Module:
    parametrizations.weight_norm(model.head)
    return model


def further_tensor(model: vitkit.ViT) -> nn.Module:
    model.scale = nn.Parameter(torch.ones(1))
    return model


OWN = "hooks, methods or layers of its own: loaded again, its logits would differ by .*remove hoo"
LINEAR = r"model\.head is a {}, and a file can hold only a .*Linear\(16"
REFUSED = [
    (flipping, OWN),
    (lambda m: flipping(put(m, "blocks.0", compiled(m.blocks[0])), block=0), OWN),
    (lambda m: put(m, "blocks.0.mlp.act", nn.ReLU()), OWN),
    (lambda m: put(m, "norm", nn.LayerNorm(16, eps=0.1)), OWN),
    (lambda m: of_class(Doubled, m), OWN),
    (lambda m: put(m, "head", CosineHead(16, 3)), OWN),
    (lambda m: of_class(Pair, m), r"it would return logits \(1, 3\), and now something else;"),
    (lambda m: of_class(WithLabels, m), r"now it raises TypeError: .* 'labels'"),
    (lambda m: put(m, "head", nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 3))),
     LINEAR.format("Sequential")),
    (lambda m: put(m, "head", nn.Softmax(dim=1)), LINEAR.format("Softmax")),
    (lambda m: put(m, "head", nn.Linear(20, 3)), r"head\.weight has shape \(3, 20\), the spec nee"),
    (weight_norm, "remove_parametrizations"),
    (further_tensor, r"1 unknown \(scale\); save its state_dict\(\) beside the code"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_a_file_cannot_hold_is_refused_with_the_reason(tmp_path: Path, model, change, message):
    given = change(model)
    for write in (
        lambda: vitkit.save(tmp_path / "m.safetensors", given, preprocess=PIXELS),
        lambda: given.save_pretrained(tmp_path / "folder"),
    ):
        with (
            torch.compiler.set_stance("force_eager"),  # the checks of the tests do not compile
            pytest.raises(CheckpointError, match=message) as error,
        ):
            write()
        assert "\n" not in str(error.value)
    assert not any(tmp_path.iterdir())


def test_maps_are_saved_by_their_model(tmp_path: Path, model):
    with pytest.raises(CheckpointError, match="FeatureMaps is not a ViT; pass the ViT in it"):
        vitkit.save(tmp_path / "m.safetensors", vitkit.FeatureMaps(model, 1), preprocess=PIXELS)


def test_hooks_of_a_wrapper_are_refused(tmp_path: Path, model):
    wrapped = nn.DataParallel(model)
    wrapped.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(CheckpointError, match="the forward hooks of the DataParallel around"):
        vitkit.save(tmp_path / "m.safetensors", wrapped, preprocess=PIXELS)


def test_a_model_of_ddp_is_saved_without_its_wrapper(tmp_path: Path, model, monkeypatch):
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        path = vitkit.save(tmp_path / "m.safetensors", wrapped, preprocess=PIXELS)
    finally:
        distributed.destroy_process_group()
    assert torch.equal(vitkit.load(path).model(IMAGES), model(IMAGES))


def test_a_partial_file_names_what_is_left_out_and_missing(tmp_path: Path, model, caplog):
    import safetensors.torch

    state = model.state_dict()
    del state["head.bias"]
    state["further.weight"] = torch.zeros(2)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(state, path)
    with pytest.raises(CheckpointError, match=r"pass strict=False \(--allow-partial\)"):
        vitkit.load(path, num_heads=2)
    caplog.set_level(logging.WARNING, logger="vitkit")
    checkpoint = vitkit.load(path, num_heads=2, strict=False)
    assert checkpoint.left_out == ("further.weight",)
    assert checkpoint.missing == ("head.bias",)
    assert checkpoint.metadata["fresh"] == ["head.bias"]
    assert "1 unknown tensor left out: further.weight" in caplog.text
    assert "random initial values for head.bias" in caplog.text
    sizes = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2,
             "mlp_width": 32, "num_classes": 3}  # fmt: skip
    made = vitkit.create_model("vit_tiny_patch16_224", pretrained=path, strict=False, **sizes)
    for found in (made, vitkit.ViT.from_pretrained(path, num_heads=2, strict=False)):
        assert found.origin.left_out == ("further.weight",)
        assert found.origin.missing == ("head.bias",)
        assert torch.equal(found.head.weight, model.head.weight)


def test_class_names_of_the_pretrained_weights_are_kept_with_their_head(tmp_path):
    first = vitkit.ViT(SPEC)
    preprocess = vitkit.Preprocess(image_size=16)
    vitkit.save(tmp_path / "a.safetensors", first, preprocess=preprocess, classes=["x", "y", "z"])
    model = vitkit.load(tmp_path / "a.safetensors").model
    assert vitkit.load(vitkit.save(tmp_path / "b.safetensors", model)).classes == ("x", "y", "z")
    path = vitkit.save(tmp_path / "c.safetensors", model, classes=["1", "2", "3"])
    assert vitkit.load(path).classes == ("1", "2", "3")
    model.reset_classifier(3)  # a new head has other classes
    assert vitkit.load(vitkit.save(tmp_path / "d.safetensors", model)).classes == ()

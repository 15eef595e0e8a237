"""lucidrains' files, of every era: read as its classes compute, written for the newest ones."""

from __future__ import annotations

import json

import pytest
import torch
from einops import rearrange
from einops.layers.torch import Rearrange
from noise import fill_with_noise
from peers import peer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from weights.round_trips import noisy, round_trip, same_bits, stored, written

import vitkit
from vitkit.errors import CheckpointError
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.convert import convert
from vitkit.weights.formats import FORMATS
from vitkit.weights.load import load
from vitkit.weights.lucidrains import FORMAT
from vitkit.weights.rules import write_tensors

SIZES = {"image_size": 32, "patch_size": 8, "num_classes": 7, "dim": 128, "depth": 2,
         "heads": 2, "mlp_dim": 96}  # fmt: skip
OURS = {"image_size": 32, "patch_size": 8, "num_classes": 7, "width": 128, "depth": 2,
        "num_heads": 2, "mlp_width": 96, "stem": "normed_linear", "qkv_bias": False,
        "norm_eps": 1e-5}  # fmt: skip
MEAN = {"pooling": "mean", "class_token": False}
SIMPLE = MEAN | {"positions": "sincos_2d"}
SWAPPED = ("transformer.layers.0.0.norm.weight", "transformer.layers.0.1.net.0.weight")


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(FORMATS, FORMAT.name, FORMAT)


def theirs(kind: str = "cls", **fields: object) -> nn.Module:
    """Their newest model, of random numbers: pooled by `cls` or `mean`, or the `simple` one."""
    if kind == "simple":
        model = peer("vit_pytorch.simple_vit", "SimpleViT")(**SIZES | fields)
    else:
        model = peer("vit_pytorch.vit", "ViT")(**SIZES | fields, pool=kind)
    fill_with_noise(model, std=0.05)
    return model.eval()


class PreNorm(nn.Module):
    """The wrapper that blocks had before 1.4."""

    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class OldAttention(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, inner = heads, heads * dim_head
        self.to_qkv = nn.Linear(dim, 3 * inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        parts = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in parts)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out(rearrange(weights @ v, "b h n d -> b n (h d)"))


class OldViT(nn.Module):
    """`ViT` before 1.4, restated: its names and its equations; 1.0 brought the norms of patches."""

    def __init__(self, pool: str, patch_norms: bool, dim_head: int = 64) -> None:
        super().__init__()
        dim, hidden, patch, values = 128, 96, 8, 3 * 8 * 8
        cut = Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=patch, p2=patch)
        matrix = nn.Linear(values, dim)
        layers = [nn.LayerNorm(values), matrix, nn.LayerNorm(dim)] if patch_norms else [matrix]
        self.to_patch_embedding = nn.Sequential(cut, *layers)
        self.pos_embedding = nn.Parameter(torch.empty(1, 17, dim))
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList()
        for _ in range(2):
            mlp = nn.Module()
            mlp.net = nn.Sequential(
                nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(), nn.Linear(hidden, dim)
            )
            mlp.forward = mlp.net.forward
            attention = PreNorm(dim, OldAttention(dim, 2, dim_head))
            self.transformer.layers.append(nn.ModuleList([attention, PreNorm(dim, mlp)]))
        self.pool = pool
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 7))
        fill_with_noise(self, std=0.05)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        x = self.to_patch_embedding(images)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embedding
        for attention, mlp in self.transformer.layers:
            x = attention(x) + x
            x = mlp(x) + x
        return self.mlp_head(x.mean(dim=1) if self.pool == "mean" else x[:, 0])


def old_simple() -> nn.Module:
    """`SimpleViT` before 1.4: its last norm stood in the head, after pooling."""
    model = theirs("simple")
    model.transformer.norm = nn.Identity()
    model.linear_head = nn.Sequential(nn.LayerNorm(128), model.linear_head)
    fill_with_noise(model, std=0.05)
    return model


def between(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As from 1.4 to 1.15: tokens and positions have a batch axis."""
    return weights | {name: weights[name][None] for name in ("cls_token", "pos_embedding")}


def relative(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@torch.inference_mode()
def check_read(
    model: nn.Module, path, weights: dict[str, Tensor] | None = None, **overrides: object
) -> Checkpoint:
    torch.save(weights or model.state_dict(), path / "vit.pt")
    checkpoint = load(path / "vit.pt", trust_pickle=True, **overrides)
    images = torch.randn(2, 3, *checkpoint.model.spec.image_size)
    assert checkpoint.format == "lucidrains"
    assert relative(checkpoint.model(images), model(images)) <= 1e-5
    return checkpoint


@pytest.mark.parametrize("kind", ["cls", "mean"])
def test_their_model_saved_by_torch_is_computed_by_ours(tmp_path, kind):
    checkpoint = check_read(theirs(kind), tmp_path)
    assert checkpoint.model.spec.pooling == kind
    assert checkpoint.metadata["sure"]["num_heads"] == "usual"


def test_their_simple_model_is_computed_by_ours(tmp_path):
    checkpoint = check_read(theirs("simple"), tmp_path, image_size=32)
    assert checkpoint.model.spec.positions == "sincos_2d"
    guessed = load(tmp_path / "vit.pt", trust_pickle=True)
    assert guessed.model.spec.image_size == (256, 256)
    assert any("image_size (256, 256) is a guess" in w for w in guessed.metadata["warnings"])


@pytest.mark.parametrize("overrides", [{"num_heads": 4}, {"head_width": 48}, {}])
def test_heads_are_64_wide_unless_told(tmp_path, overrides):
    model = theirs(heads=4, dim_head=48)
    if overrides:
        spec = check_read(model, tmp_path, **overrides).model.spec
        assert (spec.num_heads, spec.head_width) == (4, 48)
    else:
        torch.save(model.state_dict(), tmp_path / "vit.pt")
        spec = load(tmp_path / "vit.pt", trust_pickle=True).model.spec
        assert (spec.num_heads, spec.head_width) == (3, 64)


@pytest.mark.parametrize("patch_norms", [False, True])
@pytest.mark.parametrize("dim_head", [64, 32])
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_eras_before_the_wrapper_was_dropped(tmp_path, patch_norms, dim_head, pool):
    overrides = {"pooling": "mean_all"} if pool == "mean" else {}
    overrides |= {"head_width": 32} if dim_head == 32 else {}
    spec = check_read(OldViT(pool, patch_norms, dim_head), tmp_path, **overrides).model.spec
    assert spec.stem == ("normed_linear" if patch_norms else "convolution")
    assert spec.norm_before_pool == (pool == "cls")


@pytest.mark.parametrize("image_size", [32, (48, 32)])
def test_the_simple_model_before_its_norm_moved(tmp_path, image_size):
    model = old_simple()
    if image_size != 32:
        model.pos_embedding = theirs("simple", image_size=image_size).pos_embedding
    assert not check_read(model, tmp_path, image_size=image_size).model.spec.norm_before_pool


def test_the_era_with_a_batch_axis(tmp_path):
    model = theirs()
    spec = check_read(model, tmp_path, between(model.state_dict())).model.spec
    assert (spec.pooling, spec.norm_before_pool) == ("cls", True)


def test_a_mean_with_a_class_token_is_of_all_tokens(tmp_path):
    torch.save(between(theirs().state_dict()), tmp_path / "vit.pt")
    with pytest.raises(CheckpointError, match="pooling 'mean_all'"):
        load(tmp_path / "vit.pt", trust_pickle=True, pooling="mean")


def ours(**fields: object) -> vitkit.ViT:
    model = noisy(vitkit.ViTSpec(**OURS | fields))
    if model.spec.positions == "sincos_2d":
        for block in model.blocks:
            nn.init.zeros_(block.attn.proj.bias)
    return model


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "fields"), [("cls", {}), ("mean", MEAN), ("simple", SIMPLE)])
def test_our_model_written_is_loaded_strictly_by_theirs(tmp_path, kind, fields):
    model, other, images = ours(**fields), theirs(kind), torch.randn(2, 3, 32, 32)
    weights = load_file(written(FORMAT, model, tmp_path) / "model.safetensors")
    other.load_state_dict(weights)
    expected = model(images)
    assert relative(other(images), expected) <= 1e-5
    one, two = SWAPPED
    other.load_state_dict(weights | {one: weights[two], two: weights[one]})
    assert relative(other(images), expected) > 1e-4


def test_the_constructor_s_arguments_lie_in_the_header(tmp_path):
    model = ours(num_heads=4, head_width=48)
    file = written(FORMAT, model, tmp_path) / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        arguments = json.loads(opened.metadata()["vit_pytorch"])
    assert arguments.pop("class") == "ViT"
    other = peer("vit_pytorch.vit", "ViT")(**arguments).eval()
    other.load_state_dict(load_file(file))
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert relative(other(images), model(images)) <= 1e-5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        MEAN,
        {"num_heads": 4, "head_width": 48},
        {"num_heads": 8},
        {"num_classes": 0},
        {"in_channels": 1},
        {"patch_size": (4, 16), "image_size": (32, 64)},
    ],
    ids=str,
)
def test_there_and_back_with_the_same_bits(tmp_path, fields):
    spec = vitkit.ViTSpec(**OURS | fields)
    checkpoint = round_trip(FORMAT, spec, tmp_path)
    assert checkpoint.model.spec == spec
    assert checkpoint.metadata["sure"]["num_heads"] == "stored"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"patch_size": 7}, "a patch of 192 values is not 7 of 1 or 3 channels"),
        ({"in_channels": 1}, "a patch of 192 values is not a square"),
        ({"num_heads": 3}, "128 wide together, which 42 a head"),
        ({"image_size": 64}, "the file has positions for 16"),
    ],
)
def test_what_the_user_says_must_fit_the_file(tmp_path, overrides, said):
    torch.save(theirs().state_dict(), tmp_path / "vit.pt")
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path / "vit.pt", trust_pickle=True, **overrides)


def test_the_simple_model_there_and_back(tmp_path):
    model = ours(**SIMPLE)
    first = written(FORMAT, model, tmp_path / "first")
    again = load(first).model
    assert again.spec == model.spec
    same_bits(model.state_dict(), again.state_dict())
    same_bits(stored(first), stored(written(FORMAT, again, tmp_path / "second")))


@pytest.mark.parametrize("kind", ["cls", "mean", "simple"])
def test_theirs_comes_back_with_the_same_bits(tmp_path, kind):
    model = theirs(kind)
    save_file(model.state_dict(), tmp_path / "theirs.safetensors")
    read = load(tmp_path / "theirs.safetensors").model
    same_bits(model.state_dict(), stored(written(FORMAT, read, tmp_path / "again")))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (SIMPLE, "attn.proj.bias is not zero"),
        ({"num_heads": 1}, "one head as wide as the tokens has no output projection"),
        (MEAN | {"class_token": True}, "pooling 'mean_all'"),
        ({"num_registers": 2}, "no place for reg_token"),
        ({"layer_scale": 0.1}, "no place for blocks.0.ls1.gamma"),
    ],
)
def test_what_theirs_cannot_hold_is_refused(fields, said):
    model = noisy(vitkit.ViTSpec(**OURS | fields))
    with pytest.raises(CheckpointError, match=said):
        write_tensors(FORMAT.table(model.spec), model.spec, model.state_dict())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("transformer.norm.bias"), "tensor transformer.norm.bias is missing"),
        (lambda w: w.update(extra=torch.zeros(2)), "1 tensors belong to nothing known: extra"),
        (lambda w: w.update({"mlp_head.bias": torch.zeros(3)}), "gives head.bias the shape"),
        (
            lambda w: [w.pop(n) for n in list(w) if "to_out" in n],
            "no output projection .to_out., which",
        ),
        (
            lambda w: w.update({"transformer.layers.0.0.to_qkv.weight": torch.zeros(99, 128)}),
            "33 wide together, .*; say num_heads",
        ),
        (
            lambda w: w.update({"to_patch_embedding.2.weight": torch.zeros(128, 96)}),
            "a patch of 96 values is not a square of 1 or 3 channels; say patch_size",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, change, said):
    weights = theirs().state_dict()
    change(weights)
    torch.save(weights, tmp_path / "wrong.pt")
    with pytest.raises(CheckpointError, match=said) as caught:
        load(tmp_path / "wrong.pt", trust_pickle=True)
    assert "\n" not in str(caught.value)


def test_a_file_of_theirs_is_converted_to_their_format(tmp_path):
    torch.save(theirs().state_dict(), tmp_path / "theirs.pth")
    report = convert(tmp_path / "theirs.pth", tmp_path / "out", to="lucidrains", trust_pickle=True)
    assert report.max_difference == 0.0

"""Ours to theirs to ours with the same bits: named models, presets, random models, halves."""

import functools
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights.cells import SMALL
from weights.round_trips import MODELS, model_of, noisy, same_bits, same_files, stored, written

import vitkit
from vitkit import CheckpointError
from vitkit.models.presets import preset
from vitkit.weights.write import FORMATS, prepare_files

ASKED = {"huggingface": ["positions_cover_prefix"], "dinov2": ["positions_cover_prefix"]}
"""Fields in which there are two ways to read the files of a format."""


@pytest.mark.parametrize(
    ("name", "fields"), [(name, fields) for name, some in MODELS.items() for fields in some]
)
def test_a_model_of_each_kind_comes_back(tmp_path, name, fields):
    model = model_of(name, fields)
    spec = model.spec
    asked = {field: getattr(spec, field) for field in ASKED.get(name, [])}
    if spec.grid[0] != spec.grid[1]:
        asked["image_size"] = spec.image_size
    first = written(name, model, tmp_path / "first")
    read = vitkit.load(first, **asked)
    assert (read.format, read.model.spec) == (name, spec)
    same_bits(model.state_dict(), read.model.state_dict())
    same_files(first, written(name, read.model, tmp_path / "second"))


TRAINING = {
    name: getattr(vitkit.ViTSpec(), name)
    for name in ("position_dropout", "patch_dropout", "attention_dropout", "projection_dropout",
                 "mlp_dropout", "head_dropout", "drop_path", "drop_path_schedule", "head_bias",
                 "initialisation")
}  # fmt: skip
"""Fields that no weights depend on: no file of theirs has them."""
COMPUTED = {"norm_eps", "activation", "position_resampling"}
"""What the code of a format knows and its files do not."""
UNSAID = {
    "google": COMPUTED | {"resnet_variant", "positions", "image_size", "pooling"},
    "huggingface": {"position_resampling"},
    "torchvision": COMPUTED | {"num_heads"},
    "jeonsworld": COMPUTED | {"num_heads"},
    "lucidrains": COMPUTED,
    "dinov2": COMPUTED | {"num_heads"},
    "deit": COMPUTED | {"num_heads"},
    "timm": COMPUTED | {"num_heads", "pooling", "block", "positions", "positions_cover_prefix",
                        "image_size", "rope_temperature", "resnet_variant"},
}  # fmt: skip
"""Fields that may have to be given to read files of a format again: google's where no table shows
the positions and no token the pooling, timm's where no model of it is the same."""


def relevant(spec: vitkit.ViTSpec) -> vitkit.ViTSpec:
    """The spec without training, where LayerScale starts, and what has no effect or two names."""
    covered = spec.positions == "learned" and spec.num_prefix_tokens > 0
    return spec.replace(
        **TRAINING,
        stem="convolution" if spec.stem == "linear" else spec.stem,
        layer_scale=1.0 if spec.layer_scale else None,
        positions_cover_prefix=spec.positions_cover_prefix or not covered,
        norm_before_pool=spec.norm_before_pool or not spec.final_norm,
    )


@functools.cache
def kinds() -> Mapping[vitkit.ViTSpec, tuple[str, ...]]:
    """Every preset made small, and whose nature it has: the presets that become the same."""
    found: dict[vitkit.ViTSpec, list[str]] = {}
    for name in vitkit.list_models():
        whole = preset(name)
        fields = SMALL | {
            "image_size": tuple(2 * side for side in whole.patch_size),
            "num_classes": 5 if whole.num_classes else 0,
            "resnet_layers": (1,) * len(whole.resnet_layers),
        }
        found.setdefault(relevant(whole.replace(**fields)), []).append(name)
    return {spec: tuple(names) for spec, names in found.items()}


def fitted(model: vitkit.ViT, name: str) -> tuple[vitkit.ViT, str]:
    """The model as the format holds it, and what that costs."""
    grey = {} if model.spec.in_channels == 3 else {"mean": (0.5,), "std": (0.5,)}
    preprocess = vitkit.Preprocess(image_size=model.spec.image_size, fit="squash", **grey)
    checkpoint = vitkit.Checkpoint(model, preprocess, ())
    _, found = prepare_files(checkpoint, name, allow_lossy=True)
    with torch.device("meta"):
        made = vitkit.ViT(found.spec).eval()
    made.load_state_dict(found.state, assign=True)
    steps = [step.kind for step in found.steps]
    return made, next((k for k in ("lost", "approximated", "folded") if k in steps), "exact")


def there_and_back(name: str, model: vitkit.ViT, folder: Path, settings: set[str]) -> vitkit.ViT:
    """Write, read with what the file cannot say, write again: the same in every bit."""
    first = written(name, model, folder / "first")
    spec = relevant(model.spec)
    size = {} if spec.grid[0] == spec.grid[1] else {"image_size": spec.image_size}
    found = vitkit.inspect(first, **size)
    assert found.format == name
    usual = relevant(found.spec)
    unknown = {n: value for n, value in vars(spec).items() if getattr(usual, n) != value}
    assert unknown.keys() <= settings, (unknown, spec)
    # of positions of another kind, the frequency is no field of the guess
    dependent = {"rope_temperature"} if "positions" in unknown else set()
    for field in unknown.keys() - dependent:
        assert found.sure[field] == "usual", field
    read = vitkit.load(first, **size, **unknown).model
    same_bits(model.state_dict(), read.state_dict())
    assert relevant(read.spec) == spec
    same_files(first, written(name, read, folder / "second"))
    return read


HELD = {
    "google": 121, "huggingface": 82, "torchvision": 72, "jeonsworld": 72, "lucidrains": 66,
    "dinov2": 81, "deit": 72, "timm": 205,
}  # fmt: skip
"""How many presets, made small, a format holds in one way or another."""


@functools.cache
def small(spec: vitkit.ViTSpec) -> vitkit.ViT:
    return noisy(spec)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.soak] * (n not in ("huggingface", "jeonsworld")))
     for n in FORMATS],
)  # fmt: skip
def test_every_preset_that_a_format_holds_comes_back(tmp_path, name):
    held = Counter[str]()
    done: set[vitkit.ViTSpec] = set()
    for number, (spec, presets_of_it) in enumerate(kinds().items()):
        try:
            model, how = fitted(small(spec), name)
            if relevant(model.spec) not in done:
                there_and_back(name, model, tmp_path / str(number), {"position_resampling"})
        except CheckpointError:
            continue
        done.add(relevant(model.spec))
        held[how] += len(presets_of_it)
    assert held.total() >= HELD[name], held


def test_the_presets_are_all_there():
    assert sum(map(len, kinds().values())) == len(vitkit.list_models()) >= 205
    assert len(kinds()) >= 60


ANY: dict[str, tuple[Any, ...]] = {
    "in_channels": (3, 1), "num_classes": (5, 0, 1), "depth": (2, 1), "width": (16, 32, 128),
    "head_width": (None, 4), "mlp_width": (32, 64, 128), "stem": ("convolution",),
    "resnet_variant": ("published", "timm", "jeonsworld"), "patch_bias": (True, False),
    "class_token": (True, False), "distillation_token": (False, True), "num_registers": (0, 1, 3),
    "distilled_readout": ("mean",),
    "positions": ("learned", "sincos_1d", "sincos_2d", "sincos_2d_moco", "sincos_2d_mae", "none"),
    "positions_cover_prefix": (True, False), "rope_temperature": (100.0, 10.0),
    "position_resampling": ("bicubic_antialias", "bilinear"), "embedding_norm": (False, True),
    "norm": ("layer", "rms"), "norm_eps": (1e-6, 1e-5, 1e-12),
    "activation": ("gelu", "gelu_tanh", "quick_gelu", "relu"),
    "mlp": ("plain", "swiglu_packed", "swiglu_split"), "qkv_bias": (True, False, "no_key"),
    "qk_norm": (False, True), "layer_scale": (None, 0.5), "block": ("pre_norm", "res_post_norm"),
    "pooling": ("cls", "mean", "mean_all", "map", "cls_mean"), "final_norm": (True, False),
    "norm_before_pool": (True, False), "representation_width": (None, 6),
}  # fmt: skip
"""Values of the fields that a format leaves free."""


@st.composite
def specs(draw: st.DrawFn, name: str) -> vitkit.ViTSpec:
    """Of one class of a format: its own values of the fields it names, any of the others."""
    of_class = draw(st.sampled_from(FORMATS[name].capabilities))
    several = {n: v if isinstance(v, tuple) else (v,) for n, v in of_class.items()}
    values = {**ANY, **several}
    fields = {n: draw(st.sampled_from(choices)) for n, choices in values.items()}
    sides = st.tuples(st.integers(1, 3), st.integers(1, 4))
    (rows, columns), patch = draw(sides), draw(sides)
    if fields["stem"] == "resnet":
        layers = draw(st.sampled_from([(), (1,), (1, 1, 1)]))
        if fields["resnet_variant"] == "jeonsworld" or name == "jeonsworld":
            layers, fields["resnet_variant"] = (1, 1, 1), "jeonsworld"
            rows = max(rows, 2)  # its norm of single channels needs more than one cell
        stride = (4, 4, 8, 16)[len(layers)]
        fields["resnet_layers"], patch = layers, (stride, stride * draw(st.integers(1, 2)))
    else:
        del fields["resnet_variant"]
    if fields["head_width"] is None:
        fields["num_heads"] = draw(st.sampled_from([1, 2, 4]))
    if fields["positions"] != "rope":
        del fields["rope_temperature"]
    fields["class_token"] |= fields["pooling"] in ("cls", "cls_mean")
    if not fields["class_token"] or fields["pooling"] != "cls":
        fields["distillation_token"], fields["distilled_readout"] = False, "mean"
    if not fields["distillation_token"]:
        fields["distilled_readout"] = "mean"
    fields["norm_before_pool"] |= not fields["final_norm"]
    if name == "huggingface" and fields["layer_scale"]:  # DINOv2's classes
        columns, fields["mlp_width"] = rows, 2 * fields["width"]
    if name == "timm" and fields["positions"] == "none":
        fields["mlp"] = "plain"  # gates apart and no table are taken for rotary positions
    if name == "huggingface" and fields["representation_width"]:
        fields |= {"num_classes": 0, "distillation_token": False, "distilled_readout": "mean"}
    if name == "dinov2" and fields["pooling"] == "cls_mean":
        fields["num_classes"] = 5
    if fields["mlp"] != "plain":
        fields["activation"] = "silu"
    elif fields["activation"] == "silu":
        fields["activation"] = "gelu"
    size = (rows * patch[0], columns * patch[1])
    return vitkit.ViTSpec(**fields, patch_size=patch, image_size=size)


def without_strangers(name: str, model: vitkit.ViT) -> None:
    """Set to what it is there whatever no class of the format has as numbers of its own."""
    spec = model.spec
    with torch.no_grad():
        if name in ("huggingface", "dinov2") and spec.num_registers:
            model.pos_embed[:, 1 : 1 + spec.num_registers] = 0
        if name == "lucidrains":
            for block in model.blocks:
                if spec.positions != "learned":
                    block.attn.proj.bias.zero_()
                elif (spec.num_heads, spec.attention_width) == (1, spec.width):
                    block.attn.proj.weight.copy_(torch.eye(spec.width))
                    block.attn.proj.bias.zero_()


@torch.inference_mode()
def logits(model: vitkit.ViT) -> Tensor:
    """In memory of its own: kernels go by how numbers lie, and a file's lie as they do."""
    copy = vitkit.ViT(relevant(model.spec)).eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    return copy(torch.randn(1, copy.spec.in_channels, *copy.spec.image_size, generator=generator))


def any_model_comes_back(name: str, examples: int) -> Counter[str]:
    """The round trip of random models, which then give the same logits, in every bit."""
    costs = Counter[str]()

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None,
              suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # fmt: skip
    @given(specs(name))
    def run(spec: vitkit.ViTSpec) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                model, how = fitted(noisy(spec), name)
                without_strangers(name, model)
                written(name, model, Path(folder) / "tried")
            except CheckpointError:
                assume(False)
            again = there_and_back(name, model, Path(folder), UNSAID[name])
            assert torch.equal(logits(again), logits(model))
            costs[how] += 1

    run()
    return costs


@pytest.mark.parametrize("name", FORMATS)
def test_random_models_come_back(name):
    assert any_model_comes_back(name, 6).total() >= 6


@pytest.mark.soak
@pytest.mark.parametrize("name", FORMATS)
def test_many_random_models_come_back(name):
    assert any_model_comes_back(name, 300).total() >= 300


def whole_model_comes_back(name: str, format_name: str, folder: Path) -> None:
    model, _ = fitted(noisy(preset(name)), format_name)
    there_and_back(format_name, model, folder, UNSAID[format_name])


@pytest.mark.parametrize("name", ["torchvision", "huggingface"])
def test_a_whole_ti16_comes_back(tmp_path, name):
    """All 12 blocks, 14 x 14 patches and 1,000 classes; a B/16 takes five times as long."""
    whole_model_comes_back("vit_tiny_patch16_224", name, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_whole_b16_comes_back_from_every_format(tmp_path, name):
    """In the long tests, as it takes seconds for each format and differs only in size."""
    whole_model_comes_back("vit_base_patch16_224", name, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["timm", "huggingface", "torchvision", "deit", "jeonsworld"])
def test_halves_stay_halves(tmp_path, name, dtype):
    model = noisy(preset("vit_base_patch16_224", **SMALL, image_size=32, num_classes=5))
    file = written(name, model, tmp_path / "theirs") / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file({n: t.to(dtype) for n, t in load_file(file).items()}, file, metadata)
    vitkit.convert(file.parent, tmp_path / "ours.safetensors", to="vitkit")
    assert {t.dtype for t in stored(tmp_path / "ours.safetensors").values()} == {dtype}
    vitkit.convert(tmp_path / "ours.safetensors", tmp_path / "again", to=name)
    same_bits(load_file(file), stored(tmp_path / "again"))


def test_big_visions_bfloat16_is_read_and_written_as_such(tmp_path):
    """numpy has no such type: the arrays are of two bytes without a meaning, `|V2`."""
    fields = SMALL | {"image_size": 32, "activation": "gelu_tanh"}
    model = noisy(preset("vit_base_patch16_siglip_224", **fields))
    whole = np.load(written("google", model, tmp_path / "theirs") / "model.npz")
    halves = {
        name: torch.from_numpy(array).bfloat16().view(torch.int16).numpy().view("V2")
        for name, array in whole.items()
    }
    np.savez(tmp_path / "half.npz", **halves)
    vitkit.convert(tmp_path / "half.npz", tmp_path / "ours.safetensors", to="vitkit")
    assert vitkit.load(tmp_path / "ours.safetensors").dtype == "bfloat16"
    vitkit.convert(tmp_path / "ours.safetensors", tmp_path / "again.npz", to="google")
    again = np.load(tmp_path / "again.npz")
    assert sorted(again) == sorted(halves)
    for name, array in again.items():
        assert array.dtype == np.dtype("V2")
        assert array.tobytes() == halves[name].tobytes(), name


@pytest.mark.parametrize("name", ["huggingface", "dinov2"])
def test_a_class_row_beside_registers_comes_back(tmp_path, name):
    """Theirs have a position for the class token and none for registers; the sum is theirs too."""
    spec = preset("vit_base_patch14_reg4_dinov2", **SMALL, image_size=28)
    model, _ = fitted(noisy(spec), name)
    with torch.no_grad():
        model.pos_embed[:, 0] += 0.5
    again = there_and_back(name, model, tmp_path, UNSAID[name])
    assert (again.pos_embed[:, 0] == 0.5).all()
    assert not again.pos_embed[:, 1:5].any()

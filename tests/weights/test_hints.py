"""Fields that a file leaves open: decided by a name or a keyword, else guessed, in one line."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import TOLERANCE, peer, relative
from safetensors.torch import save_file
from torch import nn
from training.starts import log_of, train
from weights.round_trips import noisy, written

import vitkit
from vitkit import CheckpointError, SettingError, UserError, cli
from vitkit.models.presets import table

MODULES = ("vision_transformer", "deit", "vision_transformer_hybrid", "eva")
SIZES: dict[str, Any] = {"num_classes": 5, "depth": 1}
pytestmark = pytest.mark.usefixtures("wrong_types_come_in")
"""The check of types would read any one tensor of an open file, also one that holds no weights."""
HYBRIDS = ("_r_", "_r26", "_r50", "_resnet", "_mci")


def names() -> list[str]:
    timm = peer("timm")
    return [name for module in MODULES for name in timm.list_models(module=module)]


def theirs(name: str) -> nn.Module:
    """timm's model of the name, with one block.

    Each tensor is drawn anew, tables and tokens too: what starts at zero or one would hide faults.
    Queries and keys are large, so that attention is far from even and positions matter.
    """
    timm, generator = peer("timm"), torch.Generator().manual_seed(0)
    # theirs are a list, one for each block
    more = {"num_kv_heads": 1} if "sapiens" in name else {}
    model = timm.create_model(name, **SIZES, **more).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim < 2 and key.endswith("weight"):
                tensor.copy_(1 + 0.3 * noise)
            elif tensor.ndim < 2 or "token" in key or "pos_embed" in key:
                tensor.copy_(0.5 * noise)
            else:
                fan = max(tensor[0].numel(), 1)
                tensor.copy_(noise * (3.0 if "qkv" in key or ".q." in key else 1.0) / fan**0.5)
    return model


def by_folder(name: str, model: nn.Module, folder: Path) -> vitkit.ViT:
    """As timm puts it on the Hub, with the depth of these tests in it."""
    place = folder / "hub"
    peer("timm").models.save_for_hf(model, place, safe_serialization=True)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"architecture": name}))
    return vitkit.load(place).model


def by_arch(name: str, model: nn.Module, folder: Path) -> vitkit.ViT:
    """A checkpoint as timm's train.py writes it."""
    args = argparse.Namespace(model=name, lr=0.1)
    place = training_file(folder, model, epoch=3, metric=0.5, args=args, arch=name)
    return vitkit.load(place, trust_pickle=True).model


def by_name(name: str, model: nn.Module, folder: Path) -> vitkit.ViT:
    """The bare file with the preset's name; where there is no such preset, it is refused."""
    torch.save(model.state_dict(), folder / "bare.pth")
    return vitkit.create_model(name, pretrained=folder / "bare.pth", trust_pickle=True, **SIZES)


READERS = {"folder": by_folder, "arch": by_arch, "name": by_name}


@torch.inference_mode()
def difference(ours: vitkit.ViT, model: nn.Module, name: str) -> float:
    """Largest |difference| of the logits, as a part of their largest, on one image.

    Patches of 14 cover 378 of 384 pixels: timm's convolution leaves out the rest, and ours gets
    the part that is covered.
    """
    sides = getattr(model.patch_embed, "img_size", None) or ours.spec.image_size
    images = torch.randn(1, 3, *sides, generator=torch.Generator().manual_seed(1))
    if any(mark in name for mark in HYBRIDS):  # a ResNet's stages magnify float32's rounding
        images, ours, model = images.double(), ours.double(), model.double()
    expected = model(images)
    height, width = ours.spec.image_size
    return float((ours(images[..., :height, :width]) - expected).abs().max() / expected.abs().max())


def outcomes(name: str, folder: Path, readers: Iterator[str]) -> dict[str, str | float]:
    """Reader -> the difference, or the refusal."""
    model = theirs(name)
    found: dict[str, str | float] = {}
    for reader in readers:
        try:
            ours = READERS[reader](name, model, folder)
        except UserError as error:
            found[reader] = str(error)
        else:
            found[reader] = difference(ours, model, name)
    return found


def wrong(found: dict[str, str | float]) -> dict[str, float]:
    return {reader: value for reader, value in found.items()
            if not isinstance(value, str) and not value <= TOLERANCE}  # fmt: skip


REPRESENTATIVE = [
    "test_vit", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224",
    "vit_base_patch16_gap_224", "vit_base_patch32_clip_quickgelu_224",
    "vit_base_patch32_siglip_256", "vit_base_patch16_rpn_224", "vit_wee_patch16_reg1_gap_256",
    "vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3", "vit_tiny_r_s16_p8_224",
]  # fmt: skip
"""One name of each kind."""
REFUSED = ["vit_pe_core_tiny_patch16_384", "eva02_tiny_patch14_224", "test_vit3"]
SMALL: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2,
                         "num_heads": 2, "mlp_width": 96, "num_classes": 5}  # fmt: skip
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LINE = "the file does not state these fields, so they have their usual values: "


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_name_decides_what_the_tensors_leave_open(tmp_path, name):
    """The name in a training checkpoint, or the caller's beside a bare file."""
    found = outcomes(name, tmp_path, iter(("arch", "name")))
    assert not any(isinstance(value, str) for value in found.values()), found
    assert not wrong(found), found


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_vitkit_does_not_compute_is_refused_by_its_name(tmp_path, name):
    found = outcomes(name, tmp_path, iter(("folder", "arch")))
    assert all(name in str(value) for value in found.values()), found


@pytest.mark.soak
@pytest.mark.parametrize("name", names())
def test_every_name_of_timm_is_read_right_or_refused(tmp_path, name):
    found = outcomes(name, tmp_path, iter(READERS))
    assert not wrong(found), found
    if name in table():
        assert not any(isinstance(value, str) for value in found.values()), found


def saved(folder: Path, **fields: Any) -> tuple[vitkit.ViT, Path]:
    """A model, and its tensors alone under timm's names, as `model.safetensors`."""
    model = noisy(vitkit.ViTSpec(**SMALL | fields))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    return model, folder / "model.safetensors"


def same(ours: nn.Module, model: nn.Module, images: torch.Tensor = IMAGES) -> bool:
    with torch.inference_mode():
        return relative(ours(images), model(images)) <= TOLERANCE


def guesses(lines: Any) -> list[str]:
    return [line for line in lines if LINE in line]


def test_every_guess_is_logged_in_one_line_by_every_function(tmp_path, caplog, capsys):
    _, bare = saved(tmp_path)
    stored = vitkit.load(bare)
    (line,) = stored.metadata["warnings"]
    for part in ("num_heads 1,", "activation gelu,", "norm_eps 1e-06,", "block pre_norm,",
                 "pooling cls,", "image_size 32 x 32,", "preprocess (mean 0.5",
                 "--model"):  # fmt: skip
        assert part in line
    assert caplog.messages == [f"{bare}: {line}"]
    assert guesses(vitkit.inspect(bare).warnings) == [line]
    for to in ("timm", "vitkit"):
        report = vitkit.convert(bare, tmp_path / to, to=to)
        assert guesses(report.notes) == [line]
        assert str(report).count(LINE) == 1
    assert len(caplog.messages) == 1  # the report says it, so that nothing else does
    assert vitkit.load(tmp_path / "vitkit").metadata["warnings"] == [line]
    assert cli.run(["inspect", str(bare)]) == 0
    assert capsys.readouterr().out.count(LINE) == 1


def test_training_logs_the_guesses_and_takes_a_keyword_for_them(tmp_path):
    small = {"image_size": 8, "patch_size": 4, "width": 64, "depth": 1, "in_channels": 3}
    _, bare = saved(tmp_path, **small)
    train(tmp_path / "one", pretrained=bare, max_steps=1)
    assert log_of(tmp_path / "one").count(LINE) == 1
    assert "num_heads 1," in log_of(tmp_path / "one")
    run = train(tmp_path / "two", pretrained=bare, max_steps=1, spec={"num_heads": 2})
    assert vitkit.load(run.last).model.spec.num_heads == 2
    assert "num_heads 1," not in log_of(tmp_path / "two")


def test_the_model_s_name_decides_when_training(tmp_path):
    name = "test_vit"  # 2 heads where 1 is usual
    fields = {"depth": 1, "image_size": 32, "num_classes": 3}
    model = noisy(vitkit.create_model(name, **fields).spec)
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    run = train(tmp_path / "run", pretrained=tmp_path / "bare.safetensors", model=name,
                max_steps=1, spec={"depth": 1}, img_size=32)  # fmt: skip
    assert vitkit.load(run.last).model.spec.num_heads == 2


def test_load_inspect_and_convert_take_a_name(tmp_path, capsys):
    model = noisy(vitkit.create_model("test_vit", num_classes=5).spec)
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    bare = tmp_path / "bare.safetensors"
    stored = vitkit.load(bare, model="test_vit")
    assert stored.model.spec.num_heads == model.spec.num_heads == 2
    assert stored.metadata["warnings"] == []
    assert cli.run(["inspect", str(bare), "--model", "test_vit"]) == 0
    assert "num_heads                2                    stored" in capsys.readouterr().out
    command = ["convert", str(bare), str(tmp_path / "out"), "--to", "timm"]
    assert cli.run([*command, "--model", "test_vit"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architecture"], "model_args" in config) == ("test_vit", False)
    assert "num_heads" not in capsys.readouterr().out
    for door in (vitkit.load, vitkit.inspect):
        with pytest.raises(CheckpointError, match=r"not contain the model .* width 192, not 64"):
            door(bare, model="vit_tiny_patch16_224")
        with pytest.raises(SettingError, match="no model 'test_vot'"):
            door(bare, model="test_vot")


def test_a_message_names_a_command_that_states_the_field(tmp_path, capsys):
    """`eval` and others have no `--spec.FIELD`; `convert` has, and its file states everything."""
    model = noisy(vitkit.create_model("test_vit", image_size=(32, 96), num_classes=5).spec)
    bare, whole = str(tmp_path / "bare.safetensors"), str(tmp_path / "whole.safetensors")
    save_file(model.state_dict(), bare)
    assert cli.run(["eval", bare, "digits"]) == 2
    message = capsys.readouterr().err
    assert "13 rows of positions minus 1 for prefix tokens are not a square grid; pass" in message
    command = message.strip().partition("convert it first: vitkit ")[2]
    command = command.replace("FILE", bare).replace("OUT", whole).replace("[H,W]", "[32,96]")
    assert cli.run([*command.split(), "--spec.num-heads", "2"]) == 0
    assert vitkit.load(whole).model.spec.image_size == (32, 96)


def test_a_square_table_is_no_proof_of_a_square_image(tmp_path, caplog):
    model, bare = saved(tmp_path, image_size=(16, 64), num_heads=1)
    images = torch.randn(1, 3, 16, 64)
    assert vitkit.inspect(bare).sure["image_size"] == "usual"
    assert not same(vitkit.load(bare).model, model, images)
    given = vitkit.load(bare, image_size=(16, 64))
    assert given.metadata["sure"]["image_size"] == "stored"
    assert same(given.model, model, images)
    sizes = {n: v for n, v in SMALL.items() if n != "image_size"} | {"num_heads": 1}
    made = vitkit.create_model(
        "vit_tiny_patch16_224", pretrained=bare, **sizes, image_size=(16, 64)
    )
    assert same(made, model, images)
    assert "as those of 16 x 64 pixels, as requested, not resampled from 32 x 32" in caplog.text
    for name in ("torchvision", "jeonsworld", "dinov2", "deit", "google", "huggingface"):
        fields = {"activation": "gelu_tanh"} if name == "google" else {"num_classes": 0}
        folder = written(name, noisy(vitkit.ViTSpec(**SMALL | fields)), tmp_path / name)
        (folder / "config.json").unlink(missing_ok=True)
        assert vitkit.inspect(folder).sure["image_size"] == "usual", name


def training_file(folder: Path, model: vitkit.ViT, **entries: Any) -> Path:
    torch.save({"state_dict": model.state_dict(), **entries}, folder / "t.pth")
    return folder / "t.pth"


def test_the_settings_of_a_training_checkpoint_are_read(tmp_path):
    """Without `arch`, by `args.model`; with keywords, size and pooling."""
    model = noisy(vitkit.ViTSpec(**SMALL | {"image_size": (16, 64), "pooling": "mean"}))
    args = argparse.Namespace(
        model="vit_base_patch16_clip_quickgelu_224", gp="avg",
        model_kwargs={"embed_dim": 64, "num_heads": 2, "img_size": [16, 64], "act_layer": "gelu"},
    )  # fmt: skip
    stored = vitkit.load(training_file(tmp_path, model, args=args), trust_pickle=True)
    spec = stored.model.spec
    assert (spec.num_heads, spec.pooling, spec.image_size) == (2, "mean", (16, 64))
    assert (spec.activation, spec.norm_eps) == ("gelu", 1e-5)  # CLIP's epsilon, by the name
    assert any("vit_base_patch16_clip_quickgelu_224" in n for n in stored.metadata["notes"])


def test_timm_s_own_class_with_rotation_is_refused_without_a_model_s_name(tmp_path):
    """timm's saver writes the class's name where it has no arguments: `eva` for PE too."""
    model = theirs("vit_pe_core_tiny_patch16_384")
    state = {n: t for n, t in model.state_dict().items() if not n.startswith("attn_pool.")}
    torch.save({"arch": "eva", "state_dict": state}, tmp_path / "pe.pth")
    with pytest.raises(CheckpointError, match="rotary positions that are not supported"):
        vitkit.load(tmp_path / "pe.pth", trust_pickle=True)


def test_an_unknown_architecture_needs_a_setting_that_it_is_plain(tmp_path):
    model, bare = saved(tmp_path, num_heads=1)
    config = {"architecture": "vit_new_patch8_32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"vit_new_patch8_32 is not a known model"):
        vitkit.load(bare)
    assert same(vitkit.load(bare, positions="learned").model, model)


def test_class_names_may_be_an_object_and_a_null_is_nothing(tmp_path):
    _, bare = saved(tmp_path)
    numbered = {str(number): name for number, name in reversed(list(enumerate("abcde")))}
    for names, classes in (
        (numbered, tuple("abcde")),
        (list("abcde"), tuple("abcde")),
        ({"ant": "an insect"}, ()),
    ):
        config = {"architecture": "mine", "pretrained_cfg": None, "label_names": names}
        (tmp_path / "config.json").write_text(json.dumps(config))
        stored = vitkit.load(bare)
        assert stored.classes == classes
        left_out = any("label_names" in line for line in stored.metadata["warnings"])
        assert left_out == (not classes)


def test_a_whole_file_goes_before_an_older_index(tmp_path):
    """As transformers takes them."""
    model, _ = saved(tmp_path / "both", num_heads=1)
    old = noisy(model.spec).state_dict()
    save_file(old, tmp_path / "both" / "model-1-of-1.safetensors")
    index = {"weight_map": dict.fromkeys(old, "model-1-of-1.safetensors")}
    (tmp_path / "both" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(vitkit.load(tmp_path / "both").model, model)


def test_what_vitkit_wrote_into_a_header_goes_before_a_name(tmp_path):
    model = noisy(vitkit.ViTSpec(**SMALL))
    own = vitkit.save(
        tmp_path / "own.safetensors", model, preprocess=vitkit.Preprocess(image_size=32)
    )
    vitkit.convert(own, tmp_path / "tv", to="torchvision")
    asked = SMALL | {"num_heads": 1}
    with pytest.raises(CheckpointError, match="num_heads: 1 requested, 2 in the file"):
        vitkit.create_model("vit_tiny_patch16_224", pretrained=tmp_path / "tv", **asked)
    made = vitkit.create_model("vit_tiny_patch16_224", pretrained=tmp_path / "tv", **SMALL)
    assert same(made, model)


OTHER_CODE = {
    "vit_base_patch16": "vit_base_patch16 is not a preset",
    "deit_small_patch16_LS": "deit_small_patch16_LS is not a preset",
    "visiontransformer": "visiontransformer is not a preset",
    "vit_base_patch16_rpn_224": "width 768; the tensors have width 64; arch is left out",
}


@pytest.mark.parametrize("name", OTHER_CODE)
def test_names_of_other_code_and_widths_are_no_reason_to_refuse(tmp_path, name):
    model = noisy(vitkit.ViTSpec(**SMALL | {"num_heads": 1}))
    stored = vitkit.load(training_file(tmp_path, model, arch=name), trust_pickle=True)
    assert same(stored.model, model)
    assert OTHER_CODE[name] in stored.metadata["warnings"][0]

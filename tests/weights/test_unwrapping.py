"""A ViT inside of other things: containers, wrappers, parts of larger models, replaced heads."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from peers import peer
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights.round_trips import noisy, stored, written

import vitkit
from vitkit import CheckpointError, cli

State = dict[str, Any]
SPEC = vitkit.ViTSpec(image_size=32, patch_size=8, width=64, depth=2, num_heads=1, mlp_width=96,
                      num_classes=7)  # fmt: skip
MODEL = noisy(SPEC)
TIMM: dict[str, Tensor] = dict(MODEL.state_dict())
with TemporaryDirectory() as place:
    THEIRS = stored(written("torchvision", MODEL, Path(place) / "files"))
BACKBONE = {name: tensor for name, tensor in TIMM.items() if not name.startswith("head.")}
COUNT = torch.tensor(3)


def under(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def with_head(name: str) -> State:
    """torchvision's tensors with a head of another name."""
    return {old.replace("heads.head", name): tensor for old, tensor in THEIRS.items()}


def read(place: Path, content: State, name: str = "model.pth", **options: Any) -> Any:
    torch.save(content, place / name)
    return vitkit.load(place / name, trust_pickle=True, **options)


def same_logits(model: vitkit.ViT) -> bool:
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.allclose(model(images), MODEL(images), atol=1e-5)


OPTIMIZER = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": []}
WHOLE: dict[str, State] = {
    "torchvision, heads = Linear": with_head("heads"),
    "torchvision, heads = Sequential(Linear)": with_head("heads.0"),
    "torchvision, heads.head = Sequential(Dropout, Linear)": with_head("heads.head.1"),
    "timm, head = Sequential(Dropout, Linear)": {
        name.replace("head.", "head.1."): tensor for name, tensor in TIMM.items()
    },
    **{
        f"entry {name}": {name: TIMM, "optimizer_state_dict": OPTIMIZER, "epoch": 3}
        for name in (
            "model_state_dict", "module", "net", "weights", "params", "model_state", "mine",
        )
    },
    **{f"prefix {name}": under(name, TIMM) for name in ("model.", "net.", "vit.", "encoder.")},
    "TimmWrapper": under("timm_model.", TIMM),
    "AveragedModel": {**under("module.", TIMM), "n_averaged": COUNT},
    "integer buffers": {**TIMM, "position_ids": torch.arange(17)[None], "n_averaged": COUNT},
    "compiled blocks": {
        name.replace("blocks.1.", "blocks.1._orig_mod."): tensor for name, tensor in TIMM.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_the_whole_model_is_read_with_a_warning_that_names_the_wrapper(content, tmp_path):
    found = read(tmp_path, content)
    assert same_logits(found.model)
    assert "left_out" not in found.metadata
    assert found.metadata["notes"]


def moco() -> State:
    other = {name: tensor + 1 for name, tensor in BACKBONE.items()}
    head = {"base_encoder.head.0.weight": torch.ones(8, 64),
            "base_encoder.head.1.num_batches_tracked": COUNT}  # fmt: skip
    state = under("base_encoder.", BACKBONE) | under("momentum_encoder.", other) | head
    return {"state_dict": under("module.", state), "arch": "vit_small"}


def dino() -> State:
    head = {"head.mlp.0.weight": torch.ones(4, 64), "head.last_layer.weight_g": torch.ones(3, 1)}
    student = under("module.backbone.", {name: t + 1 for name, t in BACKBONE.items()})
    return {"student": student, "teacher": under("backbone.", BACKBONE) | head, "epoch": 3}


PARTS: dict[str, tuple[Callable[[], State], str]] = {
    "DINO v1": (dino, "head.mlp.0.weight"),
    "MoCo v3": (moco, "31 tensors left out, outside of 'module.base_encoder.'"),
    "DistillWrapper": (
        lambda: under("student.", BACKBONE) | {"teacher.conv.weight": torch.ones(3)},
        "1 tensor left out, outside of 'student.': teacher.conv.weight",
    ),
    "a head of its own": (
        lambda: (
            under("vit.", BACKBONE) | {"fc.weight": torch.ones(5, 64), "fc.bias": torch.ones(5)}
        ),
        "2 tensors left out, outside of 'vit.': fc.weight, fc.bias",
    ),
}


def test_a_whole_model_in_a_pickle_is_named_with_what_to_save(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"it has a vitkit\.models\.vit\.ViT; save only tensors"
    ):
        read(tmp_path, {"model": MODEL})


@pytest.mark.parametrize("what", PARTS)
def test_what_lies_outside_of_the_model_is_listed(what, tmp_path):
    content, message = PARTS[what]
    found = read(tmp_path, content(), "model.pth.tar")
    assert found.model.spec.num_classes == 0
    assert torch.equal(found.model.blocks[1].mlp.fc1.weight, TIMM["blocks.1.mlp.fc1.weight"])
    assert message in " ".join(found.metadata["warnings"])
    assert found.metadata["left_out"]
    inspected = vitkit.inspect(tmp_path / "model.pth.tar", trust_pickle=True)
    assert message in " ".join(inspected.warnings)


def test_mae_s_pre_training_file_gives_its_encoder(tmp_path):
    decoder = {"mask_token": torch.zeros(1, 1, 32), "decoder_embed.weight": torch.zeros(32, 64),
               "decoder_blocks.0.norm1.weight": torch.zeros(32)}  # fmt: skip
    found = read(tmp_path, {"model": BACKBONE | decoder, "epoch": 3})
    assert torch.equal(found.model.blocks[1].mlp.fc1.weight, TIMM["blocks.1.mlp.fc1.weight"])
    assert sum("MAE's pre-training" in line for line in found.metadata["notes"]) == 3


REFUSED: dict[str, tuple[State, str]] = {
    "two models": (
        under("student.", TIMM) | under("teacher.", TIMM), "2 models, under student., teacher."
    ),
    "two entries": ({"mine": TIMM, "yours": TIMM}, r"entries contain tensors \(mine, yours\)"),
    "a head of two layers": (
        with_head("heads.0") | {"heads.2.weight": torch.ones(7, 7)}, "heads.0.bias, heads.0.weight"
    ),
    "block 1 of 3 missing": (
        {name.replace("blocks.1.", "blocks.2."): tensor for name, tensor in TIMM.items()},
        "block 1 is missing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_ambiguous_is_refused(what, tmp_path):
    content, message = REFUSED[what]
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, content)


def test_a_part_whose_others_are_missing_is_listed_as_left_out(tmp_path):
    """transformers has query, key and value where vitkit has one matrix."""
    vitkit.save(tmp_path / "own.safetensors", MODEL, preprocess=vitkit.Preprocess(image_size=32))
    vitkit.convert(tmp_path / "own.safetensors", tmp_path / "hf", to="huggingface")
    place = tmp_path / "hf" / "model.safetensors"
    state = load_file(place)
    key = next(name for name in state if name.endswith("layer.1.attention.attention.key.weight"))
    del state[key]
    save_file(state, place)
    found = vitkit.load(place, strict=False)
    others = [key.removeprefix("vit.").replace("key", other) for other in ("query", "value")]
    assert found.metadata["left_out"] == others
    assert found.metadata["fresh"] == ["blocks.1.attn.qkv.weight"]
    assert any(all(name in line for name in others) for line in found.warnings)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64, "image_size": 32, "patch_size": 8}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [("CLIPVision", "clip_vision_model"), ("SiglipVision", "siglip_vision_model"),
     ("DINOv3ViT", "dinov3_vit"), ("IJepa", "ijepa")],
)  # fmt: skip
def test_transformers_models_that_are_not_supported_are_named(kind, model_type, tmp_path):
    config, model = peer("transformers", f"{kind}Config", f"{kind}Model")
    model(config(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=f"model_type '{model_type}' of transformers is not supported"
    ):
        vitkit.load(tmp_path)


def test_a_size_that_its_patches_do_not_divide_names_the_one_that_works(tmp_path):
    """timm's SigLIP of 384 pixels has 27 x 27 patches of 14: it drops the last 6 pixels."""
    name = "vit_so400m_patch14_siglip_384"
    sizes = {"embed_dim": 64, "depth": 1, "num_heads": 1, "mlp_ratio": 1}
    theirs = peer("timm").create_model(name, **sizes, num_classes=3).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": name, "model_args": sizes,
              "pretrained_cfg": {"input_size": [3, 384, 384]}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"image_size=378 \(--spec.image-size 378\)"):
        vitkit.load(tmp_path)
    found = vitkit.load(tmp_path, image_size=378)
    images = torch.randn(1, 3, 384, 384, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = found.model(images[..., :378, :378])
        assert torch.allclose(ours, theirs(images), atol=1e-5)


def test_partial_loading_is_a_flag_and_a_keyword(tmp_path, caplog, capsys):
    extra = tmp_path / "extra.safetensors"
    save_file({**TIMM, "extra.weight": torch.ones(3)}, extra)
    image = tmp_path / "image.png"
    Image.fromarray(np.full((32, 32, 3), 128, np.uint8)).save(image)
    predict = ["predict", str(extra), str(image), "--device", "cpu"]
    convert = ["convert", str(extra), str(tmp_path / "out"), "--to", "vitkit"]
    for words in (predict, convert):
        assert cli.run(words) == 2
        assert "1 unknown tensor: extra.weight" in capsys.readouterr().err
        assert cli.run([*words, "--allow-partial"]) == 0
        captured = capsys.readouterr()
        assert "1 unknown tensor left out: extra.weight" in captured.out + caplog.text
    assert same_logits(vitkit.load(tmp_path / "out").model)
    fields = {"width": 64, "num_heads": 1, "depth": 2, "mlp_width": 96, "patch_size": 8}
    with caplog.at_level("INFO", logger="vitkit"):
        made = vitkit.create_model("vit_tiny_patch16_224", pretrained=extra, strict=False,
                                   image_size=32, **fields)  # fmt: skip
    assert same_logits(made)
    assert "extra.weight" in caplog.text


def test_inspect_lists_unknown_and_missing_tensors(tmp_path, capsys):
    content = {**TIMM, "extra.weight": torch.ones(3)}
    del content["norm.bias"]
    path = tmp_path / "model.safetensors"
    save_file(content, path)
    found = vitkit.inspect(path)
    assert (found.unknown, found.missing) == (("extra.weight",), ("norm.bias",))
    assert cli.run(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "tensors unknown: extra.weight" in text
    assert "tensors missing: norm.bias" in text
    assert "load refuses this file; to load the rest, pass strict=False (--allow-partial)" in text
    assert cli.run(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unknown"] == ["extra.weight"]


@pytest.mark.usefixtures("wrong_types_come_in")  # the check of types reads any one tensor
def test_names_of_tensors_do_not_reach_a_terminal_as_they_are(tmp_path, caplog):
    """A name may hold the codes that clear a screen or set its title."""
    path = tmp_path / "model.safetensors"
    save_file({**TIMM, "\x1b[2J": torch.ones(3)}, path)
    with caplog.at_level("INFO", logger="vitkit"):
        vitkit.load(path, strict=False)
        vitkit.create_model("vit_tiny_patch16_224", pretrained=path, strict=False, image_size=32,
                            width=64, num_heads=1, depth=2, mlp_width=96, patch_size=8)  # fmt: skip
        report = vitkit.convert(path, tmp_path / "out", to="vitkit", strict=False)
    texts = [caplog.text, f"{report}\n{vitkit.inspect(path)}"]
    save_file({**TIMM, "\x1b[2J": torch.ones(3, dtype=torch.int64)}, path)
    texts.append(f"{vitkit.inspect(path)}\n{vitkit.convert(path, tmp_path / 'two', to='vitkit')}")
    for shown in texts:
        assert "\x1b" not in shown
        assert shown.count(r"\x1b[2J") >= 2


def test_a_prefix_that_repeats_is_removed_a_few_times(tmp_path):
    prefix = "module." * 2000
    path = tmp_path / "model.safetensors"
    save_file(under(prefix, TIMM), path)
    with pytest.raises(CheckpointError, match="in no known format"):
        vitkit.load(path)
    save_file(under("module._orig_mod.module.", TIMM), path)
    assert same_logits(vitkit.load(path).model)


def test_inspect_shows_what_a_vitkit_file_says_of_its_training(tmp_path, capsys):
    path = vitkit.save(
        tmp_path / "model.safetensors", MODEL, preprocess=vitkit.Preprocess(image_size=32),
        classes=[f"class {number}" for number in range(7)],
        recipe={"data": "digits", "lr": 1e-3, "mixup": 0.0, "spec": {"depth": 2}, "cache": None},
        metrics={"test": {"top1": 0.987654321}}, data={"name": "di\x1bgits"},
    )  # fmt: skip
    assert cli.run(["inspect", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "classes (7, stored): class 0, class 1," in text
    assert 'recipe: {"data": "digits", "lr": 0.001, "mixup": 0.0, "spec": {"depth": 2}' in text
    assert 'metrics: {"test": {"top1": 0.987654321}}' in text
    assert "\x1b" not in text
    assert cli.run(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metadata"]["metrics"] == {"test": {"top1": 0.987654321}}
    assert found["classes"][6] == "class 6"


SETTINGS = {"name": "vit", "depth": 2}


@pytest.mark.parametrize(
    "content",
    [{"ema": {"decay": 0.99}, "state_dict": TIMM}, {"model": SETTINGS, "params": TIMM},
     {"ema": {"decay": torch.tensor(0.99), "updates": 7}, "model": {"state_dict": TIMM}}],
    ids=["decay alone", "the model's settings", "a tensor that is one number"],
)  # fmt: skip
def test_an_entry_without_weights_hides_no_other(content, tmp_path):
    assert same_logits(read(tmp_path, content).model)

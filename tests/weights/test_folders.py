"""`save_pretrained` and `from_pretrained`: folders for us, transformers and timm."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peers import TOLERANCE, peer, relative
from weights.hub_cache import empty, published
from weights.round_trips import noisy, same_bits

import vitkit
from vitkit import CheckpointError, OutputError, SpecError

SPEC = vitkit.ViTSpec(image_size=32, patch_size=8, width=64, depth=2, num_heads=2, mlp_width=96,
                      num_classes=3)  # fmt: skip
PIXELS = vitkit.Preprocess(
    image_size=32, mean=(0.1, 0.2, 0.3), fit="squash", interpolation="bilinear"
)
NAMES = ("ant", "bee", "cat")
IMAGES = torch.randn(2, 3, 32, 32)


def with_origin(tmp_path: Path, **fields: object) -> vitkit.ViT:
    """A model that was loaded, so that it knows its images and classes."""
    path = tmp_path / "own.safetensors"
    classes = NAMES if fields.get("num_classes", 3) else ()
    pixels = PIXELS.replace(image_size=fields.get("image_size", 32))
    vitkit.save(path, noisy(SPEC.replace(**fields)), preprocess=pixels, classes=classes)
    return vitkit.ViT.from_pretrained(path)


@torch.inference_mode()
def test_transformers_and_we_read_the_folder(tmp_path):
    model = with_origin(tmp_path)
    files = model.save_pretrained(tmp_path / "made")
    assert {file.name for file in files} == {
        "model.safetensors", "config.json", "preprocessor_config.json", "README.md"
    }  # fmt: skip
    again = vitkit.ViT.from_pretrained(tmp_path / "made")
    same_bits(model.state_dict(), again.state_dict())
    assert again.origin.classes == NAMES
    assert again.origin.preprocess == PIXELS
    assert again.origin.format == "huggingface"
    automatic = peer("transformers").AutoModelForImageClassification
    theirs = automatic.from_pretrained(tmp_path / "made").eval()
    assert theirs.config.id2label[2] == "cat"
    assert relative(model(IMAGES), theirs(IMAGES).logits) <= TOLERANCE
    card = (tmp_path / "made" / "README.md").read_text()
    assert f'from_checkpoint("{tmp_path / "made"}")' in card
    assert "hf://" not in card


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "huggingface"), ({"num_classes": 0}, "huggingface"),
        ({"pooling": "mean", "class_token": False}, "timm"), ({"qk_norm": True}, "timm"),
        ({"positions": "sincos_2d"}, "huggingface"), ({"block": "post_norm"}, "vitkit"),
    ],
)  # fmt: skip
@torch.inference_mode()
def test_the_format_is_the_first_that_holds_the_model(tmp_path, fields, kind):
    model = with_origin(tmp_path, **fields)
    model.save_pretrained(tmp_path / "made")
    again = vitkit.load(tmp_path / "made")
    assert again.format == kind
    assert torch.equal(again.model(IMAGES), model(IMAGES))
    assert again.preprocess.replace(crop_ratio=0.9) == PIXELS  # no part of a squash
    assert again.classes == model.origin.classes
    if kind == "timm":
        theirs = peer("timm").create_model(f"local-dir:{tmp_path / 'made'}", pretrained=True)
        assert relative(model(IMAGES), theirs.eval()(IMAGES)) <= TOLERANCE


def test_what_the_caller_names_goes_before_what_the_model_knows(tmp_path):
    model = with_origin(tmp_path)
    others = vitkit.Preprocess(image_size=32)
    model.save_pretrained(tmp_path / "made", to="vitkit", preprocess=others, classes=list("xyz"))
    again = vitkit.load(tmp_path / "made")
    assert (again.preprocess, again.classes) == (others, ("x", "y", "z"))
    model.head = torch.nn.Linear(64, 2)
    model.save_pretrained(tmp_path / "two")
    assert vitkit.load(tmp_path / "two").classes == ()
    fresh = vitkit.ViT(SPEC.replace(in_channels=1)).half()
    fresh.save_pretrained(tmp_path / "fresh", to="vitkit")
    again = vitkit.load(tmp_path / "fresh")
    assert (again.preprocess.mean, again.dtype) == ((0.5,), "float16")


@pytest.mark.parametrize("to", ["auto", "huggingface", "timm", "vitkit"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"classes": "cat"}, r"classes contains 'cat'; pass a list of class names"),
        ({"classes": [1, 2, 3]}, "classes contains 1; pass a list"),
        ({"classes": ["x", "y"]}, "2 class names do not match a head of 3"),
        (
            {"preprocess": vitkit.Preprocess(image_size=32, mean=(0.5,), std=(0.5,))},
            "its preprocessing has channels: 1, its model: 3",
        ),
    ],
    ids=["text", "numbers", "count", "channels"],
)
@pytest.mark.usefixtures("wrong_types_come_in")
def test_a_folder_that_could_not_be_read_is_not_written(tmp_path, to, wrong, message):
    with pytest.raises(CheckpointError, match=message):
        noisy(SPEC).save_pretrained(tmp_path / "made", to=to, **wrong)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("classes", [3, 0])
def test_the_card_s_code_runs_for_a_folder_of_any_name(tmp_path, classes):
    folder = tmp_path / 'my "best" model'
    noisy(SPEC.replace(num_classes=classes)).save_pretrained(folder)
    blocks = re.findall(r"```(\w+)\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    for language, code in blocks:
        if language == "sh":
            words = shlex.split(code)
        else:
            nodes = ast.walk(ast.parse(code))
            words = [node.value for node in nodes if isinstance(node, ast.Constant)]
        assert str(folder) in words
    assert len(blocks) == 2


def test_a_name_of_two_endings_is_a_file(tmp_path):
    """A `.pth.tar` was once a folder of that name."""
    with pytest.raises(OutputError, match=r"expected a folder; vitkit\.save writes a single file"):
        noisy(SPEC).save_pretrained(tmp_path / "model.pth.tar")
    source = with_origin(tmp_path).save_pretrained(tmp_path / "made")[0]
    with pytest.raises(CheckpointError, match=r"timm writes 2 files .*; name a folder instead"):
        vitkit.convert(source, tmp_path / "model.pth.tar", to="timm")
    assert not (tmp_path / "model.pth.tar").exists()


def test_nothing_is_replaced(tmp_path):
    model = with_origin(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "README.md").write_text("mine")
    with pytest.raises(OutputError, match=r"README\.md exists; choose another place"):
        model.save_pretrained(tmp_path / "made")
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["README.md"]
    for wrong, message in (
        ("", "folder is empty; pass a path"),
        (tmp_path / "m.safetensors", r"expected a folder; vitkit\.save writes a single file"),
    ):
        with pytest.raises(OutputError, match=message):
            model.save_pretrained(wrong)
    with pytest.raises(CheckpointError, match="'hugingface' is not a format"):
        model.save_pretrained(tmp_path / "x", to="hugingface")
    with pytest.raises(OutputError, match=r"out is empty; pass a path \('\.' is the working fold"):
        vitkit.convert(tmp_path / "own.safetensors", "", to="timm")


def test_a_model_is_adapted_on_its_way_in(tmp_path):
    own = with_origin(tmp_path)
    model = vitkit.ViT.from_pretrained(
        tmp_path / "own.safetensors", num_classes=5, img_size=64, in_chans=1, drop_path_rate=0.2
    )
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 5)
    assert model.blocks[1].drop_path1.rate == 0.2
    assert not model.training
    assert model.origin.classes == ()
    assert model.origin.preprocess.image_size == (64, 64)
    assert len(model.origin.preprocess.mean) == 1
    assert torch.equal(model.blocks[0].mlp.fc1.weight, own.blocks[0].mlp.fc1.weight)
    larger = vitkit.resized(own, image_size=64)
    assert larger.origin.preprocess == PIXELS.replace(image_size=64)
    with pytest.raises(CheckpointError, match="depth: 3 requested, 2 in the file"):
        vitkit.ViT.from_pretrained(tmp_path / "own.safetensors", depth=3)
    with pytest.raises(SpecError, match="no field 'num_clases'"):
        vitkit.ViT.from_pretrained(tmp_path / "own.safetensors", num_clases=3)


def test_timm_s_keywords_decide_what_a_file_leaves_open(tmp_path):
    """A file of tensors alone: its activation and its oblong images are the caller's to name."""
    model = noisy(SPEC.replace(image_size=(16, 64), activation="quick_gelu"))
    path = tmp_path / "bare.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    again = vitkit.ViT.from_pretrained(path, num_heads=2, img_size=(16, 64), act_layer="quick_gelu")
    images = torch.randn(2, 3, 16, 64)
    assert again.spec.image_size == (16, 64)
    assert torch.equal(again(images), model(images))


def test_metadata_of_another_form_hinder_no_change(tmp_path):
    """A file may hold anything: `adapted` and `notes` need not be lists."""
    path = vitkit.save(
        tmp_path / "own.safetensors", noisy(SPEC), preprocess=PIXELS, adapted=3, notes={"a": 1}
    )
    adapted = vitkit.adapt(vitkit.load(path), fit="crop")
    assert adapted.metadata["adapted"] == ["approximated: preprocess: fit squash -> crop"]
    report = vitkit.convert(path, tmp_path / "made", to="huggingface", adapt={"image_size": 64})
    assert len(report.approximated) == 1
    assert vitkit.ViT.from_pretrained(path, num_classes=2).num_classes == 2
    vitkit.load(path).model.save_pretrained(tmp_path / "card")


def test_names_of_the_hub_are_those_of_transformers(tmp_path, monkeypatch):
    cache = empty(tmp_path / "hub", monkeypatch)
    with_origin(tmp_path)
    published(tmp_path / "own.safetensors", cache, "me/ants", "huggingface")
    for name in ("me/ants", "hf://me/ants"):
        assert vitkit.ViT.from_pretrained(name).origin.classes == NAMES
    with pytest.raises(CheckpointError, match="hf://me/bees: not in the cache"):
        vitkit.ViT.from_pretrained("me/bees")
    with pytest.raises(CheckpointError, match="no such file"):
        vitkit.ViT.from_pretrained("me/bees.safetensors")


def test_lists_of_names_by_several_patterns():
    listed = vitkit.list_models
    assert listed(
        ["vit_tiny_patch16_*", "deit_tiny*"], exclude_filters=iter(["*384*", "*dist*", "*dino*"])
    ) == ["deit_tiny_patch16_224", "vit_tiny_patch16_224"]
    assert listed("") == listed("*") == listed()
    assert listed("no_such*") == []
    with_weights = listed("vit_base_patch16*", pretrained=True, include_tags=False)
    assert "vit_base_patch16_224" in with_weights
    assert "vit_base_patch16_gap_224" not in with_weights
    tagged = listed("vit_tiny_patch16_224.*", pretrained=True)
    assert tagged == [
        f"vit_tiny_patch16_224.{tag}" for tag in ("augreg_in21k", "augreg_in21k_ft_in1k")
    ]
    assert set(tagged) < set(listed("vit_tiny_patch16_224", pretrained=True))
    assert not set(tagged) & set(listed(pretrained=True, exclude_filters="vit_tiny*"))
    both = listed("vit_base_patch16_*", include_tags=True)
    assert "vit_base_patch16_gap_224" in both
    assert "vit_base_patch16_224" not in both

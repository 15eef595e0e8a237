"""The catalogue, held against the libraries that publish its checkpoints."""

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
from weights.round_trips import noisy, same_bits

import vitkit
from vitkit import SettingError, cli
from vitkit.weights.catalogue import HUB_ADDRESS, catalogue, find, is_address, known, published

ROOT = Path(__file__).parents[2]
ENTRIES = list(catalogue().values())
TIMM = [entry for entry in ENTRIES if entry.source == "timm"]
TORCHVISION = [entry for entry in ENTRIES if entry.source == "torchvision"]


def named(entry):
    return entry.name


def test_each_entry_is_there_once():
    assert len(ENTRIES) > 400
    assert not [place for place, n in Counter(map(named, ENTRIES)).items() if n > 1]
    # Two models of timm may be one file, computed with another activation.
    twice = [place for place, n in Counter(entry.address for entry in ENTRIES).items() if n > 1]
    assert all(place.startswith("hf://timm/") for place in twice)


def test_an_entry_is_whole():
    for entry in ENTRIES:
        assert entry.preset in vitkit.list_models()
        assert entry.format in vitkit.formats()
        assert entry.note
        assert entry.spec.num_classes == entry.classes
        assert entry.spec.image_size == (entry.image_size, entry.image_size)
        assert re.fullmatch("[0-9a-f]*", entry.sha256)
        if entry.preprocess is not None:
            assert entry.preprocess.image_size == entry.spec.image_size
        assert is_address(entry.address)
        web = re.fullmatch(r"https://[\w.]+/[\w./+-]+\.(npz|pth|pth\.tar)", entry.address)
        assert web or HUB_ADDRESS.fullmatch(entry.address)
        assert entry.pickle == entry.address.endswith((".pth", ".pth.tar"))


def test_timm_says_the_same():
    import timm

    for entry in TIMM:
        theirs = timm.get_pretrained_cfg(entry.name)
        assert entry.preprocess.mean == theirs.mean
        assert entry.preprocess.std == theirs.std
        assert entry.preprocess.interpolation == theirs.interpolation
        assert entry.preprocess.crop_ratio == theirs.crop_pct
        assert entry.preprocess.fit == {"center": "crop", "squash": "squash"}[theirs.crop_mode]
        assert entry.classes == theirs.num_classes
        assert (3, *entry.preprocess.image_size) == theirs.input_size
        assert entry.licence == (theirs.license or "")
        place = re.sub("^(timm://)", "timm/", entry.address).removeprefix("hf://")
        assert place == (theirs.hf_hub_id or theirs.url)


def test_what_timm_publishes_for_our_presets_is_all_there_in_its_order():
    import timm

    ours, theirs = set(vitkit.list_models()), {}
    for name in timm.list_pretrained():
        theirs.setdefault(name.partition(".")[0], []).append(name)
    for preset in ours & theirs.keys():
        listed = [entry.name for entry in published(preset) if entry.source == "timm"]
        assert sorted(listed) == sorted(theirs[preset])
        first = timm.get_pretrained_cfg(preset)
        assert not first.has_weights or listed[0] == f"{preset}.{first.tag}"


@pytest.mark.parametrize("entry", TORCHVISION, ids=named)
def test_torchvision_says_the_same(entry):
    from torchvision.models import get_model_weights

    model, _, tag = entry.name.removeprefix("torchvision/").partition(".")
    theirs = get_model_weights(model)[tag.upper()]
    assert entry.address == theirs.url
    assert theirs.url.endswith(f"-{entry.sha256}.pth")
    assert len(entry.sha256) == 8
    assert entry.classes == len(theirs.meta["categories"])
    images = theirs.transforms()
    assert entry.preprocess.mean == tuple(images.mean)
    assert entry.preprocess.std == tuple(images.std)
    assert entry.preprocess.interpolation == images.interpolation.value
    (crop,), (size,) = images.crop_size, images.resize_size
    assert entry.preprocess.image_size == (crop, crop)
    assert int(crop / entry.preprocess.crop_ratio) == size
    assert ("SWAG" in theirs.meta.get("license", "")) == (entry.licence == "cc-by-nc-4.0")


def test_torchvision_has_no_others():
    from torchvision.models import get_model_weights

    theirs = {
        f"torchvision/{model}.{weights.name.lower()}"
        for model in ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14")
        for weights in get_model_weights(model)
    }
    assert theirs == set(map(named, TORCHVISION))


def test_a_name_finds_its_entry():
    first = find("vit_base_patch16_224")
    assert first.name == "vit_base_patch16_224.augreg2_in21k_ft_in1k"
    assert find(first.name) is first
    assert find("google/sam/ViT-B_16").address.endswith("/vit_models/sam/ViT-B_16.npz")
    assert find("deit/deit_tiny_patch16_224").sha256 == "a1311bcf"
    assert published("vit_base_patch16_224")[0] is first
    assert published("vit_mnist") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_base_patch16_224.augreg_in21", "no checkpoint 'augreg_in21' (did you mean 'augreg"),
        ("vit_base_patch16_225", "no checkpoint 'vit_base_patch16_225' (did you mean 'vit_base_pa"),
        ("google/sam/ViT-B16", "did you mean 'google/sam/ViT-B_16'"),
        ("vit_tiny_patch8_224", "no weights are published for vit_tiny_patch8_224"),
        ("vit_tiny_patch8_224.augreg", "no weights are published for vit_tiny_patch8_224"),
    ],
)
def test_the_error_for_an_unknown_name_gives_the_nearest(name, message):
    with pytest.raises(SettingError, match=re.escape(message)):
        find(name)


def test_what_is_known_of_a_place(tmp_path, monkeypatch):
    entry = find("vit_base_patch16_224")
    for place in ("vit_base_patch16_224", "timm://vit_base_patch16_224", entry.address):
        assert known(place) is entry
    sam = find("google/sam/ViT-B_16")
    assert known(sam.address) is sam
    assert known(sam.name) is sam
    for place in ("hf://someone/else", "timm://google/sam/ViT-B_16", "model.safetensors"):
        assert known(place) is None
    monkeypatch.chdir(tmp_path)
    Path("vit_base_patch16_224").mkdir()
    assert known("vit_base_patch16_224") is None, "a folder of that name goes first"


def test_one_file_read_as_two_models():
    plain, quick = (find(f"vit_base_patch16_clip_{kind}224.openai") for kind in ("", "quickgelu_"))
    assert (plain.address, quick.address) == (
        "timm://vit_base_patch16_clip_224.openai",
        "hf://timm/vit_base_patch16_clip_224.openai",
    )
    assert plain.fields == {"activation": "gelu"}
    assert quick.fields == {"activation": "quick_gelu"}
    assert known("timm://vit_base_patch16_clip_quickgelu_224.openai") is quick


def test_what_a_training_file_does_not_say_is_stated(tmp_path):
    entry = find("vit_huge_patch14_gap_224")
    spec = entry.spec.replace(width=64, depth=1, mlp_width=96)
    model = noisy(spec)
    tensors = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"encoder": tensors, "opt": {}, "epoch": 300}, tmp_path / "ijepa.pth")
    checkpoint = vitkit.load(tmp_path / "ijepa.pth", trust_pickle=True, **entry.fields)
    same_bits(model.state_dict(), checkpoint.model.state_dict())
    assert checkpoint.model.spec.num_heads == 16
    assert checkpoint.model.spec.pooling == "mean"


def test_the_command_lists_them(capsys):
    assert cli.run(["models", "deit_tiny_*", "--pretrained"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "deit_tiny_patch16_224.fb_in1k", "deit_tiny_distilled_patch16_224.fb_in1k",
        "deit/deit_tiny_patch16_224", "deit/deit_tiny_distilled_patch16_224",
        "hf://facebook/deit-tiny-patch16-224", "hf://facebook/deit-tiny-distilled-patch16-224",
    ]  # fmt: skip
    assert "apache-2.0" in lines[0]
    assert lines[2].endswith(" " + find("deit/deit_tiny_patch16_224").address)
    assert cli.run(["models", "nothing*", "--pretrained"]) == 2
    assert "no checkpoint's name matches 'nothing*'" in capsys.readouterr().err


def test_the_document_agrees_with_the_catalogue():
    page = runpy.run_path(str(ROOT / "scripts" / "weights_table.py"))["page"]
    assert (ROOT / "docs/weights.md").read_text() == page(), "run scripts/weights_table.py"


def test_deit_s_images_keep_their_margin_at_384():
    """Its datasets.py resizes to the side over 0.875, "to maintain same ratio"."""
    assert find("deit/deit_base_patch16_384").preprocess.crop_ratio == 0.875

"""vitkit's own file: it comes back whole, says what it is, and refuses what it is not."""

import json
import os
import resource
from pathlib import Path

import pytest
import safetensors.torch
import torch
from noise import fill_with_noise
from peers import peer
from processes import forked
from torch.nn.utils import prune

import vitkit
from vitkit import CheckpointError, OutputError

SPEC = vitkit.ViTSpec(
    image_size=16, patch_size=4, in_channels=1, num_classes=3, width=16, depth=2, num_heads=2,
    mlp_width=32,
)  # fmt: skip
GREY = vitkit.Preprocess(image_size=16, mean=(0.1307,), std=(0.3081,), fit="squash")
CLASSES = ("cat", "dög", "2")


@pytest.fixture
def model() -> vitkit.ViT:
    model = vitkit.ViT(SPEC)
    fill_with_noise(model, std=0.3)
    return model


def test_a_checkpoint_describes_itself(tmp_path: Path, model):
    path = vitkit.save(
        tmp_path / "a.safetensors", model, preprocess=GREY, classes=CLASSES, metrics={"val": 0.5}
    )
    again = vitkit.load(path)
    assert again.model.spec == SPEC
    assert again.preprocess == GREY
    assert again.classes == CLASSES
    assert again.metadata["metrics"] == {"val": 0.5}
    assert set(again.metadata["versions"]) == {"vitkit", "torch"}
    assert again.format == "vitkit"
    assert not again.model.training
    for name, value in model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    images = torch.randn(2, 1, 16, 16)
    assert torch.equal(again.model(images), model.eval()(images))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def altered(path: Path, **changes: object) -> Path:
    """The same file with parts of its description changed."""
    with safetensors.safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()["vitkit"]) | changes
    safetensors.torch.save_file(
        safetensors.torch.load_file(path), path, {"vitkit": json.dumps(document)}
    )
    return path


def test_files_that_are_no_checkpoints_are_named_for_what_they_are(tmp_path: Path, model):
    whole = vitkit.save(tmp_path / "whole.safetensors", model, preprocess=GREY).read_bytes()
    plain = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({"conv.weight": torch.zeros(2)}, plain)
    cases = {
        "no such file; the nearest folder": tmp_path / "none" / "x.safetensors",
        "is not a run or checkpoint folder": tmp_path,
        "the file is empty": write(tmp_path / "empty.safetensors", b""),
        "not a complete safetensors file": write(tmp_path / "cut.safetensors", whole[:-100]),
        "not a complete safetensors": write(tmp_path / "cut2.safetensors", whole[:50]),
        "a web page": write(tmp_path / "page.safetensors", b"<!DOCTYPE html><html></html>"),
        "a Git LFS pointer": write(
            tmp_path / "lfs.safetensors", b"version https://git-lfs.github.com/spec/v1\n"
        ),
        "is a pickle, and loading": write(tmp_path / "old.pth", b"\x80\x02}q\x00."),
        r"1 tensor \(conv.weight\) in no known format; known formats are vitkit": plain,
    }
    for message, path in cases.items():
        with pytest.raises(CheckpointError, match=message) as error:
            vitkit.load(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_weights_that_do_not_fit_the_description_are_refused(tmp_path: Path, model):
    def fresh(name: str) -> Path:
        return vitkit.save(tmp_path / f"{name}.safetensors", model, preprocess=GREY)

    deeper = altered(fresh("deeper"), spec=SPEC.replace(depth=3).to_json())
    with pytest.raises(CheckpointError, match=r"12 tensors missing \(blocks.2.attn.proj.bias"):
        vitkit.load(deeper)
    with pytest.raises(CheckpointError, match=r"head.bias has shape \(3,\).*needs \(4,\)"):
        vitkit.load(altered(fresh("wider"), spec=SPEC.replace(num_classes=4).to_json()))
    with pytest.raises(CheckpointError, match="format version 99"):
        vitkit.load(altered(fresh("newer"), format_version=99))
    with pytest.raises(CheckpointError, match="width = -1"):
        vitkit.load(altered(fresh("odd"), spec=SPEC.to_json() | {"width": -1}))


def test_a_real_limit_on_the_size_of_files_leaves_the_old_checkpoint(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, model
):
    """A fork may write 4 kB a file: the kernel refuses in the middle of the new one."""
    path = vitkit.save(tmp_path / "a.safetensors", model, preprocess=GREY)
    before = path.read_bytes()
    checkpoint = vitkit.load(path)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    def save_again() -> int:
        with pytest.raises(OutputError) as refused:
            vitkit.save(path, checkpoint.model, preprocess=checkpoint.preprocess)
        print(refused.value)  # noqa: T201
        return refused.value.exit_code

    with forked(save_again, tmp_path_factory.mktemp("printed"), before=limit) as done:
        assert done.wait() == 2, done.stderr
    assert "the file would be larger than the limit allows" in done.stdout
    assert "MB needed" in done.stdout
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_path_through_a_file_is_refused(tmp_path: Path, model):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot write"):
        vitkit.save(tmp_path / "file" / "a.safetensors", model, preprocess=GREY)
    assert (tmp_path / "file").read_text() == "mine"


def pruned(model: vitkit.ViT) -> vitkit.ViT:
    prune.l1_unstructured(model.head, "weight", 0.5)
    return model


def adapted_by_peft(model: vitkit.ViT) -> torch.nn.Module:
    config, wrap = peer("peft", "LoraConfig", "get_peft_model")
    return wrap(model, config(r=2, target_modules=["qkv"]))


def with_nan(model: vitkit.ViT) -> vitkit.ViT:
    model.head.weight.data[0, 0] = torch.nan
    return model


def too_large(model: vitkit.ViT) -> vitkit.ViT:
    model.double().head.weight.data[0, 0] = 1e300
    return model


UNREADABLE = {
    "pruned": (pruned, {}, r"head\.weight_mask.*torch\.nn\.utils\.prune\.remove"),
    "peft": (adapted_by_peft, {}, r"PeftModel is not a ViT; .*merge_and_unload\(\)"),
    "its base": (lambda m: adapted_by_peft(m).get_base_model(), {}, r"lora_A.*merge_and_unload"),
    "NaN": (with_nan, {}, r"head\.weight: 1 of 48 numbers are NaN or infinite"),
    "meta": (lambda model: model.to("meta"), {}, "cls_token: on the meta device, without values"),
    "not a model": (lambda model: model.state_dict(), {}, "OrderedDict is not a ViT; pass a"),
    "numbers": (None, {"classes": range(3)}, "classes contains 0; pass a list of class names"),
    "no names": (None, {"classes": None}, "classes contains None; pass a list"),
    "beyond float32": (too_large, {}, r"head\.weight: 1 of 48 numbers .* infinite in float32"),
    "one text": (None, {"classes": "abc"}, "classes contains 'abc'; pass a list"),
    "long": (None, {"recipe": ["x" * 1_000_000] * 26}, r"26\.\d MB of metadata, and at most 25 MB"),
    "twice": (None, {"recipe": {1: 0, "1": 0}}, "the key '1' occurs twice"),
    "no pixels": (None, {"preprocess": None}, "preprocess= is missing"),
}


@pytest.mark.parametrize("fault", UNREADABLE)
@pytest.mark.usefixtures("wrong_types_come_in")
def test_a_file_that_could_not_be_read_is_not_written(tmp_path: Path, model, fault):
    change, settings, message = UNREADABLE[fault]
    given = change(model) if change else model
    with pytest.raises(CheckpointError, match=message) as error:
        vitkit.save(tmp_path / "a.safetensors", given, **{"preprocess": GREY} | settings)
    assert str(tmp_path / "a.safetensors") in str(error.value)
    assert not any(tmp_path.iterdir())


def test_blocks_that_share_their_weights_are_saved_as_blocks_of_their_own(tmp_path: Path, model):
    model.blocks[1] = model.blocks[0]
    images = torch.rand(2, 1, 16, 16)
    again = vitkit.load(vitkit.save(tmp_path / "a.safetensors", model, preprocess=GREY)).model
    assert torch.equal(again.eval()(images), model.eval()(images))


def test_what_float64_loses_is_noted_beside_earlier_notes(tmp_path: Path, model):
    double = model.double()
    double.head.weight.data /= 3
    path = vitkit.save(tmp_path / "a.safetensors", double, preprocess=GREY, notes=["mine"])
    notes = vitkit.load(path).metadata["notes"]
    assert notes == ["mine", "rounded from float64 to float32: 1 tensor"]


@pytest.mark.usefixtures("wrong_types_come_in")
def test_a_description_that_is_wrong_at_length_is_refused_in_one_short_line(tmp_path: Path, model):
    path = vitkit.save(tmp_path / "a.safetensors", model, preprocess=GREY)
    with safetensors.safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()["vitkit"])
    document["spec"]["activation"] = "x" * 100_000
    safetensors.torch.save_file(model.state_dict(), path, {"vitkit": json.dumps(document)})
    with pytest.raises(CheckpointError, match="activation = 'xxx") as error:
        vitkit.load(path)
    assert len(str(error.value)) < 1000


def test_files_are_as_readable_as_the_umask_says(tmp_path: Path, model):
    before = os.umask(0o027)
    try:
        path = vitkit.save(tmp_path / "a.safetensors", model, preprocess=GREY)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640

"""vitkit's own file: it comes back whole, says what it is, and refuses what it is not."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from noise import fill_with_noise

import vitkit
from vitkit.errors import CheckpointError, OutputError
from vitkit.weights.files import replacing, write_bytes

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


def test_other_libraries_find_plain_tensors_with_timm_s_names(tmp_path: Path, model):
    path = vitkit.save(tmp_path / "a.safetensors", model, preprocess=GREY)
    tensors = safetensors.torch.load_file(path)
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.1.attn.qkv.bias",
            "blocks.0.mlp.fc1.weight", "norm.bias", "head.weight"} <= set(tensors)  # fmt: skip


def test_saving_refuses_names_that_do_not_fit(tmp_path: Path, model):
    with pytest.raises(CheckpointError, match="2 class names for a head of 3"):
        vitkit.save(tmp_path / "a.safetensors", model, preprocess=GREY, classes=("a", "b"))
    with pytest.raises(CheckpointError, match=r"writes \.safetensors files"):
        vitkit.save(tmp_path / "a.pth", model, preprocess=GREY)
    with pytest.raises(CheckpointError, match="the metadata are not JSON"):
        vitkit.save(tmp_path / "a.safetensors", model, preprocess=GREY, loss=float("nan"))


def test_half_precision_weights_are_widened(tmp_path: Path, model):
    path = vitkit.save(tmp_path / "a.safetensors", model.half(), preprocess=GREY)
    again = vitkit.load(path).model
    assert again.head.weight.dtype == torch.float32
    assert torch.equal(again.head.weight, model.head.weight.float())


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
        "or name a file, such as": tmp_path,
        "the file is empty": write(tmp_path / "empty.safetensors", b""),
        "not a whole safetensors file": write(tmp_path / "cut.safetensors", whole[:-100]),
        "not a whole safetensors": write(tmp_path / "cut2.safetensors", whole[:50]),
        "a web page": write(tmp_path / "page.safetensors", b"<!DOCTYPE html><html></html>"),
        "a git-LFS pointer": write(
            tmp_path / "lfs.safetensors", b"version https://git-lfs.github.com/spec/v1\n"
        ),
        "a pickle, which can run code": write(tmp_path / "old.pth", b"\x80\x02}q\x00."),
        r"1 tensors \(conv.weight, ...\) of no known format; known are vitkit": plain,
    }
    for said, path in cases.items():
        with pytest.raises(CheckpointError, match=said) as error:
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


def test_a_write_that_fails_leaves_the_old_file_byte_for_byte(tmp_path: Path):
    path = tmp_path / "a.bin"
    write_bytes(path, b"old")

    def fail_midway() -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"half of the n")
            raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"cannot write .*a.bin: the disk is full"):
        fail_midway()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_real_limit_on_the_size_of_files_leaves_the_old_checkpoint(tmp_path: Path, model):
    """A child process may write 4 kB a file: the kernel refuses in the middle of the new one."""
    path = vitkit.save(tmp_path / "a.safetensors", model, preprocess=GREY)
    before = path.read_bytes()
    code = (
        "import sys, vitkit\n"
        "from vitkit.errors import OutputError\n"
        f"checkpoint = vitkit.load({str(path)!r})\n"
        "try:\n"
        f"    vitkit.save({str(path)!r}, checkpoint.model, preprocess=checkpoint.preprocess)\n"
        "except OutputError as error:\n"
        "    print(error); sys.exit(error.exit_code)\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=limit, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "the file would be larger than the limit allows" in done.stdout
    assert "MB needed" in done.stdout
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_path_through_a_file_is_refused(tmp_path: Path, model):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot write"):
        vitkit.save(tmp_path / "file" / "a.safetensors", model, preprocess=GREY)
    assert (tmp_path / "file").read_text() == "mine"


def test_create_model_takes_a_checkpoint_of_the_same_spec_only(tmp_path: Path):
    fields = {"image_size": 32, "width": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = vitkit.create_model("vit_tiny_patch16_224", **fields)
    fill_with_noise(model)
    path = vitkit.save(tmp_path / "a.safetensors", model, preprocess=vitkit.Preprocess())
    again = vitkit.create_model("vit_tiny_patch16_224", pretrained=path, **fields)
    assert torch.equal(again.head.weight, model.head.weight)
    dropping = vitkit.create_model("vit_tiny_patch16_224", pretrained=path, drop_path=0.3, **fields)
    assert dropping.blocks[1].drop_path1.rate == 0.3
    assert torch.equal(dropping.head.weight, model.head.weight)
    with pytest.raises(CheckpointError, match="depth: 3 asked, 2 in the file"):
        vitkit.create_model("vit_tiny_patch16_224", pretrained=path, **fields | {"depth": 3})

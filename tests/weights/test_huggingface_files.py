"""transformers' folders: read as its own models compute, written so that it loads them strictly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from peers import TOLERANCE, peer, relative
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from weights.round_trips import noisy, written

import vitkit
from vitkit import CheckpointError

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
        "patch_size": 8, "num_labels": 7}  # fmt: skip
MLP = {"intermediate_size": 96}
TANH = {"hidden_act": "gelu_pytorch_tanh", "qkv_bias": False, "layer_norm_eps": 1e-3}
SWIGLU = {"use_swiglu_ffn": True}
THEIRS = {
    "vit": ("ViTForImageClassification", MLP),
    "vit, tanh": ("ViTForImageClassification", MLP | TANH),
    "vit, pooled": ("ViTModel", MLP | {"pooler_output_size": 24}),
    "vit, oblong": ("ViTForImageClassification", MLP | {"image_size": [32, 48]}),
    "deit": ("DeiTForImageClassification", MLP),
    "deit, taught": ("DeiTForImageClassificationWithTeacher", MLP),
    "deit, taught, headless": ("DeiTForImageClassificationWithTeacher", MLP | {"num_labels": 0}),
    "deit, pooled": ("DeiTModel", MLP),
    "dinov2": ("Dinov2ForImageClassification", {}),
    "dinov2, swiglu": ("Dinov2ForImageClassification", SWIGLU),
    "dinov2, headless": ("Dinov2ForImageClassification", {"num_labels": 0}),
    "dinov2, base": ("Dinov2Model", {}),
    "registers": ("Dinov2WithRegistersForImageClassification", {}),
    "registers, swiglu, base": ("Dinov2WithRegistersModel", SWIGLU),
}  # fmt: skip

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 4,
         "mlp_width": 96, "num_classes": 7, "position_resampling": "bicubic"}  # fmt: skip


def theirs(case: str) -> Any:
    """A model of theirs, every parameter off its identity."""
    name, settings = THEIRS[case]
    family = name.removesuffix("WithTeacher").removesuffix("ForImageClassification")
    make_config, make = peer("transformers", f"{family.removesuffix('Model')}Config", name)
    model = make(make_config(**SIZE | settings)).eval()
    fill_with_noise(model, std=0.05)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("lambda1"):
                parameter.add_(1.0)
    return model


@torch.inference_mode()
def read(model: Any, images: Tensor) -> Tensor:
    output = model(images)
    return output.logits if hasattr(output, "logits") else output.pooler_output


def same(ours: vitkit.ViT, model: Any) -> float:
    spec = ours.spec
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, spec.in_channels, *spec.image_size, generator=generator)
    with torch.inference_mode():
        return relative(ours(images), read(model, images))


@pytest.mark.parametrize("case", THEIRS)
def test_their_model_saved_by_themselves_is_computed_by_ours(tmp_path, case):
    model = theirs(case)
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "in_memory", save_original_format=False)
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    saved = vitkit.load(tmp_path / "saved")
    assert saved.format == "huggingface"
    assert saved.metadata["sure"]["norm_eps"] == saved.metadata["sure"]["num_heads"] == "stored"
    assert len(saved.metadata["warnings"]) == (case == "deit")  # no head for its second token
    assert same(saved.model, model) <= TOLERANCE
    unknown = ("num_heads", "image_size", "activation", "pooling", "norm_eps", "distilled_readout")
    given = {name: getattr(saved.model.spec, name) for name in unknown}
    bare = vitkit.load(tmp_path / "bare.pth", trust_pickle=True, **given)
    for other in (vitkit.load(tmp_path / "in_memory"), bare):
        gated = saved.model.spec.mlp != "plain"  # in memory its gates lie apart
        assert other.model.spec == saved.model.spec.replace(
            **{"mlp": "swiglu_split"} if gated else {}
        )
        assert same(other.model, model) <= TOLERANCE


def test_a_bare_file_is_read_with_what_is_usual_and_says_so(tmp_path):
    model = theirs("vit")
    save_file(
        {n: t.contiguous() for n, t in model.state_dict().items()}, tmp_path / "v.safetensors"
    )
    checkpoint = vitkit.load(tmp_path / "v.safetensors")
    assert (checkpoint.model.spec.num_heads, checkpoint.model.spec.norm_eps) == (1, 1e-12)
    for name in ("num_heads", "norm_eps", "preprocess"):
        assert checkpoint.metadata["sure"][name] == "usual"
    assert "need norm_eps=1e-6" in checkpoint.metadata["warnings"][0]
    assert checkpoint.preprocess.fit == "squash"
    (line,) = vitkit.load(tmp_path / "v.safetensors", norm_eps=1e-6).metadata["warnings"]
    assert "usual values: num_heads 1, activation gelu, image_size 32 x 32, preprocess" in line


def test_a_pooler_beside_a_classifier_is_set_aside(tmp_path):
    tensors = dict(theirs("vit").state_dict())
    tensors["vit.pooler.dense.weight"] = torch.ones(64, 64)
    tensors["vit.embeddings.mask_token"] = torch.ones(1, 1, 64)
    torch.save(tensors, tmp_path / "vit.pth")
    checkpoint = vitkit.load(tmp_path / "vit.pth", trust_pickle=True)
    assert checkpoint.model.spec.representation_width is None
    assert len(checkpoint.metadata["notes"]) == 2


CROP = {"interpolation": "bicubic", "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
PREPROCESSINGS = [
    {"fit": "squash", "interpolation": "bilinear"},
    {"fit": "squash", "interpolation": "nearest", "image_size": (32, 48)},
    CROP | {"crop_ratio": 0.875},
    CROP | {"crop_ratio": 0.8},
    CROP | {"crop_ratio": 1.0},
    {"fit": "squash", "mean": (0.5,), "std": (0.25,)},
    {"crop_ratio": 0.875, "mean": (0.5,), "std": (0.25,)},
    CROP | {"fit": "squash-crop", "crop_ratio": 0.8},
    CROP | {"fit": "squash-crop", "crop_ratio": 0.8, "image_size": (32, 48)},
]


def with_preprocess(folder: Path, preprocess: vitkit.Preprocess) -> Path:
    size, channels = preprocess.image_size, preprocess.channels
    spec = vitkit.ViTSpec(**SMALL | {"image_size": size, "in_channels": channels})
    return written("huggingface", noisy(spec), folder, preprocess=preprocess)


@pytest.mark.parametrize("fields", PREPROCESSINGS)
def test_their_processor_makes_the_same_pixels(tmp_path, fields):
    preprocess = vitkit.Preprocess(**{"image_size": 32} | fields)
    folder = with_preprocess(tmp_path / "made", preprocess)
    processor = peer("transformers", "AutoImageProcessor").from_pretrained(folder, backend="pil")
    read = vitkit.load(folder)
    assert read.metadata["warnings"] == []
    assert read.metadata["sure"]["preprocess"] == "stored"
    for shape in ((60, 80), (72, 40), (32, 32), (20, 25)):
        noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
        image = Image.fromarray(noise).convert("RGB" if preprocess.channels == 3 else "L")
        pixels = [np.array(image).reshape(*shape, preprocess.channels)]
        ours = preprocess(pixels)
        made = processor(image, return_tensors="pt")["pixel_values"]
        assert (made - ours).abs().max() <= 1e-6, shape
        assert torch.equal(read.preprocess(pixels), ours), shape


def test_their_cut_of_an_odd_excess_may_lie_one_pixel_before_ours(tmp_path):
    preprocess = vitkit.Preprocess(image_size=32, crop_ratio=1.0)
    folder = with_preprocess(tmp_path / "made", preprocess)
    processor = peer("transformers", "AutoImageProcessor").from_pretrained(folder, backend="pil")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 35, 3), dtype=np.uint8)
    made = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    for image, equal in ((pixels[:, 1:33], True), (pixels[:, 2:34], False)):
        difference = (made - preprocess([image])).abs().max()
        assert (difference <= 1e-6) == equal
    ours = preprocess([pixels[:, 2:34]])
    assert torch.equal(preprocess([pixels]), ours)


PROCESSORS = [
    ("ViTImageProcessor", {"size": {"height": 32, "width": 32}}),
    ("BitImageProcessor", {"size": {"shortest_edge": 37}, "crop_size": 32, "do_rescale": True}),
    ("BitImageProcessor", {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32},
                           "do_normalize": False}),
    ("DeiTImageProcessor", {"size": {"height": 36, "width": 36},
                            "crop_size": {"height": 32, "width": 32}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), PROCESSORS)
def test_their_processor_saved_by_itself_is_understood(tmp_path, name, fields):
    theirs("vit").save_pretrained(tmp_path)
    processor = peer("transformers", f"{name}Pil")(**fields)
    processor.save_pretrained(tmp_path)
    checkpoint = vitkit.load(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    made = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    assert relative(checkpoint.preprocess([pixels]), made) <= 1e-6
    assert checkpoint.metadata["warnings"] == []
    assert checkpoint.metadata["sure"]["preprocess"] == "stored"


def test_older_processors_are_understood(tmp_path):
    model = theirs("vit")
    model.save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"feature_extractor_type": "ViTFeatureExtractor", "size": 32}))
    assert vitkit.load(tmp_path).preprocess.fit == "squash"
    old = {"feature_extractor_type": "DeiTFeatureExtractor", "size": 256, "crop_size": 224}
    file.write_text(json.dumps(old))
    read = vitkit.load(tmp_path)
    assert (read.preprocess.fit, read.preprocess.crop_ratio) == ("squash-crop", 0.875)
    (line,) = read.metadata["warnings"]
    assert "images become 224 x 224 there; 32 x 32 here" in line
    oblong = {"size": {"height": 256, "width": 230}, "crop_size": 32, "do_center_crop": True}
    file.write_text(json.dumps({"image_processor_type": "DeiTImageProcessor", **oblong}))
    (line,) = vitkit.load(tmp_path).metadata["warnings"]
    assert "images are resized or cropped in another way there" in line


def edited(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_function_after_a_pooler_that_nothing_reads_is_no_hindrance(tmp_path):
    theirs("vit").save_pretrained(tmp_path)
    assert vitkit.load(edited(tmp_path, pooler_act="relu")).model.spec.num_classes
    base = noisy(vitkit.ViTSpec(**SMALL | {"num_classes": 0, "representation_width": 8}))
    folder = edited(written("huggingface", base, tmp_path / "base"), pooler_act="relu")
    with pytest.raises(CheckpointError, match="pooler_act 'relu' is not tanh"):
        vitkit.load(folder)


def test_a_config_that_contradicts_the_tensors_is_doubted(tmp_path):
    written("huggingface", noisy(vitkit.ViTSpec(**SMALL)), tmp_path)
    checkpoint = vitkit.load(edited(tmp_path, hidden_size=768, id2label={"0": "a", "1": "b"}))
    assert checkpoint.classes == ()
    assert checkpoint.metadata["warnings"] == [
        "config.json has width 768, the tensors 64",
        "config.json names 2 classes, the head has 7; the names are left out",
    ]

"""Aliases of format names, with hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vitkit.messages import did_you_mean

_FORMATS: Mapping[str, tuple[str, ...]] = {
    "huggingface": ("hf", "hub", "hugging_face", "huggingface_hub", "transformers"),
    "timm": ("pytorch_image_models", "rwightman"),
    "torchvision": ("tv",),
    "google": ("augreg", "big_vision", "flax", "jax", "npz", "vision_transformer"),
    "deit": ("facebook", "meta"),
    "dinov2": ("dino",),
    "lucidrains": ("vit_pytorch",),
    "vitkit": ("bin", "native", "pt", "pth", "pytorch", "safetensors", "torch"),
}
"""Format -> words for it, in lower case, with _ for hyphens and spaces."""
_EXPORTS = ("coreml", "onnx", "openvino", "tensorrt", "tflite", "torchscript")
"""Formats of programs, not of weights."""


def right_word(word: str, choices: Sequence[str]) -> str:
    """Return a hint for an unknown format name: an alias's hint, or the nearest choice."""
    return answer_to(word) or did_you_mean(word, choices)


def answer_to(word: str) -> str:
    """Return the hint for an alias; empty for an unknown word.

    >>> answer_to("Hugging-Face")
    '; pass --to huggingface'
    """
    plain = word.lower().lstrip(".").replace("-", "_").replace(" ", "_")
    if plain in _EXPORTS:
        return f"; export a model to {word} from Python, as torch does: vitkit.load(FILE).model"
    if plain == "dinov3":
        return "; DINOv3's models are written by --to timm"
    for name, words in _FORMATS.items():
        if plain == name or plain in words:
            end = ", which writes one .safetensors file" if name == "vitkit" else ""
            return f"; pass --to {name}{end}"
    return ""

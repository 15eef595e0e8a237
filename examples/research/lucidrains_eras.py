"""Convert a file of vit-pytorch 1.0 to 1.15, which vitkit does not read, to a checkpoint of vitkit.

    python examples/research/lucidrains_eras.py OLD.pt NEW.safetensors [--pooling mean]

These releases have a LayerNorm on each side of the patch projection, as the newest one. Up to 1.3
`ViT`'s blocks were wrapped (`fn`), and the last norm stood in the head, after pooling; up to 1.15
tokens and positions had a batch axis, and `pool="mean"` was over all tokens. So the tensors get
their newest names and shapes, and the model gets its pooling and the place of its last norm.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import vitkit

PARTS = {
    "0.fn.to_qkv": "0.to_qkv",
    "0.fn.to_out.0": "0.to_out.0",
    "1.norm": "1.net.0",
    "1.fn.net.0": "1.net.1",
    "1.fn.net.3": "1.net.4",
    "mlp_head.0": "transformer.norm",
    "mlp_head.1": "mlp_head",
    "linear_head.0": "transformer.norm",
    "linear_head.1": "linear_head",
}
"""Names of parts, or of a block's parts, up to 1.3 -> those of the newest release."""
NAME = re.compile(r"^(transformer\.layers\.\d+\.|)(.+)(\.(?:weight|bias))$")


def newest(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the names and shapes of the newest release."""
    renamed = {}
    for name, tensor in weights.items():
        if found := NAME.match(name):
            block, part, kind = found.groups()
            name = block + PARTS.get(part, part) + kind
        if name in ("cls_token", "pos_embedding"):
            tensor = tensor.flatten(end_dim=-2)  # (1, N, D) -> (N, D)
        renamed[name] = tensor.contiguous()
    return renamed


def convert(source: Path, target: Path, pooling: str = "cls", **fields: Any) -> vitkit.Checkpoint:
    """Write a file of theirs as a checkpoint of vitkit, and return that.

    Args:
        source: `state_dict()` of `ViT` or `SimpleViT`, as a pickle or safetensors.
        target: the file to write.
        pooling: `cls` or `mean`, as `pool` of `ViT`; `SimpleViT` has the mean.
        **fields: of `ViTSpec` that the file does not contain, such as `num_heads`.
    """
    if source.suffix == ".safetensors":
        weights = load_file(source)
    else:
        weights = torch.load(source, map_location="cpu", weights_only=True)
    is_simple = "pos_embedding" not in weights
    if not is_simple:
        fields["pooling"] = "cls" if pooling == "cls" else "mean_all"
    if weights.keys() & {"mlp_head.0.weight", "linear_head.0.weight"}:
        fields["norm_before_pool"] = not is_simple and pooling == "cls"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "newest.safetensors"
        save_file(newest(weights), file)
        checkpoint = vitkit.load(file, **fields)
    vitkit.save(target, checkpoint.model, preprocess=checkpoint.preprocess)
    return checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--pooling", choices=["cls", "mean"], default="cls")
    for name in ("--num-heads", "--image-size"):
        parser.add_argument(name, type=int, help="where the file does not contain it")
    args = vars(parser.parse_args())
    checkpoint = convert(**{name: value for name, value in args.items() if value is not None})
    print(f"wrote {args['target']}: {checkpoint.model.spec}")


if __name__ == "__main__":
    main()

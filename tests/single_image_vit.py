"""A ViT written out for one image in plain tensors, from a state dict, in float64.

Tests of explanations compare with it: it knows nothing of `Record`, of kernels or of batches. Every
attention map has a `shift` of zeros added to it, by which its gradient is found, and so has the
input of every block's attention.
"""

import math
from dataclasses import dataclass, field

import torch
from noise import fill_with_noise
from torch import Tensor

import vitkit

SMALL = {"image_size": (24, 32), "patch_size": 8, "width": 16, "depth": 3, "num_heads": 2,
         "mlp_width": 24, "num_classes": 5}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "class token": {},
    "registers": {"num_registers": 2},
    "distilled, mean of both heads": {"distillation_token": True},
    "distilled, class head": {"distillation_token": True, "distilled_readout": "cls"},
    "mean": {"class_token": False, "pooling": "mean"},
    "mean, class token unread, norm after": {"pooling": "mean", "norm_before_pool": False},
    "mean of all": {"pooling": "mean_all", "num_registers": 2},
    "class token and mean": {"pooling": "cls_mean"},
    "MAP": {"class_token": False, "pooling": "map", "num_registers": 1},
    "RoPE": {"positions": "rope", "num_registers": 1, "head_width": 4},
    "post-norm": {"block": "post_norm", "positions": "none"},
    "res-post-norm, LayerScale": {"block": "res_post_norm", "layer_scale": 0.5},
    "SwiGLU": {"mlp": "swiglu_packed", "activation": "silu", "pooling": "cls_mean"},
}
"""Fields of a spec: what methods of explanation must carry."""


def noisy_model(case: str = "class token", **fields: object) -> vitkit.ViT:
    """A small model of a case with noise for weights, float64, in eval mode; its grid is 3 x 4."""
    vit = vitkit.ViT(vitkit.ViTSpec(**SMALL | CASES[case] | fields))
    fill_with_noise(vit, seed=3, std=0.4)
    return vit.double().eval()


def some_images(count: int = 2, height: int = 24, width: int = 32) -> Tensor:
    """Seeded noise (B, 3, H, W) float64."""
    made = torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(5))
    return made.double()


@dataclass
class Pass:
    """What happened on the way of one image.

    Attributes:
        maps: of each layer (k, T, T).
        shifts: the zeros that were added to them.
        inputs: of each layer's attention (T, D).
        input_shifts: the zeros that were added to these; to the block's input without a norm first.
        tokens: after each block (T, D).
        normed: the same after the last norm.
        pooling: the MAP head's map (k, N) and its shift.
        read: the weight of each token in what the head reads (T,).
        logits: (K,).
    """

    maps: list[Tensor] = field(default_factory=list)
    shifts: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    input_shifts: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    normed: list[Tensor] = field(default_factory=list)
    pooling: list[Tensor] = field(default_factory=list)
    read: Tensor = field(default_factory=lambda: torch.zeros(0))
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))


class PlainViT:
    """The model of a state dict; `run` is one pass of one image (C, H, W)."""

    def __init__(self, model: vitkit.ViT) -> None:
        self.spec = model.spec
        self.weights = {name: value.double() for name, value in model.state_dict().items()}
        self.rows = self.columns = 0

    def run(self, image: Tensor) -> Pass:
        made = Pass()
        z = self.embed(image.double())
        for layer in range(self.spec.depth):
            z = self.block(layer, z, made)
            made.tokens.append(z)
            made.normed.append(self.norm("norm", z))
        self.read_out(made)
        return made

    def linear(self, name: str, x: Tensor) -> Tensor:
        made = x @ self.weights[f"{name}.weight"].T
        return made + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else made

    def norm(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in self.weights:
            return x
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + self.spec.norm_eps).sqrt()
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def embed(self, image: Tensor) -> Tensor:
        height, width = self.spec.patch_size
        self.rows, self.columns = image.shape[1] // height, image.shape[2] // width
        kernel = self.weights["patch_embed.proj.weight"].flatten(1)
        patches = []
        for row in range(self.rows):
            for column in range(self.columns):
                patch = image[:, row * height : (row + 1) * height,
                              column * width : (column + 1) * width]  # fmt: skip
                patches.append(kernel @ patch.flatten() + self.weights["patch_embed.proj.bias"])
        prefix = [self.weights[name][0] for name in ("cls_token", "dist_token", "reg_token")
                  if name in self.weights]  # fmt: skip
        z = torch.cat([*prefix, torch.stack(patches)])
        return z + self.weights["pos_embed"][0] if "pos_embed" in self.weights else z

    def block(self, layer: int, z: Tensor, made: Pass) -> Tensor:
        name, kind = f"blocks.{layer}", self.spec.block
        shift = torch.zeros_like(z, requires_grad=True)
        made.input_shifts.append(shift)
        if kind == "pre_norm":
            x = self.norm(f"{name}.norm1", z) + shift
        else:
            x = z = z + shift
        made.inputs.append(x)
        first = self.attention(f"{name}.attn", x, made)
        if kind == "post_norm":
            z = self.norm(f"{name}.norm1", z + first)
            return self.norm(f"{name}.norm2", z + self.mlp(f"{name}.mlp", z))
        if kind == "res_post_norm":
            z = z + self.scaled(f"{name}.ls1", self.norm(f"{name}.norm1", first))
            second = self.norm(f"{name}.norm2", self.mlp(f"{name}.mlp", z))
            return z + self.scaled(f"{name}.ls2", second)
        z = z + self.scaled(f"{name}.ls1", first)
        second = self.mlp(f"{name}.mlp", self.norm(f"{name}.norm2", z))
        return z + self.scaled(f"{name}.ls2", second)

    def scaled(self, name: str, x: Tensor) -> Tensor:
        return x * self.weights[f"{name}.gamma"] if f"{name}.gamma" in self.weights else x

    def mlp(self, name: str, x: Tensor) -> Tensor:
        hidden = self.linear(f"{name}.fc1", x)
        if self.spec.mlp == "swiglu_packed" and name.startswith("blocks"):
            gate, value = hidden[..., : hidden.shape[-1] // 2], hidden[..., hidden.shape[-1] // 2 :]
            return self.linear(f"{name}.fc2", gate * gate.sigmoid() * value)
        return self.linear(f"{name}.fc2", hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2)

    def attention(self, name: str, x: Tensor, made: Pass) -> Tensor:
        count, width = self.spec.num_heads, self.spec.attention_width // self.spec.num_heads
        qkv = self.linear(f"{name}.qkv", x)
        mixed, maps, shifts = [], [], []
        for head in range(count):
            q, k, v = (qkv[:, (part * count + head) * width : (part * count + head + 1) * width]
                       for part in range(3))  # fmt: skip
            if self.spec.positions == "rope":
                q, k = self.turned(q), self.turned(k)
            weights = self.softmax(q @ k.T / math.sqrt(width))
            shifts.append(torch.zeros_like(weights, requires_grad=True))
            maps.append(weights)
            mixed.append((weights + shifts[-1]) @ v)
        made.maps.append(torch.stack(maps))
        made.shifts.append(shifts)
        return self.linear(f"{name}.proj", torch.cat(mixed, dim=1))

    @staticmethod
    def softmax(scores: Tensor) -> Tensor:
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True)

    def turned(self, x: Tensor) -> Tensor:
        """RoPE of DINOv3, patch by patch: the pairs are (i, i + h/2)."""
        prefix, width = self.spec.num_prefix_tokens, x.shape[1]
        quarter = width // 4
        lines = [*x[:prefix]]
        for number, line in enumerate(x[prefix:]):
            row, column = divmod(number, self.columns)
            places = [2 * (row + 0.5) / self.rows - 1] * quarter
            places += [2 * (column + 0.5) / self.columns - 1] * quarter
            made = torch.zeros_like(line)
            for i, place in enumerate(places):
                angle = 2 * math.pi * place / self.spec.rope_temperature ** (i % quarter / quarter)
                one, other = line[i], line[i + width // 2]
                made[i] = one * math.cos(angle) - other * math.sin(angle)
                made[i + width // 2] = other * math.cos(angle) + one * math.sin(angle)
            lines.append(made)
        return torch.stack(lines)

    def read_out(self, made: Pass) -> None:
        spec, z = self.spec, made.normed[-1]
        prefix, count = spec.num_prefix_tokens, len(z)
        read = torch.zeros(count, dtype=z.dtype)
        if spec.pooling == "map":
            pooled = self.map_head(z[prefix:], made)
            read[prefix:] = made.pooling[0].mean(0)
        elif spec.pooling == "mean":
            pooled = z[prefix:].mean(0)
            read[prefix:] = 1 / (count - prefix)
        elif spec.pooling == "mean_all":
            pooled = z.mean(0)
            read[:] = 1 / count
        elif spec.pooling == "cls_mean":
            pooled = torch.cat([z[0], z[prefix:].mean(0)])
            read[prefix:] = 1 / (count - prefix) / 2
            read[0] = 1 / 2
        else:
            pooled = z[0]
            read[0] = 1
        made.read = read
        made.logits = self.linear("head", self.norm("fc_norm", pooled))
        if spec.distillation_token and spec.distilled_readout == "mean":
            made.logits = (made.logits + self.linear("head_dist", z[1])) / 2
            read[0] = read[1] = 1 / 2

    def map_head(self, patches: Tensor, made: Pass) -> Tensor:
        count, width = self.spec.num_heads, self.spec.attention_width // self.spec.num_heads
        q = self.linear("attn_pool.q", self.weights["attn_pool.latent"][0, 0])
        kv = self.linear("attn_pool.kv", patches)
        shift = torch.zeros(count, len(patches), dtype=kv.dtype, requires_grad=True)
        maps, mixed = [], []
        for head in range(count):
            part = slice(head * width, (head + 1) * width)
            k, v = kv[:, part], kv[:, count * width :][:, part]
            maps.append(self.softmax(k @ q[part] / math.sqrt(width)))
            mixed.append((maps[-1] + shift[head]) @ v)
        made.pooling = [torch.stack(maps), shift]
        pooled = self.linear("attn_pool.proj", torch.cat(mixed))
        return pooled + self.mlp("attn_pool.mlp", self.norm("attn_pool.norm", pooled))


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Assert that a map in float64 is that of the loop: rounding apart, so far below 1e-5."""
    assert found.shape == expected.shape
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8 * scale)

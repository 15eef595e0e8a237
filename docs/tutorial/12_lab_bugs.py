# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 12. Bugs of the lab notebook, and what they cost
#
# The fifth source is a lab notebook in three parts: the original Transformer, a ViT on MNIST, and
# distillation. Its bugs are shown as [those of the others](11_bugs.py): each in a few lines, with its
# symptom computed. What those of its ViT cost together is measured in [chapter
# 5](05_training.py#mnist-the-notebooks-model), beside the same model without the mistakes: at the
# notebook's rate less than one would think.

# %%
import math
import time

import torch
from matplotlib import pyplot as plt
from symptom import fails
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from vitkit.models.embedding import patchify
from vitkit.models.positions import sincos_1d

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## The original Transformer
#
# ### An exponent that is always 0
# `dim // dim_model` is 0 for every column, so all waves are $\sin n$ and $\cos n$. Then places that lie
# whole turns apart are told the same: 44 is almost $7 \cdot 2\pi$. The table is also made on the CPU,
# whatever the model is on. `sincos_1d` is the formula, and goes where the tokens are.

# %%
exponents = torch.arange(0, 128, 2) // 128
angles = torch.arange(196.0)[:, None] * 10000.0 ** -exponents.float()
mistaken = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
tables = {"dim // dim_model": mistaken, "sincos_1d": sincos_1d(196, 128)}
for name, table in tables.items():
    print(f"{name}: {len(table.T.unique(dim=0))} different columns of 128;",
          f"places 0 and 44 differ by at most {(table[0] - table[44]).abs().max():.3f}")  # fmt: skip
fails(lambda: torch.zeros(196, 128, device="meta") + mistaken)

# %% mystnb={"figure": {"caption": "How alike place 0 is to the places after it. With the formula likeness falls and stays well below that of a place to itself; with the mistaken exponent it is a cosine, and place 44 cannot be told from place 0."}}
figure, place = plt.subplots(figsize=(5, 2.6))
for name, table in tables.items():
    place.plot(table[:100] @ table[0] / 64, label=name)
place.set(xlabel="place", ylabel="likeness to place 0", ylim=(-1.1, 1.7))
_ = place.legend(loc="upper right", ncol=2)

# %% [markdown]
# ### No mask
# A decoder without a causal mask sees what it is to predict: another last word changes the first
# answer. Without a padding mask, padding is read. `Transformer` is always causal and takes both masks
# ([chapter 10](10_transformer.py#what-goes-wrong-without-a-causal-mask)).

# %%
source, target = torch.rand(1, 5, 32), torch.rand(1, 4, 32)
longer = torch.cat([target[:, :3], torch.rand(1, 1, 32)], dim=1)
ours = vitkit.Transformer(32, 4, encoder_depth=1, decoder_depth=1, mlp_width=64).eval()
theirs = nn.Transformer(32, 4, 1, 1, 64, batch_first=True).eval()  # called with no mask
with torch.no_grad():
    for name, model in (("no mask", theirs), ("vitkit", ours)):
        seen = (model(source, target) - model(source, longer))[:, 0].abs().max()
        print(f"{name}: another last word changes the first answer by {seen:.0e}")
    padded, real = F.pad(source, (0, 0, 0, 3)), torch.arange(8)[None] < 5
    unmasked = (theirs(padded, target) - theirs(source, target)).abs().max()
    masked = (ours(padded, target, source_mask=real) - ours(source, target)).abs().max()
print(f"three padded tokens change the answers: no mask {unmasked:.0e}, vitkit {masked:.0e}")

# %% [markdown]
# ### Softmax at the decoder's end
# Cross-entropy takes the softmax itself. Given probabilities, it has a floor: for a perfect answer
# among $V$ words, $\ln(e + V - 1) - 1$, at most 1 less than for a blind one. Logits here.

# %%
for vocabulary in (10, 512):
    perfect = F.one_hot(torch.arange(vocabulary), vocabulary).float()
    floor = F.cross_entropy(perfect, torch.arange(vocabulary))
    print(f"{vocabulary} words: perfect {floor:.3f}, blind {math.log(vocabulary):.3f}")

# %% [markdown]
# ### An activation that is ignored
# The argument is there; the code uses ReLU. Here every name is another module, and an unknown one is
# refused.


# %%
class Deaf(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = nn.ReLU()


x = torch.linspace(-2, 2, 9)
for kind in (lambda name: Deaf(name).activation(x), lambda name: vitkit.MLP.activations[name]()(x)):
    print("gelu and relu are the same:", torch.equal(kind("gelu"), kind("relu")))
fails(lambda: vitkit.Transformer(32, 4, activation="relo"))

# %% [markdown]
# ### Queries and keys of different widths
# `dim_q` and `dim_k` are two arguments, and the scalar product needs one number. Here each goes
# through its own matrix to one head width first; values may have another.

# %%
q, k, v = torch.rand(5, 32), torch.rand(7, 48), torch.rand(7, 10)
fails(lambda: q @ k.T)
to_q, to_k = nn.Linear(32, 16), nn.Linear(48, 16)
print(tuple(vitkit.scaled_dot_product_attention(to_q(q), to_k(k), v).shape))

# %% [markdown]
# ### `src +=`
# The positions are added to the caller's own tensor: the second call gets other numbers. Nothing is
# changed in place here.


# %%
def careless_forward(src: torch.Tensor) -> torch.Tensor:
    src += 1.0
    return src


given, kept = torch.zeros(3), source.clone()
careless_forward(given), careless_forward(given)
ours(source, target)
print("after two calls:", given.tolist(), "; unchanged by Transformer:", torch.equal(source, kept))

# %% [markdown]
# ### Defaults that differ
# One class has 6 heads by default, another 8, and with 6 heads of 85 a model is another model.
# There is one default here, and a head width may be given.

# %%
with torch.device("meta"):
    for heads in ({"num_heads": 8}, {"num_heads": 6, "head_width": 85}):
        model = vitkit.Transformer(512, final_norm=False, **heads)
        print(heads, f"{sum(p.numel() for p in model.parameters()):,}")

# %% [markdown]
# ## A ViT on MNIST
#
# ### `reshape` for patches
# 16 pixels in reading order instead of squares of 4 x 4: none of the 49 is a patch ([chapter
# 1](01_patches.py#why-reshape-does-not-cut-patches)). `patchify` cuts squares.

# %%
rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
digit = torch.stack([rows, columns])[:, None]  # two "digits": a pixel's row, a pixel's column
for name, cut in (("reshape", digit.reshape(2, 49, 16)), ("patchify", patchify(digit, (4, 4)))):
    wide = (cut.amax(-1) - cut.amin(-1) + 1).int()
    right = ((wide[0] == 4) & (wide[1] == 4)).sum()
    print(f"{name}: {right} of 49 are 4 x 4; the widest spans {wide[1].max()} columns")

# %% [markdown]
# ### Heads that see their own slice
# Each head reads its own part of the token, and nothing mixes them after. So the first half of the
# answer never depends on the second half of the tokens. Here a head reads the whole token, and
# $U_{msa}$ mixes.


# %%
class Sliced(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.mappings = [nn.Linear(width // heads, 3 * (width // heads)) for _ in range(heads)]

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        parts = zip(self.mappings, z.chunk(len(self.mappings), dim=-1), strict=True)
        qkv = [mapping(part).chunk(3, dim=-1) for mapping, part in parts]
        return torch.cat([vitkit.scaled_dot_product_attention(q, k, v) for q, k, v in qkv], dim=-1)


sliced, z = Sliced(20, 2), torch.rand(1, 50, 20)
other = torch.cat([z[..., :10], torch.rand(1, 50, 10)], dim=-1)
for name, msa in (("sliced", sliced), ("vitkit", vitkit.MultiHeadSelfAttention(20, 2))):
    print(f"{name}: first half changes by {(msa(z) - msa(other))[..., :10].abs().max():.0e}")

# %% [markdown]
# ### Heads in a Python list
# The list above is a plain one, as in the notebook: its weights are not registered, so they are not
# trained, moved or stored ([chapter 5](05_training.py) has the whole model). Here they are modules.

# %%
hidden = sum(p.numel() for mapping in sliced.mappings for p in mapping.parameters())
print("plain list: registered", sum(p.numel() for p in sliced.parameters()), "of", hidden)
print(
    "vitkit:", sum(p.numel() for p in vitkit.MultiHeadSelfAttention(20, 2).parameters()), "of 1680"
)

# %% [markdown]
# ### A norm over tokens and width together
# It ties the model to one number of tokens, and a change in one token changes all. Here a norm is over
# the width ([chapter 3](03_encoder.py#exercises)).

# %%
both, alone = nn.LayerNorm((50, 20)), nn.LayerNorm(20)
changed = z.clone()
changed[0, 0] += 10
for name, norm in (("both", both), ("width", alone)):
    moved = (norm(z) - norm(changed))[0, 7].abs().max()
    numbers = sum(p.numel() for p in norm.parameters())
    print(f"{name}: token 7 changes by {moved:.0e}; {numbers:,} numbers")
fails(lambda: both(torch.rand(1, 65, 20)))

# %% [markdown]
# ### No norm before the head
# Blocks norm what they read and not what they add to, so nothing holds the size of what the last one
# leaves. Without a norm after it the logits are as large as the tokens happen to be. Eq. 4 has that
# norm, and so has `vitkit.ViT`.

# %%
block, head = vitkit.EncoderBlock(20, 2, 20).eval(), nn.Linear(20, 10)
for name, last in (("no norm", nn.Identity()), ("a norm", nn.LayerNorm(20))):
    sizes = [head(last(block(scale * z)))[:, 0].norm() for scale in (1, 10)]
    print(f"{name}: logits of size {sizes[0]:.2f}, {sizes[1]:.2f} of tokens ten times as large")

# %% [markdown]
# ### Softmax before the loss
# The floor from above, for ten digits; and with it most of the gradient of a wrong answer goes.

# %%
logits = torch.tensor([[9.0, 0.0, 0.0]], requires_grad=True)  # sure, and wrong
for name, given in (("logits", logits), ("probabilities", logits.softmax(1))):
    (slope,) = torch.autograd.grad(
        F.cross_entropy(given, torch.tensor([1])), logits, retain_graph=True
    )
    print(f"{name}: gradient {slope.norm():.1e}")

# %% [markdown]
# ### A loss that is divided twice
# Cross-entropy is a mean already; divided by the batch size again it is 16 times too small in
# print. What vitkit reports are sums over images, divided once.

# %%
losses = torch.full((4,), 2.3)  # the means of four batches of 16
print(f"{(losses / 16).mean():.3f} in print, {losses.mean():.3f} in truth")

# %% [markdown]
# ### Attention computed twice
# Once for the answer and once more to hand out the weights. `return_weights` gives both from one
# pass, and a `Record` only what was asked for.

# %%
q, k, v = torch.rand(3, 50, 10)
for name, calls in (("twice", 2), ("once", 1)):
    with FlopCounterMode(display=False) as counter:
        for _ in range(calls):
            vitkit.scaled_dot_product_attention(q, k, v, return_weights=True)
    print(f"{name}: {counter.get_total_flops() // 2:,} multiply-adds")

# %% [markdown]
# ### Evaluation as if in training
# Without `eval()` dropout stays on, and without `no_grad()` every activation is kept. `evaluate`
# and `Predictor` do both.

# %%
model = vitkit.create_model("vit_cifar_patch4_32", num_classes=0, mlp_dropout=0.1)
images = torch.rand(1, 3, 32, 32)
first, second = model(images), model(images)
print(f"two calls differ by {(first - second).abs().max():.2f};", end=" ")
print("a graph is kept:", first.requires_grad)
with torch.inference_mode():
    first, second = model.eval()(images), model(images)
print(f"as it should be: {(first - second).abs().max():.2f}, {first.requires_grad}")

# %% [markdown]
# ### Width and height swapped
# `n, c, w, h = images.shape` names them the wrong way round. Squares do not show it. Height comes
# first everywhere here.

# %%
n, c, w, h = (1, 3, 32, 64)  # an image 32 high and 64 wide
print("mistaken: rows and columns of patches", (h // 4, w // 4), end="; ")
print("vitkit", vitkit.ViTSpec(image_size=(32, 64), patch_size=4).grid)

# %% [markdown]
# ### Positions in a loop
# A Python double loop makes the table at every forward pass. The text also has the exponent of the
# cosines wrong (a pair no longer turns on a circle) and the order of frequencies reversed: the fast
# waves come first.

# %%
start = time.perf_counter()
looped = torch.zeros(196, 128)
for n in range(196):
    for j in range(128):
        angle = n / 10000 ** (j / 128)  # a cosine is to have the exponent of its sine, j - 1
        looped[n, j] = math.cos(angle) if j % 2 else math.sin(angle)
middle = time.perf_counter()
table = sincos_1d(196, 128)
print(f"the loop takes {(middle - start) / (time.perf_counter() - middle):.0f} times as long")
for name, made in (("mistaken", looped), ("sincos_1d", table)):
    radius = made[:, 0::2] ** 2 + made[:, 1::2] ** 2
    print(f"{name}: radius of the pairs {radius.min():.2f} to {radius.max():.2f}")
turns = (table[1:, 0::2] * table[:-1, 0::2] < 0).sum(0)
print(f"sign changes: {turns[0]} in the first sine, {turns[-1]} in the last")

# %% [markdown]
# ## Distillation
#
# ### A teacher that is never put in `eval()`
# Its BatchNorm statistics move with the student's images, so it is another teacher at every step.
# `DistillWrapper` keeps it in eval mode ([chapter 9](09_distillation.py#two-slips-and-what-they-cost)).

# %%
spec = vitkit.ViTSpec(
    image_size=8, patch_size=4, width=16, depth=1, num_heads=2, mlp_width=16, num_classes=3,
    distillation_token=True,
)  # fmt: skip
student, images, labels = vitkit.ViT(spec), torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
teacher = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
mean = teacher[1].running_mean.clone()
teacher(images)
print(f"never in eval: mean moves by {(teacher[1].running_mean - mean).norm():.1e}", end="; ")
mean, wrapper = teacher[1].running_mean.clone(), vitkit.DistillWrapper(student, teacher).train()
wrapper(images, labels)
print(f"in DistillWrapper: {(teacher[1].running_mean - mean).norm():.0e}")

# %% [markdown]
# ### A token that nobody trains
# Token and head live in the wrapper. The optimizer was made over the student, so they stay as they
# began. Here they are the student's own, with `distillation_token=True` in its spec.

# %%
token = nn.Parameter(torch.zeros(1, 1, 16))  # lives in a wrapper
for name, parameter in (("the wrapper's", token), ("the student's", student.dist_token)):
    found = any(parameter is each for each in student.parameters())
    print(f"{name} token is among what the student's optimizer trains: {found}")

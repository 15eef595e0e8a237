# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 11. Bugs, and what they cost
#
# Five published notebooks and pages taught Vision Transformers before this tutorial did. They are
# good reading, and most of what is in them is right. This page collects what is not: each bug in a
# few lines of our own, with its symptom computed, and what vitkit does instead. Many of them raise
# no error: a model with several still trains, only worse. [Chapter
# 5](05_training.py#mnist-the-notebooks-model) measures what those of the lab's model cost together.

# %%
import math
import time

import torch
from matplotlib import pyplot as plt
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from vitkit.models.embedding import patchify
from vitkit.models.positions import resample_positions, sincos_1d

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80


def fails(attempt) -> None:
    """Runs it and prints the first line of the error it ends with."""
    try:
        attempt()
    except (RuntimeError, TypeError, vitkit.VitkitError) as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    else:
        raise AssertionError("no error")


def zeros(tensor: torch.Tensor) -> str:
    return f"{(tensor == 0).float().mean():.2f} of the numbers are zero"


# %% [markdown]
# ## A. Equation by equation
#
# ### The batch size in the class token
# Class token and positions are made as `(batch, ...)` with a batch of 1, so a batch of 2 fails.
# They also start at ones or as $N(0, 1)$, and then the place of a patch outweighs its content.
# vitkit's are `(1, 1, D)` and `(1, T, D)`, expanded, and start as $N(0, 0.02)$ ([chapter
# 1](01_patches.py#all-of-eq-1)).

# %%
two = torch.rand(2, 196, 768)
fails(lambda: torch.cat([torch.ones(1, 1, 768), two], dim=1))
print("expanded:", tuple(torch.cat([torch.ones(1, 1, 768).expand(2, -1, -1), two], dim=1).shape))
content = vitkit.PatchEmbedding()(torch.rand(1, 3, 224, 224)).std()
for std in (1.0, 0.02):
    share = std**2 / (std**2 + content.item() ** 2)
    print(f"positions of N(0, {std:g}): {share:.1%} of the variance of a token")

# %% [markdown]
# ### A width that is written in
# The norms are made for 768 numbers, whatever the model's width. Here the width is an argument of
# all.

# %%
fails(lambda: nn.LayerNorm(768)(torch.rand(1, 197, 192)))
print(tuple(vitkit.EncoderBlock(192, 3, 768)(torch.rand(1, 197, 192)).shape))

# %% [markdown]
# ### A check that is announced
# The text asks that the patch divides the picture. The code does not. `ViTSpec` does.

# %%
print(f"250 pixels: {(250 // 16) ** 2} patches, {250 * 250 // 16**2} positions")
fails(lambda: torch.rand(1, 225, 768) + torch.rand(1, 244, 768))
fails(lambda: vitkit.ViTSpec(image_size=250))

# %% [markdown]
# ### No dropout after the attention's projection
# The paper drops after every dense layer but qkv, and the notebook says so; its attention drops
# nothing. Here `projection_dropout` is a rate of its own ([chapter
# 3](03_encoder.py#where-dropout-goes)).

# %%
z = torch.randn(4, 197, 192)
print("torch's attention:", zeros(nn.MultiheadAttention(192, 3, batch_first=True)(z, z, z)[0]))
print(
    "projection_dropout=0.1:",
    zeros(vitkit.EncoderBlock(192, 3, 768, projection_dropout=0.1).attn(z)),
)

# %% [markdown]
# ### Adam where AdamW is meant
# Adam adds the decay to the gradient and then divides by the gradient's size. So weights with small
# gradients decay fast and weights with large ones hardly. AdamW takes the same share of all. Here
# are weights that start at 1 after 100 steps, with gradients of changing sign.

# %%
for optimizer in (torch.optim.Adam, torch.optim.AdamW):
    weight = nn.Parameter(torch.ones(3))
    steps = optimizer([weight], lr=3e-3, weight_decay=0.1)
    for step in range(100):
        weight.grad = torch.tensor([0.01, 1.0, 100.0]) * (-1) ** step
        steps.step()
    print(
        f"{optimizer.__name__:<6} gradients of 0.01, 1, 100:",
        [round(w, 3) for w in weight.tolist()],
    )

# %% [markdown]
# vitkit's `parameter_groups` goes with AdamW, and lets biases, norms, tokens and positions be.

# %%
tiny = vitkit.create_model("vit_tiny_patch16_224", depth=2, num_classes=10)
for group in vitkit.parameter_groups(tiny, lr=1e-3, weight_decay=0.1):
    print(f"decay {group['weight_decay']}: {len(group['params'])} tensors")

# %% [markdown]
# ### A summary that counts nothing
# The table shows 0 multiply-adds and 0 MB for torch's layer of 7 million parameters. A counter that
# waits for layers to be called waits in vain: in eval mode one fused operation does it all.
# `vitkit.summary` counts the operations.

# %%
layer = nn.TransformerEncoderLayer(
    768, 12, 3072, 0.1, "gelu", batch_first=True, norm_first=True
).eval()
table, called = vitkit.summary(layer, input_size=(1, 197, 768)), []
for part in (layer.linear1, layer.linear2):
    part.forward = called.append  # what a counter from layer to layer sees
with torch.no_grad():
    layer(torch.rand(1, 197, 768))
print(
    f"layers called: {len(called)}; {table.parameters:,} parameters, {table.parameter_mb:.2f} MB,"
)
print(f"{table.rows[0].mult_adds / 1e6:,.0f} M multiply-adds")

# %% [markdown]
# ## B. Attention, then CIFAR-10
#
# ### Heads that are never split
# Every "multi-head" attention has one head, with scores divided by the root of a head's width: too
# large by $\sqrt{12}$. `MultiHeadSelfAttention` equals torch's ([chapter
# 2](02_attention.py#self-attention-and-heads)).

# %%
q, k = torch.randn(2, 197, 768)
print(f"scores, never split: std {(q @ k.T / 64**0.5).std():.2f}", end="; ")
heads = [tokens.unflatten(-1, (12, 64)).transpose(0, 1) for tokens in (q, k)]
print(f"12 heads: std {(heads[0] @ heads[1].transpose(1, 2) / 64**0.5).std():.2f}")

# %% [markdown]
# ### `F.dropout` as it comes
# Its rate is 0.5 and it is always on, in evaluation too. Every dropout here is a module with a rate
# of its own that follows `eval()`.


# %%
class Careless(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return F.dropout(z)


careless, z = Careless().eval(), torch.rand(1000)
print(
    f"in eval mode {zeros(careless(z))}; two calls agree: {torch.equal(careless(z), careless(z))}"
)

# %% [markdown]
# ### Positions that start at zero
# The text says normal, the code says zeros. Then an untrained model does not know where a patch
# stands; training mends it, so this one costs little. Here `initialisation` is a word of the spec.

# %%
picture = torch.rand(1, 3, 32, 32)
moved = picture.roll((8, 8), dims=(2, 3))
for name in ("zeros", "N(0, 0.02)"):
    model = vitkit.create_model("vit_cifar_patch4_32", num_classes=0).eval()
    if name == "zeros":
        nn.init.zeros_(model.pos_embed)
    with torch.no_grad():
        print(f"{name}: features change by {(model(picture) - model(moved)).abs().max():.0e}")

# %% [markdown]
# ### A ratio and back
# `int(dim * (mlp / dim))` is meant to be `mlp`. `mlp_width` is given as it is.

# %%
print(int(1408 * (15360 / 1408)), "for 15360;", vitkit.MLP(1408, 15360).fc1.out_features)

# %% [markdown]
# ### Border pixels that are dropped
# `picture // patch` rounds down, and a convolution with that stride does not look at what is left.

# %%
small, patches = torch.rand(1, 3, 250, 250), nn.Conv2d(3, 8, 16, 16)
changed = small.clone()
changed[..., 240:, :], changed[..., 240:] = 0, 0
print("another border, the same tokens:", torch.equal(patches(small), patches(changed)))
print(f"pixels not looked at: {1 - 240**2 / 250**2:.1%}")
fails(lambda: vitkit.PatchEmbedding(width=8)(small))

# %% [markdown]
# ## C. From scratch with einops
#
# ### Xavier over everything
# `xavier_normal_` on the positions, and on query, key and value as the one matrix in which they
# lie. It counts inputs and outputs, and both counts are wrong. Here each matrix starts by itself.

# %%
fused, apart = torch.empty(3 * 1024, 1024), torch.empty(1024, 1024)
print(f"positions {nn.init.xavier_normal_(torch.empty(1, 197, 1024)).std():.4f}, meant 0.02")
print(f"qkv as one {nn.init.xavier_normal_(fused).std():.4f}, each", end=" ")
print(f"{nn.init.xavier_normal_(apart).std():.4f}")

# %% [markdown]
# ### `pos_embed[:, :P + 1]`
# For a smaller picture the first rows of the table are taken. They are those of the top of the
# large picture, read in lines of 14. vitkit resamples the table.

# %%
rows, columns = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
places = torch.stack([rows, columns], dim=-1).reshape(1, 196, 2)  # a table that says where it is
cut, resampled = places[0, :100], resample_positions(places, (14, 14), (10, 10), "bilinear")[0]
print("patch (1, 0) of 10 x 10 is told", cut[10].int().tolist(), "of 14 x 14;", end=" ")
print("resampled it is", [round(number, 1) for number in resampled[10].tolist()])
print(f"mean distance from where it is: {(cut - resampled).norm(dim=-1).mean():.1f} patches")

# %% mystnb={"figure": {"caption": "Where the 100 patches of the smaller picture are told to be in the 14 x 14 of the table; a colour for each row of the picture. Cut off, they fill the upper half, and most rows begin in the middle of a line and go on in the next. Resampled, they cover the table evenly, row under row."}}
figure, both = plt.subplots(1, 2, figsize=(5.6, 2.8), sharey=True)
for place, told, name in zip(both, (cut, resampled), ("cut off", "resampled"), strict=True):
    place.scatter(told[:, 1], told[:, 0], c=torch.arange(100) // 10, cmap="tab10", s=18)
    place.set(title=name, xlim=(-1, 14), ylim=(14, -1), aspect="equal")
_ = both[0].set_ylabel("row of the table")

# %% [markdown]
# ### A list as size
# A size may be one number or a tuple, the code thinks, so a list becomes `([32, 32], [32, 32])`.

# %%
size = [32, 32]
height, width = size if isinstance(size, tuple) else (size, size)
fails(lambda: height // 4)
print("ViTSpec:", vitkit.ViTSpec(image_size=[32, 32], patch_size=4).grid)

# %% [markdown]
# ### Three things at once
# `forward` gives class token, patch features and logits as a tuple, and an ordinary loss does not
# take it. Here `forward` gives logits, and `forward_features` the rest.

# %%
model, labels = tiny.eval(), torch.zeros(2, dtype=torch.long)
pictures = torch.rand(2, 3, 224, 224)
features = model.forward_features(pictures)
together = (features.cls, features.patches, model.forward_head(features))
fails(lambda: F.cross_entropy(together, labels))
print(f"logits alone: {F.cross_entropy(model(pictures), labels):.2f}")

# %% [markdown]
# ## D. Block by block
#
# ### 14 for 196
# "14 patches" are 14 a side.

# %%
print(vitkit.ViTSpec().grid, vitkit.ViTSpec().num_patches)

# %% [markdown]
# ### A softmax without the root
# In the text, the scores are not divided by $\sqrt{d}$: attention is too sharp, and learns slowly
# ([chapter 2](02_attention.py#why-the-root-of-d)).

# %%
scores = torch.randn(500, 64) @ torch.randn(196, 64).T
for name, given in (("divided", scores / 64**0.5), ("not divided", scores)):
    weights = given.softmax(-1)
    print(f"{name}: the largest of 196 weights is {weights.amax(-1).mean():.2f},",
          f"the softmax's slope there {(weights * (1 - weights)).sum(-1).mean():.2f}")  # fmt: skip

# %% [markdown]
# ### One rate for two dropouts
# The projection's dropout is made with the attention's rate, which is 0 by default. Two rates here.

# %%
rates = {"mlp": 0.1, "attention": 0.0}
z, mistaken = torch.rand(1000), nn.Dropout(rates["attention"])
print("projection in training:", zeros(mistaken(z)))
block = vitkit.EncoderBlock(192, 3, 768, attention_dropout=0.0, projection_dropout=0.1)
print("here:", zeros(block.attn(torch.randn(4, 197, 192))))

# %% [markdown]
# ### Heads that do not divide the width
# `int(512 / 6)` heads of 85 make 510 numbers, and a later layer wants 512. Here it is refused when
# the model is made ([chapter 2](02_attention.py#heads-must-divide-the-width)).

# %%
fails(lambda: nn.Linear(512, 512)(torch.rand(1, 65, 6 * int(512 / 6))))
fails(lambda: vitkit.MultiHeadSelfAttention(512, 6))

# %% [markdown]
# ### A hybrid that counts its map's cells
# The kernel is `size // 16 // grid` cells wide, the number of positions is that of all cells. The
# two agree for a kernel of 1 alone. Here `patch_size` is in pixels of the picture, and both follow
# from it.

# %%
for size in (224, 448, 160):
    kernel, cells = size // 16 // 14, size // 16
    tokens = (cells // kernel) ** 2 if kernel else "no"
    print(f"{size} px: kernel {kernel}, {tokens} tokens, {cells**2} positions")
hybrid = {"stem": "resnet", "resnet_layers": (3, 4, 9)}
print(
    "patches of 32 at 448 px:", vitkit.ViTSpec(image_size=448, patch_size=32, **hybrid).num_patches
)
fails(lambda: vitkit.ViTSpec(image_size=168, patch_size=12, **hybrid))

# %% [markdown]
# ### A return that depends on a flag
# With `vis`, the model gives attention maps too, so every caller must know how it was made. A
# `Record` is the caller's own ([chapter 2](02_attention.py#asking-for-the-weights)).


# %%
def flagged(pictures: torch.Tensor, vis: bool) -> object:
    return (model(pictures), []) if vis else model(pictures)


fails(lambda: F.cross_entropy(flagged(pictures, vis=True), labels))
record = vitkit.Record(attention=[-1])
print(tuple(model(pictures, record=record).shape), tuple(record.attention[1].shape))

# %% [markdown]
# ## E. Lab: the original Transformer
#
# ### An exponent that is always 0
# `dim // dim_model` is 0 for every place, so all waves have one length. The table is also made on
# the CPU, whatever the model is on. `sincos_1d` is the formula, and goes where the tokens are.

# %%
exponents = torch.arange(0, 128, 2) // 128
angles = torch.arange(196.0)[:, None] * 10000.0 ** -exponents.float()
mistaken = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
for name, table in (("mistaken", mistaken), ("sincos_1d", sincos_1d(196, 128))):
    print(f"{name}: {len(table.T.unique(dim=0))} different columns of 128")
fails(lambda: torch.zeros(196, 128, device="meta") + mistaken)

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
        print(f"{name}: the first answer changes by {seen:.0e}")

# %% [markdown]
# ### Softmax at the decoder's end
# Cross-entropy takes the softmax itself. Given probabilities, it has a floor: for a perfect answer
# among $V$ words, $\ln(e + V - 1) - 1$, hardly less than for a blind one. Logits here.

# %%
for vocabulary in (10, 512):
    perfect = F.one_hot(torch.arange(vocabulary), vocabulary).float()
    floor = F.cross_entropy(perfect, torch.arange(vocabulary))
    print(f"{vocabulary} words: perfect {floor:.3f}, blind {math.log(vocabulary):.3f}")

# %% [markdown]
# ### An activation that is ignored
# The argument is there; the code uses ReLU. Here every name is another module.


# %%
class Deaf(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = nn.ReLU()


x = torch.linspace(-2, 2, 9)
for kind in (lambda name: Deaf(name).activation(x), lambda name: vitkit.MLP.activations[name]()(x)):
    print("gelu and relu are the same:", torch.equal(kind("gelu"), kind("relu")))

# %% [markdown]
# ### Queries and keys of different widths
# `dim_q` and `dim_k` are two arguments, and the scalar product needs one number. Here a head has
# one width for both; values may have another.

# %%
q, k, v = torch.rand(5, 32), torch.rand(7, 48), torch.rand(7, 10)
fails(lambda: q @ k.T)
print(tuple(vitkit.scaled_dot_product_attention(q, k[:, :32], v).shape))

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
# ## E. Lab: MNIST
#
# ### `reshape` for patches
# Strips of 1 x 16 pixels instead of squares of 4 x 4: none of the 49 is a patch ([chapter
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
# It ties the model to one number of tokens, and a change in one token changes all. There is no norm
# after the last block either. Here a norm is over the width ([chapter 3](03_encoder.py#exercises)).

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
# print. What vitkit reports are sums over pictures, divided once.

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
pictures = torch.rand(1, 3, 32, 32)
first, second = model(pictures), model(pictures)
print(f"two calls differ by {(first - second).abs().max():.2f};", end=" ")
print("a graph is kept:", first.requires_grad)
with torch.inference_mode():
    first, second = model.eval()(pictures), model(pictures)
print(f"as it should be: {(first - second).abs().max():.2f}, {first.requires_grad}")

# %% [markdown]
# ### Width and height swapped
# `n, c, w, h = images.shape` names them the wrong way round. Squares do not show it. Height comes
# first everywhere here.

# %%
n, c, w, h = (1, 3, 32, 64)  # a picture 32 high and 64 wide
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
# ## E. Lab: distillation
#
# ### A teacher that is never put in `eval()`
# Its BatchNorm statistics move with the student's pictures, so it is another teacher at every step.
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

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
# good reading, and most of what is in them is right. This page and [the next](12_lab_bugs.py)
# collect what is not: each bug in a few lines of our own, with its symptom computed, and what vitkit
# does instead. Many of them raise no error: a model with several still trains, only worse.

# %%
import torch
from matplotlib import pyplot as plt
from symptom import fails
from torch import nn
from torch.nn import functional as F

import vitkit
from vitkit.models.positions import resample_positions

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80


def zeros(tensor: torch.Tensor) -> str:
    return f"{(tensor == 0).float().mean():.2f} of the numbers are zero"


# %% [markdown]
# ## A. Equation by equation
#
# ### The batch size in the class token
# Class token and positions are made as `(batch, ...)` with a batch of 1, so a batch of 2 fails.
# vitkit's are `(1, 1, D)` and `(1, T, D)`, expanded ([chapter 1](01_patches.py#all-of-eq-1)).

# %%
two = torch.rand(2, 196, 768)
fails(lambda: torch.cat([torch.ones(1, 1, 768), two], dim=1))
print("expanded:", tuple(torch.cat([torch.ones(1, 1, 768).expand(2, -1, -1), two], dim=1).shape))

# %% [markdown]
# ### Positions that start at ones, or as $N(0, 1)$
# Ones tell every place the same; $N(0, 1)$ outweighs the content. Both are seen in how much of what
# differs from token to token is the place's, here over an image of noise. vitkit's start as
# $N(0, 0.02)$.

# %%
content = vitkit.PatchEmbedding()(torch.rand(1, 3, 224, 224))[0].var(dim=0).mean()
noise = torch.randn(196, 768)
starts = {"ones": torch.ones(196, 768), "N(0, 1)": noise, "N(0, 0.02)": 0.02 * noise}
for name, positions in starts.items():
    of_places = positions.var(dim=0).mean()
    print(f"{name:<10} places 0 and 1 differ by {(positions[0] - positions[1]).norm():5.2f};",
          f"of what differs, {of_places / (of_places + content):5.1%} is the place's")  # fmt: skip

# %% [markdown]
# ### A width that is written in
# The norms are made for 768 numbers, whatever the model's width. Here the width is an argument of
# all.

# %%
fails(lambda: nn.LayerNorm(768)(torch.rand(1, 197, 192)))
print(tuple(vitkit.EncoderBlock(192, 3, 768)(torch.rand(1, 197, 192)).shape))

# %% [markdown]
# ### A check that is announced
# The text asks that the patch divides the image. The code does not. `ViTSpec` does.

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
image = torch.rand(1, 3, 32, 32)
moved = image.roll((8, 8), dims=(2, 3))
for name in ("zeros", "N(0, 0.02)"):
    model = vitkit.create_model("vit_cifar_patch4_32", num_classes=0).eval()
    if name == "zeros":
        nn.init.zeros_(model.pos_embed)
    with torch.no_grad():
        print(f"{name}: features change by {(model(image) - model(moved)).abs().max():.0e}")

# %% [markdown]
# ### A ratio and back
# `int(dim * (mlp / dim))` is meant to be `mlp`. `mlp_width` is given as it is.

# %%
print(int(1408 * (15360 / 1408)), "for 15360;", vitkit.MLP(1408, 15360).fc1.out_features)

# %% [markdown]
# ### Border pixels that are dropped
# `image // patch` rounds down, and a convolution with that stride does not look at what is left.

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
# `xavier_normal_` on the positions, on the class token, and on query, key and value as the one matrix
# in which they lie. It counts inputs and outputs. Positions and a class token have none, and what it
# counts there is an accident of their shapes; of the one matrix it counts the outputs of three. Here
# each matrix starts by itself, and tokens and positions have a deviation of their own.

# %%
fused, apart = torch.empty(3 * 1024, 1024), torch.empty(1024, 1024)
for name, tokens in (("positions", 197), ("class token", 1)):
    made = nn.init.xavier_normal_(torch.empty(1, tokens, 1024))
    print(f"{name} {made.std():.4f}, meant 0.02")
print(f"qkv as one {nn.init.xavier_normal_(fused).std():.4f}, each", end=" ")
print(f"{nn.init.xavier_normal_(apart).std():.4f}")

# %% [markdown]
# ### The first rows of `pos_embed`
# For a smaller image `pos_embed[:, :N + 1]` is taken, the first rows of the table. They are those of
# the top of the large image, read in lines of 14. vitkit resamples the table.

# %%
rows, columns = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
places = torch.stack([rows, columns], dim=-1).reshape(1, 196, 2)  # a table that says where it is
cut, resampled = places[0, :100], resample_positions(places, (14, 14), (10, 10), "bilinear")[0]
print("patch (1, 0) of 10 x 10 is told", cut[10].int().tolist(), "of 14 x 14;", end=" ")
print("resampled it is", [round(number, 1) for number in resampled[10].tolist()])
print(f"mean distance from where it is: {(cut - resampled).norm(dim=-1).mean():.1f} patches")

# %% mystnb={"figure": {"caption": "Where the 100 patches of the smaller image are told to be in the 14 x 14 of the table; a colour for each row of the image. Cut off, they fill the upper half, and most rows begin in the middle of a line and go on in the next. Resampled, they cover the table evenly, row under row."}}
figure, both = plt.subplots(1, 2, figsize=(5.6, 2.8), sharey=True)
for place, told, name in zip(both, (cut, resampled), ("cut off", "resampled"), strict=True):
    place.scatter(told[:, 1], told[:, 0], c=torch.arange(100) // 10, cmap="tab10", s=18)
    place.set(title=name, xlim=(-1, 14), ylim=(14, -1), aspect="equal")
_ = both[0].set_ylabel("row of the table")

# %% [markdown]
# ### A list as size
# A size may be one number or a tuple, the code assumes, so a list becomes `([32, 32], [32, 32])`.

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
images = torch.rand(2, 3, 224, 224)
features = model.forward_features(images)
together = (features.cls, features.patches, model.forward_head(features))
fails(lambda: F.cross_entropy(together, labels))
print(f"logits alone: {F.cross_entropy(model(images), labels):.2f}")

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
# two agree for a kernel of 1 alone. Here `patch_size` is in pixels of the image, and both follow
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
def flagged(images: torch.Tensor, vis: bool) -> object:
    return (model(images), []) if vis else model(images)


fails(lambda: F.cross_entropy(flagged(images, vis=True), labels))
record = vitkit.Record(attention=[-1])
print(tuple(model(images, record=record).shape), tuple(record.attention[1].shape))

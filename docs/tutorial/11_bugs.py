# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 11. Bugs, and what they cost
#
# Five published notebooks about Vision Transformers came before this tutorial ([coming from a
# notebook](coverage.md) lists them as A to E). They are good reading, and most of their content is
# right. This page lists the bugs of notebooks A ("Replicating the paper"), B ("Attention in
# vision"), C ("From scratch with einops") and D ("Block by block"), [the next](12_lab_bugs.py)
# those of E ("Lab notebook"). Each is shown in a few lines of our own code, with its effect and
# with vitkit's solution.
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** what the mistakes of real ViT code look like, and how each of them shows
# - **You need** chapters [1](01_patches.py) to [5](05_training.py)
# - **Reading** about 20 minutes; the table is enough to look something up
# :::
#
# "Error" means that the program stops, "silent" that it runs. [Chapter 14](14_bug_costs.py) trains
# a model with each silent bug that has a switch there, and measures its cost.
#
# | bug | symptom | severity | switch in chapter 14 | from |
# | --- | --- | --- | --- | --- |
# | [the batch size in the class token](#the-batch-size-in-the-class-token) | two images do not fit | error | | A |
# | [positions that start at ones, or as N(0, 1)](#positions-that-start-at-ones-or-as-n-0-1) | none | silent | `ones`, `large_normal` | A |
# | [a fixed width](#a-fixed-width) | only a width of 768 runs | error | | A |
# | [a check that is missing](#a-check-that-is-missing) | an unclear error at 250 pixels | error | | A |
# | [no dropout after the projection](#no-dropout-after-the-attention-s-projection) | none | silent | `no_projection_dropout` | A |
# | [Adam where AdamW is meant](#adam-where-adamw-is-meant) | the loss stays at ln 10 | silent, breaks | `coupled_decay` | A |
# | [a summary that counts nothing](#a-summary-that-counts-nothing) | 0 multiply-adds | wrong number | | A |
# | [a stale output](#a-stale-output) | (1, 1) for 1,000 classes | wrong number | | A |
# | [heads that are never split](#heads-that-are-never-split) | none | silent | `one_head` | B |
# | [`F.dropout` with its defaults](#f-dropout-with-its-defaults) | two evaluations differ | silent, costs | `careless_dropout` | B |
# | [positions that start at zero](#positions-that-start-at-zero) | none | silent | `zero_positions` | B |
# | [a ratio and back](#a-ratio-and-back) | one unit less in a layer | silent | | B |
# | [border pixels that are ignored](#border-pixels-that-are-ignored) | none | silent | | B |
# | [a ResNet-50 of 23 M](#a-resnet-50-of-23-m) | a comparison without its head | wrong number | | B |
# | [Xavier for every parameter](#xavier-for-every-parameter) | none | silent | `xavier` | C |
# | [the first rows of `pos_embed`](#the-first-rows-of-pos_embed) | none: wrong positions at another size | silent | | C |
# | [a list as size](#a-list-as-size) | an unclear error | error | | C |
# | [three outputs at once](#three-outputs-at-once) | the loss does not accept a tuple | error | | C |
# | [14 instead of 196](#14-instead-of-196) | the text names the patches of a side | wrong number | | D |
# | [a softmax without the root](#a-softmax-without-the-root) | attention near one token | silent | `no_root` | D |
# | [one rate for two dropouts](#one-rate-for-two-dropouts) | none | silent | `no_projection_dropout` | D |
# | [heads that do not divide the width](#heads-that-do-not-divide-the-width) | a late error: 510 and 512 | error | | D |
# | [a hybrid that counts cells](#a-hybrid-that-counts-the-cells-of-its-feature-map) | 784 positions for 196 patches | error | | D |
# | [an output that depends on a flag](#an-output-that-depends-on-a-flag) | the loss does not accept a tuple | error | | D |

# %%
import torch
from matplotlib import pyplot as plt
from print_error import print_error
from torch import nn
from torch.nn import functional as F

import vitkit
from vitkit.models.embedding import resample_positions

torch.manual_seed(0)


def zeros(tensor: torch.Tensor) -> str:
    return f"{(tensor == 0).float().mean():.0%} of the numbers are zero"


# %% [markdown]
# ## A. Equation by equation
#
# ### The batch size in the class token
# Class token and positions are created as `(batch, ...)` with a batch of 1, so a batch of 2 fails.
# vitkit's have the shapes `(1, 1, D)` and `(1, T, D)`, and are expanded ([chapter
# 1](01_patches.py#all-of-eq-1)).

# %%
two = torch.rand(2, 196, 768)
print_error(lambda: torch.cat([torch.ones(1, 1, 768), two], dim=1))
print(
    "expanded:",
    tuple(torch.cat([torch.ones(1, 1, 768).expand(2, -1, -1), two], dim=1).shape),
)

# %% [markdown]
# ### Positions that start at ones, or as $N(0, 1)$
# Ones are the same for every position. $N(0, 1)$ is larger than the content of the patches. Both
# show in the share of the position in the variance between tokens, here for an image of noise.
# vitkit's positions start as $N(0, 0.02^2)$.

# %%
content = vitkit.PatchEmbedding()(torch.rand(1, 3, 224, 224))[0].var(dim=0).mean()
noise = torch.randn(196, 768)
starts = {"ones": torch.ones(196, 768), "N(0, 1)": noise, "N(0, 0.02²)": 0.02 * noise}
for name, positions in starts.items():
    variance = positions.var(dim=0).mean()
    print(f"{name:<10} positions 0 and 1 differ by "
          f"{(positions[0] - positions[1]).norm():5.2f};",
          f"share of the variance {variance / (variance + content):5.1%}")  # fmt: skip

# %% [markdown]
# ### A fixed width
# The norms are created for 768 numbers, whatever the width of the model. In vitkit every layer
# takes the width as an argument.

# %%
print_error(lambda: nn.LayerNorm(768)(torch.rand(1, 197, 192)))
print(tuple(vitkit.EncoderBlock(192, 3, 768)(torch.rand(1, 197, 192)).shape))

# %% [markdown]
# ### A check that is missing
# The text says that the patch size must divide the image size, but the code does not check it.
# `ViTSpec` does.

# %%
print(f"250 pixels: {(250 // 16) ** 2} patches, {250 * 250 // 16**2} positions")
print_error(lambda: torch.rand(1, 225, 768) + torch.rand(1, 244, 768))
print_error(lambda: vitkit.ViTSpec(image_size=250))

# %% [markdown]
# ### No dropout after the attention's projection
# The paper uses dropout after every dense layer except qkv, and the notebook says so; but its
# attention has no dropout. In vitkit `projection_dropout` is a separate rate ([chapter
# 3](03_encoder.py#where-dropout-is-applied)).

# %%
z = torch.randn(4, 197, 192)
print(
    "torch's attention:",
    zeros(nn.MultiheadAttention(192, 3, batch_first=True)(z, z, z)[0]),
)
block = vitkit.EncoderBlock(192, 3, 768, projection_dropout=0.1)
print("projection_dropout=0.1:", zeros(block.attn(z)))

# %% [markdown]
# ### Adam where AdamW is meant
# Adam adds the weight decay to the gradient and then divides by the size of the gradient. So
# weights with small gradients decay fast, and weights with large ones hardly at all. AdamW decays
# all weights at the same rate. The example has three weights that start at 1, after 100 steps with
# gradients of alternating sign.

# %%
print("weights with gradients of 0.01, 1 and 100:")
for kind in (torch.optim.Adam, torch.optim.AdamW):
    weights = nn.Parameter(torch.ones(3))
    optimizer = kind([weights], lr=3e-3, weight_decay=0.1)
    for step in range(100):
        weights.grad = torch.tensor([0.01, 1.0, 100.0]) * (-1) ** step
        optimizer.step()
    print(f"{kind.__name__:<6}", [round(weight, 3) for weight in weights.tolist()])

# %% [markdown]
# `vitkit.parameter_groups`, made for AdamW, has no decay for biases, norms, tokens and positions.

# %%
tiny = vitkit.create_model("vit_tiny_patch16_224", depth=2, num_classes=10)
for group in vitkit.parameter_groups(tiny, lr=1e-3, weight_decay=0.1):
    print(f"decay {group['weight_decay']}: {len(group['params'])} tensors")

# %% [markdown]
# ### A summary that counts nothing
# The table shows 0 multiply-adds and 0 MB for torch's layer of 7 million parameters. Such a tool
# counts the calls of layers. But in eval mode and without gradients, torch runs one fused
# operation and calls no layer. `vitkit.summary` counts the operations.

# %%
layer = nn.TransformerEncoderLayer(
    768, 12, 3072, 0.1, "gelu", batch_first=True, norm_first=True
).eval()
table, called = vitkit.summary(layer, input_size=(1, 197, 768)), []
for part in (layer.linear1, layer.linear2):
    part.forward = called.append  # what a counter of layer calls sees
with torch.no_grad():
    layer(torch.rand(1, 197, 768))
print(f"calls of layers: {len(called)}")
print(f"{table.parameters:,} parameters, {table.parameter_mb:.2f} MB, "
      f"{table.rows[0].mult_adds / 1e6:,.0f} M multiply-adds")  # fmt: skip

# %% [markdown]
# ### A stale output
# Below the model with 1,000 classes the notebook shows the shape (1, 1): the output of an older
# version of the cell. Saved outputs are not tests. The chapters of this tutorial are run before
# every release, and their numbers are checked.

# %%
with torch.device("meta"):  # shapes without numbers
    logits = vitkit.create_model("vit_base_patch16_224")(torch.rand(1, 3, 224, 224))
print(tuple(logits.shape))

# %% [markdown]
# ## B. Attention, then CIFAR-10
#
# ### Heads that are never split
# Every "multi-head" attention has one head, but its scores are divided by the root of a head's
# width: they are too large by a factor of $\sqrt{12}$. `MultiHeadSelfAttention` equals torch's
# ([chapter 2](02_attention.py#self-attention-and-heads)).

# %%
q, k = torch.randn(2, 197, 768)
print(f"one head: std {(q @ k.T / 64**0.5).std():.2f}", end="; ")
heads = [tokens.unflatten(-1, (12, 64)).transpose(0, 1) for tokens in (q, k)]
print(f"12 heads: std {(heads[0] @ heads[1].transpose(1, 2) / 64**0.5).std():.2f}")

# %% [markdown]
# ### `F.dropout` with its defaults
# Its rate is 0.5, and it is always on, even in eval mode. Every dropout in vitkit has its own
# rate, and `eval()` turns all of them off.


# %%
class Careless(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return F.dropout(z)


careless, z = Careless().eval(), torch.rand(1000)
print("in eval mode", zeros(careless(z)))
print("two calls are equal:", torch.equal(careless(z), careless(z)))

# %% [markdown]
# ### Positions that start at zero
# The text says normal, the code says zeros. Then an untrained model does not know the position of a
# patch. Training corrects this, so the bug costs little. In vitkit `initialisation` is a field of
# the spec.

# %%
image = torch.rand(1, 3, 32, 32)
shifted = image.roll((8, 8), dims=(2, 3))
for name in ("zeros", "N(0, 0.02²)"):
    model = vitkit.create_model("vit_cifar_patch4_32", num_classes=0).eval()
    if name == "zeros":
        nn.init.zeros_(model.pos_embed)
    with torch.no_grad():
        print(
            f"{name}: features change by "
            f"{(model(image) - model(shifted)).abs().max():.0e}"
        )

# %% [markdown]
# ### A ratio and back
# `int(dim * (mlp / dim))` should be `mlp`, but a rounding error can make it one less: the MLP of a
# width of 1408 with 15,360 hidden units gets 15,359, and no checkpoint fits. (Both numbers are those
# of published models, but of different ones.) In vitkit `mlp_width` is set directly.

# %%
widths, tried = range(64, 2049, 64), 0
wrong = []
for width in widths:
    for mlp in range(64, 8 * width + 1, 64):
        tried += 1
        if int(width * (mlp / width)) != mlp:
            wrong.append((width, mlp))
print(f"{len(wrong)} of {tried:,} pairs are wrong, the first: {wrong[:3]}")
assert int(1408 * (15360 / 1408)) == 15359

# %% [markdown]
# ### Border pixels that are ignored
# `image // patch` rounds down, and a convolution with that stride ignores the remaining pixels.

# %%
small, patches = torch.rand(1, 3, 250, 250), nn.Conv2d(3, 8, 16, 16)
changed = small.clone()
changed[..., 240:, :], changed[..., 240:] = 0, 0
print("another border, equal tokens:", torch.equal(patches(small), patches(changed)))
print(f"ignored pixels: {1 - 240**2 / 250**2:.1%}")
print_error(lambda: vitkit.PatchEmbedding(width=8)(small))

# %% [markdown]
# ### A ResNet-50 of 23 M
# The notebook compares the ViT's 86 M parameters with a ResNet-50 of 23 M. That is the ResNet
# without its head; the 86 M are with it. Counted alike, from the sizes in the ResNet paper:


# %%
def bottleneck(inputs: int, width: int, first: bool) -> int:
    sizes = [inputs * width, 9 * width * width, 4 * width * width]
    sizes += [inputs * 4 * width] if first else []  # the shortcut
    outputs = [width, width, 4 * width] + ([4 * width] if first else [])
    return sum(sizes) + 2 * sum(outputs)  # and weight and bias of each BatchNorm


body, inputs = 7 * 7 * 3 * 64 + 2 * 64, 64
for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
    for block in range(blocks):
        body += bottleneck(inputs, width, first=block == 0)
        inputs = 4 * width
print(f"ResNet-50: {body:,} without its head, {body + 2048 * 1000 + 1000:,} with it")
assert body + 2048 * 1000 + 1000 == 25_557_032  # as torchvision counts

# %% [markdown]
# ## C. From scratch with einops
#
# ### Xavier for every parameter
# `xavier_normal_` initialises the positions, the class token, and the fused matrix of query, key
# and value. Xavier's rule depends on the numbers of inputs and outputs. Positions and a class token
# have neither, so the result depends on an irrelevant shape. For the fused matrix it counts the
# outputs of three matrices. vitkit initialises each of the three matrices separately, and tokens
# and positions with a fixed standard deviation.

# %%
fused, single = torch.empty(3 * 1024, 1024), torch.empty(1024, 1024)
for name, tokens in (("positions", 197), ("class token", 1)):
    values = nn.init.xavier_normal_(torch.empty(1, tokens, 1024))
    print(f"{name}: std {values.std():.4f}, should be 0.02")
print(f"qkv as one matrix: std {nn.init.xavier_normal_(fused).std():.4f}", end=", ")
print(f"as three matrices {nn.init.xavier_normal_(single).std():.4f}")

# %% [markdown]
# ### The first rows of `pos_embed`
# For a smaller image `pos_embed[:, :N + 1]` takes the first rows of the table. They belong to the
# upper part of the large image, read in rows of 14. vitkit resamples the table.

# %%
rows, columns = torch.meshgrid(torch.arange(14.0), torch.arange(14.0), indexing="ij")
table = torch.stack([rows, columns], dim=-1).reshape(
    1, 196, 2
)  # row and column as the vector
cut, resampled = (
    table[0, :100],
    resample_positions(table, (14, 14), (10, 10), "bilinear")[0],
)
print(
    "patch (1, 0) of 10 x 10 gets position",
    cut[10].int().tolist(),
    "of 14 x 14;",
    end=" ",
)
print("resampled", [round(number, 1) for number in resampled[10].tolist()])
print(
    "mean distance from the right position: "
    f"{(cut - resampled).norm(dim=-1).mean():.1f} patches"
)

# %% mystnb={"figure": {"caption": "The positions in the 14 x 14 grid of the table that the 100 patches of the smaller image get; one colour for each row of the image. Cut off, they fill the upper half, and most rows begin in the middle of a grid row and continue in the next one. Resampled, they cover the grid evenly, row below row."}}
figure, axes = plt.subplots(1, 2, figsize=(5.6, 2.8), sharey=True)
for ax, table, name in zip(
    axes, (cut, resampled), ("cut off", "resampled"), strict=True
):
    ax.scatter(table[:, 1], table[:, 0], c=torch.arange(100) // 10, cmap="tab10", s=18)
    ax.set(title=name, xlim=(-1, 14), ylim=(14, -1), aspect="equal")
_ = axes[0].set_ylabel("row of the table")

# %% [markdown]
# ### A list as size
# The code assumes that a size is a number or a tuple, so a list becomes `([32, 32], [32, 32])`.

# %%
size = [32, 32]
height, width = size if isinstance(size, tuple) else (size, size)
print_error(lambda: height // 4)
print("ViTSpec:", vitkit.ViTSpec(image_size=[32, 32], patch_size=4).grid)

# %% [markdown]
# ### Three outputs at once
# `forward` returns class token, patch features and logits as a tuple, which an ordinary loss does
# not accept. In vitkit `forward` returns logits, and `forward_features` the rest.

# %%
model, labels = tiny.eval(), torch.zeros(2, dtype=torch.long)
images = torch.rand(2, 3, 224, 224)
features = model.forward_features(images)
outputs = (features.cls, features.patches, model.forward_head(features))
print_error(lambda: F.cross_entropy(outputs, labels))
print(f"loss of the logits: {F.cross_entropy(model(images), labels):.2f}")

# %% [markdown]
# ## D. Block by block
#
# ### 14 instead of 196
# The text says "14 patches". There are 14 patches per side and 196 in the image ([chapter
# 1](01_patches.py#cutting)).

# %% [markdown]
# ### A softmax without the root
# In the text, the scores are not divided by $\sqrt{d}$: attention is too concentrated, and learns
# slowly ([chapter 2](02_attention.py#why-the-root-of-d)).

# %%
scores = torch.randn(500, 64) @ torch.randn(196, 64).T
for name, logits in (("divided", scores / 64**0.5), ("not divided", scores)):
    weights = logits.softmax(-1)
    print(f"{name}: the largest of 196 weights is {weights.amax(-1).mean():.2f},",
          "the derivative of the softmax "
          f"{(weights * (1 - weights)).sum(-1).mean():.2f}")  # fmt: skip

# %% [markdown]
# ### One rate for two dropouts
# The projection's dropout uses the rate of the attention weights, which is 0 by default. vitkit has
# two rates.

# %%
rates = {"mlp": 0.1, "attention": 0.0}
z, mistaken = torch.rand(1000), nn.Dropout(rates["attention"])
print("notebook D, training mode:", zeros(mistaken(z)))
block = vitkit.EncoderBlock(192, 3, 768, attention_dropout=0.0, projection_dropout=0.1)
print("vitkit, training mode:", zeros(block.attn(torch.randn(4, 197, 192))))

# %% [markdown]
# ### Heads that do not divide the width
# With 6 heads of `int(512 / 6)` = 85 there are 510 numbers, but a later layer expects 512. vitkit
# raises an error when the layer is created ([chapter
# 2](02_attention.py#the-number-of-heads-must-divide-the-width)).

# %%
print_error(lambda: nn.Linear(512, 512)(torch.rand(1, 65, 6 * int(512 / 6))))
print_error(lambda: vitkit.MultiHeadSelfAttention(512, 6))

# %% [markdown]
# ### A hybrid that counts the cells of its feature map
# The kernel is `size // 16 // grid` cells wide, but the number of positions is that of all cells.
# The two agree only for a kernel of 1. In vitkit `patch_size` is in pixels of the image, and both
# numbers follow from it.

# %%
for size in (224, 448, 160):
    kernel, cells = size // 16 // 14, size // 16
    tokens = (cells // kernel) ** 2 if kernel else 0
    print(f"{size} px: kernel {kernel}, {tokens} tokens, {cells**2} positions")
hybrid = {"stem": "resnet", "resnet_layers": (3, 4, 9)}
spec = vitkit.ViTSpec(image_size=448, patch_size=32, **hybrid)
print("vitkit, 448 px: patches of 32 px,", spec.num_patches, "tokens")
print_error(lambda: vitkit.ViTSpec(image_size=168, patch_size=12, **hybrid))

# %% [markdown]
# ### An output that depends on a flag
# With `vis`, the model also returns attention maps, so every caller must know how the model was
# created. In vitkit the caller passes a `Record` ([chapter
# 2](02_attention.py#recording-the-attention-weights)).


# %%
def flagged(images: torch.Tensor, vis: bool) -> object:
    return (model(images), []) if vis else model(images)


print_error(lambda: F.cross_entropy(flagged(images, vis=True), labels))
record = vitkit.Record(attention=[-1])
print(tuple(model(images, record=record).shape), tuple(record.attention[1].shape))

# %% [markdown]
# ## What you know now
#
# - Mistakes that stop the program are found at once. Most of these do not stop it.
# - Initial values, dropout rates and the kind of weight decay are the places where code and text
#   differ most often without a symptom.
# - A check of the sizes where a model is created turns a late, unclear error into an early, clear
#   one.
# - [Chapter 14](14_bug_costs.py) has the costs, and checks that find such bugs. Its exercises are
#   also those of this chapter.

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 1. Patches, and Eq. 1
#
# A Transformer reads a sequence of vectors. An image is a grid of pixels. The Vision Transformer
# (ViT, "An Image is Worth 16x16 Words", [arXiv 2010.11929](https://arxiv.org/abs/2010.11929)) turns
# the image into a sequence in the simplest way: it cuts the image into square patches and treats
# each patch as a word. This chapter builds the input of the encoder, $z_0$, from a photograph:
#
# $$ z_0 = [x_\text{class};\ x_p^1 E;\ x_p^2 E;\ \dots;\ x_p^N E] + E_\text{pos} \tag{1} $$
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** to cut an image into patches, to embed the patches with one matrix, and to add the
#   class token and the positions: all of Eq. 1.
# - **You need** some Python and PyTorch: tensors, their shapes, `nn.Module`.
#   [Chapter 0](00_one_page.py) shows the whole model first.
# - **Reading** about 25 minutes
# :::
#
# ```{drawing} patches-to-tokens
# What this chapter builds, on a digit: an image, its patches, their row, and the tokens.
# ```
#
# ## The lines of the model
#
# The whole model of [chapter 0](00_one_page.py) is one file, {download}`plain_vit.py
# <plain_vit.py>`. Eq. 1 is four lines of its `forward`, and one of them calls a class of its own:
#
# ```{literalinclude} plain_vit.py
# :pyobject: PlainViT.forward
# :start-at: x = self.patch_embed
# :end-at: self.pos_embed
# :dedent: 8
# ```
#
# ```{literalinclude} plain_vit.py
# :pyobject: PatchEmbedding
# ```
#
# In the comments and in all chapters, $B$ is the batch size, $C$ the number of channels, $H$ and
# $W$ are the height and width of the image, $P$ is the side of a patch, $N$ the number of patches,
# $T = N + 1$ the number of tokens, and $D$ the width of a token.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports"}
import time
from functools import partial

import torch
from drawing import grid_of, heat, mosaic, print_table, print_wrapped
from einops import rearrange, repeat
from matplotlib import pyplot as plt
from print_error import print_error
from skimage import data
from torch import nn

import vitkit
from vitkit.data.sources.open import open_dataset
from vitkit.models.embedding import patchify, sincos_1d, sincos_2d

_ = torch.manual_seed(0)

# %% [markdown]
# ## Cutting
#
# An image of $H \times W$ pixels gives $N = HW / P^2$ patches of $P \times P$ pixels. Each patch
# becomes one row of $P \cdot P \cdot C$ numbers: all red values, then all green ones, then all blue
# ones, as in the kernel of a convolution. The example is a photograph of 224 x 224 pixels with
# $P = 16$: 14 rows of 14 patches.

# %%
photograph = torch.from_numpy(data.astronaut()[:448, :448]).permute(2, 0, 1) / 255
image = nn.functional.interpolate(
    photograph[None], size=224, antialias=True, mode="bilinear"
)
image = image.clamp(0, 1)
patches = patchify(image, (16, 16))
print("image", tuple(image.shape))
print("patches", tuple(patches.shape))
print(f"{224 * 224 // 16**2} patches of {16 * 16 * 3} values")

# %% mystnb={"figure": {"caption": "The 14 x 14 patches of the photograph, in the order in which the model reads them: row by row, from the top left. Each square is one token. The face and the flag are still visible, so each patch is a connected part of the image."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
squares = rearrange(patches[0], "N (C P Q) -> N P Q C", C=3, P=16)
_ = grid_of([mosaic(squares, across=14)], across=1, size=4.2)

# %% [markdown]
# Three notebooks cut their images in other ways.
#
# - [Notebook C, "From scratch with einops"](coverage.md#c-from-scratch-with-einops) stores the three
#   colours of each pixel side by side, `(ph pw c)`. Its matrix $E$ has the same rows in another
#   order, so the two conventions are equally good. But the weights of one do not fit the other.
# - [Notebook E, "Lab notebook"](coverage.md#e-lab-notebook) gives the size of a patch as
#   "H x C/P" in its text. The height of a patch is $H$ divided by the number of patches in a column.
#   The number of channels $C$ does not change the size of a patch, only the length of its row.
# - The code of notebook E cuts with `reshape`. That is the subject of the next section.

# %% [markdown]
# ## Why `reshape` does not cut patches
#
# `reshape` keeps the values in the order in which they are stored in memory. An image is stored row
# by row. In an image that is 16 pixels wide, 16 consecutive values are one row of pixels, not a
# square of 4 x 4:

# %%
counted = torch.arange(256.0).reshape(1, 1, 16, 16)
print("reshape :", counted.reshape(1, 16, 16)[0, 0].int().tolist())
print("patchify:", patchify(counted, (4, 4))[0, 0].int().tolist())

# %% [markdown]
# Notebook E cuts its 28 x 28 digits with `reshape`. None of its 49 "patches" is a square patch. There
# is no error, because the shapes are the same. The model still learns something, because every way
# of cutting keeps all the values. But pixels that are above or below each other are now in different
# tokens.

# %%
digits = torch.rand(5, 1, 28, 28)
strips, tiles = digits.reshape(5, 49, 16), patchify(digits, (4, 4))
print(tuple(strips.shape), tuple(tiles.shape), "equal:", torch.equal(strips, tiles))

# %% mystnb={"figure": {"caption": "The photograph in grey, cut in both ways into 196 pieces of 256 values. Each piece is drawn as a square of 16 x 16. Left: a piece made by reshape is a little more than one row of pixels, so no square shows an object. Right: the pieces made by patchify are squares of the image."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
grey = image.mean(1, keepdim=True)
cuts = {
    "reshape": grey.reshape(196, 16, 16),
    "patchify": patchify(grey, (16, 16)).view(-1, 16, 16),
}
mosaics = [mosaic(pieces, across=14) for pieces in cuts.values()]
_ = grid_of(mosaics, list(cuts), across=2, size=3.2, colours="gray")

# %% [markdown]
# ## One matrix for all patches: $x_p E$
#
# Every patch of $P \cdot P \cdot C$ values is multiplied by the same matrix $E$ and becomes a
# vector of $D$ numbers, its embedding. A convolution whose stride equals its kernel size computes
# the same, because it applies its kernel to each patch exactly once. This is how published weights
# store $E$, and how the class is written in six steps:


# %%
class PatchEmbeddingInSteps(nn.Module):
    """Turn images (B, C, H, W) into embedded patches (B, N, D)."""

    # 1. The sizes are arguments. The defaults are those of ViT-B/16.
    def __init__(self, channels: int = 3, patch: int = 16, width: int = 768) -> None:
        super().__init__()
        self.patch = patch
        # 2. One kernel for each of the D outputs. Stride = kernel size: no overlap.
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # 3. Refuse an image with incomplete patches.
        height, width = images.shape[-2:]
        assert (height % self.patch, width % self.patch) == (0, 0), images.shape
        # 4. Embed: (B, C, H, W) -> (B, D, H/P, W/P), one map for each output.
        maps = self.proj(images)
        # 5. Put the rows of each map one behind the other: (B, D, N).
        rows = maps.flatten(start_dim=2)
        # 6. One row for each patch: (B, N, D).
        return rows.transpose(1, 2)


torch.manual_seed(0)
in_steps = PatchEmbeddingInSteps()
print(tuple(image.shape), "->", tuple(in_steps(image).shape))

# %% [markdown]
# The library's class does the same. It also takes rectangular patches, and its `grid` checks the
# input with a message that names the expected sizes. (In the library's docstrings the hidden width
# of the MLP is `M`, the number of heads `k` and their width `h`. In these chapters they are
# $D_\text{mlp}$, $h$ and $d$.)
#
# ```{literalinclude} ../../src/vitkit/models/embedding.py
# :pyobject: PatchEmbedding
# ```

# %%
embedding = vitkit.PatchEmbedding(in_channels=3, patch_size=16, width=768)
embedding.load_state_dict(in_steps.state_dict())  # the names of the weights are equal
tokens = embedding(image)
matrix, bias = embedding.proj.weight.flatten(1).T, embedding.proj.bias
by_matrix = patches @ matrix + bias
print(tuple(image.shape), "->", tuple(tokens.shape))
print("kernel", tuple(embedding.proj.weight.shape), "as matrix E", tuple(matrix.shape))
print("the two classes are equal:", torch.equal(tokens, in_steps(image)))
print(
    f"convolution and matrix differ by at most {(tokens - by_matrix).abs().max():.1e}"
)

# %% [markdown]
# ### One channel of the embedding
#
# What is in a token? Before step 5, the embedding is 768 maps of 14 x 14. Take the first map. Each
# number in it belongs to one patch:

# %%
maps = embedding.proj(image).detach()
print("maps", tuple(maps.shape))
for row in maps[0, 0]:
    print(" ".join(f"{number:5.2f}" for number in row))

# %% [markdown]
# `flatten(2)` puts the 14 rows one behind the other. The same 196 numbers are then a column of the
# table of tokens: number 14 is the first number of the second row.

# %%
column = tokens[0, :, 0].detach()
print("tokens", tuple(tokens.shape), "one column", tuple(column.shape))
print("numbers 12 to 17:", " ".join(f"{number:5.2f}" for number in column[12:18]))
print("equal:", torch.equal(maps[0, 0].flatten(), column))

# %% mystnb={"figure": {"caption": "The first channel of the embedding, with random weights. Left: as a map of 14 x 14. The light wall (top) and the suit (lower left) can still be told apart, because each number summarises the pixels of its own patch. Right: the same 196 numbers in one row, as the encoder reads them; the white lines are the ends of the rows of the map. What was above and below is now 14 numbers apart."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(8, 2.4), width_ratios=[1, 2.6])
axes[0].imshow(maps[0, 0])
axes[0].set(xlabel="column", ylabel="row")
axes[1].imshow(column[None], aspect="auto", interpolation="nearest")
for end in range(14, 196, 14):
    axes[1].axvline(end - 0.5, color="white", linewidth=0.6)
axes[1].set(xlabel="number of the token", yticks=[])
figure.tight_layout()

# %% [markdown]
# ### Cost and sizes
#
# What does it cost? `vitkit.summary` returns a table of shapes, parameters, multiply-adds and
# memory for any module. (`print(table)` shows all its columns.)

# %%
print_table(vitkit.summary(embedding, input_size=(1, 3, 224, 224)))
print(f"if each bias counts as a multiply-add: {196 * 768 * (768 + 1) / 1e6:.2f} M")

# %% [markdown]
# Other sizes are arguments of the class. Here are CIFAR images with patches of 4 x 4 and width 48,
# and a rectangular image with rectangular patches.

# %%
small = vitkit.PatchEmbedding(patch_size=4, width=48)
print("(4, 3, 32, 32) ->", tuple(small(torch.rand(4, 3, 32, 32)).shape))
oblong = vitkit.PatchEmbedding(patch_size=(8, 16), width=48)
print("(1, 3, 96, 256) ->", tuple(oblong(torch.rand(1, 3, 96, 256)).shape))

# %% [markdown]
# An image size that the patch size does not divide is an error. Without this check, a stride of 16
# silently drops the last ten of 250 columns. And $HW / P^2$, rounded down, counts more positions
# than there are patches.

# %%
print(f"patches {(250 // 16) ** 2}, positions {250 * 250 // 16**2}")
print_error(lambda: embedding(torch.rand(1, 3, 250, 250)))

# %% [markdown]
# ## Position embeddings
#
# Attention, the subject of the next chapter, treats its tokens as a set: it does not see their
# order. So a vector that encodes its position is added to each token: $E_\text{pos}$, a table of
# $T = N + 1$ rows of $D$ numbers, one row for each token: (197, 768) in ViT-B/16. It can be learned,
# as in the paper, or fixed. The fixed table of "Attention Is All You Need" has a sine and a cosine in
# each pair of columns. The frequency falls from pair to pair:
#
# $$ E_\text{pos}[n, 2i] = \sin(n\, 10000^{-2i/D}),\qquad
#    E_\text{pos}[n, 2i+1] = \cos(n\, 10000^{-2i/D}) $$

# %% mystnb={"figure": {"caption": "The fixed table for 196 tokens and width 128. A row is the position vector of one token. The high frequencies at the left distinguish neighbours; the low frequencies at the right hardly change over the whole image. No two rows are equal."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
table = sincos_1d(196, 128)
_ = heat(
    table, size=(6, 3.2), xlabel="index in the vector", ylabel="number of the token"
)

# %% [markdown]
# An image has two dimensions. The fixed 2-D table uses half of the width for the row and half for
# the column. The difference shows in the similarity of one position to all others.

# %% mystnb={"figure": {"caption": "Similarity of all positions to the patch in row 7, column 7: the scalar product of the position vectors; bright means similar. With the 1-D table, the most similar positions are the neighbours in reading order, left and right. The patches directly above and below are much less similar. With the 2-D table there is a cross: the same row and the same column."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
flat, square = sincos_1d(196, 128), sincos_2d((14, 14), 128)
similarity = [(t @ t[7 * 14 + 7]).reshape(14, 14) for t in (flat, square)]
_ = grid_of(similarity, ["fixed 1-D", "fixed 2-D"], across=2, size=2.4)

# %% [markdown]
# All values of the fixed table are between $-1$ and $1$, as a sine and a cosine are. (The text of
# notebook E says 0 to 1.) The table has another property, which is often given as the reason why a
# model might read longer sequences than it was trained on: to move $k$ positions on, each pair of
# columns is turned by the same angle, $k \cdot 10000^{-2i/D}$, wherever the token is. The first pair
# shows it:

# %%
fixed = sincos_1d(196, 128)
print(f"values from {fixed.min():.2f} to {fixed.max():.2f}")
angle = torch.tensor(5.0)  # five positions on; the first frequency is 1
turn = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
moved = fixed[:-5, :2] @ turn
print(f"row n + 5 and row n turned differ by {(moved - fixed[5:, :2]).abs().max():.0e}")

# %% [markdown]
# This makes distances easy to compute for attention. It does not follow that a trained model works
# on longer sequences: exercise 5 measures it.
#
# ## All of Eq. 1
#
# ```{drawing} patches
# Eq. 1 for an image of four patches.
# ```
#
# The class token is one learned vector, prepended to the patches of every image. Attention fills it
# with information about the image; [chapter 4](04_vit.py) reads the classes from it. All of Eq. 1 in
# plain PyTorch, from an image to $z_0$:

# %%
torch.manual_seed(42)
cls_token = nn.Parameter(torch.zeros(1, 1, 768))
pos_embed = nn.Parameter(0.02 * torch.randn(1, 197, 768))
x = image
print("1. image            ", tuple(x.shape))
x = in_steps(x)
print("2. embedded patches ", tuple(x.shape))
x_class = cls_token.expand(len(x), -1, -1)
print("3. class token      ", tuple(x_class.shape))
x = torch.cat([x_class, x], dim=1)
print("4. with class token ", tuple(x.shape))
z_0 = x + pos_embed
print("5. with positions   ", tuple(z_0.shape))

# %% [markdown]
# `Embedding` does steps 3 to 5 in the library. A model stores the learned parts under their usual
# names, `cls_token` and `pos_embed`, and passes them to `Embedding`. The field `positions` of the
# spec selects the kind of positions.
#
# ```{literalinclude} ../../src/vitkit/models/embedding.py
# :pyobject: Embedding.forward
# :dedent: 4
# ```

# %%
for positions in ("none", "sincos_1d", "sincos_2d", "learned"):
    model = vitkit.create_model(
        "vit_base_patch16_224", depth=1, positions=positions
    ).eval()
    x_p = model.patch_embed(image)
    z_0 = model.embedding(x_p, (14, 14), model.prefix_tokens(x_p), model.pos_embed)
    learned = 0 if model.pos_embed is None else model.pos_embed.numel()
    print(f"{positions:<10} z_0 {tuple(z_0.shape)}  learned parameters {learned:>7,}")
shape = tuple(model.pos_embed[0].shape)
print(f"class token {tuple(model.cls_token.shape)}, table {shape}")

# %% [markdown]
# The learned table starts with small values, so that at first a token depends more on its patch
# than on its position. [Notebook A, "Replicating the
# paper"](coverage.md#a-replicating-the-paper-equation-by-equation), starts it at ones, which are
# the same for every position, or with N(0, 1), which is larger than the patches. The code of
# [notebook B, "Attention in vision"](coverage.md#b-attention-in-vision-cifar-10-ignite), starts it
# at zeros ([chapter 11](11_bugs.py#positions-that-start-at-zero)). Notebook C uses Xavier's rule.
# That rule takes the axes of the table for the inputs and outputs of a matrix, so its values are
# about a sixth of the intended size. Standard deviations:

# %%
starts = {"N(0, 0.02²)": partial(nn.init.normal_, std=0.02), "N(0, 1)": nn.init.normal_,
          "Xavier": nn.init.xavier_normal_}  # fmt: skip
print(f"embedded patches  {x_p.std():.3f}")
for name, start in starts.items():
    print(f"{name:<17} {start(torch.empty(1, 197, 1024)).std():.3f}")

# %% [markdown]
# ### One class token for all images
#
# The first axis of the class token and of the position table has size 1, so they work with any
# batch size. `expand` repeats the token for each image without copying it; einops' `repeat`, as in
# notebook C, gives the same values. The token starts at zeros here and at ones in notebook A;
# [chapter 14](14_bug_costs.py#the-costs) starts token and positions at ones, and finds no cost. If the
# first axis is the batch size instead, as in notebook A, a model made for one image fails on two:

# %%
two = embedding(image.expand(2, -1, -1, -1))
for rows in (1, 2):
    class_token = torch.zeros(1, 1, 768).expand(rows, -1, -1)
    try:
        joined = torch.cat([class_token, two], dim=1)
        print(f"{rows} class tokens:", tuple(joined.shape))
    except RuntimeError as error:
        print_wrapped(f"{rows} class token: {str(error).splitlines()[0]}")

# %% [markdown]
# Notebook E prepends the token image by image in a Python loop, and remarks that this "is probably
# sub-optimal". The result is equal. The cost can be measured, with the notebook's 49 patches of
# width 8:

# %%
many, token = torch.randn(512, 49, 8), torch.randn(1, 8)


def one_by_one() -> torch.Tensor:
    return torch.stack([torch.vstack((token, rows)) for rows in many])


def at_once() -> torch.Tensor:
    return torch.cat([token.expand(len(many), -1, -1), many], dim=1)


repeated = torch.cat([repeat(token, "o D -> B o D", B=len(many)), many], dim=1)
print(tuple(many.shape), "->", tuple(at_once().shape))
print("equal:", torch.equal(one_by_one(), at_once()), torch.equal(repeated, at_once()))
for name, function in (("loop", one_by_one), ("expand", at_once)):
    start = time.perf_counter()
    for _ in range(20):
        function()
    print(f"{name:<7}{(time.perf_counter() - start) / 20 * 1000:.2f} ms for 512 images")

# %% [markdown]
# ## What you know now
#
# - An image of $H \times W$ pixels is $N = HW/P^2$ patches; `reshape` alone does not cut them.
# - $x_p E$ is one matrix for all patches, stored as a convolution with stride $P$.
# - One channel of the embedding is a small map of the image; flattened, it is one column of the
#   table of tokens.
# - The class token and the positions have a first axis of size 1 and are the same for every image.
# - A fixed table of sines has a row for every position. A learned table has as many rows as it was
#   trained with.
#
# ## Exercises
#
# **1. Build.** Rebuild the image from its patches: write `unpatchify(patches, grid, patch)` for
# images with any number of channels, and check it. (Hint: the pattern of einops' `rearrange` can be
# read from right to left.)


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def unpatchify(
    patches: torch.Tensor, grid: tuple[int, int], patch: int
) -> torch.Tensor:
    return rearrange(
        patches,
        "B (gh gw) (C P Q) -> B C (gh P) (gw Q)",
        gh=grid[0],
        gw=grid[1],
        P=patch,
        Q=patch,
    )


assert torch.equal(unpatchify(patches, (14, 14), 16), image)
oblong = torch.rand(2, 1, 12, 20)
assert torch.equal(unpatchify(patchify(oblong, (4, 4)), (3, 5), 4), oblong)

# %% [markdown]
# **2. Predict, then run.** The exponent of the fixed table is often written `dim // width` by
# mistake, with an integer division. How many different columns does the table of 196 tokens and
# width 128 then have?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
exponents = torch.arange(0, 128, 2) // 128  # integer division: always 0
angles = torch.arange(196.0)[:, None] * 10000.0 ** -exponents.float()
mistaken = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
assert len(mistaken.T.unique(dim=0)) == 2, "one sine and one cosine, 64 times over"
assert len(fixed.T.unique(dim=0)) == 128

# %% [markdown]
# **3. Show.** Show that a ViT without positions, with the class token as readout, gives the same output
# for an image whose patches are shuffled. Show that a ViT with positions does not.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
shuffled = unpatchify(patches[:, torch.randperm(196)], (14, 14), 16)
for positions, same in (("none", True), ("learned", False)):
    model = vitkit.create_model(
        "vit_tiny_patch16_224", depth=2, positions=positions
    ).eval()
    nn.init.normal_(model.head.weight, std=0.1)  # the head starts at zero
    with torch.no_grad():
        assert torch.allclose(model(image), model(shuffled), atol=1e-4) is same

# %% [markdown]
# **4. Build.** Add overlapping patches to `PatchEmbeddingInSteps`: kernels of 16 x 16 with stride 8.
# How many tokens does an image of 224 x 224 give? (Hint: only step 2 changes, and the check.)


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
class Overlapping(PatchEmbeddingInSteps):
    def __init__(self, channels: int = 3, patch: int = 16, width: int = 768) -> None:
        super().__init__(channels, patch, width)
        self.proj = nn.Conv2d(channels, width, patch, stride=patch // 2)


assert Overlapping()(image).shape == (1, ((224 - 16) // 8 + 1) ** 2, 768)  # 27 x 27

# %% [markdown]
# **5. Train.** Do fixed sines work for more patches than a model was trained with? Put the digits
# (8 x 8 pixels) at a random height into an image of 12 x 8 pixels, and train one model with fixed
# 1-D positions and one with learned positions, with patches of 2 x 2: 24 patches. Then test on
# images of 16 x 8, once with the digit in the upper part, whose rows were all trained, and once in
# the lowest 8 rows, half of which were not. Give the learned table new rows in two ways: resampled,
# as `vitkit` does by itself, and with untrained rows at its end. (Hint: `ViTSpec(image_size=(12, 8),
# ...)`; a model takes other image sizes as they are.)
#
# The result may surprise: with each of three seeds, the fixed sines are the worst (11 to 17 %, little
# more than guessing among ten classes), the table with untrained rows gets 37 to 47 %, and the
# resampled one 69 to 73 %. That the formula of the sines has no end does not mean that the
# layers, which never saw these vectors, know what to do with them.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
splits = open_dataset("digits").splits
digits, labels = {}, {}
for part in ("train", "test"):
    digits[part] = torch.from_numpy(splits[part].images).permute(0, 3, 1, 2) / 127.5 - 1
    labels[part] = torch.from_numpy(splits[part].labels)


def placed(images: torch.Tensor, tops: torch.Tensor, height: int) -> torch.Tensor:
    """Put each image (8 x 8) into an empty one of `height` x 8, at its own top row."""
    canvas = torch.full((len(images), 1, height, 8), -1.0)
    rows = tops[:, None] + torch.arange(8)
    canvas[torch.arange(len(images))[:, None], 0, rows] = images[:, 0]
    return canvas


def accuracy(model: nn.Module, tops: tuple[int, int], height: int) -> float:
    images = digits["test"]
    where = torch.randint(tops[0], tops[1] + 1, (len(images),))
    with torch.no_grad():
        guesses = model.eval()(placed(images, where, height)).argmax(1)
    return float((guesses == labels["test"]).float().mean())


spec = vitkit.ViTSpec(
    image_size=(12, 8), patch_size=2, in_channels=1, width=48, depth=3, num_heads=3,
    mlp_width=96, num_classes=10,
)  # fmt: skip
results = {}
for positions in ("sincos_1d", "learned"):
    torch.manual_seed(0)
    model = vitkit.ViT(spec.replace(positions=positions))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=400)
    for _ in range(400):
        batch = torch.randint(len(labels["train"]), (64,))
        images = placed(digits["train"][batch], torch.randint(0, 5, (64,)), 12)
        loss = nn.functional.cross_entropy(model(images), labels["train"][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    tested = {positions: model}
    if positions == "learned":
        longer = vitkit.ViT(model.spec.replace(image_size=(16, 8)))
        weights = model.state_dict()
        new_rows = 0.02 * torch.randn(1, 8, 48)
        weights["pos_embed"] = torch.cat([weights["pos_embed"], new_rows], dim=1)
        longer.load_state_dict(weights)
        tested = {"learned, resampled": model, "learned, new rows": longer}
    for name, trained in tested.items():
        trained_size = accuracy(model, (0, 4), 12)
        upper, lower = accuracy(trained, (0, 4), 16), accuracy(trained, (8, 8), 16)
        results[name] = (trained_size, upper, lower)
        print(f"{name:<19} as trained {trained_size:.1%}; 16 x 8 pixels: "
              f"upper part {upper:.1%}, lowest rows {lower:.1%}")  # fmt: skip
for trained_size, _, lower in results.values():
    assert trained_size > lower, "no kind is as good where it was not trained"
assert results["sincos_1d"][2] < results["learned, resampled"][2] - 0.2

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
# each patch as a word.
#
# $$ z_0 = [x_\text{class};\ x_p^1 E;\ x_p^2 E;\ \dots;\ x_p^N E] + E_\text{pos} \tag{1} $$
#
# This chapter builds $z_0$ step by step. The code is in `vitkit.models.embedding`: `PatchEmbedding`
# computes $x_p E$, and `Embedding` computes the rest of Eq. 1. "Notebook A" to "notebook E" are the
# five published notebooks that [the overview](index.md) lists.

# %%
from functools import partial

import torch
from drawing import grid_of, heat, mosaic, print_table
from einops import rearrange
from matplotlib import pyplot as plt
from print_error import print_error
from skimage import data
from torch import nn

import vitkit
from vitkit.models.embedding import patchify
from vitkit.models.positions import sincos_1d, sincos_2d

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Cutting
#
# An image of $H \times W$ pixels gives $N = HW / P^2$ patches of $P \times P$ pixels. Each patch
# becomes one row of numbers: all red values, then all green ones, then all blue ones, as in the
# kernel of a convolution. (Notebook C stores the three colours of each pixel side by side; its
# matrix $E$ has the same rows in another order.) The example is a photograph of 224 x 224 pixels
# with $P = 16$: 14 rows of 14 patches.

# %%
photograph = (
    torch.from_numpy(data.astronaut()[:448, :448]).permute(2, 0, 1).float() / 255
)
image = nn.functional.interpolate(
    photograph[None], size=224, antialias=True, mode="bilinear"
)
image = image.clamp(0, 1)
patches = patchify(image, (16, 16))
print("image", tuple(image.shape))
print("patches", tuple(patches.shape))
print(f"{224 * 224 // 16**2} patches of {16 * 16 * 3} values")

# %% mystnb={"figure": {"caption": "The 14 x 14 patches of the photograph, in the order in which the model reads them: row by row, from the top left. Each square is one token. The face and the flag are still visible, so each patch is a connected part of the image."}}
squares = rearrange(patches[0], "N (C P Q) -> N P Q C", C=3, P=16)
_ = grid_of([mosaic(squares, across=14)], across=1, size=4.2)

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
# Notebook E cuts its digits with `reshape`. None of its 49 "patches" is a square patch. There is no
# error, because the shapes are the same. The model still learns something, because every way of
# cutting keeps all the values. But pixels that are above or below each other are now in different
# tokens.

# %%
digits = torch.rand(5, 1, 28, 28)
strips, tiles = digits.reshape(5, 49, 16), patchify(digits, (4, 4))
print(tuple(strips.shape), tuple(tiles.shape), "equal:", torch.equal(strips, tiles))

# %% mystnb={"figure": {"caption": "The photograph in grey, cut in both ways into 196 pieces of 256 values. Each piece is drawn as a square of 16 x 16. Left: a piece made by reshape is a little more than one row of pixels, so no square shows an object. Right: the pieces made by patchify are squares of the image."}}
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
# vector of $D$ numbers. A convolution whose stride equals its kernel size computes the same,
# because it applies its kernel to each patch exactly once. `PatchEmbedding` stores $E$ as a
# convolution kernel, as published weights do.

# %%
embedding = vitkit.PatchEmbedding(in_channels=3, patch_size=16, width=768)
tokens = embedding(image)
by_matrix = patches @ embedding.proj.weight.flatten(1).T + embedding.proj.bias
print(tuple(image.shape), "->", tuple(tokens.shape))
print(
    "kernel",
    tuple(embedding.proj.weight.shape),
    "bias",
    tuple(embedding.proj.bias.shape),
)
print(
    f"largest difference between convolution and matrix: {(tokens - by_matrix).abs().max():.1e}"
)

# %% [markdown]
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
# order. So a vector that encodes its position is added to each token: $E_\text{pos}$. It can be
# learned, as in the paper, or fixed. The fixed table of "Attention Is All You Need" has a sine and
# a cosine in each pair of columns. The frequency falls from pair to pair:
#
# $$ E_\text{pos}[n, 2i] = \sin(n\, 10000^{-2i/D}),\qquad
#    E_\text{pos}[n, 2i+1] = \cos(n\, 10000^{-2i/D}) $$

# %% mystnb={"figure": {"caption": "The fixed table for 196 tokens and width 128. A row is the position vector of one token. The high frequencies at the left distinguish neighbours; the low frequencies at the right hardly change over the whole image. No two rows are equal."}}
table = sincos_1d(196, 128)
_ = heat(
    table, size=(6, 3.2), xlabel="index in the vector", ylabel="number of the token"
)

# %% [markdown]
# An image has two dimensions. The fixed 2-D table uses half of the width for the row and half for
# the column. The difference shows in the similarity of one position to all others.

# %% mystnb={"figure": {"caption": "Similarity of all positions to the patch in row 7, column 7: the scalar product of the position vectors; bright means similar. With the 1-D table, the most similar positions are the neighbours in reading order, left and right. The patches directly above and below are much less similar. With the 2-D table there is a cross: the same row and the same column."}}
flat, square = sincos_1d(196, 128), sincos_2d((14, 14), 128)
similarity = [(t @ t[7 * 14 + 7]).reshape(14, 14) for t in (flat, square)]
_ = grid_of(similarity, ["fixed 1-D", "fixed 2-D"], across=2, size=2.4)

# %% [markdown]
# ## All of Eq. 1
#
# `Embedding` puts the parts together: it prepends the class token to the patches and adds the
# positions. A model stores the learned parts under their usual names, `cls_token` and `pos_embed`,
# and passes them to `Embedding`. The field `positions` of the spec selects the kind of positions.

# %%
for positions in ("none", "sincos_1d", "sincos_2d", "learned"):
    model = vitkit.create_model(
        "vit_base_patch16_224", depth=1, positions=positions
    ).eval()
    x_p = model.patch_embed(image)
    z_0 = model.embedding(x_p, (14, 14), model.prefix_tokens(x_p), model.pos_embed)
    learned = 0 if model.pos_embed is None else model.pos_embed.numel()
    print(
        f"{positions:<10} z_0 {tuple(z_0.shape)}  learned parameters in E_pos: {learned:>7,}"
    )
print(
    f"class token {tuple(model.cls_token.shape)}, table {tuple(model.pos_embed[0].shape)}"
)

# %% [markdown]
# The learned table starts with small values, so that at first a token depends more on its patch
# than on its position. Notebook A starts it at ones, which are the same for every position, or with
# N(0, 1), which is larger than the patches. Notebook C uses Xavier's rule. That rule takes the axes
# of the table for the inputs and outputs of a matrix, so its values are about a sixth of the
# intended size. Standard deviations:

# %%
starts = {"N(0, 0.02)": partial(nn.init.normal_, std=0.02), "N(0, 1)": nn.init.normal_,
          "Xavier": nn.init.xavier_normal_}  # fmt: skip
print(f"embedded patches  {x_p.std():.3f}")
for name, start in starts.items():
    print(f"{name:<17} {start(torch.empty(1, 197, 1024)).std():.3f}")

# %% [markdown]
# The first axis of the class token and of the position table has size 1, so they work with any
# batch size. If the batch size is fixed there instead, a model made for one image fails on two:

# %%
two = embedding(image.expand(2, -1, -1, -1))
for rows in (1, 2):
    class_token = torch.zeros(1, 1, 768).expand(rows, -1, -1)
    try:
        print(
            f"{rows} class tokens:", tuple(torch.cat([class_token, two], dim=1).shape)
        )
    except RuntimeError as error:
        print(f"{rows} class token:", str(error).splitlines()[0])

# %% [markdown]
# ## Exercises
#
# **1.** Rebuild the image from its patches: write `unpatchify(patches, grid, patch)` for images
# with any number of channels, and check it.


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
# **2.** The exponent of the fixed table is often written `dim // width` by mistake. What does the
# table then look like, and how many different columns does it have?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
exponents = torch.arange(0, 128, 2) // 128  # integer division: always 0
angles = torch.arange(196.0)[:, None] * 10000.0 ** -exponents.float()
mistaken = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
assert len(mistaken.T.unique(dim=0)) == 2, "one sine and one cosine, 64 times over"
assert len(table.T.unique(dim=0)) == 128

# %% [markdown]
# **3.** Show that a ViT without positions, with the class token as readout, gives the same output
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

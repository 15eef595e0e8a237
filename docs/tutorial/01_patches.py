# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 1. Patches, and Eq. 1
#
# A Transformer reads a sequence of vectors. An image is a table of pixels. The Vision Transformer
# ("An Image is Worth 16x16 Words", [arXiv 2010.11929](https://arxiv.org/abs/2010.11929)) makes one
# from the other in the plainest way there is: it cuts the image into squares and treats each
# square as a word.
#
# $$ z_0 = [x_\text{class};\ x_p^1 E;\ x_p^2 E;\ \dots;\ x_p^N E] + E_\text{pos} \tag{1} $$
#
# This chapter builds $z_0$ piece by piece. The same pieces are in
# `vitkit.models.embedding`: `PatchEmbedding` is $x_p E$, and `Embedding` is the rest of Eq. 1.

# %%
from functools import partial

import torch
from drawing import grid_of, heat, mosaic
from einops import rearrange
from matplotlib import pyplot as plt
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
# An image of $H \times W$ pixels gives $N = HW / P^2$ patches of $P \times P$, each as one row of
# numbers: all of red, then green, then blue, as in the kernel of a convolution. (The third notebook has
# the colours of a pixel side by side; its matrix has the same rows in another order.) Here is a
# photograph at 224 x 224 and what it becomes with $P = 16$: 14 patches in a row, and 14 rows.

# %%
photograph = torch.from_numpy(data.astronaut()[:448, :448]).permute(2, 0, 1).float() / 255
image = nn.functional.interpolate(photograph[None], size=224, antialias=True, mode="bilinear")
image = image.clamp(0, 1)
patches = patchify(image, (16, 16))
print("image", tuple(image.shape))
print("patches", tuple(patches.shape))
print(f"{224 * 224 // 16**2} patches of {16 * 16 * 3} values")

# %% mystnb={"figure": {"caption": "The 14 x 14 patches of the photograph, in the order in which the model reads them: row by row, from the top left. Each square is one token. Face and flag are still to be seen, so each patch is a piece of the image."}}
squares = rearrange(patches[0], "N (C P Q) -> N P Q C", C=3, P=16)
_ = grid_of([mosaic(squares, across=14)], across=1, size=4.2)

# %% [markdown]
# ## Why `reshape` does not cut patches
#
# `reshape` leaves the values in the order in which they lie in memory, and an image lies there row
# by row. Sixteen values in a row are a strip of an image that is sixteen wide, not a square of 4 x 4:

# %%
counted = torch.arange(256.0).reshape(1, 1, 16, 16)
print("reshape :", counted.reshape(1, 16, 16)[0, 0].int().tolist())
print("patchify:", patchify(counted, (4, 4))[0, 0].int().tolist())

# %% [markdown]
# One of the notebooks that this tutorial grew from cuts its digits in this way. None of its 49
# "patches" is a patch, and nothing complains, as the shapes are the same. It still learns something,
# since every way to cut keeps the values; what is lost is that neighbours above and below stay
# together.

# %%
digits = torch.rand(5, 1, 28, 28)
strips, tiles = digits.reshape(5, 49, 16), patchify(digits, (4, 4))
print(tuple(strips.shape), tuple(tiles.shape), "equal:", torch.equal(strips, tiles))

# %% mystnb={"figure": {"caption": "The photograph in grey, cut both ways into 196 pieces of 256 values; each piece is drawn as a square of 16 x 16. Left: a piece of reshape is a little more than one row of the image, folded up, and no square shows a thing. Right: pieces of the image."}}
grey = image.mean(1, keepdim=True)
cuts = {"reshape": grey.reshape(196, 16, 16), "patchify": patchify(grey, (16, 16)).view(-1, 16, 16)}
drawn = [mosaic(pieces, across=14) for pieces in cuts.values()]
_ = grid_of(drawn, list(cuts), across=2, size=3.2, colours="gray")

# %% [markdown]
# ## One matrix for all patches: $x_p E$
#
# Every patch of $P \cdot P \cdot C$ values is multiplied by the same matrix $E$ and becomes $D$
# numbers. A convolution whose stride is its kernel's size does just that, as it sees every patch
# once. `PatchEmbedding` keeps $E$ as a kernel, because the published weights do.

# %%
embedding = vitkit.PatchEmbedding(in_channels=3, patch_size=16, width=768)
tokens = embedding(image)
by_matrix = patches @ embedding.proj.weight.flatten(1).T + embedding.proj.bias
print(tuple(image.shape), "->", tuple(tokens.shape))
print("kernel", tuple(embedding.proj.weight.shape), "bias", tuple(embedding.proj.bias.shape))
print(f"largest difference of convolution and matrix: {(tokens - by_matrix).abs().max():.1e}")

# %% [markdown]
# What does it cost? `vitkit.summary` prints it for any module: sizes, parameters, multiply-adds,
# memory.

# %%
print(vitkit.summary(embedding, input_size=(1, 3, 224, 224)))
print(f"with each bias counted as a multiply-add: {196 * 768 * (768 + 1) / 1e6:.2f} M")

# %% [markdown]
# Other sizes are a matter of arguments: CIFAR's images with patches of 4 x 4 and width 48; a
# image that is no square, with patches that are none.

# %%
small = vitkit.PatchEmbedding(patch_size=4, width=48)
print("(4, 3, 32, 32) ->", tuple(small(torch.rand(4, 3, 32, 32)).shape))
oblong = vitkit.PatchEmbedding(patch_size=(8, 16), width=48)
print("(1, 3, 96, 256) ->", tuple(oblong(torch.rand(1, 3, 96, 256)).shape))

# %% [markdown]
# A size that the patch does not divide is refused. Otherwise a stride of 16 drops the last ten
# columns of 250 pixels in silence, and $HW / P^2$, rounded down, counts positions for patches that
# are not there.

# %%
print(f"patches {(250 // 16) ** 2}, positions {250 * 250 // 16**2}")
try:
    embedding(torch.rand(1, 3, 250, 250))
except vitkit.VitkitError as error:
    print(error)

# %% [markdown]
# ## Where a patch stood
#
# Attention, the subject of the next chapter, treats its tokens as a set: it does not see their
# order. So each token is told its place by a vector that is added to it, $E_\text{pos}$. It may be
# learned, as in the paper, or fixed. The fixed table of "Attention Is All You Need" has a sine and
# a cosine in each pair of columns, slower from pair to pair:
#
# $$ E_\text{pos}[n, 2i] = \sin(n\, 10000^{-2i/D}),\qquad
#    E_\text{pos}[n, 2i+1] = \cos(n\, 10000^{-2i/D}) $$

# %% mystnb={"figure": {"caption": "The fixed table for 196 tokens and width 128. A row is a token's place: fast waves at the left tell neighbours apart, slow ones at the right hardly change over the whole image. No two rows are alike."}}
table = sincos_1d(196, 128)
_ = heat(table, size=(6, 3.2), across="place in the vector", down="number of the token")

# %% [markdown]
# An image has two directions. The fixed 2-D table gives half of the width to the row and half to
# the column. The difference shows when we ask which places are like a given one.

# %% mystnb={"figure": {"caption": "How alike all places are to the patch in row 7, column 7: the scalar product of their vectors, bright for alike. In one dimension these are its neighbours in reading order, left and right of it; the patches right above and below are much less alike. In two there is a cross: the same row, and the same column."}}
flat, square = sincos_1d(196, 128), sincos_2d((14, 14), 128)
alike = [(t @ t[7 * 14 + 7]).reshape(14, 14) for t in (flat, square)]
_ = grid_of(alike, ["fixed 1-D", "fixed 2-D"], across=2, size=2.4)

# %% [markdown]
# ## All of Eq. 1
#
# `Embedding` puts it together: class token in front of the patches, positions added. A model keeps
# the learned parts under the field's usual names, `cls_token` and `pos_embed`, and hands them in.
# Which positions it has is a word of its spec.

# %%
for positions in ("none", "sincos_1d", "sincos_2d", "learned"):
    model = vitkit.create_model("vit_base_patch16_224", depth=1, positions=positions).eval()
    x_p = model.patch_embed(image)
    z_0 = model.embedding(x_p, (14, 14), model.prefix_tokens(x_p), model.pos_embed)
    learned = 0 if model.pos_embed is None else model.pos_embed.numel()
    print(f"{positions:<10} z_0 {tuple(z_0.shape)}  learned numbers in E_pos: {learned:>7,}")
print(f"class token {tuple(model.cls_token.shape)}, table {tuple(model.pos_embed[0].shape)}")

# %% [markdown]
# The learned table starts small, so that at first a token says more of its patch than of its place.
# Notebooks start it at ones, which are the same for every place; or by N(0, 1), which drowns the
# patches; or by Xavier's rule, which takes the table's axes for those of a kernel and makes a sixth
# of what was meant. Standard deviations:

# %%
starts = {"N(0, 0.02)": partial(nn.init.normal_, std=0.02), "N(0, 1)": nn.init.normal_,
          "Xavier": nn.init.xavier_normal_}  # fmt: skip
print(f"embedded patches  {x_p.std():.3f}")
for name, start in starts.items():
    print(f"{name:<17} {start(torch.empty(1, 197, 1024)).std():.3f}")

# %% [markdown]
# Where the batch is, class token and table have a 1, so that any batch size works. With the batch
# size in that place, a model made for one image fails on two:

# %%
two = embedding(image.expand(2, -1, -1, -1))
for rows in (1, 2):
    class_token = torch.zeros(1, 1, 768).expand(rows, -1, -1)
    try:
        print(f"{rows} class tokens:", tuple(torch.cat([class_token, two], dim=1).shape))
    except RuntimeError as error:
        print(f"{rows} class token:", str(error).splitlines()[0])

# %% [markdown]
# ## Exercises
#
# **1.** Put the image together again from its patches: write `unpatchify(patches, grid, patch)`
# for images of any number of channels, and check it.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def unpatchify(patches: torch.Tensor, grid: tuple[int, int], patch: int) -> torch.Tensor:
    return rearrange(
        patches, "B (gh gw) (C P Q) -> B C (gh P) (gw Q)", gh=grid[0], gw=grid[1], P=patch, Q=patch
    )


assert torch.equal(unpatchify(patches, (14, 14), 16), image)
oblong = torch.rand(2, 1, 12, 20)
assert torch.equal(unpatchify(patchify(oblong, (4, 4)), (3, 5), 4), oblong)

# %% [markdown]
# **2.** The exponent of the fixed table is often written `dim // width` by mistake. What does the
# table look like then, and how many different columns has it?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
exponents = torch.arange(0, 128, 2) // 128  # whole numbers: always 0
angles = torch.arange(196.0)[:, None] * 10000.0 ** -exponents.float()
mistaken = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
assert len(mistaken.T.unique(dim=0)) == 2, "one sine and one cosine, 64 times over"
assert len(table.T.unique(dim=0)) == 128

# %% [markdown]
# **3.** Show that without positions and with the class token as readout, a ViT gives the same
# answer for an image whose patches are shuffled, and that with positions it does not.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
shuffled = unpatchify(patches[:, torch.randperm(196)], (14, 14), 16)
for positions, same in (("none", True), ("learned", False)):
    model = vitkit.create_model("vit_tiny_patch16_224", depth=2, positions=positions).eval()
    nn.init.normal_(model.head.weight, std=0.1)  # the head starts at zero
    with torch.no_grad():
        assert torch.allclose(model(image), model(shuffled), atol=1e-4) is same

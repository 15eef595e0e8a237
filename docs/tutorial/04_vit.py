# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 4. The Vision Transformer, Eq. 4
#
# After the last block, the class token represents the whole image:
#
# $$ y = \operatorname{LN}(z_L^0) \tag{4} $$
#
# A linear head computes one score per class from $y$, the logits. This completes the model:
# `vitkit.ViT`, built from a `ViTSpec`. Eq. 4 is `ViT.norm` followed by `Readout`.

# %%
import torch
from drawing import count, grid_of, print_table
from matplotlib import pyplot as plt
from print_error import print_error
from torch import nn

import vitkit
from vitkit.models.positions import resample_positions

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Sizes
#
# Every published size has a name. The number after the slash is the patch size. Smaller patches
# give more tokens, but the weights of the blocks are the same. On torch's "meta" device a model has
# shapes but no values, so even the largest model is created at once.

# %%
sizes = {
    "Ti/16": "tiny_patch16", "S/16": "small_patch16", "B/32": "base_patch32",
    "B/16": "base_patch16", "L/32": "large_patch32", "L/16": "large_patch16",
    "H/14": "huge_patch14",
}  # fmt: skip
with torch.device("meta"):
    models = {
        name: vitkit.create_model(f"vit_{size}_224") for name, size in sizes.items()
    }
print("model   width  blocks  heads   MLP  tokens  parameters")
for name, model in models.items():
    s = model.spec
    print(f"{name:<6}{s.width:>7}{s.depth:>8}{s.num_heads:>7}{s.mlp_width:>6}"
          f"{s.num_patches + 1:>8}{count(model) / 1e6:>10.1f} M")  # fmt: skip

# %% [markdown]
# Table 1 of the paper gives 86M, 307M and 632M parameters for Base, Large and Huge. L/32 has 307M.
# L/16 has fewer: its patch matrix is smaller by more than its position table is larger.
#
# [Notebook B](index.md) and `vit-pytorch` leave out the bias of the qkv projection. Notebook C
# normalises the patches before and after the patch matrix. All of this can be set in the spec. So
# can notebook B's small model for CIFAR (it has 8 heads, although the notebook writes 6) and the
# best-known example of `vit-pytorch`.

# %%
normed = {"stem": "normed_linear", "norm_eps": 1e-5}
with torch.device("meta"):
    others = {
        "B/16": models["B/16"],
        "B/16 without qkv bias": vitkit.create_model("vit_base_patch16_224", qkv_bias=False),
        "L/16 with normed patches": vitkit.create_model("vit_large_patch16_224", **normed),
        "CIFAR, 32 px, patch 4": vitkit.create_model("vit_cifar_patch4_32", num_classes=10),
        "vit-pytorch's example": vitkit.create_model(
            "vit_base_patch16_224", image_size=256, patch_size=32, width=1024, depth=6,
            num_heads=16, mlp_width=2048, qkv_bias=False, **normed,
        ),
    }  # fmt: skip
for name, model in others.items():
    print(f"{name:<25}{count(model):>12,}")

# %% [markdown]
# ## What it costs
#
# The layer table counts fused attention as its two matrix products, and a linear layer once per
# token. Here is the table of B/16, without the modules inside its blocks. The row `blocks` has no
# multiply-adds, because this list of blocks is never called itself. `Identity` marks a part that
# this spec leaves out. `attn_pool` is the readout of Eq. 4.

# %%
table = vitkit.summary(models["B/16"])
print_table(table, depth=1)

# %% [markdown]
# Almost all multiply-adds are in the blocks:

# %%
blocks = [row.mult_adds for row in table.rows if row.kind == "EncoderBlock"]
for row in table.rows:
    if row.name in ("patch_embed", "head"):
        print(f"{row.name:<12}{row.mult_adds / 1e6:>9,.1f} M")
print(f"{len(blocks)} blocks   {sum(blocks) / 1e6:>9,.1f} M")
print(
    f"multiply-adds {table.mult_adds / 1e6:,.0f} M, parameters {table.parameter_mb:.2f} MB"
)

# %% [markdown]
# The tool in notebook A printed one hundredth of that. Its numbers can be reproduced: it counted
# each linear layer once instead of once per token, and it did not count torch's attention at all.

# %%
mlp = sum(row.parameters for row in table.rows if row.name.endswith(".mlp"))
norms = sum(row.parameters for row in table.rows if row.kind == "LayerNorm")
patch, head = 768 * (16 * 16 * 3 + 1), 1000 * (768 + 1)
print(f"multiply-adds {(196 * patch + mlp + norms + head) / 1e6:.2f} M")
print(f"parameters    {(patch + mlp + norms + head) * 4 / 1e6:.0f} MB")

# %% mystnb={"figure": {"caption": "The share of the attention products in a block's multiply-adds, by image size, for ViT-B/16. At 224 pixels it is 4 %. The products grow with the square of the number of tokens, everything else grows linearly; at 1,024 pixels they are nearly half."}}
sides, shares = [224, 384, 512, 768, 1024], []
for side in sides:
    T, D, M = (side // 16) ** 2 + 1, 768, 3072
    products, layers = 2 * T * T * D, T * D * (4 * D + 2 * M)
    shares.append(products / (products + layers))
figure, ax = plt.subplots(figsize=(5, 2.4))
bars = ax.bar([str(side) for side in sides], shares, color="#4c72b0")
ax.bar_label(bars, [f"{share:.0%}" for share in shares])
_ = ax.set(xlabel="height and width in pixels", ylabel="share", ylim=(0, 0.55))

# %% [markdown]
# ## Inputs and outputs
#
# `forward` always returns logits, so it fits every training loop. `forward_features` returns more:
# all tokens after the final norm, separated into class token and patches. The head computes logits
# from these features without a second pass. The shapes of ViT-L/16 for 32 images:

# %%
with torch.device("meta"):
    features = models["L/16"].forward_features(torch.empty(32, 3, 224, 224))
    logits = models["L/16"].forward_head(features)
print("class token", tuple(features.cls.shape))
print("patches    ", tuple(features.patches.shape))
print("logits     ", tuple(logits.shape))

# %% [markdown]
# **Logits, not probabilities.** Cross-entropy includes the softmax. If the model ends with a
# softmax, too, the softmax is applied twice, and even a certain and correct prediction has a loss.
# With 10 classes:

# %%
certain = nn.functional.one_hot(
    torch.arange(10), 10
).float()  # probabilities, all correct
print(
    f"lowest possible loss: {nn.functional.cross_entropy(certain, torch.arange(10)):.3f}"
)

# %% [markdown]
# **Class token or mean.** Eq. 4 uses the class token. The other common choice is the mean of the
# patches. The field `pooling` of the spec selects one of them; the weights and the features are the
# same.

# %%
tiny = vitkit.create_model("vit_tiny_patch16_224", depth=1, num_classes=0).eval()
by_mean = vitkit.ViT(tiny.spec.replace(pooling="mean")).eval()
by_mean.load_state_dict(tiny.state_dict())
images = torch.rand(2, 3, 224, 224)
with torch.no_grad():
    features = tiny.forward_features(images)
    print("cls ", torch.equal(tiny(images), features.cls))
    print("mean", torch.equal(by_mean(images), features.patches.mean(1)))

# %% [markdown]
# ## An image of another size
#
# A ViT works for every image size that its patch size divides. The blocks do not depend on the
# number of tokens, but the learned positions do. They are resampled like an image. Notebook C takes
# the first rows of the table instead, `pos_embed[:, :N + 1]`. This causes no error, but most
# patches get the position vector of another patch.

# %% mystnb={"figure": {"caption": "A model for 14 x 14 patches is applied to an image of 10 x 10 patches. The colour shows the column that the position vector of each patch encodes. Left: the first rows of the table. After ten patches a new row begins in the image, but not in the table, so the columns shift by four. Right: after resampling, columns stay columns."}}
column = torch.arange(14.0).repeat(14)[
    None, :, None
]  # (1, 196, 1): each row of the table is its column
sliced, resampled = column[:, :100], resample_positions(column, (14, 14), (10, 10))
columns = [table.reshape(10, 10) for table in (sliced, resampled)]
_ = grid_of(columns, ["first rows", "resampled"], across=2, size=2.4)

# %% [markdown]
# ## Hybrids: patches of a feature map
#
# Patches can also be cut from a feature map instead of from pixels. Any network that returns one
# map `(B, c, h, w)` can come first. `patch_size` is still in pixels of the image. A patch must
# cover a whole number of cells of the map; otherwise there is an error.

# %%
cnn = nn.Sequential(
    nn.Conv2d(3, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=4, padding=1),
)
spec = tiny.spec.replace(stem="backbone")
hybrid = vitkit.ViT(spec, backbone=cnn)
print(
    "map", tuple(cnn(images).shape), "tokens", tuple(hybrid.patch_embed(images).shape)
)
print_error(lambda: vitkit.ViT(spec.replace(patch_size=14), backbone=cnn))

# %% [markdown]
# The best-known hybrid, R50+ViT-B/16, has a ResNet whose cells cover 16 x 16 pixels. Notebook D
# gives a grid of 14 x 14 and makes patches of as many cells as fit. But it counts one position for
# every cell. And at 160 pixels the map has fewer cells than the grid.

# %%
for pixels in (448, 160):
    cells = pixels // 16
    kernel = cells // 14
    patches = (cells // kernel) ** 2 if kernel else 0
    print(
        f"{pixels} px, notebook D: kernel {kernel}, {cells**2} positions for {patches} patches"
    )
for pixels, patch in ((448, 32), (160, 16)):
    with torch.device("meta"):
        hybrid = vitkit.create_model(
            "vit_base_r50_s16_224", image_size=pixels, patch_size=patch
        )
        patches = hybrid.patch_embed(torch.empty(1, 3, pixels, pixels)).shape[1]
    kernel, positions = (
        hybrid.patch_embed.proj.kernel_size[0],
        hybrid.pos_embed.shape[1] - 1,
    )
    print(
        f"{pixels} px, vitkit: kernel {kernel}, {positions} positions for {patches} patches"
    )

# %% [markdown]
# ## Exercises
#
# **1.** Write the number of parameters of a ViT as a formula of the patch size P, the channels C,
# the width D, the depth L, the MLP width M, the classes K and the number of patches N. Check it on
# three presets.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def parameters(P: int, C: int, D: int, L: int, M: int, K: int, N: int) -> int:
    embedding = (P * P * C + 1) * D + D + (N + 1) * D  # patches, class token, positions
    block = (D + 1) * 3 * D + (D + 1) * D + (D + 1) * M + (M + 1) * D + 4 * D
    return embedding + L * block + 2 * D + (D + 1) * K


for name in ("Ti/16", "B/32", "H/14"):
    s = models[name].spec
    by_formula = parameters(
        s.patch_size[0], 3, s.width, s.depth, s.mlp_width, 1000, s.num_patches
    )
    assert by_formula == count(models[name])

# %% [markdown]
# **2.** B/16 cuts the image into four times as many patches as B/32. How do multiply-adds and
# parameters change?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
fine, coarse = (vitkit.summary(models[name]) for name in ("B/16", "B/32"))
assert 3.9 < fine.mult_adds / coarse.mult_adds < 4, (
    "197 tokens instead of 50; the patch embedding costs the same"
)
patch_matrix, positions = (32**2 - 16**2) * 3 * 768, (196 - 49) * 768
assert coarse.parameters - fine.parameters == patch_matrix - positions

# %% [markdown]
# **3.** `int(D * (M / D))` looks equal to $M$. Combine every width of the models Ti to e
# with every MLP width among them. For which pairs is the result wrong?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
widths = (192, 384, 768, 1024, 1280, 1408, 1664, 1792)  # Ti, S, B, L, H, g, G and e
mlp_widths = (768, 1536, 3072, 4096, 5120, 6144, 8192, 15360)
wrong = [(D, M) for D in widths for M in mlp_widths if int(D * (M / D)) != M]
assert wrong == [(1408, 15360), (1664, 15360)], "no published model has such a pair"
print(*[f"D {D}: {int(D * (M / D))} instead of {M}" for D, M in wrong], sep="\n")

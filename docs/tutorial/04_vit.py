# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 4. The Vision Transformer, Eq. 4
#
# After the last block one token answers for the whole image:
#
# $$ y = \operatorname{LN}(z_L^0) \tag{4} $$
#
# and a linear head makes a score for each class from it. With that the model is whole:
# `vitkit.ViT`, made from a `ViTSpec`. Eq. 4 is `ViT.norm` and then `Readout`.

# %%
import torch
from drawing import grid_of
from matplotlib import pyplot as plt
from rich.console import Console
from torch import nn

import vitkit
from vitkit.models.positions import resample_positions

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# %% [markdown]
# ## Sizes
#
# Every published size is a name. The number after the slash is the patch: smaller patches are more
# tokens, with the same weights in the blocks. On the "meta" device a model has shapes and no
# numbers, so that even the largest is there at once.

# %%
sizes = {
    "Ti/16": "tiny_patch16", "S/16": "small_patch16", "B/32": "base_patch32",
    "B/16": "base_patch16", "L/32": "large_patch32", "L/16": "large_patch16",
    "H/14": "huge_patch14",
}  # fmt: skip
with torch.device("meta"):
    models = {name: vitkit.create_model(f"vit_{size}_224") for name, size in sizes.items()}
print("model   width  blocks  heads   MLP  tokens  parameters")
for name, model in models.items():
    s = model.spec
    print(f"{name:<6}{s.width:>7}{s.depth:>8}{s.num_heads:>7}{s.mlp_width:>6}"
          f"{s.num_patches + 1:>8}{count(model) / 1e6:>10.1f} M")  # fmt: skip

# %% [markdown]
# Table 1 of the paper says 86M, 307M and 632M for Base, Large and Huge. 307M is what L/32 has: L/16
# has fewer parameters, as its patch matrix is smaller, and its larger number of positions does not
# make up for it.
#
# Some notebooks leave out the bias of the qkv projection. Others norm the patches before and after
# the matrix. All are words of a spec; so are the small model for CIFAR, which has 8 heads where its
# notebook writes 6, and the example that `vit-pytorch` is known by.

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
# The layer table counts fused attention as the two products it is, and a linear layer once for each
# token. Here is that of B/16, without what lies inside its blocks. The list of the blocks is not called
# itself, so its row has no multiply-adds; `Identity` stands where this spec leaves something out, and
# `attn_pool` is the readout of Eq. 4.

# %%
table = vitkit.summary(models["B/16"])
Console(width=110, color_system=None).print(table.render(depth=1))

# %% [markdown]
# Nearly all of it is in the blocks:

# %%
blocks = [row.mult_adds for row in table.rows if row.kind == "EncoderBlock"]
for row in table.rows:
    if row.name in ("patch_embed", "head"):
        print(f"{row.name:<12}{row.mult_adds / 1e6:>9,.1f} M")
print(f"{len(blocks)} blocks   {sum(blocks) / 1e6:>9,.1f} M")
print(f"multiply-adds {table.mult_adds / 1e6:,.0f} M, parameters {table.parameter_mb:.2f} MB")

# %% [markdown]
# A widespread tool printed a hundredth of that in one notebook. Its numbers can be found again: it
# took each linear layer's weights once, not once for each token, and did not see into torch's
# attention at all.

# %%
mlp = sum(row.parameters for row in table.rows if row.name.endswith(".mlp"))
norms = sum(row.parameters for row in table.rows if row.kind == "LayerNorm")
patch, head = 768 * (16 * 16 * 3 + 1), 1000 * (768 + 1)
print(f"multiply-adds {(196 * patch + mlp + norms + head) / 1e6:.2f} M")
print(f"parameters    {(patch + mlp + norms + head) * 4 / 1e6:.0f} MB")

# %% mystnb={"figure": {"caption": "Which part of a block's multiply-adds are the products of attention, by the side of the image, for ViT-B/16. At 224 pixels they are a few hundredths. They grow with the square of the tokens, all else with the tokens; at 1,024 pixels they are nearly half."}}
sides, shares = [224, 384, 512, 768, 1024], []
for side in sides:
    T, D, M = (side // 16) ** 2 + 1, 768, 3072
    products, layers = 2 * T * T * D, T * D * (4 * D + 2 * M)
    shares.append(products / (products + layers))
figure, place = plt.subplots(figsize=(5, 2.4))
bars = place.bar([str(side) for side in sides], shares, color="#4c72b0")
place.bar_label(bars, [f"{share:.0%}" for share in shares])
_ = place.set(xlabel="side in pixels", ylabel="share", ylim=(0, 0.55))

# %% [markdown]
# ## In and out
#
# `forward` gives logits, always, so that it fits every training loop. Who wants more asks for the
# features: every token after the last norm, taken apart. The head reads from them without a second
# pass. Shapes of ViT-L/16 for 32 images:

# %%
with torch.device("meta"):
    features = models["L/16"].forward_features(torch.empty(32, 3, 224, 224))
    logits = models["L/16"].forward_head(features)
print("class token", tuple(features.cls.shape))
print("patches    ", tuple(features.patches.shape))
print("logits     ", tuple(logits.shape))

# %% [markdown]
# **Logits, not probabilities.** Cross-entropy takes the softmax itself. A model that ends with one
# gets a second one, and then even a certain and right answer has a loss. With 10 classes:

# %%
certain = nn.functional.one_hot(torch.arange(10), 10).float()  # probabilities: all right
print(f"the lowest loss there is: {nn.functional.cross_entropy(certain, torch.arange(10)):.3f}")

# %% [markdown]
# **Class token or mean.** Eq. 4 reads the class token. The mean of the patches is the other usual
# choice. It is a word of the spec, and the same features answer for both.

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
# A ViT takes any size that its patch divides; the blocks do not care how many tokens there are. The
# learned positions do. They are resampled, as an image would be. One notebook takes the first rows
# of the table instead, `pos_embed[:, :N + 1]`, which runs, and gives most patches the place of
# another.

# %% mystnb={"figure": {"caption": "A model for 14 x 14 patches sees an image of 10 x 10. Colours are the column that each patch is told it stands in. Left: the first rows of the table. After ten patches a new row begins in the image, but not in the table, so columns slip by four. Right: resampled, columns stay columns."}}
column = torch.arange(14.0).repeat(14)[None, :, None]  # a table (1, 196, 1) of nothing but columns
sliced, resampled = column[:, :100], resample_positions(column, (14, 14), (10, 10))
told = [places.reshape(10, 10) for places in (sliced, resampled)]
_ = grid_of(told, ["first rows", "resampled"], across=2, size=2.4)

# %% [markdown]
# ## Hybrids: patches of a feature map
#
# The patches need not be cut from pixels. Any network that gives one map `(B, c, h, w)` can come
# before them. `patch_size` stays in pixels of the image, and a patch that is no whole number of
# the map's cells is refused.

# %%
cnn = nn.Sequential(
    nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=4, padding=1)
)
spec = tiny.spec.replace(stem="backbone")
hybrid = vitkit.ViT(spec, backbone=cnn)
print("map", tuple(cnn(images).shape), "tokens", tuple(hybrid.patch_embed(images).shape))
try:
    vitkit.ViT(spec.replace(patch_size=14), backbone=cnn)
except vitkit.VitkitError as error:
    print(error)

# %% [markdown]
# The hybrid whose weights are used most, R50+ViT-B/16, has a ResNet whose cells are 16 pixels. The code behind one of the pages
# is told a grid of 14 x 14 and makes patches of as many cells as fit. But it counts a position for
# every cell; and at 160 pixels there are fewer cells than the grid has places.

# %%
for pixels in (448, 160):
    cells = pixels // 16
    kernel = cells // 14
    made = (cells // kernel) ** 2 if kernel else 0
    print(f"{pixels} px: a kernel of {kernel}, {cells**2} positions for {made} patches")
for pixels, patch in ((448, 32), (160, 16)):
    with torch.device("meta"):
        hybrid = vitkit.create_model("vit_base_r50_s16_224", image_size=pixels, patch_size=patch)
        made = hybrid.patch_embed(torch.empty(1, 3, pixels, pixels)).shape[1]
    kernel, positions = hybrid.patch_embed.proj.kernel_size[0], hybrid.pos_embed.shape[1] - 1
    print(f"{pixels} px here: a kernel of {kernel}, {positions} positions for {made} patches")

# %% [markdown]
# ## Exercises
#
# **1.** Write the number of parameters of a ViT as a formula of P, C, D, L, M, K and N, and check
# it on three presets.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def parameters(P: int, C: int, D: int, L: int, M: int, K: int, N: int) -> int:
    embedding = (P * P * C + 1) * D + D + (N + 1) * D  # patches, class token, positions
    block = (D + 1) * 3 * D + (D + 1) * D + (D + 1) * M + (M + 1) * D + 4 * D
    return embedding + L * block + 2 * D + (D + 1) * K


for name in ("Ti/16", "B/32", "H/14"):
    s = models[name].spec
    by_formula = parameters(s.patch_size[0], 3, s.width, s.depth, s.mlp_width, 1000, s.num_patches)
    assert by_formula == count(models[name])

# %% [markdown]
# **2.** B/16 cuts the image into four times as many patches as B/32. How do multiply-adds and
# parameters change?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
fine, coarse = (vitkit.summary(models[name]) for name in ("B/16", "B/32"))
assert 3.9 < fine.mult_adds / coarse.mult_adds < 4, "197 tokens for 50; the stem costs the same"
patch_matrix, positions = (32**2 - 16**2) * 3 * 768, (196 - 49) * 768
assert coarse.parameters - fine.parameters == patch_matrix - positions

# %% [markdown]
# **3.** `int(D * (M / D))` looks like $M$. Pair the widths of Ti to e with each width of an MLP among
# them: where is it wrong?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
widths = (192, 384, 768, 1024, 1280, 1408, 1664, 1792)  # Ti, S, B, L, H, g, G and e
mlp_widths = (768, 1536, 3072, 4096, 5120, 6144, 8192, 15360)
wrong = [(D, M) for D in widths for M in mlp_widths if int(D * (M / D)) != M]
assert wrong == [(1408, 15360), (1664, 15360)], "no model's own pair, by luck"
print(*[f"D {D}: {int(D * (M / D))} for {M}" for D, M in wrong], sep="\n")

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 4. The Vision Transformer, Eq. 4
#
# After the last block, the class token represents the whole image, and a linear layer computes one
# number for each class from it: the logits. This completes the model. The chapter follows an image
# through all of it, and then looks at sizes, costs, inputs and outputs.
#
# $$ y = \operatorname{LN}(z_L^0) \tag{4} $$
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** how Eq. 1 to 4 become one model, how large and how expensive the published models
#   are beside CNNs, and what to do with images of another size.
# - **You need** chapters [1](01_patches.py), [2](02_attention.py) and [3](03_encoder.py).
# - **Reading** about 20 minutes
# :::
#
# ## The lines of the model
#
# [Chapter 0](00_one_page.py) gives the ViT in seven steps, and trains it. This is its class, with all
# four equations:
#
# ```{literalinclude} plain_vit.py
# :pyobject: PlainViT
# ```

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports"}
import torch
from drawing import count, grid_of, print_table
from matplotlib import pyplot as plt
from print_error import print_error
from skimage import data
from torch import nn

import vitkit
from vitkit.data.sources.open import open_dataset
from vitkit.models.embedding import resample_positions

_ = torch.manual_seed(0)

# %% [markdown]
# ## The forward pass, step by step
#
# `vitkit.ViT()` without arguments is ViT-B/16 for images of 224 x 224 pixels and 1,000 classes, with
# random weights. Follow the photograph of [chapter 1](01_patches.py) through it:

# %%
model = vitkit.ViT().eval()
photograph = torch.from_numpy(data.astronaut()[:448, :448]).permute(2, 0, 1) / 255
image = nn.functional.interpolate(photograph[None], size=224, mode="area")
image = 2 * image - 1  # from [0, 1] to [-1, 1], as the model's images are normalised
with torch.no_grad():
    print("1. the image              ", tuple(image.shape))
    x_p = model.patch_embed(image)
    print("2. cut and embed: x_p E   ", tuple(x_p.shape))
    z = torch.cat([model.cls_token.expand(len(x_p), -1, -1), x_p], dim=1)
    print("3. prepend the class token", tuple(z.shape))
    z = z + model.pos_embed
    print("4. add positions: z_0     ", tuple(z.shape))
    for block in model.blocks:
        z = block(z)
    print("5. twelve blocks: z_12    ", tuple(z.shape))
    y = model.norm(z)[:, 0]
    print("6. norm, first token: y   ", tuple(y.shape))
    logits = model.head(y)
    print("7. the head: logits       ", tuple(logits.shape))
    print("y equals the library's:", torch.equal(y, model.forward_features(image).cls))
    assert torch.equal(logits, model(image))
print(f"{count(model):,} parameters, largest logit {logits.abs().max():.0f}")

# %% [markdown]
# All logits are 0, because the head of a new model starts at zero: before any training, no class is
# more likely than another. In the library the same steps are three methods. `embed` is Eq. 1,
# `forward_features` adds the blocks and the last norm, and `forward` adds the head. (`context` and
# `record` carry rotary positions and recorded attention weights; here they are empty.)
#
# ```{literalinclude} ../../src/vitkit/models/vit.py
# :pyobject: ViT.embed
# :dedent: 4
# ```
#
# ```{literalinclude} ../../src/vitkit/models/vit.py
# :pyobject: ViT.forward_features
# :dedent: 4
# ```
#
# ```{literalinclude} ../../src/vitkit/models/vit.py
# :pyobject: ViT.forward
# :dedent: 4
# ```
#
# [How the library is built](../architecture.md) has a table of all modules on this way.

# %% [markdown]
# ## Sizes
#
# Every published size has a name. The number after the slash is the patch size. Smaller patches
# give more tokens, but the weights of the blocks are the same. `vitkit.create_model` takes the names
# of timm. It knows or answers the names of the notebooks, too: `ViT-B/16`, `vit_b16`, or `dim=` for
# `width=` ([all names](../guides/names.md)). On torch's "meta" device a model has shapes but no
# values, so even the largest model is created at once.

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
# L/16 has fewer: its smaller patch matrix saves more than its longer position table adds.
#
# ### CNNs beside them
#
# How large are the CNNs that the ViT was compared with? A ResNet ([arXiv
# 1512.03385](https://arxiv.org/abs/1512.03385)) can be counted in a few lines: a 7 x 7 convolution,
# then four groups of blocks. A block has three convolutions (1 x 1, 3 x 3, 1 x 1), and the output of
# a group is twice as wide as that of the group before. BiT ([arXiv
# 1912.11370](https://arxiv.org/abs/1912.11370)), the strongest CNN in the paper's comparison, is a
# ResNet-152 with four times the width, and with its norms before the convolutions.


# %%
def resnet(groups: tuple[int, ...], *, wider: int = 1, classes: int, bit: bool = False):
    """Count the parameters of a ResNet with this number of blocks in each group."""
    maps = 64 * wider
    total = 7 * 7 * 3 * maps + (0 if bit else 2 * maps)  # convolution, norm
    for group, blocks in enumerate(groups):
        inner = 64 * wider * 2**group
        for block in range(blocks):
            total += maps * inner + 9 * inner * inner + inner * 4 * inner
            total += 2 * (maps if bit else 4 * inner) + 4 * inner  # three norms
            if block == 0:  # the width changes: the residual connection needs a matrix
                total += maps * 4 * inner + (0 if bit else 8 * inner)
            maps = 4 * inner
    return total + (2 * maps if bit else 0) + (classes and (maps + 1) * classes)


cnns = {
    "ResNet-50 without head": resnet((3, 4, 6, 3), classes=0),
    "ResNet-50": resnet((3, 4, 6, 3), classes=1000),
    "ResNet-152": resnet((3, 8, 36, 3), classes=1000),
    "BiT R152x4": resnet((3, 8, 36, 3), wider=4, classes=1000, bit=True),
}
beside = cnns | {
    f"ViT-{name}": count(models[name]) for name in ("B/16", "L/16", "H/14")
}
for name, number in beside.items():
    print(f"{name:<23}{number:>12,}")

# %% mystnb={"figure": {"caption": "Parameters of ResNets (orange) and ViTs (blue) for 1,000 classes, in millions. ViT-B/16 is more than three times as large as ResNet-50. The largest ViT of the paper has two thirds of the parameters of the CNN that it was compared with."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
shown = {name: number for name, number in beside.items() if "without" not in name}
figure, ax = plt.subplots(figsize=(6, 2.2))
colours = ["#4c72b0" if name.startswith("ViT") else "#dd8452" for name in shown]
bars = ax.barh(list(shown), [number / 1e6 for number in shown.values()], color=colours)
ax.bar_label(bars, fmt="%.1f M", padding=3, fontsize=8)
ax.set(xlim=(0, 1080), xlabel="million parameters")
ax.invert_yaxis()
figure.tight_layout()

# %% [markdown]
# [Notebook B, "Attention in vision"](coverage.md#b-attention-in-vision-cifar-10-ignite), gives 23M for
# ResNet-50, which is the number without its head, beside numbers with heads. Its 936M for BiT R152x4
# is right.
#
# ### Other models of this kind
#
# Notebook B and `vit-pytorch` leave out the bias of the qkv projection. [Notebook C, "From scratch with
# einops"](coverage.md#c-from-scratch-with-einops), normalises the patches before and after the patch
# matrix. All of this can be set in the spec. So can notebook B's small model for CIFAR (it has 8
# heads, although the notebook writes 6) and the best-known example of `vit-pytorch`.

# %%
create = vitkit.create_model
normed = {"stem": "normed_linear", "norm_eps": 1e-5}
with torch.device("meta"):
    others = {
        "B/16": models["B/16"],
        "B/16 without qkv bias": create("vit_base_patch16_224", qkv_bias=False),
        "L/16 with normed patches": create("vit_large_patch16_224", **normed),
        "CIFAR, 32 px, patch 4": create("vit_cifar_patch4_32", num_classes=10),
        "vit-pytorch's example": create(
            "vit_base_patch16_224", image_size=256, patch_size=32, width=1024, depth=6,
            num_heads=16, mlp_width=2048, qkv_bias=False, **normed,
        ),
    }  # fmt: skip
for name, model in others.items():
    print(f"{name:<25}{count(model):>12,}")
with torch.device("meta"):  # shapes alone, no numbers
    logits = others["vit-pytorch's example"](torch.rand(1, 3, 256, 256))
print("(1, 3, 256, 256) ->", tuple(logits.shape))

# %% [markdown]
# ## What it costs
#
# `vitkit.summary` prints a layer table, so torchinfo is not needed. It counts fused attention as
# its two matrix products, and a linear layer once per token. Here is the table of B/16, without the
# modules inside its blocks. The row `blocks` has no multiply-adds, because this list of blocks is
# never called itself. `attn_pool` is the readout of Eq. 4.

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
    f"multiply-adds {table.mult_adds / 1e6:,.0f} M, "
    f"parameters {table.parameter_mb:.2f} MB"
)

# %% [markdown]
# The tool in [notebook A, "Replicating the
# paper"](coverage.md#a-replicating-the-paper-equation-by-equation), printed one hundredth of that.
# Its numbers can be reproduced: it counted each linear layer once instead of once per token, and it
# did not count torch's attention at all.

# %%
mlp = sum(row.parameters for row in table.rows if row.name.endswith(".mlp"))
norms = sum(row.parameters for row in table.rows if row.kind == "LayerNorm")
patch, head = 768 * (16 * 16 * 3 + 1), 1000 * (768 + 1)
print(f"multiply-adds {(196 * patch + mlp + norms + head) / 1e6:.2f} M")
print(f"parameters    {(patch + mlp + norms + head) * 4 / 1e6:.0f} MB")

# %% mystnb={"figure": {"caption": "The share of the attention products in a block's multiply-adds, by image size, for ViT-B/16. At 224 pixels it is 4 %. The products grow with the square of the number of tokens, everything else grows linearly; at 1,024 pixels they are nearly half."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
sides, shares = [224, 384, 512, 768, 1024], []
for side in sides:
    T, D, D_mlp = (side // 16) ** 2 + 1, 768, 3072
    products, layers = 2 * T * T * D, T * D * (4 * D + 2 * D_mlp)
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
classes = torch.arange(10)
certain = nn.functional.one_hot(classes).float()  # probabilities, all correct
print(f"lowest possible loss: {nn.functional.cross_entropy(certain, classes):.3f}")

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
# The simplest case is a patch of 1 x 1 cells. Then nothing is cut any more: the patches are the cells
# of the map. Flatten the map, and multiply each cell by a matrix. Here a cell covers 8 x 8 pixels:

# %%
hybrid = vitkit.ViT(spec.replace(patch_size=8), backbone=cnn)
cells = cnn(images).flatten(2).transpose(1, 2)  # (B, N, c): a token for each cell
matrix, bias = hybrid.patch_embed.proj.weight.flatten(1).T, hybrid.patch_embed.proj.bias
flattened = cells @ matrix + bias
print("cells", tuple(cells.shape), "matrix", tuple(matrix.shape))
difference = (flattened - hybrid.patch_embed(images)).abs().max()
print(f"differs from the hybrid by {difference:.0e}")

# %% [markdown]
# The best-known hybrid, R50+ViT-B/16, is of this kind. Its ResNet has cells of 16 x 16 pixels.
# [Notebook D, "Block by block"](coverage.md#d-block-by-block), gives a grid of 14 x 14 and makes
# patches of as many cells as fit. But it counts one position for every cell. And at 160 pixels the
# map has fewer cells than the grid.

# %%
for pixels in (448, 160):
    cells = pixels // 16
    kernel = cells // 14
    patches = (cells // kernel) ** 2 if kernel else 0
    print(f"{pixels} px, notebook D: kernel {kernel},", end=" ")
    print(f"{cells**2} positions for {patches} patches")
for pixels, patch in ((448, 32), (160, 16)):
    with torch.device("meta"):
        hybrid = vitkit.create_model(
            "vit_base_r50_s16_224", image_size=pixels, patch_size=patch
        )
        patches = hybrid.patch_embed(torch.empty(1, 3, pixels, pixels)).shape[1]
    kernel = hybrid.patch_embed.proj.kernel_size[0]
    positions = hybrid.pos_embed.shape[1] - 1
    print(f"{pixels} px, vitkit: kernel {kernel},", end=" ")
    print(f"{positions} positions for {patches} patches")

# %% [markdown]
# ## What you know now
#
# - A ViT is Eq. 1, then $L$ blocks, then a norm, the class token, and a linear head.
# - Its output is logits, one for each class; the softmax belongs to the loss.
# - Patches of half the side give four times as many tokens, at nearly four times the cost, with nearly
#   the same parameters.
# - ViT-B/16 has 86.6 million parameters, ResNet-50 has 25.6 million.
# - Only the positions depend on the image size, and they can be resampled.
#
# ## Exercises
#
# **1. Build.** Write a function that gives the number of parameters of a ViT from the patch side $P$,
# the channels $C$, the width $D$, the depth $L$, the hidden width $D_\text{mlp}$, the number of
# classes and the number of patches $N$. Check it on three presets. (Hint: one term for Eq. 1, $L$
# times a term for a block, one for Eq. 4 and the head.)


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def parameters(P: int, C: int, D: int, L: int, D_mlp: int, classes: int, N: int) -> int:
    embedding = (P * P * C + 1) * D + D + (N + 1) * D  # patches, class token, positions
    mlp = (D + 1) * D_mlp + (D_mlp + 1) * D
    block = (D + 1) * 3 * D + (D + 1) * D + mlp + 4 * D
    return embedding + L * block + 2 * D + (D + 1) * classes


for name in ("Ti/16", "B/32", "H/14"):
    s = models[name].spec
    by_formula = parameters(
        s.patch_size[0], 3, s.width, s.depth, s.mlp_width, 1000, s.num_patches
    )
    assert by_formula == count(models[name])

# %% [markdown]
# **2. Predict, then run.** B/16 cuts the image into four times as many patches as B/32. How do
# multiply-adds and parameters change?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
fine, coarse = (vitkit.summary(models[name]) for name in ("B/16", "B/32"))
assert 3.9 < fine.mult_adds / coarse.mult_adds < 4, (
    "197 tokens instead of 50; the patch embedding costs the same"
)
patch_matrix, positions = (32**2 - 16**2) * 3 * 768, (196 - 49) * 768
assert coarse.parameters - fine.parameters == patch_matrix - positions

# %% [markdown]
# **3. Show.** Some code stores the hidden width of the MLP as a ratio and computes
# `int(D * (D_mlp / D))`. This looks equal to $D_\text{mlp}$. Combine every width of the models Ti to e
# with every hidden width among them, and show for which pairs the result is wrong.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
widths = (192, 384, 768, 1024, 1280, 1408, 1664, 1792)  # Ti, S, B, L, H, g, G and e
mlp_widths = (768, 1536, 3072, 4096, 5120, 6144, 8192, 15360)
pairs = [(D, D_mlp) for D in widths for D_mlp in mlp_widths]
wrong = [(D, D_mlp) for D, D_mlp in pairs if int(D * (D_mlp / D)) != D_mlp]
assert wrong == [(1408, 15360), (1664, 15360)], "no published model has such a pair"
for D, D_mlp in wrong:
    print(f"D {D}: {int(D * (D_mlp / D))} instead of {D_mlp}")

# %% [markdown]
# **4. Train.** Is the class token necessary? Train one small model on the digits that reads its class
# token, and one without a class token that reads the mean of the patches. (Hint:
# `pooling="mean", class_token=False`.)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
splits = open_dataset("digits").splits
digits, labels = {}, {}
for part in ("train", "test"):
    digits[part] = torch.from_numpy(splits[part].images).permute(0, 3, 1, 2) / 127.5 - 1
    labels[part] = torch.from_numpy(splits[part].labels)
small = vitkit.ViTSpec(
    image_size=8, patch_size=2, in_channels=1, width=48, depth=2, num_heads=3,
    mlp_width=96, num_classes=10,
)  # fmt: skip
top1 = {}
for pooling in ("cls", "mean"):
    torch.manual_seed(0)
    model = vitkit.ViT(small.replace(pooling=pooling, class_token=pooling == "cls"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        batch = torch.randint(len(labels["train"]), (64,))
        loss = nn.functional.cross_entropy(
            model(digits["train"][batch]), labels["train"][batch]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        guesses = model.eval()(digits["test"]).argmax(dim=1)
    top1[pooling] = float((guesses == labels["test"]).float().mean())
    print(f"{pooling:<5}{top1[pooling]:.1%} of the test digits")
assert min(top1.values()) > 0.7, "both learn"

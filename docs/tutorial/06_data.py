# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 6. Data: a ViT and a CNN with few images and with more
#
# A convolution is built on two assumptions about images: neighbouring pixels belong together, and
# an object is the same object at every position. The ViT paper calls them inductive biases (its
# Sec. 3.1). A ViT has them only in the patch embedding, where a patch keeps its pixels together and
# all patches share one matrix, and in the layers that process each token separately. How tokens
# relate to each other must be learned from images. This chapter shows what the paper found with up
# to 300 million images, and measures what can be measured on two processor cores.
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** what the assumptions of a CNN are worth, how the paper's result depends on the number
#   of images, how images without labels help, and what positions are worth.
# - **You need** [chapter 4](04_vit.py), and the training loop of [chapter 5](05_training.py).
# - **Reading** about 20 minutes
# :::
#
# ## The lines of the model
#
# Where are the assumptions in the model of [chapter 0](00_one_page.py)? Here is the only place that
# knows which pixels are neighbours:
#
# ```{literalinclude} plain_vit.py
# :pyobject: PatchEmbedding
# ```
#
# Everything after it would be the same if the patches came in another order, but for `pos_embed`, whose
# values are learned.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports"}
from itertools import pairwise
from statistics import mean

import torch
from drawing import band, count, grid_of
from einops import rearrange
from masked_images import MaskedImages, pretrain
from matplotlib import pyplot as plt
from measured import measured, with_spread
from skimage import data
from small_cnn import SmallCNN
from torch import nn

import vitkit
from vitkit.data.sources.open import open_dataset
from vitkit.models.embedding import patchify
from vitkit.training.recipes import recipe_settings

_ = torch.manual_seed(0)

# %% [markdown]
# ## What the paper found
#
# The paper pre-trains its models on three data sets: ImageNet (1.3 million images), ImageNet-21k (14
# million) and JFT-300M (303 million, not public). Then it fine-tunes each model on ImageNet. Its
# appendix prints the accuracies (Table 5; the paper draws them in Figure 3):

# %%
PAPER = {  # top-1 accuracy on ImageNet in per cent, arXiv 2010.11929, Table 5
    "ViT-B/32": (73.38, 81.28, 80.73),
    "ViT-B/16": (77.91, 83.97, 84.15),
    "ViT-L/32": (71.16, 80.99, 84.37),
    "ViT-L/16": (76.53, 85.15, 87.12),
    "ViT-H/14": (None, 85.13, 88.04),  # not pre-trained on ImageNet alone
}
IMAGES = {"ImageNet": 1.3e6, "ImageNet-21k": 14e6, "JFT-300M": 303e6}
RESNETS_JFT = {
    "ResNet50x1": 77.54,
    "ResNet152x2": 85.56,
    "ResNet200x3": 87.22,
}  # Table 6
BIT_JFT = 87.54  # BiT-L, ResNet152x4, Table 2
print("pre-trained on  " + "".join(f"{name:>14}" for name in IMAGES))
for name, scores in PAPER.items():
    print(f"{name:<16}" + "".join(f"{score or '-':>14}" for score in scores))

# %% mystnb={"figure": {"caption": "ImageNet accuracy after fine-tuning, by the number of images for pre-training (logarithmic axis): the paper's own numbers. Pre-trained on 1.3 million images, the large models (blue, L) are worse than the base models (green, B) with the same patches. With 303 million images the larger models are the better ones, level with the best CNNs (grey crosses: ResNets and BiT, pre-trained on JFT). B/32 gains nothing from the last step."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(6.2, 3.4))
colours = {"B": "#55a868", "L": "#4c72b0", "H": "#c44e52"}
for name, scores in PAPER.items():
    known = [(n, y) for n, y in zip(IMAGES.values(), scores, strict=True) if y]
    style = "--" if name.endswith("32") else "-"
    ax.plot(*zip(*known, strict=True), style, marker="o", label=name,
            color=colours[name[4]], markersize=4)  # fmt: skip
cnns = RESNETS_JFT | {"BiT-L": BIT_JFT}
ax.plot([IMAGES["JFT-300M"] * 1.15] * len(cnns), list(cnns.values()), "x", color="0.4")
heights = {"ResNet50x1": 77.54, "ResNet152x2": 85.3, "ResNet200x3": 86.6, "BiT-L": 87.9}
for name, height in heights.items():
    ax.text(
        IMAGES["JFT-300M"] * 1.3, height, name, fontsize=7, va="center", color="0.3"
    )
ax.set(xscale="log", xlim=(1e6, 1.2e9), ylabel="ImageNet top-1 in %")
ax.set_xticks([], minor=True)
ax.set_xticks(
    list(IMAGES.values()), [f"{name}\n{n / 1e6:g} M" for name, n in IMAGES.items()]
)
ax.legend(fontsize=7, loc="lower right", bbox_to_anchor=(0.8, 0))
figure.tight_layout()

# %% [markdown]
# So it is the large ViTs that need many images: from ImageNet to JFT, ViT-L/32 gains 13.2 points and
# ViT-B/32 gains 7.4. The paper's Figure 3 also shows BiT, a family of ResNets. The large ViTs are
# behind BiT after ImageNet and ahead after JFT. BiT's numbers for the two smaller data sets are not
# printed in the paper, so they are not drawn here. With other settings (larger images, and averaged
# weights), ViT-H/14 reached 88.55 % (Table 2), beside 87.54 % for BiT-L and 88.4 % for Noisy Student,
# a large EfficientNet.
#
# The models of this chapter are hundreds of times smaller, and so are the numbers of images. Do not
# expect the same curves.

# %% [markdown]
# ## Two networks of the same size
#
# The ViT is that of the recipe `fashion-mnist`: 16 patches of 7 x 7, width 96, three blocks. The
# CNN has four 3 x 3 convolutions from `torch.nn`, each with a BatchNorm, and takes the mean of the
# last feature map.

# %%
recipe = recipe_settings("fashion-mnist")
vit = vitkit.create_model(recipe["model"], num_classes=10, **recipe["spec"]).eval()
cnn = SmallCNN().eval()
for name, network in (("ViT", vit), ("CNN", cnn)):
    table = vitkit.summary(network, input_size=(1, 1, 28, 28))
    print(f"{name}: {count(network):,} parameters,", end=" ")
    print(f"{table.mult_adds:,} multiply-adds per image")

# %% [markdown]
# The CNN needs more arithmetic, because it applies its weights at more positions: 49 to 196, where
# the ViT has 16. The next lines show the effect of its two assumptions in numbers. One layer maps
# 28 x 28 pixels to 32 feature maps of 14 x 14. They compare a dense matrix, which makes neither
# assumption, with the convolution kernel.

# %%
kernel = cnn.maps[0].weight
print(f"dense matrix {28 * 28 * 32 * 14 * 14:,} parameters, kernel {kernel.numel()}")

# %% [markdown]
# ## Translation
#
# If an image moves by one pixel, the feature maps of a convolution move by one pixel and do not
# change otherwise. For patch tokens this is true only if the image moves by whole patches. For
# every other shift, each patch contains other pixels, and every token changes. The model must learn
# that both images mean the same. Random shifts during training help it to do so.

# %%
photograph = (
    torch.from_numpy(data.camera()[100:212, 180:292]).float()[None, None] / 255 - 0.5
)
kernel = nn.Conv2d(1, 32, 3, padding=1, padding_mode="circular", bias=False)
embedding = vitkit.PatchEmbedding(in_channels=1, patch_size=7, width=96)


def tokens_of(image: torch.Tensor) -> torch.Tensor:
    return embedding(image).unflatten(1, (16, 16)).permute(0, 3, 1, 2)


def change(layer, shift: int, cell: int) -> float:
    """Return the relative change of the output, where a position is `cell` pixels."""
    shifted = layer(photograph.roll(shift, dims=-1)).roll(-round(shift / cell), dims=-1)
    return float((shifted - layer(photograph)).norm() / layer(photograph).norm())


# %% mystnb={"figure": {"caption": "A photograph is shifted by some pixels, and the output of a layer is shifted back. The feature maps of a convolution are then unchanged, for every shift. Tokens of 7 x 7 patches are unchanged only at 0, 7 and 14 pixels; halfway between, the change is about half as large as the tokens themselves."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
shifts = range(15)
with torch.no_grad():
    figure, ax = plt.subplots(figsize=(5.4, 2.6))
    ax.plot(
        shifts, [change(kernel, s, 1) for s in shifts], "o-", label="3 x 3 convolution"
    )
    ax.plot(
        shifts, [change(tokens_of, s, 7) for s in shifts], "o-", label="7 x 7 patches"
    )
ax.set(xlabel="shift in pixels", ylabel="relative change", ylim=(-0.05, 0.9))
_ = ax.legend()

# %% [markdown]
# ## Accuracy by the number of images
#
# Both networks are trained by the same loop: AdamW, a batch size of 100, flips, shifts of one
# pixel, label smoothing, warm-up and cosine schedule. The number of steps is always the same, so
# with 300 images each image is seen a hundred times as often as with 30,000. The learning rate of
# each network is the best of three, chosen with another seed on other held-out images. Each seed
# uses different training images. The test split is not used.

# %%
sizes = measured("data-size")
for network, number in sizes["parameters"].items():
    print(f"{network}: {number:,} parameters, rate {sizes['rates'][network]:g} of",
          ", ".join(f"{row['lr']:g} ({row['top1']:.1%})"
                    for row in sizes["tried"] if row["network"] == network))  # fmt: skip
accuracies = {}  # number of images -> network -> accuracy of each seed
for row in sizes["rows"]:
    accuracies.setdefault(row["images"], {}).setdefault(row["network"], []).append(
        row["top1"]
    )
print(f"{sizes['steps']} steps, scored on {sizes['scored_on']:,} images")
print(f"{'images':>9}   {'ViT':<26}{'CNN':<26}CNN - ViT")
for number, scores in accuracies.items():
    lead = 100 * (mean(scores["CNN"]) - mean(scores["ViT"]))
    print(f"{number:>9,}   "
          f"{with_spread(scores['ViT']):<26}{with_spread(scores['CNN']):<26}"
          f"{lead:+.2f} points")  # fmt: skip

# %% mystnb={"figure": {"caption": "Accuracy on held-out images of Fashion-MNIST by the number of training images, on a logarithmic axis: the mean of the seeds as a line, their range as a band. The CNN is 5 to 7 points better everywhere, far more than the width of the bands. Both lines are flat from 10,000 images on."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5.6, 3))
for network, colour in (("CNN", "#dd8452"), ("ViT", "#4c72b0")):
    band(
        ax,
        list(accuracies),
        [scores[network] for scores in accuracies.values()],
        network,
        colour,
    )
ax.set(xscale="log", xlabel="training images", ylabel="accuracy")
ax.set_xticks([], minor=True)
ax.set_xticks(list(accuracies), [f"{number:,}" for number in accuracies])
_ = ax.legend()

# %% [markdown]
# The CNN's assumptions are worth most with 300 images: 7.4 points, and a gain with every seed. With
# more images they are worth 5 to 7 points, without a trend. Where the lines are flat, more images
# do not help, because 600 steps are too few for either network to learn from all of them. The
# number of steps is the limit, not the number of images. So both networks are trained once with
# four times as many steps, with few images and with many:

# %%
longer = measured("data-size-long")
print(f"{longer['steps']:,} steps, seed {longer['seeds'][0]};", end=" ")
print(f"in brackets: gain over {sizes['steps']} steps")
by_size = {}
for row in longer["rows"]:
    by_size.setdefault(row["images"], {})[row["network"]] = row["top1"]
for number, top1 in by_size.items():
    gain = {
        network: 100 * (top1[network] - accuracies[number][network][0])
        for network in top1
    }
    print(f"{number:>7,} images: ViT {top1['ViT']:.2%} ({gain['ViT']:+.2f} points), "
          f"CNN {top1['CNN']:.2%} ({gain['CNN']:+.2f}), "
          f"CNN - ViT {100 * (top1['CNN'] - top1['ViT']):+.2f} points")  # fmt: skip

# %% [markdown]
# With few images, more steps gain one point; with many images, four. Thirty times as many images
# are now worth 5.8 points to the ViT and 5.2 to the CNN. **This is one run of each with one seed.** A
# difference of half a point is within the range of the seeds above, so it does not show that the ViT
# gains more from data. What it shows is that at this size both gain, and that the CNN stays 5 points
# ahead. For both networks the highest of the three learning rates was the best, so an even higher one
# might be better. With the 5,040 steps and the optimizer of its recipe, the same ViT reaches 91 %
# ([benchmarks](../benchmarks.md)).

# %% [markdown]
# ## Images without labels
#
# Labels are expensive, images are not. A model that can predict one part of an image from the rest
# has learned something about images. So half of the patches are hidden: their tokens are replaced
# by one learned vector, the mask token. The model predicts their pixels. With $S$ the set of hidden
# patches, it minimises
#
# $$ \frac{1}{|S|} \sum_{i \in S} \frac{1}{P^2 C}
#    {\left\| \operatorname{LN}(z_L^i)\,W + b - x_p^i \right\|}^2 $$
#
# The ViT paper predicts the mean colour of each hidden patch (its Sec. 4.6). So pre-trained, ViT-B/16
# reaches 79.9 % on ImageNet: 2 points more than from scratch, and 4 points less than after
# pre-training with labels. [SimMIM](https://arxiv.org/abs/2111.09886) predicts all pixels, as
# here. [MAE](https://arxiv.org/abs/2111.06377) leaves the hidden patches out of the encoder. The
# whole code is {download}`masked_images.py <masked_images.py>`. Here it runs on the digits for some
# seconds:

# %%
splits = open_dataset("digits").splits
train_images, test_images = (
    torch.from_numpy(splits[part].images).permute(0, 3, 1, 2).float() / 127.5 - 1
    for part in ("train", "test")
)
masked_model = MaskedImages(
    vitkit.create_model(
        "vit_tiny_patch16_224", image_size=8, patch_size=2, in_channels=1,
        width=48, depth=3,
        num_heads=3, mlp_width=96, class_token=False, pooling="mean", num_classes=10,
    )
)  # fmt: skip
losses = pretrain(masked_model, train_images, steps=500, batch=128, lr=4e-3, seed=0)
with torch.no_grad():
    hidden = masked_model.hide(len(test_images))  # (images, patches), True where hidden
    predicted = masked_model(test_images, hidden)
patches = patchify(test_images, (2, 2))
error = (predicted - patches)[hidden].square().mean()
baseline = (patches - train_images.mean())[hidden].square().mean()
print(f"first loss {losses[0]:.2f}, last loss {losses[-1]:.2f};", end=" ")
print(f"on test digits {error:.2f}")
print(f"predicting the mean of all pixels: {baseline:.2f}")


# %% mystnb={"figure": {"caption": "Eight test digits. Top: the image. Middle: half of the patches are hidden (grey). Bottom: the hidden patches are replaced by the predictions. The prediction continues a stroke where the visible patches determine the digit. It is blurred where several digits are possible, because the squared error is smallest at the mean of all possibilities."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
def images_of(patches: torch.Tensor) -> torch.Tensor:
    return rearrange(patches, "B (r c) (p q) -> B (r p) (c q)", r=4, p=2)


rows = (patches, patches.masked_fill(hidden[..., None], 0.0),
        torch.where(hidden[..., None], predicted.clamp(-1, 1), patches))  # fmt: skip
_ = grid_of(
    [(image + 1) / 2 for row in rows for image in images_of(row)[:8]],
    across=8,
    size=0.8,
)

# %% [markdown]
# Does this help? The ViT of this chapter is pre-trained on 44,000 images of Fashion-MNIST without
# labels. Then it is trained on a few labelled images. It is compared with the same model trained
# from scratch on these few images, for the same number of steps and for three times as many.

# %%
masked = measured("masked")
LABELS = {"alone": "from scratch", "alone, longer": "from scratch, 3 times the steps",
          "masked": "pre-trained"}  # fmt: skip
by_labels = {}
for row in masked["rows"]:
    methods = by_labels.setdefault(row["images"], {})
    methods.setdefault(LABELS[row["way"]], []).append(row["top1"])
pretraining = masked["pretrained"]
print(f"pre-training: {pretraining['steps']:,} steps of {pretraining['batch']} images, "
      f"{mean(pretraining['seconds']):.0f} s")  # fmt: skip
print(f"then {masked['steps']['masked']:,} steps of {masked['batch']} labelled images")
for number, scores in by_labels.items():
    for method, values in scores.items():
        print(f"{number:>6,} labels  {method:<33}{with_spread(values)}")

# %% mystnb={"figure": {"caption": "Accuracy on held-out images by the number of labelled images: the mean of the seeds as a line, their range as a band. The model pre-trained on hidden patches (blue) is better than the one trained from scratch for equally many steps (orange) everywhere, most at the left. The model trained from scratch for three times as many steps (green) crosses the blue line: with 3,000 labels it is the best."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5.6, 3))
for method, colour in zip(
    LABELS.values(), ("#dd8452", "#55a868", "#4c72b0"), strict=True
):
    band(
        ax,
        list(by_labels),
        [scores[method] for scores in by_labels.values()],
        method,
        colour,
    )
ax.set(xscale="log", xlabel="labelled images", ylabel="accuracy")
ax.set_xticks([], minor=True)
ax.set_xticks(list(by_labels), [f"{number:,}" for number in by_labels])
_ = ax.legend()

# %% [markdown]
# With equally many steps on the labelled images, pre-training is worth 2.8 points with 300 labels
# and 1.5 points with 3,000, with every seed. This is the counterpart of the paper's 2 points. Three
# times as many steps without pre-training are worth nearly as much with 300 and 1,000 labels, and more
# with 3,000, where the labels still have something to teach. So hidden patches help most where labels
# are fewest, which is what they are for. And like all pre-training it costs steps, here 3,000.
#
# Predicting pixels is one of many tasks besides classification. The encoder gives a vector for every
# patch as well as one for the image. With other heads on these vectors, the same encoder outlines
# objects (segmentation), finds them (detection), or finds similar images: `vitkit embed` writes the
# vectors of a folder of images, and [chapter 8](08_transfer.py) uses an encoder for new classes.
#
# ## Positions
#
# A ViT without positions does not know where a patch is. The positions can be learned, or fixed by
# one of the tables of [chapter 1](01_patches.py#position-embeddings). Without them, and with the mean
# of the tokens as readout, the image is an unordered set of patches.

# %% mystnb={"figure": {"caption": "A digit, and the same 49 patches in another order. To a model without positions these are the same image."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
pixels = open_dataset("digits").splits["test"].read(4)
digit = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255
digit = nn.functional.interpolate(digit, size=28, mode="bicubic").clamp(0, 1)
patches = patchify(digit, (4, 4))[:, torch.randperm(49)]
shuffled = patches.reshape(1, 7, 7, 4, 4).transpose(2, 3).reshape(1, 1, 28, 28)
_ = grid_of([digit[0, 0], shuffled[0, 0]], across=2, size=1.8)

# %%
for kind in ("none", "sincos_1d", "sincos_2d", "learned"):
    spec = recipe["spec"] | {"patch_size": 4, "positions": kind}
    model = vitkit.create_model(recipe["model"], num_classes=0, **spec).eval()
    with torch.no_grad():
        original, other = model(digit), model(shuffled)
    difference = (original - other).norm() / original.norm()
    print(f"{kind:<10} relative difference of the features {difference:.0e}")

# %% [markdown]
# Even an unordered set of patches distinguishes a shoe from a shirt more often than not. The next
# experiment measures how much the positions add, and whether their kind matters. The same model,
# with 7 x 7 patches of 4 x 4, is trained on 44,000 images of Fashion-MNIST for a fixed number of
# steps. 1-D positions encode the number of a patch in reading order, so the patch below has a
# number that is 7 larger. 2-D positions encode its row and its column.

# %%
position_runs = measured("positions")
scores = {}
for row in position_runs["rows"]:
    scores.setdefault(row["positions"], []).append(row["top1"])
print(f"{position_runs['images']:,} training images, {position_runs['steps']} steps "
      f"of {position_runs['batch']}, scored on {position_runs['scored_on']:,} images")  # fmt: skip
without = mean(scores["none"])
for kind, values in scores.items():
    print(
        f"{kind:<10} {with_spread(values)}  "
        f"{100 * (mean(values) - without):+.2f} points"
    )

# %% mystnb={"figure": {"caption": "Each dot is one training, each bar the mean of the seeds. Every kind of positions gains 6 to 9 points. The three kinds differ by at most 2.5 points, which is more than the range of the seeds of one kind."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5.4, 1.9))
for row, values in enumerate(scores.values()):
    ax.plot(values, [row] * len(values), "o", color="#4c72b0", markersize=4)
    ax.plot([mean(values)] * 2, [row - 0.3, row + 0.3], color="#c44e52")
ax.set_yticks(range(len(scores)), list(scores), fontsize=8)
ax.invert_yaxis()
ax.set_xlabel("accuracy on held-out images")
_ = figure.tight_layout()

# %% [markdown]
# Every kind of positions gains at least six points. 1-D positions are 0.9 points better than 2-D
# ones, with every seed: the model gains nothing from explicit rows and columns. The fixed positions
# are better than the learned ones, but this is a result about 250 steps: learned positions start as
# noise and must be trained first, fixed ones are right from the first step. The paper compares the
# same kinds for a ViT-B/16 after its whole training (its Table 8, ImageNet by a linear fit to five
# images of a class): 61 % without positions, 64 % with each of its three learned kinds. With few
# patches, their arrangement is easy to learn from any kind of positions.
#
# ## What you know now
#
# - A convolution assumes that neighbours belong together and that position does not matter; a ViT must
#   learn most of this.
# - In the paper, large ViTs are behind after 1.3 million images and ahead after 303 million.
# - In the measurement here, with up to 30,000 images, a CNN of equal size is 5 to 7 points better.
# - Hidden patches teach a model without labels; it helps most where labels are few.
# - Positions are worth 6 to 9 points here; their kind matters much less.
#
# ## Exercises
#
# **1. Predict, then run.** The first convolution of `SmallCNN` has a stride of 2. By how many pixels
# must an image move so that its feature maps move without changing? Show it for 1 and 2 pixels, away
# from the border.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
strided = cnn.maps[0]


def inside(maps: torch.Tensor) -> torch.Tensor:
    return maps[..., 4:-4, 4:-4]


with torch.no_grad():
    unmoved, by_one, by_two = (
        strided(photograph.roll(shift, dims=-1)) for shift in (0, 1, 2)
    )
torch.testing.assert_close(inside(by_two.roll(-1, dims=-1)), inside(unmoved))
for cells in (0, 1):
    assert not torch.allclose(
        inside(by_one.roll(-cells, dims=-1)), inside(unmoved), atol=1e-2
    )

# %% [markdown]
# **2. Show.** Write the number of parameters of `SmallCNN` as a sum, and show that it differs from the
# ViT's by less than one per cent.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
widths = [1, 32, 64, 128, 120]
by_hand = sum(9 * a * b + 2 * b for a, b in pairwise(widths)) + 120 * 10 + 10
assert by_hand == count(cnn)
assert abs(count(cnn) - count(vit)) / count(vit) < 0.01

# %% [markdown]
# **3. Build.** An accuracy $p$ on $n$ images has a standard error of $\sqrt{p(1-p)/n}$ from the choice of
# the images alone, for any number of seeds. How many images does it take to know an accuracy of
# 90 % to half a point, with 95 % confidence? Build a simulation that checks it.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
needed = round(1.96**2 * 0.9 * 0.1 / 0.005**2)
assert needed == 13_830
simulated = (
    torch.distributions.Binomial(needed, torch.tensor(0.9)).sample((20_000,)) / needed
)
assert 0.94 < ((simulated - 0.9).abs() <= 0.005).float().mean() < 0.96

# %% [markdown]
# **4. Train.** Does it help to have seen digits without labels? Train the model that predicted hidden
# patches on 100 labelled digits, and the same model from scratch, with 100 steps each. (Hint:
# `masked_model.model` is the ViT inside.)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
few_labels, test_labels = (
    torch.from_numpy(splits[part].labels) for part in ("train", "test")
)
top1 = {}
for name in ("from scratch", "pre-trained"):
    torch.manual_seed(1)
    model = vitkit.ViT(masked_model.model.spec)
    if name == "pre-trained":
        model.load_state_dict(masked_model.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(100):
        batch = torch.randint(100, (50,))
        loss = nn.functional.cross_entropy(
            model(train_images[batch]), few_labels[batch]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        guesses = model.eval()(test_images).argmax(dim=1)
    top1[name] = float((guesses == test_labels).float().mean())
    print(f"{name:<13}{top1[name]:.1%} of the test digits")
assert top1["pre-trained"] > top1["from scratch"]

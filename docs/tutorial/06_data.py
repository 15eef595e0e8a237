# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 6. How much data a ViT wants
#
# A convolution is built on two beliefs about images: that neighbouring pixels belong together,
# and that a thing is the same thing wherever it stands. The ViT paper calls them inductive biases
# (its Sec. 3.1). A ViT has them in the cutting, where a patch keeps its pixels together and one matrix
# serves all patches, and in what it does to each token by itself. What tokens have to do with each
# other it has to learn from images.
#
# So the question of this chapter is not which of the two is better, but what those beliefs are worth
# with few images, and with more.
# A plain CNN and a ViT of one size are trained by one loop, on more and more of Fashion-MNIST.
# After that the ViT alone is trained with four kinds of positions.

# %%
from itertools import pairwise
from statistics import mean

import torch
from drawing import band, grid_of
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

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# %% [markdown]
# ## Two networks of one size
#
# The ViT is that of the recipe `fashion-mnist`: 16 patches of 7 x 7, width 96, three blocks. The
# CNN is four 3 x 3 convolutions from `torch.nn`, each with a BatchNorm, and the mean of the last
# map.

# %%
recipe = recipe_settings("fashion-mnist")
vit = vitkit.create_model(recipe["model"], num_classes=10, **recipe["spec"]).eval()
cnn = SmallCNN().eval()
for name, network in (("ViT", vit), ("CNN", cnn)):
    table = vitkit.summary(network, input_size=(1, 1, 28, 28))
    print(f"{name}: {count(network):,} parameters, {table.mult_adds:,} multiply-adds an image")

# %% [markdown]
# The CNN has more arithmetic, because it uses its weights at more places, 49 to 196 of them, and the
# ViT at 16. Its two beliefs in
# numbers: the map from 28 x 28 pixels to the first 32 maps of 14 x 14, as a matrix with
# no such belief, against the kernel that makes it.

# %%
print(f"matrix {28 * 28 * 32 * 14 * 14:,} numbers, kernel {cnn.maps[0].weight.numel()}")

# %% [markdown]
# ## The same thing elsewhere
#
# Move an image by a pixel and the maps of a convolution move by a pixel, and are otherwise as
# before. Tokens only do so if the image moves by whole patches. In between, every patch holds
# other pixels and every token changes; that both mean the same image must be learned, which is
# what shifts are for in training.

# %% mystnb={"figure": {"caption": "A photograph is moved by some pixels, and what a layer makes of it is moved back. A convolution's maps are then what they were, for any shift. Tokens of 7 x 7 patches are so at 0, 7 and 14 pixels alone; halfway between, what has changed is about half as large as the tokens themselves."}}
photograph = torch.from_numpy(data.camera()[100:212, 180:292]).float()[None, None] / 255 - 0.5
kernel = nn.Conv2d(1, 32, 3, padding=1, padding_mode="circular", bias=False)
embedding = vitkit.PatchEmbedding(in_channels=1, patch_size=7, width=96)


def tokens_of(image: torch.Tensor) -> torch.Tensor:
    return embedding(image).unflatten(1, (16, 16)).permute(0, 3, 1, 2)


def change(layer, shift: int, cell: int) -> float:
    moved = layer(photograph.roll(shift, dims=-1)).roll(-round(shift / cell), dims=-1)
    return float((moved - layer(photograph)).norm() / layer(photograph).norm())


shifts = range(15)
with torch.no_grad():
    figure, place = plt.subplots(figsize=(5.4, 2.6))
    place.plot(shifts, [change(kernel, s, 1) for s in shifts], "o-", label="3 x 3 convolution")
    place.plot(shifts, [change(tokens_of, s, 7) for s in shifts], "o-", label="7 x 7 patches")
place.set(xlabel="shift in pixels", ylabel="relative change", ylim=(-0.05, 0.9))
_ = place.legend()

# %% [markdown]
# ## Accuracy by the number of images
#
# Both networks get the same loop: AdamW, batches of 100, flips and shifts of one pixel, smoothed
# labels, warm-up and cosine, and as many steps whatever the number of images; with 300 images
# each of them is seen a hundred times as often as with 30,000. The rate of each network is the
# best of three, chosen with another seed on other held-out images. Each seed takes other
# training images. The test split is not touched.

# %%
sizes = measured("data-size")
for network, number in sizes["parameters"].items():
    tried = {row["lr"]: row["top1"] for row in sizes["tried"] if row["network"] == network}
    print(f"{network}: {number:,} parameters, rate {sizes['rates'][network]:g} of",
          ", ".join(f"{rate:g} ({top1:.1%})" for rate, top1 in tried.items()))  # fmt: skip
at = {}
for row in sizes["rows"]:
    at.setdefault(row["images"], {}).setdefault(row["network"], []).append(row["top1"])
print(f"{sizes['steps']} steps, scored on {sizes['scored_on']:,} images")
print(f"{'images':>9}   {'ViT':<26}{'CNN':<26}CNN - ViT")
for number, scores in at.items():
    ahead = 100 * (mean(scores["CNN"]) - mean(scores["ViT"]))
    print(f"{number:>9,}   {with_spread(scores['ViT']):<26}{with_spread(scores['CNN']):<26}"
          f"{ahead:+.2f} points")  # fmt: skip

# %% mystnb={"figure": {"caption": "Accuracy on held-out images of Fashion-MNIST by the number of training images, on a logarithmic axis: the mean of the seeds as a line, their span as a band. The CNN is ahead by 5 to 7 points everywhere, far more than the bands are wide. Both lines are flat from 10,000 images on."}}
figure, place = plt.subplots(figsize=(5.6, 3))
for network, colour in (("CNN", "#dd8452"), ("ViT", "#4c72b0")):
    band(place, list(at), [scores[network] for scores in at.values()], network, colour)
place.set(xscale="log", xlabel="training images", ylabel="accuracy")
place.set_xticks([], minor=True)
place.set_xticks(list(at), [f"{number:,}" for number in at])
_ = place.legend()

# %% [markdown]
# The CNN's beliefs are worth most with 300 images, 7.4 points, and with every seed; above that 5 to
# 7, without a trend. Where the lines are flat, more images do not help, because 600 steps end
# before either network has made use of them: the steps are the limit, not the images. So both
# train for four times as many, once, with few images and with many:

# %%
longer = measured("data-size-long")
print(f"{longer['steps']:,} steps, seed {longer['seeds'][0]}, gains over {sizes['steps']} steps")
by_size = {}
for row in longer["rows"]:
    by_size.setdefault(row["images"], {})[row["network"]] = row["top1"]
for number, top1 in by_size.items():
    gain = {network: 100 * (top1[network] - at[number][network][0]) for network in top1}
    print(f"{number:>7,} images: ViT {top1['ViT']:.2%} ({gain['ViT']:+.2f} points), "
          f"CNN {top1['CNN']:.2%} ({gain['CNN']:+.2f}), "
          f"CNN - ViT {100 * (top1['CNN'] - top1['ViT']):+.2f} points")  # fmt: skip

# %% [markdown]
# More steps with few images bring a point; with many they bring four. Thirty times as many images
# are now worth 5.8 points to the ViT and 5.2 to the CNN: it is the ViT that wants them more, but at
# this size by half a point, with one seed, and the CNN stays ahead. The paper's
# models are hundreds of times as large. There ResNets are ahead after pre-training on ImageNet's 1.3
# million images, and ViTs after JFT's 300 million (its Fig. 3 and 4). Both networks here take the
# highest of the three rates, so a higher one might do better; with the recipe's 5,040 steps and its
# optimizer the same ViT reaches 91 % (`docs/benchmarks.md`).

# %% [markdown]
# ## Images without labels
#
# Labels are costly and images are not. A part of an image can be guessed from the rest, and whoever
# guesses well knows something of images. So half of the patches are hidden, each behind one
# learned vector, and the model is to say their pixels. With $M$ the hidden patches,
#
# $$ L = \frac{1}{|M|} \sum_{i \in M} \frac{1}{P^2 C}
#    \lVert \mathrm{LN}(z_L^i)\,W + b - x_p^i \rVert^2. $$
#
# The ViT paper tries this with the mean colour of a patch, and is two points ahead of training from
# scratch (its Sec. 4.6); [SimMIM](https://arxiv.org/abs/2111.09886) has all pixels, as here, and
# [MAE](https://arxiv.org/abs/2111.06377) leaves hidden patches out of the encoder.
# `masked_images.py` beside this chapter is all of it. On the digits, for some seconds:

# %%
splits = open_dataset("digits").splits
seen, unseen = (
    torch.from_numpy(splits[part].images).permute(0, 3, 1, 2).float() / 127.5 - 1
    for part in ("train", "test")
)
guessing = MaskedImages(
    vitkit.create_model(
        "vit_tiny_patch16_224", image_size=8, patch_size=2, in_channels=1, width=48, depth=3,
        num_heads=3, mlp_width=96, class_token=False, pooling="mean", num_classes=10,
    )
)  # fmt: skip
losses = pretrain(guessing, seen, steps=500, batch=128, lr=4e-3, seed=0)
with torch.no_grad():
    hidden = guessing.hide(len(unseen))
    patches, guessed = patchify(unseen, (2, 2)), guessing(unseen, hidden)
wrong = (guessed - patches)[hidden].square().mean()
even = (patches - seen.mean())[hidden].square().mean()
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last; on test digits {wrong:.2f},")
print(f"with the mean of all pixels for every hidden one {even:.2f}")


# %% mystnb={"figure": {"caption": "Eight test digits: as they are; with half of their patches hidden, grey; and with the model's guesses in the place of those. Strokes are continued where what is left says which digit it is, and blurred where several would fit: the best guess for a squared error is the mean of what may be there."}}
def images_of(patches: torch.Tensor) -> torch.Tensor:
    return rearrange(patches, "B (r c) (p q) -> B (r p) (c q)", r=4, p=2)


rows = (patches, patches.masked_fill(hidden[..., None], 0.0),
        torch.where(hidden[..., None], guessed.clamp(-1, 1), patches))  # fmt: skip
_ = grid_of([(image + 1) / 2 for row in rows for image in images_of(row)[:8]], across=8, size=0.8)

# %% [markdown]
# Whether it helps is measured: the ViT of this chapter's beginning guesses patches of 44,000 images of
# Fashion-MNIST without their labels, and then trains on a few with. Beside it, the same model from
# noise, for as many steps on those few, and for three times as many.

# %%
without = measured("masked")
told = {}
for row in without["rows"]:
    told.setdefault(row["images"], {}).setdefault(row["way"], []).append(row["top1"])
pretrained = without["pretrained"]
print(f"guessing: {pretrained['steps']:,} steps of {pretrained['batch']}, "
      f"{mean(pretrained['seconds']):.0f} s; then {without['steps']['masked']:,} of {without['batch']}")  # fmt: skip
for number, scores in told.items():
    for way, values in scores.items():
        print(f"{number:>6,} labels  {way:<15}{with_spread(values)}")

# %% mystnb={"figure": {"caption": "Accuracy on held-out images by the number of labelled ones: the mean of the seeds as a line, their span as a band. The blue line, of the model that guessed patches first, is above the orange one everywhere, most at the left. The green line, of the model that trained alone for three times as many steps, crosses it: with 3,000 labels it is the highest."}}
figure, place = plt.subplots(figsize=(5.6, 3))
for way, colour in (("masked", "#4c72b0"), ("alone, longer", "#55a868"), ("alone", "#dd8452")):
    band(place, list(told), [scores[way] for scores in told.values()], way, colour)
place.set(xscale="log", xlabel="labelled images", ylabel="accuracy")
place.set_xticks([], minor=True)
place.set_xticks(list(told), [f"{number:,}" for number in told])
_ = place.legend()

# %% [markdown]
# With as many steps on the labels, guessing first is worth 2.8 points with 300 of them and 1.5 with
# 3,000, with every seed. Three times as many steps on the labels alone are worth nearly as much with
# 300 and 1,000, and more with 3,000, where there is something left to learn from labels. So hidden
# patches help most where labels are fewest, which is the case they are for; and like all pre-training
# they are paid for in steps, 3,000 of them here.
#
# ## Positions
#
# The other thing that a ViT is not told is where a patch stood. It learns that, too, or is given
# it by one of the tables of chapter 1. With neither, and with the mean of the tokens as its
# readout, it sees an image as a bag of patches.

# %% mystnb={"figure": {"caption": "A digit, and the same 49 patches in another order. To a model without positions these are one image."}}
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
        one, other = model(digit), model(shuffled)
    print(f"{kind:<10} features differ by {(one - other).norm() / one.norm():.0e} of their length")

# %% [markdown]
# A bag of patches still tells a shoe from a shirt more often than not. How much more the positions
# give, and whether it matters which, is measured: the same model, cut in 7 x 7 patches of 4 x 4,
# on 44,000 images of Fashion-MNIST for a fixed number of steps. With 1-D positions the model is
# told the number of a patch in reading order, so that the one below is seven further; with 2-D
# ones its row and its column.

# %%
places = measured("positions")
scores = {}
for row in places["rows"]:
    scores.setdefault(row["positions"], []).append(row["top1"])
print(f"{places['images']:,} training images, {places['steps']} steps of {places['batch']}")
print(f"scored on {places['scored_on']:,} images")
without = mean(scores["none"])
for kind, values in scores.items():
    print(f"{kind:<10} {with_spread(values)}  {100 * (mean(values) - without):+.2f} points")

# %% mystnb={"figure": {"caption": "Each dot is one training, each bar the mean of the seeds. Any positions are worth 6 to 9 points. The three kinds differ by 2.5 points at most, which is more than what lies between the seeds of a kind."}}
figure, place = plt.subplots(figsize=(5.4, 1.9))
for row, values in enumerate(scores.values()):
    place.plot(values, [row] * len(values), "o", color="#4c72b0", markersize=4)
    place.plot([mean(values)] * 2, [row - 0.3, row + 0.3], color="#c44e52")
place.set_yticks(range(len(scores)), list(scores), fontsize=8)
place.invert_yaxis()
place.set_xlabel("accuracy on held-out images")
_ = figure.tight_layout()

# %% [markdown]
# Any positions are worth six points and more. 1-D ones are ahead of 2-D ones by 0.9, with every seed:
# nothing is gained by being told that the image has rows and columns. That the fixed ones are ahead
# of the learned ones says something of 250 steps: learned ones start as noise and have to be found
# first, fixed ones are there from the first step. The paper asks the same of a ViT-B/16 after its
# whole training (its Table 8, ImageNet by a linear fit to five images of a class): 61 % without
# positions, 64 % with any of the three learned kinds it tries. With few patches it is easy to learn
# how they lie, in any form.
#
# ## Exercises
#
# **1.** The first convolution of `SmallCNN` has a stride of 2. By how many pixels must an image
# move for its maps to move without changing? Show it for 1 and 2 pixels, away from the border.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
strided = cnn.maps[0]


def inside(maps: torch.Tensor) -> torch.Tensor:
    return maps[..., 4:-4, 4:-4]


with torch.no_grad():
    still, by_one, by_two = (strided(photograph.roll(shift, dims=-1)) for shift in (0, 1, 2))
torch.testing.assert_close(inside(by_two.roll(-1, dims=-1)), inside(still))
for cells in (0, 1):
    assert not torch.allclose(inside(by_one.roll(-cells, dims=-1)), inside(still), atol=1e-2)

# %% [markdown]
# **2.** Write the number of parameters of `SmallCNN` as a sum, and show that it is within one per
# cent of the ViT's.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
widths = [1, 32, 64, 128, 120]
by_hand = sum(9 * a * b + 2 * b for a, b in pairwise(widths)) + 120 * 10 + 10
assert by_hand == count(cnn)
assert abs(count(cnn) - count(vit)) / count(vit) < 0.01

# %% [markdown]
# **3.** An accuracy $p$ on $n$ images has a standard error of $\sqrt{p(1-p)/n}$ from the choice
# of the images alone, however many seeds there are. How many images does it take to know 90 %
# to half a point, with 95 % confidence? Check it by drawing.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
needed = round(1.96**2 * 0.9 * 0.1 / 0.005**2)
assert needed == 13_830
drawn = torch.distributions.Binomial(needed, torch.tensor(0.9)).sample((20_000,)) / needed
assert 0.94 < ((drawn - 0.9).abs() <= 0.005).float().mean() < 0.96

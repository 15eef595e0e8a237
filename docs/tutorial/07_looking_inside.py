# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 7. Looking inside
#
# Where does a ViT look? This chapter builds attention maps and rollout from their equations, and
# compares them with a region that is known to be right. It ends with what the model has learned as
# a whole: filters, positions, attention distance and entropy. Each measure is a few lines, followed
# by the name of the file in the library that does the same, and a check that both are equal.
#
# Methods that give a map for one class, and tests of whether a map is true, are in [chapter
# 7b](07b_faithful_maps.py).
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** how attention maps and rollout are computed, what they show, and what filters,
#   positions and distances say about a model
# - **You need** chapters [2](02_attention.py) and [4](04_vit.py)
# - **Reading** about 20 minutes
# :::

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports", "code_prompt_hide": "Hide the imports"}
import tempfile
from pathlib import Path

import hidden_digits as task
import torch
from drawing import grid_of, print_wrapped, similarity_grid
from matplotlib import pyplot as plt
from skimage import data
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit
from vitkit.data.images.preprocess import preprocess_images
from vitkit.explaining.methods import METHODS

_ = torch.manual_seed(0)

# %% [markdown]
# ## Every layer and head
#
# The model of [chapter 13](13_your_photograph.py) was trained on CIFAR-10, and gets a photograph of a
# cat, resized to its 32 x 32 pixels. A `Record` is created before the forward pass.
# Here it records all layers and heads. The fused attention kernel stays in use; the maps are
# computed beside it.

# %%
trained = vitkit.load("checkpoints/cifar10.safetensors")
vit, depth = trained.model.eval(), trained.model.spec.depth
cat = data.chelsea()
pixels = preprocess_images([cat], trained.preprocess)
record = vitkit.Record(attention=range(depth))
with torch.inference_mode():
    logits = vit(pixels, record=record)
best = logits[0].argmax()
print(f"{trained.classes[best]}, probability {logits.softmax(1)[0, best]:.0%}")
print(f"{len(record.attention)} layers of (images, heads, queries, keys) =",
      tuple(record.attention[0].shape))  # fmt: skip

# %% [markdown]
# In [notebook D, "Block by block"](coverage.md#d-block-by-block), a flag of the constructor decides
# whether the model returns attention maps together with its logits, so every caller must know the
# flag. In vitkit the output is always the logits. A record can also store less: one layer, some
# heads, or some queries, such as the class token, which is token 0 where there is one.

# %%
row = vitkit.Record(attention=[-1], heads=[0, 2], queries=[0])
with torch.inference_mode():
    print("equal logits:", torch.equal(logits, vit(pixels, record=row)))
print({layer: tuple(maps.shape) for layer, maps in row.attention.items()})

# %% [markdown]
# This model has no class token: its head reads the mean of the 64 patches. So the figure shows how
# much attention each patch gets, the mean over all queries.

# %% mystnb={"figure": {"caption": "A photograph of a cat, and how much attention each of its 8 x 8 patches gets: a row is a layer, a column is a head, and each map has its own scale. Top: layer 0 of a model with random weights, which shows a pattern, too; it means nothing. Below: the trained model. Its first layers read from everywhere; in layer 4 all heads read from a few patches around the eye and the nose."}}
side = 8  # 64 patches of 4 x 4 pixels
with torch.inference_mode():
    at_random = vitkit.Record(attention=[0])
    vitkit.ViT(vit.spec).eval()(pixels, record=at_random)
layers = {"untrained": at_random.attention[0]}
layers |= {f"layer {n}": record.attention[n] for n in range(depth)}
squares, titles = [], []
for name, weights in layers.items():
    received = weights[0].mean(dim=1).unflatten(1, (side, side))
    squares += [cat, *received]
    titles += [name, *(f"head {n}" for n in range(len(received)))]
_ = grid_of(squares, titles, across=5, size=1.1, colours="gray")

# %% [markdown]
# ## A model for which the right region is known
#
# Handwritten digits of 16 x 16 pixels are drawn over photographs of 48 x 48. A patch has 8 x 8
# pixels, and digits are placed at multiples of 8, so a digit covers exactly four of 36 patches. The
# model predicts the digit and its position: ten classes, five rows, five columns. The background
# does not help. So the patches that matter are known, and attention maps can be compared with them.
# {download}`hidden_digits.py <hidden_digits.py>` makes the images and trains the model.

# %% mystnb={"figure": {"caption": "Ten of the test images. Each is a digit on a part of a photograph, darkened by half. The digits were not seen in training; the photographs were."}}
sources = (data.coffee(), data.rocket(), data.chelsea(), data.camera())
photographs = [task.grey(photograph, 0.4) for photograph in sources]
(digits, labels), (test_digits, test_labels) = (
    task.digits_of("train"),
    task.digits_of("test"),
)
images, positions = task.hide(
    test_digits, photographs, task.SIDE, torch.Generator().manual_seed(1)
)
_ = grid_of(list(images[:10, 0]), across=5, size=1.1)

# %% [markdown]
# The model has three blocks of four heads. Its patch matrix and its positions start much smaller
# than usual. So what they show after training was learned, and is not left over from the random
# start. Training is a plain loop over new images in every step. The loss is the sum of three
# cross-entropies, for the digit, the row and the column. The model, from
# {download}`hidden_digits.py <hidden_digits.py>`:
#
# ```{literalinclude} hidden_digits.py
# :pyobject: fresh_model
# ```

# %%
model, untrained = task.fresh_model(), task.fresh_model().eval()  # equal weights
task.train(model, digits, labels, photographs, steps=240, lr=3e-3)
model.eval()
with torch.inference_mode():
    logits = model(images)
parts = {"digit": task.CLASS, "row": task.ROW, "column": task.COLUMN}
truths = (test_labels, *positions.T)
print(
    f"{sum(p.numel() for p in model.parameters()):,} parameters, "
    f"{len(images)} test images"
)
for (name, part), truth in zip(parts.items(), truths, strict=True):
    print(
        f"accuracy of the {name}: "
        f"{(logits[:, part].argmax(1) == truth).float().mean():.1%}"
    )

# %% [markdown]
# The head has twenty rows. From here on only the ten rows of the digits are used, so that the
# question is always: why this digit? `vitkit.adapt` keeps them by their names.

# %%
folder = tempfile.TemporaryDirectory()
checkpoint = task.digits_only(model, Path(folder.name))
reader = checkpoint.model.eval()
with torch.no_grad():
    predicted = reader(images).argmax(1)
print("the same digits:", torch.equal(predicted, logits[:, task.CLASS].argmax(1)))

# %% [markdown]
# ## Its attention maps


# %% mystnb={"figure": {"caption": "One test image and the attention of the class token in each layer (rows) and head (columns); each map has its own colour scale. In layer 0 the heads attend to the digit, but not all to the same patches of it. In later layers some heads still have their largest weight on the digit, others their smallest, and much of the attention is spread over the whole image. By then the class token already has the information about the digit."}}
maps = task.maps_of(model, images)
shown = maps[:, 2, :, 0, 1:].unflatten(-1, (6, 6))
squares, titles = [], []
for layer in range(3):
    squares += [images[2, 0], *shown[layer]]
    titles += ["image", *(f"layer {layer}, head {head}" for head in range(4))]
_ = grid_of(squares, titles, across=5, size=1.3, colours="gray")

# %% [markdown]
# One image proves little. The position of the digit is known in all images, so we can measure how
# much of the class token's attention to patches is on the four patches that matter. Uniform
# attention would give 4 of 36.


# %%
mask = task.digit_mask(positions)  # (B, 36), 1 on the four patches of the digit


def share(weights: Tensor) -> Tensor:
    """Return the share of the weights (..., B, 36) on the digit, mean over images."""
    return ((weights * mask).sum(-1) / weights.sum(-1)).mean(-1)


for name, recorded in (
    ("trained", maps),
    ("untrained", task.maps_of(untrained, images)),
):
    for layer, heads in enumerate(share(recorded[:, :, :, 0, 1:].transpose(1, 2))):
        print(
            f"{name:<10} layer {layer}  ", "  ".join(f"{head:6.1%}" for head in heads)
        )
print(f"uniform    {4 / 36:.1%}")

# %% [markdown]
# ## Rollout
#
# A map of layer 2 shows attention to the tokens of layer 2. Such a token is no longer one patch,
# because it has combined others. Rollout ([arXiv 2005.00928](https://arxiv.org/abs/2005.00928))
# follows the attention through all layers. It takes the mean over the heads, $\bar A_l$, adds an
# identity matrix for the residual connection, and multiplies the layers:
#
# $$ \hat A_l = \tfrac12\big(\bar A_l + I\big), \qquad R = \hat A_L \cdots \hat A_2\, \hat A_1 $$
#
# If attention were the only operation, the first row of $R$ would be the share of each patch in the
# final class token. Fig. 6 of the ViT paper is drawn in this way. In the library:
# `explaining/methods/attention.py`.


# %%
def rollout(maps: Tensor) -> Tensor:
    """Return R (B, T, T) from the maps of all layers (L, B, h, T, T)."""
    mean = maps.mean(dim=2)
    layers = (mean + torch.eye(mean.shape[-1])) / 2
    product = layers[0]
    for layer in layers[1:]:
        product = layer @ product
    return product


of_library = METHODS["rollout"].compute(reader, images).flatten(1)
print(f"largest difference: {(rollout(maps)[:, 0, 1:] - of_library).abs().max():.0e}")
class_token_maps = {
    "layer 0, mean of heads": maps[0, :, :, 0, 1:].mean(1),
    "last layer, mean of heads": maps[-1, :, :, 0, 1:].mean(1),
    "rollout": rollout(maps)[:, 0, 1:],
    "rollout, untrained model": rollout(task.maps_of(untrained, images))[:, 0, 1:],
}
for name, weights in class_token_maps.items():
    print(f"{name:<26} {share(weights):6.1%} on the digit")

# %% mystnb={"figure": {"caption": "Five test images; below them the mean map of layer 0, the mean map of the last layer, and rollout. In all five the largest weights lie on the digit. But the last layer, which is the one most often drawn, spreads the rest over the whole image: in the mean only 17.5 % of its attention is on the digit, against 88 % in layer 0. The model found the digit in layer 0."}}
squares, titles = [*images[:5, 0]], [""] * 5
for name, weights in list(class_token_maps.items())[:3]:
    squares += [*weights[:5].unflatten(1, (6, 6))]
    titles += [name.split(",")[0]] * 5
_ = grid_of(squares, titles, across=5, size=1.3, colours="gray")

# %% [markdown]
# ## Attention distance and entropy
#
# A convolution sees only its neighbourhood. For an attention head this can be measured: the
# distance between query and key in pixels, weighted by attention and averaged over the queries (the
# paper's Fig. 7, right). With $p_i$ the centre of patch $i$,
#
# $$ d = \frac1N \sum_{i=1}^{N} \sum_{j=1}^{N} A_{ij}\, {\left\| p_i - p_j \right\|}. $$
#
# Entropy says how selective a head is, over all $T$ tokens. It is 0 if each token attends to one
# token only, and $\log T$ if it attends to all equally:
#
# $$ H = -\frac1T \sum_{i=1}^{T} \sum_{j=1}^{T} A_{ij} \log A_{ij}. $$
#
# In the library: `explaining/measure.py`. In the paper's models some heads of the
# first layers have a short distance, others a long one. Little of this can be expected here: the
# class token finds the digit alone, and the patches hardly need each other.


# %% mystnb={"figure": {"caption": "Attention distance (left) and entropy (right) of every head, trained and untrained; the dotted lines are uniform attention. All distances lie within a few pixels of the line: patches attend to patches at any distance. Training lowers the entropy of layer 0 most: its heads have become selective."}}
def distance(maps: Tensor) -> Tensor:
    """Return d of each layer and head (L, h), the mean over images, of patches only."""
    centres = task.PATCH * torch.cartesian_prod(torch.arange(6.0), torch.arange(6.0))
    among_patches = maps[..., 1:, 1:] / maps[..., 1:, 1:].sum(-1, keepdim=True)
    return (among_patches * torch.cdist(centres, centres)).sum(-1).mean(-1).mean(1)


def entropy(maps: Tensor) -> Tensor:
    """Return H of every layer and head, (L, h), mean over images."""
    return torch.special.entr(maps).sum(-1).mean(-1).mean(1)


even = torch.full((1, 1, 1, 37, 37), 1 / 37)
maps_untrained = task.maps_of(untrained, images)
figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
for ax, measure, unit in zip(
    axes, (distance, entropy), ("pixels", "nats"), strict=True
):
    for name, recorded in (("trained", maps), ("untrained", maps_untrained)):
        layers = torch.arange(3).repeat_interleave(4)
        ax.scatter(layers, measure(recorded).flatten(), label=name)
    ax.axhline(measure(even).item(), color="0.6", linestyle=":")
    ax.set(title=measure.__name__, xlabel="layer", ylabel=unit, xticks=range(3))
_ = axes[0].legend(fontsize=8)

# %% [markdown]
# ## Similarity of the position embeddings
#
# The model has no input that says that its 36 positions form a square. It was trained to predict
# the row and the column of a digit, and for that it had to learn the grid. The cosine similarity of
# each position embedding with all others shows how well it did (the paper's Fig. 7, centre).


# %% mystnb={"figure": {"caption": "Each small square belongs to one position and shows the cosine similarity of its embedding with all 36; yellow is similar. Left, before training: each position is similar only to itself. Right, after training: positions are similar to those in the same row and in the same column. So the model learned the grid from the task of predicting row and column."}}
def similarity(model: vitkit.ViT) -> Tensor:
    """Return the cosine similarity of all pairs of positions, (36, 36)."""
    vectors = F.normalize(model.pos_embed[0, 1:].detach(), dim=1)
    return vectors @ vectors.T


figure, axes = plt.subplots(1, 2, figsize=(7, 3.5))
for ax, vit, name in zip(
    axes, (untrained, model), ("untrained", "trained"), strict=True
):
    similarity_grid(ax, similarity(vit), 6, name)
row, column = torch.arange(36) // 6, torch.arange(36) % 6
same_row, same_column = row[:, None] == row, column[:, None] == column
pairs = (same_row & ~same_column, same_column & ~same_row, ~same_row & ~same_column)
for name, chosen in zip(("same row", "same column", "neither"), pairs, strict=True):
    print(f"mean similarity, {name:<11} {similarity(model)[chosen].mean():5.2f}")

# %% [markdown]
# ## The first filters
#
# Each column of the patch matrix $E$, a kernel of `patch_embed.proj`, can be drawn as a small
# image: the patch to which this component of the token responds most. Many of the 64 kernels are
# similar, so the figure shows their principal components, the strongest first (the paper's Fig. 7,
# left). In the library: `explaining/measure.py`.


# %% mystnb={"figure": {"caption": "The first 14 principal components of the patch matrix. Upper row, trained: lines, edges and corners of strokes at various positions and angles. Lower row, untrained: noise."}}
def components(model: vitkit.ViT) -> tuple[Tensor, Tensor]:
    kernel = model.patch_embed.proj.weight.detach().flatten(1)
    _, strength, rows = torch.linalg.svd(kernel - kernel.mean(0))
    return rows.unflatten(
        1, (task.PATCH, task.PATCH)
    ), strength.square() / strength.square().sum()


(filters, trained_share), (noise, noise_share) = (
    components(model),
    components(untrained),
)
_ = grid_of([*filters[:14], *noise[:14]], across=14, size=0.5)
print("variance of the first 14 of 64 components:",
      f"trained {trained_share[:14].sum():.0%}, untrained {noise_share[:14].sum():.0%}")  # fmt: skip

# %% [markdown]
# ## Everything in one call
#
# `vitkit.explain_model` measures all of this for any checkpoint, and `vitkit explain RUN photos
# --model` does the same on the command line. The numbers are those of the cells above.

# %% mystnb={"figure": {"caption": "The sheet of the model: filters, similarity of positions, and attention distance of every head."}}
shown_images = [
    ((image[0] + 1) * 127.5).round().byte().numpy() for image in images[:128]
]
learned = vitkit.explain_model(checkpoint, shown_images, name="hidden digits")
for line in learned.lines():
    print_wrapped(line)
of_library = torch.from_numpy(learned.depth.distance).float()
difference = (distance(task.maps_of(reader, images[:128])) - of_library).abs().max()
print(f"attention distance: largest difference {difference:.3f} pixels")
_ = learned.plot()

# %% [markdown]
# ## What you know now
#
# - `Record` keeps the attention maps of a forward pass, and the fused kernel stays on.
# - Attention maps show what a layer reads, not what the prediction depends on. The last layer is
#   often the wrong one to draw. Rollout multiplies the layers.
# - The maps of an untrained model show patterns, too. Compare with them.
# - What a model has learned as a whole is seen in its filters, its positions, and the distance and
#   entropy of its attention.
#
# ## Exercises
#
# **1. Show.** The rows of an attention map sum to 1. Show that the rows of a rollout do so, too. Show
# also that with uniform maps, the rollout has equal weights for all other tokens, and a larger one
# for the token itself.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
torch.testing.assert_close(rollout(maps).sum(-1), torch.ones(len(images), 37))
even_maps = torch.full((3, 1, 1, 37, 37), 1 / 37)
row = rollout(even_maps)[0, 0]
assert row[1:].max() - row[1:].min() < 1e-7
# the token keeps a half in each of three layers, and gets a uniform share of the rest
torch.testing.assert_close(row[0], torch.tensor(1 / 8 + 7 / 8 / 37))

# %% [markdown]
# **2. Show.** The bias of the keys adds the same vector to all keys. Show that it changes no attention
# map, and explain why.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
changed = task.fresh_model().eval()
changed.load_state_dict(model.state_dict())
for block in changed.blocks:
    nn.init.normal_(block.attn.qkv.bias.data[64:128])  # queries, keys, values: 64 each
# q (k + c) = q k + q c: all scores of a query change by the same number,
# and the softmax ignores it
torch.testing.assert_close(task.maps_of(changed, images), maps, atol=1e-4, rtol=1e-4)
for block in changed.blocks:
    nn.init.normal_(block.attn.qkv.bias.data[:64])
assert not torch.allclose(task.maps_of(changed, images), maps, atol=1e-2)

# %% [markdown]
# **3. Predict, then run.** Does the prediction need the attention maps? The attention function of a layer can be
# replaced: `attn.attend` is a function of queries, keys and values. Replace it by one that gives
# every token the plain mean of all values, in one layer at a time. In which layer is the accuracy
# lost, and in which does it hardly change?


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def plain_mean(q, k, v, mask=None, dropout=0.0):
    return v.mean(dim=2, keepdim=True).expand_as(v)


def digit_accuracy(images: Tensor) -> float:
    with torch.inference_mode():
        return (reader(images).argmax(1) == test_labels).float().mean().item()


accuracies = []
for block in reader.blocks:
    usual, block.attn.attend = block.attn.attend, plain_mean
    accuracies.append(digit_accuracy(images))
    block.attn.attend = usual
print(
    "uniform attention in layer 0, 1, 2:",
    *(f"{accuracy:.0%}" for accuracy in accuracies),
)
assert accuracies[0] < 0.5 < accuracies[-1], "the digit is found in layer 0"
assert digit_accuracy(images) >= max(accuracies) - 0.02

# %% [markdown]
# **4. Build.** Write a function that gives the attention that each patch *receives* in a layer, the
# mean over heads and over all queries. What is its sum over all tokens?


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def received(maps: Tensor) -> Tensor:
    """Return the attention that each token receives, (B, h, T, T) -> (B, T)."""
    return maps.mean(dim=(1, 2))


# each of the T queries gives away 1, so the mean over queries adds up to 1
assert torch.allclose(received(maps[0]).sum(-1), torch.ones(len(images)))
print(f"received on the digit in layer 0: {share(received(maps[0])[:, 1:]):.1%}")

# %% tags=["remove-cell"]
folder.cleanup()

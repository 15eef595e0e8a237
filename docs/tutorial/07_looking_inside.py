# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 7. Looking inside
#
# A ViT shows more than its logits. Which patches did a token attend to, and in which layer? What do
# the position embeddings encode? What does the first matrix detect? This chapter draws all of this
# for a model that is trained here, in seconds, on a task in which only one known region of the
# image matters. `vitkit.Record` stores the attention maps of the forward pass.

# %%
import tempfile
from pathlib import Path

import hidden_digits as task
import torch
from drawing import grid_of, similarity_grid
from matplotlib import pyplot as plt
from skimage import data
from torch import nn
from torch.nn import functional as F

import vitkit
from vitkit.explaining.explanation import Explanation, heatmap_over

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Every layer and head
#
# A `Record` is created before the forward pass. Here it records all layers and heads of an
# untrained ViT-B/16.

# %%
photograph = torch.from_numpy(data.astronaut()[:448, :448]).permute(2, 0, 1).float() / 127.5 - 1
astronaut = F.interpolate(photograph[None], size=224, antialias=True, mode="bilinear")
base = vitkit.create_model("vit_base_patch16_224").eval()
record = vitkit.Record(attention=range(12))
with torch.inference_mode():
    logits = base(astronaut, record=record)
print(f"{len(record.attention)} layers of (images, heads, queries, keys) =",
      tuple(record.attention[0].shape))  # fmt: skip
print(f"{sum(maps.numel() for maps in record.attention.values()) * 4 / 1e6:.1f} MB for one image")

# %% [markdown]
# In [notebook D](index.md) a flag of the constructor decides whether the model returns attention
# maps together with its logits, so every caller must know the flag. In vitkit the output is always
# the logits. A record can also store less: one layer, some heads, or only the row of the class
# token, which is row 0.

# %%
row = vitkit.Record(attention=[-1], heads=[0, 5], queries=[0])
with torch.inference_mode():
    print("equal logits:", torch.equal(logits, base(astronaut, record=row)))
print({layer: tuple(maps.shape) for layer, maps in row.attention.items()})

# %% mystnb={"figure": {"caption": "Attention of the class token of an untrained ViT-B/16 to the 14 x 14 patches of the photograph: a row is a layer, a column is a head. Black is 0, white is three times a uniform weight. Every map shows a pattern, even outlines of the image. The patterns mean nothing: they are the response of random matrices to the pixels."}}
of_class_token = torch.stack([record.attention[layer][0, :, 0, 1:] for layer in range(12)])
squares = list(of_class_token.reshape(144, 14, 14))
_ = grid_of(squares, across=12, size=0.58, vmax=3 / 197)

# %% [markdown]
# ## A model for which the right region is known
#
# Handwritten digits of 16 x 16 pixels are drawn over photographs of 48 x 48. A patch has 8 x 8
# pixels, and digits are placed at multiples of 8, so a digit covers exactly four of 36 patches. The
# model predicts the digit and its position: ten classes, five rows, five columns. The background
# does not help. So the patches that matter are known, and attention maps can be compared with them.
# `hidden_digits.py` beside this chapter makes the images and trains the model.

# %% mystnb={"figure": {"caption": "Ten of the test images. Each is a digit on a part of a photograph, darkened by half. The digits were not seen in training; the photographs were."}}
sources = (data.coffee(), data.rocket(), data.chelsea(), data.camera())
photographs = [task.grey(photograph, 0.4) for photograph in sources]
(digits, labels), (test_digits, test_labels) = task.digits_of("train"), task.digits_of("test")
images, positions = task.hide(test_digits, photographs, task.SIDE, torch.Generator().manual_seed(1))
_ = grid_of(list(images[:10, 0]), across=5, size=1.1)

# %% [markdown]
# The model has three blocks of four heads. Its patch matrix and its positions start much smaller
# than usual. So what they show after training was learned, and is not left over from the random
# start. Training is a plain loop over new images in every step. The loss is the sum of three
# cross-entropies, for the digit, the row and the column.

# %%
spec = vitkit.ViTSpec(
    image_size=task.SIDE, patch_size=task.PATCH, in_channels=1, num_classes=20, width=64, depth=3, num_heads=4,
    mlp_width=128, stem="linear",
)  # fmt: skip
model = vitkit.ViT(spec)
print(f"patch matrix: usual std {model.patch_embed.proj.weight.std():.3f}, here 0.005")
nn.init.normal_(model.patch_embed.proj.weight, std=0.005)
nn.init.normal_(model.pos_embed, std=0.005)
untrained = vitkit.ViT(spec).eval()
untrained.load_state_dict(model.state_dict())
task.train(model, digits, labels, photographs, steps=240, lr=3e-3)
model.eval()
with torch.inference_mode():
    logits = model(images)
parts = {"digit": task.CLASS, "row": task.ROW, "column": task.COLUMN}
truths = (test_labels, *positions.T)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(images)} test images")
for (name, part), truth in zip(parts.items(), truths, strict=True):
    print(f"accuracy of the {name}: {(logits[:, part].argmax(1) == truth).float().mean():.1%}")

# %% [markdown]
# ## Its attention maps


# %% mystnb={"figure": {"caption": "One test image and the attention of the class token in each layer (rows) and head (columns); each map has its own colour scale. In layer 0 the heads attend to the digit, but not all to the same patches of it. Head 0 of layer 1 still attends to the digit. Later maps mostly spread over the whole image; some have their largest weight on a patch of the digit, others do not. By then the class token already has the information about the digit."}}
def maps_of(model: vitkit.ViT, images: torch.Tensor) -> torch.Tensor:
    """Return the attention maps of every layer, (L, B, h, T, T)."""
    record = vitkit.Record(attention=range(model.spec.depth))
    with torch.inference_mode():
        model(images, record=record)
    return torch.stack(list(record.attention.values()))


maps = maps_of(model, images)
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


def share(weights: torch.Tensor) -> torch.Tensor:
    """Return the share of the weights (..., B, 36) on the digit, mean over images."""
    return ((weights * mask).sum(-1) / weights.sum(-1)).mean(-1)


for name, recorded in (("trained", maps), ("untrained", maps_of(untrained, images))):
    for layer, heads in enumerate(share(recorded[:, :, :, 0, 1:].transpose(1, 2))):
        print(f"{name:<10} layer {layer}  ", "  ".join(f"{head:6.1%}" for head in heads))
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
# final class token. Fig. 6 of the ViT paper is drawn in this way.


# %%
def rollout(maps: torch.Tensor) -> torch.Tensor:
    """Return R (B, T, T) from the maps of all layers (L, B, h, T, T)."""
    mean = maps.mean(dim=2)
    layers = (mean + torch.eye(mean.shape[-1])) / 2
    product = layers[0]
    for layer in layers[1:]:
        product = layer @ product
    return product


class_token_maps = {
    "layer 0, mean of heads": maps[0, :, :, 0, 1:].mean(1),
    "last layer, mean of heads": maps[-1, :, :, 0, 1:].mean(1),
    "rollout": rollout(maps)[:, 0, 1:],
    "rollout, untrained model": rollout(maps_of(untrained, images))[:, 0, 1:],
}
for name, weights in class_token_maps.items():
    print(f"{name:<26} {share(weights):6.1%} on the digit")

# %% mystnb={"figure": {"caption": "Five test images; below them the mean map of layer 0, the mean map of the last layer, and rollout. Layer 0 and rollout mark the digit. The last layer, which is the one most often drawn, does so in some images; in others it attends to almost everything except the digit. The model found the digit in an earlier layer."}}
squares, titles = [*images[:5, 0]], [""] * 5
for name, weights in list(class_token_maps.items())[:3]:
    squares += [*weights[:5].unflatten(1, (6, 6))]
    titles += [name.split(",")[0]] * 5
_ = grid_of(squares, titles, across=5, size=1.3, colours="gray")

# %% [markdown]
# ## On a photograph
#
# The model takes every image size that is a multiple of its patch size, because its positions are
# resampled to another grid (chapter 8). Here it gets a photograph that it has never seen, nearly
# three times as high and wide as its training images, with a digit in it. It now has 256 patches,
# and 4 of them matter.

# %% mystnb={"figure": {"caption": "The astronaut with a digit at three positions; below each image, its rollout. The rollout is high at the digit and almost zero elsewhere, even at the face and at the bright edges of the suit. The upper row is the input of the model: grey, 128 x 128 pixels."}}
portrait = task.grey(data.astronaut(), 0.25)
large, _ = task.hide(test_digits[:100], [portrait], 128, torch.Generator().manual_seed(3))
with torch.inference_mode():
    correct = model(large)[:, task.CLASS].argmax(1) == test_labels[:100]
print(f"{tuple(large.shape[2:])} pixels: accuracy {correct.float().mean():.0%} on 100 digits")
inputs = ((large[:3, 0] + 1) * 127.5).byte()[..., None].expand(-1, -1, -1, 3).numpy()
overlays = []
for pixels, weights in zip(inputs, rollout(maps_of(model, large[:3]))[:, 0, 1:], strict=True):
    heat = heatmap_over(weights.unflatten(0, (16, 16)), (128, 128), (0.0, 0.0, 128.0, 128.0))
    overlays.append(Explanation(pixels, heat, method="rollout").overlay())
_ = grid_of([*inputs, *overlays], across=3, size=2.2)

# %% [markdown]
# ## `vitkit.explain`
#
# The library function `vitkit.explain(checkpoint, image)` draws one layer, or one head of it. It
# takes any image, such as a file, and draws the map over the part of the image that the model sees.
# The heat map is always scaled to 0 to 1, so every map shows a pattern, even that of an untrained
# model. The head of our model has twenty rows; `vitkit.adapt` keeps the ten rows of the digits.

# %% mystnb={"figure": {"caption": "The image that explain saved: left the input, enlarged; right the same with the map of layer 0."}}
names = (*"0123456789", *(f"row {n}" for n in range(5)), *(f"column {n}" for n in range(5)))
preprocess = vitkit.Preprocess(image_size=task.SIDE, mean=(0.5,), std=(0.5,), fit="squash")
folder = tempfile.TemporaryDirectory()
path = Path(folder.name)
vitkit.save(path / "whole.safetensors", model, preprocess=preprocess, classes=names)
checkpoint = vitkit.adapt(vitkit.load(path / "whole.safetensors"), classes=names[:10])
pixels = ((images[2] + 1) * 127.5).byte().permute(1, 2, 0).numpy()
explanation = vitkit.explain(checkpoint, pixels, layer=0)
print(f"label {test_labels[2]}, predicted {explanation.label} ({explanation.probability:.0%})")
saved = explanation.save(path / "explained.png")
_ = grid_of([plt.imread(saved)], across=1, size=4)

# %% [markdown]
# ## Attention distance
#
# A convolution sees only its neighbourhood. For an attention head this can be measured: the
# distance between query and key in pixels, weighted by attention and averaged over the queries (the
# paper's Fig. 7, right). With $p_i$ the centre of patch $i$,
#
# $$ d = \frac1N \sum_{i=1}^{N} \sum_{j=1}^{N} A_{ij}\, {\left\| p_i - p_j \right\|}. $$
#
# In the paper's models some heads of the first layers have a short distance, others a long one.
# Little of this can be expected here: the class token finds the digit alone, and the patches hardly
# need each other.


# %% mystnb={"figure": {"caption": "Attention distance of every head, trained and untrained; the dotted line is uniform attention over 48 x 48 pixels. The scale is narrow: all heads lie within two pixels of the line, and training shortens the distance of layer 0 a little."}}
def distance(maps: torch.Tensor) -> torch.Tensor:
    """Return d of every layer and head, (L, h), mean over images, without the class token."""
    centres = task.PATCH * torch.cartesian_prod(torch.arange(6.0), torch.arange(6.0))
    among_patches = maps[..., 1:, 1:] / maps[..., 1:, 1:].sum(-1, keepdim=True)
    return (among_patches * torch.cdist(centres, centres)).sum(-1).mean(-1).mean(1)


uniform = distance(torch.ones(1, 1, 1, 37, 37)).item()
figure, ax = plt.subplots(figsize=(5, 2.8))
for name, recorded in (("trained", maps), ("untrained", maps_of(untrained, images))):
    pixels = distance(recorded).flatten()
    ax.scatter(torch.arange(3).repeat_interleave(4), pixels, label=name)
ax.axhline(uniform, color="0.6", linestyle=":")
ax.set(xlabel="layer", ylabel="pixels", xticks=range(3))
_ = ax.legend(fontsize=8)

# %% [markdown]
# ## Similarity of the position embeddings
#
# The model has no input that says that its 36 positions form a square. It was trained to predict
# the row and the column of a digit, and for that it had to learn the grid. The cosine similarity of
# each position embedding with all others shows how well it did (the paper's Fig. 7, centre).


# %% mystnb={"figure": {"caption": "Each small square belongs to one position and shows the cosine similarity of its embedding with all 36; yellow is similar. Left, before training: each position is similar only to itself. Right, after training: positions are similar to those in the same row and in the same column. So the model learned the grid from the task of predicting row and column."}}
def similarity(model: vitkit.ViT) -> torch.Tensor:
    """Return the cosine similarity of all pairs of positions, (36, 36)."""
    vectors = F.normalize(model.pos_embed[0, 1:].detach(), dim=1)
    return vectors @ vectors.T


figure, axes = plt.subplots(1, 2, figsize=(7, 3.5))
for ax, vit, name in zip(axes, (untrained, model), ("untrained", "trained"), strict=True):
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
# left).


# %% mystnb={"figure": {"caption": "The first 14 principal components of the patch matrix. Upper row, trained: lines, edges and corners of strokes at various positions and angles. Lower row, untrained: noise."}}
def components(model: vitkit.ViT) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = model.patch_embed.proj.weight.detach().flatten(1)
    _, strength, rows = torch.linalg.svd(kernel - kernel.mean(0))
    return rows.unflatten(1, (task.PATCH, task.PATCH)), strength.square() / strength.square().sum()


(filters, trained_share), (noise, noise_share) = components(model), components(untrained)
_ = grid_of([*filters[:14], *noise[:14]], across=14, size=0.5)
print("variance of the first 14 of 64 components:",
      f"trained {trained_share[:14].sum():.0%}, untrained {noise_share[:14].sum():.0%}")  # fmt: skip

# %% [markdown]
# ## What attention maps show, and what they do not
#
# Attention maps show from which tokens a head reads in a layer. They do not show what it reads: a
# weight multiplies a value, and the value may be near zero or may be cancelled by the next matrix.
# They do not show that the prediction depends on it; other maps can give the same prediction
# ([arXiv 1902.10186](https://arxiv.org/abs/1902.10186)). And they show nothing of the MLPs, which
# have most of the parameters. So a map is a hypothesis. It can be tested by changing the image.
#
# For this test, the four patches with the largest weights of a map are covered with the mean of the
# image, and the correct predictions are counted. If the map shows what matters, the accuracy falls.


# %%
def digit_accuracy(images: torch.Tensor) -> float:
    with torch.inference_mode():
        return (model(images)[:, task.CLASS].argmax(1) == test_labels).float().mean().item()


print(f"{'nothing covered':<26} {digit_accuracy(images):6.1%}")
ranked = {"random patches": torch.rand(len(images), 36), **class_token_maps, "the digit": mask}
for name, weights in ranked.items():
    print(f"{name:<26} {digit_accuracy(task.covered(images, weights)):6.1%}")

# %% [markdown]
# Rollout finds the four patches: without them the accuracy is that of guessing, the same as without
# the digit. The mean map of layer 0 has nearly all its weight on the digit, but on one or two of
# its patches, so its four largest weights do not cover the digit. The map of the last layer has
# little weight on the digit, but still ranks some of its patches first.
#
# The untrained model is a warning. Its rollout is almost uniform, but the patches that it ranks
# first matter far more than random patches. It has learned nothing; but digits are the brightest
# objects in these images, and random matrices respond to bright patches. So a map can pass such a
# test for a reason that has nothing to do with training. Every published map should be compared
# with that of an untrained model ([arXiv 1810.03292](https://arxiv.org/abs/1810.03292) does so for
# other kinds of maps).
#
# ## Exercises
#
# **1.** The rows of an attention map sum to 1. Show that the rows of a rollout do so, too. Show
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
# **2.** The bias of the keys adds the same vector to all keys. Show that it changes no attention
# map, and explain why.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
changed = vitkit.ViT(spec).eval()
changed.load_state_dict(model.state_dict())
for block in changed.blocks:
    nn.init.normal_(block.attn.qkv.bias.data[64:128])  # queries, keys, values: 64 each
# q (k + c) = q k + q c: all scores of a query change by the same number; the softmax ignores it
torch.testing.assert_close(maps_of(changed, images), maps, atol=1e-4, rtol=1e-4)
for block in changed.blocks:
    nn.init.normal_(block.attn.qkv.bias.data[:64])
assert not torch.allclose(maps_of(changed, images), maps, atol=1e-2)

# %% [markdown]
# **3.** Does the prediction need the attention maps? The attention function of a layer can be
# replaced: `attn.attend` is a function of queries, keys and values. Replace it by one that gives
# every token the plain mean of all values, in one layer at a time. In which layer is the accuracy
# lost, and in which does it hardly change?


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def plain_mean(q, k, v, mask=None, dropout=0.0):
    return v.mean(dim=2, keepdim=True).expand_as(v)


accuracies = []
for block in model.blocks:
    usual, block.attn.attend = block.attn.attend, plain_mean
    accuracies.append(digit_accuracy(images))
    block.attn.attend = usual
print("uniform attention in layer 0, 1, 2:", *(f"{accuracy:.0%}" for accuracy in accuracies))
assert accuracies[0] < 0.5 < accuracies[-1], "the digit is found in layer 0"
assert digit_accuracy(images) >= max(accuracies) - 0.02

# %% tags=["remove-cell"]
folder.cleanup()

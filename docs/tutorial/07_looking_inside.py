# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 7. Looking inside
#
# A ViT can be asked more than what it says. Which patches did a token take from, and in which layer?
# What do its positions know of each other? What does its first matrix look for? This chapter draws
# all of it, for a model whose right answers are known: it is trained here, in seconds, on a task in
# which there is one place to look at.
#
# Nothing in here needs another model than that of chapters 1 to 4. Every map follows from queries and
# keys that the forward pass computes anyway, and `vitkit.Record` keeps those that are asked for.

# %%
import shutil
import tempfile
from pathlib import Path

import torch
from drawing import grid_of
from einops import rearrange
from hidden_digits import COLUMN, PATCH, ROW, SIDE, WHAT, digits_of, grey, hidden, on_digit, train
from matplotlib import pyplot as plt
from skimage import data
from torch import nn
from torch.nn import functional as F

import vitkit
from vitkit.explaining.attention_maps import attention_grid
from vitkit.explaining.overlay import Explanation, heatmap_over

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Every layer and head
#
# What is wanted is said before the pass. Here it is everything, of a ViT-B/16 that was never trained.

# %%
photograph = torch.from_numpy(data.astronaut()[:448, :448]).permute(2, 0, 1).float() / 127.5 - 1
image = F.interpolate(photograph[None], size=224, antialias=True, mode="bilinear")
base = vitkit.create_model("vit_base_patch16_224").eval()
record = vitkit.Record(attention=range(12))
with torch.inference_mode():
    logits = base(image, record=record)
print(
    f"{len(record.attention)} layers of {tuple(record.attention[0].shape)}: images, heads, queries, keys"
)
print(f"{sum(maps.numel() for maps in record.attention.values()) * 4 / 1e6:.1f} MB for one image")
print("logits", tuple(logits.shape))

# %% [markdown]
# In one of the notebooks a flag at construction decides whether the model returns maps beside its
# logits, so every caller has to know the flag. Here the answer is the logits, always. A record may
# also ask for less: one layer, some heads, or the class token's row alone, which is row 0.

# %%
row = vitkit.Record(attention=[-1], heads=[0, 5], queries=[0])
with torch.inference_mode():
    print("the same logits:", torch.equal(logits, base(image, record=row)))
print({layer: tuple(maps.shape) for layer, maps in row.attention.items()})

# %% mystnb={"figure": {"caption": "What the class token of an untrained ViT-B/16 takes from the 14 x 14 patches of the photograph: a row is a layer, a column a head. Black is nothing, white three times an even share. There is something to see in every square, down to outlines of the image, and it means nothing: it is what random matrices make of the pixels."}}
of_class_token = torch.stack([record.attention[layer][0, :, 0, 1:] for layer in range(12)])
figure, places = plt.subplots(12, 12, figsize=(7, 7))
for place, weights in zip(places.flat, of_class_token.flatten(0, 1), strict=True):
    place.imshow(weights.unflatten(0, (14, 14)), cmap="gray", vmin=0, vmax=3 / 197)
    place.axis("off")
_ = figure.subplots_adjust(wspace=0.06, hspace=0.06)

# %% [markdown]
# ## A model that has a place to look at
#
# Handwritten digits of 16 x 16 pixels are laid over photographs of 48 x 48. A patch has 8 x 8 pixels,
# and digits stand at multiples of 8, so that a digit is exactly four of 36 patches. The model is to
# say which digit it is, and where: ten classes, five rows, five columns. What is around the digit is
# of no use. So it is known which patches matter, and maps can be judged by it. `hidden_digits.py`,
# beside this chapter, makes the images and has the training.

# %%
taken = (data.coffee(), data.rocket(), data.chelsea(), data.camera())
photographs = [grey(photograph, 0.4) for photograph in taken]
(digits, labels), (test_digits, test_labels) = digits_of("train"), digits_of("test")
images, places = hidden(test_digits, photographs, SIDE, torch.Generator().manual_seed(1))

# %% mystnb={"figure": {"caption": "Ten of the test images. Each has one digit on a piece of a photograph that is darkened by half; the digits were not seen in training, the photographs were."}}
_ = grid_of(list(images[:10, 0]), across=5, size=1.1)

# %% [markdown]
# The model has three blocks of four heads. Its patch matrix and its positions start much smaller than
# usual, for one reason: what is seen in them afterwards was learned then, and is not the noise they
# started from. Training is a plain loop over freshly made images; its loss is the sum of three
# cross-entropies, for the digit, the row and the column.

# %%
spec = vitkit.ViTSpec(
    image_size=SIDE, patch_size=PATCH, in_channels=1, num_classes=20, width=64, depth=3, num_heads=4,
    mlp_width=128, stem="linear",
)  # fmt: skip
model = vitkit.ViT(spec)
print(f"patch matrix: usual deviation {model.patch_embed.proj.weight.std():.3f}, here 0.005")
nn.init.normal_(model.patch_embed.proj.weight, std=0.005)
nn.init.normal_(model.pos_embed, std=0.005)
untrained = vitkit.ViT(spec).eval()
untrained.load_state_dict(model.state_dict())
train(model, digits, labels, photographs, steps=240, lr=3e-3)
model.eval()
with torch.inference_mode():
    said = model(images)
truth = {"digit": (WHAT, test_labels), "row": (ROW, places[:, 0]), "column": (COLUMN, places[:, 1])}
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(said)} test images")
for name, (part, expected) in truth.items():
    print(f"  {name:<6} right in {(said[:, part].argmax(1) == expected).float().mean():.1%}")

# %% [markdown]
# ## Its maps


# %%
def maps_of(model: vitkit.ViT, images: torch.Tensor) -> torch.Tensor:
    """Attention of every layer, (L, B, k, T, T)."""
    record = vitkit.Record(attention=range(model.spec.depth))
    with torch.inference_mode():
        model(images, record=record)
    return torch.stack(list(record.attention.values()))


maps = maps_of(model, images)
print("L x B x k x T x T:", tuple(maps.shape))

# %% mystnb={"figure": {"caption": "One test image and what the class token takes in each layer (rows) and head (columns), each map on a scale of its own. In layer 0 heads go to the digit, not all to the same of its patches. Head 0 of layer 1 still does. Later maps are mostly spread over the whole image, some with one of the digit's patches first and others with none: by then the class token has what it needs."}}
shown = maps[:, 2, :, 0, 1:].unflatten(-1, (6, 6))
squares, titles = [], []
for layer in range(3):
    squares += [images[2, 0], *shown[layer]]
    titles += ["image", *(f"layer {layer}, head {head}" for head in range(4))]
_ = grid_of(squares, titles, across=5, size=1.3, colours="gray")

# %% [markdown]
# One image is an anecdote. The place of the digit is known in all of them, so it can be counted how
# much of the class token's attention to patches goes to the four that matter. An even spread would
# give 4 of 36.


# %%
inside = on_digit(places)  # (B, 36), 1 on the four


def share(weights: torch.Tensor) -> torch.Tensor:
    """Part of the weights (..., B, 36) that lies on the digit, mean over images."""
    return ((weights * inside).sum(-1) / weights.sum(-1)).mean(-1)


for name, looked_at in (("trained", maps), ("untrained", maps_of(untrained, images))):
    for layer, heads in enumerate(share(looked_at[:, :, :, 0, 1:].transpose(1, 2))):
        print(f"{name:<10} layer {layer}  ", "  ".join(f"{head:6.1%}" for head in heads))
print(f"even       {4 / 36:.1%}")

# %% [markdown]
# ## Rollout
#
# A map of layer 2 is over the tokens of layer 2, and those are no patches any more: each has taken
# from others. Rollout ([arXiv 2005.00928](https://arxiv.org/abs/2005.00928)) follows the paths. It
# takes the mean over heads, $\bar A_l$, adds the residual path as an identity, and multiplies the
# layers:
#
# $$ \hat A_l = \tfrac12\big(\bar A_l + I\big), \qquad R = \hat A_L \cdots \hat A_2\, \hat A_1 $$
#
# The first row of $R$ says how much of each patch reached the class token in the end, if attention
# were all that happens. The ViT paper drew its Fig. 6 so.


# %%
def rollout(maps: torch.Tensor) -> torch.Tensor:
    """R (B, T, T) from the maps of all layers (L, B, k, T, T)."""
    mean = maps.mean(dim=2)
    steps = (mean + torch.eye(mean.shape[-1])) / 2
    together = steps[0]
    for step in steps[1:]:
        together = step @ together
    return together


rolled = rollout(maps)[:, 0, 1:]
ways = {
    "layer 0, mean of heads": maps[0, :, :, 0, 1:].mean(1),
    "last layer, mean of heads": maps[-1, :, :, 0, 1:].mean(1),
    "rollout": rolled,
    "rollout, untrained model": rollout(maps_of(untrained, images))[:, 0, 1:],
}
for name, weights in ways.items():
    print(f"{name:<26} {share(weights):6.1%} on the digit")

# %% mystnb={"figure": {"caption": "Five test images; below them the mean map of layer 0, of the last layer, and rollout. Layer 0 and rollout mark the digit. The last layer, which is drawn most often, does so in some images and in others looks anywhere but there: the model found the digit before."}}
squares = [*images[:5, 0]]
for name in list(ways)[:3]:
    squares += [*ways[name][:5].unflatten(1, (6, 6))]
titles = [""] * 5 + [name.split(",")[0] for name in list(ways)[:3] for _ in range(5)]
_ = grid_of(squares, titles, across=5, size=1.3, colours="gray")

# %% [markdown]
# ## Over a photograph
#
# The model takes any multiple of its patch, as its positions are brought to another grid (chapter 8).
# Here it gets a photograph that it has never seen, nearly three times as long and as wide as what it
# was trained on, with a digit in it. It has 256 patches now, and 4 of them matter.

# %%
portrait = grey(data.astronaut(), 0.25)
large, at = hidden(test_digits[:100], [portrait], 128, torch.Generator().manual_seed(3))
with torch.inference_mode():
    found = model(large)[:, WHAT].argmax(1) == test_labels[:100]
print(f"{tuple(large.shape[2:])} pixels: {found.float().mean():.0%} of 100 digits are right")

# %% mystnb={"figure": {"caption": "The astronaut with a digit, three times; under each, rollout over the same image. The digit lights up wherever it stands, and hardly anything else does, neither the face nor the bright edges of the suit. The upper row is what the model saw: grey, 128 x 128 pixels."}}
flat = ((large[:3, 0] + 1) * 127.5).byte()[..., None].expand(-1, -1, -1, 3).numpy()
overlays = []
for image, map_of_patches in zip(flat, rollout(maps_of(model, large[:3]))[:, 0, 1:], strict=True):
    heat = heatmap_over(map_of_patches.unflatten(0, (16, 16)), (128, 128), (0.0, 0.0, 128.0, 128.0))
    overlays.append(Explanation(image, heat, method="rollout").overlay())
_ = grid_of([*flat, *overlays], across=3, size=2.2)

# %% [markdown]
# ## `vitkit.explain`
#
# What is in the library is one layer, or one head of it: `vitkit.explain(checkpoint, image)` takes
# an image as it lies on the disk and lays the map over it where the model saw it. The head of our
# model has twenty rows, of which `vitkit.adapt` keeps the ten that are digits.

# %% mystnb={"figure": {"caption": "What explain saved: the image, enlarged, beside itself under the map of layer 0."}}
names = (*"0123456789", *(f"row {n}" for n in range(5)), *(f"column {n}" for n in range(5)))
preprocess = vitkit.Preprocess(image_size=SIDE, mean=(0.5,), std=(0.5,), fit="squash")
folder = Path(tempfile.mkdtemp())
vitkit.save(folder / "whole.safetensors", model, preprocess=preprocess, classes=names)
checkpoint = vitkit.adapt(vitkit.load(folder / "whole.safetensors"), classes=names[:10])
image = ((images[2] + 1) * 127.5).byte().permute(1, 2, 0).numpy()
told = vitkit.explain(checkpoint, image, layer=0)
print(f"it is a {test_labels[2]}, said {told.label} with {told.probability:.0%}")
print("heat map", told.heatmap.shape, f"from {told.heatmap.min():.0f} to {told.heatmap.max():.0f}")
saved = told.save(folder / "explained.png")
print(saved.name, plt.imread(saved).shape, "(height, width, colours)")
_ = grid_of([plt.imread(saved)], across=1, size=4)

# %% [markdown]
# The heat map always runs from 0 to 1, whatever was in it. So there is always something to see. Here
# is `vitkit.explain`'s map of the last layer of the ViT-B/16 of the beginning, which knows nothing.

# %% mystnb={"figure": {"caption": "The astronaut, and the mean attention of the class token in the last layer of an untrained ViT-B/16, drawn as any explanation is. It looks as if it meant something. How far the hottest and the coldest patch are from an even share is printed, and cannot be seen."}}
grid = attention_grid(base, image)[0]
pixels = ((image[0].permute(1, 2, 0) + 1) * 127.5).clamp(0, 255).byte().numpy()
nothing = Explanation(pixels, heatmap_over(grid, (224, 224), (0.0, 0.0, 224.0, 224.0))).overlay()
_ = grid_of([pixels, nothing], across=2, size=2.6)
print(f"hottest patch {grid.max() * 196:.2f} of an even share, coldest {grid.min() * 196:.2f}")

# %% [markdown]
# ## How far a head reaches
#
# A convolution looks next to itself. How far a head looks can be measured: the distance between
# query and key, in pixels, weighted by attention and averaged over queries (the paper's Fig. 7,
# right). With $p_i$ the middle of patch $i$,
#
# $$ d = \frac1N \sum_{i=1}^{N} \sum_{j=1}^{N} A_{ij}\, \lVert p_i - p_j \rVert. $$
#
# In the paper's models some early heads look near and others far. In this one there is little to
# expect: the class token finds the digit by itself, and patches hardly need each other.


# %%
def reach(maps: torch.Tensor, grid: tuple[int, int], patch: int) -> torch.Tensor:
    """d of every layer and head, (L, k), mean over images; the class token is left out."""
    middles = patch * torch.cartesian_prod(*(torch.arange(float(side)) for side in grid))
    among_patches = maps[..., 1:, 1:] / maps[..., 1:, 1:].sum(-1, keepdim=True)
    return (among_patches * torch.cdist(middles, middles)).sum(-1).mean(-1).mean(1)


# %% mystnb={"figure": {"caption": "Attention distance of every head, trained and untrained; the dotted line is that of an even spread over 48 x 48 pixels. The scale is narrow: all heads lie within two pixels of the line, and training shortens the reach of layer 0 a little."}}
even = reach(torch.ones(1, 1, 1, 37, 37), (6, 6), PATCH).item()
figure, place = plt.subplots(figsize=(5, 2.8))
for name, of, mark in (("trained", maps, "o"), ("untrained", maps_of(untrained, images), "x")):
    far = reach(of, (6, 6), PATCH)
    place.scatter(torch.arange(3).repeat_interleave(4), far.flatten(), marker=mark, label=name)
place.axhline(even, color="0.6", linestyle=":")
place.set(xlabel="layer", ylabel="pixels", xticks=range(3))
_ = place.legend(fontsize=8)

# %% [markdown]
# ## What positions know of each other
#
# Nobody told the model that its 36 positions form a square. It was asked in which row and column a
# digit stands, and to answer it had to find out. Cosine similarity of each position's vector with all others shows how
# far it got (the paper's Fig. 7, centre).


# %% mystnb={"figure": {"caption": "Each small square belongs to one position and shows how alike the vectors of all 36 are to its own; yellow is alike. Left, before training: only like itself. Right, after: positions are alike to those in their row and in their column, so the grid was learned, from being asked where the digit is; no position was told its own place."}}
def alike(model: vitkit.ViT) -> torch.Tensor:
    """Cosines of all positions with all others, (36, 36)."""
    vectors = F.normalize(model.pos_embed[0, 1:].detach(), dim=1)
    return vectors @ vectors.T


figure, drawn = plt.subplots(1, 2, figsize=(7, 3.5))
for place, of, name in zip(drawn, (untrained, model), ("untrained", "trained"), strict=True):
    squares = rearrange(alike(of), "(r c) (row column) -> (r row) (c column)", r=6, row=6)
    place.imshow(squares, vmin=-1, vmax=1)
    for line in range(6, 36, 6):
        place.axhline(line - 0.5, color="white")
        place.axvline(line - 0.5, color="white")
    place.set_title(name, fontsize=9)
    place.axis("off")
row, column = torch.arange(36) // 6, torch.arange(36) % 6
same_row, same_column = row[:, None] == row, column[:, None] == column
for name, pairs in (
    ("same row", same_row & ~same_column),
    ("same column", same_column & ~same_row),
    ("neither", ~same_row & ~same_column),
):
    print(f"mean similarity, {name:<11} {alike(model)[pairs].mean():5.2f}")

# %% [markdown]
# ## The first filters
#
# Each column of the patch matrix $E$, a kernel of `patch_embed.proj`, is a small image: the patch to
# which that number of the token answers most. Sixty-four of them say much the same things, so their
# principal components are drawn, the strongest first (the paper's Fig. 7, left).


# %% mystnb={"figure": {"caption": "The first 14 principal components of the patch matrix. Upper row, trained: bars, edges and corners of strokes at various places and angles. Lower row, untrained: noise."}}
def components(model: vitkit.ViT) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = model.patch_embed.proj.weight.detach().flatten(1)
    _, strength, rows = torch.linalg.svd(kernel - kernel.mean(0))
    return rows.unflatten(1, (PATCH, PATCH)), strength.square() / strength.square().sum()


(trained_rows, trained_part), (noise_rows, noise_part) = components(model), components(untrained)
_ = grid_of([*trained_rows[:14], *noise_rows[:14]], across=14, size=0.5)
parts = f"{trained_part[:14].sum():.0%} of the matrix, {noise_part[:14].sum():.0%} untrained"
print("the first 14 of 64 hold", parts)

# %% [markdown]
# ## What such maps can tell, and what they cannot
#
# They say from which tokens a head takes in a layer. They do not say what it takes: a weight
# multiplies a value, and the value may be near zero or be undone by the next matrix. They do not say
# that the answer depends on it; other maps can give the same answer
# ([arXiv 1902.10186](https://arxiv.org/abs/1902.10186)). And they say nothing of the MLPs, where most
# parameters are. A map is a hint. Whether it holds is found out by changing the image.
#
# So the four patches that a map marks most are covered with the image's mean, and the answers
# counted. If the map shows what matters, digits are lost.


# %%
def covered(images: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Images without the four patches of largest weight."""
    mask = torch.zeros(len(images), 36).scatter(1, weights.topk(4, dim=1).indices, 1.0)
    mask = mask.unflatten(1, (1, 6, 6)).repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    return torch.where(mask > 0, images.mean(dim=(1, 2, 3), keepdim=True), images)


def digits_right(images: torch.Tensor) -> float:
    with torch.inference_mode():
        return (model(images)[:, WHAT].argmax(1) == test_labels).float().mean().item()


print(f"{'nothing covered':<26} {digits_right(images):6.1%}")
ways = {"four at random": torch.rand(len(images), 36)} | ways | {"the digit": inside}
for name, weights in ways.items():
    print(f"{name:<26} {digits_right(covered(images, weights)):6.1%}")

# %% [markdown]
# Rollout names the four patches: without them the model guesses, as it does without the digit. The
# mean map of layer 0 has nearly all its weight on the digit, but on one or two of its patches, so
# its first four are not all of them. The last layer's map has little weight there and still ranks
# some of them first.
#
# The line of the untrained model is the warning. Its rollout is almost even, and yet the patches
# that it ranks first matter far more than patches at random. It knows nothing; but digits are the
# brightest thing in these images, and random matrices answer to bright patches. So a map may pass
# such a test for a reason that has nothing to do with what was learned, and the comparison with an
# untrained model belongs to every map that is shown
# ([arXiv 1810.03292](https://arxiv.org/abs/1810.03292) makes it for other kinds of maps).
# Exercise 3 asks the opposite question, what the model loses without its maps.
#
# ## Exercises
#
# **1.** Rows of a map sum to 1. Show that those of a rollout do, too, and that rolling out a model
# whose every map is even gives each patch the same, and the token itself more.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
torch.testing.assert_close(rollout(maps).sum(-1), torch.ones(len(images), 37))
even_maps = torch.full((3, 1, 1, 37, 37), 1 / 37)
row = rollout(even_maps)[0, 0]
assert row[1:].max() - row[1:].min() < 1e-7
# the token keeps a half in each of three layers, and gets an even share of the rest
torch.testing.assert_close(row[0], torch.tensor(1 / 8 + 7 / 8 / 37))

# %% [markdown]
# **2.** The bias of the keys adds one vector to all keys. Show that it changes no map, and say why.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
changed = vitkit.ViT(spec).eval()
changed.load_state_dict(model.state_dict())
for block in changed.blocks:
    nn.init.normal_(block.attn.qkv.bias.data[64:128])  # queries, keys, values: 64 each
# q (k + c) = q k + q c: a query adds the same number to all its scores, and the softmax drops it
torch.testing.assert_close(maps_of(changed, images), maps, atol=1e-4, rtol=1e-4)
for block in changed.blocks:
    nn.init.normal_(block.attn.qkv.bias.data[:64])
assert not torch.allclose(maps_of(changed, images), maps, atol=1e-2)

# %% [markdown]
# **3.** Does the answer need the maps? An attention's kernel can be exchanged: `attn.attend` is a
# function of queries, keys and values. Put in one that gives every token the plain mean of all
# values, in one layer at a time. In which layer is that fatal, and in which hardly noticed?


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def plain_mean(q, k, v, mask=None, dropout=0.0):
    return v.mean(dim=2, keepdim=True).expand_as(v)


left = []
for block in model.blocks:
    usual, block.attn.attend = block.attn.attend, plain_mean
    left.append(digits_right(images))
    block.attn.attend = usual
print(
    "digits right with even attention in layer", {n: f"{part:.0%}" for n, part in enumerate(left)}
)
assert left[0] < 0.5 < left[-1], "the digit is found in layer 0"
assert digits_right(images) >= max(left) - 0.02

# %% tags=["remove-cell"]
shutil.rmtree(folder)

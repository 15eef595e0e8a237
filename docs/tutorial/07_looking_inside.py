# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 7. Looking inside
#
# Where does a ViT look? This chapter builds the usual answers from their equations: attention maps,
# rollout, gradient rollout, LibraGrad and occlusion. Each is a few lines, followed by the name of
# the file in the library that does the same, and a check that both give equal numbers.
#
# A map that looks convincing may still be wrong. So the chapter uses a task in which the right
# region is known, and then measures the maps in a way that needs no such knowledge. It ends with
# what the model has learned as a whole: filters, positions, attention distance and entropy.
#
# Everything runs offline and on one core, and the model is trained here, in seconds. For a
# photograph and a model that was trained on photographs, see [your
# photograph](13_your_photograph.py).
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** how attention maps, rollout, gradient rollout, LibraGrad and occlusion are
#   computed, and how to tell a map that is right from one that only looks right.
# - **You need** [chapter 2](02_attention.py) and [chapter 4](04_vit.py).
# - **Reading** about 40 minutes
# :::

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports", "code_prompt_hide": "Hide the imports"}
import copy
import tempfile
from pathlib import Path

import hidden_digits as task
import torch
from drawing import grid_of, similarity_grid
from matplotlib import pyplot as plt
from skimage import data
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit
from vitkit.explaining.balanced_gradients import BalancedGradients
from vitkit.explaining.methods import METHODS

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Every layer and head
#
# A `Record` is created before the forward pass. Here it records all layers and heads of an
# untrained ViT-S/16. The fused attention kernel stays in use; the maps are computed beside it.

# %%
photograph = (
    torch.from_numpy(data.astronaut()[:448, :448]).permute(2, 0, 1).float() / 127.5 - 1
)
astronaut = F.interpolate(photograph[None], size=224, antialias=True, mode="bilinear")
small = vitkit.create_model("vit_small_patch16_224").eval()
record = vitkit.Record(attention=range(12))
with torch.inference_mode():
    logits = small(astronaut, record=record)
print(f"{len(record.attention)} layers of (images, heads, queries, keys) =",
      tuple(record.attention[0].shape))  # fmt: skip
print(
    f"{sum(maps.numel() for maps in record.attention.values()) * 4 / 1e6:.1f} MB for one image"
)

# %% [markdown]
# In [notebook D, "Block by block"](coverage.md#d-block-by-block), a flag of the constructor decides whether the model returns attention
# maps together with its logits, so every caller must know the flag. In vitkit the output is always
# the logits. A record can also store less: one layer, some heads, or only the row of the class
# token, which is row 0.

# %%
row = vitkit.Record(attention=[-1], heads=[0, 5], queries=[0])
with torch.inference_mode():
    print("equal logits:", torch.equal(logits, small(astronaut, record=row)))
print({layer: tuple(maps.shape) for layer, maps in row.attention.items()})

# %% mystnb={"figure": {"caption": "Attention of the class token of an untrained ViT-S/16 to the 14 x 14 patches of the photograph: a row is a head, a column is a layer. Black is 0, white is three times a uniform weight. Every map shows a pattern, even outlines of the image. The patterns mean nothing: they are the response of random matrices to the pixels."}}
of_class_token = torch.stack(
    [record.attention[layer][0, :, 0, 1:] for layer in range(12)], dim=1
)
squares = list(of_class_token.reshape(72, 14, 14))
_ = grid_of(squares, across=12, size=0.58, vmax=3 / 197)

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
print(
    f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(images)} test images"
)
for (name, part), truth in zip(parts.items(), truths, strict=True):
    print(
        f"accuracy of the {name}: {(logits[:, part].argmax(1) == truth).float().mean():.1%}"
    )

# %% [markdown]
# The head has twenty rows. From here on only the ten rows of the digits are used, so that the
# question is always: why this digit? `vitkit.adapt` keeps them by their names.

# %%
names = (
    *"0123456789",
    *(f"row {n}" for n in range(5)),
    *(f"column {n}" for n in range(5)),
)
preprocess = vitkit.Preprocess(
    image_size=task.SIDE, mean=(0.5,), std=(0.5,), fit="squash"
)
folder = tempfile.TemporaryDirectory()
path = Path(folder.name)
vitkit.save(path / "whole.safetensors", model, preprocess=preprocess, classes=names)
checkpoint = vitkit.adapt(vitkit.load(path / "whole.safetensors"), classes=names[:10])
reader = checkpoint.model.eval()
with torch.no_grad():
    predicted = reader(images).argmax(1)
print("the same digits:", torch.equal(predicted, logits[:, task.CLASS].argmax(1)))

# %% [markdown]
# ## Its attention maps


# %% mystnb={"figure": {"caption": "One test image and the attention of the class token in each layer (rows) and head (columns); each map has its own colour scale. In layer 0 the heads attend to the digit, but not all to the same patches of it. In layer 1 some heads still do. Later maps mostly spread over the whole image; some have their largest weight on a patch of the digit, others their smallest. By then the class token already has the information about the digit."}}
def maps_of(model: vitkit.ViT, images: Tensor) -> Tensor:
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


def share(weights: Tensor) -> Tensor:
    """Return the share of the weights (..., B, 36) on the digit, mean over images."""
    return ((weights * mask).sum(-1) / weights.sum(-1)).mean(-1)


for name, recorded in (("trained", maps), ("untrained", maps_of(untrained, images))):
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
# `explaining/methods/rollout.py`.


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
# ## Gradient rollout
#
# Rollout gives one map for an image, whichever class is asked for. Gradient rollout
# ([arXiv 2103.15679](https://arxiv.org/abs/2103.15679), Eq. 5 and 6) weights each attention map by
# the gradient of the logit $s_c$ of class $c$: a weight counts if a larger one would raise the
# logit. With $h$ heads and $\odot$ for the product of each pair of entries,
#
# $$ M_l = \frac1h \sum_{k=1}^{h} \max\big(0,\; \nabla_{\!A_{lk}} s_c \odot A_{lk}\big), \qquad
# R_l = R_{l-1} + M_l\, R_{l-1}, \qquad R_0 = I. $$
#
# A record with `gradients=True` keeps the maps in the graph of the logits, so that
# `torch.autograd.grad` finds their gradients. In the library:
# `explaining/methods/gradient_rollout.py`.


# %%
def gradient_rollout(model: vitkit.ViT, images: Tensor, classes: Tensor) -> Tensor:
    """Return the first row of R, without the class token, (B, N)."""
    record = vitkit.Record(attention=range(model.spec.depth), gradients=True)
    score = model(images, record=record).gather(1, classes[:, None]).sum()
    maps = list(record.attention.values())
    product = torch.eye(maps[0].shape[-1])
    for layer, gradient in zip(maps, torch.autograd.grad(score, maps), strict=True):
        product = product + (gradient * layer.detach()).relu().mean(1) @ product
    return product[:, 0, 1:]


some, classes = images[:40], predicted[:40]
ours = gradient_rollout(reader, some, classes)
of_library = (
    METHODS["gradient-rollout"]
    .compute(reader, some, classes=classes, gradients="plain")
    .flatten(1)
)
print(
    f"largest value {ours.max():.2f}, largest difference {(ours - of_library).abs().max():.0e}"
)

# %% [markdown]
# ## LibraGrad: gradient times input that adds up
#
# For a linear function $s = w \cdot x + b$, each input has an exact share $w_i x_i$, its gradient
# times its value, and the shares and $b$ add up to $s$. A ViT is not linear, and there the products
# add up to something else. LibraGrad ([arXiv 2411.16760](https://arxiv.org/abs/2411.16760)) makes
# use of the fact that each part of a ViT is some matrix times its input, plus a bias:
#
# | part | forward | constant in the backward pass |
# | --- | --- | --- |
# | attention | $A V$ | the weights $A$ |
# | LayerNorm | $(x - \mu) / \sigma$ | $1 / \sigma$ |
# | GELU | $x\, \Phi(x)$ | the gate $\Phi(x)$ |
#
# The forward pass does not change. In the backward pass these matrices count as constants. With
# them, the share of patch $i$ in the logit is
#
# $$ r_i = z_0^i \cdot \frac{\partial s_c}{\partial z_0^i}, \qquad
# \sum_i r_i + \sum_{b} b \cdot \frac{\partial s_c}{\partial b} = s_c, $$
#
# where the second sum is over all biases $b$. A share below zero speaks against the class. In the
# library: `explaining/balanced_gradients.py` has the backward passes, and
# `explaining/methods/libragrad.py` the shares.


# %%
def logits_of(tokens: Tensor) -> Tensor:
    """Return the logits from z_0 (B, T, D): the encoder, and Eq. 4."""
    for block in reader.blocks:
        tokens = block(tokens)
    return reader.head(reader.norm(tokens)[:, 0])


def gradient_times_input(tokens: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of each token (B, T), and the logits of the classes (B,)."""
    tokens = tokens.detach().requires_grad_()
    scores = logits_of(tokens).gather(1, classes[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(scores.sum(), tokens)
    return (gradient * tokens.detach()).sum(-1), scores.detach()


start = reader.embed(some).tokens
plain, scores = gradient_times_input(start, classes)
with BalancedGradients():
    balanced, _ = gradient_times_input(start, classes)
print("logit               ", *(f"{value:6.2f}" for value in scores[:6]))
print("sum, plain gradient ", *(f"{value:6.2f}" for value in plain.sum(1)[:6]))
print("sum, LibraGrad      ", *(f"{value:6.2f}" for value in balanced.sum(1)[:6]))
of_library = METHODS["libragrad"].compute(reader, some, classes=classes).flatten(1)
print(
    f"largest difference from the library: {(balanced[:, 1:] - of_library).abs().max():.0e}"
)

# %% [markdown]
# The plain products add up to almost nothing, because of LayerNorm. The output of a norm does not
# change when its input is scaled, so its gradient along the input is zero. LibraGrad's shares and
# the shares of the biases add up to the logit (exercise 4).
#
# ## Occlusion: ask the model
#
# All maps so far are computed from inner numbers. Occlusion asks the model itself: how far does the
# logit fall without patch $i$?
#
# $$ o_i = s_c(z_0) - s_c(z_0 \text{ without } z_0^i) $$
#
# Convolutional networks need a grey square in place of the patch, which is an odd image that may
# itself change the prediction. A ViT takes any number of tokens, so the token is dropped; the
# others keep their positions. The price is a forward pass for each patch. In the library:
# `explaining/methods/occlusion.py`, and `explaining/token_subset.py` for the dropping.


# %%
@torch.inference_mode()
def occlusion(images: Tensor, classes: Tensor) -> Tensor:
    """Return the fall of the logit without each patch, (B, N)."""
    tokens = reader.embed(images).tokens
    every = torch.arange(tokens.shape[1])

    def score(kept: Tensor) -> Tensor:
        return logits_of(tokens[:, kept]).gather(1, classes[:, None])[:, 0]

    return torch.stack(
        [score(every) - score(every[every != patch]) for patch in every[1:]], dim=1
    )


asked = occlusion(some, classes)
of_library = METHODS["occlusion"].compute(reader, some, classes=classes).flatten(1)
print(f"largest difference: {(asked - of_library).abs().max():.0e}")

# %% [markdown]
# ## All methods side by side
#
# The library's registry, `METHODS`, has these and five others; [its guide](../guides/explain.md)
# describes each. Here are their maps of the predicted digit, on the same 40 images. "Share" is the
# part of the positive values that lies on the digit's four patches. "First" says how often the
# patch with the largest value is one of the four. Gradient rollout and LeGrad are in their
# published forms here; by default the library computes both with LibraGrad's backward pass.

# %% mystnb={"figure": {"caption": "Four test images (left) and their maps by seven methods, each with its own scale: dark blue is low, yellow is high. Rollout, gradient rollout, LibraGrad and occlusion mark the digit. LeGrad often misses it on this model, and Grad-CAM is often empty: no patch raises the logit by its mean gradient."}}
compared = ("attention", "rollout", "gradient-rollout", "grad-cam", "legrad", "libragrad",
            "occlusion")  # fmt: skip


def published(method: str) -> dict[str, str]:
    """Return the options of the published form of a method."""
    return {"gradients": "plain"} if "gradients" in METHODS[method].options else {}


def maps_by(method: str, model: vitkit.ViT, images: Tensor, classes: Tensor) -> Tensor:
    """Return the maps of a method of the library, (B, N)."""
    chosen = METHODS[method]
    by_class = {"classes": classes} if chosen.by_class else {}
    return chosen.compute(model, images, **by_class, **published(method)).flatten(1)


digit = mask[:40]
found = {name: maps_by(name, reader, some, classes) for name in compared}
for name, values in found.items():
    positive = values.clamp(min=0)
    on_digit = ((positive * digit).sum(1) / positive.sum(1).clamp(min=1e-12)).mean()
    first = digit.gather(1, values.argmax(1, keepdim=True)).mean()
    print(f"{name:<17} share {on_digit:4.0%}   first {first:4.0%}")
squares, titles = [], []
for n in range(4):
    squares += [
        images[n, 0],
        *(values[n].unflatten(0, (6, 6)) for values in found.values()),
    ]
    titles += [
        "image" if n == 0 else "",
        *(name if n == 0 else "" for name in compared),
    ]
figure = grid_of(squares, titles, across=8, size=1.15)
for ax in figure.axes[::8]:
    ax.images[0].set_cmap("gray")

# %% [markdown]
# ## On a photograph
#
# The model takes every image size that is a multiple of its patch size, because its positions are
# resampled to another grid (chapter 8). Here it gets a photograph that it has never seen, nearly
# three times as high and wide as its training images, with a digit in it. It now has 256 patches,
# and 4 of them matter. `vitkit.explain` returns one map with everything that a reader needs to
# know about it, and `vitkit.plot_explanations` draws several.

# %% mystnb={"figure": {"caption": "The astronaut with a digit, and its maps by four methods. Grey is the input of the model, 128 x 128 pixels. A colour bar has the values of each map. All four have large values on the digit, but gradient rollout also marks other objects, and the last layer's attention is almost uniform: read its colour bar. The lines below each map have the method and the truth score, which the next section explains."}}
portrait = task.grey(data.astronaut(), 0.25)
large, _ = task.hide(
    test_digits[:100], [portrait], 128, torch.Generator().manual_seed(3)
)
larger = vitkit.adapt(checkpoint, image_size=128)
with torch.inference_mode():
    correct = larger.model(large).argmax(1) == test_labels[:100]
print(
    f"{tuple(large.shape[2:])} pixels: accuracy {correct.float().mean():.0%} on 100 digits"
)
shown_number = int(correct.nonzero()[0])
pixels = ((large[shown_number, 0] + 1) * 127.5).byte().numpy()
explanations = [
    vitkit.explain(larger, pixels, method=method, truth=True)
    for method in ("attention", "rollout", "gradient-rollout", "libragrad")
]
_ = vitkit.plot_explanations(explanations, across=3)

# %% [markdown]
# ## The truth score
#
# In this chapter the right region is known. For your own images it is not. But a claim can still be
# tested: if these patches decide, the probability of the class must fall when they are dropped, in
# the order of the map. The curve of the probability has a mean height, its area $a$. It is compared
# with the mean of 20 random orders, and with the order of occlusion:
#
# $$ \text{deletion} = \frac{a_\text{random} - a_\text{map}}{a_\text{random} - a_\text{occlusion}} $$
#
# 0 is as good as chance, 1 is as good as asking the model patch by patch; more is possible, because
# the order of occlusion is not the best one. *Insertion* adds the patches in the same order
# instead. *p* is the share of the 21 orders that do at least as well;
# the smallest possible value is 1/21 = 0.048. *SaCo* says whether the sizes of the values are
# right, not only their order. In the library: `explaining/truth/deletion.py` and
# `explaining/truth/magnitude.py`.


# %% mystnb={"figure": {"caption": "Probability of the class while patches are dropped, for one image. In the order of LibraGrad it falls at once: the first patches to go are those of the digit. In random order it falls slowly. LeGrad, on this model, is closer to random. The areas under these curves make the deletion score."}}
@torch.inference_mode()
def deletion_curve(
    image: Tensor, order: Tensor, number: int
) -> tuple[list[int], list[float]]:
    """Return how many patches were dropped at each of ten steps, and the probabilities."""
    tokens, count = reader.embed(image).tokens, len(order)
    kept_sizes = sorted(
        {max(1, round(count * step / 10)) for step in range(11)}, reverse=True
    )
    class_token, heights = torch.zeros(1, dtype=torch.long), []
    for size in kept_sizes:
        kept = torch.cat([class_token, order[count - size :].sort().values + 1])
        heights.append(logits_of(tokens[:, kept]).softmax(1)[0, number].item())
    return [count - size for size in kept_sizes], heights


def descending(values: Tensor) -> Tensor:
    """Return the numbers of the patches, the one with the largest value first."""
    return values.argsort(descending=True, stable=True)


chosen = 2
number = int(predicted[chosen])
orders = {name: descending(found[name][chosen]) for name in ("libragrad", "legrad")}
orders["random order"] = torch.randperm(36, generator=torch.Generator().manual_seed(2))
figure, ax = plt.subplots(figsize=(5, 2.8))
areas = {}
for name, order in orders.items():
    dropped, heights = deletion_curve(images[chosen : chosen + 1], order, number)
    areas[name] = (
        torch.trapezoid(torch.tensor(heights), torch.tensor(dropped)).item()
        / dropped[-1]
    )
    ax.plot(dropped, heights, label=f"{name}, area {areas[name]:.2f}")
ax.set(xlabel="patches dropped, of 36", ylabel=f"probability of {number}")
ax.legend(fontsize=8)
pixels = ((images[chosen, 0] + 1) * 127.5).round().byte().numpy()
score = vitkit.explain(checkpoint, pixels, method="libragrad").truth
print(f"area here {areas['libragrad']:.4f}, in the library {score.deletion_area:.4f}")
print(score.line)

# %% [markdown]
# One image proves little. The table has medians over 24 images, and two more tests:
#
# - **weights**: the upper half of the model gets random weights. A map that hardly changes says
#   little about the model ([arXiv 1810.03292](https://arxiv.org/abs/1810.03292)). The number is the
#   rank correlation of the maps before and after; below 0.5 is good.
# - **two digits**: 100 images have two digits of different classes. The map of the class of one of
#   them should have more on that digit than on the other. Chance is 50 %.

# %%
few = [((image[0] + 1) * 127.5).round().byte().numpy() for image in images[:24]]
reports = {
    name: vitkit.truth_report(
        checkpoint, few, method=name, parts=("weights", "fit"), **published(name)
    )
    for name in compared
}
pairs, first_class, corners = task.two_digits(
    test_digits, test_labels, photographs, count=100
)
for name, report in reports.items():
    values = maps_by(name, reader, pairs, first_class).clamp(min=0)
    right, wrong = ((values * corner).sum(1) for corner in corners)
    print(f"{name:<17} deletion {report.deletion:5.2f}  insertion {report.insertion:5.2f}  "
          f"p {report.p:.4f}  weights {report.weights_matter:5.2f}  "
          f"two digits {(right > wrong).float().mean():4.0%}")  # fmt: skip
print(reports["libragrad"].lines[-1])

# %% [markdown]
# A picture alone does not show which method is right. Read the table column by column:
#
# - **Rollout fails two of the three tests.** Its deletion score is among the best. But its map
#   changes little with random upper layers, and with two digits it is the same map for both
#   classes. It finds the digit because the class token reads little else here. It knows nothing
#   about the class.
# - **Grad-CAM and LeGrad** have deletion scores near chance on this model. On others they do better
#   ([the guide](../guides/explain.md) has figures): measure a method on your own model.
# - **LibraGrad** passes all columns at the price of one backward pass. **Occlusion** is the question
#   itself, at the price of a forward pass for each patch.
# - The last line tests the test. This model never saw images with patches missing, and loses
#   accuracy when random patches are dropped. The more it loses, the weaker is the score. Training
#   with `--spec.patch-dropout 0.25` mends that.
#
# On the command line, `vitkit explain RUN photos --truth` prints these numbers for any model and
# writes them to `truth.json`; `vitkit.truth_report` returns them in Python.
#
# ## What a map cannot show
#
# Attention maps show from which tokens a head reads in a layer. They do not show what it reads: a
# weight multiplies a value, and the value may be near zero or may be cancelled by the next matrix.
# Other maps can give the same prediction
# ([arXiv 1902.10186](https://arxiv.org/abs/1902.10186)). And they show nothing of the MLPs, which
# have most of the parameters.
#
# Methods that pass the tests have limits, too. Here the four patches with the largest values are
# covered with the mean of the image, or dropped, and the correct predictions are counted; rollout
# of the untrained model is among the maps. The last two lines ask whether a map warns of a mistake.


# %%
@torch.inference_mode()
def accuracy_without(order: Tensor) -> float:
    """Return the accuracy when the first four patches of each order (B, N) are dropped."""
    tokens = reader.embed(images).tokens
    kept = order[:, 4:].sort(dim=1).values + 1
    kept = torch.cat([torch.zeros(len(kept), 1, dtype=torch.long), kept], dim=1)
    left = tokens.gather(1, kept[..., None].expand(-1, -1, tokens.shape[-1]))
    return (logits_of(left).argmax(1) == test_labels).float().mean().item()


def digit_accuracy(images: Tensor) -> float:
    with torch.inference_mode():
        return (reader(images).argmax(1) == test_labels).float().mean().item()


libragrad = maps_by("libragrad", reader, images, predicted)
ranked = {"random patches": torch.rand(len(images), 36), **class_token_maps,
          "LibraGrad": libragrad, "the digit": mask}  # fmt: skip
print(f"{'nothing':<26} {digit_accuracy(images):6.1%}")
for name, weights in ranked.items():
    covered = digit_accuracy(task.covered(images, weights))
    dropped = accuracy_without(descending(weights))
    print(f"{name:<26} covered {covered:6.1%}   dropped {dropped:6.1%}")
on_digit = (libragrad.clamp(min=0) * mask).sum(1) / libragrad.clamp(min=0).sum(1)
is_right = predicted == test_labels
print(f"share of LibraGrad on the digit: right predictions {on_digit[is_right].mean():.0%}, "
      f"wrong ones {on_digit[~is_right].mean():.0%}")  # fmt: skip

# %% [markdown]
# - **The untrained model is a warning.** Its rollout is almost uniform, but the patches that it
#   ranks first matter far more than random patches. It has learned nothing; but digits are the
#   brightest objects in these images, and random matrices respond to bright patches. A map can pass
#   such a test for a reason that has nothing to do with training.
# - **A clean map is no proof of a sound model.** When the model is wrong, its map lies on the digit
#   almost as cleanly as when it is right: it looked at the right place and read the wrong digit. In
#   a controlled study such maps did not reveal shortcuts that the reader did not know of
#   ([arXiv 2212.04629](https://arxiv.org/abs/2212.04629)).
#   [This guide](../guides/right_thing.md) plants a shortcut and shows what finds it.
#
# ## Artefacts and registers
#
# Large models without registers write very high norms into a few background patches, and attend to
# them; their maps then have spots where there is nothing
# ([arXiv 2309.16588](https://arxiv.org/abs/2309.16588)). `vitkit.find_artefacts` counts patches
# with a norm above the median + 4 median absolute deviations.

# %%
print(vitkit.find_artefacts(reader, images))

# %% [markdown]
# The largest norm is hardly above the others: these patches are the end of a smooth distribution,
# and no artefacts. So an artefact is planted, in a copy of the model. One neuron of an MLP gets new
# weights: it fires on a few patches and writes a huge vector there. That is how artefacts arise in
# large models ([arXiv 2506.08010](https://arxiv.org/abs/2506.08010)). The cure is to find such
# neurons and to move what they write to an extra token, a *test-time register*. In the library:
# `explaining/model/registers.py`. A norm of 60, twice the usual one, is the limit here.

# %%
ill = copy.deepcopy(reader)
inputs: list[Tensor] = []
handle = ill.blocks[0].norm2.register_forward_hook(
    lambda module, args, out: inputs.append(out)
)
with torch.no_grad():
    ill(images)
    handle.remove()
    direction = torch.randn(64, generator=torch.Generator().manual_seed(0))
    limit = (inputs[0][:, 1:] @ direction).quantile(0.995)  # one patch of 200 fires
    mlp = ill.blocks[0].mlp
    mlp.fc1.weight[7], mlp.fc1.bias[7] = 5 * direction, -5 * limit
    mlp.fc2.weight[:, 7] = 20 * torch.randn(
        64, generator=torch.Generator().manual_seed(1)
    )
neurons = vitkit.find_register_neurons(ill, images, threshold=60.0)
print("found:", *neurons)
print(vitkit.measure_registers(ill, images, neurons, threshold=60.0))

# %% [markdown]
# The neuron that was planted, block 0 neuron 7, is found among 384, and the norms leave most of the
# patches. Patches on which the neuron fires only weakly, less than half of its mean, keep theirs.
# Whether registers improve the maps of a published model is not shown here: that needs a published
# model.
#
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
# In the library: `explaining/model/depth_statistics.py`. In the paper's models some heads of the
# first layers have a short distance, others a long one. Little of this can be expected here: the
# class token finds the digit alone, and the patches hardly need each other.


# %% mystnb={"figure": {"caption": "Attention distance (left) and entropy (right) of every head, trained and untrained; the dotted lines are uniform attention. All distances lie within a few pixels of the line: patches attend to patches at any distance. Training lowers the entropy of layer 0 most: its heads have become selective."}}
def distance(maps: Tensor) -> Tensor:
    """Return d of every layer and head, (L, h), mean over images, without the class token."""
    centres = task.PATCH * torch.cartesian_prod(torch.arange(6.0), torch.arange(6.0))
    among_patches = maps[..., 1:, 1:] / maps[..., 1:, 1:].sum(-1, keepdim=True)
    return (among_patches * torch.cdist(centres, centres)).sum(-1).mean(-1).mean(1)


def entropy(maps: Tensor) -> Tensor:
    """Return H of every layer and head, (L, h), mean over images."""
    return torch.special.entr(maps).sum(-1).mean(-1).mean(1)


even = torch.full((1, 1, 1, 37, 37), 1 / 37)
maps_untrained = maps_of(untrained, images)
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
# left). In the library: `explaining/model/filters.py`.


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

# %% mystnb={"figure": {"caption": "The sheet of the model: filters, similarity of positions, attention distance and entropy of every head, similarity of the class token with its last state, and norms of the patch tokens. The class token changes most in the first block, where it finds the digit."}}
shown_images = [
    ((image[0] + 1) * 127.5).round().byte().numpy() for image in images[:128]
]
learned = vitkit.explain_model(checkpoint, shown_images, name="hidden digits")
print(*learned.lines(), sep="\n")
of_library = torch.from_numpy(learned.depth.distance).float()
difference = (distance(maps_of(reader, images[:128])) - of_library).abs().max()
print(f"attention distance: largest difference {difference:.3f} pixels")
_ = learned.plot()

# %% [markdown]
# ## What you know now
#
# - `Record` keeps the attention maps of a forward pass, and the fused kernel stays on.
# - Attention maps show what a layer reads, not what the prediction depends on. Rollout multiplies
#   the layers; gradient methods weigh them by the prediction; occlusion changes the image itself.
# - A map is tested by deleting what it marks first, and by comparing it with a model whose weights
#   are random. A map that passes neither is only a picture.
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
# **3. Predict, then run.** Does the prediction need the attention maps? The attention function of a layer can be
# replaced: `attn.attend` is a function of queries, keys and values. Replace it by one that gives
# every token the plain mean of all values, in one layer at a time. In which layer is the accuracy
# lost, and in which does it hardly change?


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def plain_mean(q, k, v, mask=None, dropout=0.0):
    return v.mean(dim=2, keepdim=True).expand_as(v)


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
# **4. Build.** LibraGrad is complete: the shares of all tokens of $z_0$ and of all biases add up to the
# logit. Show it for one image. Which biases have no share?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
biases = {
    name: bias
    for name, bias in reader.named_parameters()
    if name.endswith("bias")
    and not name.startswith("patch_embed")  # its bias is part of z_0
}
tokens = reader.embed(images[:1]).tokens.detach().requires_grad_()
with BalancedGradients():
    score = logits_of(tokens)[0, predicted[0]]
of_tokens, *of_biases = torch.autograd.grad(score, [tokens, *biases.values()])
total = (of_tokens * tokens).sum()
for bias, gradient in zip(biases.values(), of_biases, strict=True):
    total = total + (gradient * bias).sum()
torch.testing.assert_close(total, score, atol=1e-4, rtol=1e-4)
# queries and keys only make the weights, which count as constants: their biases have no share
of_qkv = dict(zip(biases, of_biases, strict=True))["blocks.0.attn.qkv.bias"]
assert of_qkv[:128].abs().max() == 0 < of_qkv[128:].abs().max()

# %% [markdown]
# **5. Build.** Why a 4 and not a 9? LibraGrad's backward pass is linear in the score. Use this to get a
# map of the difference of two logits from two maps, and check it against the gradient of the
# difference itself. Can gradient rollout do the same?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
fours, nines = torch.full((40,), 4), torch.full((40,), 9)
contrast = maps_by("libragrad", reader, some, fours) - maps_by(
    "libragrad", reader, some, nines
)
tokens = reader.embed(some).tokens.detach().requires_grad_()
with BalancedGradients():
    both = logits_of(tokens)
(gradient,) = torch.autograd.grad((both[:, 4] - both[:, 9]).sum(), tokens)
torch.testing.assert_close(
    (gradient * tokens).sum(-1)[:, 1:], contrast, atol=1e-4, rtol=1e-4
)
# gradient rollout cannot: max(0, x) of a difference is not the difference of the max(0, x)
assert (gradient_rollout(reader, some, fours) >= 0).all()

# %% tags=["remove-cell"]
folder.cleanup()

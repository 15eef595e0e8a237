# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 7b. Can a map be trusted?
#
# A map that looks convincing may still be wrong. This chapter builds three more methods, gradient
# rollout, LibraGrad and occlusion, each in a few lines with a check that the library gives equal
# numbers. Then it measures all methods: on the task of [chapter 7](07_looking_inside.py), in which
# the right region is known, and in a way that needs no such knowledge.
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** how maps of one class are computed, how a map is tested, and what no map can show
# - **You need** [chapter 7](07_looking_inside.py)
# - **Reading** about 25 minutes
# :::

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports", "code_prompt_hide": "Hide the imports"}
import copy
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import hidden_digits as task
import torch
from drawing import grid_of, print_wrapped
from matplotlib import pyplot as plt
from skimage import data
from torch import Tensor

import vitkit
from vitkit.explaining.methods import METHODS
from vitkit.explaining.methods.gradients import BalancedGradients

sys.path.append("../../examples/research")
checks = import_module("sanity_checks_of_maps")
registers = import_module("test_time_registers")
_ = torch.manual_seed(0)

# %% [markdown]
# ## The model of chapter 7
#
# Digits are hidden in photographs of 48 x 48 pixels, which are 36 patches. Each digit covers four
# patches, and these are known. The model is trained as in chapter 7, with the same random numbers,
# and keeps the ten rows of its head that belong to the digits.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the training", "code_prompt_hide": "Hide the training"}
sources = (data.coffee(), data.rocket(), data.chelsea(), data.camera())
photographs = [task.grey(photograph, 0.4) for photograph in sources]
digits, labels = task.digits_of("train")
test_digits, test_labels = task.digits_of("test")
images, positions = task.hide(
    test_digits, photographs, task.SIDE, torch.Generator().manual_seed(1)
)
mask = task.digit_mask(positions)  # (B, 36), 1 on the four patches of the digit
model, untrained = task.fresh_model(), task.fresh_model().eval()
task.train(model, digits, labels, photographs, steps=240, lr=3e-3)
folder = tempfile.TemporaryDirectory()
checkpoint = task.digits_only(model.eval(), Path(folder.name))
reader = checkpoint.model.eval()
with torch.no_grad():
    predicted = reader(images).argmax(1)
right = (predicted == test_labels).float().mean()
print(f"accuracy of the digit: {right:.1%} of {len(images)} test images")

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the maps of chapter 7", "code_prompt_hide": "Hide the maps of chapter 7"}
maps = task.maps_of(model, images)
class_token_maps = {
    "layer 0, mean of heads": maps[0, :, :, 0, 1:].mean(1),
    "last layer, mean of heads": maps[-1, :, :, 0, 1:].mean(1),
    "rollout": METHODS["rollout"].compute(reader, images).flatten(1),
    "rollout, untrained model": METHODS["rollout"]
    .compute(untrained, images)
    .flatten(1),
}

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
# `explaining/methods/gradients.py`.


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
    f"largest value {ours.max():.2f}, "
    f"largest difference {(ours - of_library).abs().max():.0e}"
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
# library: `explaining/methods/gradients.py` has the backward passes and the shares.


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
    "largest difference from the library: "
    f"{(balanced[:, 1:] - of_library).abs().max():.0e}"
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
# `explaining/methods/occlusion.py`.


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
compared = ("attention", "rollout", "gradient-rollout", "grad-cam",
            "legrad", "libragrad",
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

# %% mystnb={"figure": {"caption": "The astronaut with a digit, and its maps by four methods. Grey is the input of the model, 128 x 128 pixels. A colour bar has the values of each map. Maps are drawn with their own scales, so the colour bars must be read, too. The lines below each map have the method and its faithfulness, which the next section explains."}}
portrait = task.grey(data.astronaut(), 0.25)
large, _ = task.hide(
    test_digits[:100], [portrait], 128, torch.Generator().manual_seed(3)
)
larger = vitkit.adapt(checkpoint, image_size=128)
with torch.inference_mode():
    correct = larger.model(large).argmax(1) == test_labels[:100]
print(
    f"{tuple(large.shape[2:])} pixels: "
    f"accuracy {correct.float().mean():.0%} on 100 digits"
)
shown_number = int(correct.nonzero()[0])
pixels = ((large[shown_number, 0] + 1) * 127.5).byte().numpy()
explanations = [
    vitkit.explain(larger, pixels, method=method, faithfulness=True)
    for method in ("attention", "rollout", "gradient-rollout", "libragrad")
]
_ = vitkit.plot_explanations(explanations, across=3)

# %% [markdown]
# ## Faithfulness
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
# the smallest possible value is 1/21 = 0.048. In the library: `explaining/faithfulness.py`.


# %% mystnb={"figure": {"caption": "Probability of the class while patches are dropped, for one image. In the order of LibraGrad it falls at once: the first patches to go are those of the digit. In random order it falls slowly. LeGrad, on this model, is closer to random. The areas under these curves make the deletion score."}}
@torch.inference_mode()
def deletion_curve(
    image: Tensor, order: Tensor, number: int
) -> tuple[list[int], list[float]]:
    """Return how many patches are dropped at ten steps, and the probabilities."""
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
score = vitkit.explain(checkpoint, pixels, method="libragrad").faithfulness
print(f"area here {areas['libragrad']:.4f}, in the library {score.deletion_area:.4f}")
print(score.line)

# %% [markdown]
# One image proves little. The table has medians over 24 images, and two more tests:
#
# - **weights**: the upper half of the model gets random weights. A map that hardly changes says
#   little about the model ([arXiv 1810.03292](https://arxiv.org/abs/1810.03292)). The number is the
#   rank correlation of the maps before and after; below 0.5 is good. In
#   `examples/research/sanity_checks_of_maps.py`.
# - **two digits**: 100 images have two digits of different classes. The map of the class of one of
#   them should have more on that digit than on the other. Chance is 50 %.

# %%
few = [((image[0] + 1) * 127.5).round().byte().numpy() for image in images[:24]]
reports = {
    name: vitkit.faithfulness_report(checkpoint, few, method=name, **published(name))
    for name in compared
}
pairs, first_class, corners = task.two_digits(
    test_digits, test_labels, photographs, count=100
)
for name, report in reports.items():
    maps_of_method = checks.maps_of(METHODS[name], **published(name))
    correlation = checks.weights_matter(
        maps_of_method, reader, images[:24], predicted[:24]
    )
    values = maps_by(name, reader, pairs, first_class).clamp(min=0)
    right, wrong = ((values * corner).sum(1) for corner in corners)
    print(f"{name:<16} deletion {report.deletion:5.2f}  "
          f"insertion {report.insertion:5.2f}  "
          f"p {report.p:.3f}  weights {correlation:5.2f}  "
          f"two digits {(right > wrong).float().mean():.0%}")  # fmt: skip
shares = checks.model_fit(reader, images[:24], predicted[:24])
print("same prediction without 0, 25 and 50 % of the patches:",
      ", ".join(f"{share:.0%}" for share in shares))  # fmt: skip

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
# - The last line tests the test. This model never saw images with patches missing, and changes
#   predictions when random patches are dropped. The more it changes, the weaker is the test. Training
#   with `--spec.patch-dropout 0.25` mends that.
#
# On the command line, `vitkit explain RUN photos --faithfulness` prints deletion, insertion and p for
# any model and writes them to `faithfulness.json`; `vitkit.faithfulness_report` returns them in Python.
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
    """Return the accuracy without the first four patches of each order (B, N)."""
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
print("share of LibraGrad on the digit: "
      f"right predictions {on_digit[is_right].mean():.0%}, "
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
print_wrapped(str(vitkit.find_artefacts(reader, images)))

# %% [markdown]
# The largest norm is hardly above the others: these patches are the end of a smooth distribution,
# and no artefacts. So an artefact is planted, in a copy of the model. One neuron of an MLP gets new
# weights: it fires on a few patches and writes a huge vector there. That is how artefacts arise in
# large models ([arXiv 2506.08010](https://arxiv.org/abs/2506.08010)). The cure is to find such
# neurons and to move what they write to an extra token, a *test-time register*, as in
# `examples/research/test_time_registers.py`. A norm of 60, twice the usual one, is the limit here.

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
neurons = registers.find_register_neurons(ill, images, threshold=60.0)
print("found:", *neurons)
print_wrapped(registers.effect_of_registers(ill, images, neurons, threshold=60.0))

# %% [markdown]
# The neuron that was planted, block 0 neuron 7, is found among 384, and the norms leave most of the
# patches. Patches on which the neuron fires only weakly, less than half of its mean, keep theirs.
# Whether registers improve the maps of a published model is not shown here: that needs a published
# model.
#
# ## What you know now
#
# - Gradient rollout, LibraGrad and occlusion give a map for one class. Rollout and attention give the
#   same map for every class.
# - A map is tested by dropping what it marks first, and by comparing it with a model whose weights
#   are random. A map that passes neither is only a picture.
# - Even a good map does not say whether the model is right, nor what it read at the marked place.
#
# ## Exercises
#
# **1. Build.** LibraGrad is complete: the shares of all tokens of $z_0$ and of all biases add up to the
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
# queries and keys only make the weights, which count as constants:
# their biases have no share
of_qkv = dict(zip(biases, of_biases, strict=True))["blocks.0.attn.qkv.bias"]
assert of_qkv[:128].abs().max() == 0 < of_qkv[128:].abs().max()

# %% [markdown]
# **2. Build.** Why a 4 and not a 9? LibraGrad's backward pass is linear in the score. Use this to get a
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
# gradient rollout cannot: max(0, x - y) is not max(0, x) - max(0, y)
assert (gradient_rollout(reader, some, fours) >= 0).all()

# %% [markdown]
# **3. Show.** LibraGrad changes only the backward pass. Show that the logits stay the same, and that
# the gradient of the patches does not.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
tokens = reader.embed(some).tokens.detach().requires_grad_()
usual = logits_of(tokens)
(of_usual,) = torch.autograd.grad(usual.sum(), tokens)
with BalancedGradients():
    balanced_logits = logits_of(tokens)
(of_balanced,) = torch.autograd.grad(balanced_logits.sum(), tokens)
torch.testing.assert_close(balanced_logits, usual, atol=1e-4, rtol=1e-4)
assert not torch.allclose(of_balanced, of_usual, atol=1e-3)

# %% [markdown]
# **4. Predict, then run.** Turn the order of LibraGrad round, so that the patches of the digit are
# dropped last. Is the area under the curve larger or smaller than that of a random order?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
worst = orders["libragrad"].flip(0)
dropped, heights = deletion_curve(images[chosen : chosen + 1], worst, number)
area = (
    torch.trapezoid(torch.tensor(heights), torch.tensor(dropped)).item() / dropped[-1]
)
print(f"reversed {area:.2f}, random {areas['random order']:.2f}")
assert area > areas["random order"] > areas["libragrad"]

# %% tags=["remove-cell"]
folder.cleanup()

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 12. Bugs of notebook E, and what they cost
#
# Notebook E, "Lab notebook", has three parts: the original Transformer, a ViT on MNIST (which
# follows [a published page](https://brianpulfer.ch/blog/vit)), and distillation. Its bugs are shown
# like [those of the other notebooks](11_bugs.py): each in a few lines, with its effect and vitkit's
# solution. [Chapter 5](05_training.py#mnist-the-notebooks-model) compares the whole MNIST model with
# a corrected one, and [chapter 14](14_bug_costs.py) measures each bug by itself.
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** which mistakes a Transformer and a ViT can have that still print 91 %
# - **You need** chapters [1](01_patches.py) to [5](05_training.py), and for the first part chapter
#   [10](10_transformer.py)
# - **Reading** about 20 minutes; the table is enough to look something up
# :::
#
# "Error" means that the program stops, "silent" that it runs.
#
# | bug | symptom | severity | switch in chapter 14 |
# | --- | --- | --- | --- |
# | [an exponent that is always 0](#an-exponent-that-is-always-0) | two different columns in the table | silent, costs | `exponent_zero` |
# | [sines in the range 0 to 1](#sines-in-the-range-0-to-1) | a wrong reason in the text | wrong text | |
# | [no masks](#no-masks) | the decoder sees its answers | silent, breaks | |
# | [softmax at the end of the decoder](#softmax-at-the-end-of-the-decoder) | a floor below the loss | silent, costs | `double_softmax` |
# | [an activation that is ignored](#an-activation-that-is-ignored) | none | silent | `relu` |
# | [queries and keys of different widths](#queries-and-keys-of-different-widths) | shapes do not fit | error | |
# | [`src +=`](#src) | the second call differs | silent | |
# | [defaults that differ](#defaults-that-differ) | another number of parameters | silent | |
# | [`reshape` for patches](#reshape-for-patches) | none of the 49 is a square | silent | `reshape` |
# | [a patch of H x C / P](#a-patch-of-h-x-c-p) | wrong with three channels | wrong text | |
# | [a class token by `rand`](#a-class-token-by-rand) | none | silent | `uniform_class_token` |
# | [a class token added in a loop](#a-class-token-added-in-a-loop) | slow | slow | |
# | [heads that see their own slice](#heads-that-see-their-own-slice) | too few parameters | silent | `sliced_heads` |
# | [heads in a Python list](#heads-in-a-python-list) | too few parameters; fails on a GPU | silent | `heads_in_a_list` |
# | [an MLP of one layer](#an-mlp-of-one-layer) | too few parameters | silent | `one_layer_mlp` |
# | [a norm over tokens and width together](#a-norm-over-tokens-and-width-together) | only one number of tokens runs | silent | `joint_norm` |
# | [no norm before the head](#no-norm-before-the-head) | logits grow with the tokens | silent | `no_final_norm` |
# | [softmax before the loss](#softmax-before-the-loss) | the loss stays above 1.461 | silent, costs | `double_softmax` |
# | [a loss that is divided twice](#a-loss-that-is-divided-twice) | the first loss is not ln 10 | silent; costs with SGD | `loss_divided` |
# | [attention computed twice](#attention-computed-twice) | twice the work | slow | |
# | [evaluation in training mode](#evaluation-in-training-mode) | two evaluations differ | silent, costs | `no_eval` |
# | [width and height swapped](#width-and-height-swapped) | none with square images | silent | |
# | [positions in a loop](#positions-in-a-loop) | slow | slow | |
# | [loops over images and heads](#loops-over-images-and-heads) | slow | slow | |
# | [a global `device`](#a-global-device) | "cuda does not work": the kernel dies | error | |
# | [two wrong names](#two-wrong-names) | none | wrong text | |
# | [a teacher without `eval()`](#a-teacher-that-is-never-put-in-eval) | the teacher changes | silent | |
# | [a token that is not trained](#a-token-that-is-not-trained) | the token keeps its start | silent | |

# %%
import math
import time
from collections.abc import Callable

import torch
from matplotlib import pyplot as plt
from print_error import print_error
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from vitkit.models.embedding import patchify, sincos_1d

_ = torch.manual_seed(0)

# %% [markdown]
# ## The original Transformer
#
# ### An exponent that is always 0
# `dim // dim_model` is 0 for every column, so all waves are $\sin n$ and $\cos n$. Then positions
# whose distance is almost a multiple of $2\pi$ have almost the same vector: 44 is almost
# $7 \cdot 2\pi$. The table is also created on the CPU, whatever the device of the model.
# `sincos_1d` computes the correct formula, and the model moves the table to the device of the
# tokens.

# %%
exponents = torch.arange(0, 128, 2) // 128
angles = torch.arange(196.0)[:, None] * 10000.0 ** -exponents.float()
mistaken = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
tables = {"dim // dim_model": mistaken, "sincos_1d": sincos_1d(196, 128)}
for name, table in tables.items():
    print(f"{name}: {len(table.T.unique(dim=0))} different columns of 128;",
          "positions 0 and 44 differ by at most "
          f"{(table[0] - table[44]).abs().max():.3f}")  # fmt: skip
print_error(lambda: torch.zeros(196, 128, device="meta") + mistaken)

# %% mystnb={"figure": {"caption": "Similarity of position 0 to the following positions. With the correct formula, the similarity falls and stays well below that of a position to itself. With the mistaken exponent it is a cosine, and position 44 is not distinguishable from position 0."}}
figure, ax = plt.subplots(figsize=(5, 2.6))
for name, table in tables.items():
    ax.plot(table[:100] @ table[0] / 64, label=name)
ax.set(xlabel="position", ylabel="similarity to position 0", ylim=(-1.1, 1.7))
_ = ax.legend(loc="upper right", ncol=2)

# %% [markdown]
# ### Sines in the range 0 to 1
# The text says that the sines lie in the range [0, 1], and that this is why they work for sequences
# that are longer than those of the training. Sines lie in [-1, 1]; and a bounded range is no reason,
# as $n / T$ is bounded, too. The reason that the Transformer paper gives is another one: to go $k$
# positions further is the same rotation at each position $n$. Whether a trained model uses it is
# an empirical question.

# %%
table = sincos_1d(400, 128)
print(f"range {table.min():.2f} to {table.max():.2f}")
waves = torch.view_as_complex(table.unflatten(1, (-1, 2)).contiguous())  # sine, cosine
turns = [waves[n + 7] / waves[n] for n in (0, 100, 392)]  # 7 positions further
print(f"the rotation differs by at most {(turns[0] - turns[2]).abs().max():.0e}")

# %% [markdown]
# ### No masks
# A decoder without a causal mask sees the tokens that it must predict: another last token changes
# the first output. Without a padding mask, the model attends to padding. `Transformer` is always
# causal and takes both padding masks ([chapter
# 10](10_transformer.py#what-goes-wrong-without-a-causal-mask)).

# %%
source, target = torch.rand(1, 5, 32), torch.rand(1, 4, 32)
other = torch.cat([target[:, :3], torch.rand(1, 1, 32)], dim=1)  # another last token
ours = vitkit.Transformer(32, 4, encoder_depth=1, decoder_depth=1, mlp_width=64).eval()
theirs = nn.Transformer(32, 4, 1, 1, 64, batch_first=True).eval()  # called with no mask
with torch.no_grad():
    for name, model in (("no mask", theirs), ("vitkit", ours)):
        change = (model(source, target) - model(source, other))[:, 0].abs().max()
        print(f"{name}: another last token changes the first output by {change:.0e}")
    padded, real = F.pad(source, (0, 0, 0, 3)), torch.arange(8)[None] < 5
    unmasked = (theirs(padded, target) - theirs(source, target)).abs().max()
    masked = (ours(padded, target, source_mask=real) - ours(source, target)).abs().max()
print(
    "three padding tokens change the outputs: "
    f"no mask {unmasked:.0e}, vitkit {masked:.0e}"
)

# %% [markdown]
# ### Softmax at the end of the decoder
# Cross-entropy includes the softmax. If its input is probabilities, its lowest possible value is
# not 0: for perfect predictions among $V$ words it is $\ln(e + V - 1) - 1$, at most 1 less than for
# uniform guessing. vitkit's decoder returns logits.

# %%
for vocabulary in (10, 512):
    perfect = F.one_hot(torch.arange(vocabulary), vocabulary).float()
    floor = F.cross_entropy(perfect, torch.arange(vocabulary))
    print(
        f"{vocabulary} words: perfect {floor:.3f}, "
        f"uniform guessing {math.log(vocabulary):.3f}"
    )

# %% [markdown]
# ### An activation that is ignored
# The class takes the argument, but its code uses ReLU. In vitkit every name is a different module,
# and an unknown name is an error.


# %%
class AlwaysReLU(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = nn.ReLU()


x = torch.linspace(-2, 2, 9)
gelu, relu = (AlwaysReLU(name).activation(x) for name in ("gelu", "relu"))
print("notebook E: gelu equals relu:", torch.equal(gelu, relu))
gelu, relu = (vitkit.MLP.activations[name]()(x) for name in ("gelu", "relu"))
print("vitkit: gelu equals relu:", torch.equal(gelu, relu))
print_error(lambda: vitkit.Transformer(32, 4, activation="relo"))

# %% [markdown]
# ### Queries and keys of different widths
# `dim_q` and `dim_k` are two arguments, but the scalar product needs equal widths. In vitkit
# queries and keys are first projected to the same head width; values may have another.

# %%
q, k, v = torch.rand(5, 32), torch.rand(7, 48), torch.rand(7, 10)
print_error(lambda: q @ k.T)
to_q, to_k = nn.Linear(32, 16), nn.Linear(48, 16)
print(tuple(vitkit.scaled_dot_product_attention(to_q(q), to_k(k), v).shape))

# %% [markdown]
# ### `src +=`
# The positions are added to the caller's own tensor, so the second call gets other numbers. vitkit
# changes no input in place.


# %%
def careless_forward(src: torch.Tensor) -> torch.Tensor:
    src += 1.0
    return src


src, copy = torch.zeros(3), source.clone()
careless_forward(src), careless_forward(src)
ours(source, target)
print("src after two calls:", src.tolist())
print("vitkit leaves the source unchanged:", torch.equal(source, copy))

# %% [markdown]
# ### Defaults that differ
# One class has 6 heads by default, another has 8. A model with 6 heads of 85 is a different model.
# vitkit has one default, and the head width can be set.

# %%
with torch.device("meta"):
    for heads in ({"num_heads": 8}, {"num_heads": 6, "head_width": 85}):
        model = vitkit.Transformer(512, final_norm=False, **heads)
        print(heads, f"{sum(p.numel() for p in model.parameters()):,}")

# %% [markdown]
# ## A ViT on MNIST
#
# ### `reshape` for patches
# `reshape` makes strips of 16 consecutive pixels instead of squares of 4 x 4: none of the 49 is a patch
# ([chapter 1](01_patches.py#why-reshape-does-not-cut-patches)). `patchify` cuts squares.

# %%
rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
digit = torch.stack([rows, columns])[
    :, None
]  # two images: the row and the column of each pixel
for name, cut in (
    ("reshape", digit.reshape(2, 49, 16)),
    ("patchify", patchify(digit, (4, 4))),
):
    height, width = (cut.amax(-1) - cut.amin(-1) + 1).int()
    squares = ((height == 4) & (width == 4)).sum()
    print(f"{name}: {squares} of 49 are 4 x 4; the widest spans {width.max()} columns")

# %% [markdown]
# ### A patch of H x C / P
# With P patches per side, the text gives the side of a patch as $H C / P$. For one channel this is
# right; for three, a side would be three times too long. A patch has $(H / P)(W / P)$ pixels of $C$
# values each.

# %%
H, C, P = 32, 3, 8
print(f"the text: sides of {H * C // P}, {(H * C // P) ** 2} values;", end=" ")
print("vitkit:", tuple(patchify(torch.rand(1, C, H, H), (H // P, H // P)).shape))

# %% [markdown]
# ### A class token by `rand`
# `torch.rand` draws from 0 to 1, so all numbers are positive. Next to patches that start near 0, the
# class token starts as an outlier with a mean of 0.5. It is trained, so this costs little.

# %%
print(f"rand: mean {torch.rand(10_000).mean():.2f};", end=" ")
token = vitkit.create_model("vit_cifar_patch4_32", num_classes=10).cls_token
print(f"vitkit: mean {token.mean():.4f}, largest {token.abs().max():.3f}")

# %% [markdown]
# ### A class token added in a loop
# The class token is put before the patches of one image after the other. The notebook adds that
# (N, 49, 8) to (N, 50, 8) "is probably sub-optimal". It is, because of the loop: `expand` and one
# `cat` do the same for the whole batch. The copy that `cat` makes is small beside one block, and a
# model that averages its patches needs no class token at all ([chapter
# 4](04_vit.py#inputs-and-outputs)).

# %%
token, patches = torch.rand(1, 8), torch.rand(256, 49, 8)


def looped() -> torch.Tensor:
    return torch.stack([torch.vstack((token, image)) for image in patches])


def at_once() -> torch.Tensor:
    return torch.cat([token.expand(len(patches), 1, -1), patches], dim=1)


def milliseconds(function: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


assert torch.equal(looped(), at_once())
ratio = milliseconds(looped) / milliseconds(at_once)
print(f"{tuple(at_once().shape)}, the loop takes {ratio:.0f} times as long")

# %% [markdown]
# ### Heads that see their own slice
# Each head reads only its own slice of the token, and no matrix combines the heads afterwards. So
# the first half of the output never depends on the second half of the tokens. In vitkit each head
# reads the whole token, and $U_{msa}$ combines the heads.


# %%
class Sliced(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.mappings = [
            nn.Linear(width // heads, 3 * (width // heads)) for _ in range(heads)
        ]

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        parts = zip(self.mappings, z.chunk(len(self.mappings), dim=-1), strict=True)
        qkv = [mapping(part).chunk(3, dim=-1) for mapping, part in parts]
        return torch.cat(
            [vitkit.scaled_dot_product_attention(q, k, v) for q, k, v in qkv], dim=-1
        )


sliced, z = Sliced(20, 2), torch.rand(1, 50, 20)
other = torch.cat([z[..., :10], torch.rand(1, 50, 10)], dim=-1)
for name, msa in (("sliced", sliced), ("vitkit", vitkit.MultiHeadSelfAttention(20, 2))):
    change = (msa(z) - msa(other))[..., :10].abs().max()
    print(f"{name}: the first half of the output changes by {change:.0e}")

# %% [markdown]
# ### Heads in a Python list
# The list above is a plain one, as in the notebook. Its weights are not registered, so they are not
# trained, moved or saved ([chapter 5](05_training.py#mnist-the-notebooks-model) has the whole
# model). vitkit registers all layers.

# %%
total = sum(p.numel() for mapping in sliced.mappings for p in mapping.parameters())
registered = sum(p.numel() for p in sliced.parameters())
print("plain list: registered", registered, "of", total)
registered = sum(p.numel() for p in vitkit.MultiHeadSelfAttention(20, 2).parameters())
print("vitkit: registered", registered, "of 1680")

# %% [markdown]
# ### An MLP of one layer
# Eq. 3 has an MLP with one hidden layer. The notebook's is one layer with a ReLU: it cannot compute
# more than the matrix allows, and as its output is never negative, each block can only add to the
# residual stream.

# %%
z, one_layer = torch.randn(1, 50, 20), nn.Sequential(nn.Linear(20, 20), nn.ReLU())
for name, mlp in (("one layer", one_layer), ("vitkit", vitkit.MLP(20, 80))):
    size = sum(p.numel() for p in mlp.parameters())
    print(f"{name}: {size:,} parameters, lowest output {mlp(z).min():.2f}")

# %% [markdown]
# ### A norm over tokens and width together
# It ties the model to one number of tokens, and a change to one token changes all others. On centred
# digits its 1,000 weights and biases even help ([chapter
# 5](05_training.py#each-with-its-own-learning-rate)), as they know the position. vitkit's LayerNorm
# is over the width ([chapter 3](03_encoder.py#exercises)).

# %%
joint, usual = nn.LayerNorm((50, 20)), nn.LayerNorm(20)
changed = z.clone()
changed[0, 0] += 10
for name, norm in (("tokens and width", joint), ("width", usual)):
    change = (norm(z) - norm(changed))[0, 7].abs().max()
    parameters = sum(p.numel() for p in norm.parameters())
    print(f"{name}: token 7 changes by {change:.0e}; {parameters:,} parameters")
print_error(lambda: joint(torch.rand(1, 65, 20)))

# %% [markdown]
# ### No norm before the head
# A pre-norm block normalises its inputs, but not the residual stream that it adds to. So the scale
# of the last block's output is not limited, and without a final norm the scale of the logits
# depends on it. Eq. 4 has this norm, and so does `vitkit.ViT`.

# %%
block, head = vitkit.EncoderBlock(20, 2, 20).eval(), nn.Linear(20, 10)
for name, norm in (("no norm", nn.Identity()), ("norm", nn.LayerNorm(20))):
    sizes = [head(norm(block(scale * z)))[:, 0].norm() for scale in (1, 10)]
    print(
        f"{name}: size of the logits {sizes[0]:.2f}, "
        f"for ten times larger tokens {sizes[1]:.2f}"
    )

# %% [markdown]
# ### Softmax before the loss
# The lowest possible loss is that from above, for ten classes. And the gradient of a wrong
# prediction almost vanishes.

# %%
logits = torch.tensor(
    [[9.0, 0.0, 0.0]], requires_grad=True
)  # certain, and wrong: the label is 1
for name, outputs in (("logits", logits), ("probabilities", logits.softmax(1))):
    loss = F.cross_entropy(outputs, torch.tensor([1]))
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    print(f"{name}: gradient {gradient.norm():.1e}")

# %% [markdown]
# ### A loss that is divided twice
# Cross-entropy is already a mean. Divided by the batch size again, the loss is 16 times too small.
# With Adam the steps stay the same, with SGD they are 16 times smaller. The first loss of an
# untrained model shows it: it should be about $\ln 10$. [Chapter
# 14](14_bug_costs.py#read-off-the-notebooks-own-output) undoes the division for the losses that the
# notebook printed.

# %%
untrained, labels = torch.zeros(16, 10), torch.arange(16) % 10
loss = F.cross_entropy(untrained, labels)
print(
    f"first loss {loss:.3f}, ln 10 = {math.log(10):.3f}, divided again {loss / 16:.3f}"
)

# %% [markdown]
# ### Attention computed twice
# The notebook calls its attention, throws the result away, and calls it again. Nothing is done with
# the first result; only the work doubles.

# %%
q, k, v = torch.rand(3, 50, 10)
for name, calls in (("twice", 2), ("once", 1)):
    with FlopCounterMode(display=False) as counter:
        for _ in range(calls):
            result = vitkit.scaled_dot_product_attention(q, k, v)
    print(f"{name}: {counter.get_total_flops() // 2:,} multiply-adds")

# %% [markdown]
# ### Evaluation in training mode
# Without `eval()` dropout stays on, and without `no_grad()` all activations are stored for the
# backward pass. `vitkit.evaluate` and `Predictor` use both.

# %%
model = vitkit.create_model("vit_cifar_patch4_32", num_classes=0, mlp_dropout=0.1)
images = torch.rand(1, 3, 32, 32)
first, second = model(images), model(images)
print(f"two calls differ by {(first - second).abs().max():.2f};", end=" ")
print("activations are stored:", first.requires_grad)
with torch.inference_mode():
    first, second = model.eval()(images), model(images)
print(
    f"eval() and inference_mode(): {(first - second).abs().max():.2f}, "
    f"{first.requires_grad}"
)

# %% [markdown]
# ### Width and height swapped
# `n, c, w, h = images.shape` has the two names in the wrong order. Square images do not show it. In
# vitkit height always comes first.

# %%
n, c, w, h = (1, 3, 32, 64)  # an image of height 32 and width 64
print("notebook E: rows and columns of patches", (h // 4, w // 4), end="; ")
print("vitkit", vitkit.ViTSpec(image_size=(32, 64), patch_size=4).grid)

# %% [markdown]
# ### Positions in a loop
# A double loop in Python creates the table in every forward pass. The exponent of the cosines in
# the text is wrong, so a sine and its cosine no longer have the same frequency. And the text has
# the order of the frequencies reversed: the high ones come first.

# %%
start = time.perf_counter()
looped = torch.zeros(196, 128)
for n in range(196):
    for j in range(128):
        angle = n / 10000 ** (
            j / 128
        )  # mistake: a cosine should have the exponent of its sine, j - 1
        looped[n, j] = math.cos(angle) if j % 2 else math.sin(angle)
middle = time.perf_counter()
table = sincos_1d(196, 128)
print(
    f"the loop takes {(middle - start) / (time.perf_counter() - middle):.0f} "
    "times as long"
)
for name, values in (("mistaken", looped), ("sincos_1d", table)):
    radius = values[:, 0::2] ** 2 + values[:, 1::2] ** 2
    print(
        f"{name}: sine squared plus cosine squared "
        f"{radius.min():.2f} to {radius.max():.2f}"
    )
changes = (table[1:, 0::2] * table[:-1, 0::2] < 0).sum(0)
print(f"sign changes: {changes[0]} in the first sine, {changes[-1]} in the last")

# %% [markdown]
# ### Loops over images and heads
# The notebook's attention goes through the images of a batch and through the heads in Python. The
# products are the same, but the processor waits for Python. One product over all images and heads
# gives the same numbers.

# %%
q, k, v = torch.rand(3, 64, 2, 50, 10)  # 64 images, two heads


def one_by_one() -> torch.Tensor:
    return torch.stack([
        torch.stack([
            (q[n, h] @ k[n, h].T / 10**0.5).softmax(-1) @ v[n, h] for h in range(2)
        ])
        for n in range(64)
    ])  # fmt: skip


def together() -> torch.Tensor:
    return vitkit.scaled_dot_product_attention(q, k, v)


torch.testing.assert_close(one_by_one(), together())
print(
    f"the loop takes {milliseconds(one_by_one) / milliseconds(together):.0f} "
    "times as long"
)

# %% [markdown]
# ### A global `device`
# "cuda does not work", says the notebook: the kernel dies. Its model moves the positions to a global
# variable `device`, and its heads, in a Python list, stay where they were made. So parts of the
# model lie on different devices, whatever `model.to(...)` was told. In vitkit a table is a buffer of
# the model and moves with it.

# %%
device = torch.device("cpu")  # the global variable


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.linear(patches) + sincos_1d(49, 8).to(device)


elsewhere = torch.rand(1, 49, 16, device="meta")  # a second device without a GPU
print_error(lambda: Global().to("meta")(elsewhere))
model = vitkit.create_model(
    "vit_cifar_patch4_32", num_classes=10, positions="sincos_1d"
)
image = torch.rand(1, 3, 32, 32, device="meta")
print(
    "vitkit:",
    tuple(model.to("meta")(image).shape),
    "on",
    model.to("meta")(image).device,
)

# %% [markdown]
# ### Two wrong names
# The notebook calls MSA "multiscale self-attention". It is multi-head self-attention: all heads see
# the same tokens at the same scale. And it calls the left half of a Transformer "encoder or auto
# encoder". An autoencoder is trained to give back its own input; the encoder of a Transformer is
# trained with its decoder for the outputs of the task. The masked model of [chapter
# 6](06_data.py#images-without-labels) is an autoencoder.

# %% [markdown]
# ## Distillation
#
# ### A teacher that is never put in `eval()`
# Its BatchNorm statistics move towards the student's images, so the teacher is different in every
# step. `DistillWrapper` keeps it in eval mode ([chapter
# 9](09_distillation.py#two-bugs-and-what-they-cost)).

# %%
spec = vitkit.ViTSpec(
    image_size=8, patch_size=4, width=16, depth=1, num_heads=2,
    mlp_width=16, num_classes=3,
    distillation_token=True,
)  # fmt: skip
student, images, labels = (
    vitkit.ViT(spec),
    torch.rand(4, 3, 8, 8),
    torch.tensor([0, 1, 2, 0]),
)
teacher = nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)
)
mean = teacher[1].running_mean.clone()
teacher(images)
print(
    f"training mode: the mean moves by {(teacher[1].running_mean - mean).norm():.1e}",
    end="; ",
)
mean, wrapper = (
    teacher[1].running_mean.clone(),
    vitkit.DistillWrapper(student, teacher).train(),
)
wrapper(images, labels)
print(f"in DistillWrapper: {(teacher[1].running_mean - mean).norm():.0e}")

# %% [markdown]
# ### A token that is not trained
# Token and head belong to the wrapper. The optimizer gets only the student's parameters, so they
# keep their initial values. In vitkit they belong to the student, with `distillation_token=True` in
# its spec.

# %%
token = nn.Parameter(torch.zeros(1, 1, 16))  # belongs to a wrapper
for name, parameter in (
    ("the wrapper's", token),
    ("the student's", student.dist_token),
):
    trained = any(parameter is other for other in student.parameters())
    print(f"{name} token is trained: {trained}")

# %% [markdown]
# ## What you know now
#
# - A model with ten mistakes can train and print 91 %. An accuracy is no proof that the code is
#   right.
# - Mistakes in the output and the loss show in the loss itself: where it starts, and where it stops
#   to fall.
# - Weights in a Python list are not trained, moved or saved. Count the parameters.
# - [Chapter 14](14_bug_costs.py) measures what each of these bugs costs; its exercises are also
#   those of this chapter.

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 14. What a bug costs
#
# Chapters [11](11_bugs.py) and [12](12_lab_bugs.py) list the bugs of five published notebooks.
# Many of them raise no error: the model trains, only worse, or not even that. This chapter puts
# each of them into the model of chapter 0, trains it, and measures what it costs. The larger part
# is about finding such bugs: twelve short checks, of which each catches some.
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** which bugs of a ViT cost accuracy, which do not, and how to find them before
#   training
# - **You need** chapters [1](01_patches.py) to [5](05_training.py)
# - **Reading** about 20 minutes
# :::

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports"}
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, variance
from unittest import mock

import torch
from bug_variants import DECAY, FOLLOW_UPS, VARIANTS, Variant
from buggy_vit import SIZES, BuggyViT
from html_table import Link, Table
from IPython.display import display
from matplotlib import pyplot as plt
from measure_bugs import accuracy, digits, train
from measured import RESULTS, measured
from plain_vit import Block, PlainViT
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit

_ = torch.manual_seed(0)

# %% [markdown]
# ## One model, one switch for each bug
#
# `BuggyViT` is `PlainViT` of chapter 0 with switches ({download}`buggy_vit.py <buggy_vit.py>`).
# Each bug is the smallest change that makes the mistake, with a comment that names its notebook.
# For example, the attention:
#
# ```{literalinclude} buggy_vit.py
# :pyobject: BuggyViT._attention
# :language: python
# ```
#
# Mistakes in the loss, the optimizer and the evaluation have switches, too. A variant
# ({download}`bug_variants.py <bug_variants.py>`) joins them: it makes the model, its loss and its
# optimizer. With no switch on, the model is `PlainViT`, bit for bit.
# It has 4 blocks of width 32 with 4 heads, for 16 patches of 2 x 2 pixels:

# %%
right = VARIANTS["correct"]
batch = torch.rand(4, 1, 8, 8)
torch.manual_seed(0)
plain = PlainViT(**SIZES)
torch.manual_seed(0)
print("the same bits:", torch.equal(plain(batch), right.model()(batch)))
print(f"{sum(p.numel() for p in plain.parameters()):,} parameters")

# %% [markdown]
# ## How the costs are measured
#
# Each variant is trained on the digits with three learning rates and three seeds: 500 steps of 32
# images, AdamW with warm-up, a cosine and a weight decay of 0.1
# ({download}`measure_bugs.py <measure_bugs.py>`). The rate is chosen by the mean accuracy on
# validation images. Only the three models of that rate see the test images. So a variant is not
# called worse because it wants another rate.
#
# The cost of a bug is the test accuracy of the right model minus that with the bug, for the same
# seed. A variant with dropout, SGD or fixed positions is compared with the right model with
# dropout, SGD or fixed positions.

# %%
results = measured("bugs")
rows = {row["variant"]: row for row in results["variants"]}
print("images:", results["images"])
for name in ("correct", "dropout", "sines", "sgd"):
    scores = [100 * score for score in rows[name]["test"]]
    print(f"{name:<8} rate {rows[name]['lr']:<5} test {mean(scores):.1f} % "
          f"({min(scores):.1f} to {max(scores):.1f}): {VARIANTS[name].says}")  # fmt: skip


# %% [markdown]
# How large must a cost be to be seen? The differences of the three seeds have a standard deviation,
# here the common one of all variants that still learn. A mean of three within twice its standard
# error cannot be told from 0. And with 26 comparisons, one just outside is no surprise either.


# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show how costs are computed"}
def costs_of(name: str, among: dict[str, dict]) -> list[float]:
    """Return the points that a variant costs, one number for each seed."""
    against = (VARIANTS | FOLLOW_UPS)[name].against
    pairs = zip(among[against]["test"], among[name]["test"], strict=True)
    return [100 * (good - bad) for good, bad in pairs]


costs = {name: costs_of(name, rows) for name in VARIANTS}
for name in ("correct", "dropout", "sines", "sgd"):
    del costs[name]
order = sorted(costs, key=lambda name: mean(costs[name]), reverse=True)
spread = math.sqrt(
    mean(variance(found) for found in costs.values() if mean(found) < 20)
)
SMALLEST = 2 * spread / math.sqrt(3)
print(f"standard deviation of a difference {spread:.1f} points;")
print(f"a mean of three within ±{SMALLEST:.1f} points cannot be told from 0")


def severity(found: list[float]) -> str:
    if abs(mean(found)) < SMALLEST:
        return "not visible"
    if mean(found) < 0:
        return "better here"
    return (
        "breaks" if mean(found) > 20 else "costs much" if mean(found) > 5 else "costs"
    )


def cost_text(found: list[float]) -> str:
    return f"{mean(found):+.1f} ({min(found):+.1f} to {max(found):+.1f})"


# %% [markdown]
# ## The costs

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the drawing", "figure": {"caption": "What each bug costs in points of accuracy on test images of the digits. The dot is the mean of three seeds, the line their range. The scale is linear up to 5 points and logarithmic beyond. A mean inside the grey band cannot be told from 0: so much do three seeds of one variant differ by chance. Left of the band, the variant with the bug was better. The letter is the notebook."}}
COLOURS = {"breaks": "#c2185b", "costs much": "#e0523f", "costs": "#e69f45",
           "not visible": "#8c8c8c", "better here": "#4c72b0"}  # fmt: skip
figure, ax = plt.subplots(figsize=(7.4, 6.6))
ax.axvspan(-SMALLEST, SMALLEST, color="#8c8c8c", alpha=0.25)
for place, name in enumerate(order):
    found, colour = costs[name], COLOURS[severity(costs[name])]
    ax.plot([min(found), max(found)], [place, place], color=colour, linewidth=2)
    ax.plot(mean(found), place, "o", color=colour, markersize=5)
names = [f"{VARIANTS[n].says}  {VARIANTS[n].notebook or '-'}" for n in order]
ax.set_yticks(range(len(order)), names, fontsize=8)
ax.set_xscale("symlog", linthresh=5, linscale=1.5)
ticks = (-5, -2, 0, 2, 5, 10, 20, 50)
ax.set_xticks(ticks, [str(tick) for tick in ticks])
ax.set(xlabel="points of accuracy lost", ylim=(len(order) - 0.5, -0.5))
handles = [plt.Line2D([], [], color=c, marker="o", label=s) for s, c in COLOURS.items()]
ax.legend(handles=handles, fontsize=8, loc="lower right")
_ = figure.tight_layout()

# %% [markdown]
# The table has the same numbers, the symptom by which a reader of a log would notice the bug, and
# the section where it is shown. "Last loss" is the mean training loss of the last 50 steps, as that
# variant would print it.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the table's code"}
SYMPTOMS = {
    "reshape": ("none", "12_lab_bugs.html#reshape-for-patches"),
    "ones": (
        "none; all positions are equal at the start",
        "11_bugs.html#positions-that-start-at-ones-or-as-n-0-1",
    ),
    "large_normal": ("none", "11_bugs.html#positions-that-start-at-ones-or-as-n-0-1"),
    "zero_positions": (
        "none; the untrained model ignores the order",
        "11_bugs.html#positions-that-start-at-zero",
    ),
    "uniform_class_token": ("none", "12_lab_bugs.html#a-class-token-by-rand"),
    "xavier": ("none", "11_bugs.html#xavier-for-every-parameter"),
    "exponent_zero": (
        "only two different columns in the table",
        "12_lab_bugs.html#an-exponent-that-is-always-0",
    ),
    "one_head": ("none", "11_bugs.html#heads-that-are-never-split"),
    "no_root": ("none", "11_bugs.html#a-softmax-without-the-root"),
    "careless_dropout": (
        "two evaluations differ",
        "11_bugs.html#f-dropout-with-its-defaults",
    ),
    "sliced_heads": (
        "too few parameters",
        "12_lab_bugs.html#heads-that-see-their-own-slice",
    ),
    "heads_in_a_list": (
        "too few parameters; an error on a GPU",
        "12_lab_bugs.html#heads-in-a-python-list",
    ),
    "no_projection_dropout": (
        "none",
        "11_bugs.html#no-dropout-after-the-attention-s-projection",
    ),
    "joint_norm": (
        "too many parameters; an error for other image sizes",
        "12_lab_bugs.html#a-norm-over-tokens-and-width-together",
    ),
    "one_layer_mlp": ("too few parameters", "12_lab_bugs.html#an-mlp-of-one-layer"),
    "relu": ("none", "12_lab_bugs.html#an-activation-that-is-ignored"),
    "no_final_norm": (
        "logits grow with depth",
        "12_lab_bugs.html#no-norm-before-the-head",
    ),
    "double_softmax": (
        "the loss never falls below 1.461",
        "12_lab_bugs.html#softmax-before-the-loss",
    ),
    "loss_divided": (
        "the first loss is far below ln 10",
        "12_lab_bugs.html#a-loss-that-is-divided-twice",
    ),
    "loss_divided_sgd": (
        "the first loss is far below ln 10; slow at each usual rate",
        "12_lab_bugs.html#a-loss-that-is-divided-twice",
    ),
    "coupled_decay": (
        "the weights shrink; the loss stays at ln 10 at two of three rates",
        "11_bugs.html#adam-where-adamw-is-meant",
    ),
    "no_eval": (
        "two evaluations differ",
        "12_lab_bugs.html#evaluation-in-training-mode",
    ),
    "notebook_e": ("those of its ten bugs", "12_lab_bugs.html#a-vit-on-mnist"),
    "no_positions": ("the order of the patches changes nothing", ""),
    "no_residual": ("the loss stays at ln 10 at two of three rates", ""),
    "no_norm": ("none with four blocks", ""),
}  # fmt: skip

table = []
for name in order:
    variant, found, (symptom, address) = VARIANTS[name], costs[name], SYMPTOMS[name]
    last = mean(row["last_loss"] for row in rows[name]["rows"]
                if row["lr"] == rows[name]["lr"])  # fmt: skip
    table.append([
        Link(variant.says, address) if address else variant.says,
        variant.notebook or "-",
        cost_text(found),
        severity(found),
        f"{last:.3f}",
        symptom,
    ])  # fmt: skip
display(Table(
    ("bug", "from", "cost in points", "severity", "last loss", "symptom"),
    table, right=(4,),
))  # fmt: skip
counted = [severity(found) for found in costs.values()]
print(*(f"{counted.count(kind)} {kind}" for kind in COLOURS), sep=", ")

# %% [markdown]
# Read the table with care.
#
# - **Three things break this model**: weight decay inside Adam, no residual connections, and no
#   positions. The first is a bug of a published notebook, and the costliest of the list. It is one
#   letter in the code. (The paper's Adam applies its decay separately, as AdamW does.)
# - **Some cost a few points**: dropout that is always on, an evaluation in training mode, sines of
#   one frequency, a softmax too many, and with SGD a loss that is divided twice.
# - **Most are not visible here.** That is no proof that they are harmless: this is one small task,
#   with four blocks and 500 steps. That no LayerNorm costs nothing here says nothing about deeper
#   models.
# - **Three look better.** Positions that start at N(0, 1) win four points. Fixed sines, which are no
#   bug, win two and a half. Without any positions the model loses 23 points. One reading is that
#   with a start of 0.02 and 500 steps the positions are learned too slowly, and whatever gives them
#   more weight helps. A LayerNorm over tokens and width has a weight and a bias for each position,
#   so it knows the position, too.
#
# This reading can be tested. If it is right, the advantage must shrink where the positions are
# good from the start. The next trainings have fixed sines, right and with three of the bugs:

# %%
follow = {row["variant"]: row for row in measured("bugs-positions")["variants"]}
for name in FOLLOW_UPS:
    if name != "sines":
        before, after = costs[name.removesuffix("_sines")], costs_of(name, follow)
        print(f"{name.removesuffix('_sines'):<14} "
              f"learned positions {mean(before):+.1f}, "
              f"fixed sines {mean(after):+.1f} points")  # fmt: skip

# %% [markdown]
# With fixed sines, the advantage of each is less than half, and inside the band of chance. So A's
# start at N(0, 1) differs from the paper's, but for so short a training it is the better one.
#
# ## Larger images
#
# Digits of 8 x 8 pixels are a special case for some bugs: a strip of four pixels is half a row of
# the image, and no bad piece of it. So six of the bugs were measured again on Fashion-MNIST: 5,000
# images with 49 patches of 4 x 4, where a strip has 16 pixels of a row.

# %%
fashion = measured("bugs-fashion")
clothes = {row["variant"]: row for row in fashion["variants"]}
again = {name: costs_of(name, clothes) for name in clothes if name != "correct"}
scores = [100 * score for score in clothes["correct"]["test"]]
print(f"the right model: {mean(scores):.1f} % ({min(scores):.1f} to {max(scores):.1f})")


# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the table's code"}
display(Table(
    ("bug", "from", "cost on digits", "cost on Fashion-MNIST"),
    [
        [VARIANTS[name].says, VARIANTS[name].notebook or "-",
         cost_text(costs_of(name, rows)), cost_text(found)]
        for name, found in sorted(again.items(), key=lambda pair: -mean(pair[1]))
    ],
))  # fmt: skip

# %% [markdown]
# Three results repeat: a second softmax costs three to four points, positions that start at N(0, 1)
# win about four, and a LayerNorm over tokens and width wins two and a half. The strips, which looked
# better on the digits, make no difference that can be seen. What a bug costs is a property of the
# bug and of the task, and the length of the training belongs to the task.

# %% [markdown]
# ## Read off the notebook's own output
#
# Notebook E printed its losses, and they prove two of its bugs. It adds up `loss / len(x)` over
# the batches of 16: 364.58 in the last epoch (3,750 batches), 60.45 on the test images (625
# batches). `F.cross_entropy` returns a mean, so this division by 16 is one too many. Undone, the
# mean loss is:

# %%
softmax_of_softmax = F.cross_entropy(torch.eye(10), torch.arange(10)).item()
formula = math.log(math.e + 9) - 1
print(
    f"lowest loss of probabilities: {softmax_of_softmax:.4f}, "
    f"ln(e + 9) - 1 = {formula:.4f}"
)
for part, printed, batches in (("training", 364.58, 3750), ("test", 60.45, 625)):
    loss = printed * 16 / batches
    print(
        f"{part:<9}{printed} x 16 / {batches} = {loss:.4f}, "
        f"above it {loss - formula:.4f}"
    )
print(f"test errors that the notebook printed: {1 - 0.9145:.4f}")

# %% [markdown]
# Both means lie just above 1.461, the lowest possible value when probabilities go into a
# cross-entropy that applies a second softmax. Without the second softmax, a model with 91 %
# accuracy has a loss near 0.3.
#
# And there is more to read. If the model is certain and right, the loss is 1.461; if it is certain
# and wrong, it is exactly 1 more. So the distance to the floor is about the share of errors:
# 0.0864 against 0.0855. Our rebuilt notebook model shows the same:

# %%
notebook = json.loads((RESULTS / "mnist-notebook.json").read_text())
for run in notebook["runs"]:
    last = run["epochs"][-1]
    print(f"seed {run['seed']}: training loss {16 * last['train_loss']:.4f}, "
          "above the floor "
          f"{16 * last['train_loss'] - formula:.4f}; "
          f"validation errors {1 - last['val_top1']:.4f}")  # fmt: skip

# %% [markdown]
# ## How to find such bugs
#
# No list of bugs is complete, and the symptom of most is nothing. What helps is to check what must
# be true of each right model. The twelve checks below take a fraction of a second each. They
# answer True if the variant passes.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the helpers of the checks"}
SIDE, WIDTH, PATCHES = 8, SIZES["width"], 16
images, labels = (part[:16] for part in digits().parts["train"])
CHECKS: dict[str, Callable[[Variant], bool]] = {}


def check(
    name: str,
) -> Callable[[Callable[[Variant], bool]], Callable[[Variant], bool]]:
    """Add a function to the table of checks."""

    def add(function: Callable[[Variant], bool]) -> Callable[[Variant], bool]:
        CHECKS[name] = function
        return function

    return add


def made(variant: Variant) -> BuggyViT:
    """Create the model of a variant, ready for evaluation."""
    torch.manual_seed(0)
    model = variant.model()
    variant.prepare_to_evaluate(model)
    return model


# %% [markdown]
# **1. Count the parameters by hand.** Every layer of the model has a formula. A layer that is
# missing, that has another shape, or that torch does not see changes the total.


# %%
@check("count")
def has_the_parameters_of_the_formula(variant: Variant) -> bool:
    P, D, D_mlp, L, classes = 2, WIDTH, SIZES["hidden"], SIZES["depth"], 10
    tokens = D + (0 if variant.positions == "sines" else (PATCHES + 1) * D)
    attention, mlp = 4 * D * D + 4 * D, 2 * D * D_mlp + D_mlp + D
    block, norm = attention + mlp + 4 * D, 2 * D
    expected = (P * P * D + D) + tokens + L * block + norm + (D * classes + classes)
    return sum(p.numel() for p in variant.model().parameters()) == expected


# %% [markdown]
# **2. Every parameter gets a gradient.** A parameter without one is not used.


# %%
@check("gradients")
def every_parameter_gets_a_gradient(variant: Variant) -> bool:
    model = made(variant)
    variant.loss(model(images), labels).backward()
    return all(p.grad is not None and p.grad.any() for p in model.parameters())


# %% [markdown]
# **3. Compare with another implementation.** Copy the weights into a model that someone else
# wrote, and compare the logits. This is the strongest check: it sees every mistake of the forward
# pass, also in the names and shapes of the weights.


# %%
@check("twin")
def computes_what_vitkit_computes(variant: Variant) -> bool:
    model = made(variant)
    spec = vitkit.ViTSpec(
        image_size=SIDE, patch_size=2, in_channels=1, num_classes=10, width=WIDTH,
        depth=SIZES["depth"], num_heads=SIZES["heads"], mlp_width=SIZES["hidden"],
    )  # fmt: skip
    twin = vitkit.ViT(spec).eval()
    try:
        twin.load_state_dict(model.state_dict())
    except RuntimeError:
        return False
    with torch.no_grad():
        return torch.allclose(model(images), twin(images), atol=1e-5)


# %% [markdown]
# **4. Permute the patches.** Attention treats the tokens as a set. So patches that change places
# together with their positions give the same logits, and patches that change places alone give
# others.


# %%
def permuted(images: Tensor, order: Tensor) -> Tensor:
    """Permute the squares of 2 x 2 pixels of images."""
    squares = F.unfold(images, 2, stride=2)[..., order]
    return F.fold(squares, (SIDE, SIDE), 2, stride=2)


@check("permute")
@torch.no_grad()
def only_positions_know_the_order(variant: Variant) -> bool:
    model = made(variant)
    order = torch.randperm(PATCHES)
    before = model(images)
    alone = (model(permuted(images, order)) - before).abs().max()
    model.pos_embed.copy_(torch.cat(
        [model.pos_embed[:, :1], model.pos_embed[:, 1:][:, order]], dim=1
    ))  # fmt: skip
    together = (model(permuted(images, order)) - before).abs().max()
    return bool(alone > 1e-4 and together < 1e-4)


# %% [markdown]
# **5. Ask twice, ask one by one.** In evaluation, an image has the same logits in each call and in
# each batch.


# %%
@check("twice")
@torch.no_grad()
def an_image_has_one_answer(variant: Variant) -> bool:
    model = made(variant)
    one_by_one = torch.cat([model(image[None]) for image in images])
    return torch.allclose(model(images), one_by_one, atol=1e-5)


# %% [markdown]
# **6. Look at the initial values.** Print mean and standard deviation of every tensor, and compare
# them with what the text says.


# %%
@check("start")
def starts_as_the_text_says(variant: Variant) -> bool:
    model = made(variant)
    expected = {"cls_token": 0.0}
    if variant.positions == "learned":
        expected["pos_embed"] = 0.02
    for name in model.state_dict():
        if name.endswith(("qkv.weight", "fc1.weight")):  # torch: U(-1, 1) / root of D
            expected[name] = (3 * WIDTH) ** -0.5
    weights = dict(model.named_parameters())
    return all(
        name not in weights
        or math.isclose(weights[name].detach().square().mean().sqrt(), std, rel_tol=0.1)
        for name, std in expected.items()
    )


# %% [markdown]
# **7. Each token is normalised by itself.** The output of a LayerNorm has mean 0 and standard
# deviation 1 for each token, however large the token was.


# %%
@check("norm")
def each_token_is_normalised(variant: Variant) -> bool:
    norm = made(variant).blocks[0].norm1
    tokens = torch.randn(1, PATCHES + 1, WIDTH) * (0.5 + torch.rand(1, PATCHES + 1, 1))
    deviations = norm(tokens).std(dim=-1, correction=0)
    return torch.allclose(deviations, torch.ones_like(deviations), atol=1e-2)


# %% [markdown]
# **8. No two columns of the positions are equal.** In a table of sines, the columns have different
# frequencies; in a learned one, they start at different random numbers.


# %%
@check("columns")
def columns_of_the_positions_differ(variant: Variant) -> bool:
    return len(made(variant).pos_embed[0].T.unique(dim=0)) == WIDTH


# %% [markdown]
# **9. The loss at its two ends.** The loss of an untrained model is about $\ln 10 = 2.3$. That of
# perfect logits is 0.


# %%
@check("loss")
def the_loss_has_the_right_scale(variant: Variant) -> bool:
    first = variant.loss(made(variant)(images), labels)
    perfect = variant.loss(100.0 * F.one_hot(labels, 10), labels)
    return bool(abs(first - math.log(10)) < 1 and perfect < 1e-3)


# %% [markdown]
# **10. Count the dropouts.** In training there is one for each place of the paper's rule. In
# evaluation there is none.


# %%
@check("dropout")
@torch.no_grad()
def dropout_is_where_it_belongs(variant: Variant) -> bool:
    model = made(variant)

    def calls() -> int:
        with mock.patch.object(F, "dropout", wraps=F.dropout) as counted:
            model(images)
        return sum(
            call.args[2] if len(call.args) > 2 else True
            for call in counted.call_args_list
        )

    evaluation = calls()
    model.train()
    expected = 1 + 3 * SIZES["depth"] if variant.dropout else 0
    return evaluation == 0 and calls() == expected


# %% [markdown]
# **11. A step without a gradient.** Weight decay alone must shrink all weights by the same
# factor, `1 - rate * decay`.


# %%
@check("decay")
def decay_shrinks_all_weights_alike(variant: Variant) -> bool:
    if variant.optimizer == "sgd":
        return True  # trained without decay
    layer = nn.Linear(WIDTH, WIDTH)
    optimizer, before = variant.optimize(layer, 0.01), layer.weight.detach().clone()
    for weights in layer.parameters():
        weights.grad = torch.zeros_like(weights)
    optimizer.step()
    return torch.allclose(layer.weight, before * (1 - 0.01 * DECAY))


# %% [markdown]
# **12. Overfit one batch.** A model with more parameters than pixels must learn 16 images by
# heart.


# %%
@check("overfit")
def learns_one_batch_by_heart(variant: Variant) -> bool:
    model, few = made(variant), (images[:8], labels[:8])
    model.train()
    first = variant.loss(model(few[0]), few[1]).item()
    optimizer = variant.optimize(model, 0.05 if variant.optimizer == "sgd" else 0.005)
    for _ in range(50):
        loss = variant.loss(model(few[0]), few[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    variant.prepare_to_evaluate(model)
    return variant.loss(model(few[0]), few[1]).item() < 0.2 * first


# %% [markdown]
# ### Which check catches which bug
#
# Each check is run on each variant. The references must pass all of them, and each bug must fail
# at least one.

# %%
caught = {
    name: [label for label, passes in CHECKS.items() if not passes(variant)]
    for name, variant in VARIANTS.items()
}
for name in ("correct", "dropout", "sines", "sgd"):
    assert caught.pop(name) == [], name
assert all(caught.values())

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the table's code"}
numbers = {label: str(number) for number, label in enumerate(CHECKS, 1)}
table = [
    [VARIANTS[name].says, f"{mean(costs[name]):+.1f}"]
    + ["x" if label in caught[name] else "" for label in CHECKS]
    for name in order
]
display(Table(("bug", "cost", *numbers.values()), table, right=(1,)))

# %%
for label, number in numbers.items():
    found = [name for name in order if label in caught[name]]
    print(f"{number:>2} {label:<10} catches {len(found):>2}")

# %% [markdown]
# No single check is enough. The twin, a comparison with another implementation, catches most
# mistakes of the forward pass, but none of the initial values, the loss or the optimizer, as it
# starts from the same weights. The initial values are
# seen by nothing but a look at them. Overfitting one batch, the most popular check, catches what
# breaks the training, and little else.
#
# ## What you know now
#
# - Most bugs of this list show no error and no visible cost on a small task. What breaks the
#   training is weight decay inside Adam, no residual connections and no positions.
# - A cost is measured against a learning rate that is chosen for each variant, with several seeds.
#   Differences inside the spread of the seeds are no evidence, in either direction.
# - A softmax before the cross-entropy can be read off a printed loss: it stays above
#   $\ln(e + 9) - 1 = 1.461$ for ten classes.
# - Count the parameters, compare with another implementation, permute the patches, look at the
#   initial values and at the first loss: each takes less than a second.
#
# ## Exercises
#
# **1. Show.** A model ends in a softmax, and the loss applies another one. Show that for any number
# of classes, a certain wrong prediction costs exactly 1 more than a certain right one. Hint: the
# sum below the fraction is the same for both.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
for classes in (2, 10, 1000):
    certain = F.one_hot(torch.tensor([0]), classes).float()
    right_loss = F.cross_entropy(certain, torch.tensor([0]))
    wrong_loss = F.cross_entropy(certain, torch.tensor([1]))
    # -ln(e / S) against -ln(1 / S), with S = e + classes - 1
    assert math.isclose(wrong_loss - right_loss, 1.0, rel_tol=1e-5)
    assert math.isclose(right_loss, math.log(math.e + classes - 1) - 1, rel_tol=1e-5)

# %% [markdown]
# **2. Build.** `nn.Sequential(*[Block(32, 4, 64)] * 4)` has a bug: it repeats one block, and all
# four share their weights. Build a check that finds shared weights in any stack of blocks. Hint:
# compare what the blocks hold, not their values.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def blocks_have_their_own_weights(blocks: nn.Sequential) -> bool:
    each = [{id(p) for p in block.parameters()} for block in blocks]
    return len(set.union(*each)) == sum(map(len, each))


shared = nn.Sequential(*[Block(32, 4, 64)] * 4)
assert not blocks_have_their_own_weights(shared)
assert blocks_have_their_own_weights(PlainViT(**SIZES).blocks)
# `parameters()` counts shared weights once, so the count by hand finds it, too.
four = sum(p.numel() for p in PlainViT(**SIZES).blocks.parameters())
assert sum(p.numel() for p in shared.parameters()) * 4 == four

# %% [markdown]
# **3. Predict, then run.** Positions that start at zero fail the check "permute" before training.
# Do they still fail it after five steps of training? And a model whose positions are ones?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
for name in ("zero_positions", "ones"):
    variant = VARIANTS[name]
    trained = made(variant)
    optimizer, shuffle = variant.optimize(trained, 0.001), torch.randperm(PATCHES)
    changes = []
    for _step in range(6):
        logits = trained(images)
        changes.append((trained(permuted(images, shuffle)) - logits).abs().max().item())
        optimizer.zero_grad()
        variant.loss(logits, labels).backward()
        optimizer.step()
    # The gradients of two positions differ, as their patches do. So one step is enough.
    assert changes[0] < 1e-4 < changes[1] < changes[5], (name, changes)

# %% [markdown]
# **4. Train.** Weight decay of 0.1 inside Adam is the costliest bug of the list. Train the model
# for 150 steps with AdamW and with Adam, each with a decay of 0.1 and of 0. Which of the four
# fails, and how large are its weights? Hint: `train` of `measure_bugs.py` takes a variant; make
# one with another optimizer.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
@dataclass(frozen=True)
class Decayed(Variant):
    """A variant with a given optimizer and weight decay."""

    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    decay: float = 0.0

    def optimize(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return self.kind(model.parameters(), lr=rate, weight_decay=self.decay)


found, task = {}, digits()
for kind in (torch.optim.AdamW, torch.optim.Adam):
    for decay in (0.0, 0.1):
        variant = Decayed("another optimizer", kind=kind, decay=decay)
        trained, _ = train(variant, task, rate=0.003, seed=0, steps=150)
        score = accuracy(variant, trained, task.parts["validation"])
        found[kind.__name__, decay] = (
            score,
            trained.blocks[0].mlp.fc1.weight.std().item(),
        )
(failed,) = [name for name, (score, _) in found.items() if score < 0.3]
assert failed == ("Adam", 0.1)
assert found[failed][1] < 0.2 * found["Adam", 0.0][1]

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 9. Distillation
#
# A label says "3". A trained model says "3, perhaps 8, certainly not 1". Its output contains more
# information about the image, and a small model can learn from it. This is distillation: a student
# is trained on the outputs of a teacher.
#
# Let $Z_s$ be the student's logits, $Z_t$ the teacher's, $y$ the labels and $\psi$ the softmax.
# There are two kinds of targets, here in the notation of DeiT ([arXiv
# 2012.12877](https://arxiv.org/abs/2012.12877)). **Soft** targets are from "Distilling the
# Knowledge in a Neural Network" ([arXiv 1503.02531](https://arxiv.org/abs/1503.02531)); $\tau$ is
# the temperature, $\lambda$ the weight of the teacher:
#
# $$ L = (1-\lambda)\,\operatorname{CE}(\psi(Z_s), y) +
#    \lambda\,\tau^2\,\operatorname{KL}\big(\psi(Z_t/\tau)\,\|\,\psi(Z_s/\tau)\big) \tag{DeiT 2} $$
#
# **Hard** targets use the teacher's predicted class $y_t = \operatorname{argmax}\ Z_t$ as a label:
#
# $$ L = (1-\lambda)\,\operatorname{CE}(\psi(Z_s), y) + \lambda\,\operatorname{CE}(\psi(Z_s), y_t)
#    \tag{DeiT 3} $$
#
# The paper uses $\lambda = 1/2$ for hard targets, and $\lambda = 0.1$ and $\tau = 3$ for soft ones.
# `vitkit.DistillWrapper(student, teacher)` computes both: it takes images and labels and returns
# the loss.
#
# ```{drawing} distillation
# DeiT gives the teacher a token of its own. For a prediction, the two heads are averaged.
# ```
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** how a small model learns from the outputs of a larger one, what the temperature
#   does, and what DeiT's second token is for.
# - **You need** [chapter 4](04_vit.py) and [chapter 5](05_training.py).
# - **Reading** about 20 minutes
# :::

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports", "code_prompt_hide": "Hide the imports"}
import copy
import json
import tempfile
from statistics import mean

import torch
from drawing import count, print_wrapped
from matplotlib import pyplot as plt
from measured import RESULTS, with_spread
from shifted_digits import fit, images, shifted
from small_cnn import layer
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit

torch.manual_seed(0)
torch.set_num_threads(1)  # more threads do not speed up models as small as these

# %% [markdown]
# ## A teacher
#
# DeiT's teacher is a convolutional network. So is this one: three convolutions in plain `torch.nn`.
# It learns the 8 x 8 digits from the whole training split. In every step the images are shifted
# randomly by up to one pixel. `fit` is a plain loop with AdamW, warm-up and linear decay
# ({download}`shifted_digits.py <shifted_digits.py>`).


# %%
def accuracy(logits: Tensor) -> float:
    """Return the share of the test images whose largest logit is that of the label."""
    return (logits.argmax(1) == test[1]).float().mean().item()


train, test = images("train"), images("test")
teacher = nn.Sequential(
    *layer(1, 16, stride=1), *layer(16, 32, stride=2), *layer(32, 32, stride=2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
fit(lambda images, labels: F.cross_entropy(teacher(images), labels),
    teacher.parameters(), train, steps=120, lr=1e-2, seed=0)  # fmt: skip
with torch.no_grad():
    teacher_logits = teacher.eval()(test[0])
print(f"teacher: {count(teacher):,} parameters, {len(train[1]):,} training images, "
      f"test accuracy {accuracy(teacher_logits):.1%}")  # fmt: skip
assert accuracy(teacher_logits) > 0.9

# %% [markdown]
# ## The effect of the temperature
#
# A good teacher is almost always certain. Then its probabilities are nearly a label: 0.999 and nine
# small numbers. The small numbers contain what the teacher knows about the similarity of classes.
# Dividing the logits by $\tau$ before the softmax makes them larger. The figure shows the test
# image for which this teacher is least certain, and one for which it is certain.

# %% mystnb={"figure": {"caption": "The teacher's probabilities at four temperatures. Top: the test image for which it is least certain. Bottom: an image for which it is certain. At temperature 1 the certain prediction equals a label. From 3 on, the bars of the other classes are visible. Their heights differ: they show which classes are similar, and a student can learn this. At a high temperature all probabilities approach one tenth."}}
temperatures = (1, 3, 8, 20)
largest = teacher_logits.softmax(1).amax(1)
certain = (largest > 0.995).nonzero()[0, 0]
figure, axes = plt.subplots(2, 5, figsize=(9, 3.2))
for row, number in zip(axes, (largest.argmin(), certain), strict=True):
    row[0].imshow(test[0][number, 0], cmap="gray_r")
    row[0].set(title=f"label {test[1][number]}", xticks=[], yticks=[])
    for ax, temperature in zip(row[1:], temperatures, strict=True):
        probabilities = (teacher_logits[number] / temperature).softmax(0)
        ax.bar(range(10), probabilities.tolist(), color="#4c72b0")
        ax.set(
            title=f"temperature {temperature}", ylim=(0, 1), xticks=range(10), yticks=[]
        )
_ = figure.tight_layout()

# %% [markdown]
# Dividing by $\tau$ also makes the gradient smaller: by $1/\tau$ because the input of the softmax
# is divided, and by about $1/\tau$ again because both distributions become more similar. The factor
# $\tau^2$ compensates for this, so that $\lambda$ keeps its meaning at every temperature. Here is
# the gradient of the soft term for a student whose logits are all zero:

# %%
for temperature in (1, 2, 4, 8, 16):
    student_logits = torch.zeros_like(teacher_logits).requires_grad_()
    log_student = (student_logits / temperature).log_softmax(1)
    targets = (teacher_logits / temperature).softmax(1)
    divergence = F.kl_div(log_student, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(divergence, student_logits)
    size = gradient.norm(dim=1).mean()
    print(f"temperature {temperature:>2}: gradient {size:.4f}, "
          f"times temperature squared {size * temperature**2:.2f}")  # fmt: skip

# %% [markdown]
# ## The equations and the module
#
# A student is a small ViT: four patches of 4 x 4, one block. With `distillation_token=True` it has
# a second token beside the class token, with its own head. The head of the class token learns from
# the labels, the other head from the teacher, so their predictions can differ (DeiT, Sec. 4). A
# student with one head learns from both.


# %%
def student(seed: int, **fields: object) -> vitkit.ViT:
    torch.manual_seed(seed)
    return vitkit.ViT(vitkit.ViTSpec(
        image_size=8, patch_size=4, in_channels=1, width=64, depth=1,
        num_heads=4, mlp_width=128,
        num_classes=10, **fields,
    ))  # fmt: skip


plain, distilled = student(0), student(0, distillation_token=True)
print(f"{count(plain):,} parameters, with token and second head {count(distilled):,}")
print(
    f"difference {count(distilled) - count(plain)} = "
    "64 (token) + 64 (its position) + 65 * 10"
)

images, labels = test[0][:32], test[1][:32]
T, share = 3.0, 0.5  # temperature, weight of the teacher
for head in (plain.head, distilled.head, distilled.head_dist):
    # the heads start at zero
    nn.init.normal_(head.weight, std=0.3)
z_t = teacher(images)
one = plain(images)
two = distilled.forward_heads(distilled.forward_features(images))
# z_s: logits that learn from the labels, z_d: logits that learn from the teacher
for heads, model, (z_s, z_d) in (
    ("one head", plain, (one, one)),
    ("two heads", distilled, two),
):
    label_loss = -z_s.log_softmax(1)[range(32), labels].mean()
    p, q = (z_t / T).log_softmax(1), (z_d / T).log_softmax(1)
    soft = (1 - share) * label_loss + share * T**2 * (p.exp() * (p - q)).sum(1).mean()
    hard = (1 - share) * label_loss - share * z_d.log_softmax(1)[
        range(32), z_t.argmax(1)
    ].mean()
    for name, by_hand in (("soft", soft), ("hard", hard)):
        wrapper = vitkit.DistillWrapper(model, teacher, T, share, hard=name == "hard")
        print(
            f"{heads:<10}{name}: {wrapper(images, labels):.5f}, by hand {by_hand:.5f}"
        )
        assert torch.allclose(wrapper(images, labels), by_hand, rtol=1e-4)

# %% [markdown]
# ## Does it help?
#
# The students get few labels: 20 images of each class. One learns from the labels alone. The others
# see the same images and also learn from the teacher, which was trained on the whole training
# split. Everything else is the same: the seed, the steps, the order and the shifts of the images.
# Each student is trained with three seeds.

# %%
SEEDS = (0, 1, 2)
few = torch.cat([(train[1] == label).nonzero()[:20, 0] for label in range(10)])
labelled = train[0][few], train[1][few]
DISTILLED = {
    "soft": {"temperature": 3.0, "alpha": 0.9},
    "hard": {"hard": True, "alpha": 0.5},
    "token, hard": {"hard": True, "alpha": 0.5},
}


def trained(kind: str, seed: int) -> vitkit.ViT:
    model = student(seed, distillation_token=kind.startswith("token"))

    def alone(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    settings = DISTILLED.get(kind)
    loss = (
        alone if settings is None else vitkit.DistillWrapper(model, teacher, **settings)
    )
    fit(loss, model.parameters(), labelled, steps=200, lr=5e-3, seed=seed)
    return model.eval()


students = {
    kind: [trained(kind, seed) for seed in SEEDS] for kind in ("alone", *DISTILLED)
}
with torch.no_grad():
    scores = {
        kind: [accuracy(model(test[0])) for model in models]
        for kind, models in students.items()
    }
for kind, values in scores.items():
    gains = [
        f"{100 * (a - b):+.1f}" for a, b in zip(values, scores["alone"], strict=True)
    ]
    print(f"{kind:<12}{with_spread(values)}  gain by seed {' '.join(gains)}")

# %% mystnb={"figure": {"caption": "Test accuracy of students with 200 labelled images: a dot for each seed and a line at the mean. The dashed line is the teacher. A kind of distillation helps if all its dots lie above the student trained alone, not only its mean."}}
figure, ax = plt.subplots(figsize=(5.4, 2.8))
for number, values in enumerate(scores.values()):
    ax.scatter([number] * len(values), values, color="#4c72b0")
    ax.plot([number - 0.25, number + 0.25], 2 * [mean(values)], color="#c44e52")
ax.axhline(accuracy(teacher_logits), color="0.6", linestyle="--", linewidth=0.8)
ax.set_xticks(range(len(scores)), list(scores))
_ = ax.set_ylabel("accuracy")

# %% [markdown]
# Three seeds and 359 test images are few: the standard error of an accuracy of 75 % is 2.3 points,
# and the students trained alone differ by several points between seeds. So the gain of each seed is
# printed, not only the mean.
#
# Hard targets add information only where they differ from the labels. Where the teacher's predicted
# class is the label, Eq. 3 with one head is plain cross-entropy (exercise 3). Soft targets contain
# more information about each image. The next cell counts both. On ImageNet a crop often shows
# another object than the label of its image, so hard targets have more to add; DeiT found them
# better than soft ones (its Table 3).

# %%
with torch.no_grad():
    generator = torch.Generator().manual_seed(0)
    views = [teacher(shifted(labelled[0], generator)) for _ in range(20)]
agree = torch.stack([view.argmax(1) == labelled[1] for view in views]).float().mean()
elsewhere = torch.stack([1 - view.softmax(1).amax(1) for view in views]).mean()
print(
    f"predictions equal to the label {agree:.1%}, probability elsewhere {elsewhere:.1%}"
)

# %% [markdown]
# ## Two heads, one prediction
#
# A student with a distillation token has two predictions. `forward_heads` returns both. The field
# `distilled_readout` of the spec decides what a plain call returns: `"mean"`, the mean of the
# logits as in DeiT's code (the paper adds the probabilities), or `"cls"`, the class head alone as
# in lucidrains' wrapper. The weights are the same.

# %%
print("seed  class head  distillation head  mean of both")
for seed, model in zip(SEEDS, students["token, hard"], strict=True):
    with torch.no_grad():
        heads, output = (
            model.forward_heads(model.forward_features(test[0])),
            model(test[0]),
        )
    torch.testing.assert_close(output, (heads[0] + heads[1]) / 2)  # the default readout
    of_class, of_teacher, of_both = (accuracy(logits) for logits in (*heads, output))
    print(f"{seed:>4}{of_class:>12.1%}{of_teacher:>19.1%}{of_both:>14.1%}")

# %% [markdown]
# ## Two bugs, and what they cost
#
# **A teacher in training mode.** [Notebook E, "Lab notebook"](coverage.md#e-lab-notebook), never
# calls `eval()` on its teacher. Then BatchNorm uses the mean of each batch, so the teacher's output
# for an image depends on the other images of the batch. BatchNorm also moves its stored statistics
# towards the images that the student sees. `DistillWrapper` puts the teacher in eval mode at every
# call, and keeps it out of its own parameters and state.

# %%
careless, wrapped = copy.deepcopy(teacher).train(), copy.deepcopy(teacher).train()
wrapper = vitkit.DistillWrapper(student(0), wrapped)
half = labelled[0][labelled[1] < 5], labelled[1][labelled[1] < 5]  # the digits 0 to 4
for _ in range(40):
    chosen = torch.randint(len(half[1]), (64,))
    with torch.no_grad():
        careless(half[0][chosen])
    wrapper(half[0][chosen], half[1][chosen])
with torch.no_grad():
    difference = (careless(test[0][:2])[0] - careless(test[0][:64])[0]).abs().max()
    print(
        f"training mode: logits of one image in two batches differ by {difference:.1f}"
    )
    for name, model in {"training mode": careless, "DistillWrapper": wrapped}.items():
        moved = (model[1].running_mean - teacher[1].running_mean).norm()
        print(f"{name}: the mean of the first BatchNorm has moved by {moved:.2f},",
              f"test accuracy {accuracy(model.eval()(test[0])):.1%}")  # fmt: skip
assert torch.equal(wrapped[1].running_mean, teacher[1].running_mean)

# %% [markdown]
# **Token and head in the wrapper.** In lucidrains' `DistillWrapper`, the distillation token and its
# head belong to the wrapper. An optimizer over `student.parameters()` does not update them, so they
# keep their random initial values, and a saved student does not contain them ([chapter
# 12](12_lab_bugs.py#a-token-that-is-not-trained)). In vitkit they belong to the student.
#
# This is also why the parameter count of lucidrains' `DistillableViT` does not include the token.
# Here is its model (8 heads of 64, width 1024, images of 256, patches of 32, 6 blocks, an MLP of
# 2048), and the same as a student with token and head:

# %%
with torch.device("meta"):
    for token in (False, True):
        model = vitkit.create_model(
            "vit_base_patch16_224", image_size=256, patch_size=32, width=1024, depth=6,
            num_heads=8, head_width=64, mlp_width=2048, num_classes=1000,
            stem="normed_linear",
            qkv_bias=False, norm_eps=1e-5, distillation_token=token,
        )  # fmt: skip
        print(f"with token and head: {token!s:<6}{count(model):,}")

# %% [markdown]
# ## In a run
#
# `vitkit train` takes a teacher as well: a checkpoint of any format that `vitkit.load` reads, or
# `package.module:function`, a function that returns a module.
#
# | setting | meaning | default |
# | --- | --- | --- |
# | `--teacher WEIGHTS` | the teacher | none |
# | `--distill soft\|hard` | its probabilities, or its predicted class | soft |
# | `--distill-alpha` | $\lambda$, its weight in the loss | 0.5 |
# | `--distill-temperature` | $\tau$, for soft targets | 3 |
#
# The teacher runs in every step, without gradients, on the images that the student sees: augmented,
# and mixed by `--mixup` or `--cutmix`. Here are ten steps, which are one epoch. In Python, the
# teacher may also be a module or a function, here the one from above.


# %%
def teacher_of_this_page() -> nn.Module:
    return teacher


with tempfile.TemporaryDirectory() as folder:
    result = vitkit.train(
        "digits", recipe="digits", teacher=teacher_of_this_page, distill="hard",
        distill_alpha=0.5, max_steps=10, output=f"{folder}/distilled",
        quiet=True,
        spec={"class_token": True, "pooling": "cls", "distillation_token": True},
    )  # fmt: skip
    log = (result.run / "train.log").read_text().splitlines()
    weights = vitkit.load(result.best).model.state_dict()
for line in log:
    if "teacher" in line[:35]:
        print_wrapped(line[20:])
print("in the checkpoint:", [name for name in weights if "dist" in name])

# %% [markdown]
# ## At full size
#
# `benchmarks/distil.py` makes the same comparison on Fashion-MNIST with the settings of the recipe.
# A student of width 32 is trained alone, and with a teacher. The teacher is again a convolutional
# network, with two residual blocks, trained without label smoothing. The distilled student learns
# only from the teacher, at temperature 1. These results are of an earlier version, which evaluated
# the teacher once on each of 8 views of an image (`--distill-views 8`) and kept its logits; now it
# runs in every step. The time ratio includes the teacher.

# %%
results = json.loads((RESULTS / "distillation.json").read_text())
print(f"{results['command']}\n{results['processor']}, {results['date']}")
print_wrapped("student      " + " ".join(results["student"] + results["flags"]))
print("distillation", *results["settings"])
print(f"teacher     {results['teacher']:.2%}")
for kind, name in (("alone", "alone"), ("taught", "distilled")):
    print(f"{name:<11}", with_spread(results[kind]["each"]))
gain = results["taught"]["mean"] - results["alone"]["mean"]
spread = max(results[kind]["range"] for kind in ("alone", "taught"))
print(
    f"distilled minus alone: {100 * gain:+.2f} points; "
    f"range of the seeds {100 * spread:.2f}"
)
print(f"time ratio {results['time_ratio']:.2f}")

# %% [markdown]
# The student is better with each of the three seeds, by 0.6, 1.2 and 0.7 points; the mean gain is
# larger than the range of the seeds. Long training helps: with half as many epochs and half as many
# views the gain was 0.6 points ("Knowledge distillation: A good teacher is patient and consistent",
# [arXiv 2106.05237](https://arxiv.org/abs/2106.05237)).
#
# ## What you know now
#
# - A teacher's probabilities say more about an image than its label does; a higher temperature
#   makes the small ones count.
# - Soft targets compare probabilities, hard targets use the teacher's class as a second label.
# - The distillation token has its own head. It must belong to the student, or it is not trained.
# - The teacher stays in `eval()`, or its BatchNorm statistics change.
#
# ## Exercises
#
# **1. Show.** At a high temperature, soft targets become a comparison of logits ([arXiv
# 1503.02531](https://arxiv.org/abs/1503.02531), Sec. 2.1). Show that $\tau^2 \operatorname{KL}$
# approaches $\frac{1}{2K} \sum_k (\tilde z_t - \tilde z_s)_k^2$, where $\tilde z$ is $z$ minus its
# mean and $K$ the number of classes.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
generator = torch.Generator().manual_seed(0)
z_s, z_t = torch.randn(2, 6, 10, dtype=torch.float64, generator=generator)


def soft_part(T: float) -> Tensor:
    p, q = (z_t / T).log_softmax(1), (z_s / T).log_softmax(1)
    return T**2 * (p.exp() * (p - q)).sum(1).mean()


difference = (z_t - z_t.mean(1, keepdim=True)) - (z_s - z_s.mean(1, keepdim=True))
limit = difference.square().sum(1).mean() / (2 * 10)
assert abs(soft_part(1000.0) - limit) < 1e-2 * limit
assert abs(soft_part(1.0) - limit) > 5e-2 * limit, "not yet at temperature 1"

# %% [markdown]
# **2. Predict, then run.** With two heads, which one has a zero gradient if the teacher's weight is 0, and which one
# if it is 1?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
for weight, frozen, learning in (
    (0.0, "head_dist", "head"),
    (1.0, "head", "head_dist"),
):
    model = student(0, distillation_token=True)
    vitkit.DistillWrapper(model, teacher, alpha=weight)(*labelled).backward()
    assert model.get_submodule(frozen).weight.grad.abs().max() == 0
    assert model.get_submodule(learning).weight.grad.abs().max() > 0

# %% [markdown]
# **3. Show.** Show that with one head and a teacher that predicts the label of every image, hard targets
# are plain cross-entropy, for every weight of the teacher.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
with torch.no_grad():
    agree = teacher(labelled[0]).argmax(1) == labelled[1]
images, labels = labelled[0][agree], labelled[1][agree]
for weight in (0.1, 0.5, 1.0):
    loss = vitkit.DistillWrapper(plain, teacher, alpha=weight, hard=True)
    assert torch.allclose(loss(images, labels), F.cross_entropy(plain(images), labels))

# %% [markdown]
# **4. Train.** Train a student without any label: the teacher's soft targets alone (`alpha=1.0`), on
# the images of the whole training split. Is it better than the students with 200 labels? What does
# the teacher replace?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
unlabelled = student(0)
taught = vitkit.DistillWrapper(unlabelled, teacher, temperature=3.0, alpha=1.0)
no_labels = torch.zeros_like(train[1])  # never used: their weight is 1 - alpha = 0
fit(taught, unlabelled.parameters(), (train[0], no_labels), steps=200, lr=5e-3, seed=0)
with torch.no_grad():
    score = accuracy(unlabelled.eval()(test[0]))
print(f"without labels {score:.1%}, with 200 labels {mean(scores['alone']):.1%}")
assert score > mean(scores["alone"]), "a good teacher replaces the labels"

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 9. Distillation
#
# A label says "3". A trained model says "3, perhaps 8, surely not 1". The second answer tells more
# about the image, and a small model can learn from it. That is distillation: a teacher is asked,
# a student learns what it says.
#
# With the student's logits $Z_s$, the teacher's $Z_t$, labels $y$ and the softmax $\psi$, there are
# two ways, in the letters of DeiT ([arXiv 2012.12877](https://arxiv.org/abs/2012.12877)). **Soft**
# targets are from "Distilling the Knowledge in a Neural Network"
# ([arXiv 1503.02531](https://arxiv.org/abs/1503.02531)); $\tau$ is the temperature, $\lambda$ the
# teacher's share:
#
# $$ L = (1-\lambda)\,\operatorname{CE}(\psi(Z_s), y) +
#    \lambda\,\tau^2\,\operatorname{KL}\big(\psi(Z_t/\tau)\,\|\,\psi(Z_s/\tau)\big) \tag{DeiT 2} $$
#
# **Hard** targets take the teacher's first choice $y_t = \operatorname{argmax} Z_t$ for a label:
#
# $$ L = (1-\lambda)\,\operatorname{CE}(\psi(Z_s), y) + \lambda\,\operatorname{CE}(\psi(Z_s), y_t)
#    \tag{DeiT 3} $$
#
# with $\lambda = 1/2$ in the paper, which takes $\lambda = 0.1$ and $\tau = 3$ for soft ones. Both are
# `vitkit.DistillWrapper(student, teacher)`, which takes images and labels and returns the loss. It is
# `Distillation` in `vitkit.training.distillation.wrapper`.

# %%
import copy
import json
import tempfile
from statistics import mean

import torch
from matplotlib import pyplot as plt
from measured import RESULTS, with_spread
from shifted_digits import fit, images, shifted
from small_cnn import layer
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit

torch.manual_seed(0)
torch.set_num_threads(1)  # models as small as these gain nothing from more
plt.rcParams["figure.dpi"] = 80


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# %% [markdown]
# ## A teacher
#
# DeiT's teacher is a convolutional network, and so is this one: three convolutions, written with
# `torch.nn` alone. It learns the 8 x 8 digits from all of the training split. Images are shifted
# by up to one pixel, anew in every step; `fit` is a plain loop with AdamW, a warm-up and a linear
# decay (`shifted_digits.py`, beside this chapter).


# %%
def right(logits: Tensor) -> float:
    """The share of the test images whose largest logit is the right one."""
    return (logits.argmax(1) == test[1]).float().mean().item()


train, test = images("train"), images("test")
teacher = nn.Sequential(
    *layer(1, 16, stride=1), *layer(16, 32, stride=2), *layer(32, 32, stride=2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
fit(lambda images, labels: F.cross_entropy(teacher(images), labels), teacher.parameters(), train,
    steps=120, lr=1e-2, seed=0)  # fmt: skip
with torch.no_grad():
    said = teacher.eval()(test[0])
print(f"teacher: {count(teacher):,} parameters, {len(train[1]):,} images, "
      f"{right(said):.1%} of {len(test[1])} test images right")  # fmt: skip
assert right(said) > 0.9

# %% [markdown]
# ## What temperature does
#
# A good teacher is nearly always sure, and then its probabilities are as good as a label: 0.999 and
# nine small numbers. What it knows of likeness is in those small numbers. Logits divided by $\tau$
# before the softmax bring them up. Here is the test image of which this teacher is least sure, and
# one of which it is sure.

# %% mystnb={"figure": {"caption": "A teacher's answer at four temperatures. Top: the test image of which it is least sure. Bottom: one of which it is sure. At temperature 1 the sure answer is a label; from 3 on the bars of the other classes can be seen, and they are not alike: these are the likenesses that a student can learn. At a high temperature all answers go towards a tenth each."}}
temperatures = (1, 3, 8, 20)
largest = said.softmax(1).amax(1)
sure = (largest > 0.995).nonzero()[0, 0]
figure, places = plt.subplots(2, 5, figsize=(9, 3.2))
for row, number in zip(places, (largest.argmin(), sure), strict=True):
    row[0].imshow(test[0][number, 0], cmap="gray_r")
    row[0].set(title=f"label {test[1][number]}", xticks=[], yticks=[])
    for place, temperature in zip(row[1:], temperatures, strict=True):
        place.bar(range(10), (said[number] / temperature).softmax(0).tolist(), color="#4c72b0")
        place.set(title=f"temperature {temperature}", ylim=(0, 1), xticks=range(10), yticks=[])
_ = figure.tight_layout()

# %% [markdown]
# Dividing by $\tau$ also makes the gradient smaller, by $1/\tau$ for the softmax's input and by
# about $1/\tau$ again as both answers come nearer to each other. That is what $\tau^2$ in front is
# for: the share $\lambda$ keeps its meaning when the temperature is changed. The gradient of the soft
# part for a student that knows nothing yet:

# %%
for temperature in (1, 2, 4, 8, 16):
    student_logits = torch.zeros_like(said).requires_grad_()
    divergence = F.kl_div(
        (student_logits / temperature).log_softmax(1), (said / temperature).softmax(1),
        reduction="batchmean",
    )  # fmt: skip
    (slope,) = torch.autograd.grad(divergence, student_logits)
    slope = len(said) * slope.norm(dim=1).mean()
    print(f"temperature {temperature:>2}: gradient {slope:.4f}, times its square "
          f"{slope * temperature**2:.2f}")  # fmt: skip

# %% [markdown]
# ## The equations beside the module
#
# A student is a small ViT: four patches of 4 x 4, one block. With `distillation_token=True` it has a
# second token beside the class token, with a head of its own. The class token's head learns from the
# labels and the other from the teacher, so that both answers can differ (DeiT, Sec. 4). With one
# head, it learns both.


# %%
def student(seed: int, **fields: object) -> vitkit.ViT:
    torch.manual_seed(seed)
    return vitkit.ViT(vitkit.ViTSpec(
        image_size=8, patch_size=4, in_channels=1, width=64, depth=1, num_heads=4, mlp_width=128,
        num_classes=10, **fields,
    ))  # fmt: skip


plain, distilled = student(0), student(0, distillation_token=True)
print(f"{count(plain):,} parameters, with token and second head {count(distilled):,}: "
      f"{count(distilled) - count(plain)} more = 64 (token) + 64 (its position) + 65 * 10")  # fmt: skip

# %%
images, labels = test[0][:32], test[1][:32]
T, share = 3.0, 0.5
for head in (plain.head, distilled.head, distilled.head_dist):  # heads start at zero
    nn.init.normal_(head.weight, std=0.3)
z_t = teacher(images)
one, two = plain(images), distilled.forward_heads(distilled.forward_features(images))
for heads, model, (z_s, z_d) in (("one head", plain, (one, one)), ("two heads", distilled, two)):
    label_loss = -z_s.log_softmax(1)[range(32), labels].mean()
    p, q = (z_t / T).log_softmax(1), (z_d / T).log_softmax(1)
    soft = (1 - share) * label_loss + share * T**2 * (p.exp() * (p - q)).sum(1).mean()
    hard = (1 - share) * label_loss - share * z_d.log_softmax(1)[range(32), z_t.argmax(1)].mean()
    for name, by_hand in (("soft", soft), ("hard", hard)):
        wrapper = vitkit.DistillWrapper(model, teacher, T, share, hard=name == "hard")
        print(f"{heads:<10}{name}: {wrapper(images, labels):.5f}, by hand {by_hand:.5f}")
        assert torch.allclose(wrapper(images, labels), by_hand, rtol=1e-4)

# %% [markdown]
# ## Is it worth it?
#
# Students that have few labels: 20 images of each class. One learns alone. The others see the same
# images and ask the teacher, which has seen all of the training split. Everything else is the same:
# the seed, the steps, the order and the shifts of the images. Each is trained with three seeds.

# %%
SEEDS = (0, 1, 2)
few = torch.cat([(train[1] == label).nonzero()[:20, 0] for label in range(10)])
seen = train[0][few], train[1][few]
TAUGHT = {
    "soft": {"temperature": 3.0, "alpha": 0.9},
    "hard": {"hard": True, "alpha": 0.5},
    "token, hard": {"hard": True, "alpha": 0.5},
}


def trained(kind: str, seed: int) -> vitkit.ViT:
    model = student(seed, distillation_token=kind.startswith("token"))

    def alone(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    taught = TAUGHT.get(kind)
    loss = alone if taught is None else vitkit.DistillWrapper(model, teacher, **taught)
    fit(loss, model.parameters(), seen, steps=200, lr=5e-3, seed=seed)
    return model.eval()


students = {kind: [trained(kind, seed) for seed in SEEDS] for kind in ("alone", *TAUGHT)}
with torch.no_grad():
    scores = {kind: [right(made(test[0])) for made in models] for kind, models in students.items()}
for kind, values in scores.items():
    print(f"{kind:<12}", with_spread(values))

# %% mystnb={"figure": {"caption": "Test accuracy of students with 200 labelled images, a dot for each seed and a line at the mean. The dashed line is the teacher. A kind of teaching is shown to help where all its dots lie above those of the students alone, not only where its mean does."}}
figure, place = plt.subplots(figsize=(5.4, 2.8))
for number, values in enumerate(scores.values()):
    place.scatter([number] * len(values), values, color="#4c72b0")
    place.plot([number - 0.25, number + 0.25], 2 * [mean(values)], color="#c44e52")
place.axhline(right(said), color="0.6", linestyle="--", linewidth=0.8)
place.set(xticks=range(len(scores)), ylabel="accuracy")
_ = place.set_xticklabels(scores)

# %% [markdown]
# Three seeds and 359 images are few. So the gain is printed beside what chance does: the spread of
# the students alone, and the standard error of one accuracy.

# %%
spread = max(scores["alone"]) - min(scores["alone"])
middle = mean(scores["alone"])
error = (middle * (1 - middle) / len(test[1])) ** 0.5
print(f"alone: spread of seeds {100 * spread:.1f} points, standard error of one {100 * error:.1f}")
for kind in TAUGHT:
    gains = [100 * (a - b) for a, b in zip(scores[kind], scores["alone"], strict=True)]
    verdict = "no gain is shown"
    if min(gains) > 0:
        wider = mean(gains) > 100 * spread
        verdict = f"better with every seed, by {'more' if wider else 'less'} than the spread"
    by_seed = " ".join(f"{gain:+.1f}" for gain in gains)
    print(f"{kind:<12} {mean(gains):+.1f} points (by seed {by_seed}): {verdict}")

# %% [markdown]
# Hard targets can give only what differs from the labels. Where the teacher's first choice is the
# label, Eq. 3 with one head is plain cross-entropy (exercise 3). Soft targets say more of each
# image. How much of either there is here can be counted. On ImageNet a crop often shows something
# else than its image's label, so hard targets have more to say; DeiT found them better than soft
# ones (its Table 3).

# %%
with torch.no_grad():
    generator = torch.Generator().manual_seed(0)
    views = [teacher(shifted(seen[0], generator)) for _ in range(20)]
agree = torch.stack([view.argmax(1) == seen[1] for view in views]).float().mean()
unsure = torch.stack([1 - view.softmax(1).amax(1) for view in views]).mean()
print(f"the teacher's first choice is the label for {agree:.1%} of the views; "
      f"{unsure:.1%} of its probability is elsewhere")  # fmt: skip

# %% [markdown]
# ## Two heads, one answer
#
# A student with the token has two answers. `forward_heads` gives both. What a plain call returns is a
# field of the spec: `distilled_readout="mean"`, the mean of the logits as in DeiT's code (the paper
# adds the softmaxes), or `"cls"`, the class head alone as in lucidrains' wrapper. The weights are the
# same.

# %%
print("seed  class head  distillation head  mean of both")
for seed, made in zip(SEEDS, students["token, hard"], strict=True):
    with torch.no_grad():
        heads = made.forward_heads(made.forward_features(test[0]))
        answers = {}
        for readout in ("mean", "cls"):
            model = vitkit.ViT(made.spec.replace(distilled_readout=readout)).eval()
            model.load_state_dict(made.state_dict())
            answers[readout] = model(test[0])
    torch.testing.assert_close(answers["mean"], (heads[0] + heads[1]) / 2)
    torch.testing.assert_close(answers["cls"], heads[0])
    by_class, by_teacher, by_both = (right(each) for each in (*heads, answers["mean"]))
    print(f"{seed:>4}{by_class:>12.1%}{by_teacher:>19.1%}{by_both:>14.1%}")

# %% [markdown]
# ## Two slips, and what they cost
#
# **A teacher in training mode.** The lab notebook never calls `eval()` on its teacher. BatchNorm then
# takes each batch's own mean, so that what is said of an image depends on its neighbours, and it
# moves its stored statistics towards the images that the student sees. `DistillWrapper` puts the
# teacher in eval mode at every call, and keeps it out of its own parameters and state.

# %% mystnb={"figure": {"caption": "How far the running means of the teacher's first BatchNorm have moved after so many batches that a student learned from, here of the digits 0 to 4. In training mode they drift away; asked by DistillWrapper they stay."}}
careless, asked = copy.deepcopy(teacher).train(), copy.deepcopy(teacher).train()
wrapper = vitkit.DistillWrapper(student(0), asked)
half = seen[0][seen[1] < 5], seen[1][seen[1] < 5]
models = {"never in eval": careless, "DistillWrapper": asked}
moved = {name: [] for name in models}
for _ in range(40):
    chosen = torch.randint(len(half[1]), (64,))
    with torch.no_grad():
        careless(half[0][chosen])
    wrapper(half[0][chosen], half[1][chosen])
    for name, model in models.items():
        moved[name].append((model[1].running_mean - teacher[1].running_mean).norm().item())
figure, place = plt.subplots(figsize=(5, 2.4))
for name, values in moved.items():
    place.plot(values, label=name)
place.set(xlabel="batch", ylabel="distance")
_ = place.legend()
with torch.no_grad():
    one, among = careless(test[0][:2])[0], careless(test[0][:64])[0]
    apart = (one - among).abs().max()
    print(f"training mode: an image's logits differ by {apart:.1f} by its batch")
    for name, model in {"before": teacher, **models}.items():
        print(f"{name:<15} {right(model.eval()(test[0])):.1%} of the test images right")
assert moved["DistillWrapper"][-1] == 0

# %% [markdown]
# **Token and head in the wrapper.** In lucidrains' `DistillWrapper` the distillation token and its
# head are the wrapper's. An optimizer over `student.parameters()` does not have them. They stay at
# their random start, and a stored student is without them.


# %%
class Careless(nn.Module):
    """Token and head, which are to learn from the teacher, are the wrapper's own."""

    def __init__(self, student: vitkit.ViT) -> None:
        super().__init__()
        self.student = student
        self.dist_token = nn.Parameter(torch.randn(1, 1, student.spec.width))
        self.head_dist = nn.Linear(student.spec.width, student.spec.num_classes)


theirs, ours = Careless(student(0)), student(0, distillation_token=True)
for name, owner, learner in (("theirs", theirs, theirs.student), ("vitkit", ours, ours)):
    optimizer = torch.optim.AdamW(learner.parameters())
    trained_by_it = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    for part, parameter in (("token", owner.dist_token), ("head", owner.head_dist.weight)):
        print(f"{name}: the optimizer has the {part}: {id(parameter) in trained_by_it}")
    stored = [key for key in learner.state_dict() if "dist" in key]
    print(f"{name}: stored with the student: {', '.join(stored) or 'neither'}")

# %% [markdown]
# That is also why lucidrains' `DistillableViT` has no token in its count. With 8 heads of 64 at
# width 1024 (images of 256, patches of 32, 6 blocks, an MLP of 2048), and as a student of ours:

# %%
with torch.device("meta"):
    for token in (False, True):
        model = vitkit.create_model(
            "vit_base_patch16_224", image_size=256, patch_size=32, width=1024, depth=6,
            num_heads=8, head_width=64, mlp_width=2048, num_classes=1000, stem="normed_linear",
            qkv_bias=False, norm_eps=1e-5, distillation_token=token,
        )  # fmt: skip
        print(f"token and head inside: {token!s:<6}{count(model):,}")

# %% [markdown]
# ## In a run
#
# `vitkit train` takes a teacher as well: a checkpoint of any format that `vitkit.load` reads, or
# `package.module:function`, which returns a module.
#
# | setting | means | default |
# | --- | --- | --- |
# | `--teacher WEIGHTS` | who is asked | nobody |
# | `--distill soft\|hard` | its probabilities, or its first choice | soft |
# | `--distill-alpha` | $\lambda$, its share of the loss | 0.5 |
# | `--distill-temperature` | $\tau$, for soft targets | 3 |
# | `--distill-views V` | how many variants an image has in the whole run; the teacher looks at each once, and what it says is kept. 0: new variants for ever, and a teacher that is asked in every step | 0 |
#
# A few steps with the teacher from above, to see that it is so; its name is a function of this page.
# With two views an image has two variants in turn, epoch by epoch, and before the first step the
# teacher looks at all that the steps will show. Ten steps are one epoch, so here that is one view.


# %%
def knowing() -> nn.Module:
    return teacher


with tempfile.TemporaryDirectory() as folder:
    result = vitkit.train(
        "digits", recipe="digits", teacher="__main__:knowing", distill="hard", distill_alpha=0.5,
        distill_views=2, max_steps=10, output=f"{folder}/taught", quiet=True,
        spec={"class_token": True, "pooling": "cls", "distillation_token": True},
    )  # fmt: skip
    log = (result.run / "train.log").read_text()
    made = vitkit.load(result.best).model
lines = [line.split(" ", maxsplit=1)[1] for line in log.splitlines()]
print(*(line for line in lines if line.startswith(("teacher", "the teacher"))), sep="\n")
print("in the checkpoint:", [name for name in made.state_dict() if "dist" in name])

# %% [markdown]
# ## At full size
#
# `benchmarks/distil.py` does the same on Fashion-MNIST with the recipe's settings: a student of width
# 32 alone, and the same student with a teacher and kept views. The teacher is again a convolutional
# network, with two residual blocks, trained without smoothed labels; it is all that the student
# learns from, at temperature 1. The seconds are those of the whole command, so the teacher's looking
# is in them.

# %%
found = json.loads((RESULTS / "distillation.json").read_text())
print(f"{found['command']}\n{found['processor']}, {found['date']}")
print("student ", *found["student"], *found["flags"])
print("teaching", *found["settings"])
print(f"teacher {found['teacher']:.2%}")
for kind in ("alone", "taught"):
    print(f"{kind:<7}", with_spread(found[kind]["each"]))
gain = found["taught"]["mean"] - found["alone"]["mean"]
wide = max(found[kind]["range"] for kind in ("alone", "taught"))
print(f"taught - alone: {100 * gain:+.2f} points; seeds spread over up to {100 * wide:.2f}; "
      f"{found['time_ratio']:.2f} times the seconds, "
      f"{found['time_ratio_kept']:.2f} without the teacher's looking")  # fmt: skip

# %% [markdown]
# The student is better with each of the three seeds, by 0.6, 1.2 and 0.7 points; the mean of that is
# above the whole range of the seeds. It pays to be patient: with half as many epochs and half as many
# views it was 0.6 points ("Knowledge distillation: A good teacher is patient and consistent",
# [arXiv 2106.05237](https://arxiv.org/abs/2106.05237)).
#
# ## Exercises
#
# **1.** At a high temperature, soft targets become a comparison of logits
# ([arXiv 1503.02531](https://arxiv.org/abs/1503.02531), Sec. 2.1). Show that
# $\tau^2 \operatorname{KL}$ goes to $\frac{1}{2K} \sum_k (\tilde z_t - \tilde z_s)_k^2$, where
# $\tilde z$ is $z$ less its mean and $K$ the number of classes.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
z_s, z_t = torch.randn(2, 6, 10, dtype=torch.float64)


def soft_part(T: float) -> Tensor:
    p, q = (z_t / T).log_softmax(1), (z_s / T).log_softmax(1)
    return T**2 * (p.exp() * (p - q)).sum(1).mean()


apart = (z_t - z_t.mean(1, keepdim=True)) - (z_s - z_s.mean(1, keepdim=True))
limit = apart.square().sum(1).mean() / (2 * 10)
assert abs(soft_part(1000.0) - limit) < 1e-2 * limit
assert abs(soft_part(1.0) - limit) > 5e-2 * limit, "not yet at temperature 1"

# %% [markdown]
# **2.** With two heads, which of them has a gradient where the teacher's share is 0, and which where
# it is 1?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
for share, still, learning in ((0.0, "head_dist", "head"), (1.0, "head", "head_dist")):
    model = student(0, distillation_token=True)
    vitkit.DistillWrapper(model, teacher, alpha=share)(*seen).backward()
    assert model.get_submodule(still).weight.grad.abs().max() == 0
    assert model.get_submodule(learning).weight.grad.abs().max() > 0

# %% [markdown]
# **3.** Show that with one head and a teacher whose first choice is the label for every image,
# hard targets are plain cross-entropy, whatever the share.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
with torch.no_grad():
    sure_of = teacher(seen[0]).argmax(1) == seen[1]
for share in (0.1, 0.5, 1.0):
    loss = vitkit.DistillWrapper(plain, teacher, alpha=share, hard=True)
    expected = F.cross_entropy(plain(seen[0][sure_of]), seen[1][sure_of])
    assert torch.allclose(loss(seen[0][sure_of], seen[1][sure_of]), expected)

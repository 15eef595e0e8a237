# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 8. Pre-train, then fine-tune
#
# The ViT paper does not start from random weights for every dataset. It pre-trains once, on very
# many other images. Then it continues from these weights (fine-tuning), with fewer images, fewer
# steps, a new head and often a higher resolution (its Sec. 3.2). This chapter does the same at a
# small scale: pre-training on the digits 0 to 4, fine-tuning on the digits 5 to 9 with ten labelled
# images of each.
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** how to go on from trained weights: a new head, another resolution, checkpoints
#   of other libraries, and which way of fine-tuning is worth what.
# - **You need** [chapter 4](04_vit.py) and [chapter 5](05_training.py).
# - **Reading** about 30 minutes
# :::

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports", "code_prompt_hide": "Hide the imports"}
import logging
import shutil
import tempfile
from math import log
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from drawing import grid_of, print_wrapped
from matplotlib import pyplot as plt
from measured import measured
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import vitkit
from vitkit.data.images.preprocess import preprocess_images
from vitkit.data.sources.open import open_dataset
from vitkit.models.embedding import resample_positions, sincos_2d

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Two datasets
#
# Both are written as folders, `train/<class>` and `test/<class>`, a common layout for your own
# images. The second dataset has ten training images of each class, and all test images.

# %%
DIGITS = open_dataset("digits").splits


def write(target: Path, classes: range, each: int | None) -> None:
    """Write PNG files of some classes, at most `each` training images per class."""
    for split, part in DIGITS.items():
        for label in classes:
            (target / split / str(label)).mkdir(parents=True)
            numbers = np.flatnonzero(part.labels == label)
            for number in numbers[:each] if split == "train" else numbers:
                path = target / split / str(label) / f"{number}.png"
                Image.fromarray(part.read(int(number))[..., 0]).save(path)


write(folder / "many", range(5), None)
write(folder / "few", range(5, 10), 10)
for name in ("many", "few"):
    opened = open_dataset(folder / name)
    print(f"{name:<5} classes {' '.join(opened.classes)}:",
          ", ".join(f"{len(part)} in {split}" for split, part in opened.splits.items()))  # fmt: skip


# %% mystnb={"figure": {"caption": "Above: images for pre-training, at 12 x 12 pixels, which are 3 x 3 patches of 4 x 4. Below: images for fine-tuning, at 20 x 20, which are 5 x 5 patches of the same size. The digits were scanned at 8 x 8, so the larger images are smoother and have no more detail; photographs would have more."}}
def enlarged(classes: range, size: int) -> list[np.ndarray]:
    part = DIGITS["train"]
    first = [int(np.flatnonzero(part.labels == label)[0]) for label in classes]
    return [
        np.asarray(Image.fromarray(part.read(n)[..., 0]).resize((size, size)))
        for n in first
    ]


_ = grid_of([*enlarged(range(5), 12), *enlarged(range(5, 10), 20)], across=5, size=0.9)

# %% [markdown]
# ## Pre-training
#
# Pre-training is an ordinary training run. It writes a checkpoint that describes itself: weights,
# spec, preprocessing, class names.

# %%
SPEC = {
    "image_size": 12, "patch_size": 4, "in_channels": 1,
    "width": 48, "depth": 3, "num_heads": 3,
    "mlp_width": 96, "stem": "linear",
}  # fmt: skip
IMAGES = {"flip": 0.0, "shift": 1, "crop_scale": 1.0, "fit": "squash"}
PLAIN = {
    "warmup_epochs": 2.0, "beta2": 0.95, "amp": "off", "attention_kernel": "plain",
    "device": "cpu", "workers": 0, "log_examples": False, "log_histograms": False,
    "quiet": True,
}  # fmt: skip

first = vitkit.train(
    folder / "many", spec=SPEC, epochs=15, batch_size=64, lr=4e-3,
    output=str(folder / "first"),
    **IMAGES, **PLAIN,
)  # fmt: skip
before = vitkit.load(first.best)
test = first.metrics["test"]
print(f"{sum(p.numel() for p in before.model.parameters()):,} parameters,",
      f"{test['top1']:.1%} of {test['images']:.0f} test digits of 0 to 4")  # fmt: skip

# %% [markdown]
# ## Positions for another resolution
#
# A larger image with the same patch size is a longer sequence. The weights of the blocks do not
# depend on the number of tokens. The position table does: it has one row for each position of a
# grid. So it is treated as a small image with $D$ channels, and enlarged from the grid $g$ to the
# grid $g'$:
#
# $$ E'_\text{pos} = \big[\,E_\text{pos}[0];\
#    \operatorname{interpolate}(E_\text{pos}[1 \dots N],\ g \to g')\,\big] $$
#
# The row of the class token stays the same. `resample_positions` computes this equation, with seven
# methods of interpolation, because libraries differ. The example is the paper's own step, from 224
# to 384 pixels:

# %%
base = vitkit.create_model("vit_base_patch16_224", depth=1).eval()
larger = vitkit.resized(base, image_size=384)
print(
    "table at 224:",
    tuple(base.pos_embed.shape),
    " at 384:",
    tuple(larger.pos_embed.shape),
)
image = torch.randn(1, 3, 384, 384)
with torch.inference_mode():
    difference = (
        (base.forward_features(image).cls - larger.forward_features(image).cls)
        .abs()
        .max()
    )
print(
    "the model for 224 pixels resamples its positions itself: "
    f"difference {difference:.0e}"
)

# %% [markdown]
# [Notebook C, "From scratch with einops"](coverage.md#c-from-scratch-with-einops), takes `pos_embed[:, :N + 1]` for an image of another size. For a larger
# image this fails, because the table has too few rows. For a smaller image there is no error. In an
# image with ten columns, the first patch of the second row gets position 10 of the 14 x 14 table,
# which is still in the first row of the table ([chapter 11](11_bugs.py#the-first-rows-of-pos_embed)
# has a figure).
#
# Does a resampled position still encode the same place? The table of our own model was learned for
# 3 x 3 positions:


# %% mystnb={"figure": {"caption": "Similarity of one position embedding to all others, for the upper left corner and for the centre: on 3 x 3 positions after pre-training, and on 5 x 5 at the start of fine-tuning. The pattern of each position is spread over the finer grid."}}
def similarity(table: torch.Tensor, side: int, row: int, column: int) -> torch.Tensor:
    """Return the cosine similarity (side, side) of all positions to (row, column)."""
    rows = F.normalize(table[0, 1:].detach(), dim=1)
    return (rows @ rows[row * side + column]).unflatten(0, (side, side))


learned = before.model.pos_embed
finer = resample_positions(learned, (3, 3), (5, 5))
print(tuple(learned.shape), "->", tuple(finer.shape))
views = {
    "corner, 3 x 3": similarity(learned, 3, 0, 0),
    "corner, 5 x 5": similarity(finer, 5, 0, 0),
    "middle, 3 x 3": similarity(learned, 3, 1, 1),
    "middle, 5 x 5": similarity(finer, 5, 2, 2),
}  # fmt: skip
_ = grid_of(list(views.values()), list(views), across=4, size=1.7)

# %% [markdown]
# ## Fine-tuning, compared with other methods
#
# `pretrained` is the checkpoint, `img_size` the new image size. There are three ways to use fifty
# labels at 20 x 20 pixels:
#
# - **fine-tuning**: all weights are trained, starting from the pre-trained ones;
# - **a linear probe**: only a linear classifier is fitted, to features that are computed once;
# - **from scratch**: the same model from random weights, with the same steps and learning rate; and
#   once more with twice as many steps.
#
# The probe chooses the strength of its regularisation on a fifth of the fifty images.

# %%
few = folder / "few"
TRAINING = {"batch_size": 25, "lr": 2e-3, "val_fraction": 0.0}
PROBE = {"probe": "linear", "val_fraction": 0.2}
PRETRAINED = {"pretrained": str(first.best), "img_size": 20}
SCRATCH = {"spec": SPEC | {"image_size": 20}}
methods = {
    "fine-tuned": PRETRAINED | TRAINING | {"epochs": 40},
    "linear probe": PRETRAINED | PROBE,
    "from scratch": SCRATCH | TRAINING | {"epochs": 40},
    "from scratch, twice as long": SCRATCH | TRAINING | {"epochs": 80},
}
runs = {
    name: vitkit.train(
        few, seed=0, output=str(folder / name), **settings, **IMAGES, **PLAIN
    )
    for name, settings in methods.items()
}
tuned = runs["fine-tuned"]

# %% [markdown]
# The log of the run lists what was done to the weights:

# %%
for line in (tuned.run / "train.log").read_text().splitlines():
    if "pos_embed" in line or "the head of" in line:
        print(line[20:])

# %% [markdown]
# The old head cannot be used, because the classes are different. The new head is a matrix of zeros,
# as in the paper, so that the first prediction is uniform and its loss is $\ln 5$. With the same
# class names the head would have been kept, and sorted into the class order of the dataset.

# %% mystnb={"figure": {"caption": "Test accuracy on the digits 5 to 9 at 20 x 20 pixels after training with fifty labels, with intervals of 95 %. There is one seed, so the intervals describe only the number of test images. The dotted line is random guessing."}}
scores = {name: vitkit.evaluate(run.last, few) for name, run in runs.items()}
figure, ax = plt.subplots(figsize=(5, 1.8))
for height, (name, score) in enumerate(scores.items()):
    ax.plot([score["top1_low"], score["top1_high"]], [height] * 2, color="0.6")
    ax.plot(score["top1"], height, "o", color="C0")
    print(f"{name:<27} {score['top1']:.1%} "
          f"({score['top1_low']:.1%} to {score['top1_high']:.1%})"
          f" of {score['images']:.0f}")  # fmt: skip
ax.set(
    yticks=range(4), yticklabels=list(scores), ylim=(3.5, -0.5), xlabel="test accuracy"
)
_ = ax.axvline(0.2, color="0.8", linestyle=":")

# %% [markdown]
# With equally many steps, starting from other digits is far better than starting from scratch.
# Trained for twice as long, the model from scratch is no longer clearly worse on so few test
# images: a part of the gain from pre-training is the gain from more training. So a gain should
# always be reported together with the amount of training on both sides. A probe can only use the
# existing features, here 48 numbers that were trained to distinguish five other digits, at another
# image size.
#
# Between a probe and full fine-tuning, a part of the weights can be frozen. `freeze="backbone"`
# trains only the head, by gradients; `freeze_blocks=2` freezes the embedding and two blocks. On the
# command line the settings are `--pretrained FILE`, `--img-size 20`, `--probe linear`, `--freeze
# backbone` and `--freeze-blocks 2`. The number of parameters that are trained:


# %%
def trainable(model: vitkit.ViT) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


model = vitkit.load(tuned.last).model.requires_grad_(True)
print(f"nothing frozen: {trainable(model):,}")
vitkit.freeze(model, blocks=2)
print(f"embedding and two blocks frozen: {trainable(model):,}")
vitkit.freeze(model, "backbone")
print(f"backbone frozen: {trainable(model):,}")

# %% [markdown]
# ## The same at full size
#
# Fifty tiny digits are only a sketch. `benchmarks/transfer.py` makes the same measurement with
# larger datasets; it takes too long for this page. It pre-trains on Fashion-MNIST at 28 x 28 for 80
# minutes, then fine-tunes on 1,000 labelled digits of MNIST at a higher resolution. The comparison
# is the same model trained on these digits from scratch, in three ways: with the same settings,
# with a better learning rate, and for twice as many epochs. Clothes are not digits, so a gain comes
# from general features below the head.

# %% mystnb={"figure": {"caption": "Accuracy on the test digits, one line for each random choice of 1,000 digits. From left to right: from scratch on the labelled digits with the settings of the fine-tuning; with twice the learning rate; for twice as many epochs; and pre-trained on clothes, then fine-tuned for as many epochs as the first. The gain from pre-training depends on which of the first three it is compared with."}}
METHODS = {"same": "from scratch, same rate", "alone": "from scratch, twice the rate",
           "longer": "from scratch, twice as long", "pretrained": "pre-trained"}  # fmt: skip
results = measured("transfer")
print(f"scored on: {results['scored on']}, {results['img_size']} px")
for key in ("same", "alone", "longer"):
    print_wrapped(f"{METHODS[key]}: {' '.join(results[key])}")
figure, ax = plt.subplots(figsize=(6, 3))
for run in results["runs"]:
    ax.plot([run[key] for key in METHODS], marker="o", label=f"seed {run['seed']}")
    print(f"seed {run['seed']}")
    for key, name in METHODS.items():
        print(f"    {name:<28} {run[key]:.2%} in {run['seconds'][key]:.0f} s")
for key in ("same", "alone", "longer"):
    gains = [100 * (run["pretrained"] - run[key]) for run in results["runs"]]
    print(f"pre-trained minus {METHODS[key]}: {mean(gains):+.2f} points",
          f"({min(gains):+.2f} to {max(gains):+.2f})")  # fmt: skip
ax.set_xticks(range(4), [name.replace(", ", ",\n") for name in METHODS.values()])
ax.set(xlim=(-0.3, 3.3), ylabel="test accuracy")
_ = ax.legend(fontsize=8)

# %% [markdown]
# With the same settings, pre-training on clothes gains two points for two choices of digits and six
# for the third, three and a half on average. Most of that is speed: from scratch, a higher rate is
# better on average, and with twice as many epochs no gain is left. A thousand digits, shifted anew
# in every epoch, are enough to learn this task almost completely. Pre-training saves time, and
# gains accuracy where labels are fewer or where the first task is more similar.
#
# ## Checkpoints of other libraries
#
# Most pretrained weights are not in vitkit's format. `vitkit.load` reads eight other formats, and
# recognises them by the names and shapes of their tensors. This page has no network access, so
# `vitkit.convert` writes our own model in three of these formats, and `vitkit.load` reads them
# back.

# %%
print_wrapped("formats: " + ", ".join(sorted(vitkit.formats())))
try:
    vitkit.convert(first.best, folder / "google", to="google")
except vitkit.VitkitError as error:
    print_wrapped(str(error).replace(f"{folder}/", ""))

# %% [markdown]
# Google's code computes GELU by the tanh approximation, so the same weights would give slightly
# different outputs. So the conversion needs your consent: `allow_lossy=True`. The report lists
# every such change by kind: `folded` changes are exact, `approximated` ones are not, and `lost`
# parts do not exist in the target format. `notes` list other information that the format cannot
# store. One note is about the temperature: at its end, a run fits the number by which logits are
# divided, so that probabilities are calibrated on its validation images. It changes no predicted
# class, and only vitkit's own format stores it.

# %%
reports = {
    target: vitkit.convert(
        first.best, folder / target, to=target, allow_lossy=target == "google"
    )
    for target in ("huggingface", "torchvision", "google")
}
for target, report in reports.items():
    files = ", ".join(file.name for file in report.files)
    print_wrapped(f"{target}: {report.kept} tensors kept; files {files}")
    for kind in ("folded", "approximated", "lost", "notes"):
        for line in getattr(report, kind):
            print_wrapped(f"    {kind}: {line}")
    print(f"    run by {report.proved_by}:\n"
          f"    logits differ by at most {report.max_difference:.1e}")  # fmt: skip

# %% [markdown]
# When the files are read back, the logits for real digits are those of the original model. `load`
# also logs which values a file does not state. The next section lists them, so the log is off here.

# %%
logging.getLogger("vitkit").setLevel(logging.ERROR)
images = preprocess_images(
    [DIGITS["test"].read(n) for n in range(64)], before.preprocess
)


def logits_of(model: vitkit.ViT) -> torch.Tensor:
    with torch.inference_mode():
        return model(images)


ours = logits_of(before.model)
for target in reports:
    back = vitkit.load(folder / target)
    theirs = logits_of(back.model)
    difference = (theirs - ours).abs().max()
    changed = (theirs.argmax(1) != ours.argmax(1)).sum()
    print(f"{target:<11} read as {back.format:<11} "
          f"logits differ by {difference:.0e}, "
          f"{changed} of {len(images)} predictions differ")  # fmt: skip

# %% [markdown]
# What does a `vitkit.ConversionReport` prove? `kept` tensors have the same bits. Then the written
# files were loaded and run, and the logits were compared on one fixed image of noise. `proved_by`
# names the code that ran them. Where the library of the format can be imported and has such models,
# it is a class of that library; then names, transposed matrices, the order of query, key and value,
# epsilon and activation are right. Otherwise vitkit read the files itself. That proves that nothing
# was lost, but not that the other library reads them in the same way. Neither proves anything about
# the preprocessing or the order of the classes. What a format cannot store is in the notes.
#
# ## What a file does not store
#
# A file from another source has names and shapes, and often nothing else. `vitkit.inspect` lists
# for each field how it is known: `stored` in the file or given by the caller, determined by the
# `shapes`, or only `usual` for such files. Here is the torchvision file without the header that
# vitkit wrote into it.

# %%
weights = load_file(
    next(file for file in reports["torchvision"].files if file.suffix == ".safetensors")
)
bare = folder / "bare.safetensors"
save_file(weights, bare)
said = str(vitkit.inspect(bare, num_heads=3)).replace(f"{folder}/", "")
for line in said.splitlines():
    print_wrapped(line)

# %% [markdown]
# The number of heads is listed as `stored`, although the file does not have it: it was given by the
# caller, which counts as stored. The shapes do not determine it, because the matrices of three
# heads of 16 have the same shape as those of four heads of 12. Exercise 3 shows the effect of a
# wrong number. The preprocessing is only `usual`, and here it is wrong: mean and standard deviation
# are those of photographs, but our model was trained with 0.5 and 0.5. Compare such a line with the
# documentation of the weights.
#
# ## What you know now
#
# - Fine-tuning keeps all weights but the head, which starts at zero.
# - A learned position table is interpolated for another grid; the way of doing it matters when the
#   size changes much.
# - With few labelled images, pre-trained weights are worth more than any choice of the recipe.
# - `vitkit.load` reads the files of other libraries, and `vitkit.convert` writes them.
#
# ## Exercises
#
# **1. Predict, then run.** Grids of 14 x 14 and 7 x 28 have the same number of positions, so the
# same table fits both. Must it be resampled all the same? Does the row of the class token change?
# (The fixed 2-D table, `sincos_2d((14, 14), 768)`, is an example whose values are known.)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
table = torch.cat([torch.zeros(1, 1, 768), sincos_2d((14, 14), 768)[None]], dim=1)
wide = resample_positions(table, (14, 14), (7, 28))
assert wide.shape == table.shape
assert not torch.allclose(wide[:, 1:], table[:, 1:], atol=0.1)
torch.testing.assert_close(wide[:, :1], table[:, :1])
# position (3, 13) of 7 x 28 is in the centre:
# similar to (6, 6) or (7, 6), not to row 97 of 196
middle = F.normalize(wide[0, 1 + 3 * 28 + 13], dim=0)
nearest = (F.normalize(table[0, 1:], dim=1) @ middle).argmax().item()
assert divmod(nearest, 14) in [(6, 6), (7, 6), (6, 7), (7, 7)]

# %% [markdown]
# **2. Show.** The new head starts at zero. What is the loss of the first step, and which weights
# does that step change? (Hint: which gradients are zero?)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
fresh = vitkit.adapt(before, num_classes=5).model
nn.init.zeros_(fresh.head.weight)
nn.init.zeros_(fresh.head.bias)
loss = F.cross_entropy(fresh(images), torch.randint(5, (len(images),)))
assert abs(loss.item() - log(5)) < 1e-5
loss.backward()
# the gradient reaches the backbone through the head's matrix, which is zero
changed = {
    name.partition(".")[0]
    for name, p in fresh.named_parameters()
    if p.grad.abs().sum() > 0
}
assert changed == {"head"}

# %% [markdown]
# **3. Predict, then run.** Read `bare` with three heads, as it was trained, and with four. Is there
# an error? Are the logits the same? Would the accuracy have shown the mistake?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
three, four = (vitkit.load(bare, num_heads=count).model for count in (3, 4))
torch.testing.assert_close(logits_of(three), ours, atol=1e-4, rtol=1e-4)
assert not torch.allclose(logits_of(four), ours, atol=0.1), "no error, but other logits"
labels = DIGITS["test"].labels[:64]
known = np.isin(labels, range(5))  # the model knows the digits 0 to 4
truth = torch.from_numpy(labels[known])
for count, model in ((3, three), (4, four)):
    correct = logits_of(model)[known].argmax(1) == truth
    print(
        f"{count} heads: accuracy {correct.float().mean():.0%} "
        f"on {len(truth)} digits of 0 to 4"
    )
# 90 % looks like a badly trained model, not like a wrongly read one:
# only the logits show it

# %% [markdown]
# **4. Build.** Write `resample(table, old, new)`, which enlarges a position table by
# `torch.nn.functional.interpolate`, and compare it with `resample_positions`. Its default is
# bicubic interpolation with antialiasing.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def resample(
    table: torch.Tensor, old: tuple[int, int], new: tuple[int, int]
) -> torch.Tensor:
    as_image = (
        table[:, 1:].unflatten(1, old).permute(0, 3, 1, 2)
    )  # (1, D, rows, columns)
    larger = F.interpolate(as_image, size=new, mode="bicubic", antialias=True)
    return torch.cat([table[:, :1], larger.flatten(2).transpose(1, 2)], dim=1)


for new in ((24, 24), (7, 28), (14, 14)):
    expected = resample_positions(table, (14, 14), new)
    assert torch.allclose(resample(table, (14, 14), new), expected, atol=1e-5)

# %% tags=["remove-cell"]
shutil.rmtree(folder)

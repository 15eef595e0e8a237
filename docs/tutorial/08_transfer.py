# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 8. Pre-train, then fine-tune
#
# The ViT paper does not start from fresh weights for each data set. It trains once, on very many
# images of other things, and then goes on from those weights: fewer images, fewer steps, a new
# head and often a higher resolution (its Sec. 3.2). This chapter does so in small: from the digits 0
# to 4 to the digits 5 to 9, of which ten each have a label.

# %%
import shutil
import tempfile
from math import log
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from drawing import grid_of
from matplotlib import pyplot as plt
from measured import measured
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import vitkit
from vitkit.data.images.preprocess import preprocess_images
from vitkit.data.sources.open import open_dataset
from vitkit.models.positions import resample_positions, sincos_2d

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Two sets of images
#
# Both are written as folders, `train/<class>` and `test/<class>`, as your own images may lie on
# your disk. The second has ten images of a class to learn from. All its test images are kept.

# %%
DIGITS = open_dataset("digits").splits


def write(place: Path, classes: range, each: int | None) -> None:
    for split, part in DIGITS.items():
        for label in classes:
            (place / split / str(label)).mkdir(parents=True)
            numbers = np.flatnonzero(part.labels == label)
            for number in numbers[:each] if split == "train" else numbers:
                path = place / split / str(label) / f"{number}.png"
                Image.fromarray(part.read(int(number))[..., 0]).save(path)


write(folder / "many", range(5), None)
write(folder / "few", range(5, 10), 10)
for name in ("many", "few"):
    opened = open_dataset(folder / name)
    print(f"{name:<5} classes {' '.join(opened.classes)}:",
          ", ".join(f"{len(part)} in {split}" for split, part in opened.splits.items()))  # fmt: skip


# %% mystnb={"figure": {"caption": "Above, what the model is pre-trained on, at 12 x 12 pixels: 3 x 3 patches of 4 x 4. Below, what it is fine-tuned on, at 20 x 20: 5 x 5 patches of the same size. The digits were scanned at 8 x 8, so the larger images are smoother and hold nothing new; a camera's would."}}
def enlarged(classes: range, size: int) -> list[np.ndarray]:
    part = DIGITS["train"]
    first = [int(np.flatnonzero(part.labels == label)[0]) for label in classes]
    return [np.asarray(Image.fromarray(part.read(n)[..., 0]).resize((size, size))) for n in first]


_ = grid_of([*enlarged(range(5), 12), *enlarged(range(5, 10), 20)], across=5, size=0.9)

# %% [markdown]
# ## Pre-training
#
# Nothing is special about it. It is a training run, and what it leaves is a file that describes
# itself: weights, spec, preprocessing, class names.

# %%
SPEC = {
    "image_size": 12, "patch_size": 4, "in_channels": 1, "width": 48, "depth": 3, "num_heads": 3,
    "mlp_width": 96, "stem": "linear",
}  # fmt: skip
IMAGES = {"flip": 0.0, "shift": 1, "crop_scale": 1.0, "fit": "squash"}
PLAIN = {
    "warmup_epochs": 2.0, "beta2": 0.95, "amp": "off", "attention_kernel": "plain", "device": "cpu",
    "workers": 0, "log_examples": False, "log_histograms": False, "quiet": True,
}  # fmt: skip

first = vitkit.train(
    folder / "many", spec=SPEC, epochs=15, batch_size=64, lr=4e-3, output=str(folder / "first"),
    **IMAGES, **PLAIN,
)  # fmt: skip
before = vitkit.load(first.best)
print(f"{sum(p.numel() for p in before.model.parameters()):,} parameters,",
      f"{first.metrics['test']['top1']:.1%} of {first.metrics['test']['images']:.0f} test digits of 0 to 4")  # fmt: skip

# %% [markdown]
# ## Positions for another resolution
#
# A larger image with the same patches is a longer sequence. The blocks do not mind: none of their
# weights knows how many tokens there are. The table of positions does. It has one row for each place
# of a grid, so it is treated as a small image with $D$ channels and enlarged like one:
#
# $$ E'_\text{pos} = \big[\,E_\text{pos}[0];\
#    \operatorname{interpolate}(E_\text{pos}[1 \dots N],\ g \to g')\,\big] $$
#
# The class token's row stays as it is. `resample_positions` is this line, in seven ways by name, as
# libraries differ. For the paper's own step, from 224 to 384 pixels:

# %%
base = vitkit.create_model("vit_base_patch16_224", depth=1).eval()
larger = vitkit.resized(base, image_size=384)
print("table at 224:", tuple(base.pos_embed.shape), " at 384:", tuple(larger.pos_embed.shape))
image = torch.randn(1, 3, 384, 384)
with torch.inference_mode():
    apart = (base.forward_features(image).cls - larger.forward_features(image).cls).abs().max()
print(f"the model of 224 given an image of 384 does the same by itself: difference {apart:.0e}")

# %% [markdown]
# One notebook takes `pos_embed[:, :N + 1]` for an image of another size. For a larger one that fails,
# as there are no such rows. For a smaller one it does not fail. In an image of ten columns, row 10 of
# the table of 14 x 14, still in the table's first row of patches, is used for the first patch of the
# second row ([chapter 11](11_bugs.py#the-first-rows-of-pos_embed) draws it).
#
# Is a resampled place still the same place? The table of our own model was learned on 3 x 3 places:


# %% mystnb={"figure": {"caption": "The learned table, one position's likeness to all others: the upper left corner and the middle, on 3 x 3 places as pre-trained and on 5 x 5 as fine-tuning starts. What was learned of each place is spread over the places that now lie there."}}
def likeness(table: torch.Tensor, side: int, row: int, column: int) -> torch.Tensor:
    """Cosine similarity of every place of (side, side) to the one at (row, column)."""
    rows = F.normalize(table[0, 1:].detach(), dim=1)
    return (rows @ rows[row * side + column]).unflatten(0, (side, side))


learned = before.model.pos_embed
finer = resample_positions(learned, (3, 3), (5, 5))
print(tuple(learned.shape), "->", tuple(finer.shape))
views = {
    "corner, 3 x 3": likeness(learned, 3, 0, 0), "corner, 5 x 5": likeness(finer, 5, 0, 0),
    "middle, 3 x 3": likeness(learned, 3, 1, 1), "middle, 5 x 5": likeness(finer, 5, 2, 2),
}  # fmt: skip
_ = grid_of(list(views.values()), list(views), across=4, size=1.7)

# %% [markdown]
# ## Fine-tuning, and what it is compared with
#
# `pretrained` is the file, `img_size` the new size. Three ways to use fifty labels at 20 x 20 pixels:
#
# - **fine-tuning**: every weight goes on training, from the pre-trained ones;
# - **a linear probe**: nothing trains but a head, fitted to features that are computed once;
# - **alone**: the same model from fresh weights, with the same steps and the same rate; and once more
#   with twice as many steps.
#
# The probe chooses how strongly to hold back its weights, and needs a fifth of the fifty for that.

# %%
few = folder / "few"
EQUAL = {"batch_size": 25, "lr": 2e-3, "val_fraction": 0.0, "seed": 0}
LARGER = SPEC | {"image_size": 20}
runs = {
    "fine-tuned": vitkit.train(
        few, pretrained=str(first.best), img_size=20, epochs=40, output=str(folder / "tuned"),
        **EQUAL, **IMAGES, **PLAIN,
    ),
    "linear probe": vitkit.train(
        few, pretrained=str(first.best), img_size=20, probe="linear", val_fraction=0.2, seed=0,
        output=str(folder / "probe"), **IMAGES, **PLAIN,
    ),
    "alone": vitkit.train(
        few, spec=LARGER, epochs=40, output=str(folder / "alone"), **EQUAL, **IMAGES, **PLAIN
    ),
    "alone, twice as long": vitkit.train(
        few, spec=LARGER, epochs=80, output=str(folder / "longer"), **EQUAL, **IMAGES, **PLAIN
    ),
}  # fmt: skip
tuned = runs["fine-tuned"]

# %% [markdown]
# What was done to the weights is not left to be guessed. It stands in the run's log:

# %%
for line in (tuned.run / "train.log").read_text().splitlines():
    if "pos_embed" in line or "the head of" in line:
        print(line[20:])

# %% [markdown]
# The head has to go, as the classes are others. The new one is a matrix of zeros, as in the paper, so
# that the first answer is an even one and its loss $\ln 5$. Had the class names been the same, the head
# would have been kept, brought to the order of the data.

# %% mystnb={"figure": {"caption": "Test accuracy on the digits 5 to 9 at 20 x 20 pixels after fifty labelled ones, each with its interval of 95 %. One seed, so the intervals are those of the number of test images alone. The dotted line is guessing."}}
scores = {name: vitkit.evaluate(run.last, few) for name, run in runs.items()}
figure, place = plt.subplots(figsize=(5, 1.8))
for height, (name, score) in enumerate(scores.items()):
    place.plot([score["top1_low"], score["top1_high"]], [height] * 2, color="0.6")
    place.plot(score["top1"], height, "o", color="C0")
    print(f"{name:<20} {score['top1']:.1%} ({score['top1_low']:.1%} to {score['top1_high']:.1%})"
          f" of {score['images']:.0f}")  # fmt: skip
place.set(yticks=range(4), yticklabels=list(scores), ylim=(3.5, -0.5), xlabel="test accuracy")
_ = place.axvline(0.2, color="0.8", linestyle=":")

# %% [markdown]
# With equal steps, going on from other digits is far ahead of starting afresh. Trained for twice as
# long, the model alone can no longer be told apart from it by so few test images: part of what pre-training gives is training. So a gain is a gain at a given
# amount of training, and both amounts belong beside it. A probe can only use what is there, here 48
# numbers that were made to tell five other digits apart, at another size.
#
# Between a probe and full fine-tuning lies every choice of what stays frozen: `freeze="backbone"` trains
# the head alone by gradients, `freeze_blocks=2` leaves the embedding and two blocks as they are. On the
# command line these are `--pretrained FILE`, `--img-size 20`, `--probe linear`, `--freeze backbone` and
# `--freeze-blocks 2`. How many numbers train:

# %%
for name, patterns, blocks in (
    ("all", (), 0),
    ("embedding and two blocks frozen", (), 2),
    ("all but the head frozen", ("patch_embed", "cls_token", "pos_embed", "blocks", "norm"), 0),
):
    model = vitkit.load(tuned.last).model.requires_grad_(True)
    if patterns or blocks:
        vitkit.freeze(model, *patterns, blocks=blocks)
    print(f"{name:<33}{sum(p.numel() for p in model.parameters() if p.requires_grad):>8,}")

# %% [markdown]
# ## The same at full size
#
# Fifty labels of tiny digits are a sketch. The same is measured with larger sets, by a script that
# runs for longer than a page should: pre-trained on Fashion-MNIST at 28 x 28 for 80 minutes, then
# fine-tuned on 1,000 labelled digits of MNIST at a higher resolution, against the same model trained
# on those digits alone three times: with the same settings, with a rate that suits it better, and for
# twice as many epochs. Clothes are no digits, so whatever is gained was learned below the head.

# %% mystnb={"figure": {"caption": "Accuracy on the test digits, a line for each draw of 1,000 digits. From left to right: the model trained on the labelled digits alone with the settings of the fine-tuning; with twice the rate; for twice as many epochs; and pre-trained on clothes, then fine-tuned for as long as the first. How much the clothes are worth depends on which of the first three they are compared with."}}
WAYS = {"same": "alone, same rate", "alone": "alone, twice the rate", "longer": "alone, twice as long",
        "pretrained": "pre-trained"}  # fmt: skip
results = measured("transfer")
print(f"scored on: {results['scored on']}, {results['img_size']} px")
for way in ("same", "alone", "longer"):
    print(f"{WAYS[way]}:", *results[way])
figure, place = plt.subplots(figsize=(6, 3))
for run in results["runs"]:
    place.plot([run[way] for way in WAYS], marker="o", label=f"seed {run['seed']}")
    each = [f"{name} {run[way]:.2%} in {run['seconds'][way]:.0f} s" for way, name in WAYS.items()]
    print(f"seed {run['seed']}:", ", ".join(each))
for way in ("same", "alone", "longer"):
    gains = [100 * (run["pretrained"] - run[way]) for run in results["runs"]]
    print(f"pre-trained over {WAYS[way]}: {mean(gains):+.2f} points",
          f"({min(gains):+.2f} to {max(gains):+.2f})")  # fmt: skip
place.set_xticks(range(4), [name.replace(", ", ",\n") for name in WAYS.values()])
place.set(xlim=(-0.3, 3.3), ylabel="test accuracy")
_ = place.legend(fontsize=8)

# %% [markdown]
# With the same settings the clothes are worth two points with two of the draws and six with the third,
# three and a half in the mean. Most of that is the pace: alone the model does better with a higher rate
# on average, and nothing is left where it has twice as many epochs. A thousand digits, shifted anew in
# every epoch, are enough to learn most of what there is to learn; pre-training saves time, and pays
# where labels are fewer, or the first task is nearer.
#
# ## Other people's checkpoints
#
# Most weights worth starting from are not in vitkit's format. `vitkit.load` reads eight others, and
# tells them by the names and shapes of their tensors. To have some here without a network, our own
# model is written in three of them by `vitkit.convert`, and read back.

# %%
print("formats:", ", ".join(sorted(vitkit.formats())))
try:
    vitkit.convert(first.best, folder / "google", to="google")
except vitkit.VitkitError as error:
    print(str(error).replace(f"{folder}/", ""))

# %% [markdown]
# That was refused: Google's code computes GELU by its tanh formula, so the same numbers would give
# slightly other answers. Whoever accepts that says so. The report has every such step, by kind:
# `folded` ones are exact, `approximated` ones are not, `lost` ones have no place in the target. Notes
# say what the file has no place for beside the weights. One is of the temperature: at its end a run
# looks for the number by which logits are to be divided, so that probabilities fit its validation
# images (calibration). It changes no answer, and only vitkit's own format has it.

# %%
reports = {
    target: vitkit.convert(first.best, folder / target, to=target, allow_lossy=target == "google")
    for target in ("huggingface", "torchvision", "google")
}
for target, report in reports.items():
    print(
        f"{target}: {report.kept} tensors kept; files",
        ", ".join(file.name for file in report.files),
    )
    for kind in ("folded", "approximated", "lost", "notes"):
        for line in getattr(report, kind):
            print(f"    {kind}: {line}")
    print(f"    run by {report.proved_by}: blocks differ by at most {max(report.differences):.1e}, "
          f"logits by {report.max_difference:.1e}")  # fmt: skip

# %% [markdown]
# Back again, on real digits: the logits are those of the model that was written.

# %%
some = [DIGITS["test"].read(number) for number in range(64)]
images = preprocess_images(some, before.preprocess)


def logits_of(model: vitkit.ViT) -> torch.Tensor:
    with torch.inference_mode():
        return model(images)


ours = logits_of(before.model)
for target in reports:
    back = vitkit.load(folder / target)
    theirs = logits_of(back.model)
    print(f"{target:<12} read as {back.format:<12} logits differ by {(theirs - ours).abs().max():.1e} "
          f"of {ours.abs().max():.1f}; answers differ in "
          f"{(theirs.argmax(1) != ours.argmax(1)).sum()} of {len(images)}")  # fmt: skip

# %% [markdown]
# What is proved by a `vitkit.ConversionReport`? `kept` tensors went over with the same bits. The files
# as written were then run, and each block's tokens and the logits compared on one fixed image of
# noise. Who ran them is in `proved_by`: the class of the library whose format it is, where that can
# be imported and has such models. Then names, transposed matrices, the order of query, key and value,
# epsilon and activation are right. Else vitkit read them again, which proves that nothing was lost on
# the way, and not that others read the same. Neither says anything of what stands around a model:
# which mean and deviation images need, which class is which number. What a file has no place for is
# in the notes.
#
# ## What a file does not say
#
# A stranger's file has names and shapes and often nothing else. `vitkit.inspect` says of each field how
# it is known: `stored` in the file or told by whoever reads it, forced by the `shapes`, or only `usual`
# for such files. Here is the file for torchvision without the header that vitkit put into it.

# %%
weights = load_file(
    next(file for file in reports["torchvision"].files if file.suffix == ".safetensors")
)
bare = folder / "bare.safetensors"
save_file(weights, bare)
print(str(vitkit.inspect(bare, num_heads=3)).replace(f"{folder}/", ""))

# %% [markdown]
# The number of heads is listed as `stored`, but the file does not have it: it was passed, and what is
# passed counts as stored. No shape knows it, as the matrices of three heads of 16 are those of four
# heads of 12. Exercise 3 shows what a wrong guess does. The preprocessing is only `usual`, and
# here it is wrong: it is that of colour photographs, three means for images of one channel. Such a
# line has to be checked against the page that the weights came from.
#
# ## Exercises
#
# **1.** Grids of 14 x 14 and 7 x 28 have equally many places, so a table fits both. Show that it must be
# resampled all the same, and that the class token's row is not touched. (A table that is known to be
# right is the fixed 2-D one, `sincos_2d((14, 14), 768)`.)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
table = torch.cat([torch.zeros(1, 1, 768), sincos_2d((14, 14), 768)[None]], dim=1)
wide = resample_positions(table, (14, 14), (7, 28))
assert wide.shape == table.shape
assert not torch.allclose(wide[:, 1:], table[:, 1:], atol=0.1)
torch.testing.assert_close(wide[:, :1], table[:, :1])
# place (3, 13) of 7 x 28 lies in the middle: like (6, 6) or (7, 6), not like row 97 of 196
middle = F.normalize(wide[0, 1 + 3 * 28 + 13], dim=0)
nearest = (F.normalize(table[0, 1:], dim=1) @ middle).argmax().item()
assert divmod(nearest, 14) in [(6, 6), (7, 6), (6, 7), (7, 7)]

# %% [markdown]
# **2.** The new head starts at zero. What is the loss of the first step, and which weights does that
# step change?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
fresh = vitkit.adapt(before, num_classes=5).model
nn.init.zeros_(fresh.head.weight)
nn.init.zeros_(fresh.head.bias)
loss = F.cross_entropy(fresh(images), torch.randint(5, (len(images),)))
assert abs(loss.item() - log(5)) < 1e-5
loss.backward()
# the gradient reaches the backbone through the head's matrix, which is zero: only the head moves
moved = {name.partition(".")[0] for name, p in fresh.named_parameters() if p.grad.abs().sum() > 0}
assert moved == {"head"}

# %% [markdown]
# **3.** Read `bare` with three heads, as it was trained, and with four. Is there an error? Are the
# logits the same? Would the accuracy have told?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
three, four = (vitkit.load(bare, num_heads=count).model for count in (3, 4))
torch.testing.assert_close(logits_of(three), ours, atol=1e-4, rtol=1e-4)
assert not torch.allclose(logits_of(four), ours, atol=0.1), "no error, other numbers"
known = np.isin(DIGITS["test"].labels[:64], range(5))
truth = torch.from_numpy(DIGITS["test"].labels[:64][known])
for count, model in ((3, three), (4, four)):
    correct = logits_of(model)[known].argmax(1) == truth
    print(f"{count} heads: {correct.float().mean():.0%} of {len(truth)} digits of 0 to 4 are right")
# 90 % looks like a model that was trained badly, not like one that is read wrong: only logits tell

# %% tags=["remove-cell"]
shutil.rmtree(folder)

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 13. Your photograph
#
# A trained model is here, and a photograph: what is on it, and where does the model look? This
# chapter recognises photographs with a small model that was trained on CIFAR-10, shows where it is
# wrong and why, does the same with a published model, and ends with what most readers want next:
# training on a folder of their own images.
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** to recognise an image by its path or its address, to read the probabilities, to
#   see where the model looks, and to train a checkpoint further on a few images of your own
# - **You need** chapters [4](04_vit.py) and [5](05_training.py); chapter
#   [7](07_looking_inside.py) explains the maps
# - **Reading** about 15 minutes
# :::

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports"}
import json
import logging
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from drawing import print_wrapped
from matplotlib import pyplot as plt
from measured import RESULTS
from photographs import (
    TEXTURES,
    seen_by,
    served,
    top_lines,
    with_titles,
    write_photographs,
    write_textures,
)
from PIL import Image

import vitkit

torch.manual_seed(0)
log = logging.getLogger("vitkit")
level = log.level
log.setLevel(logging.ERROR)  # a warning that is shown below would be printed twice
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The model
#
# The model is a ViT with 64 patches of 4 x 4 pixels. `vitkit train` trained it on CIFAR-10, and the
# tutorial carries its weights, {download}`cifar10.safetensors <checkpoints/cifar10.safetensors>`,
# with a receipt, {download}`cifar10.json <checkpoints/cifar10.json>`: how the file was made, how
# long it took, and what it scores. {download}`publish_cifar10.py <publish_cifar10.py>` made both
# from the finished run.

# %%
CHECKPOINT = Path("checkpoints") / "cifar10.safetensors"
receipt = json.loads(CHECKPOINT.with_suffix(".json").read_text())
low, high = receipt["test_top1_95"]
print_wrapped(receipt["command"])
print(f"{receipt['processor']}, {receipt['threads']} thread, {receipt['date']}")
print(f"{receipt['parameters']:,} parameters, {receipt['bytes'] / 1e6:.2f} MB")
print(f"{receipt['epochs']} epochs in {receipt['seconds'] / 60:.0f} minutes, "
      f"best after epoch {receipt['best_epoch']}")  # fmt: skip
print(
    f"test accuracy {receipt['test_top1']:.1%}, 95 % interval {low:.1%} to {high:.1%}"
)

# %% [markdown]
# ## One photograph
#
# Three lines are enough. The checkpoint describes itself: it knows its classes, and how an image
# must be resized and normalised. The photographs are those of scikit-image; put the path of your
# own in their place.

# %%
paths = write_photographs(folder / "photographs")
model = vitkit.load(CHECKPOINT)
predict = vitkit.Predictor.from_checkpoint(model)
(prediction,) = predict([paths["cat"]])
for label, probability in prediction.top:
    print(f"{label:<10} {probability:6.1%}  {'#' * round(40 * probability)}")

# %% [markdown]
# An address works in the place of a path. Here a small server on this machine stands in for the
# network, so that the chapter runs without one.

# %%
with served(folder / "photographs") as address:
    (same,) = predict([f"{address}/cat.png"])
print(same.image.replace(address, "http://..."), same.label, f"{same.probability:.1%}")
assert same.top == prediction.top

# %% [markdown]
# On the command line:
#
# ```console
# $ vitkit predict checkpoints/cifar10.safetensors cat.jpg
# $ vitkit predict checkpoints/cifar10.safetensors https://example.com/cat.jpg \
#     --save-images drawn
# $ vitkit predict checkpoints/cifar10.safetensors 'photographs/*.png' --csv answers.csv
# ```
#
# ## Right, wrong, and none of the ten
#
# The next figure has five photographs. The model gets 32 x 32 pixels of each. Two of them belong to
# one of its ten classes: the cat, and the outline of a horse. The other three belong to none.

# %% mystnb={"figure": {"caption": "Above: five photographs, with the predicted class and its probability. Below: what the model gets of them, 32 x 32 pixels, enlarged. Cat and horse are right. Coffee, rocket and astronaut are none of the ten classes, and get one all the same."}}
answers = dict(zip(paths, predict(list(paths.values())), strict=True))
originals = [np.asarray(Image.open(path).convert("RGB")) for path in paths.values()]
seen = [seen_by(model.preprocess, path) for path in paths.values()]
titles = [f"{answer.label} {answer.probability:.0%}" for answer in answers.values()]
_ = with_titles([originals, seen], [titles, [""] * 5])

# %%
print("classes:", ", ".join(model.classes))
for line in top_lines(list(answers.values()), count=3):
    print(line)

# %% [markdown]
# The softmax divides a probability of 1 among the ten classes. There is no eleventh class for "none
# of these", so a cup of coffee must get one of the ten. A low probability is a hint, but no more
# than that. The astronaut gets a class with nearly the same probability as the cat.
#
# A threshold makes the model say "I do not know" below some probability. On the test images, which
# all belong to the ten classes, this works. A higher threshold leaves fewer answers, and more of
# them are right:

# %%
print("threshold   answered   of these right   answers for the three of no class")
unknown = [answers[name].probability for name in ("coffee", "rocket", "astronaut")]
for row in receipt["thresholds_on_test"]:
    still = sum(probability >= row["threshold"] for probability in unknown)
    print(f"{row['threshold']:9.1f} {row['answered']:10.1%} {row['right']:16.1%}   "
          f"{still} of {len(unknown)}")  # fmt: skip

# %% [markdown]
# On images of other classes it promises nothing. The probability was fitted to images of the ten
# classes; what it means for anything else, nobody measured. Photographs of grass, bricks and gravel
# show this. No object is on them at all, and each gets a class that is surer than that of the cat:

# %%
for name, read in TEXTURES.items():
    (answer,) = predict([read()])
    print(f"{name:<7} {answer.label} {answer.probability:.0%}")

# %% [markdown]
# ## Cropped or squashed
#
# The photograph of the cat is 451 x 300 pixels, and the model wants a square. There are two ways.
# This checkpoint squashes: all is seen, and the cat gets narrower. Most published models crop: the
# middle is cut out, proportions stay, and the sides are lost. `Preprocess.fit` chooses.

# %% mystnb={"figure": {"caption": "The cat as the model gets it, squashed, cropped in the middle, and cropped at the right. The same cat is a frog when it is cropped in the middle: green eyes on brown fill the square, and at 32 pixels there is hardly a face left."}}
cat = np.asarray(Image.open(paths["cat"]))
Image.fromarray(cat[:, 150:450]).save(folder / "right.png")
ways = {
    "squashed": (model.preprocess, paths["cat"]),
    "cropped": (model.preprocess.replace(fit="crop", crop_ratio=1.0), paths["cat"]),
    "cropped at the right": (model.preprocess, folder / "right.png"),
}
pictures, titles = [], []
for name, (preprocess, path) in ways.items():
    other = vitkit.Predictor(
        predict.forward, preprocess, model.classes, temperature=model.temperature
    )
    (answer,) = other([path])
    pictures.append(seen_by(preprocess, path))
    titles.append(f"{name}: {answer.label} {answer.probability:.0%}")
_ = with_titles([pictures], [titles], size=2.2)

# %% [markdown]
# Which answer is right depends on a choice that nobody sees in the result. A model that is 77 %
# right on its test images is 77 % right on images *like these*: one small object, in the middle,
# squashed as in training. A face that fills the frame is not like these. So look at what the model
# gets, before you ask why it is wrong. And use the preprocessing of the checkpoint: with another
# one, the same weights are another model.
#
# ## Where the model looks
#
# `vitkit.explain` draws a map over the image. Three methods of
# [chapter 7](07_looking_inside.py) answer three questions: attention, where the last block looks;
# rollout, from which patches information may have come; LibraGrad, how much each patch added to the
# logit of *this* class. The last line of each is its faithfulness: whether the logit falls faster if
# the patches are taken away in the order of the map than in a random order.

# %% mystnb={"figure": {"caption": "Where the model looks on the cat, and on the horse's outline, by three methods. LibraGrad: red speaks for the class, blue against it. It marks both ears of the cat, and tail and neck of the horse. Rollout and attention: bright is more. They mark the cat's cheeks and the horse's belly. Patches are 8 x 8, so the maps are coarse."}}
METHODS = ("libragrad", "rollout", "attention")
rows, titles = [], []
for name in ("cat", "horse"):
    found = [vitkit.explain(model, paths[name], method=method) for method in METHODS]
    rows.append([np.asarray(each.overlay().resize((300, 220))) for each in found])
    titles.append(
        [f"{each.label} {each.probability:.0%}: {each.method}" for each in found]
    )
    for each in found:
        print(name, each.method)
        print_wrapped(f"    {each.faithfulness.line}")
_ = with_titles(rows, titles, size=2.2)

# %% [markdown]
# Attention and rollout are maps of this model, too, and they look convincing. But by this measure they
# do not say which patches this answer depends on. So the method counts, and
# [the guide to explanations](../guides/explain.md) shows how `vitkit.faithfulness_report` measures it on many images.
#
# The same for a wrong answer: why is the astronaut a truck? Such a map shows which part of the
# image was misread. It does not make the answer right.

# %% mystnb={"figure": {"caption": "LibraGrad for the astronaut: the patches that speak for the predicted class, truck, in red, and those that speak for cat, another of the ten. The dark round helmet is the strongest reason for the truck."}}
chosen = (None, "cat")
found = [vitkit.explain(model, paths["astronaut"], class_name=name) for name in chosen]
_ = with_titles(
    [[np.asarray(each.overlay()) for each in found]],
    [[f"{each.label} {each.probability:.0%}" for each in found]],
    size=2.4,
)

# %% [markdown]
# ## The same with a published model
#
# A model that was trained on ImageNet knows 1,000 classes, gets 224 x 224 pixels, and has seen a
# million photographs. The three lines stay the same; only the name changes. `vitkit.load` downloads
# the weights at the first call, 88 MB for this ViT-S (licence Apache-2.0). The file has no class
# names. A head of 1,000 rows gets those of ImageNet-1k, and the checkpoint says that this is an
# assumption.

# %%
NAME = "vit_small_patch16_224.augreg_in21k_ft_in1k"
try:
    published = vitkit.load(NAME)
except vitkit.VitkitError as error:
    print_wrapped(str(error))
else:
    predictions = vitkit.Predictor.from_checkpoint(published)(list(paths.values()))
    for line in top_lines(predictions):
        print_wrapped(line)

# %% [markdown]
# Where there is no network, that was one line that says so. In its place stands the output of a
# real run, stored with its date by `python docs/tutorial/measure.py photograph`, if there is one:

# %%
stored = RESULTS / "photograph.json"
if stored.exists():
    result = json.loads(stored.read_text())
    print(f"stored output of {result['checkpoint']}, {result['date']}")
    for line in result["lines"]:
        print_wrapped(line)
else:
    print("This output was not measured: no network where this page was built.")
    print(f"vitkit predict {NAME} cat.png --top-k 5")
    print(f"vitkit explain {NAME} cat.png --method libragrad")

# %% [markdown]
# The names of the classes need no network; they are part of vitkit. A model of this kind without
# its weights shows how the names look:

# %%
spec = vitkit.create_model(NAME, depth=1).spec
blank = vitkit.ViT(spec)
unnamed = vitkit.save(
    folder / "unnamed.safetensors", blank, preprocess=vitkit.Preprocess()
)
named = vitkit.load(unnamed)
print(f"{len(named.classes):,} names:", ", ".join(named.classes[281:286]), "...")
print_wrapped(named.metadata["warnings"][-1])

# %% [markdown]
# DINO's ViT-S (`vit_small_patch16_224.dino`) has no head, so it predicts no classes. But its
# attention maps are the ones that made such pictures popular: `vitkit explain
# vit_small_patch16_224.dino cat.png --method attention`.
#
# ## Your own classes, from a folder
#
# Nobody wants to tell ten classes of 2009 apart. The next step is a folder of your own, with one
# folder for each class. Here it is made from three photographs: squares of 24 x 24 pixels of brick,
# grass and gravel, five of each class for training. Test squares are cut from the other half of the
# same photographs.

# %%
textures = folder / "textures"
write_textures(textures, each=5, test=60, side=24)

# %% mystnb={"figure": {"caption": "All fifteen training images: brick, grass and gravel, 24 x 24 pixels each, in grey. So little is enough for a person. The classes are none of those that the model knows."}}
rows, titles = [], []
for name in ("brick", "grass", "gravel"):
    files = sorted((textures / "train" / name).iterdir())
    rows.append([np.asarray(Image.open(path)) for path in files])
    titles.append([name, *[""] * (len(files) - 1)])
_ = with_titles(rows, titles, size=1.1)

# %% [markdown]
# There are three ways to use a checkpoint, and one without it:
#
# - **a linear probe** fits a linear classifier to the features of the frozen model, computed once;
# - **a frozen backbone** trains the new head alone, by gradients and with augmentation;
# - **fine-tuning** trains all weights, from the checkpoint's;
# - **from scratch**: the same model and the same steps, from random weights.
#
# On the command line:
#
# ```console
# $ vitkit train textures --pretrained checkpoints/cifar10.safetensors --probe linear
# $ vitkit train textures --pretrained checkpoints/cifar10.safetensors --freeze backbone
# $ vitkit train textures --pretrained checkpoints/cifar10.safetensors --recipe finetune
# $ vitkit train textures --pretrained vit_small_patch16_224 --recipe finetune
# ```
#
# The last line is the same with published weights. Here the settings are given one by one, and are
# the same for all, so that the comparison is of the start alone; only the head by itself gets ten
# times the learning rate.

# %%
START = {"pretrained": str(CHECKPOINT)}
SPEC = model.model.spec.to_json()
del SPEC["num_classes"]  # follows from the data
IMAGES = {"fit": "squash", "crop_scale": 1.0}
STEPS = {"epochs": 20, "batch_size": 15, "lr": 1e-3, "val_fraction": 0.0, "shift": 4}
methods = {
    "linear probe": START | {"probe": "linear", "val_fraction": 0.2},
    "frozen backbone": START | STEPS | {"freeze": ["backbone"], "lr": 1e-2},
    "fine-tuned": START | STEPS,
    "from scratch": {"spec": SPEC} | STEPS,
}
QUIET = {
    "amp": "off", "attention_kernel": "plain", "device": "cpu", "workers": 0,
    "log_examples": False, "log_histograms": False, "plots": False, "report": False,
    "quiet": True, "test": False,
}  # fmt: skip
runs = {
    name: vitkit.train(
        textures, output=str(folder / name), seed=0, **settings, **IMAGES, **QUIET
    )
    for name, settings in methods.items()
}

# %% mystnb={"figure": {"caption": "Accuracy on 180 test squares after training with fifteen, with intervals of 95 %. One seed, and one photograph of each class: the interval counts test squares alone. The dotted line is guessing."}}
scores = {name: vitkit.evaluate(run.last, textures) for name, run in runs.items()}
figure, ax = plt.subplots(figsize=(5, 1.8))
for height, (name, score) in enumerate(scores.items()):
    low, high = score["top1_low"], score["top1_high"]
    ax.plot([low, high], [height] * 2, color="0.6")
    ax.plot(score["top1"], height, "o", color="C0")
    print(f"{name:<16} {score['top1']:.1%} ({low:.1%} to {high:.1%}) "
          f"of {score['images']:.0f}")  # fmt: skip
ax.set(yticks=range(4), yticklabels=list(scores), ylim=(3.5, -0.5), xlabel="accuracy")
_ = ax.axvline(1 / 3, color="0.8", linestyle=":")

# %% [markdown]
# Fine-tuning and the probe are better than training from scratch: the features of airplanes and
# frogs help with brick and gravel, although no class is the same. The frozen backbone is not
# better, with the same features as the probe. The probe solves for its head until nothing more is
# gained; a new head that gets twenty steps of gradients is not done.
#
# Be careful with these numbers. Test and training squares come from the same three photographs, so
# this is not how well the model knows brick in general. With your own images, put photographs of
# another day or place into `test`. [Chapter 8](08_transfer.py) measures transfer with more data,
# and compares it with a longer training from scratch.
#
# The result is one file. It holds weights, classes and preprocessing, so it is all that another
# machine needs:

# %%
tuned = runs["fine-tuned"].last
again = vitkit.load(tuned)
print(f"{tuned.stat().st_size / 1e6:.2f} MB, classes {', '.join(again.classes)}")
(answer,) = vitkit.Predictor.from_checkpoint(again)([textures / "test/grass/0.png"])
print(answer.label, f"{answer.probability:.0%}")

# %% [markdown]
# ## What you know now
#
# - An image by path or address becomes five classes with probabilities in three lines.
# - A classifier gives one of its classes to every image; a threshold helps with images like those
#   of training, and promises nothing for others.
# - Look at what the model gets: crop, squash and size decide as much as the weights.
# - A map over the image needs a method, and a score of whether it is true.
# - With a few images of your own, start from a checkpoint: probe first, then fine-tune.
#
# ## Exercises
#
# **1. Show.** The ten probabilities of an image add up to 1, whatever is on it. Show it for an
# image of noise. (Hint: `top_k=10`, and an array is an image, too.)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
(answer,) = predict([noise], top_k=10)
print(f"{answer.label} {answer.probability:.0%}")
assert len(answer.top) == 10
assert abs(sum(probability for _, probability in answer.top) - 1) < 1e-5

# %% [markdown]
# **2. Predict, then run.** The photograph of the cat is mirrored. Half of CIFAR-10's images were
# mirrored at random in each epoch of the training. Will the class stay the same?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
(mirrored,) = predict([np.ascontiguousarray(cat[:, ::-1])])
print(f"{prediction.label} {prediction.probability:.0%}, mirrored: "
      f"{mirrored.label} {mirrored.probability:.0%}")  # fmt: skip
# the head fills the frame, unlike the images of training: a small change is enough
assert (prediction.label, mirrored.label) == ("cat", "frog")

# %% [markdown]
# **3. Build.** Write a function that predicts an image and its mirror image, and returns the mean
# of the two probabilities of each class. (Hint: `predict.logits` gives the logits before the
# temperature.)


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def both_ways(image: np.ndarray) -> torch.Tensor:
    """Return the mean probabilities (K,) of an image and its mirror image."""
    logits = predict.logits([image, np.ascontiguousarray(image[:, ::-1])])
    return (logits / model.temperature).softmax(1).mean(0)


mean_of_two = both_ways(cat)
assert torch.isclose(mean_of_two.sum(), torch.tensor(1.0))
mirror_of_cat = dict(predict([np.ascontiguousarray(cat[:, ::-1])], top_k=10)[0].top)
expected = (prediction.probability + mirror_of_cat["cat"]) / 2
assert abs(mean_of_two[model.classes.index("cat")] - expected) < 1e-5

# %% [markdown]
# **4. Train.** How many images does the linear probe need? Train it with two images of each class,
# and compare it with five.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
write_textures(folder / "fewer", each=2, test=60, side=24)
settings = START | {"probe": "linear", "val_fraction": 0.5}
fewer = vitkit.train(
    folder / "fewer", output=str(folder / "two"), seed=0, **settings, **IMAGES, **QUIET
)
score = vitkit.evaluate(fewer.last, folder / "fewer")
print(f"two images: {score['top1']:.1%}, five: {scores['linear probe']['top1']:.1%}")
assert score["top1"] > 1 / 3, "better than guessing"

# %% tags=["remove-cell"]
log.setLevel(level)
shutil.rmtree(folder)

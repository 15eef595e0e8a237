# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 5. Training from scratch
#
# A model of chapter 4 starts with random weights. In each step, training takes a batch of images,
# compares the logits with the labels by cross-entropy, and moves every parameter a little against
# the gradient of that loss. This chapter writes the step out, then builds the same loop with
# PyTorch-Ignite, then runs it with `vitkit.train`.
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** to write, check and read a training: loop, handlers, curves, errors, recipe.
# - **You need** [chapter 0](00_one_page.py); [chapter 4](04_vit.py) for the names of the models.
# - **Reading** about 35 minutes
# :::

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports of this page"}
import json
import math
import tempfile
from pathlib import Path
from statistics import mean

import notebook_mnist
import torch
from drawing import count, print_wrapped
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver
from ignite.handlers.tensorboard_logger import TensorboardLogger
from ignite.metrics import Accuracy, Loss
from matplotlib import pyplot as plt
from measured import measured, with_spread
from plain_vit import PlainViT
from shifted_digits import images as tensors_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import vitkit
from vitkit.training.config.train_config import USUAL, TrainConfig
from vitkit.training.optimization.parameters import learning_rate, parameter_groups
from vitkit.training.recipes import recipe_settings

torch.manual_seed(0)
folder = tempfile.TemporaryDirectory()
here = Path(folder.name)

# %% [markdown]
# ## A step in twelve lines
#
# The data are the digits, and the model is the plain ViT of chapter 0 with patches of 4 x 4 pixels,
# which learns in seconds. A tenth of the training images is held out as the validation split. The
# function below gives the same initial weights and the same order of images whenever it is called.

# %%
EPOCHS, RATE = 8, 3e-3
train_part, val_part = random_split(
    TensorDataset(*tensors_of("train")), (1294, 144), torch.Generator().manual_seed(0)
)
val_loader = DataLoader(val_part, batch_size=144)


def start():
    torch.manual_seed(0)
    model = PlainViT(image_size=8, patch_size=4, channels=1, classes=10,
                     width=64, depth=3, heads=4, hidden=128)  # fmt: skip
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(train_part, batch_size=64, shuffle=True, generator=order)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, EPOCHS * len(loader), pct_start=0.1, cycle_momentum=False
    )
    return model, loader, optimizer, schedule


# %% [markdown]
# These are the two functions that most training notebooks have. `train` makes one pass over the images, an
# epoch; `evaluate` measures and changes nothing.


# %%
def train(model, loader, optimizer, schedule):
    model.train()  # dropout on, where there is any
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()  # else this gradient would be added to the last one
        logits = model(images)  # forward: (B, classes)
        loss = F.cross_entropy(logits, labels)  # mean over the batch: one number
        loss.backward()  # backward: a gradient for every parameter
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # no step of outliers
        optimizer.step()  # move every parameter
        schedule.step()  # the learning rate of the next step
        losses.append(loss.item())
    return losses


def evaluate(model, loader):
    model.eval()  # dropout off
    total = right = seen = 0
    with torch.no_grad():  # keep nothing for a backward pass
        for images, labels in loader:
            logits = model(images)
            total += F.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(1) == labels).sum().item()
            seen += len(labels)
    return total / seen, right / seen


by_hand, validated = [], []
model, loader, optimizer, schedule = start()
for epoch in range(1, EPOCHS + 1):
    by_hand += train(model, loader, optimizer, schedule)
    validated.append(evaluate(model, val_loader))
    loss, accuracy = validated[-1]
    print(f"epoch {epoch}: last training loss {by_hand[-1]:.3f}, "
          f"validation loss {loss:.3f}, accuracy {accuracy:.1%}")  # fmt: skip

# %% [markdown]
# Forgetting `eval()` or `no_grad()` raises no error. The first leaves dropout on, so the score is
# too low and random; the second only costs memory and time. Forgetting `zero_grad()` adds all
# gradients since the start.
#
# The ViT paper does not name the loss that it minimises, as [notebook A, "Replicating the
# paper"](coverage.md#a-replicating-the-paper-equation-by-equation) says. For one label per image,
# the published code takes the cross-entropy of the softmax, as here. On ImageNet-21k, where an
# image may belong to several classes, later code of the authors
# ([big_vision](https://github.com/google-research/big_vision)) uses a sigmoid for each class.
#
# ## The same loop with PyTorch-Ignite
#
# [Notebook B, "Attention in vision, CIFAR-10,
# Ignite"](coverage.md#b-attention-in-vision-cifar-10-ignite) trains with
# [PyTorch-Ignite](https://pytorch-ignite.ai). An `Engine` is the loop: it calls one function with
# each batch. Everything else is a *handler*, a function that the engine calls at an event, such as
# the end of an epoch. So logging, metrics and saving do not stand in the loop.

# %%
model, loader, optimizer, schedule = start()
by_ignite = []


def step(engine, batch):
    model.train()
    images, labels = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return loss.item()


trainer = Engine(step)
metrics = {"accuracy": Accuracy(), "loss": Loss(nn.CrossEntropyLoss())}
evaluator = create_supervised_evaluator(model, metrics)  # eval() and no_grad() inside


@trainer.on(Events.ITERATION_COMPLETED)
def keep_the_loss(engine):
    by_ignite.append(engine.state.output)  # what `step` returned


@trainer.on(Events.EPOCH_COMPLETED)
def validate(engine):
    scores = evaluator.run(val_loader).metrics
    if engine.state.epoch % 4 == 0:
        print(f"epoch {engine.state.epoch}: validation loss {scores['loss']:.3f}, "
              f"accuracy {scores['accuracy']:.1%}")  # fmt: skip


# %% [markdown]
# The handlers of notebook B: the weights with the best validation accuracy are saved, and the
# learning rate, the training loss and the validation metrics are logged for TensorBoard.

# %%
best = Checkpoint(
    {"model": model}, DiskSaver(here / "ignite"), filename_prefix="best", n_saved=1,
    score_name="accuracy", global_step_transform=lambda *_: trainer.state.epoch,
)  # fmt: skip
evaluator.add_event_handler(Events.COMPLETED, best)

with TensorboardLogger(log_dir=here / "ignite-logs") as logger:
    logger.attach_opt_params_handler(trainer, Events.ITERATION_STARTED, optimizer)
    logger.attach_output_handler(
        trainer, Events.ITERATION_COMPLETED, "training",
        output_transform=lambda loss: {"loss": loss},
    )  # fmt: skip
    logger.attach_output_handler(
        evaluator, Events.COMPLETED, "validation", metric_names=["loss", "accuracy"],
        global_step_transform=lambda *_: trainer.state.iteration,
    )  # fmt: skip
    trainer.run(loader, max_epochs=EPOCHS)
print("saved, with the epoch and its accuracy:", best.last_checkpoint.name)

# %% [markdown]
# It is the same loop: with the same initial weights and the same order of images, all losses are
# equal to the last bit. TensorBoard's event files, which `tensorboard --logdir FOLDER` draws in a
# browser, can be read by Python, too:

# %%
assert by_ignite == by_hand
print(f"{len(by_hand)} training losses by hand and by Ignite are equal:",
      by_ignite == by_hand)  # fmt: skip
events = EventAccumulator(str(here / "ignite-logs"))
events.Reload()
print("TensorBoard:", *events.Tags()["scalars"])
logged = [point.value for point in events.Scalars("validation/accuracy")]
assert all(
    math.isclose(a, b[1], rel_tol=1e-6) for a, b in zip(logged, validated, strict=True)
)

# %% mystnb={"code_prompt_show": "Show the drawing", "figure": {"caption": "From the event files of TensorBoard. Left: the loss of each training step, and the validation loss after each epoch (dots). Right: the learning rate, which rises for a tenth of the steps (warm-up), because the first gradients come from random weights, and then falls by a cosine to nearly zero, which averages out the noise of the last steps."}} tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6))
for tag, style in (("training/loss", "-"), ("validation/loss", "o")):
    points = events.Scalars(tag)
    left.plot([p.step for p in points], [p.value for p in points], style, label=tag)
left.set(xlabel="step", ylabel="loss")
left.legend()
points = events.Scalars("lr/group_0")
right.plot([p.step for p in points], [p.value for p in points])
right.set(xlabel="step", ylabel="learning rate")
_ = figure.tight_layout()

# %% [markdown]
# ## The same with vitkit
#
# `vitkit.train`, or the command `vitkit train digits --recipe digits`, is the loop by hand with such
# handlers called at its events: the curves, the best weights, a state to resume from, a report. A *recipe* is a
# set of choices with a name: model, optimizer, rate, changes to the images. This is what its first
# batch looks like; the recipe shifts each image by at most one pixel:

# %% mystnb={"figure": {"caption": "The first twelve images that the recipe `digits` feeds to the model, with their labels: the same digits as in chapter 0, some of them shifted by a pixel, so that a column at the edge is empty."}}
vitkit.show_batch("digits", recipe="digits", max_images=12)

# %% [markdown]
# A handler of your own is a `vitkit.Callback`; it is passed in `callbacks`. This one computes the
# loss of each step by hand, in one line, before the step is made, and compares it with the loss
# that vitkit reports. The recipe smooths the labels by 0.1, so this stands in the line as well.


# %%
class CompareLosses(vitkit.Callback):
    preprocess = vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.5,))

    def on_start(self, trainer):
        self.by_hand, self.reported = [], []

    def before_step(self, trainer, batch):
        images = batch.images(self.preprocess, torch.device("cpu"))
        with torch.no_grad():
            logits = trainer.training_step.model(images)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=0.1)
        self.by_hand.append(loss.item())

    def after_step(self, trainer, result):
        self.reported.append(result.loss)

    def after_epoch(self, trainer):
        if trainer.epoch % 8 == 0:
            print(f"epoch {trainer.epoch}: step {trainer.progress.step}, "
                  f"learning rate {trainer.learning_rate:.5f}")  # fmt: skip


compare = CompareLosses()
result = vitkit.train(
    "digits", recipe="digits", epochs=32, warmup_epochs=3.0, log_interval=5,
    callbacks=[compare], log_histograms=False, log_examples=False, quiet=True,
    output=here / "digits",
)  # fmt: skip
pairs = list(zip(compare.by_hand, compare.reported, strict=True))
difference = max(abs(a - b) for a, b in pairs)
print(f"{len(pairs)} losses by hand and by vitkit differ by at most {difference:g}")
assert difference < 1e-5

# %% [markdown]
# The recipe has 160 epochs; a fifth of them is enough to see the model learn. The weights of the
# epoch with the best validation accuracy are kept. The test split is read once, at the end. A run
# writes a folder: its settings, metrics, log, figures, weights to share, and a state from which a
# stopped run resumes with exactly the same bits.

# %%
test = result.metrics["test"]
print(f"{count(vitkit.load(result.best).model):,} parameters, {result.stopped}")
print(f"accuracy {test['top1']:.1%} on {test['images']:.0f} test images,")
print(f"95 % interval {test['top1_low']:.1%} to {test['top1_high']:.1%}")
files = sorted(path.name for path in result.run.iterdir() if path.name[0] != ".")
print_wrapped(" ".join(files))

# %% mystnb={"code_prompt_show": "Show the drawing", "figure": {"caption": "The run, read from metrics.jsonl. Left: the training loss stays above the validation loss, because only the training images are shifted and only their labels are smoothed. Right: the validation accuracy rises fast. Then it changes in visible steps, because a single image counts much in so small a split."}} tags=["hide-input"]
rows = [
    json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()
]
epochs = [row for row in rows if row["kind"] == "epoch"]
numbers = [row["epoch"] for row in epochs]
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6))
for column, label in (("train_loss", "training"), ("val_loss", "validation")):
    left.plot(numbers, [row[column] for row in epochs], marker=".", label=label)
left.set(xlabel="epoch", ylabel="loss")
left.legend()
right.plot(numbers, [row["val_top1"] for row in epochs], marker=".", color="#c44e52")
right.set(xlabel="epoch", ylabel="validation accuracy")
_ = figure.tight_layout()

# %% [markdown]
# ## Read the errors
#
# One number hides where a model is wrong. The confusion matrix counts for each true class (row)
# what was predicted (column); the images with the highest loss show why. Reading the errors of the
# test split is a report; a choice that follows from them would need other images for its test.

# %% mystnb={"figure": {"caption": "The confusion matrix on the test split. The diagonal is right. Errors outside of it come in pairs of digits with similar shapes; a column with many numbers would mean a class that is predicted too often."}}
scores = vitkit.evaluate(result.best, "digits", split="test")
worst = min(scores.per_class, key=lambda score: score.accuracy)
print(f"{int((~scores.right).sum())} errors; worst class: {worst.name}, "
      f"{worst.right} of {worst.images} right")  # fmt: skip
scores.plot("digits, test")

# %% mystnb={"figure": {"caption": "The ten test images with the highest loss, highest first, each with its label, the predicted class and the loss. Look at each before you call it a fault of the model: some digits are closed or cut off at this size, so that people disagree, too."}}
scores.top_losses(10).plot()

# %% [markdown]
# ## A large batch in small parts
#
# The paper trains with batches of 4,096 images. Their activations do not fit into the memory of one
# device. They need not: the mean of a batch is the mean of the means of its equal parts, and
# `backward()` adds to the gradient that is there. So the parts go through the model one after the
# other, each loss is divided by the number of parts, and one step is made at the end. This is
# *gradient accumulation*. A check in a few lines:

# %%
images, labels = next(iter(DataLoader(train_part, batch_size=256)))


def gradient(parts: int) -> torch.Tensor:
    model.zero_grad()
    for some, truth in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        loss = F.cross_entropy(model(some), truth) / parts
        loss.backward()  # adds to p.grad
    return torch.cat([p.grad.flatten() for p in model.parameters()])


whole = gradient(1)
for parts in (2, 8, 64):
    error = (gradient(parts) - whole).abs().max() / whole.abs().max()
    print(
        f"{parts:>2} parts of {256 // parts:>3} images: gradient differs by {error:.0e}"
    )
    assert error < 1e-4

# %% [markdown]
# The rest is the rounding of float32. Two conditions: the loss is a mean over parts of equal size,
# and no layer mixes the images of a batch. BatchNorm does mix them; a ViT has LayerNorm, which does
# not. The batch of the paper in parts of 64 images is
# `vitkit train ... --batch-size 4096 --grad-accum-steps 64`.
#
# ## What the paper states
#
# The ViT paper trains with Adam, $\beta_1 = 0.9$, $\beta_2 = 0.999$, a batch size of 4,096 and a
# weight decay of 0.1, which it calls high (Sec. 4.1). A learning rate of $3 \cdot 10^{-3}$ is often
# quoted together with this decay. But Table 3 of the paper has this rate only for ImageNet, with a
# decay of 0.3 and a cosine schedule; on the larger datasets, the rates are lower and fall linearly.
# The recipe `vit-paper` has the rate and decay of the table; `vit-paper-decay01` has the values
# that the notebooks state. The table below compares them with recipes for two CPU cores, which have
# smaller batches, less weight decay and no dropout.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the code of the table"}
names = ("vit-paper", "vit-paper-decay01", "digits", "mnist", "cifar10-small")
recipes = {
    name: TrainConfig(data="", **(USUAL | recipe_settings(name))) for name in names
}
fields = ("opt", "lr", "beta1", "beta2", "weight_decay", "batch_size", "epochs",
          "warmup_epochs", "sched", "clip_grad", "label_smoothing", "shift", "flip")  # fmt: skip
rows = {field: [getattr(recipes[name], field) for name in names] for field in fields}
rows["dropout"] = [recipes[name].spec.get("mlp_dropout", 0.0) for name in names]
for field, values in ({"": names} | rows).items():
    columns = zip(names, values, strict=True)
    print(
        f"{field:<15}" + "".join(f"{value:>{len(name) + 2}}" for name, value in columns)
    )
paper = recipes["vit-paper"]
steps = paper.warmup_epochs * (1_281_167 // paper.batch_size)
print(
    f"{paper.warmup_epochs:g} epochs of 1,281,167 images: {steps:,.0f} steps "
    "(paper: 10,000)"
)

# %% [markdown]
# ## Adam and AdamW
#
# Adam divides the running mean of a parameter's gradient, $m$, by the root of the running mean of
# its square, $v$. Weight decay $\lambda$ can be added in two places. In the first line it is added
# to the gradient $g$, as for SGD, so it is divided, too:
#
# $$ \text{Adam:}\quad w \leftarrow w - \eta\, \frac{m(g + \lambda w)}{\sqrt{v(g + \lambda w)}} $$
#
# $$ \text{AdamW:}\quad w \leftarrow w - \eta\, \frac{m(g)}{\sqrt{v(g)}} - \eta \lambda w $$
#
# So with Adam, a weight with large gradients hardly decays at all. Where gradients are small, the
# decay is scaled up to a full step, and the weight goes to zero. With AdamW all weights decay at
# the same rate. A decay of 0.1 or 0.3 is meant for AdamW; in vitkit both `adam` and `adamw` apply
# the decay separately. Notebook A uses `torch.optim.Adam(weight_decay=0.1)`, which is the first
# line.
#
# The small recipes use Muon ([K. Jordan](https://kellerjordan.github.io/posts/muon/)). If
# $U S V^\top$ is the singular value decomposition of a matrix's averaged gradient, Muon steps along
# $U V^\top$, so the step has the same length in every direction. Muon updates the matrices of the
# blocks; AdamW updates everything else.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the experiment", "figure": {"caption": "Mean of 300 weights that start at 1. Their gradients are pure noise of three sizes; decay 0.1, rate 0.01. Adam (solid): the smaller the gradients, the faster the weights go to zero; weights with large gradients hardly change. AdamW (dashed): the three lines coincide, and equal Adam's line for gradients of size 1."}}
noise = torch.tensor([0.1, 1.0, 10.0])[:, None]  # the scale of the gradients
traces = {}
for name, make in {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}.items():
    weights = nn.Parameter(torch.ones(3, 300))
    optimizer = make([weights], lr=0.01, weight_decay=0.1)
    trace = []
    for _step in range(1000):
        weights.grad = noise * torch.randn(3, 300)
        optimizer.step()
        trace.append(weights.detach().mean(1))
    traces[name] = torch.stack(trace)
figure, ax = plt.subplots(figsize=(7, 2.8))
for (name, trace), style in zip(traces.items(), ("-", "--"), strict=True):
    for row, colour in enumerate(("#4c72b0", "#dd8452", "#55a868")):
        label = f"{name}, gradients of {noise[row].item():g}"
        ax.plot(trace[:, row], style, color=colour, label=label)
ax.set(xlabel="step", ylabel="weight")
ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
_ = figure.tight_layout()

# %% [markdown]
# Weight decay applies to matrices only. Biases, norms, tokens and positions are few numbers, and
# their size matters, so they do not decay.

# %%
model = vitkit.create_model("vit_base_patch16_224", depth=1, num_classes=10)
for group in parameter_groups(model, lr=3e-3, weight_decay=0.3):
    tensors, size = len(group["params"]), sum(p.numel() for p in group["params"])
    print(f"decay {group['weight_decay']:g}: {tensors:>2} tensors, {size:,} parameters")

# %% [markdown]
# ## MNIST: the notebook's model
#
# The ViT of [notebook E, "Lab notebook"](coverage.md#e-lab-notebook), has 49 tokens of 16 values, a
# width of 20 (8 in its text), two heads, one block and fixed 1-D positions. It is trained by Adam
# with a rate of 0.01 and a batch size of 16 for 5 epochs. {download}`notebook_mnist.py
# <notebook_mnist.py>` rebuilds it with its mistakes; a comment marks each mistake.

# %%
theirs = notebook_mnist.NotebookViT()
heads = [
    layer
    for name in ("queries", "keys", "values")
    for layer in getattr(theirs.attention, name)
]
unregistered = sum(layer.weight.numel() + layer.bias.numel() for layer in heads)
images, labels = torch.rand(64, 1, 28, 28), torch.randint(10, (64,))
strips = images.reshape(64, 49, 16)
print(f"strips {tuple(strips.shape)}, with the class token "
      f"{(len(strips), strips.shape[1] + 1, theirs.linear(strips).shape[-1])}")  # fmt: skip
print(
    f"registered parameters: {count(theirs):,}; "
    f"in its heads, not registered: {unregistered:,}"
)

# %% [markdown]
# The optimizer gets only the registered parameters. After some steps everything has changed except
# the heads:

# %%
before = [layer.weight.clone() for layer in heads]
first = theirs.linear.weight.clone()
for row in notebook_mnist.train(theirs, images, labels, epochs=2):
    print(f"epoch {row['epoch']}: loss {row['train_loss']:.3f}")
print("the patch matrix changed:", not torch.equal(first, theirs.linear.weight))
print("a head changed:          ",
      any(not torch.equal(a, b.weight) for a, b in zip(before, heads, strict=True)))  # fmt: skip

# %% [markdown]
# The closest model without the mistakes is described by a spec. It has square patches, heads with
# an output matrix, LayerNorm over the width, a norm before the head, and logits. The model of the
# recipe is much larger:

# %%
corrected = notebook_mnist.corrected()
recipe = recipe_settings("mnist")
ours = vitkit.create_model(recipe["model"], num_classes=10, **recipe["spec"])
print(
    f"corrected: {count(corrected):,} parameters; the recipe's model: {count(ours):,}"
)

# %% [markdown]
# All three were trained on the same 54,000 images of MNIST, with the same 6,000 validation images,
# and tested once: the first two with the notebook's Adam, the third with the recipe. The notebook
# itself printed 91.45 %, on another machine and with another seed.

# %%
results = {
    label: measured(name)
    for label, name in {"notebook": "mnist-notebook", "corrected": "mnist-mended",
                        "recipe": "mnist"}.items()
}  # fmt: skip
for label, result in results.items():
    runs = result["runs"]
    scores = with_spread([run["test_top1"] for run in runs])
    seconds = mean(run["seconds"] for run in runs)
    threads = runs[0].get("threads", result["threads"])
    print(f"{label:<10} test {scores}, {seconds:.0f} s, threads: {threads}")
print(results["recipe"]["runs"][0]["command"])

# %% mystnb={"figure": {"caption": "Accuracy on MNIST's validation images after each epoch, by the seconds of training so far. The notebook's model and the model without its mistakes have one line per seed and one thread; the recipe's model has two threads. The dotted line is 99 %."}}
figure, ax = plt.subplots(figsize=(6, 3))
for (name, result), colour in zip(
    results.items(), ("#dd8452", "#55a868", "#4c72b0"), strict=True
):
    for number, run in enumerate(result["runs"]):
        ax.plot(
            [row["seconds"] for row in run["epochs"]],
            [row["val_top1"] for row in run["epochs"]],
            marker=".", color=colour, label=name if number == 0 else None,
        )  # fmt: skip
ax.axhline(0.99, color="grey", linewidth=0.8, linestyle=":")
ax.set(xlabel="seconds", ylabel="validation accuracy", ylim=(0.7, 1.0))
_ = ax.legend()

# %% [markdown]
# At the notebook's learning rate the corrected model is not better: it reaches 83 to 86 % on the
# test split, and the notebook's model 82 to 92 %, depending on the seed. That is a comparison at a
# rate that was chosen for one of the two. A fair one gives each model its own.
#
# ### Each with its own learning rate
#
# Both models were trained again with three rates and three seeds, for 3 epochs of 15,000 images of
# MNIST and of Fashion-MNIST. For each model, the rate with the best mean accuracy on the validation
# images is chosen, and only the models of this rate are tested.

# %%
compared = {name: measured(name) for name in ("mnist-rates", "fashion-rates")}
for result in compared.values():
    for model, rate in result["rates"].items():
        print(f"{result['data']:<14}{model:<10} at {rate:<6} "
              f"test {with_spread(result['test_top1'][model])}")  # fmt: skip

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the drawing", "figure": {"caption": "Accuracy on the validation images by the learning rate. Each dot is one seed, each line the mean of three. The notebook's model wants its high rate and loses much with lower ones; the corrected model depends less on the rate. On MNIST it still loses at the best rate of each, on Fashion-MNIST the two are level."}}
figure, axes = plt.subplots(
    1, len(compared), figsize=(3.6 * len(compared) + 0.6, 2.8), squeeze=False
)
for ax, result in zip(axes.flat, compared.values(), strict=True):
    for model, colour in (("notebook", "#dd8452"), ("corrected", "#55a868")):
        tried: dict[float, list[float]] = {}
        for row in result["rows"]:
            if row["model"] == model:
                tried.setdefault(row["lr"], []).append(row["val_top1"])
        ax.plot(
            list(tried), [mean(v) for v in tried.values()], color=colour, label=model
        )
        for rate, values in tried.items():
            ax.plot([rate] * len(values), values, ".", color=colour)
    ax.set(xscale="log", xlabel="learning rate", title=result["data"])
    ax.set_xticks(list(tried), [f"{rate:g}" for rate in tried])
    ax.minorticks_off()
axes[0, 0].set_ylabel("validation accuracy")
axes[0, 0].legend()
_ = figure.tight_layout()

# %% [markdown]
# So the answer depends on the data. On MNIST the notebook's model wins by seven points, each at its
# best rate. On Fashion-MNIST the corrected model is ahead by one point, which is no evidence: the
# notebook's seeds lie between 69 and 75 %. At lower rates the corrected model wins on both.
#
# How can a model with ten mistakes win? One of them is no handicap here. The norms over tokens and
# width have a weight and a bias for each number of each token: 4,000 of the notebook's 4,990
# parameters. They fix the model to 50 tokens, and for digits that are all centred they are a
# template of the image. The corrected model has 80 such numbers. To test this, both were trained
# again with their norms exchanged:

# %%
exchanged = measured("mnist-norms")
for model, rate in exchanged["rates"].items():
    scores = with_spread(exchanged["test_top1"][model])
    print(f"{model:<24} at {rate:<6} test {scores}")

# %% [markdown]
# With the usual norms in both, the corrected model wins by 20 points. With the norms over tokens and
# width in both, it is ahead by 2, which is within the spread of the notebook's seeds. So on centred
# digits this one mistake is worth more than all the others cost. It is still a mistake for any other
# use: the corrected model takes other image sizes, moves to another device, is saved, and can be
# enlarged. The recipe's model has 72 times as many parameters and reaches more than 99 %.
# [Chapter 14](14_bug_costs.py) measures each of the bugs by itself.
#
# ## What each ingredient is worth
#
# A recipe is a list of choices. To measure the effect of each choice, one is changed at a time and
# all others stay. The runs are small enough for two CPU cores: 12 passes over 3,200 images, with a
# batch size of 64. They are scored on 10,000 images that were held out of the training split. Each
# variant has three seeds, which differ in the initial weights, the order and the shifts of the
# images.
#
# Read the numbers with care. A difference that is smaller than the spread of the seeds is no
# evidence. A learning rate that is good for the recipe may not be the best one for a variant: in
# the paper, class token and mean were equally good once each had its own rate (its Fig. 9), and
# AdamW may need another rate than Muon. And 600 steps are short: a change that slows down learning
# may cost more here than in a long training. All runs compute in bfloat16.

# %%
ingredients = measured("ingredients")
scores = {name: [row["top1"] for row in ingredients["rows"] if row["variant"] == name]
          for name in ingredients["changes"]}  # fmt: skip
base = mean(scores["the recipe"])
print(f"{ingredients['steps']} steps of {ingredients['batch']} images, "
      f"scored on {ingredients['scored_on']:,} images")  # fmt: skip
for name, values in scores.items():
    print(f"{name:<33}{with_spread(values)}  {100 * (mean(values) - base):+.2f} points")

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the drawing", "figure": {"caption": "Each dot is one training, each bar the mean of a variant's seeds. The grey band is the range of the unchanged recipe. A variant inside the band is not distinguishable from the recipe. A variant whose dots lie to the left of it is worse; one to the right would be better. Dots at the left edge lie outside the figure; the table has their numbers."}}
figure, ax = plt.subplots(figsize=(6.4, 3.6))
ax.axvspan(min(scores["the recipe"]), max(scores["the recipe"]), color="#dddddd")
left_edge = base - 0.15  # dots further left are drawn here
for row, values in enumerate(scores.values()):
    ax.plot([max(v, left_edge) for v in values], [row] * len(values), "o", markersize=4)
    ax.plot([max(mean(values), left_edge)] * 2, [row - 0.3, row + 0.3], color="#c44e52")
ax.set_yticks(range(len(scores)), list(scores), fontsize=8)
ax.invert_yaxis()
ax.set_xlabel("accuracy on held-out images")
_ = figure.tight_layout()

# %% [markdown]
# Without shifts the accuracy is four points lower. AdamW, with the rate that was chosen for Muon,
# is five points lower. Patches of 4 x 4 cost nearly two points in so short a training. Warm-up,
# label smoothing, weight decay and the choice between class token and mean have no visible effect;
# a constant rate was worse with one of three seeds. Fixed 1-D positions are at least as good. The
# notebook's Adam reaches 55 %.
#
# ## CIFAR-10
#
# CIFAR-10 has colour photographs of ten classes of objects, with varied backgrounds. A plain ViT
# with fewer than a million parameters is trained from scratch on a CPU: `vitkit train cifar10
# --recipe cifar10-small`, here for half of its 24 epochs. Notebook B distributes the images to
# several devices with PyTorch-Ignite; in vitkit, `--devices 4` starts four processes with the same
# loop.

# %%
small = recipe_settings("cifar10-small")
print(
    f"{count(vitkit.create_model(small['model'], num_classes=10, **small['spec'])):,}"
    " parameters"
)
(run,) = measured("cifar10")["runs"]
print(run["command"])
print(f"test {run['test_top1']:.2%} after {run['seconds'] / 60:.0f} minutes, "
      f"threads: {run['threads']}, half precision: {run['amp']}")  # fmt: skip

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the drawing", "figure": {"caption": "CIFAR-10 from scratch. Left: the loss on augmented training images and on validation images. The validation loss is lower, because its images are not shifted and its labels not smoothed. If the model overfitted, the validation loss would rise while the training loss still falls; in twelve epochs it does not. Right: the validation accuracy by epoch, which rises more and more slowly."}}
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6))
rows = run["epochs"]
numbers = [row["epoch"] for row in rows]
left.plot(numbers, [row["train_loss"] for row in rows], marker=".", label="training")
left.plot(numbers, [row["val_loss"] for row in rows], marker=".", label="validation")
left.set(xlabel="epoch", ylabel="loss")
left.legend()
right.plot(numbers, [row["val_top1"] for row in rows], marker=".", color="#c44e52")
right.set(xlabel="epoch", ylabel="validation accuracy")
_ = figure.tight_layout()

# %% [markdown]
# With 26 epochs, the model reached 83.5 % on another processor
# ([benchmarks](../benchmarks.md)). [Chapter 13](13_your_photograph.py) uses such a model on photographs.
#
# Notebook B asks the reader to train its own small model on CIFAR-10. It has 8,470,026 parameters
# (chapter 4), ten times as many, and its program was written for GPUs. One core of the machine
# named below, shared with other programs, trained it for 41 minutes. {download}`until_time.py
# <until_time.py>` is a callback that lowers the learning rate by the time that has passed, not by
# the steps, so that it is low at the end of a given time.

# %%
large = measured("cifar10-8m")
for command in large["commands"]:
    print_wrapped(command)
print(f"{large['steps']} steps of {large['batch_size']}: {large['images']:,} images, "
      f"{large['images'] / 45_000:.1f} passes in {large['minutes']} minutes")  # fmt: skip
score = large["test"]
print(f"test {score['top1']:.1%} "
      f"({score['top1_low']:.1%} to {score['top1_high']:.1%}), "
      f"last weights, half precision: {large['amp']}")  # fmt: skip

# %% mystnb={"figure": {"caption": "Left: validation accuracy by the seconds of training, of the model of 0.81 M parameters (two runs, on two makes of processor) and of notebook B's model of 8.47 M, which has two validations and the test score at its end. Right: confusion matrix of the large model on the test split; a row is the true class, a column the predicted one. Cats and dogs, automobiles and trucks are taken for each other."}}
receipt = json.loads(Path("checkpoints/cifar10.json").read_text())
figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.2))
for label, rows in (
    ("0.81 M, Intel", run["epochs"]),
    ("0.81 M, AMD", receipt["epochs_measured"]),
    ("8.47 M, AMD", large["epochs"]),
):
    left.plot(
        [r["seconds"] for r in rows], [r["val_top1"] for r in rows], ".-", label=label
    )
left.plot(60 * large["minutes"], score["top1"], "*", color="C2", label="8.47 M, test")
left.set(xlabel="seconds", ylabel="validation accuracy")
left.legend(fontsize=8)
classes = vitkit.load("checkpoints/cifar10.safetensors").classes
right.imshow(score["confusion"], cmap="Blues")
right.set_xticks(range(10), classes, rotation=90, fontsize=7)
right.set_yticks(range(10), classes, fontsize=7)
_ = figure.tight_layout()

# %% [markdown]
# In equal time the small model is far ahead. It sees many more images; processor and precision
# differ, too. What the large one
# reaches at the end of a full training was not measured: 300 epochs would take this core three days
# at the same pace. On a GPU, the command is `vitkit train cifar10 --recipe cifar10 --model
# vit_cifar_patch4_32`.
#
# ## What you know now
#
# - A step is: clear the gradient, forward, loss, backward, clip, update, next rate. It is the same
#   by hand, in Ignite and in vitkit, which was checked loss by loss.
# - Handlers keep logging, metrics and saving out of the loop.
# - Weight decay belongs beside Adam's step, not inside of it (AdamW), and on matrices only.
# - A large batch can be computed in parts, with the same gradient.
# - A recipe is judged by changing one ingredient at a time, with several seeds, on images that are
#   not the test split.
#
# ## Exercises
#
# **1. Build.** Write the learning rate as a function of the step: linear up to `peak` over `warmup`
# steps, then half a cosine down to `low` at the last step. Compare it with `learning_rate` of
# `vitkit.training.optimization.parameters`.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def rate_of(step: int, peak: float, low: float, warmup: int, total: int) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step + 1 - warmup) / (total - warmup)
    return low + (peak - low) * (1 + math.cos(math.pi * progress)) / 2


for step in range(2520):
    expected = learning_rate(step, peak=4e-3, low=1e-5, warmup=210, total=2520)
    assert math.isclose(rate_of(step, 4e-3, 1e-5, 210, 2520), expected)
assert math.isclose(rate_of(209, 4e-3, 1e-5, 210, 2520), 4e-3)
assert math.isclose(rate_of(2519, 4e-3, 1e-5, 210, 2520), 1e-5)

# %% [markdown]
# **2. Predict, then run.** Label smoothing of 0.1 distributes a tenth of the probability equally
# over all ten classes. What is then the lowest possible training loss? Check it with torch.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
correct_class, other = 0.9 + 0.1 / 10, 0.1 / 10
# The lowest cross-entropy is the entropy of the smoothed label.
lowest = -correct_class * math.log(correct_class) - 9 * other * math.log(other)
best_logits = torch.tensor([[correct_class] + [other] * 9]).log()
loss = nn.functional.cross_entropy(best_logits, torch.tensor([0]), label_smoothing=0.1)
assert math.isclose(loss.item(), lowest, rel_tol=1e-5)
assert math.isclose(lowest, 0.5, rel_tol=1e-2)
assert epochs[-1]["train_loss"] > lowest

# %% [markdown]
# **3. Show.** Notebook E divides its loss by the batch size twice. Show that Adam still takes the
# same steps, and that SGD does not.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def weights_after(make: type[torch.optim.Optimizer], divisor: int) -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.Linear(8, 3)
    optimizer = make(layer.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        (layer(torch.randn(16, 8)).square().mean() / divisor).backward()
        optimizer.step()
    return layer.weight.detach()


once, twice = (weights_after(torch.optim.Adam, divisor) for divisor in (1, 16))
torch.testing.assert_close(once, twice, rtol=0, atol=1e-5)
once, twice = (weights_after(torch.optim.SGD, divisor) for divisor in (1, 16))
assert (once - twice).abs().max() > 1e-4

# %% [markdown]
# **4. Train.** Train the plain ViT of this chapter for one epoch with batches of 64, once whole and
# once in four parts each. The losses agree. Hint: the last batch has 14 images, so its parts are not
# equal; give each part its share of the batch as weight.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def losses_in(parts: int) -> list[float]:
    model, loader, optimizer, schedule = start()
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        total = 0.0
        for some, truth in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            share = len(truth) / len(labels)
            loss = F.cross_entropy(model(some), truth) * share
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(total)
    return losses


in_parts = losses_in(4)
assert len(in_parts) == len(loader)
pairs = zip(in_parts, by_hand, strict=False)  # by_hand has all epochs
assert all(math.isclose(a, b, abs_tol=0.01) for a, b in pairs)

# %% tags=["remove-cell"]
folder.cleanup()

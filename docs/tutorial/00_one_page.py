# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 0. A ViT on one page
#
# This page has a whole Vision Transformer: its idea in seven steps, its code in plain PyTorch, its
# training, and one image that it recognises. The later chapters take this code apart, line by line.
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** what a ViT is, how it is written and trained, and what it looks at.
# - **You need** Python and a little PyTorch: tensors, `nn.Module`, and what a gradient is.
# - **Reading** about 20 minutes
# :::
#
# ## Seven steps
#
# 1. **Cut** the image into $N$ square patches of $P \times P$ pixels.
# 2. **Map** each patch, flattened to a row of numbers, to a token: $D$ numbers, by one matrix.
# 3. **Put one more token in front**, the class token. It is learned and the same for every image.
# 4. **Add positions**: a learned row of $D$ numbers for each place in the sequence.
# 5. **Apply $L$ equal blocks.** In each, attention lets every token read from every other token;
#    then an MLP (multilayer perceptron: two matrices with a GELU between them) changes each token by
#    itself.
# 6. **Read the class token**: after one more LayerNorm, one more matrix, the head, maps it to logits,
#    one number for each class.
# 7. **Train** on many labelled images, then **fine-tune**: replace the last matrix and train a
#    little more on the smaller dataset that you care about.
#
# Why patches, and not pixels? Attention compares every token with every other. With a token for
# each pixel, an image of 224 x 224 would have 50,176 tokens, and each head would make 2.5 billion
# comparisons. With patches of 16 x 16 it has 196 tokens, and 38,416 comparisons.
#
# ```{drawing} vit
# The model with the sizes of ViT-B/16. Each part leads to the chapter about it.
# ```
#
# As equations, with the numbers of the ViT paper
# ([arXiv 2010.11929](https://arxiv.org/abs/2010.11929), Sec. 3.1):
#
# $$ z_0 = [x_\text{class};\; x_p^1 E;\; x_p^2 E;\; \dots;\; x_p^N E] + E_\text{pos} \tag{1} $$
#
# $$ z'_l = \operatorname{MSA}(\operatorname{LN}(z_{l-1})) + z_{l-1} \qquad l = 1 \dots L \tag{2} $$
#
# $$ z_l = \operatorname{MLP}(\operatorname{LN}(z'_l)) + z'_l \qquad l = 1 \dots L \tag{3} $$
#
# $$ y = \operatorname{LN}(z_L^0) \tag{4} $$
#
# $x_p^i$ is patch $i$ as a row of numbers, $E$ the matrix of step 2, $E_\text{pos}$ the positions.
# LN (LayerNorm) brings every token to mean 0 and deviation 1; MSA is the attention. $z_L^0$ is the
# class token after the last block. The head maps $y$ to the logits.
#
# ## What the paper claims
#
# In our words, its abstract says:
#
# 1. Transformers are the standard model for text, but for images attention was only used together
#    with convolutional networks (CNNs), or in place of parts of them.
# 2. The convolutions are not needed. A Transformer that reads a row of patches classifies well.
# 3. The condition is pre-training on very many images.
# 4. After it, the model is transferred to smaller datasets, such as ImageNet, CIFAR-100 and VTAB.
# 5. There it is as good as the best CNNs of 2020 or better, and cheaper to train than they were.
#
# The figures behind this are in the body of the paper:
#
# | claim | top-1 on ImageNet: the share of images whose most probable class is right | where |
# | --- | --- | --- |
# | ViT-H/14, pre-trained on JFT-300M, 303 million labelled images | 88.55 % | Sec. 1, Table 2 |
# | a large CNN (BiT-L) pre-trained on the same images, with four times the computation | 87.54 % | Table 2 |
# | trained on ImageNet alone, without strong regularisation | "a few percentage points" below a ResNet of the same size | Sec. 1 |
# | ViT-B/16, pre-trained without labels by predicting masked patches | 79.9 % | Sec. 4.6 |
# | the last one against training from scratch | 2 points more | Sec. 4.6 |
# | the last one against pre-training with labels | 4 points less | Sec. 4.6 |
#
# The authors' code is
# [google-research/vision_transformer](https://github.com/google-research/vision_transformer); the
# implementation that most people use is in
# [timm](https://github.com/huggingface/pytorch-image-models). The [references](references.md) list
# what to read next; [coming from a notebook](coverage.md) leads from five well-known notebooks to
# these chapters.
#
# ## The code
#
# This is the whole model. A comment gives the equation of a line and the shape of its result. The
# file can be downloaded: {download}`plain_vit.py <plain_vit.py>`.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports of this page"}
import copy
import tempfile
from statistics import mean

import torch
from matplotlib import pyplot as plt
from measured import measured, with_spread
from shifted_digits import shifted
from torch import nn

import vitkit
from vitkit.evaluation.intervals import wilson_interval

_ = torch.manual_seed(0)

# %% tags=["written-out"]
from plain_vit import PlainViT

# %% [markdown]
# A block returns a tensor of the shape that it received: width in = width out. So blocks stack like
# Lego bricks, and $L$ is free. Attention is the only line in which tokens exchange anything. For this,
# each token makes three vectors: a query (what it looks for), a key (what it offers) and a value
# (what it passes on). A token takes a weighted mean of all values; the weight is large where its query
# fits the key. Dropout is left out to keep the page short;
# [chapter 3](03_encoder.py#where-dropout-is-applied) has it.
#
# | line | chapter |
# | --- | --- |
# | `self.proj(images)` in `PatchEmbedding`: cutting and $E$ are one convolution | [1, patches](01_patches.py) |
# | `cls_token`, `pos_embed` | [1, patches](01_patches.py); what positions are worth: [6](06_data.py) |
# | `scores`, `softmax`, `self.weights @ v` | [2, attention](02_attention.py) |
# | `norm1`, `norm2`, `+ z`, `mlp`, `nn.GELU` | [3, the encoder](03_encoder.py) |
# | the sizes, `z[:, 0]`, `head` | [4, the whole ViT](04_vit.py) |
# | the training below; why it needs many images | [5, training](05_training.py); [6, data](06_data.py) |
# | `self.weights`, drawn | [7, looking inside](07_looking_inside.py) |
# | step 7, fine-tuning; a token that learns from a CNN | [8, transfer](08_transfer.py); [9, distillation](09_distillation.py) |
# | where the block comes from: translation | [10, the Transformer](10_transformer.py) |
# | every line, written wrongly; what that costs | [11](11_bugs.py) and [12, bugs](12_lab_bugs.py); [14, costs](14_bug_costs.py) |
#
# ## The data
#
# The digits of scikit-learn: grey images of 8 x 8 pixels, written by hand, in ten classes. They
# come with vitkit, so nothing is downloaded. The split into training and test images is fixed.

# %%
digits = vitkit.open_dataset("digits")
for name, split in digits.splits.items():
    counts = torch.from_numpy(split.labels).bincount(minlength=10)
    print(f"{name:<6}{len(split):>6} images; of each class: {counts.tolist()}")

# %% mystnb={"code_prompt_show": "Show the drawing", "figure": {"caption": "The first eight training images of each class, one row per class. 64 pixels are few: some digits are hard to read for people, too."}} tags=["hide-input"]
labels = torch.from_numpy(digits.splits["train"].labels)
figure, axes = plt.subplots(10, 8, figsize=(4, 5))
for number, row in enumerate(axes):
    for ax, index in zip(row, (labels == number).nonzero()[:8, 0], strict=True):
        ax.imshow(digits.splits["train"].images[index, :, :, 0], cmap="gray")
        ax.set(xticks=[], yticks=[])
    row[0].set_ylabel(number, rotation=0, ha="right", va="center")
figure.subplots_adjust(wspace=0.05, hspace=0.05)

# %% [markdown]
# The classes have nearly the same number of images, so accuracy is a fair score, and guessing is
# right for one image in ten. The model reads tensors of shape (B, C, H, W) with values from -1
# to 1.


# %%
def tensors_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    split = digits.splits[name]
    images = torch.from_numpy(split.images).permute(0, 3, 1, 2) / 127.5 - 1
    return images, torch.from_numpy(split.labels)


images, labels = tensors_of("train")
print(f"images {tuple(images.shape)}, {images.min():g} to {images.max():g}")
print(f"labels {tuple(labels.shape)}: {labels[:8].tolist()} ...")

# %% [markdown]
# ## The training
#
# 2 x 2 pixels are a patch, so an image has $N = 8 \cdot 8 / 2^2 = 16$ patches and the model reads
# $T = 17$ tokens. The loop takes batches of 128 images in random order, moves each image by at most
# one pixel ({download}`shifted_digits.py <shifted_digits.py>`), and moves the weights with AdamW
# against the gradient of the cross-entropy. This loss is minus the logarithm of the probability that
# the model gives to the right class. The learning rate rises for an eighth of the steps and then
# falls to zero. [Chapter 5](05_training.py) explains each line.

# %%
model = PlainViT(
    image_size=8, patch_size=2, channels=1, classes=10,
    width=64, depth=3, heads=8, hidden=128,
)  # fmt: skip
nn.init.normal_(model.pos_embed, std=0.5)  # not 0.02: see below


def train(model: nn.Module, epochs: int = 40, batch: int = 128, rate: float = 3e-3):
    generator = torch.Generator().manual_seed(0)  # of order and shifts
    steps = epochs * -(-len(images) // batch)  # rounded up
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, steps, pct_start=0.125, cycle_momentum=False
    )
    losses = []
    for _epoch in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator).split(batch):
            logits = model(shifted(images[chosen], generator))
            loss = nn.functional.cross_entropy(logits, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return losses


losses = train(model)
parameters = sum(p.numel() for p in model.parameters())
print(f"{parameters:,} parameters, {len(losses)} steps")

# %% mystnb={"code_prompt_show": "Show the drawing", "figure": {"caption": "The loss of each step. It starts near 2.3, the loss of equal probabilities for ten classes (log 10, dotted line). The spread from step to step comes from the batches: each has other images."}} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(6, 2.2))
ax.plot(losses, linewidth=0.8)
ax.axhline(torch.tensor(10.0).log().item(), color="grey", linewidth=0.8, linestyle=":")
_ = ax.set(xlabel="step", ylabel="cross-entropy", ylim=(0, None))

# %% [markdown]
# Now the accuracy on the test split is measured. It is used for no choice. The 95 % interval
# (Wilson) says how far chance alone may move the accuracy of so few images. `vitkit` has a function
# for it:

# %%
test_images, test_labels = tensors_of("test")
model.eval()
with torch.no_grad():
    predicted = model(test_images).argmax(1)
right = int((predicted == test_labels).sum())
low, high = wilson_interval(right, len(test_labels))
print(f"{right} of {len(test_labels)} right: {right / len(test_labels):.1%}, "
      f"95 % interval {low:.1%} to {high:.1%}")  # fmt: skip

# %% [markdown]
# One training is one draw. Other seeds give other initial weights, orders and shifts. Sizes, rate,
# epochs and the scale of the first positions were chosen on a quarter of the training images that
# was held out, each quarter in turn; the test split had no part in it. These runs are read from a
# file, which {download}`measure_page.py <measure_page.py>` made:

# %%
page = measured("one-page")
print("test, three seeds:", with_spread([run["test"] for run in page["seeds_on_test"]]))
for scale, runs in page["positions"].items():
    print(f"positions from N(0, {scale}²): held out",
          with_spread([run["top1"] for run in runs]))  # fmt: skip
    sizes = {key: mean(run[key] for run in runs) for key in ("positions", "patches")}
    print(f"    after the training: positions {sizes['positions']:.2f}, "
          f"patch tokens {sizes['patches']:.2f}")  # fmt: skip

# %% [markdown]
# The scale of the first positions matters here. The paper's code draws them from
# $\mathcal{N}(0, 0.02^2)$, far smaller than the tokens of the patches, so that at first a token does
# not show where its patch lies. Training makes them grow, but these 40 epochs are short: they end at
# a fraction of the patch tokens' size (both are printed as standard deviations). So they start at
# 0.5 here.
#
# ## One image, and what the model looks at

# %%
index = int((test_labels == 3).nonzero()[0])
image = test_images[index : index + 1]
with torch.no_grad():
    probabilities = model(image).softmax(-1)[0]
for number in probabilities.argsort(descending=True)[:3].tolist():
    print(f"class {digits.classes[number]}: {probabilities[number]:.2%}")

# %% [markdown]
# The last block keeps its attention weights $A$. Row 0 belongs to the class token, the only one
# that the head reads. Without its first number, which is its weight on itself, it is one number per
# patch and head: how much the class token takes from this patch.

# %% mystnb={"figure": {"caption": "Left: the image. Right: the class token's attention weights over the 4 x 4 patches in the last block, one map for each of the eight heads; the number is the share of the weight that falls on patches, the rest falls on the class token itself. Yellow is the largest weight of a map. The heads look at different parts. A large weight says what is read, not what decides the answer: chapter 7 tests that."}}
A = model.blocks[-1].attn.weights[0]  # (h, T, T)
maps = A[:, 0, 1:].view(-1, 4, 4)  # (h, 4, 4)
figure = plt.figure(figsize=(7.6, 3.2))
grid = figure.add_gridspec(2, 6)
ax = figure.add_subplot(grid[:, :2])
ax.imshow(image[0, 0], cmap="gray")
ax.axis("off")
for head, values in enumerate(maps):
    ax = figure.add_subplot(grid[head // 4, 2 + head % 4])
    ax.imshow(values)
    ax.set_title(f"head {head + 1}: {values.sum():.0%}", fontsize=8)
    ax.axis("off")

# %% [markdown]
# A model of this size answers while you write: [draw a digit](draw_a_digit.md) in the page.
#
# ## The forward pass, line by line
#
# The lines of the code above once more, for this one image, with the shape of every result. The
# batch is $B = 1$.


# %%
def show(what: str, tensor: torch.Tensor) -> torch.Tensor:
    print(f"{what:<44}{tuple(tensor.shape)}")
    return tensor


with torch.no_grad():
    x = show("image: B, C, H, W", image)
    x = show("cut and mapped by E: B, D, H/P, W/P", model.patch_embed.proj(x))
    x = show("one row per patch: B, N, D", x.flatten(2).transpose(1, 2))
    z = show("class token in front: B, T, D", torch.cat([model.cls_token, x], 1))
    z = show("Eq. 1, positions added, z_0: B, T, D", z + model.pos_embed)
    block = model.blocks[0]
    normed = show("  LN(z): B, T, D", block.norm1(z))
    qkv = show("  queries, keys, values: B, T, 3D", block.attn.qkv(normed))
    q, k, v = qkv.view(1, 17, 3, 8, 8).permute(2, 0, 3, 1, 4)
    show("  queries of all heads: B, h, T, d", q)
    weights = show(
        "  A = softmax(q k^T / √d): B, h, T, T", (q @ k.mT / 8**0.5).softmax(-1)
    )
    heads = show("  A v: B, h, T, d", weights @ v)
    joined = show(
        "  heads side by side: B, T, D", heads.transpose(1, 2).reshape(1, 17, 64)
    )
    z = show("  Eq. 2, times U_msa, plus z: B, T, D", block.attn.proj(joined) + z)
    hidden = show("  inside the MLP: B, T, hidden", block.mlp.fc1(block.norm2(z)))
    z = show("  Eq. 3, block 1 done: B, T, D", block.mlp.fc2(block.mlp.act(hidden)) + z)
    z = show("blocks 2 and 3: B, T, D", model.blocks[1:](z))
    y = show("Eq. 4, y = LN(z_L^0): B, D", model.norm(z[:, 0]))
    logits = show("logits: B, classes", model.head(y))
    torch.testing.assert_close(logits, model(image))

# %% [markdown]
# ## The same weights in vitkit
#
# `vitkit.ViT` computes the same. The weights have the same names, which are timm's, so they load
# without a change; the logits of all test images agree up to the rounding of float32:

# %%
spec = vitkit.ViTSpec(
    image_size=8, patch_size=2, in_channels=1, num_classes=10,
    width=64, depth=3, num_heads=8, mlp_width=128,
)  # fmt: skip
ours = vitkit.ViT(spec).eval()
print(ours.load_state_dict(model.state_dict()))
with torch.no_grad():
    difference = (ours(test_images) - model(test_images)).abs().max().item()
print(f"largest difference of {test_labels.numel() * 10:,} logits: {difference:.0e}")
assert difference < 1e-4

# %% [markdown]
# What the library's class adds is the rest of this documentation: the variations of
# `vitkit.ViTSpec`, other image sizes, fast attention, and files that describe themselves. A
# `state_dict` is a list of tensors; who reads it has to know the model, the class names, and how
# images become tensors. A checkpoint of vitkit has all this in one file:

# %%
folder = tempfile.TemporaryDirectory()
path = vitkit.save(
    f"{folder.name}/page.safetensors", ours, classes=digits.classes,
    preprocess=vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.5,), fit="squash"),
)  # fmt: skip
checkpoint = vitkit.load(path)
print(f"{path.stat().st_size / 1e6:.2f} MB,",
      checkpoint.preprocess.image_size, "pixels,",
      "classes", *checkpoint.classes)  # fmt: skip
predict = vitkit.Predictor.from_checkpoint(path)
(prediction,) = predict([digits.splits["test"].images[index]])
for name, probability in prediction.top[:3]:
    print(f"class {name}: {probability:.2%}")

# %% [markdown]
# ## What you know now
#
# - A ViT turns patches into tokens by one matrix, adds a class token and positions, applies equal
#   blocks, and reads the class token.
# - Only attention moves anything between tokens; the MLP, the norms and the head work on each token
#   by itself.
# - Every block returns the shape that it received, so depth is a free choice.
# - The paper's claim is about scale: with very many images the ViT equals or beats CNNs, with few it
#   does not.
# - One score needs its interval, and choices are made on images that are not the test split.
#
# ## Exercises
#
# **1. Show.** Without positions the ViT does not see where a patch lies. Set the positions to zero
# and put the 16 patches of an image into another order: the logits stay the same.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
blind = copy.deepcopy(model)
nn.init.zeros_(blind.pos_embed)
order = torch.randperm(16)
pieces = image.unfold(2, 2, 2).unfold(3, 2, 2).reshape(16, 2, 2)  # (N, P, P)
mixed = pieces[order].view(4, 4, 2, 2).transpose(1, 2).reshape(1, 1, 8, 8)
with torch.no_grad():
    torch.testing.assert_close(blind(mixed), blind(image))
    assert (model(mixed) - model(image)).abs().max() > 0.1

# %% [markdown]
# **2. Build.** A ViT whose head reads the mean of the patch tokens in place of the class token. Hint:
# subclass `PlainViT` and replace its `forward`; the norm comes first. `vitkit.ViTSpec` calls it
# `pooling="mean"`; check that the logits agree.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
class MeanViT(PlainViT):
    def forward(self, images):
        x = self.patch_embed(images)
        x_class = self.cls_token.expand(len(x), -1, -1)
        z = self.blocks(torch.cat([x_class, x], dim=1) + self.pos_embed)
        return self.head(self.norm(z)[:, 1:].mean(dim=1))


mean_model = MeanViT(image_size=8, patch_size=2, channels=1, classes=10, width=64,
                     depth=3, heads=8, hidden=128)  # fmt: skip
theirs = vitkit.ViT(spec.replace(pooling="mean"))
theirs.load_state_dict(mean_model.state_dict())
with torch.no_grad():
    assert torch.allclose(mean_model(image), theirs.eval()(image), rtol=0, atol=1e-5)

# %% [markdown]
# **3. Predict, then run.** With patches of 1 x 1 pixel, what changes: the number of tokens, the
# number of attention weights of one head, the parameters? Write down your three numbers first.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
pixels = PlainViT(image_size=8, patch_size=1, channels=1, classes=10,
                  width=64, depth=3, heads=8, hidden=128)  # fmt: skip
with torch.no_grad():
    pixels(image)
assert pixels.pos_embed.shape[1] == 64 + 1  # 65 tokens in place of 17
assert pixels.blocks[0].attn.weights[0, 0].numel() == 65**2  # 15 times 17 ** 2
# E has 3 rows fewer, and the table of positions 48 rows more.
more = sum(p.numel() for p in pixels.parameters()) - parameters
assert more == (48 - 3) * 64

# %% [markdown]
# **4. Train.** The first test of any loop: a model must be able to learn one small batch by heart.
# Train a new `PlainViT` on the first 32 images, without shifts, until the loss is below 0.05. If
# this fails, the loop, the loss or the model has a bug. Hint: 120 steps of AdamW with a rate of
# 0.003 are enough.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
torch.manual_seed(0)
new = PlainViT(image_size=8, patch_size=2, channels=1, classes=10, width=64, depth=3,
               heads=8, hidden=128)  # fmt: skip
optimizer = torch.optim.AdamW(new.parameters(), lr=3e-3)
for _step in range(120):
    loss = nn.functional.cross_entropy(new(images[:32]), labels[:32])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert loss.item() < 0.05

# %% tags=["remove-cell"]
folder.cleanup()

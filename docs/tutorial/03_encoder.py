# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 3. The block and the encoder, Eq. 2 and 3
#
# A block is attention, followed by an MLP that processes each token separately. Both read tokens
# that LayerNorm (LN) has normalised. Both have a residual connection: their output is added to their
# input. The encoder is $L$ such blocks, one after the other. This chapter says what each part is for,
# and measures what happens without it.
#
# $$ z' = \operatorname{MSA}(\operatorname{LN}(z)) + z \tag{2} $$
#
# $$ z = \operatorname{MLP}(\operatorname{LN}(z')) + z' \tag{3} $$
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** what LayerNorm, the MLP, residual connections and dropout do, and how a deep stack
#   of blocks stays trainable.
# - **You need** [chapter 2](02_attention.py): attention, the letters $T$, $D$ and $h$.
# - **Reading** about 25 minutes
# :::
#
# ## The lines of the model
#
# In the model of [chapter 0](00_one_page.py), a block is this class. The two lines of its `forward`
# are Eq. 2 and Eq. 3:
#
# ```{literalinclude} plain_vit.py
# :pyobject: Block
# ```

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports"}
import torch
from drawing import print_table
from matplotlib import pyplot as plt
from torch import nn
from torch.nn import functional as F

import vitkit
from vitkit.data.sources.open import open_dataset

_ = torch.manual_seed(0)

# %% [markdown]
# ## LayerNorm
#
# LayerNorm normalises each token by itself. It subtracts the mean $\mu$ of the token's $D$ numbers
# and divides by their standard deviation $\sigma$. Then each of the $D$ numbers has its own learned
# weight $\gamma$ and bias $\beta$, which start at 1 and 0:
#
# $$ \operatorname{LN}(x) = \gamma\, \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} + \beta, \qquad
#    \mu = \frac{1}{D} \sum_{i=1}^{D} x_i, \qquad
#    \sigma^2 = \frac{1}{D} \sum_{i=1}^{D} (x_i - \mu)^2 $$
#
# No other token and no other image takes part. So, unlike BatchNorm, it does the same in training
# and in prediction, for every batch size and every number of tokens.


# %%
def layer_norm(x, weight, bias, eps):
    mean = x.mean(dim=-1, keepdim=True)
    variance = (x - mean).square().mean(dim=-1, keepdim=True)  # divided by D, not D - 1
    return weight * (x - mean) / torch.sqrt(variance + eps) + bias


x = torch.tensor([[1.0, 2, 3, 4], [100, 200, 300, 400], [7, 7, 7, 7]])  # three tokens
norm = nn.LayerNorm(4, eps=1e-6)
by_hand = layer_norm(x, norm.weight, norm.bias, eps=1e-6)
print(f"differs from nn.LayerNorm by {(by_hand - norm(x)).abs().max():.0e}")
for token, normed in zip(x, by_hand, strict=True):
    print(token.int().tolist(), "->", [round(number, 3) for number in normed.tolist()])
print("without epsilon:", layer_norm(x, 1, 0, eps=0)[2].tolist())

# %% [markdown]
# The first two tokens become equal: LayerNorm removes the scale of a token. So the layers after it
# always get numbers of about the same size, however large the tokens are. The third token shows why
# there is an $\varepsilon$: a token of equal numbers has $\sigma = 0$, and $0/0$ is not a number. The
# ViT uses $\varepsilon = 10^{-6}$, and torch $10^{-5}$ by default.

# %% [markdown]
# ## The MLP, and GELU
#
# The MLP (multilayer perceptron) has two linear layers with an activation function between them; the
# hidden layer is four times as wide as a token, $D_\text{mlp} = 4D$. Attention decides from which
# tokens a token reads; the MLP then computes with what was read, for each token in the same way. As a
# class, in five steps:


# %%
class MLPInSteps(nn.Module):
    """Tokens (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        z = self.fc1(z)  # 1. Widen: (B, T, D_mlp).
        z = self.act(z)  # 2. Without this, the two layers would be one matrix.
        z = self.drop(z)  # 3. Set some numbers to zero, in training only.
        z = self.fc2(z)  # 4. Back to the width of a token: (B, T, D).
        return self.drop(z)  # 5. Dropout again.


mlp = vitkit.MLP(width=768, mlp_width=3072, activation="gelu")
in_steps = MLPInSteps(768, 3072)
in_steps.load_state_dict(mlp.state_dict())  # the names of the weights are equal
z = torch.randn(1, 197, 768)
print("MLP", tuple(z.shape), "->", tuple(mlp(z).shape))
print("the two classes are equal:", torch.equal(mlp(z), in_steps(z)))

# %% [markdown]
# The library's class:
#
# ```{literalinclude} ../../src/vitkit/models/layers.py
# :pyobject: MLP
# ```
#
# The activation is $\operatorname{GELU}(x) = x\,\Phi(x)$, where $\Phi$ is the distribution function of
# the normal distribution. It is a smooth version of ReLU ([arXiv
# 1606.08415](https://arxiv.org/abs/1606.08415)), used in BERT and GPT-2 before the ViT. OpenAI's CLIP
# uses $x\,\sigma(1.702x)$ instead ("quick GELU"). The two must not be confused: the weights of a
# model were trained with one of them.

# %% mystnb={"figure": {"caption": "Activation functions by name. GELU and quick GELU are almost the same curve; both are slightly negative below zero, where ReLU is 0. SiLU is more negative there."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
x = torch.linspace(-4, 3, 400)
figure, ax = plt.subplots(figsize=(5, 2.8))
curves = {
    name: vitkit.MLP.activations[name]()(x)
    for name in ("gelu", "quick_gelu", "relu", "silu")
}
for name, y in curves.items():
    ax.plot(x, y, label=name)
ax.axhline(0, color="0.8", linewidth=0.5)
_ = ax.legend()

# %%
difference = (curves["gelu"] - curves["quick_gelu"]).abs().max()
print(f"GELU and quick GELU differ by at most {difference:.3f}")

# %% [markdown]
# In a new model, the matrices of the MLP are drawn by Xavier's rule, uniformly with variance
# $2 / (n_\text{in} + n_\text{out})$. The biases are normal with a standard deviation of $10^{-6}$,
# as in the code of the paper:

# %%
fc1 = vitkit.create_model("vit_base_patch16_224", depth=1).blocks[0].mlp.fc1
std, largest = fc1.weight.std(), fc1.weight.abs().max()
print(f"matrix: std {std:.5f}, Xavier's rule {(2 / (768 + 3072)) ** 0.5:.5f}")
print(f"largest value {largest:.5f}, Xavier's rule {(6 / (768 + 3072)) ** 0.5:.5f}")
print(f"biases: std {fc1.bias.std():.1e}")

# %% [markdown]
# ## The block
#
# ```{drawing} block
# A block: the tokens go straight on, and two branches add to them.
# ```
#
# All parts together, in seven steps:


# %%
class BlockInSteps(nn.Module):
    """Eq. 2 and 3: tokens (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        # 1. The four parts. Each LayerNorm has its own weights.
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = vitkit.MultiHeadSelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLPInSteps(width, hidden)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        mixed = self.norm1(z)  # 2. LN(z)
        mixed = self.attn(mixed)  # 3. MSA(LN(z))
        z = z + mixed  # 4. Eq. 2: z', the residual connection
        new = self.norm2(z)  # 5. LN(z')
        new = self.mlp(new)  # 6. MLP(LN(z'))
        return z + new  # 7. Eq. 3


block = vitkit.EncoderBlock(width=768, num_heads=12, mlp_width=3072).eval()
in_steps = BlockInSteps(768, 12, 3072)
in_steps.load_state_dict(block.state_dict())
print("block", tuple(z.shape), "->", tuple(block(z).shape))
print("the two classes are equal:", torch.equal(block(z), in_steps(z)))

# %% [markdown]
# A block returns tokens of the shape that it got. So blocks fit together like Lego bricks: any number
# of them can be stacked, and any one can be left out.
#
# The library's class has the same parts. Two more, LayerScale (`ls1`) and stochastic depth
# (`drop_path1`), do nothing unless the spec turns them on.
#
# ```{literalinclude} ../../src/vitkit/models/encoder.py
# :pyobject: EncoderBlock
# ```
#
# ## Why residual connections
#
# Without the two additions, a block would be $\operatorname{MLP}(\operatorname{LN}(\operatorname{MSA}(
# \operatorname{LN}(z))))$: every block replaces the tokens. With them, every block adds something to
# the tokens. The sum that runs through all blocks is called the residual stream. It has two effects.
# What the first layers computed is still there at the end. And the gradient of the loss reaches every
# layer directly, because the derivative of $z + f(z)$ is $1 + f'(z)$, and the 1 does not shrink.
#
# This can be measured. Here are 12 blocks with and without residual connections, and with and without
# LayerNorm, in a small model for 8 x 8 digits, before any training:

# %%
train = open_dataset("digits").splits["train"]
images = torch.from_numpy(train.images).permute(0, 3, 1, 2) / 127.5 - 1
labels = torch.from_numpy(train.labels)
small = vitkit.ViTSpec(
    image_size=8, patch_size=2, in_channels=1,
    width=32, depth=12, num_heads=4, mlp_width=64,
    num_classes=10,
)  # fmt: skip


class AblatedBlock(vitkit.EncoderBlock):
    """A block that may lack its residual connections or its norms."""

    def __init__(self, residual: bool, norm: bool) -> None:
        super().__init__(small.width, small.num_heads, small.mlp_width)
        self.residual = residual
        if not norm:
            self.norm1, self.norm2 = nn.Identity(), nn.Identity()

    def forward(self, tokens: torch.Tensor, *context: object) -> torch.Tensor:
        mixed = self.attn(self.norm1(tokens))
        tokens = tokens + mixed if self.residual else mixed
        new = self.mlp(self.norm2(tokens))
        return tokens + new if self.residual else new


def ablated(residual: bool, norm: bool, depth: int = 12) -> vitkit.ViT:
    torch.manual_seed(0)
    model = vitkit.ViT(small.replace(depth=depth))
    for layer, usual in enumerate(model.blocks):
        model.blocks[layer] = AblatedBlock(residual, norm)
        model.blocks[layer].load_state_dict(usual.state_dict(), strict=norm)
    nn.init.normal_(model.head.weight, std=0.02)  # at zero, no gradient would pass it
    return model


VARIANTS = {"both": (True, True), "residual only": (True, False),
            "LayerNorm only": (False, True), "neither": (False, False)}  # fmt: skip


# %%
def through(model: vitkit.ViT) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return the tokens after each block, and the gradient of the loss for each."""
    tokens = model.embed(images[:256]).tokens
    stream = []
    for block in model.blocks:
        tokens = block(tokens)
        stream.append(tokens)
    logits = model.forward_head(model.norm(tokens))
    loss = nn.functional.cross_entropy(logits, labels[:256])
    return [z.detach() for z in stream], torch.autograd.grad(loss, stream)


lengths, gradients, spreads = {}, {}, {}
for name, (residual, norm) in VARIANTS.items():
    stream, by_layer = through(ablated(residual, norm))
    lengths[name] = [float(z.norm(dim=-1).mean()) for z in stream]
    gradients[name] = [float(g.norm(dim=-1).mean()) for g in by_layer]
    centre = stream[-1].mean(dim=1, keepdim=True)  # the mean of the tokens of an image
    spreads[name] = float((stream[-1] - centre).norm() / stream[-1].norm())
for name, numbers in gradients.items():
    print(f"{name:<15} gradient at block 1 / at block 12: "
          f"{numbers[0] / numbers[-1]:.0e}, "
          f"spread of the tokens {spreads[name]:.3f}")  # fmt: skip

# %% mystnb={"figure": {"caption": "Twelve blocks before any training, on logarithmic axes: the mean length of a token after each block (left), and of the gradient of the loss there (right). With residual connections and LayerNorm (blue), both stay within a factor of ten. With residual connections alone (orange), the tokens grow and the gradients explode on their way back. With neither (red), the tokens and the gradients vanish."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(8, 3))
for ax, numbers, title in zip(
    axes,
    (lengths, gradients),
    ("length of a token", "length of its gradient"),
    strict=True,
):
    for name, values in numbers.items():
        ax.plot(range(1, 13), values, marker=".", label=name)
    ax.set(yscale="log", xlabel="after block", title=title, xticks=[1, 4, 8, 12])
axes[0].legend(fontsize=7)
figure.tight_layout()

# %% [markdown]
# With both, lengths and gradients change by less than a factor of ten. With residual connections
# alone, every block adds to a stream that nothing normalises: it grows more than a hundredfold, and
# the gradient is 100,000 times as long at the first block as at the last. With neither, everything shrinks with every block:
# this is the vanishing gradient. With LayerNorm alone, lengths and gradients look healthy. But the
# last column printed above is 0.000: all tokens of an image have become equal. Every block replaces
# the tokens by means of tokens. Means are more alike than what they are means of, so after twelve
# blocks all tokens are nearly equal ([arXiv 2103.03404](https://arxiv.org/abs/2103.03404)). A
# residual connection keeps the tokens apart.
#
# Which of them learn? The four models are trained for 80 steps, with the same images and the same
# learning rate:


# %%
def losses(model: nn.Module, steps: int = 80) -> list[float]:
    torch.manual_seed(0)
    optimizer, values = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for _ in range(steps):
        batch = torch.randint(len(images), (32,))
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


trained = {name: losses(ablated(*variant)) for name, variant in VARIANTS.items()}
for name, values in trained.items():
    print(f"{name:<15} mean loss of the last 10 steps {sum(values[-10:]) / 10:.2f}")

# %% mystnb={"figure": {"caption": "Loss on batches of 32 digits, 80 steps. Only the stack with residual connections and LayerNorm learns. The other three curves lie on each other, at the loss of random guessing among ten classes, the dotted line."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5, 2.8))
for name, values in trained.items():
    ax.plot(values, label=name, linewidth=1.2)
ax.axhline(torch.tensor(10.0).log(), color="0.4", linestyle=":")
ax.set(xlabel="step", ylabel="loss", ylim=(0.8, 3.2))
_ = ax.legend(fontsize=7)

# %% [markdown]
# Only the stack with both learns. This is not a matter of the learning rate alone: with a quarter and
# with a twentieth of it, the one with both had the lowest loss as well (1.88 and 2.15, the others
# between 2.26 and 2.31).
#
# ## What a block costs
#
# The layer table of `vitkit.summary` has one row for every module, with its input and output
# shapes. Its numbers can be read from Python. The two matrix products of attention, $QK^\top$ and
# $AV$, have no parameters. Their multiply-adds are those of `attn` without its two linear layers.

# %% mystnb={"figure": {"caption": "The parameters and the multiply-adds of a block of ViT-B/16. Two thirds of both are in the MLP. The products, which are the only part that combines tokens, are a narrow strip and have no parameters."}}
table = vitkit.summary(block, input_size=(1, 197, 768))
rows = {row.name: row for row in table.rows}
parts = {
    name: (rows[name].parameters, rows[name].mult_adds)
    for name in ("attn.qkv", "attn.proj", "mlp")
}
products = (
    rows["attn"].mult_adds - rows["attn.qkv"].mult_adds - rows["attn.proj"].mult_adds
)
parts["products"] = (0, products)
figure, ax = plt.subplots(figsize=(6, 1.9))
left = torch.zeros(2)
for name, numbers in parts.items():
    share = torch.tensor(numbers) / torch.tensor([table.parameters, table.mult_adds])
    ax.barh(["parameters", "multiply-adds"], share, left=left, label=name)
    left += share
ax.set(xlim=(0, 1), xlabel="share of the block")
_ = ax.legend(ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))

# %%
print_table(table, depth=2)
print(f"parameters {table.parameters:,}, multiply-adds {table.mult_adds / 1e6:,.0f} M")
for name, (parameters, mult_adds) in parts.items():
    print(f"{name:<10} {parameters / 1e6:>6.2f} M {mult_adds / 1e6:>8.2f} M")

# %% [markdown]
# ## Where dropout is applied
#
# During training, dropout sets random numbers to zero and scales up the others, so that no unit can
# depend on a single other unit. This reduces overfitting. The paper uses dropout after every dense
# layer except the qkv projection, and once after adding the positions (App. B.1). It does not use
# dropout on the attention weights. The paper's rate for ImageNet is 0.1 (Table 3). In vitkit each of
# these places has its own rate:
# `position_dropout` after adding the positions, `projection_dropout` after the heads are joined,
# `mlp_dropout` after both layers of the MLP, `attention_dropout` on the softmax. [Notebook D,
# "Block by block"](coverage.md#d-block-by-block), uses one rate for two of them by mistake. [Notebook
# A, "Replicating the paper"](coverage.md#a-replicating-the-paper-equation-by-equation), has no dropout
# at the place of `attn.proj_drop`.

# %%
spec = vitkit.ViTSpec()
for field in (
    "position_dropout",
    "projection_dropout",
    "mlp_dropout",
    "attention_dropout",
):
    print(f"{field:<19} {getattr(spec, field)} by default")

# %%
block = vitkit.EncoderBlock(
    768, 12, 3072, projection_dropout=0.1, mlp_dropout=0.1, attention_dropout=0.0
)
for name, module in block.named_modules():
    if isinstance(module, nn.Dropout):
        print(f"{name:<15} rate {module.p}")
z = torch.randn(1, 197, 768)
print("two calls are equal in training mode:", torch.equal(block(z), block(z)))
print("two calls are equal in eval mode:", torch.equal(block.eval()(z), block(z)))

# %% [markdown]
# Dropout on the attention weights $A$, as in $\operatorname{dropout}(A)V$: a query leaves out some keys.
# What is left is scaled up, so the weights of a row add up to 1 only in the mean.

# %%
weights = torch.randn(10_000, 6).softmax(dim=-1)
dropped = F.dropout(weights, 0.5)
print("first row:   ", *(f"{weight:.2f}" for weight in weights[0]), sep="  ")
print("with dropout:", *(f"{weight:.2f}" for weight in dropped[0]), sep="  ")
print(
    f"sum of a row {dropped[0].sum():.2f}, mean of the sums {dropped.sum(1).mean():.2f}"
)

# %% [markdown]
# [Notebook B, "Attention in vision"](coverage.md#b-attention-in-vision-cifar-10-ignite), calls
# `F.dropout` on the attention weights. Its default rate is 0.5, and by default it is
# in training mode, even if the model is in eval mode. So half of all numbers are lost in
# predictions, too, and no two predictions agree.

# %%
dropped = nn.functional.dropout(torch.ones(10_000))
print(f"share of zeros: {(dropped == 0).float().mean():.2f}")

# %% [markdown]
# ## Equal to torch's layer
#
# With the same weights a block gives the same output as `torch.nn.TransformerEncoderLayer`. There
# are two differences to know. The epsilon of torch's LayerNorm is 1e-5, that of the ViT is 1e-6.
# And torch's layer has a single rate for all its dropouts, including that of the attention weights.
# So with dropout the two agree in eval mode only.

# %%
LEAVES = {"norm1.": "norm1.", "attn.qkv.": "self_attn.in_proj_", "mlp.fc1.": "linear1.",
          "norm2.": "norm2.", "attn.proj.": "self_attn.out_proj.",
          "mlp.fc2.": "linear2."}  # fmt: skip


def torch_layer(eps: float) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        768,
        12,
        3072,
        0.1,
        "gelu",
        batch_first=True,
        norm_first=True,
        layer_norm_eps=eps,
    ).eval()


def copy(ours: vitkit.EncoderBlock, theirs: nn.TransformerEncoderLayer) -> None:
    weights = ours.state_dict()
    theirs.load_state_dict({
        there + leaf: weights[here + leaf] for here, there in LEAVES.items()
        for leaf in ("weight", "bias")
    })  # fmt: skip


for eps in (1e-6, 1e-5):
    layer = torch_layer(eps)
    copy(block, layer)
    with torch.no_grad():
        large, tiny = ((layer(x) - block(x)).abs().max() for x in (z, 0.02 * z))
    assert (max(large, tiny) < 1e-5) == (eps == 1e-6)
    print(f"eps {eps:g}: outputs differ by {large:.0e},", end=" ")
    print(f"for inputs of scale 0.02 by {tiny:.0e}")
parameters = sum(p.numel() for p in layer.parameters())
print("equal numbers of parameters:", parameters == table.parameters)
print("torch's dropout of attention weights:", layer.self_attn.dropout)

# %% [markdown]
# Why does the scale matter? LayerNorm divides by $\sqrt{\sigma^2 + \varepsilon}$. Tokens of scale
# 0.02, as in a newly initialised position table, have $\sigma^2 = 4 \cdot 10^{-4}$, and $10^{-5}$
# is a fortieth of that.
#
# ## A stack of 12 blocks
#
# The encoder is a stack of $L$ equal blocks: $z_0$ goes in, and $z_L$ comes out, with the same shape.
# In each block, a LayerNorm stands before each of the two parts, and a residual connection goes around
# it. `nn.TransformerEncoder` is such a stack. `vitkit.Encoder` is the same, with the final norm
# that Eq. 4 needs. It also works without images. [Notebook C, "From scratch with
# einops"](coverage.md#c-from-scratch-with-einops), uses it alone, with width 512, 6 blocks, 8 heads
# and an MLP of width 2048.

# %%
encoder = vitkit.Encoder(width=768, depth=12, num_heads=12, mlp_width=3072).eval()
norm = nn.LayerNorm(768, 1e-6)
stack = nn.TransformerEncoder(torch_layer(1e-6), 12, norm, enable_nested_tensor=False)
for ours, theirs in zip(encoder.blocks, stack.layers, strict=True):
    copy(ours, theirs)
text_encoder = vitkit.Encoder(width=512, depth=6, num_heads=8, mlp_width=2048)
with torch.no_grad():
    difference = (stack.eval()(z) - encoder(z)).abs().max()
    print(f"12 blocks differ by {difference:.0e}")
    print("(16, 128, 512) ->", tuple(text_encoder(torch.randn(16, 128, 512)).shape))
assert difference < 1e-5
print(f"{sum(p.numel() for p in text_encoder.parameters()):,} parameters")

# %% [markdown]
# ## Pre-norm and post-norm
#
# The first Transformer normalises after the addition:
# $z' = \operatorname{LN}(\operatorname{MSA}(z) + z)$. This is called post-norm. The ViT normalises
# before (pre-norm), so that a path without any norm leads through all residual connections, from
# the last block to the first. The example shows what this is worth in a deep stack: the 12 blocks of
# above learn the digits, with the same learning rate from the first step on. (A post-norm stack of
# this depth can be trained, but it needs a learning rate warm-up, [arXiv
# 2002.04745](https://arxiv.org/abs/2002.04745).)

# %%
torch.manual_seed(0)
trained["post-norm"] = losses(vitkit.ViT(small.replace(block="post_norm")))
for kind in ("both", "post-norm"):
    name = "pre-norm" if kind == "both" else kind
    print(
        f"{name:<9} mean loss of the last 10 steps {sum(trained[kind][-10:]) / 10:.2f}"
    )

# %% mystnb={"figure": {"caption": "Loss on batches of 32 digits, 80 steps. With pre-norm, the loss falls from the first steps on. With post-norm, it stays at the loss of random guessing among ten classes, the dotted line."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(5, 2.8))
for kind in ("both", "post-norm"):
    ax.plot(trained[kind], label="pre-norm" if kind == "both" else kind)
ax.axhline(torch.tensor(10.0).log(), color="0.4", linestyle=":")
ax.set(xlabel="step", ylabel="loss", ylim=(0.8, 2.7))
_ = ax.legend()

# %% [markdown]
# ## What you know now
#
# - LayerNorm gives each token mean 0 and deviation 1, by itself; then come a weight and a bias.
# - The MLP computes with each token separately. It has two thirds of a block's parameters.
# - Residual connections keep values and gradients alive through many layers. In the measurement
#   here, no stack of 12 blocks learned without them in 80 steps.
# - A block returns the shape that it gets, so blocks stack.
# - Pre-norm stacks train without a warm-up where post-norm stacks do not.
#
# ## Exercises
#
# **1. Show.** LayerNorm in a ViT normalises over the width only. [Notebook E, "Lab
# notebook"](coverage.md#e-lab-notebook), normalises over tokens and width together. Show that this
# fails for another number of tokens, and that a change to one token then changes all others.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
joint, usual = nn.LayerNorm((197, 768)), nn.LayerNorm(768)
z = torch.randn(1, 197, 768)
try:
    joint(torch.randn(1, 50, 768))
except RuntimeError as error:
    message = str(error)
assert "normalized_shape" in message, "the number of tokens is part of the weights"
changed = z.clone()
changed[0, 0] += 100.0
assert not torch.allclose(joint(changed)[0, 1:], joint(z)[0, 1:], atol=1e-2)
assert torch.equal(usual(changed)[0, 1:], usual(z)[0, 1:])

# %% [markdown]
# **2. Predict, then run.** A token is multiplied by 10, and then 3 is added to all its numbers. How
# does its LayerNorm change? And if it is multiplied by $-1$?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
token, norm = torch.randn(1, 768), nn.LayerNorm(768, eps=1e-6)
assert torch.allclose(norm(10 * token + 3), norm(token), atol=1e-5), "not at all"
assert torch.allclose(norm(-token), -norm(token), atol=1e-5), "it changes its sign"

# %% [markdown]
# **3. Show.** Count the multiply-adds of a block by hand, from $T$ tokens, width $D$ and hidden width
# $D_\text{mlp}$, and compare the result with the table.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
T, D, D_mlp = 197, 768, 3072
qkv, proj, dense = T * D * 3 * D, T * D * D, 2 * T * D * D_mlp
scores_and_mean = 2 * T * T * D
assert qkv + scores_and_mean + proj + dense == table.mult_adds

# %% [markdown]
# **4. Build.** Modules in a plain Python list are not registered. Notebook E stores its heads in such
# a list. Show that their weights are not counted, and so not trained. Then build it right. (Hint:
# `nn.ModuleList`.)


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
class Heads(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.heads = kind([nn.Linear(8, 4) for _ in range(2)])


assert sum(p.numel() for p in Heads(list).parameters()) == 0
assert sum(p.numel() for p in Heads(nn.ModuleList).parameters()) == 2 * (8 * 4 + 4)

# %% [markdown]
# **5. Train.** Twelve blocks do not learn without residual connections in 80 steps. Do two? Train
# `ablated(residual=False, norm=True, depth=2)`, and compare it with two usual blocks.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
shallow = {
    residual: sum(losses(ablated(residual, norm=True, depth=2))[-10:]) / 10
    for residual in (False, True)
}
print(
    f"two blocks: {shallow[False]:.2f} without residuals, {shallow[True]:.2f} with them"
)
assert shallow[False] < sum(trained["LayerNorm only"][-10:]) / 10

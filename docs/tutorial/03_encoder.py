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
# normalised by LayerNorm (LN). Both have a residual connection: their output is added to their
# input.
#
# $$ z' = \operatorname{MSA}(\operatorname{LN}(z)) + z \tag{2} $$
#
# $$ z = \operatorname{MLP}(\operatorname{LN}(z')) + z' \tag{3} $$
#
# `EncoderBlock.forward` is these two equations. `Encoder` is $L$ blocks and a final LayerNorm. The
# other two modules in the code, LayerScale (`ls1`) and stochastic depth (`drop_path1`), do nothing
# unless the spec turns them on.

# %%
import inspect

import torch
from drawing import print_table
from matplotlib import pyplot as plt
from torch import nn

import vitkit
from vitkit.data.sources.open import open_dataset

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80
print(inspect.getsource(vitkit.EncoderBlock.forward))

# %% [markdown]
# ## The MLP, and GELU
#
# The MLP has two linear layers with an activation function between them; the hidden layer is four
# times as wide as a token. The activation is $\operatorname{GELU}(x) = x\,\Phi(x)$, where $\Phi$ is
# the distribution function of the normal distribution. It is a smooth version of ReLU. OpenAI's
# CLIP uses $x\,\sigma(1.702x)$ instead ("quick GELU"). The two must not be confused: the weights of
# a model were trained with one of them.

# %% mystnb={"figure": {"caption": "Activation functions by name. GELU and quick GELU are almost the same curve; both are slightly negative below zero, where ReLU is 0. SiLU is more negative there."}}
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
mlp = vitkit.MLP(width=768, mlp_width=3072, activation="gelu")
print("MLP", tuple(mlp(torch.randn(1, 197, 768)).shape))

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
# ## What a block costs
#
# The layer table of `vitkit.summary` has one row for every module, with its input and output
# shapes. Its numbers can be read from Python. The two matrix products of attention, $QK^\top$ and
# $AV$, have no parameters. Their multiply-adds are those of `attn` without its two linear layers.

# %% mystnb={"figure": {"caption": "The parameters and the multiply-adds of a block of ViT-B/16. Two thirds of both are in the MLP. The products, which are the only part that combines tokens, are a narrow strip and have no parameters."}}
block = vitkit.EncoderBlock(width=768, num_heads=12, mlp_width=3072).eval()
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
print_table(table, depth=0)
print(f"parameters {table.parameters:,}, multiply-adds {table.mult_adds / 1e6:,.0f} M")
for name, (parameters, mult_adds) in parts.items():
    print(f"{name:<10} {parameters / 1e6:>6.2f} M {mult_adds / 1e6:>8.2f} M")

# %% [markdown]
# ## Where dropout is applied
#
# During training, dropout sets random numbers to zero and scales up the others, so that no unit can
# depend on a single other unit. This reduces overfitting. The paper uses dropout after every dense
# layer except the qkv projection, and once after adding the positions (App. B.1). It does not use
# dropout on the attention weights. In vitkit each of these places has its own rate. Notebook D uses
# one rate for two of them by mistake; [notebook A](index.md) has no dropout at the place of
# `attn.proj_drop`.

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
# Notebook B calls `F.dropout(x)` in the forward pass. Its default rate is 0.5, and by default it is
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
        large, small = ((layer(x) - block(x)).abs().max() for x in (z, 0.02 * z))
    assert (max(large, small) < 1e-5) == (eps == 1e-6)
    print(
        f"eps {eps:g}: outputs differ by {large:.0e}, for inputs of scale 0.02 by {small:.0e}"
    )
print(
    "equal numbers of parameters:",
    sum(p.numel() for p in layer.parameters()) == table.parameters,
)
print("torch's dropout of attention weights:", layer.self_attn.dropout)

# %% [markdown]
# Why does the scale matter? LayerNorm divides by $\sqrt{\sigma^2 + \varepsilon}$. Tokens of scale
# 0.02, as in a newly initialised position table, have $\sigma^2 = 4 \cdot 10^{-4}$, and $10^{-5}$
# is a fortieth of that.
#
# ## A stack of 12 blocks
#
# `nn.TransformerEncoder` is a stack of layers. `vitkit.Encoder` is the same, with the final norm
# that Eq. 4 needs. It also works without images. Notebook C uses it alone, with width 512, 6
# blocks, 8 heads and an MLP of width 2048.

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
# the last block to the first. The example shows what this is worth in a deep stack: 12 blocks of
# width 32 learn to classify 8 x 8 digits, with the same learning rate from the first step on. (A
# post-norm stack of this depth can be trained, but it needs a learning rate warm-up, [arXiv
# 2002.04745](https://arxiv.org/abs/2002.04745).)

# %%
train = open_dataset("digits").splits["train"]
images = torch.from_numpy(train.images).permute(0, 3, 1, 2) / 127.5 - 1
labels = torch.from_numpy(train.labels)
small = vitkit.ViTSpec(
    image_size=8, patch_size=2, in_channels=1, width=32, depth=12, num_heads=4, mlp_width=64,
    num_classes=10,
)  # fmt: skip


def losses(spec: vitkit.ViTSpec, steps: int = 80) -> list[float]:
    torch.manual_seed(0)
    model, values = vitkit.ViT(spec), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (32,))
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


# %% mystnb={"figure": {"caption": "Loss on batches of 32 digits, 80 steps. With pre-norm, the loss falls from the first steps on. With post-norm, it stays at the loss of random guessing among ten classes, the dotted line."}}
curves = {kind: losses(small.replace(block=kind)) for kind in ("pre_norm", "post_norm")}
figure, ax = plt.subplots(figsize=(5, 2.8))
for kind, values in curves.items():
    ax.plot(values, label=kind)
ax.axhline(torch.tensor(10.0).log(), color="0.4", linestyle=":")
ax.set(xlabel="step", ylabel="loss", ylim=(1, 2.7))
_ = ax.legend()

# %%
for kind, values in curves.items():
    print(f"{kind:<9} mean loss of the last 10 steps {sum(values[-10:]) / 10:.2f}")

# %% [markdown]
# ## Exercises
#
# **1.** LayerNorm in a ViT normalises over the width only. Notebook E normalises over tokens and
# width together. Show that this fails for another number of tokens, and that a change to one token
# then changes all others.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
joint, usual = nn.LayerNorm((197, 768)), nn.LayerNorm(768)
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
# **2.** Count the multiply-adds of a block by hand, from $T$ tokens, width $D$ and MLP width $M$,
# and compare the result with the table.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
T, D, M = 197, 768, 3072
qkv, scores_and_mean, proj, dense = (
    T * D * 3 * D,
    2 * T * T * D,
    T * D * D,
    2 * T * D * M,
)
assert qkv + scores_and_mean + proj + dense == table.mult_adds

# %% [markdown]
# **3.** Modules in a plain Python list are not registered. Notebook E stores its heads in such a
# list. Show that their weights are not counted, and so not trained. Then show how to correct this.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
class Heads(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.heads = kind([nn.Linear(8, 4) for _ in range(2)])


assert sum(p.numel() for p in Heads(list).parameters()) == 0
assert sum(p.numel() for p in Heads(nn.ModuleList).parameters()) == 2 * (8 * 4 + 4)

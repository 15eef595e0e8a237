# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 3. The block and the encoder, Eq. 2 and 3
#
# A block is attention, then an MLP for each token by itself. Each works on a normed copy of the
# tokens, and its result is added to what was there:
#
# $$ z' = \operatorname{MSA}(\operatorname{LN}(z)) + z \tag{2} $$
#
# $$ z = \operatorname{MLP}(\operatorname{LN}(z')) + z' \tag{3} $$
#
# `EncoderBlock.forward` is these two lines; `Encoder` is $L$ blocks and a last norm. What else
# stands in the lines, `ls1` and `drop_path1`, does nothing until a spec asks for it.

# %%
import inspect

import torch
from matplotlib import pyplot as plt
from rich.console import Console
from torch import nn

import vitkit
from vitkit.data.sources.open import open_dataset

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80
print(inspect.getsource(vitkit.EncoderBlock.forward))

# %% [markdown]
# ## The MLP, and GELU
#
# Two linear layers, four times as wide between them, and a non-linearity:
# $\operatorname{GELU}(x) = x\,\Phi(x)$ with $\Phi$ the normal distribution function. It is a ReLU
# with a soft knee. OpenAI's CLIP uses $x\,\sigma(1.702x)$ instead. The two may not be mixed up: a
# model's weights were trained for one of them.

# %% mystnb={"figure": {"caption": "Activations by name. GELU and quick GELU can hardly be told apart; both dip below zero, where ReLU is flat. SiLU dips deeper."}}
x = torch.linspace(-4, 3, 400)
figure, place = plt.subplots(figsize=(5, 2.8))
curves = {
    name: vitkit.MLP.activations[name]()(x) for name in ("gelu", "quick_gelu", "relu", "silu")
}
for name, y in curves.items():
    place.plot(x, y, label=name)
place.axhline(0, color="0.8", linewidth=0.5)
_ = place.legend()

# %%
apart = (curves["gelu"] - curves["quick_gelu"]).abs().max()
print(f"GELU and quick GELU differ by at most {apart:.3f}")
mlp = vitkit.MLP(width=768, mlp_width=3072, activation="gelu")
print("MLP", tuple(mlp(torch.randn(1, 197, 768)).shape))

# %% [markdown]
# In a new model its matrices are Xavier's, uniform with variance $2 / (n_\text{in} + n_\text{out})$, and
# its biases are normal with a deviation of $10^{-6}$, as in the paper's code:

# %%
fc1 = vitkit.create_model("vit_base_patch16_224", depth=1).blocks[0].mlp.fc1
print(f"matrix: deviation {fc1.weight.std():.5f}, by the rule {(2 / (768 + 3072)) ** 0.5:.5f}; "
      f"largest {fc1.weight.abs().max():.5f}, by the rule {(6 / (768 + 3072)) ** 0.5:.5f}")  # fmt: skip
print(f"biases: deviation {fc1.bias.std():.1e}")

# %% [markdown]
# ## What a block costs
#
# The layer table of `vitkit.summary` has one row for every module, with what goes in and comes out,
# and its numbers can be used. Attention's own products, $QK^\top$ and $AV$, have no parameters; they are what is left of the
# attention's multiply-adds beside its two linear layers.

# %% mystnb={"figure": {"caption": "Where the parameters and the multiply-adds of a block of ViT-B/16 are. Two thirds of both are in the MLP. The products that make tokens look at each other are a narrow strip, and have no parameters at all."}}
block = vitkit.EncoderBlock(width=768, num_heads=12, mlp_width=3072).eval()
table = vitkit.summary(block, input_size=(1, 197, 768))
rows = {row.name: row for row in table.rows}
parts = {
    name: (rows[name].parameters, rows[name].mult_adds) for name in ("attn.qkv", "attn.proj", "mlp")
}
products = rows["attn"].mult_adds - rows["attn.qkv"].mult_adds - rows["attn.proj"].mult_adds
parts["products"] = (0, products)
figure, place = plt.subplots(figsize=(6, 1.9))
left = torch.zeros(2)
for name, numbers in parts.items():
    share = torch.tensor(numbers) / torch.tensor([table.parameters, table.mult_adds])
    place.barh(["parameters", "multiply-adds"], share, left=left, label=name)
    left += share
place.set(xlim=(0, 1), xlabel="share of the block")
_ = place.legend(ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))

# %%
Console(width=110, color_system=None).print(table.render(depth=0))
print(f"parameters {table.parameters:,}, multiply-adds {table.mult_adds / 1e6:,.0f} M")
for name, (parameters, mult_adds) in parts.items():
    print(f"{name:<10} {parameters / 1e6:>6.2f} M {mult_adds / 1e6:>8.2f} M")

# %% [markdown]
# ## Where dropout goes
#
# Dropout sets random numbers to zero in training and makes the others larger for it, so that no
# unit can rely on one other; that holds off learning images by heart. The paper drops after every
# dense layer except the qkv projection, and once after adding the positions (App. B.1); it does not
# drop attention weights. Each place has a rate of its own, so that none can take another's, as
# happens in one notebook. Another leaves out that of `attn.proj_drop`.

# %%
spec = vitkit.ViTSpec()
for field in ("position_dropout", "projection_dropout", "mlp_dropout", "attention_dropout"):
    print(f"{field:<19} {getattr(spec, field)} unless it is set")

# %%
block = vitkit.EncoderBlock(
    768, 12, 3072, projection_dropout=0.1, mlp_dropout=0.1, attention_dropout=0.0
)
for name, module in block.named_modules():
    if isinstance(module, nn.Dropout):
        print(f"{name:<15} rate {module.p}")
z = torch.randn(1, 197, 768)
print("two calls agree in training:", torch.equal(block(z), block(z)))
print("two calls agree in eval:", torch.equal(block.eval()(z), block(z)))

# %% [markdown]
# In a third notebook `F.dropout(x)` stands in the forward pass. Its default rate is 0.5 and its
# default mode is training, whatever mode the model is in. So half of all numbers are lost at
# prediction, too, and no two predictions agree.

# %%
careless = nn.functional.dropout(torch.ones(10_000))
print(f"zeros: {(careless == 0).float().mean():.2f}")

# %% [markdown]
# ## Equal to torch's layer
#
# With the same weights a block gives what `torch.nn.TransformerEncoderLayer` gives. Two things must
# be known. Torch's epsilon in LayerNorm is 1e-5, the ViT's 1e-6. And torch's layer has one rate for
# all its dropouts, that of the attention weights included, so with dropout the two agree in eval
# mode only.

# %%
LEAVES = {"norm1.": "norm1.", "attn.qkv.": "self_attn.in_proj_", "mlp.fc1.": "linear1.",
          "norm2.": "norm2.", "attn.proj.": "self_attn.out_proj.",
          "mlp.fc2.": "linear2."}  # fmt: skip


def torch_layer(eps: float) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        768, 12, 3072, 0.1, "gelu", batch_first=True, norm_first=True, layer_norm_eps=eps
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
        apart = [(layer(given) - block(given)).abs().max() for given in (z, 0.02 * z)]
    assert (max(apart) < 1e-5) == (eps == 1e-6)
    print(f"eps {eps:g}: differ by {apart[0]:.0e}, and by {apart[1]:.0e} on inputs of scale 0.02")
print("as many parameters:", sum(p.numel() for p in layer.parameters()) == table.parameters)
print("torch's dropout of attention weights:", layer.self_attn.dropout)

# %% [markdown]
# Why does the scale matter? LayerNorm divides by $\sqrt{\sigma^2 + \varepsilon}$. Tokens of scale
# 0.02, as in a table of positions at the start, have $\sigma^2 = 4 \cdot 10^{-4}$, and $10^{-5}$ is
# a fortieth of that.
#
# ## Twelve of them
#
# `nn.TransformerEncoder` makes a stack. So does `vitkit.Encoder`, which ends with the norm that
# Eq. 4 needs. It works without images, too. One of the notebooks makes it by itself, with width
# 512, 6 blocks, 8 heads and an MLP of 2048.

# %%
encoder = vitkit.Encoder(width=768, depth=12, num_heads=12, mlp_width=3072).eval()
norm = nn.LayerNorm(768, 1e-6)
stack = nn.TransformerEncoder(torch_layer(1e-6), 12, norm, enable_nested_tensor=False)
for ours, theirs in zip(encoder.blocks, stack.layers, strict=True):
    copy(ours, theirs)
alone = vitkit.Encoder(width=512, depth=6, num_heads=8, mlp_width=2048)
with torch.no_grad():
    apart = (stack.eval()(z) - encoder(z)).abs().max()
    print(f"12 blocks differ by {apart:.0e}")
    print("(16, 128, 512) ->", tuple(alone(torch.randn(16, 128, 512)).shape))
assert apart < 1e-5
print(f"{sum(p.numel() for p in alone.parameters()):,} parameters")

# %% [markdown]
# ## Pre-norm and post-norm
#
# The first Transformer normed after adding: $z' = \operatorname{LN}(\operatorname{MSA}(z) + z)$.
# The ViT norms before, so that a path without any norm leads from the last block to the first. What
# that is worth shows in a deep stack: 12 blocks of width 32 learn 8 x 8 digits, with one learning
# rate from the first step on. (A post-norm stack of this depth can be trained; it needs a slow
# start, [arXiv 2002.04745](https://arxiv.org/abs/2002.04745).)

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
    model, seen = vitkit.ViT(spec), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        drawn = torch.randint(len(images), (32,))
        loss = nn.functional.cross_entropy(model(images[drawn]), labels[drawn])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


# %% mystnb={"figure": {"caption": "Loss on batches of 32 digits, 80 steps. With the norm before, the stack learns from the first steps on. With the norm after, it stays at the loss of one who guesses among ten classes, the dotted line."}}
curves = {kind: losses(small.replace(block=kind)) for kind in ("pre_norm", "post_norm")}
figure, place = plt.subplots(figsize=(5, 2.8))
for kind, seen in curves.items():
    place.plot(seen, label=kind)
place.axhline(torch.tensor(10.0).log(), color="0.4", linestyle=":")
place.set(xlabel="step", ylabel="loss", ylim=(1, 2.7))
_ = place.legend()

# %%
for kind, seen in curves.items():
    print(f"{kind:<9} mean loss of the last 10 steps {sum(seen[-10:]) / 10:.2f}")

# %% [markdown]
# ## Exercises
#
# **1.** LayerNorm in a ViT is over the width alone. One notebook norms over tokens and width
# together. Show what breaks when an image has another number of tokens, and that a change to one
# token then changes all others.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
together, apart = nn.LayerNorm((197, 768)), nn.LayerNorm(768)
try:
    together(torch.randn(1, 50, 768))
except RuntimeError as error:
    said = str(error)
assert "normalized_shape" in said, "the image's size is part of the weights"
changed = z.clone()
changed[0, 0] += 100.0
assert not torch.allclose(together(changed)[0, 1:], together(z)[0, 1:], atol=1e-2)
assert torch.equal(apart(changed)[0, 1:], apart(z)[0, 1:])

# %% [markdown]
# **2.** Count the multiply-adds of a block by hand, from $T$ tokens, width $D$ and MLP width $M$,
# and compare with the table.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
T, D, M = 197, 768, 3072
qkv, scores_and_mean, proj, dense = T * D * 3 * D, 2 * T * T * D, T * D * D, 2 * T * D * M
assert qkv + scores_and_mean + proj + dense == table.mult_adds

# %% [markdown]
# **3.** Modules in a plain Python list are not registered. One notebook keeps its heads so. Show
# that their weights are not counted, hence not trained, and what mends it.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
class Heads(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.heads = kind([nn.Linear(8, 4) for _ in range(2)])


assert sum(p.numel() for p in Heads(list).parameters()) == 0
assert sum(p.numel() for p in Heads(nn.ModuleList).parameters()) == 2 * (8 * 4 + 4)

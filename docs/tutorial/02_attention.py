# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 2. Attention
#
# Attention is the only operation of a Transformer that combines tokens. Every other layer processes
# each token separately. This chapter builds it from a weighted mean to the twelve heads of a
# ViT-B/16.
#
# $$ \operatorname{Attention}(Q, K, V) =
#    \operatorname{softmax}\Big(\frac{QK^\top}{\sqrt{d}}\Big) V $$
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** what queries, keys and values are, why the scores are divided by a root, and how
#   several heads work side by side.
# - **You need** [chapter 1](01_patches.py): tokens, and the letters $N$, $T$, $D$.
# - **Reading** about 25 minutes
# :::
#
# ## The lines of the model
#
# In the model of [chapter 0](00_one_page.py), attention is this class:
#
# ```{literalinclude} plain_vit.py
# :pyobject: Attention
# ```
#
# The heart of it is the formula above. There are $n$ queries and $m$ keys, each of $d$ numbers. A
# query (a row of $Q$) is compared with every key (a row of $K$) by a scalar product. The softmax
# turns the $m$ scores of a query into weights, which are positive and sum to 1. The values may have
# another width than the keys; the output has the width of the values. The output of a query is the
# mean of the values (the rows of $V$) with these weights. In the library the function is
# `vitkit.scaled_dot_product_attention`, Eq. 1 of "Attention Is All You Need" ([arXiv
# 1706.03762](https://arxiv.org/abs/1706.03762)). [Chapter 10](10_transformer.py) tells where
# attention came from.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports"}
import math

import torch
from drawing import grid_of
from matplotlib import pyplot as plt
from print_error import print_error
from skimage import data
from torch import nn

import vitkit
from vitkit.models.embedding import patchify

_ = torch.manual_seed(0)

# %% [markdown]
# ## A weighted mean: attention pooling
#
# Attention is one case of an older idea. There are $m$ known pairs of a key $k_i$ and a value $v_i$.
# What is the value of a new query $q$? Take the mean of the known values, and give those pairs the
# most weight whose key is most similar to the query:
#
# $$ f(q) = \sum_{i=1}^{m} \alpha(q, k_i)\, v_i, \qquad \alpha(q, k_i) \ge 0, \qquad
#    \sum_{i=1}^{m} \alpha(q, k_i) = 1 $$
#
# Everything depends on $\alpha$. The same weight for all pairs gives the mean of all values. A
# Gaussian of the distance, $\alpha(q, k_i) \propto e^{-(q - k_i)^2 / 2s^2}$, is the kernel regression
# of Nadaraya and Watson (1964). Here the keys are 40 points on a line, and the values are noisy
# measurements of a curve:


# %%
def pool(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return f(q) for scores (n, m) of n queries, and m values."""
    return scores.softmax(dim=-1) @ values


keys = torch.rand(40).sort().values * 6
values = keys.sin() + 0.25 * torch.randn(40)
queries = torch.linspace(0, 6, 200)
distance = queries[:, None] - keys
pooled = {
    f"Gaussian, s = {s}": pool(-(distance**2) / (2 * s**2), values)
    for s in (0.05, 0.4, 2.0)
}
pooled["equal weights"] = pool(torch.zeros(200, 40), values)

# %% mystnb={"figure": {"caption": "Forty noisy measurements (dots) of the dotted curve, and four kinds of attention pooling. With a narrow Gaussian (s = 0.05) a query takes the value of its nearest key, with its noise. With s = 0.4 it averages over its neighbours and follows the curve. With s = 2 it averages over nearly everything, and with equal weights over all."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(6, 3))
ax.plot(keys, values, ".", color="0.4")
ax.plot(queries, queries.sin(), ":", color="0.4")
for name, curve in pooled.items():
    ax.plot(queries, curve, label=name, linewidth=1.2)
ax.set(xlabel="query and key", ylabel="value")
_ = ax.legend(fontsize=7)

# %% [markdown]
# The Transformer chooses $\alpha = \operatorname{softmax}(q k_i^\top / \sqrt{d})$. This is nearly the
# same thing: since $\left\| q - k \right\|^2 = \left\| q \right\|^2 - 2 q k^\top + \left\| k
# \right\|^2$, a Gaussian of the distance and the exponential of the scalar product differ by the
# lengths of the vectors alone. If all keys are equally long, the weights are equal:

# %%
q = torch.randn(3, 8)
k = nn.functional.normalize(torch.randn(5, 8), dim=-1)  # all of length 1
gaussian = (-torch.cdist(q, k).square() / (2 * math.sqrt(8))).softmax(dim=-1)
by_product = (q @ k.T / math.sqrt(8)).softmax(dim=-1)
print(f"weights differ by {(gaussian - by_product).abs().max():.0e}")

# %% [markdown]
# What is new in the Transformer is that the queries, keys and values are computed from the tokens by
# learned matrices. So the model learns what "similar" means.

# %% [markdown]
# ## An example to do by hand
#
# This is the example of [notebook B, "Attention in
# vision"](coverage.md#b-attention-in-vision-cifar-10-ignite). There are five queries, four keys and
# four values. The first query equals the first key. The second query is the sum of the first and the
# third key. The third query equals the second key. The last two queries are zero.

# %%
q = torch.tensor([[1.0, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
k = torch.eye(4, 3)
v = 4.5 * torch.arange(12.0).reshape(4, 3)
output, weights = vitkit.scaled_dot_product_attention(q, k, v, return_weights=True)
for row in range(5):
    print(f"weights row {row}:", " ".join(f"{number:.4f}" for number in weights[row]))
for row in range(5):
    print(f"output  row {row}:", " ".join(f"{number:7.4f}" for number in output[row]))

# %% [markdown]
# A query gives more weight to a key that points in the same direction. A zero query gives all keys
# the same weight, so its output is the plain mean of all values. The first weight is
# $e^{1/\sqrt 3} / (e^{1/\sqrt 3} + 3)$:

# %%
first = math.exp(1 / math.sqrt(3))
print(
    f"with the root of d {first / (first + 3):.5f}, without {math.e / (math.e + 3):.5f}"
)

# %% [markdown]
# ```{attention-example}
# The same example with numbers to change: the scores, the weights and the outputs follow.
# ```

# %% [markdown]
# ## Why the root of d
#
# The scalar product of two vectors of $d$ independent numbers with variance 1 has variance $d$.
# With $d = 64$ the scores lie around $\pm 8$, and $e^8$ is 3,000 times $e^0$. Then one key has
# three quarters of the weight on average, and more as $d$ grows. The derivative of the softmax
# falls to a third ([chapter 11](11_bugs.py#a-softmax-without-the-root)). The text of [notebook D,
# "Block by block"](coverage.md#d-block-by-block), leaves out the root. Here is its effect on the
# weights.

# %% mystnb={"figure": {"caption": "The largest of the 196 weights of a query, by the width d of random queries and keys. Divided by the root of d, it stays near 0.05 for every d, so a token combines many values. Without the division, one key gets more and more of the weight as d grows."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
widths = [4, 8, 16, 32, 64, 128]
largest = {"divided by the root": [], "not divided": []}
for width in widths:
    scores = torch.randn(500, width) @ torch.randn(196, width).T
    largest["divided by the root"].append(
        (scores / width**0.5).softmax(-1).amax(-1).mean()
    )
    largest["not divided"].append(scores.softmax(-1).amax(-1).mean())
figure, ax = plt.subplots(figsize=(5, 2.6))
for name, values in largest.items():
    ax.plot(widths, values, marker="o", label=name)
ax.set(xlabel="d", ylabel="largest weight", xscale="log", ylim=(0, 1), xticks=widths)
ax.set_xticks([], minor=True)
ax.set_xticklabels(widths)
_ = ax.legend()

# %% [markdown]
# ## Attention over a photograph
#
# Nothing above needs learned weights. Take a photograph and describe each patch by 12 numbers, the
# colours of its four quarters. Use these numbers as queries, keys and values. Then a patch attends
# to the patches that look similar. A trained model adds matrices, which decide which features are
# compared and which are passed on.

# %%
photograph = (
    torch.from_numpy(data.astronaut()[:448, :448]).permute(2, 0, 1).float()[None] / 255
)
quarters = nn.functional.interpolate(
    photograph, size=28, antialias=True, mode="bilinear"
)
colours = patchify(quarters, (2, 2))[0]
colours = (colours - colours.mean(0)) / colours.std(0)
_, weights = vitkit.scaled_dot_product_attention(
    colours, colours, colours, return_weights=True
)
marked = {"suit": (10, 3), "collar": (6, 5), "wall": (2, 4)}
maps = [weights[14 * row + column].view(14, 14) for row, column in marked.values()]

# %% mystnb={"figure": {"caption": "The photograph, and the attention weights of each marked patch. The patch on the suit attends to orange, the one on the collar to black, the one on the wall to light grey: a patch attends to patches of its colour, at any position. The blackest patches get more weight than the collar itself, because a scalar product grows with the length of the vectors."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
figure = grid_of(
    [quarters[0].permute(1, 2, 0).clamp(0, 1), *maps], ["", *marked], across=4, size=2
)
for ax, (row, column) in zip(figure.axes[1:], marked.values(), strict=True):
    ax.plot(column, row, "rs", fillstyle="none", markersize=10)

# %% [markdown]
# ## Self-attention, and heads
#
# ```{drawing} heads
# Multi-head self-attention with the shapes of ViT-B/16.
# ```
#
# In self-attention, queries, keys and values all come from the same tokens $z$, by three learned
# matrices:
#
# $$ Q = z\,W_q, \qquad K = z\,W_k, \qquad V = z\,W_v $$
#
# Here it is small enough to look at every number: five tokens of width 4, and matrices of 4 x 3.

# %%
tokens = torch.randint(-2, 3, (5, 4)).float()
W_q, W_k, W_v = torch.randint(-1, 2, (3, 4, 3)).float()
Q, K, V = tokens @ W_q, tokens @ W_k, tokens @ W_v
A = (Q @ K.T / math.sqrt(3)).softmax(dim=-1)
tables = {"tokens": tokens, "Q": Q, "K": K, "V": V}
print(
    "".join(f"{name} {tuple(table.shape)}".ljust(18) for name, table in tables.items())
)
for rows in zip(*tables.values(), strict=True):
    print("".join(f"{row.int().tolist()!s:<18}" for row in rows))
print("A     ", tuple(A.shape))
for row in A:
    print("   ", " ".join(f"{weight:.2f}" for weight in row))
print("A V   ", tuple((A @ V).shape))
for row in A @ V:
    print("   ", " ".join(f"{number:5.2f}" for number in row))

# %% [markdown]
# Row $n$ of $A$ says where token $n$ looks. Each row of $AV$ is a mean of rows of $V$, so it lies
# between the smallest and the largest value of each column of $V$.
#
# **Heads.** One row of weights per token is little: a token may want to look at its neighbours and
# at all tokens of its colour. So the width $D$ is split into $h$ heads of $d = D/h$ numbers. Each head
# has its own queries, keys, values and weights. One more matrix combines the outputs of the heads.
# These are Eq. 5 to 8 of the ViT paper (which writes $D_h$ for $d$ and $k$ for the number of heads):
#
# $$ [q, k, v] = z\,U_{qkv}, \qquad A = \operatorname{softmax}\big(qk^\top/\sqrt{d}\big), \qquad
#    \operatorname{SA}(z) = A v $$
#
# $$ \operatorname{MSA}(z) = [\operatorname{SA}_1(z); \dots; \operatorname{SA}_h(z)]\,U_{msa} $$
#
# As a class, in six steps. $h$ must divide $D$; the output may have another width than the input.
# Notebook A puts the LayerNorm of Eq. 2 into its MSA class, and that of Eq. 3 into its MLP class. Here
# both norms belong to the block ([chapter 3](03_encoder.py#the-block)).


# %%
class AttentionInSteps(nn.Module):
    """Multi-head self-attention: tokens (B, T, D) -> (B, T, outputs)."""

    def __init__(self, width: int, heads: int, outputs: int | None = None) -> None:
        super().__init__()
        assert width % heads == 0, f"{heads} heads do not divide the width {width}"
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)  # U_qkv: three matrices side by side
        self.proj = nn.Linear(width, outputs or width)  # U_msa

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        B, T, D = z.shape
        d = D // self.heads
        # 1. One matrix product gives queries, keys and values: (B, T, 3 D).
        qkv = self.qkv(z)
        # 2. Split it into three, and each into its heads: (B, T, 3, h, d).
        qkv = qkv.reshape(B, T, 3, self.heads, d)
        # 3. The heads become a batch dimension: q, k and v are (B, h, T, d) each.
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # 4. Scores, divided by the root of d, and their softmax: A is (B, h, T, T).
        A = (q @ k.transpose(-2, -1) / math.sqrt(d)).softmax(dim=-1)
        # 5. Means of the values, and the heads side by side again: (B, T, D).
        joined = (A @ v).transpose(1, 2).reshape(B, T, D)
        # 6. Mix the heads: (B, T, outputs).
        return self.proj(joined)


tiny = AttentionInSteps(width=4, heads=2, outputs=3)
print("2 heads of width 2, output width 3:", tuple(tiny(tokens[None]).shape))
for row in tiny(tokens[None])[0]:
    print("   ", " ".join(f"{number:5.2f}" for number in row))

# %% [markdown]
# In the encoder the output width is always $D$, because the output is added to the input. The
# library's class has two more things, which do nothing unless they are asked for: a norm of queries
# and keys, and rotary positions. It also hands the products to torch's fused kernel.
#
# ```{literalinclude} ../../src/vitkit/models/attention.py
# :pyobject: MultiHeadSelfAttention
# ```
#
# With the same weights, both give the same numbers. Here is each step at the size of ViT-B/16:

# %%
attention = vitkit.MultiHeadSelfAttention(width=768, num_heads=12).eval()
in_steps = AttentionInSteps(width=768, heads=12)
in_steps.load_state_dict(attention.state_dict())  # the names of the weights are equal
z = torch.randn(1, 197, 768)
fused = attention.qkv(z)[0]
print("z U_qkv     ", tuple(fused.shape))
print("split       ", tuple(fused.unflatten(-1, (3, 12, 64)).shape))
queries, keys, values = fused.unflatten(-1, (3, 12, 64)).permute(1, 2, 0, 3)
by_head = (queries @ keys.transpose(-2, -1) / math.sqrt(64)).softmax(-1)
print("A           ", tuple(by_head.shape))
joined = (by_head @ values).transpose(0, 1).flatten(1)
print("heads joined", tuple(joined.shape))
msa = attention.proj(joined)
print("MSA(z)      ", tuple(msa.shape))
print(f"differs from the library's by {(msa - attention(z)[0]).abs().max():.0e}")
print(f"class in steps differs by {(in_steps(z) - attention(z)).abs().max():.0e}")
print(f"parameters: {sum(p.numel() for p in attention.parameters()):,}")

# %% [markdown]
# ### What the split costs
#
# Splitting costs nothing: 12 heads of width 64 need as many multiply-adds as one head of width 768.
# But each token has 12 rows of weights instead of one. Notebook B never splits the heads, but
# divides by the root of a head's width. That is one head, whose scores are too large by a factor of
# $\sqrt{12}$:

# %% mystnb={"figure": {"caption": "The sorted weights of one query, averaged over 197 queries of random tokens. Split into 12 heads, the weight is spread over many keys. Not split, with the root of 64 for vectors of 768 numbers, the first few keys get most of the weight."}, "code_prompt_show": "Show the code of this figure"} tags=["hide-input"]
long_q, long_k = torch.randn(2, 197, 768)
short_q, short_k = long_q.unflatten(1, (12, 64)), long_k.unflatten(1, (12, 64))
rows = {
    "split": torch.einsum("nhd,mhd->hnm", short_q, short_k) / math.sqrt(64),
    "not split": long_q @ long_k.T / math.sqrt(64),
}
figure, ax = plt.subplots(figsize=(5, 2.6))
for name, scores in rows.items():
    ordered = scores.softmax(-1).flatten(0, -2).sort(descending=True).values.mean(0)
    ax.plot(range(1, 21), ordered[:20], marker=".", label=name)
ax.set(
    xlabel="key, sorted by its weight",
    ylabel="weight",
    ylim=0,
    xticks=[1, 5, 10, 15, 20],
)
_ = ax.legend()

# %% [markdown]
# ### One matrix or three
#
# One matrix for queries, keys and values is faster than three. The rows of the one matrix are the
# three separate matrices that other code has. Only the initialisation must treat them as three: the
# standard deviation of Xavier's rule depends on the shape of the matrix, and the fused matrix has
# another shape than its parts.

# %%
three = zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True)
separate = torch.cat([z @ matrix.T + bias for matrix, bias in three], dim=-1)
difference = (separate - attention.qkv(z)).abs().max()
print(f"three matrices and one matrix differ by {difference:.0e}")
whole = nn.init.xavier_normal_(torch.empty(3 * 1024, 1024))
part = nn.init.xavier_normal_(torch.empty(1024, 1024))
print("standard deviation:", end=" ")
print(f"all three at once {whole.std():.3f}, each by itself {part.std():.3f}")

# %% [markdown]
# ## Equal to torch's attention
#
# `torch.nn.MultiheadAttention` with the same weights gives the same numbers.

# %%
encoder = vitkit.Encoder(width=768, depth=1, num_heads=12, mlp_width=3072).eval()
ours, normed = encoder.blocks[0].attn, encoder.blocks[0].norm1(z)
theirs = nn.MultiheadAttention(768, 12, batch_first=True).eval()
theirs.load_state_dict({
    "in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias,
    "out_proj.weight": ours.proj.weight, "out_proj.bias": ours.proj.bias,
})  # fmt: skip
expected, torch_weights = theirs(normed, normed, normed, average_attn_weights=False)
difference = (expected - ours(normed)).abs().max()
print(f"outputs differ by {difference:.0e}")
assert difference < 1e-5

# %% [markdown]
# ## Recording the attention weights
#
# The module does not keep $A$. Torch's fused kernel never stores this table, whose size grows with
# the square of the number of tokens. To see the weights, pass a `Record` to an encoder or a model.
# It stores the layers that you ask for; the output of the model stays the same. Chapter 7 draws the
# weights of a trained model.

# %%
record = vitkit.Record(attention=[0])
encoder(z, record)
recorded = record.attention[0]  # (images, heads, queries, keys)
print("layer 0", tuple(recorded.shape), f"a row sums to {recorded[0, 0, 0].sum():.4f}")
print(f"torch's weights differ by {(torch_weights - recorded).abs().max():.0e}")

# %% [markdown]
# ## The number of heads must divide the width
#
# If the code rounds down, the heads lose the remainder of the width, and a later matrix product
# fails far from the cause. vitkit raises an error at once and lists numbers of heads that work. The
# width of a head can also be set separately.

# %%
print("6 heads of", 512 // 6, "numbers use", 6 * (512 // 6), "of 512")
print_error(lambda: vitkit.MultiHeadSelfAttention(width=512, num_heads=6))
wide = vitkit.MultiHeadSelfAttention(width=512, num_heads=6, head_width=85)
print("with head_width=85:", tuple(wide(torch.randn(1, 3, 512)).shape))

# %% [markdown]
# ## What you know now
#
# - Attention is a mean of values; the weights depend on how similar a query is to each key.
# - The root of $d$ keeps the weights spread over many keys, whatever the width of a head.
# - In self-attention the queries, keys and values come from the same tokens, by learned matrices.
# - $h$ heads cost as much as one, and give each token $h$ rows of weights.
# - Nothing here depends on the order of the tokens. That is why Eq. 1 adds positions.
#
# ## Exercises
#
# **1. Show.** Attention without positions does not see the order of its keys. Show that shuffling
# the rows of $K$ and $V$ together does not change the output, and that shuffling the queries
# shuffles the output.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
q, k, v = torch.randn(6, 8), torch.randn(9, 8), torch.randn(9, 5)
plain = vitkit.scaled_dot_product_attention(q, k, v)
order, rows = torch.randperm(9), torch.randperm(6)
same = vitkit.scaled_dot_product_attention(q, k[order], v[order])
assert torch.allclose(same, plain, atol=1e-6)
assert torch.allclose(
    vitkit.scaled_dot_product_attention(q[rows], k, v), plain[rows], atol=1e-6
)

# %% [markdown]
# **2. Build.** With a causal mask, token $n$ sees only tokens $0 \dots n$. Write such a mask, and
# show that the first three outputs do not change when the fourth token changes. (Hint: `tril`.)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
causal = torch.ones(5, 5, dtype=torch.bool).tril()  # True: query n may attend to key m
tokens = torch.randn(5, 8)
changed = tokens.clone()
changed[3] += 1.0


def attend(z: torch.Tensor) -> torch.Tensor:
    return vitkit.scaled_dot_product_attention(z, z, z, mask=causal)


assert torch.allclose(attend(tokens)[:3], attend(changed)[:3], atol=1e-6)
assert not torch.allclose(attend(tokens)[3:], attend(changed)[3:], atol=1e-2)

# %% [markdown]
# **3. Show.** To prevent overflow, the softmax subtracts the largest score first. Show with scores
# around 1,000 that this is necessary, and that it does not change the result.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
scores = 1000 + torch.randn(3, 7)
naive = scores.exp() / scores.exp().sum(-1, keepdim=True)
assert naive.isnan().all(), "infinity divided by infinity"
shifted = (
    scores - scores.amax(-1, keepdim=True)
).exp()  # e^(s - m) / sum e^(s - m): m cancels
guarded = shifted / shifted.sum(-1, keepdim=True)
assert torch.allclose(guarded, scores.softmax(-1), atol=1e-6)

# %% [markdown]
# **4. Predict, then run.** Multiply the five queries of the example to do by hand by 100. What are
# the weights of the first query then, and those of the second and of the last?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
q = torch.tensor([[1.0, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
_, weights = vitkit.scaled_dot_product_attention(
    100 * q,
    torch.eye(4, 3),
    4.5 * torch.arange(12.0).reshape(4, 3),
    return_weights=True,
)
assert torch.allclose(weights[0], torch.tensor([1.0, 0, 0, 0]))  # one key has it all
assert torch.allclose(weights[1], torch.tensor([0.5, 0, 0.5, 0]))  # two equal scores
assert torch.allclose(weights[4], torch.full((4,), 0.25))  # 100 times zero is zero

# %% [markdown]
# **5. Train.** The matrices decide what is similar. There are eight keys (one-hot vectors) with
# random values, and query $i$ must find the value of key $p(i)$, where $p$ is a secret order. Learn
# $W_q$ alone from examples, with $W_k$ as the unit matrix. Then read the secret from the weights.
# (Hint: a squared error, and Adam with a rate of 0.1 for 200 steps.)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
secret, eight = torch.randperm(8), torch.eye(8)
W_q = torch.zeros(8, 8, requires_grad=True)
optimizer = torch.optim.Adam([W_q], lr=0.1)
for _ in range(200):
    values = torch.randn(32, 8, 1)  # new values for each of 32 examples
    found = vitkit.scaled_dot_product_attention(
        (eight @ W_q).expand(32, 8, 8), eight.expand(32, 8, 8), values
    )
    loss = (found - values[:, secret]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
_, weights = vitkit.scaled_dot_product_attention(
    eight @ W_q, eight, values[0], return_weights=True
)
assert torch.equal(weights.argmax(dim=-1), secret)
assert weights.amax(dim=-1).min() > 0.9

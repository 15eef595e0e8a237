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
# each token separately.
#
# $$ \operatorname{Attention}(Q, K, V) =
#    \operatorname{softmax}\Big(\frac{QK^\top}{\sqrt{d}}\Big) V $$
#
# Each of $N$ queries (a row of $Q$ with $d$ numbers) is compared with each of $M$ keys by a scalar
# product. The softmax turns the $M$ scores of a query into weights, which are positive and sum to
# 1. The output of a query is the mean of the values (rows of $V$) with these weights. The function
# is `vitkit.scaled_dot_product_attention`, Eq. 1 of "Attention Is All You Need" ([arXiv
# 1706.03762](https://arxiv.org/abs/1706.03762)).

# %%
import math

import torch
from drawing import grid_of
from matplotlib import pyplot as plt
from print_error import print_error
from skimage import data
from torch import nn

import vitkit
from vitkit.models.embedding import patchify

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## An example to do by hand
#
# There are five queries, four keys and four values. The first query equals the first key. The
# second query is the sum of the first and the third key. The third query equals the second key. The
# last two queries are zero.

# %%
q = torch.tensor([[1.0, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
k = torch.eye(4, 3)
v = 4.5 * torch.arange(12.0).reshape(4, 3)
output, weights = vitkit.scaled_dot_product_attention(q, k, v, return_weights=True)
for row in (0, 1):
    print(f"weights row {row}:", " ".join(f"{number:.4f}" for number in weights[row]))
for row in (0, 1, 3, 4):
    print(f"output  row {row}:", " ".join(f"{number:.4f}" for number in output[row]))

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
# falls to a third ([chapter 11](11_bugs.py#a-softmax-without-the-root)). The text of [notebook
# D](index.md) leaves out the root. Here is its effect on the weights.

# %% mystnb={"figure": {"caption": "The largest of the 196 weights of a query, by the width d of random queries and keys. Divided by the root of d, it stays near 0.05 for every d, so a token combines many values. Without the division, one key gets more and more of the weight as d grows."}}
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

# %% mystnb={"figure": {"caption": "The photograph, and the attention weights of each marked patch. The patch on the suit attends to orange, the one on the collar to black, the one on the wall to light grey: a patch attends to patches of its colour, at any position. The blackest patches get more weight than the collar itself, because a scalar product grows with the length of the vectors."}}
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
figure = grid_of(
    [quarters[0].permute(1, 2, 0).clamp(0, 1), *maps], ["", *marked], across=4, size=2
)
for ax, (row, column) in zip(figure.axes[1:], marked.values(), strict=True):
    ax.plot(column, row, "rs", fillstyle="none", markersize=10)

# %% [markdown]
# ## Self-attention, and heads
#
# In self-attention, queries, keys and values all come from the same tokens, by one matrix (Eq. 5 to
# 7 of the ViT paper):
#
# $$ [q, k, v] = z\,U_{qkv}, \qquad A = \operatorname{softmax}\big(qk^\top/\sqrt{D_h}\big), \qquad
#    \operatorname{SA}(z) = A v $$
#
# With $h$ heads, the width is split into $h$ parts of $D_h = D/h$ numbers. (The paper writes $k$
# for the number of heads; here $k$ are the keys.) Each head has its own attention weights. One more
# matrix combines the outputs of the heads (Eq. 8):
#
# $$ \operatorname{MSA}(z) = [\operatorname{SA}_1(z); \dots; \operatorname{SA}_h(z)]\,U_{msa} $$
#
# `MultiHeadSelfAttention` computes these equations. Step by step, at the size of ViT-B/16:

# %%
attention = vitkit.MultiHeadSelfAttention(width=768, num_heads=12).eval()
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
print(f"largest difference from the module: {(msa - attention(z)[0]).abs().max():.0e}")
print(f"parameters: {sum(p.numel() for p in attention.parameters()):,}")

# %% [markdown]
# Splitting costs nothing: 12 heads of width 64 need as many multiply-adds as one head of width 768.
# But each token has 12 rows of weights instead of one. Notebook B never splits the heads, but
# divides by the root of a head's width. That is one head, whose scores are too large by a factor of
# $\sqrt{12}$:

# %% mystnb={"figure": {"caption": "The sorted weights of one query, averaged over 197 queries of random tokens. Split into 12 heads, the weight is spread over many keys. Not split, with the root of 64 for vectors of 768 numbers, the first few keys get most of the weight."}}
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
# One matrix for queries, keys and values is faster than three. The rows of the one matrix are the
# three separate matrices that other code has. Only the initialisation must treat them as three: the
# standard deviation of Xavier's rule depends on the shape of the matrix, and the fused matrix has
# another shape than its parts.

# %%
three = zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True)
separate = torch.cat([z @ matrix.T + bias for matrix, bias in three], dim=-1)
print(
    f"three matrices and one matrix differ by {(separate - attention.qkv(z)).abs().max():.0e}"
)
whole = nn.init.xavier_normal_(torch.empty(3 * 1024, 1024))
part = nn.init.xavier_normal_(torch.empty(1024, 1024))
print(
    f"standard deviation: all three at once {whole.std():.3f}, each by itself {part.std():.3f}"
)

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
# ## Exercises
#
# **1.** Attention without positions does not see the order of its keys. Show that shuffling the
# rows of $K$ and $V$ together does not change the output, and that shuffling the queries shuffles
# the output.

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
# **2.** With a causal mask, token $n$ sees only tokens $0 \dots n$. Write such a mask, and show
# that the first three outputs do not change when the fourth token changes.

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
# **3.** To prevent overflow, the softmax subtracts the largest score first. Show with scores around
# 1,000 that this is necessary, and that it does not change the result.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
scores = 1000 + torch.randn(3, 7)
naive = scores.exp() / scores.exp().sum(-1, keepdim=True)
assert naive.isnan().all(), "infinity divided by infinity"
shifted = (
    scores - scores.amax(-1, keepdim=True)
).exp()  # e^(s - m) / sum e^(s - m): m cancels
guarded = shifted / shifted.sum(-1, keepdim=True)
assert torch.allclose(guarded, scores.softmax(-1), atol=1e-6)

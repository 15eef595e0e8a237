# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 2. Attention
#
# The one place where tokens look at each other. Everything else in a Transformer treats each token
# by itself.
#
# $$ \operatorname{Attention}(Q, K, V) =
#    \operatorname{softmax}\Big(\frac{QK^\top}{\sqrt{d}}\Big) V $$
#
# Each of $N$ queries (a row of $Q$, $d$ numbers) is compared with each of $M$ keys by a scalar
# product. The softmax makes a row of weights from a query's $M$ results, positive and summing to 1.
# The answer to a query is the mean of the values (rows of $V$) by these weights. It is
# `vitkit.scaled_dot_product_attention`, Eq. 1 of "Attention Is All You Need"
# ([arXiv 1706.03762](https://arxiv.org/abs/1706.03762)).

# %%
import math

import torch
from drawing import grid_of
from matplotlib import pyplot as plt
from skimage import data
from torch import nn

import vitkit
from vitkit.models.embedding import patchify

torch.manual_seed(0)
plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## An example to do by hand
#
# Five queries, four keys, four values. The first query is like the first key, the second like the
# first and the third, the third like the second, the last two like none.

# %%
q = torch.tensor([[1.0, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
k = torch.eye(4, 3)
v = 4.5 * torch.arange(12.0).reshape(4, 3)
mixed, weights = vitkit.scaled_dot_product_attention(q, k, v, return_weights=True)
for row in (0, 1):
    print(f"weights row {row}:", " ".join(f"{number:.4f}" for number in weights[row]))
for row in (0, 1, 3, 4):
    print(f"output  row {row}:", " ".join(f"{number:.4f}" for number in mixed[row]))

# %% [markdown]
# A query that points along a key takes more from it. A query that is like none takes the plain mean
# of all values. The first weight is $e^{1/\sqrt 3} / (e^{1/\sqrt 3} + 3)$:

# %%
first = math.exp(1 / math.sqrt(3))
print(f"with the root of d {first / (first + 3):.5f}, without {math.e / (math.e + 3):.5f}")

# %% [markdown]
# ## Why the root of d
#
# A scalar product of two vectors of $d$ independent numbers with variance 1 has variance $d$. With
# $d = 64$ the scores lie around $\pm 8$, and $e^8$ is 3,000 times $e^0$: one key takes three
# quarters on average, more as $d$ grows, and the softmax's slope falls to a third ([chapter
# 11](11_bugs.py)). One notebook leaves the root out in its text. Here is what that does to rows of
# weights.

# %% mystnb={"figure": {"caption": "The largest of 196 weights of a row, by the width d of random queries and keys. Divided by the root of d it stays near 0.05, whatever d is, so a token listens to many. Without it, one key takes more and more as d grows."}}
widths = [4, 8, 16, 32, 64, 128]
largest = {"divided by the root": [], "not divided": []}
for width in widths:
    scores = torch.randn(500, width) @ torch.randn(196, width).T
    largest["divided by the root"].append((scores / width**0.5).softmax(-1).amax(-1).mean())
    largest["not divided"].append(scores.softmax(-1).amax(-1).mean())
figure, place = plt.subplots(figsize=(5, 2.6))
for name, values in largest.items():
    place.plot(widths, values, marker="o", label=name)
place.set(xlabel="d", ylabel="largest weight", xscale="log", ylim=(0, 1), xticks=widths)
place.set_xticks([], minor=True)
place.set_xticklabels(widths)
_ = place.legend()

# %% [markdown]
# ## Attention over a photograph
#
# Nothing above needs weights that were learned. Take a photograph, let each patch be 12 numbers,
# the colours of its four quarters, and use these as queries, keys and values. Then a patch attends
# to the patches that look like it. What a trained model adds are matrices that say in which respect
# tokens are compared, and what they tell each other.

# %% mystnb={"figure": {"caption": "The photograph, and how much each marked patch takes from every other. The patch on the suit attends to orange, the one on the collar to black, the one on the wall to light grey: like to like, wherever it stands. The blackest take more than the collar itself, as a scalar product grows with its vectors."}}
photograph = torch.from_numpy(data.astronaut()[:448, :448]).permute(2, 0, 1).float()[None] / 255
quarters = nn.functional.interpolate(photograph, size=28, antialias=True, mode="bilinear")
colours = patchify(quarters, (2, 2))[0]
colours = (colours - colours.mean(0)) / colours.std(0)
_, weights = vitkit.scaled_dot_product_attention(colours, colours, colours, return_weights=True)
marked = {"suit": (10, 3), "collar": (6, 5), "wall": (2, 4)}
maps = [weights[14 * row + column].view(14, 14) for row, column in marked.values()]
figure = grid_of([quarters[0].permute(1, 2, 0).clamp(0, 1), *maps], ["", *marked], across=4, size=2)
for place, (row, column) in zip(figure.axes[1:], marked.values(), strict=True):
    place.plot(column, row, "rs", fillstyle="none", markersize=10)

# %% [markdown]
# ## Self-attention, and heads
#
# In self-attention queries, keys and values all come from the same tokens, by one matrix (the ViT
# paper's Eq. 5 to 7):
#
# $$ [q, k, v] = z\,U_{qkv}, \qquad A = \operatorname{softmax}\big(qk^\top/\sqrt{D_h}\big), \qquad
#    \operatorname{SA}(z) = A v $$
#
# With $k$ heads the width is split in $k$ parts of $D_h = D/k$ numbers. Every part attends by
# itself, with weights of its own, and one more matrix mixes what the heads found (Eq. 8):
#
# $$ \operatorname{MSA}(z) = [\operatorname{SA}_1(z); \dots; \operatorname{SA}_k(z)]\,U_{msa} $$
#
# `MultiHeadSelfAttention` is these lines. Step by step, at the size of ViT-B/16:

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
print(f"largest difference to the module: {(msa - attention(z)[0]).abs().max():.0e}")
print(f"parameters: {sum(p.numel() for p in attention.parameters()):,}")

# %% [markdown]
# Splitting costs nothing: the products have as many multiply-adds with 12 heads of 64 as with one
# of 768. What it gives is 12 rows of weights for a token instead of one. In a notebook the heads
# are never split, while the root is that of a head's width. That is one head, with scores too large
# by $\sqrt{12}$:

# %% mystnb={"figure": {"caption": "The weights of a row, sorted, mean over 197 rows of random tokens. Split in 12 heads, it is spread over many keys. Never split, with the root of 64 for 768 numbers, the first few keys take most of it."}}
long_q, long_k = torch.randn(2, 197, 768)
short_q, short_k = long_q.unflatten(1, (12, 64)), long_k.unflatten(1, (12, 64))
rows = {
    "split": torch.einsum("nhd,mhd->hnm", short_q, short_k) / math.sqrt(64),
    "never split": long_q @ long_k.T / math.sqrt(64),
}
figure, place = plt.subplots(figsize=(5, 2.6))
for name, scores in rows.items():
    ordered = scores.softmax(-1).flatten(0, -2).sort(descending=True).values.mean(0)
    place.plot(range(1, 21), ordered[:20], marker=".", label=name)
place.set(xlabel="key, by its weight", ylabel="weight", ylim=0, xticks=[1, 5, 10, 15, 20])
_ = place.legend()

# %% [markdown]
# One matrix for queries, keys and values is a matter of speed: three separate ones, as others write,
# are its rows. At the start it is three, too: Xavier's rule looks at a matrix's sides, and the whole of it has other sides than its parts.

# %%
three = zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True)
separate = torch.cat([z @ matrix.T + bias for matrix, bias in three], dim=-1)
print(f"three matrices and one differ by {(separate - attention.qkv(z)).abs().max():.0e}")
whole = nn.init.xavier_normal_(torch.empty(3 * 1024, 1024))
part = nn.init.xavier_normal_(torch.empty(1024, 1024))
print(f"standard deviation: all three at once {whole.std():.3f}, each by itself {part.std():.3f}")

# %% [markdown]
# ## The same as torch's
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
expected, their_maps = theirs(normed, normed, normed, average_attn_weights=False)
apart = (expected - ours(normed)).abs().max()
print(f"outputs differ by {apart:.0e}")
assert apart < 1e-5

# %% [markdown]
# ## Asking for the weights
#
# The module does not keep $A$: torch's fused kernel never makes the table, which would grow with
# the square of the tokens. Whoever wants to see it hands a `Record` to an encoder or a model. It gets
# what was asked for; the forward pass stays the same. Chapter 7 draws it for a trained model.

# %%
record = vitkit.Record(attention=[0])
encoder(z, record)
kept = record.attention[0]
print("layer 0", tuple(kept.shape), f"a row sums to {kept[0, 0, 0].sum():.4f}")
print(f"torch's maps differ by {(their_maps - kept).abs().max():.0e}")

# %% [markdown]
# ## Heads must divide the width
#
# Where the code rounds down, a head's width loses its remainder, and a later product crashes, far
# from the cause. Here it is refused at once, with numbers that work. A head's width may be given.

# %%
print("6 heads of", 512 // 6, "numbers make", 6 * (512 // 6), "of 512")
try:
    vitkit.MultiHeadSelfAttention(width=512, num_heads=6)
except vitkit.VitkitError as error:
    print(error)
apart = vitkit.MultiHeadSelfAttention(width=512, num_heads=6, head_width=85)
print("heads of a width of their own:", tuple(apart(torch.randn(1, 3, 512)).shape))

# %% [markdown]
# ## Exercises
#
# **1.** Attention without positions does not see the order of its keys: show that shuffling the
# rows of $K$ and $V$ together changes nothing, and that shuffling the queries shuffles the output.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
q, k, v = torch.randn(6, 8), torch.randn(9, 8), torch.randn(9, 5)
plain = vitkit.scaled_dot_product_attention(q, k, v)
order, rows = torch.randperm(9), torch.randperm(6)
same = vitkit.scaled_dot_product_attention(q, k[order], v[order])
assert torch.allclose(same, plain, atol=1e-6)
assert torch.allclose(vitkit.scaled_dot_product_attention(q[rows], k, v), plain[rows], atol=1e-6)

# %% [markdown]
# **2.** A causal mask lets token $n$ see tokens $0 \dots n$ alone. Write it, and show that the
# first three outputs do not change when the fourth token does.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
causal = torch.ones(5, 5, dtype=torch.bool).tril()
tokens = torch.randn(5, 8)
changed = tokens.clone()
changed[3] += 1.0


def seen(z: torch.Tensor) -> torch.Tensor:
    return vitkit.scaled_dot_product_attention(z, z, z, mask=causal)


assert torch.allclose(seen(tokens)[:3], seen(changed)[:3], atol=1e-6)
assert not torch.allclose(seen(tokens)[3:], seen(changed)[3:], atol=1e-2)

# %% [markdown]
# **3.** The softmax is guarded against overflow by taking the largest score off first. Show with
# scores around 1,000 that this is needed, and that it changes nothing else.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
scores = 1000 + torch.randn(3, 7)
naive = scores.exp() / scores.exp().sum(-1, keepdim=True)
assert naive.isnan().all(), "infinity over infinity"
shifted = (scores - scores.amax(-1, keepdim=True)).exp()  # e^(s - m) / sum e^(s - m): m cancels
guarded = shifted / shifted.sum(-1, keepdim=True)
assert torch.allclose(guarded, scores.softmax(-1), atol=1e-6)

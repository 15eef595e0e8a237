# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 10. The original Transformer
#
# The ViT is one half of an older model. The Transformer of "Attention Is All You Need" ([arXiv
# 1706.03762](https://arxiv.org/abs/1706.03762)) turns one sequence into another: an encoder reads
# the source, a decoder writes the target, one token after the other. This chapter builds it, trains
# it on two small tasks, and shows what its masks are for.
#
# :::{admonition} In this chapter
# :class: aims
# - **You learn** why attention came, what an encoder and a decoder are, what masks do, and how a
#   trained Transformer writes.
# - **You need** [chapter 2](02_attention.py) and [chapter 3](03_encoder.py).
# - **Reading** about 20 minutes
# :::
#
# ## Why attention came
#
# **Convolutions** see a small neighbourhood. In text, as in images, what belongs together may be
# far apart; many layers lie between two distant words.
#
# **Recurrent networks** (RNNs) read a sentence word by word and keep what they have read in one
# vector, their state $s_t = f(s_{t-1}, x_t)$. They see any distance, but step by step: a sentence
# of 50 words is 50 steps that cannot run at the same time, and gradients pass through all of them.
#
# **Sequence to sequence** ([arXiv 1409.3215](https://arxiv.org/abs/1409.3215), 2014) translates
# with two of them: an encoder reads the source, and its last state is all that the decoder gets.
# However long the sentence is, it must fit into this one vector of fixed length, so information is
# lost, and long sentences suffer most.
#
# **Attention** ([arXiv 1409.0473](https://arxiv.org/abs/1409.0473), 2014) is the cure. The decoder
# keeps all states $h_1, \dots, h_m$ of the encoder. For each word that it writes, it computes
# a mean of them, with weights that say how well each fits its own state $s_{t-1}$:
#
# $$ c_t = \sum_{j=1}^{m} \alpha_{tj} h_j, \qquad
#    \alpha_{tj} = \frac{\exp a(s_{t-1}, h_j)}{\sum_{i=1}^{m} \exp a(s_{t-1}, h_i)} $$
#
# Here $a$ is a small network. This is the attention of [chapter 2](02_attention.py) with one query,
# $s_{t-1}$, whose keys and values are both the $h_j$.
#
# **The Transformer** (2017) keeps the attention and leaves out the recurrence. Every word reads
# every other in one step, whatever their distance, and all words are computed at the same time,
# which is what GPUs are good at. What recurrence gave for free, the order of the words, must be
# added: as [positions](01_patches.py#position-embeddings). In 2020 the **ViT** took its encoder and
# replaced the words by patches.
#
# ## The model on one page
#
# ```{drawing} encoder-decoder
# The Transformer. The example writes the letters h g a k backwards. Its masks say which tokens may
# be read: a row is a query.
# ```
#
# Its blocks are post-norm: the norm stands after the sum. An encoder block is
#
# $$ z' = \operatorname{LN}(z + \operatorname{MSA}(z)), \qquad
#    z = \operatorname{LN}(z' + \operatorname{MLP}(z')) $$
#
# and a decoder block has a third step between the two, cross-attention (CA) to the encoder's output
# $m$, the memory. Its queries come from the target, its keys and values from the source.
#
# $$ z' = \operatorname{LN}(z + \operatorname{MSA}(z)), \qquad
#    z'' = \operatorname{LN}(z' + \operatorname{CA}(z', m)), \qquad
#    z = \operatorname{LN}(z'' + \operatorname{MLP}(z'')) $$
#
# The other parts, with the sections of the paper:
#
# | part | equation | section |
# | --- | --- | --- |
# | attention | $\operatorname{softmax}(QK^\top / \sqrt{d})\, V$ | 3.2.1 |
# | heads | $[\operatorname{head}_1; \dots; \operatorname{head}_h]\, W^O$, $\operatorname{head}_i = \operatorname{Attention}(QW^Q_i, KW^K_i, VW^V_i)$ | 3.2.2 |
# | MLP | $\max(0, xW_1 + b_1)\, W_2 + b_2$ | 3.3 |
# | input | $\sqrt{D}\, \operatorname{embedding}(\text{id}) + E_\text{pos}$ | 3.4, 3.5 |
# | positions | $\sin(n\, 10000^{-2i/D})$, $\cos(n\, 10000^{-2i/D})$ | 3.5 |
# | output | $\operatorname{softmax}(zW + b)$ over the vocabulary; the model returns $zW + b$ | 3.4 |
#
# `vitkit.Transformer` has both stacks. Its blocks:
#
# ```{literalinclude} ../../src/vitkit/models/transformer.py
# :pyobject: PostNormDecoderBlock
# ```

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the imports", "code_prompt_hide": "Hide the imports"}
import math
from collections.abc import Callable

import torch
from drawing import count, grid_of
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn import functional as F
from words import (
    END,
    LETTERS,
    LONGEST,
    PADDING,
    START,
    as_text,
    backwards,
    draw,
    ordered,
    with_end,
)

import vitkit
from vitkit.models.attention import Context
from vitkit.models.embedding import sincos_1d

torch.manual_seed(0)
torch.set_num_threads(1)  # more threads do not speed up matrices as small as these

# %% [markdown]
# ## Shapes and sizes
#
# The default is the base model of the paper: width 512, 8 heads, 6 blocks on each side, an MLP of
# width 2048. Its inputs are vectors or token ids. 64 sources of 32 vectors and 64 targets of 16
# vectors give 64 outputs of 16 vectors.

# %%
with torch.device("meta"):
    output = vitkit.Transformer()(torch.rand(64, 32, 512), torch.rand(64, 16, 512))
    print("(64, 32, 512), (64, 16, 512) ->", tuple(output.shape))
    sizes = {
        "as torch.nn.Transformer": vitkit.Transformer(
            positions=False, output_projection=False
        ),
        "output projection, no final norms": vitkit.Transformer(final_norm=False),
        "the same with 6 heads of 85": vitkit.Transformer(
            num_heads=6, head_width=85, final_norm=False
        ),
        "torch.nn.Transformer itself": nn.Transformer(
            512, 8, 6, 6, 2048, batch_first=True
        ),
    }
for name, model in sizes.items():
    print(f"{name:<35}{count(model):>11,}")

# %% [markdown]
# Six heads of 85 are 510 numbers. This is not a mistake here: the width of a head can be set
# independently of the width of the model, and the matrix after the heads maps 510 numbers to 512.
#
# Torch's own class has no positions, no output projection, and a norm at the end of both stacks.
# With the same settings, `vitkit.Transformer` gives the same numbers; only the names of the weights
# differ.

# %%
NAMES = {
    "blocks": "layers", "cross_attn.proj": "multihead_attn.out_proj",
    ".attn.proj": ".self_attn.out_proj", ".attn.qkv.": ".self_attn.in_proj_",
    "mlp.fc1": "linear1", "mlp.fc2": "linear2",
}  # fmt: skip


def torch_names(ours: vitkit.Transformer) -> dict[str, Tensor]:
    """Return the weights under torch's names, with q, k and v in one matrix."""
    state = ours.state_dict()
    for name in [name for name in state if ".cross_attn.q." in name]:
        joined = torch.cat([state.pop(name), state.pop(name.replace(".q.", ".kv."))])
        state[name.replace("cross_attn.q.", "multihead_attn.in_proj_")] = joined
    for mine, torch_s in NAMES.items():
        state = {name.replace(mine, torch_s): value for name, value in state.items()}
    return state


ours = vitkit.Transformer(positions=False, output_projection=False).eval()
theirs = sizes["torch.nn.Transformer itself"].eval()
for parameter in ours.parameters():
    # biases start at 0; with noise, a swapped bias shows
    parameter.data += 0.02 * torch.randn_like(parameter)
theirs.load_state_dict(torch_names(ours), assign=True)
source, target = torch.randn(2, 32, 512), torch.randn(2, 16, 512)
with torch.inference_mode():
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(
        1
    )  # torch's masks: True is NOT allowed
    difference = (
        (ours(source, target) - theirs(source, target, tgt_mask=hidden)).abs().max()
    )
print(f"outputs differ by {difference:.0e}")
assert difference <= 1e-5

# %% [markdown]
# ## Masks
#
# A decoder is trained on whole targets at once: at each position it predicts the next token. So no
# position may attend to a later one. This is the causal mask, and `Transformer` always uses it.
# Sequences of different lengths are padded, and no token should attend to padding. The caller
# passes the padding masks: True at real tokens. Padded target tokens may attend to themselves, so
# that no row of attention weights is empty. The figure shows where the attention weights of a model
# are not 0.

# %% mystnb={"figure": {"caption": "Where attention is allowed: a row is a query, a column is a key, yellow means a weight above 0. Left: a target of 6 real tokens, with the causal triangle. Middle: a target with 4 real tokens; only tokens 5 and 6 themselves attend to columns 5 and 6. Right: the 6 target tokens attend to a source of 8 tokens, 5 of them real."}}
model = vitkit.Transformer(32, 4, encoder_depth=1, decoder_depth=1, mlp_width=64).eval()
real = {
    "target": torch.arange(6) < torch.tensor([[6], [4]]),
    "source": torch.arange(8) < 5,
}
record = vitkit.Record(attention=[0], cross_attention=[0])
model(
    torch.randn(2, 8, 32), torch.randn(2, 6, 32), target_record=record,
    source_mask=real["source"].expand(2, -1), target_mask=real["target"],
)  # fmt: skip
maps = [*record.attention[0][:, 0], record.cross_attention[0][0, 0]]
allowed = [weights > 0 for weights in maps]
assert torch.equal(allowed[0], torch.ones(6, 6, dtype=torch.bool).tril())
assert torch.equal(allowed[1], allowed[0] & (real["target"][1] | torch.eye(6).bool()))
_ = grid_of(
    allowed, ["causal", "causal and padding", "padding of the source"], across=3, size=2
)

# %% [markdown]
# ```{mask-example}
# A mask to click on: a cell hides a key from a query or shows it, and the weights follow.
# ```

# %% [markdown]
# ## Positions
#
# Attention does not see the order of its tokens, so positions are added as sines and cosines (Sec.
# 3.5; [chapter 1](01_patches.py#position-embeddings) has the formula). The token embeddings are
# multiplied by $\sqrt D$ first (Sec. 3.4). `sincos_1d` computes the table; the model moves it to
# the device of the tokens. The table of [notebook E, "Lab notebook"](coverage.md#e-lab-notebook)
# stays on the CPU, and its exponent is always 0 ([chapter
# 12](12_lab_bugs.py#an-exponent-that-is-always-0)).
#
# ## Two tasks
#
# A source is a word of 3 to 6 letters. One model learns to write it backwards, another to sort its
# letters alphabetically. The target ends with an end token, so that the decoder learns when to
# stop. Words whose letter numbers add up to a multiple of 5 are held out: no model is trained on
# them. The letters are the ids 0 to 11; padding, start and end follow ({download}`words.py <words.py>`).

# %%
examples = draw(30, torch.Generator().manual_seed(1))[:4]
for name, task in (("backwards", backwards), ("in order", ordered)):
    pairs = (
        f"{as_text(source)} -> {as_text(task(source[None])[0])}" for source in examples
    )
    print(f"{name:<10}", ", ".join(pairs))
print(examples[0].tolist(), "->", with_end(backwards(examples))[0].tolist())

# %% [markdown]
# The input of the decoder is the target shifted by one position, with a start token in front. So at
# each position it sees the tokens before, and predicts the next one. The loss is the cross-entropy
# of these predictions, without the padding. Both models have one block on each side and one head.
# They are trained for the same 400 steps by Adam with a warm-up, as in the paper.

# %%
STEPS, WARM_UP, PEAK = 400, 40, 1e-2
Task = Callable[[Tensor], Tensor]
Forward = Callable[[vitkit.Transformer, Tensor, Tensor], Tensor]


def small(seed: int = 0, **settings: bool) -> vitkit.Transformer:
    torch.manual_seed(seed)
    ids = len(LETTERS) + 3
    return vitkit.Transformer(
        width=32, num_heads=1, encoder_depth=1, decoder_depth=1,
        mlp_width=64, dropout=0.0,
        source_vocabulary=ids, target_vocabulary=ids, **settings,
    )  # fmt: skip


def masked(model: vitkit.Transformer, source: Tensor, inputs: Tensor) -> Tensor:
    return model(source, inputs, source_mask=source != PADDING)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def shifted(target: Tensor) -> Tensor:
    """Return the decoder's input: the target, shifted by one, after a start token."""
    return F.pad(target[:, :-1], (1, 0), value=START)


def learn(
    model: vitkit.Transformer, task: Task, forward: Forward = masked
) -> list[float]:
    """Train the model in place; return the loss of each step."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=PEAK, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / STEPS)
    )
    losses = []
    for _ in range(STEPS):
        source = draw(96, generator)
        target = with_end(task(source))
        loss = loss_of(forward(model, source, shifted(target)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def accuracy(written: Tensor, target: Tensor) -> float:
    """Return the share of words without a mistake, from the first letter to the end."""
    written = F.pad(written, (0, target.shape[1] - written.shape[1]), value=END)
    return ((written == target) | (target == PADDING)).all(dim=1).float().mean().item()


held_out = draw(2500, torch.Generator().manual_seed(3), held_out=True)
models, losses = {}, {}
for name, task in (("backwards", backwards), ("in order", ordered)):
    models[name] = small()
    losses[name] = learn(models[name], task)
    written = models[name].generate(
        held_out, START, END, source_mask=held_out != PADDING
    )
    score = accuracy(written, with_end(task(held_out)))
    print(f"{name:<10} {score:.1%} of {len(held_out)} held-out words are correct")
    assert score > 0.95
print(f"{count(models['backwards']):,} parameters each")


# %% mystnb={"figure": {"caption": "The loss per letter during the training of the two models. The dashed line is uniform guessing of letters. Both end at about a hundredth of it or below. Sorting takes longer, because each letter must be compared with all others."}}
def plot_losses(*names: str) -> None:
    _, ax = plt.subplots(figsize=(5, 2.8))
    for name in names:
        ax.plot(losses[name], label=name, linewidth=1)
    ax.axhline(math.log(len(LETTERS)), color="0.6", linestyle="--", linewidth=0.8)
    ax.set(xlabel="step", ylabel="loss", yscale="log")
    ax.legend()


plot_losses("backwards", "in order")

# %% [markdown]
# ## What the decoder attends to
#
# A `Record` for the target stores the maps of cross-attention. To see the maps of generation, the
# model is called once more with the word that it has written.

# %% mystnb={"figure": {"caption": "Cross-attention of the one head, for one held-out word. A row is the letter to be written next, a column is a letter of the source. Backwards (left): the weights go from the last letter to the first. In order (right): they follow the alphabet, wherever the letter is in the word."}}
word = "hgakbd"
ids = torch.tensor([[LETTERS.index(letter) for letter in word]])
figure, axes = plt.subplots(1, 2, figsize=(6.4, 3.2))
for ax, (name, model) in zip(axes, models.items(), strict=True):
    written = model.generate(ids, START, END)
    record = vitkit.Record(cross_attention=[0])
    model(ids, shifted(written), target_record=record)
    ax.imshow(record.cross_attention[0][0, 0].detach(), vmin=0, vmax=1)
    ax.set_title(name)
    ax.set_xticks(range(len(word)), list(word))
    ax.set_yticks(range(len(word) + 1), [*as_text(written[0]), "end"])
    print(f"{name:<10} {word} -> {as_text(written[0])}")
    ax.set_xlabel("source")
_ = axes[0].set_ylabel("written")

# %% [markdown]
# ## Greedy decoding
#
# After training the target is not known. The decoder starts with the start token alone. It writes
# the most probable token, appends it to its input, and continues until it writes the end token. The
# source is encoded once. `generate` does this for a batch. Step by step:

# %%
model = models["backwards"].eval()
with torch.no_grad():
    memory = model.encode(ids)
    so_far = torch.tensor([[START]])
    while so_far[0, -1] != END and so_far.shape[1] < 20:
        logits = model.decode(so_far, memory)[:, -1]
        so_far = torch.cat([so_far, logits.argmax(-1, keepdim=True)], dim=1)
        probability = logits.softmax(-1).amax()
        print(f"{as_text(so_far[0]):<8} probability {probability:.3f}")
print("equal to generate:", torch.equal(so_far[:, 1:], model.generate(ids, START, END)))

# %% [markdown]
# ## What goes wrong without a causal mask
#
# Notebook E has no masks. A model that is trained without a causal mask has a very low loss,
# because the correct output of each position is in the input, one position to the right. Here is
# the decoder written out. With the mask it equals the library's; without the mask the same model is
# trained for the same task.


# %%
def decoder(
    model: vitkit.Transformer, source: Tensor, inputs: Tensor, own: Context
) -> Tensor:
    """Compute the logits; `own` holds the mask of self-attention in the target."""
    real = source != PADDING
    memory, cross = model.encode(source, real), Context(mask=real[:, None, None])
    z = model.embed["target"](inputs) * math.sqrt(model.width)
    z = z + sincos_1d(z.shape[1], model.width)
    for block in model.decoder.blocks:
        z = block(z, memory, own, cross)
    return model.head(model.decoder.norm(z))


def unmasked(model: vitkit.Transformer, source: Tensor, inputs: Tensor) -> Tensor:
    return decoder(model, source, inputs, Context())


inputs = shifted(with_end(backwards(held_out)))
with torch.no_grad():
    causal = Context(mask=torch.ones(LONGEST + 1, LONGEST + 1, dtype=torch.bool).tril())
    written_out = decoder(model, held_out, inputs, causal)
    difference = (written_out - masked(model, held_out, inputs)).abs().max()
print(f"with the mask, the two decoders differ by {difference:.0e}")


def written_by(model: vitkit.Transformer, forward: Forward) -> Tensor:
    """Write the held-out words by greedy decoding, with any forward pass."""
    so_far = torch.full((len(held_out), 1), START)
    with torch.no_grad():
        for _ in range(LONGEST + 1):
            following = forward(model, held_out, so_far)[:, -1].argmax(-1, keepdim=True)
            so_far = torch.cat([so_far, following], dim=1)
    return so_far[:, 1:]


careless = small()  # trained without a causal mask
losses["no causal mask"] = learn(careless, backwards, unmasked)
target = with_end(backwards(held_out))
for name, model, forward in (
    ("causal", models["backwards"], masked),
    ("none", careless, unmasked),
):
    with torch.no_grad():
        loss = loss_of(forward(model, held_out, inputs), target)
    score = accuracy(written_by(model, forward), target)
    print(
        f"mask {name:<7} loss {loss:.4f}, {score:.1%} of the held-out words are correct"
    )
assert loss < 0.01
assert score < 0.1

# %% mystnb={"figure": {"caption": "The same model learning to write backwards with and without the causal mask. Without it the loss falls sooner, because copying the next letter is easier than finding it in the source. The loss does not show this bug; generation does."}}
plot_losses("backwards", "no causal mask")
for source in held_out[:3]:
    wrong = written_by(careless, unmasked)[(held_out == source).all(1)][0]
    print(
        f"without the mask: {as_text(source)} -> {as_text(wrong) or 'no letter at all'}"
    )

# %% [markdown]
# The other bugs of notebook E's Transformer are in [chapter
# 12](12_lab_bugs.py#the-original-transformer): `src +=` on the caller's tensor, a softmax at the
# end of the decoder, an activation that is ignored, queries and keys of different widths.
#
# ## What you know now
#
# - Attention came because one vector is too short for a sentence; the Transformer left out the
#   recurrence because attention alone is enough, and runs in parallel.
# - A decoder block has self-attention with a causal mask, cross-attention to the memory, and an MLP.
# - The causal mask keeps training honest; padding masks keep the lengths of other sentences out.
# - A trained decoder writes one token at a time; its loss alone does not show a missing mask.
#
# ## Exercises
#
# **1. Show.** Padding must not change the output. Show that a word of four letters, padded to six, gets
# the same logits as the word alone, and that without the padding mask it does not.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
model = models["in order"].eval()
word = torch.tensor([[7, 1, 4, 2]])
padded = F.pad(word, (0, 2), value=PADDING)
inputs = torch.tensor([[START, 1, 2, 4]])
with torch.no_grad():
    expected = model(word, inputs)
    torch.testing.assert_close(
        masked(model, padded, inputs), expected, rtol=0, atol=1e-4
    )
    assert (model(padded, inputs) - expected).abs().max() > 0.1

# %% [markdown]
# **2. Predict, then run.** Without positions the encoder sees a set of letters. Which of the two tasks can then not be
# learned by any training? Show it without training.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
blind, order = small(positions=False).eval(), torch.tensor([2, 0, 3, 1])
with torch.no_grad():
    outputs = [blind(source, inputs) for source in (word, word[:, order])]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)
    outputs = [model(source, inputs) for source in (word, word[:, order])]
assert (outputs[0] - outputs[1]).abs().max() > 1e-3, "with positions the order matters"
# Without positions every order of the letters gives the same output. The sorted word is
# the same for every order, the reversed word is not: only sorting can be learned.

# %% [markdown]
# **3. Build.** In `torch.nn.Transformer`, True in a mask means *not* allowed. Write a function that makes
# its three padding masks and its causal mask from vitkit's masks, and compare the two models on
# padded sequences.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
def torch_masks(source_real: Tensor, target_real: Tensor) -> dict[str, Tensor]:
    length = target_real.shape[1]
    return {
        "tgt_mask": torch.ones(length, length, dtype=torch.bool).triu(1),
        "src_key_padding_mask": ~source_real,
        "memory_key_padding_mask": ~source_real,
        "tgt_key_padding_mask": ~target_real,
    }


source, target = torch.randn(2, 5, 512), torch.randn(2, 4, 512)
source_real = torch.arange(5) < torch.tensor([[5], [3]])
target_real = torch.arange(4) < torch.tensor([[4], [2]])
mine = ours(source, target, source_mask=source_real, target_mask=target_real)
torch_s = theirs(source, target, **torch_masks(source_real, target_real))
assert (mine - torch_s)[target_real].abs().max() <= 1e-5

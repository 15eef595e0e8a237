# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 10. The original Transformer
#
# The ViT is one half of an older model. The Transformer of "Attention Is All You Need"
# ([arXiv 1706.03762](https://arxiv.org/abs/1706.03762)) turns one sequence into another: an encoder
# reads the source, a decoder writes the target, one token after the other. Its blocks norm after
# adding. An encoder block is
#
# $$ z' = \operatorname{LN}(z + \operatorname{MSA}(z)), \qquad
#    z = \operatorname{LN}(z' + \operatorname{MLP}(z')) $$
#
# and a decoder block has a third step between the two. It attends to the encoder's output $m$, the
# memory: queries come from the target, keys and values from the source.
#
# $$ z' = \operatorname{LN}(z + \operatorname{MSA}(z)), \qquad
#    z'' = \operatorname{LN}(z' + \operatorname{CA}(z', m)), \qquad
#    z = \operatorname{LN}(z'' + \operatorname{MLP}(z'')) $$
#
# `vitkit.Transformer` is both stacks; the second equation is `PostNormDecoderBlock.forward`.

# %%
import inspect
import math
from collections.abc import Callable

import torch
from drawing import grid_of
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
    in_order,
    with_end,
)

import vitkit
from vitkit.models.attention import Context
from vitkit.models.positions import sincos_1d
from vitkit.models.transformer import PostNormDecoderBlock

torch.manual_seed(0)
torch.set_num_threads(1)  # matrices as small as these gain nothing from more
plt.rcParams["figure.dpi"] = 80
print(inspect.getsource(PostNormDecoderBlock.forward))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# %% [markdown]
# ## Shapes and sizes
#
# By default it has the paper's base size: width 512, 8 heads, 6 blocks on each side, an MLP of 2048.
# It takes vectors or token ids. 64 sources of 32 vectors and 64 targets of 16 give 64 answers of 16.
# On the "meta" device there are shapes and no numbers, so this costs nothing.

# %%
with torch.device("meta"):
    made = vitkit.Transformer()(torch.rand(64, 32, 512), torch.rand(64, 16, 512))
    print("(64, 32, 512), (64, 16, 512) ->", tuple(made.shape))
    sizes = {
        "as torch.nn.Transformer": vitkit.Transformer(positions=False, output_projection=False),
        "output projection, no final norms": vitkit.Transformer(final_norm=False),
        "the same with 6 heads of 85": vitkit.Transformer(
            num_heads=6, head_width=85, final_norm=False
        ),
        "torch.nn.Transformer itself": nn.Transformer(512, 8, 6, 6, 2048, batch_first=True),
    }
for name, model in sizes.items():
    print(f"{name:<35}{count(model):>11,}")

# %% [markdown]
# Six heads of 85 are 510 numbers. That is no mistake here: the width of a head may be set apart from
# the width of the model, and the matrix after the heads leads back to 512.
#
# Torch's own class has no positions, no output projection, and a norm at the end of both stacks.
# Told so, `vitkit.Transformer` gives the same numbers. Only the names of the weights differ.

# %%
NAMES = {
    "blocks": "layers", "cross_attn.proj": "multihead_attn.out_proj",
    ".attn.proj": ".self_attn.out_proj", ".attn.qkv.": ".self_attn.in_proj_",
    "mlp.fc1": "linear1", "mlp.fc2": "linear2",
}  # fmt: skip


def torch_names(ours: vitkit.Transformer) -> dict[str, Tensor]:
    """Our weights under torch's names; torch keeps q, k and v in one matrix."""
    state = ours.state_dict()
    for name in [name for name in state if ".cross_attn.q." in name]:
        joined = torch.cat([state.pop(name), state.pop(name.replace(".q.", ".kv."))])
        state[name.replace("cross_attn.q.", "multihead_attn.in_proj_")] = joined
    for mine, torch_s in NAMES.items():
        state = {name.replace(mine, torch_s): value for name, value in state.items()}
    return state


ours = vitkit.Transformer(positions=False, output_projection=False).eval()
theirs = sizes["torch.nn.Transformer itself"].eval()
for parameter in ours.parameters():  # biases start at 0: with noise, a swapped one shows
    parameter.data += 0.02 * torch.randn_like(parameter)
theirs.load_state_dict(torch_names(ours), assign=True)
source, target = torch.randn(2, 32, 512), torch.randn(2, 16, 512)
with torch.inference_mode():
    unseen = torch.ones(16, 16, dtype=torch.bool).triu(1)  # torch's masks: True is NOT seen
    apart = (ours(source, target) - theirs(source, target, tgt_mask=unseen)).abs().max()
print(f"outputs differ by {apart:.0e}")
assert apart <= 1e-5

# %% [markdown]
# ## Masks
#
# A decoder is trained on whole targets at once: at each place it is to say what comes next. So no
# place may look at a later one. That is the causal mask, and `Transformer` always has it. Sequences
# of different lengths are filled up with padding, which nobody is to look at. Those masks are given:
# True at a real token. A padded token is looked at by itself alone; so each row of weights has
# something to sum over.
#
# The image is not of masks that we wrote. It is of the weights that a model used: everything that
# is not 0.

# %% mystnb={"figure": {"caption": "Who looks at whom: a row is the token that looks, a column the token looked at, yellow is seen. Left: the target, 6 tokens of which 6 are real, and the causal triangle. Middle: a target with 4 real tokens; columns 5 and 6 are seen by nobody but themselves. Right: the 6 target tokens look at a source of 8, of which 5 are real."}}
model = vitkit.Transformer(32, 4, encoder_depth=1, decoder_depth=1, mlp_width=64).eval()
real = {"target": torch.arange(6) < torch.tensor([[6], [4]]), "source": torch.arange(8) < 5}
record = vitkit.Record(attention=[0], cross_attention=[0])
model(
    torch.randn(2, 8, 32), torch.randn(2, 6, 32), target_record=record,
    source_mask=real["source"].expand(2, -1), target_mask=real["target"],
)  # fmt: skip
maps = [*record.attention[0][:, 0], record.cross_attention[0][0, 0]]
seen = [weights > 0 for weights in maps]
assert torch.equal(seen[0], torch.ones(6, 6, dtype=torch.bool).tril())
assert torch.equal(seen[1], seen[0] & (real["target"][1] | torch.eye(6).bool()))
_ = grid_of(seen, ["causal", "causal and padding", "source's padding"], across=3, size=2)

# %% [markdown]
# ## Positions
#
# Attention sees a set, so places are told by sines and cosines (Sec. 3.5; the table is drawn in
# [chapter 1](01_patches.py)). Embedded ids are multiplied by $\sqrt D$ first (Sec. 3.4).
#
# $$ P[n, 2i] = \sin\!\big(n\, 10000^{-2i/D}\big),\qquad P[n, 2i+1] = \cos\!\big(n\, 10000^{-2i/D}\big) $$
#
# `sincos_1d` is this table at any length, and is brought to where the tokens are. The lab notebook's
# stays on the CPU, and its exponent is always 0, by a division of whole numbers: [chapter
# 12](12_lab_bugs.py#an-exponent-that-is-always-0) shows what that does.
#
# ## Two things to learn
#
# A source is a word of 3 to 6 letters. One model is to write it backwards, another to write its
# letters in order. The target ends with a mark of its own, as the decoder must know when to stop.
# Words whose letters' numbers add up to a multiple of 5 are held out: no model is trained on them.
# Letters are the ids 0 to 11, then come padding, start and end (`words.py`, beside this chapter).

# %%
examples = draw(30, torch.Generator().manual_seed(1))[:4]
for name, task in (("backwards", backwards), ("in order", in_order)):
    print(
        f"{name:<10}", ", ".join(f"{as_text(s)} -> {as_text(task(s[None])[0])}" for s in examples)
    )
print("source", examples[0].tolist(), "target", with_end(backwards(examples))[0].tolist())

# %% [markdown]
# The decoder is given the target moved on by one place, with a start mark in front: at each place it
# has what stands before, and says what follows. The loss is the cross-entropy of that, without the
# padding. Both models have one block on each side and one head, and the same few hundred steps of
# Adam with a warm-up, as the paper's have.

# %%
STEPS, WARM_UP, PEAK = 400, 40, 1e-2
Task = Callable[[Tensor], Tensor]
Forward = Callable[[vitkit.Transformer, Tensor, Tensor], Tensor]


def small(seed: int = 0, **settings: bool) -> vitkit.Transformer:
    torch.manual_seed(seed)
    ids = len(LETTERS) + 3
    return vitkit.Transformer(
        width=32, num_heads=1, encoder_depth=1, decoder_depth=1, mlp_width=64, dropout=0.0,
        source_vocabulary=ids, target_vocabulary=ids, **settings,
    )  # fmt: skip


def masked(model: vitkit.Transformer, source: Tensor, before: Tensor) -> Tensor:
    return model(source, before, source_mask=source != PADDING)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def moved_on(target: Tensor) -> Tensor:
    return F.pad(target[:, :-1], (1, 0), value=START)


def learn(model: vitkit.Transformer, task: Task, forward: Forward = masked) -> list[float]:
    """The loss of each step."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=PEAK, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / STEPS)
    )
    losses = []
    for _ in range(STEPS):
        source = draw(96, generator)
        target = with_end(task(source))
        loss = loss_of(forward(model, source, moved_on(target)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def right(written: Tensor, target: Tensor) -> float:
    """The share of words without a mistake, from the first letter to the end."""
    written = F.pad(written, (0, target.shape[1] - written.shape[1]), value=END)
    return ((written == target) | (target == PADDING)).all(dim=1).float().mean().item()


held_out = draw(2500, torch.Generator().manual_seed(3), held_out=True)
models, losses = {}, {}
for name, task in (("backwards", backwards), ("in order", in_order)):
    models[name] = small()
    losses[name] = learn(models[name], task)
    written = models[name].generate(held_out, START, END, source_mask=held_out != PADDING)
    score = right(written, with_end(task(held_out)))
    print(f"{name:<10} {score:.1%} of {len(held_out)} held-out words right")
    assert score > 0.95
print(f"{count(models['backwards']):,} parameters each")

# %% mystnb={"figure": {"caption": "The loss of each next letter while the two models learn, in nats. Guessing letters evenly would be at the dashed line. Both end at about a hundredth of it or below; putting in order takes longer, as a letter has to be compared with all others."}}
figure, place = plt.subplots(figsize=(5, 2.8))
for name, values in losses.items():
    place.plot(values, label=name, linewidth=1)
place.axhline(math.log(len(LETTERS)), color="0.6", linestyle="--", linewidth=0.8)
place.set(xlabel="step", ylabel="loss", yscale="log")
_ = place.legend()

# %% [markdown]
# ## What the decoder looks at
#
# A `Record` for the target keeps the maps of cross-attention. To see them as they are when the model
# writes, it is given what it wrote.

# %% mystnb={"figure": {"caption": "Cross-attention of the one head, for one held-out word. A row is what is about to be written, a column a letter of the source. Backwards (left) the weights go from the last letter to the first. In order (right) they follow the alphabet, wherever the letter stands."}}
word = "hgakbd"
ids = torch.tensor([[LETTERS.index(letter) for letter in word]])
figure, places = plt.subplots(1, 2, figsize=(6.4, 3.2))
for place, (name, model) in zip(places, models.items(), strict=True):
    written = model.generate(ids, START, END)
    record = vitkit.Record(cross_attention=[0])
    model(ids, moved_on(written), target_record=record)
    place.imshow(record.cross_attention[0][0, 0].detach(), vmin=0, vmax=1)
    place.set(title=name, xticks=range(len(word)), yticks=range(written.shape[1]))
    place.set_xticklabels(word)
    place.set_yticklabels([*as_text(written[0]), "end"][: written.shape[1]])
    print(f"{name:<10} {word} -> {as_text(written[0])}")
places[0].set(ylabel="written", xlabel="source")
_ = places[1].set(xlabel="source")

# %% [markdown]
# ## Greedy decoding
#
# After training nobody knows the target. The decoder starts with the start mark alone, writes the
# most probable token, reads it again with the rest, and goes on until it writes the end. The source
# is read once. `generate` does this for a batch. By hand:

# %%
model = models["backwards"].eval()
with torch.no_grad():
    memory = model.encode(ids)
    so_far = torch.tensor([[START]])
    while so_far[0, -1] != END and so_far.shape[1] < 20:
        logits = model.decode(so_far, memory)[:, -1]
        so_far = torch.cat([so_far, logits.argmax(-1, keepdim=True)], dim=1)
        sure = logits.softmax(-1).amax()
        print(f"{as_text(so_far[0]):<8} probability {sure:.3f}")
print("generate gives the same:", torch.equal(so_far[:, 1:], model.generate(ids, START, END)))

# %% [markdown]
# ## What goes wrong without a causal mask
#
# The lab notebook has no masks. A model that learns without has a splendid loss, and that is the
# trouble: the answer at each place stands in the input, one place to the right. Here is the decoder by hand. With the mask it is
# the library's; without it the same model learns the same task.


# %%
def decoder(model: vitkit.Transformer, source: Tensor, before: Tensor, own: Context) -> Tensor:
    looks = source != PADDING
    memory, across = model.encode(source, looks), Context(mask=looks[:, None, None])
    z = model.embed["target"](before) * math.sqrt(model.width)
    z = z + sincos_1d(z.shape[1], model.width)
    for block in model.decoder.blocks:
        z = block(z, memory, own, across)
    return model.head(model.decoder.norm(z))


def unmasked(model: vitkit.Transformer, source: Tensor, before: Tensor) -> Tensor:
    return decoder(model, source, before, Context())


before = moved_on(with_end(backwards(held_out)))
with torch.no_grad():
    causal = Context(mask=torch.ones(LONGEST + 1, LONGEST + 1, dtype=torch.bool).tril())
    by_hand = decoder(model, held_out, before, causal)
    apart = (by_hand - masked(model, held_out, before)).abs().max()
print(f"by hand, with the mask: differs by {apart:.0e}")


# %%
def written_by(model: vitkit.Transformer, forward: Forward) -> Tensor:
    """Greedy decoding of the held-out words with any forward pass."""
    so_far = torch.full((len(held_out), 1), START)
    with torch.no_grad():
        for _ in range(LONGEST + 1):
            following = forward(model, held_out, so_far)[:, -1].argmax(-1, keepdim=True)
            so_far = torch.cat([so_far, following], dim=1)
    return so_far[:, 1:]


careless = small()
losses["no causal mask"] = learn(careless, backwards, unmasked)
target = with_end(backwards(held_out))
for name, model, forward in (("causal", models["backwards"], masked), ("none", careless, unmasked)):
    with torch.no_grad():
        loss = loss_of(forward(model, held_out, before), target)
    score = right(written_by(model, forward), target)
    print(
        f"mask {name:<7} loss {loss:.4f}, {score:.1%} of the held-out words written without a mistake"
    )
assert loss < 0.01
assert score < 0.1

# %% mystnb={"figure": {"caption": "The same model learning to write backwards with and without the causal mask. Without it the loss falls sooner, as copying the next letter is easier than finding it in the source. A loss does not show this mistake; writing does."}}
figure, place = plt.subplots(figsize=(5, 2.8))
for name, run in (("causal mask", "backwards"), ("no causal mask", "no causal mask")):
    place.plot(losses[run], label=name, linewidth=1)
place.set(xlabel="step", ylabel="loss", yscale="log")
_ = place.legend()
for source in held_out[:3]:
    wrong = written_by(careless, unmasked)[(held_out == source).all(1)][0]
    print(f"without the mask: {as_text(source)} -> {as_text(wrong) or 'no letter at all'}")

# %% [markdown]
# The notebook's other slips in the Transformer are in [chapter
# 12](12_lab_bugs.py#the-original-transformer): `src +=` on the caller's tensor, a softmax at the
# decoder's end, an activation that is ignored, queries and keys of different widths.
#
# ## Exercises
#
# **1.** Padding must change nothing. Show that a word of four letters, filled up to six, gets the
# same logits as the word alone, and that without the mask it does not.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
model = models["in order"].eval()
alone = torch.tensor([[7, 1, 4, 2]])
filled = F.pad(alone, (0, 2), value=PADDING)
before = torch.tensor([[START, 1, 2, 4]])
with torch.no_grad():
    expected = model(alone, before)
    torch.testing.assert_close(masked(model, filled, before), expected, rtol=0, atol=1e-4)
    assert (model(filled, before) - expected).abs().max() > 0.1

# %% [markdown]
# **2.** Without positions the encoder sees a set of letters. Which of the two tasks is then out of
# reach, whatever the training? Show it without training.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}
blind, order = small(positions=False).eval(), torch.tensor([2, 0, 3, 1])
with torch.no_grad():
    answers = [blind(word, before) for word in (alone, alone[:, order])]
    torch.testing.assert_close(*answers, rtol=0, atol=1e-4)
    knowing = [model(word, before) for word in (alone, alone[:, order])]
assert (knowing[0] - knowing[1]).abs().max() > 1e-3, "with positions the order is seen"
# One answer for all orders of the letters: in order is the same word for all of them, backwards not.

# %% [markdown]
# **3.** `torch.nn.Transformer` marks with True what is *not* seen. Write a function that makes its
# three padding masks and its causal mask from ours, and compare the two models with padding.


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

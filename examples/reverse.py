"""Train an encoder-decoder Transformer to write words backwards, and measure its accuracy.

A source is a word of 3 to 8 random letters, the target is the same word backwards. The 1,000
held-out words are never used for training. The script needs no network and no GPU; it takes about
20 seconds on one CPU core.
"""

from __future__ import annotations

import time
from string import ascii_lowercase as LETTERS

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkit import Transformer

PADDING, START, END = (len(LETTERS) + special for special in range(3))
SHORTEST, LONGEST = 3, 8
HELD_OUT, STEPS, BATCH, PEAK_LR, WARMUP = 1000, 800, 64, 4e-3, 60


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw sources (B, 8), letters and padding, and targets (B, 9), with an end token."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    letters = torch.randint(len(LETTERS), (count, LONGEST), generator=generator)
    positions = torch.arange(LONGEST)
    backwards = letters.gather(1, (lengths - 1 - positions).clamp(min=0))
    source = letters.masked_fill(positions >= lengths, PADDING)
    target = F.pad(backwards.masked_fill(positions >= lengths, PADDING), (0, 1), value=PADDING)
    return source, target.scatter(1, lengths, END)


def correct(model: Transformer, source: Tensor, target: Tensor) -> int:
    """Count the words that are written without a mistake, from the first letter to the end."""
    real = source != PADDING
    written = model.generate(source, START, END, max_length=LONGEST + 1, source_mask=real)
    written = F.pad(written, (0, target.shape[1] - written.shape[1]), value=END)
    return int(((written == target) | (target == PADDING)).all(dim=1).sum())


def train(model: Transformer, held_out: tuple[Tensor, Tensor], generator: torch.Generator) -> None:
    """Train with Adam, linear warm-up and decay; the loss is that of each next letter."""
    held_out_words = {tuple(word) for word in held_out[0].tolist()}
    optimizer = torch.optim.Adam(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1 - step / STEPS)
    )
    for step in range(1, STEPS + 1):
        source, target = draw(BATCH, generator)
        allowed = torch.tensor([tuple(word) not in held_out_words for word in source.tolist()])
        source, target = source[allowed], target[allowed]
        inputs = F.pad(target[:, :-1], (1, 0), value=START)  # the target one position later
        logits = model(source, inputs, source_mask=source != PADDING)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            count = correct(model, held_out[0][:200], held_out[1][:200])
            print(
                f"step {step}/{STEPS}  loss {loss.item():.4f}  {count} of 200 correct", flush=True
            )


def main() -> None:
    started = time.perf_counter()
    torch.set_num_threads(1)  # more threads do not speed up matrices as small as these
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    ids = len(LETTERS) + 3
    model = Transformer(
        width=64, num_heads=4, encoder_depth=1, decoder_depth=1, mlp_width=128, dropout=0.0,
        source_vocabulary=ids, target_vocabulary=ids,
    )  # fmt: skip
    held_out = draw(HELD_OUT, generator)
    train(model, held_out, generator)

    word = "backward"
    written = model.generate(torch.tensor([[LETTERS.index(letter) for letter in word]]), START, END)
    backwards = "".join(LETTERS[letter] for letter in written[0].tolist() if letter < len(LETTERS))
    count, seconds = correct(model, *held_out), time.perf_counter() - started
    print(f"{word} -> {backwards}")
    print(f"held out  {count} of {HELD_OUT} words correct ({100 * count / HELD_OUT:.1f} %)")
    print(f"time      {seconds:.0f} seconds on one core")


if __name__ == "__main__":
    main()

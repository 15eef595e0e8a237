"""Measure chapter 0: three seeds on the test split, and the scale of the first positions."""

from __future__ import annotations

import torch
from experiment import Experiment, Numbers, Options
from plain_vit import PlainViT
from shifted_digits import images, shifted
from torch import Tensor, nn

from vitkit.data.datasets.splitting import stratified_split

EPOCHS, BATCH, RATE, POSITIONS = 40, 128, 3e-3, 0.5
SCALES = (0.02, 0.5)
"""Standard deviations of the first positions; the paper's code has the first one."""
Pair = tuple[Tensor, Tensor]


def trained(data: Pair, *, seed: int, scale: float, epochs: int) -> PlainViT:
    """Train the model of chapter 0 as the chapter does."""
    torch.manual_seed(seed)
    model = PlainViT(
        image_size=8, patch_size=2, channels=1, classes=10, width=64, depth=3, heads=8, hidden=128
    )  # fmt: skip
    nn.init.normal_(model.pos_embed, std=scale)
    generator = torch.Generator().manual_seed(seed)
    images, labels = data
    steps = epochs * -(-len(images) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, steps, pct_start=0.125, cycle_momentum=False
    )
    for _epoch in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator).split(BATCH):
            logits = model(shifted(images[chosen], generator))
            loss = nn.functional.cross_entropy(logits, labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def accuracy(model: nn.Module, data: Pair) -> float:
    with torch.no_grad():
        return (model(data[0]).argmax(1) == data[1]).double().mean().item()


def spreads(model: PlainViT, images: Tensor) -> dict[str, float]:
    """Return the standard deviation of the positions, and of the patch tokens without them."""
    with torch.no_grad():
        tokens = model.patch_embed(images)
    return {"positions": model.pos_embed.std().item(), "patches": tokens.std().item()}


def one_page(options: Options) -> Numbers:
    """Train on all training images for the test split, and on three quarters of them for the
    fourth; seed n holds out quarter n."""
    epochs = 1 if options.quick else EPOCHS
    train, test = images("train"), images("test")
    quarters = [
        torch.from_numpy(part) for part in stratified_split(train[1].numpy(), (0.25,) * 4)
    ]  # fmt: skip
    on_test, positions = [], {}
    for scale in SCALES:
        scores = []
        for seed in options.seeds:
            held_out = quarters[seed % 4]
            rest = torch.cat([part for part in quarters if part is not held_out])
            data = train[0][rest], train[1][rest]
            model = trained(data, seed=seed, scale=scale, epochs=epochs)
            right = accuracy(model, (train[0][held_out], train[1][held_out]))
            scores.append({"seed": seed, "top1": right} | spreads(model, train[0]))
            print(f"one-page: positions {scale:g}, {scores[-1]}", flush=True)
        positions[f"{scale:g}"] = scores
    for seed in options.seeds:
        model = trained(train, seed=seed, scale=POSITIONS, epochs=epochs)
        on_test.append({"seed": seed, "test": accuracy(model, test)})
        print(f"one-page: {on_test[-1]}", flush=True)
    return {"epochs": epochs, "seeds_on_test": on_test, "positions": positions}


EXPERIMENTS = {
    "one-page": Experiment(
        one_page, "chapter 0 with three seeds, and its first positions"
    )
}

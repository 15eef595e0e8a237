"""Sanity checks of heat maps, beside what `vitkit explain --faithfulness` measures.

    python examples/research/sanity_checks_of_maps.py [CHECKPOINT IMAGES [METHOD]]

Does a map change with the weights of the model, does it know the class, is it stable, do larger
values have more effect, can the model do without patches, and is deletion the same where patches
turn grey or blurred? Without arguments LibraGrad is checked on a model whose answers are known.
"""

import copy
import io
import sys
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import vitkit
from vitkit.evaluation.intervals import wilson_interval
from vitkit.explaining.faithfulness import (
    image_keys,
    insertion_areas,
    map_orders,
    measure_faithfulness,
    normalised_areas,
    reference_areas,
)
from vitkit.explaining.methods import METHODS, Method
from vitkit.explaining.methods.occlusion import TokenSubsets
from vitkit.models.attention import Context
from vitkit.models.interface.backbone import Embedded
from vitkit.randomness import hash64, permutation

Maps = Callable[[vitkit.ViT, Tensor, Tensor], Tensor]  # model, images, classes -> (B, gh, gw)
CELLS = 4  # images of a mosaic, 2 x 2
COVERED = 50  # images of which patches are covered: they cost as much as whole ones


def maps_of(method: Method, **options: object) -> Maps:
    """Return a function that computes the maps of a method on the CPU, 32 images at a time."""

    def maps(model: vitkit.ViT, images: Tensor, classes: Tensor) -> Tensor:
        grids = []
        for some, numbers in zip(images.split(32), classes.split(32), strict=True):
            own = {"classes": numbers.to(images.device)} if method.by_class else {}
            grids.append(method.compute(model, some, **own, **options).detach().cpu())
        return torch.cat(grids)

    return maps


# Do the weights matter? One step of "Sanity Checks for Saliency Maps" (arXiv 1810.03292)


def weights_matter(maps: Maps, model: vitkit.ViT, images: Tensor, classes: Tensor) -> float:
    """Return the mean rank correlation with maps of a model whose upper half is random.

    Below 0.5 is good. NaN where all maps are constant.
    """
    before = maps(model, images, classes)
    return rank_correlation(before, maps(with_random_top(model), images, classes))


@torch.no_grad()
def with_random_top(model: vitkit.ViT, blocks: int | None = None, seed: int = 0) -> vitkit.ViT:
    """Return a copy in which the last blocks (half of them), norms and head have shuffled weights.

    The values of each tensor stay, so that activations neither vanish nor explode.
    """
    random = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    first = len(model.blocks) - ((len(model.blocks) + 1) // 2 if blocks is None else blocks)
    parts = [*random.blocks[first:], random.norm, random.attn_pool, random.fc_norm]
    for part in [*parts, random.pre_logits, random.head, random.head_dist]:
        for parameter in part.parameters():
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return random


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Return the mean of Spearman's correlation over pairs of maps that are not constant."""
    found = []
    for a, b in zip(first.flatten(1).numpy(), second.flatten(1).numpy(), strict=True):
        if np.ptp(a) > 0 and np.ptp(b) > 0:
            found.append(np.corrcoef(average_ranks(a), average_ranks(b))[0, 1])
    return float(np.mean(found)) if found else float("nan")


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


# Does the class matter? The Focus score (arXiv 2109.15035), in mosaics of images of four classes


class MosaicViT(vitkit.ViT):
    """A model, with its weights, that sees an image (2 H, 2 W) as four of (H, W) side by side.

    Positions resampled to the larger grid would be new to the model.
    """

    def __init__(self, model: vitkit.ViT) -> None:
        self.__dict__.update(model.__dict__)  # ViT's constructor would make another model

    def embed(self, images: Tensor) -> Embedded:
        """Return the tokens of the four cells as one image of (2 gh, 2 gw) patches."""
        rows = torch.stack(images.chunk(2, dim=2))  # 2 B C H 2W
        cells = torch.stack(rows.chunk(2, dim=4), dim=1)  # 2 2 B C H W
        tokens, context, (height, width) = super().embed(cells.flatten(0, 2))
        prefix = self.spec.num_prefix_tokens
        patches = tokens[:, prefix:].unflatten(1, (height, width))
        patches = patches.unflatten(0, (2, 2, len(images))).permute(2, 0, 3, 1, 4, 5)
        # prefix tokens are the same in all cells
        tokens = torch.cat([tokens[: len(images), :prefix], patches.flatten(1, 4)], dim=1)
        if context.rotation is not None:
            tiled = []
            for angles in context.rotation:
                own = angles[prefix:].unflatten(0, (height, width)).repeat(2, 2, 1).flatten(0, 1)
                tiled.append(torch.cat([angles[:prefix], own]))
            context = Context((tiled[0], tiled[1]))
        return Embedded(tokens, context, (2 * height, 2 * width))


def class_matters(
    maps: Maps, model: vitkit.ViT, images: Tensor, labels: Tensor, count: int = 100, seed: int = 0
) -> dict[str, object] | None:
    """Count in how many mosaics the map of a class has its largest sum in the class's own cell.

    `images` should be those that the model classifies correctly. `positive` counts positive values
    alone, `model` where the model's own probability falls furthest without the cell. Chance is
    25 %. Returns None for fewer than four classes.
    """
    names, generator = labels.unique().numpy(), np.random.default_rng(seed)
    if len(names) < CELLS:
        return None
    members = {name: np.flatnonzero(labels.numpy() == name) for name in names}
    chosen = np.array([
        [generator.choice(members[name]) for name in generator.choice(names, CELLS, replace=False)]
        for _ in range(count)
    ])  # fmt: skip
    cells = torch.from_numpy(generator.integers(0, CELLS, count))
    hits = {"pointing": [], "positive": [], "model": []}
    for part in torch.arange(count).split(8):
        numbers, own = chosen[part], cells[part]
        rows = [torch.cat([images[numbers[:, i]], images[numbers[:, i + 1]]], 3) for i in (0, 2)]
        sheets, mosaic = torch.cat(rows, dim=2), MosaicViT(model)
        classes = labels[numbers[np.arange(len(part)), own]]
        grids = maps(mosaic, sheets, classes)
        sums, masses = cell_sums(grids), cell_sums(grids.clamp(min=0))
        points = masses.sum(1) > 0  # a map without positive values points nowhere
        hits["pointing"].append((sums.argmax(1) == own) & points)
        hits["positive"].append((masses.argmax(1) == own) & points)
        hits["model"].append(probability_without_cells(mosaic, sheets, classes).argmin(1) == own)
    shares = {name: float(torch.cat(hit).double().mean()) for name, hit in hits.items()}
    interval = wilson_interval(int(torch.cat(hits["pointing"]).sum()), count)
    return {"mosaics": count, "interval": interval, **shares}


def cell_sums(grids: Tensor) -> Tensor:
    """Return the sums of the values in the four cells, (M, 4)."""
    return grids.double().unflatten(1, (2, -1)).unflatten(3, (2, -1)).sum((2, 4)).flatten(1)


@torch.inference_mode()
def probability_without_cells(model: vitkit.ViT, sheets: Tensor, classes: Tensor) -> Tensor:
    """Return the class's log-probability without each of the four cells, (M, 4)."""
    subsets = TokenSubsets(model, sheets)
    height, width = subsets.grid
    down = torch.arange(height).unsqueeze(1) * 2 // height
    cell = (down * 2 + torch.arange(width) * 2 // width).flatten()  # 0 to 3 of each patch
    found = []
    for number in range(CELLS):
        kept = torch.nonzero(cell != number).squeeze(1).expand(len(sheets), -1)
        found.append(log_probability(subsets, kept, classes))
    return torch.stack(found, dim=1)


def log_probability(subsets: TokenSubsets, kept: Tensor, classes: Tensor) -> Tensor:
    """Return the log-probability (B,) of each image's class by the patches (B, n) that stay."""
    logits = subsets.logits(kept).cpu().double()
    return logits.log_softmax(1).gather(1, classes.cpu()[:, None])[:, 0]


# Do larger values have more effect? SaCo (arXiv 2404.01415, Alg. 1), with patches dropped


@torch.inference_mode()
def saco(model: vitkit.ViT, images: Tensor, grids: Tensor, classes: Tensor) -> np.ndarray:
    """Return the coefficient of each image, in [-1, 1]; NaN for constant maps and effects.

    Patches are cut into ten groups by their values. Each pair of groups counts with the difference
    of its mean values, positively if the group with more of them has at least as much effect.
    """
    subsets = TokenSubsets(model, images)
    orders = map_orders(grids, image_keys(images), 0)
    values, salience, rest = grids.flatten(1).double().gather(1, orders), [], []
    every = np.arange(subsets.count)
    groups = np.array_split(every, min(10, len(every)))
    for group in groups:
        salience.append(values[:, group].mean(dim=1))
        kept = np.setdiff1d(every, group) if len(groups) > 1 else group
        rest.append(log_probability(subsets, orders[:, kept].sort(1).values, classes).exp())
    mean, left = torch.stack(salience, dim=1).numpy(), torch.stack(rest, dim=1).numpy()
    weights = np.triu(mean[:, :, None] - mean[:, None, :], k=1)
    agree = np.where(left[:, :, None] <= left[:, None, :], 1.0, -1.0)
    total = weights.sum(axis=(1, 2))
    total[(total <= 0) | (np.ptp(left, axis=1) == 0)] = np.nan
    return (weights * agree).sum(axis=(1, 2)) / total


# Is the map stable? Does the test fit the model?


def stability(
    maps: Maps, model: vitkit.ViT, images: Tensor, classes: Tensor, preprocess: vitkit.Preprocess
) -> dict[str, float]:
    """Return rank correlations with maps of images shifted by a pixel, and after JPEG 90."""
    before = maps(model, images, classes)
    shifted = F.pad(images[..., :-1], (1, 0, 0, 0), mode="replicate")
    mean, std = (torch.tensor(part).view(1, -1, 1, 1) for part in (preprocess.mean, preprocess.std))
    pixels = ((images.cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    opened = []
    for image in pixels.permute(0, 2, 3, 1).numpy():
        file = io.BytesIO()
        Image.fromarray(image.squeeze()).save(file, format="JPEG", quality=90)
        opened.append(np.array(Image.open(file)).reshape(image.shape))
    back = torch.from_numpy(np.stack(opened)).permute(0, 3, 1, 2)
    jpeg = ((back / 255 - mean) / std).to(images)
    changed = {"shift": shifted, "jpeg": jpeg}
    return {
        name: rank_correlation(before, maps(model, some, classes)) for name, some in changed.items()
    }


@torch.inference_mode()
def model_fit(model: vitkit.ViT, images: Tensor, labels: Tensor) -> list[float]:
    """Return the accuracy with 0, 25 and 50 % of the patches dropped at random.

    Where it falls by half with 25 %, deletion measures how the model fails on few tokens; training
    with `--spec.patch-dropout 0.25` mends it.
    """
    subsets, keys = TokenSubsets(model, images), image_keys(images)
    orders = np.stack([permutation(int(hash64(0, key)), -1, subsets.count) for key in keys])
    found = []
    for share in (0.0, 0.25, 0.5):
        kept = orders[:, : max(1, round(subsets.count * (1 - share)))]
        logits = subsets.logits(torch.from_numpy(kept).sort(1).values).cpu()
        found.append(float((logits.argmax(1) == labels).double().mean()))
    return found


# Is deletion the same where patches are covered instead of dropped?


class CoveredPatches(TokenSubsets):
    """Images whose other patches turn grey, the dataset's mean colour, or blurred."""

    def __init__(self, model: vitkit.ViT, images: Tensor, cover: str) -> None:
        super().__init__(model, images)
        self.images, size = images, images.shape[2:]
        means = F.adaptive_avg_pool2d(images, self.grid)
        blurred = F.interpolate(means, size, mode="bilinear", align_corners=False)
        self.covers = torch.zeros_like(images) if cover == "grey" else blurred

    def logits(self, patches: Tensor, image: Tensor | None = None) -> Tensor:
        """Return logits (R, K) of R images with n uncovered patches each."""
        image = torch.arange(len(patches)) if image is None else image
        cells = torch.zeros(len(patches), self.count).scatter_(1, patches, 1.0)
        cells = cells.view(-1, 1, *self.grid).to(self.images.device)
        stays = F.interpolate(cells, self.images.shape[2:], mode="nearest") > 0
        return self.model(torch.where(stays, self.images[image], self.covers[image]))


@torch.inference_mode()
def covered_references(model: vitkit.ViT, images: Tensor, classes: Tensor) -> dict[str, np.ndarray]:
    """Measure random orders and occlusion by covered patches once, for several methods."""
    images, classes = images[:COVERED], classes[:COVERED]
    return {
        cover: reference_areas(CoveredPatches(model, images, cover), classes, image_keys(images), 0)
        for cover in ("grey", "blur")
    }


@torch.inference_mode()
def covered_deletion(
    model: vitkit.ViT,
    images: Tensor,
    grids: Tensor,
    classes: Tensor,
    references: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return the normalised deletion of the first 50 images by grey and by blurred patches."""
    images, classes, found = images[:COVERED], classes[:COVERED], {}
    orders = map_orders(grids[:COVERED], image_keys(images), 0).flip(1).unsqueeze(1)
    for cover, reference in references.items():
        areas = insertion_areas(CoveredPatches(model, images, cover), classes, orders)[:, 0]
        found[cover] = normalised_areas(areas, reference, deletion=True)
    return found


def kendall_tau(first: np.ndarray, second: np.ndarray) -> float:
    """Return Kendall's tau-b of the pairs of which both values are numbers."""
    pairs = np.stack([first, second], axis=1).astype(float)
    pairs = pairs[~np.isnan(pairs).any(axis=1)]
    signs = np.sign(pairs[:, None] - pairs[None, :])
    norm = np.sqrt((signs[..., 0] ** 2).sum() * (signs[..., 1] ** 2).sum())
    return float((signs[..., 0] * signs[..., 1]).sum() / norm) if norm else float("nan")


def planted_model() -> tuple[vitkit.ViT, Tensor, Tensor]:
    """Return a model that reads the mean colour, where class k is channel k, images and labels."""
    spec = vitkit.ViTSpec(
        image_size=16, patch_size=8, width=4, depth=1, num_heads=1, mlp_width=4, num_classes=4,
        class_token=False, pooling="mean", final_norm=False, positions="none",
    )  # fmt: skip
    model, labels = vitkit.ViT(spec).eval(), torch.arange(40) % 4
    images = 0.1 * torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images[labels < 3, labels[labels < 3]] += 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.patch_embed.proj.weight[:3] = torch.eye(3).view(3, 3, 1, 1) / 64
        model.head.weight[:3, :3] = 10 * torch.eye(3)
        model.head.weight[3, :3] = -2.0
        model.head.bias[3] = 4.0
    return model, images, labels


def main(checkpoint: str = "", images: str = "", method: str = "libragrad") -> None:
    """Run all checks, and print a line for each."""
    preprocess = vitkit.Preprocess(image_size=16, mean=(0.5,) * 3, std=(0.5,) * 3)
    if checkpoint:
        loaded = vitkit.load(checkpoint)
        model, preprocess = loaded.model.eval(), loaded.preprocess
        inputs = torch.stack([preprocess(found.read()) for found in vitkit.find_images(images)])
    else:
        model, inputs, _ = planted_model()
    with torch.inference_mode():
        classes = torch.cat([model(some) for some in inputs.split(32)]).argmax(1)
    maps = maps_of(METHODS[method])
    grids = maps(model, inputs, classes)
    scores = measure_faithfulness(model, inputs, grids, classes)
    dropped = np.array([score.deletion for score in scores], float)
    print(f"deletion {np.nanmedian(dropped):.2f} in the median of {len(inputs)} images")
    correlation = weights_matter(maps, model, inputs, classes)
    print(f"weights: correlation {correlation:.2f} with maps of a random upper half")
    print(f"class, in mosaics: {class_matters(maps, model, inputs, classes)}")
    print(f"SaCo {np.nanmedian(saco(model, inputs, grids, classes)):.2f}")
    print(f"stability: {stability(maps, model, inputs, classes, preprocess)}")
    print(f"same class without 0, 25, 50 % of the patches: {model_fit(model, inputs, classes)}")
    references = covered_references(model, inputs, classes)
    covered = covered_deletion(model, inputs, grids, classes, references)
    for cover, values in covered.items():
        tau = kendall_tau(dropped[:COVERED], values)
        print(f"deletion by {cover} patches {np.nanmedian(values):.2f}, tau {tau:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

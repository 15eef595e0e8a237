"""Features of a frozen model, computed once, and what they are worth: neighbours and a linear head.

Each function stands for itself: features in, scores or a head out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import safetensors.torch
import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.data.datasets.pixel_cache import DECODER
from vitkit.data.sources.open import Dataset
from vitkit.errors import DataError, OutputError
from vitkit.evaluation.evaluate import outputs
from vitkit.io.atomic import replacing
from vitkit.io.cache_folder import cache_folder
from vitkit.io.digests import fingerprint
from vitkit.models.initialisation import HEADS
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess
from vitkit.weights.formats.vitkit import safetensors_writer

NEIGHBOURS, TEMPERATURE = 20, 0.07
"""DINO's (arXiv 2104.14294, Sec. 3.2 and its eval_knn.py)."""
STRENGTHS = tuple(10.0**power for power in range(1, -7, -1))
"""Of the L2 penalty, from strong to weak."""
ITERATIONS = 300
"""Of L-BFGS for one strength; it goes on from the strength before."""
SIMILARITIES = 2**26
"""How many are computed at once where neighbours are looked for: 256 MB of them."""
SMALLEST = 1e-6
"""A feature that varies less than this tells nothing, and is not stretched."""


def features(
    model: ViT,
    dataset: Dataset,
    split: str,
    preprocess: Preprocess,
    *,
    device: torch.device | None = None,
    batch_size: int = 256,
    workers: int = 0,
    cache: Path | None = None,
    say: Callable[[str], object] | None = None,
) -> tuple[Float[Tensor, "N E"], Int64[Tensor, "N"]]:
    """What the head of a model would read of every image of a split, kept for the next time.

    Args:
        model: in eval mode on `device`; its head is not looked at.
        dataset: the images.
        split: which of them.
        preprocess: what they become.
        device: where the model is.
        batch_size: images run at once.
        workers: loader processes.
        cache: folder of kept features; default `features` in the user's cache folder. They belong
            to the weights, the data's content, the images in the split and their preprocessing.
        say: told whether they were found or computed.

    Returns:
        Features (N, E) float32 on the CPU in the split's order, and class numbers (N,).

    Raises:
        DataError: an empty split.
    """
    raw_images, say = dataset.splits[split], say or (lambda line: None)
    key = _key(model, dataset, split, preprocess)
    place = (cache or cache_folder() / "features") / f"{key}.safetensors"
    labels = torch.from_numpy(np.ascontiguousarray(raw_images.labels))
    found = _kept(place)
    if found is not None and len(found) == len(labels):
        say(f"features of {split}: {len(found):,} x {found.shape[1]}, from {place}")
        return found, labels
    made = outputs(lambda images: model.pooled(model.forward_features(images)), raw_images,
                   preprocess, batch_size=batch_size, device=device, workers=workers)  # fmt: skip
    found = torch.cat([pooled.cpu() for pooled, _ in made]).clone()
    content = safetensors_writer({"features": found}, {})
    try:
        with replacing(place, needed=content.size) as temporary:
            content.write(temporary)
    except OutputError as error:
        say(f"the features of {split} are not kept: {error}")
    say(f"features of {split}: {len(found):,} x {found.shape[1]}, computed")
    return found, labels


def _kept(place: Path) -> Tensor | None:
    try:
        return safetensors.torch.load_file(place)["features"]
    except (OSError, SafetensorError, KeyError):
        return None


def _key(model: ViT, dataset: Dataset, split: str, preprocess: Preprocess) -> str:
    images = dataset.splits[split]
    weights, spec = model.state_dict(), model.spec.to_json() | {"num_classes": 0}
    said = [fingerprint(weights, without=HEADS), spec,
            dataset.fingerprint, preprocess.to_json(), DECODER, PIL.__version__]  # fmt: skip
    key = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for number in range(len(images)):
        key.update(f"{images.name(number)}\n".encode(errors="surrogateescape"))
    return key.hexdigest()[:32]


def knn(
    train: Float[Tensor, "N E"],
    labels: Int64[Tensor, "N"],
    queries: Float[Tensor, "M E"],
    num_classes: int,
    *,
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> Float[Tensor, "M K"]:
    """Weighted nearest neighbours: a probability of every class for each of M images.

    Of cosine similarities s, the k largest vote for their class with exp(s / temperature)
    (Z. Wu et al., arXiv 1805.01978, Sec. 3.4; as in DINO).

    Args:
        train: features of N images (N, E).
        labels: their class numbers (N,).
        queries: features of the M images (M, E).
        num_classes: K.
        neighbours: k; at most N.
        temperature: above 0; the smaller it is, the more the nearest count.
    """
    train = F.normalize(train, dim=1)
    votes = []
    for rows in queries.split(max(1, SIMILARITIES // len(train))):
        near, places = (F.normalize(rows, dim=1) @ train.T).topk(min(neighbours, len(train)))
        weights = ((near - near[:, :1]) / temperature).exp()
        classes = weights.new_zeros(len(rows), num_classes)
        votes.append(classes.scatter_add_(1, labels[places], weights))
    every = torch.cat(votes)
    return every / every.sum(1, keepdim=True)


@dataclass(frozen=True)
class LinearHead:
    """A linear classifier of features.

    Attributes:
        weight: (K, E).
        bias: (K,).
        strength: of the L2 penalty that was best on validation.
        top1: on validation, in [0, 1].
        loss: there, in nats.
    """

    weight: Float[Tensor, "K E"]
    bias: Float[Tensor, " K"]
    strength: float
    top1: float
    loss: float

    def __call__(self, features: Float[Tensor, "N E"]) -> Float[Tensor, "N K"]:
        """Logits."""
        return F.linear(features, self.weight, self.bias)


def fit_linear(
    train: Float[Tensor, "N E"],
    labels: Int64[Tensor, "N"],
    validation: Float[Tensor, "M E"],
    validation_labels: Int64[Tensor, "M"],
    num_classes: int,
    *,
    strengths: Sequence[float] = STRENGTHS,
    device: torch.device | None = None,
) -> LinearHead:
    """Logistic regression with an L2 penalty, its strength chosen on validation.

    Minimises the mean cross-entropy + strength / 2 * |W|^2 by L-BFGS, as CLIP's linear probes do
    (arXiv 2103.00020, App. A.3), over features of mean 0 and standard deviation 1 in train. The
    head that is returned is for the features as they are.

    Args:
        train: features (N, E).
        labels: their class numbers (N,).
        validation: features (M, E).
        validation_labels: theirs (M,).
        num_classes: K.
        strengths: to choose from, by top-1 and then by loss; from strong to weak, as each starts
            where the one before ended.
        device: where to compute.

    Returns:
        The head on the CPU.

    Raises:
        DataError: all images are of one class.
    """
    if len(labels.unique()) < 2:
        raise DataError("all images are of one class; a linear head needs two to tell apart")
    mean = train.mean(0)
    scale = train.std(0, correction=0)
    scale = torch.where(scale > SMALLEST, scale, torch.ones_like(scale))
    inputs, targets = ((train - mean) / scale).to(device), labels.to(device)
    held, held_targets = ((validation - mean) / scale).to(device), validation_labels.to(device)
    head = nn.Linear(inputs.shape[1], num_classes, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    best: LinearHead | None = None
    for strength in strengths:
        _minimise(head, inputs, targets, strength)
        with torch.no_grad():
            logits = head(held)
            top1 = float((logits.argmax(1) == held_targets).float().mean())
            loss = float(F.cross_entropy(logits, held_targets))
        if best is None or (top1, -loss) > (best.top1, -best.loss):
            weight = head.weight.detach().cpu() / scale
            bias = head.bias.detach().cpu() - weight @ mean
            best = LinearHead(weight, bias, strength, top1, loss)
    assert best is not None, "there is a strength"
    return best


def _minimise(head: nn.Linear, inputs: Tensor, targets: Tensor, strength: float) -> None:
    """Bring a head to the minimum for one strength, from where it is."""
    optimizer = torch.optim.LBFGS(
        head.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = strength / 2 * head.weight.square().sum()
        total = F.cross_entropy(head(inputs), targets) + penalty
        total.backward()
        return total

    optimizer.step(loss)

"""Features of a frozen model, cached on disk; k-NN, linear head and wrong labels from them."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import safetensors.torch
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit import errors, randomness, spec
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.pixel_cache import DECODER
from vitkit.evaluation import loop, metrics
from vitkit.io.caches import cache_folder, caching, is_whole
from vitkit.models.initialisation import HEADS
from vitkit.models.vit import ViT
from vitkit.weights.files import safetensors_writer, weights_fingerprint

# Pooled features of a frozen model, computed once and cached on disk.


def extract_features(
    model: ViT,
    dataset: Dataset,
    split: str,
    preprocess: spec.Preprocess,
    *,
    device: torch.device | None = None,
    batch_size: int = 256,
    workers: int = 0,
    cache: Path | None = None,
    log: Callable[[str], object] = len,
) -> tuple[Float[Tensor, "N E"], Int64[Tensor, "N"]]:
    """Return the pooled features of every image of a split, from the cache or computed now.

    Args:
        model: in eval mode on `device`; its head is not used.
        dataset: the images.
        split: the split's name.
        preprocess: the evaluation transform.
        device: device of the model; default the CPU.
        batch_size: images per batch.
        workers: number of loader processes.
        cache: folder of cached features; default `features` in the user's cache folder. They belong
            to the weights, the data's content, the images in the split and their preprocessing.
        log: receives a line that tells whether they were cached or computed.

    Returns:
        Features (N, E) float32 on the CPU in the split's order, and class numbers (N,).

    Raises:
        DataError: an empty split.
        CheckpointError: features that are NaN or infinite, with the number of images.
    """
    images = dataset.splits[split]
    key = _cache_key(model, dataset, split, preprocess)
    path = (cache or cache_folder() / "features") / f"{key}.safetensors"
    labels = torch.from_numpy(np.ascontiguousarray(images.labels))
    if is_whole(path):
        features = safetensors.torch.load_file(path)["features"]
        log(f"features of {split}: {len(features):,} x {features.shape[1]}, from {path}")
        return features, labels
    batches = loop.predict_batches(
        lambda batch: model.pooled(model.forward_features(batch)),
        images,
        preprocess,
        batch_size=batch_size,
        device=device,
        workers=workers,
    )
    # cloned: a tensor of inference mode cannot take part in training
    features = torch.cat([pooled.cpu() for pooled, _ in batches]).clone()
    # others are neither cached nor used
    metrics.refuse_not_finite(int((~features.isfinite().all(dim=1)).sum()), len(features))
    try:
        with caching(path.parent) as folder:
            safetensors_writer({"features": features}, {}).write(folder / path.name)
    except OSError as error:  # the features themselves are fine
        log(f"the features of {split} cannot be cached in {path.parent}: {error.strerror}")
    log(f"features of {split}: {len(features):,} x {features.shape[1]}, computed")
    return features, labels


def _cache_key(model: ViT, dataset: Dataset, split: str, preprocess: spec.Preprocess) -> str:
    """Hash all that the features depend on."""
    images = dataset.splits[split]
    inputs = [
        weights_fingerprint(model.state_dict(), without=HEADS),
        model.spec.to_json() | {"num_classes": 0},  # the head plays no part
        dataset.fingerprint,
        preprocess.to_json(),
        DECODER,
        PIL.__version__,  # its decoders decide the pixels
    ]
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode())
    for number in range(len(images)):
        key.update(f"{images.name(number)}\n".encode(errors="surrogateescape"))
    return key.hexdigest()[:32]


# A weighted k-nearest-neighbour classifier of features.

NEIGHBOURS = 20
TEMPERATURE = 0.07
"""As in DINO (arXiv 2104.14294, Sec. 3.2 and its eval_knn.py)."""
SIMILARITIES_AT_ONCE = 2**26
"""Similarities computed at once: 256 MB of float32."""


def knn(
    train: Float[Tensor, "N E"],
    labels: Int64[Tensor, "N"],
    queries: Float[Tensor, "M E"],
    num_classes: int,
    *,
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> Float[Tensor, "M K"]:
    """Return a probability of every class for each of M images.

    Of cosine similarities s, the k largest vote for their class with exp(s / temperature)
    (Z. Wu et al., arXiv 1805.01978, Sec. 3.4; as in DINO).

    Args:
        train: features of N images (N, E).
        labels: their class numbers (N,).
        queries: features of the M images (M, E).
        num_classes: K.
        neighbours: k; at most N.
        temperature: above 0; the smaller it is, the more the nearest neighbours count.
    """
    train = F.normalize(train, dim=1)
    neighbours = min(neighbours, len(train))
    votes = []
    for batch in queries.split(max(1, SIMILARITIES_AT_ONCE // len(train))):
        # (m, N) cosine similarities
        similarities = F.normalize(batch, dim=1) @ train.T
        nearest, indices = similarities.topk(neighbours)
        # relative to the nearest, so that the exponential cannot overflow
        weights = ((nearest - nearest[:, :1]) / temperature).exp()
        class_votes = weights.new_zeros(len(batch), num_classes)
        votes.append(class_votes.scatter_add_(1, labels[indices], weights))
    all_votes = torch.cat(votes)
    # votes become probabilities, (M, K)
    return all_votes / all_votes.sum(1, keepdim=True)


# A linear classifier of features: logistic regression by L-BFGS.

PENALTIES = tuple(10.0**power for power in range(1, -7, -1))
"""Strengths of the L2 penalty, from strong to weak."""
LBFGS_ITERATIONS = 300
"""L-BFGS iterations for one strength, starting from the minimum of the strength before."""
SMALLEST_DEVIATION = 1e-6
"""A feature that varies less than this is constant, and is not scaled."""


@dataclass(frozen=True)
class LinearClassifier:
    """A linear classifier of features, with its score on validation.

    Attributes:
        weight: (K, E).
        bias: (K,).
        strength: strength of the L2 penalty that was best on validation.
        top1: on validation, in [0, 1].
        loss: on validation, in nats.
    """

    weight: Float[Tensor, "K E"]
    bias: Float[Tensor, " K"]
    strength: float
    top1: float
    loss: float

    def __call__(self, features: Float[Tensor, "N E"]) -> Float[Tensor, "N K"]:
        """Return logits."""
        return F.linear(features, self.weight, self.bias)


def fit_linear(
    train: Float[Tensor, "N E"],
    labels: Int64[Tensor, "N"],
    validation: Float[Tensor, "M E"],
    validation_labels: Int64[Tensor, "M"],
    num_classes: int,
    *,
    strengths: Sequence[float] = PENALTIES,
    device: torch.device | None = None,
    watch: Callable[[Tensor], object] = len,
) -> LinearClassifier:
    """Fit logistic regression with an L2 penalty, its strength chosen on validation.

    Minimise the mean cross-entropy + strength / 2 * |W|^2 by L-BFGS, as CLIP's linear probes do
    (arXiv 2103.00020, App. A.3), over features of mean 0 and standard deviation 1 in train.

    Args:
        train: features (N, E).
        labels: their class numbers (N,).
        validation: features (M, E).
        validation_labels: their class numbers (M,).
        num_classes: K.
        strengths: to choose from, by top-1 and then by loss; from strong to weak, as each starts
            from the minimum of the one before.
        device: where to compute.
        watch: receives the logits on validation (M, K) of each strength.

    Returns:
        The classifier of features as they are, on the CPU.

    Raises:
        DataError: all images are of one class.
    """
    if len(labels.unique()) < 2:
        raise errors.DataError("all images have the same class; a linear head needs at least two")
    mean = train.mean(0)
    # train and validation are standardised by the statistics of train
    deviation = train.std(0, correction=0)
    scale = torch.where(deviation > SMALLEST_DEVIATION, deviation, 1.0)
    inputs, val_inputs = (((part - mean) / scale).to(device) for part in (train, validation))
    targets, val_targets = labels.to(device), validation_labels.to(device)
    head = nn.Linear(inputs.shape[1], num_classes, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)  # the problem is convex: the result needs no seed
    best: LinearClassifier | None = None
    for strength in strengths:
        _minimise(head, inputs, targets, strength)
        with torch.no_grad():
            watch(logits := head(val_inputs))
            top1 = float((logits.argmax(1) == val_targets).float().mean())
            loss = float(F.cross_entropy(logits, val_targets))
        # Of few validation images many strengths have the same top-1: the loss decides.
        if best is None or (top1, -loss) > (best.top1, -best.loss):
            # W ((x - mean) / scale) + b as a map of x itself
            weight = head.weight.detach().cpu() / scale
            bias = head.bias.detach().cpu() - weight @ mean
            best = LinearClassifier(weight, bias, strength, top1, loss)
    assert best is not None, "there is a strength"
    return best


def _minimise(head: nn.Linear, inputs: Tensor, targets: Tensor, strength: float) -> None:
    """Minimise the loss for one strength, starting from the head's weights."""
    optimizer = torch.optim.LBFGS(
        head.parameters(), max_iter=LBFGS_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        # the bias is not penalised
        penalty = strength / 2 * head.weight.square().sum()
        total = F.cross_entropy(head(inputs), targets) + penalty
        total.backward()
        return total

    optimizer.step(loss)


# Suspected wrong labels: confident learning on out-of-fold probabilities.
#
# Northcutt, Jiang and Chuang, "Confident Learning" (arXiv 1911.00068).

FOLDS = 5
STRENGTH = 1e-2
"""L2 penalty of the classifiers; 0.1 and 0.0001 find as many wrong labels of Fashion-MNIST."""


def out_of_fold_probabilities(
    features: Float[Tensor, "N E"],
    labels: Int64[Tensor, "N"],
    num_classes: int,
    *,
    device: torch.device | None = None,
) -> Float[Tensor, "N K"]:
    """Return probabilities of a linear classifier that was not fitted on the image's own label.

    The images are divided into folds, each class equally; those of a fold get the probabilities
    of a classifier that was fitted on the others. So a label that is wrong has no part in them,
    except through the features themselves.

    Args:
        features: features of a frozen model (N, E).
        labels: class numbers (N,).
        num_classes: K.
        device: where to compute.

    Returns:
        (N, K) float32 on the CPU. An image that is the only one of its class has NaN, as no
        classifier can know it, and so has a fold where all other images are of one class.

    Raises:
        DataError: all images are of one class.
    """
    classes = labels.numpy()
    # within a class by a hash of the number; in this order the images of a class are adjacent
    order = np.lexsort((randomness.hash64(0, np.arange(len(classes), dtype=np.uint64)), classes))
    fold = np.empty(len(classes), np.int64)
    fold[order] = np.arange(len(classes)) % FOLDS
    probabilities = torch.full((len(labels), num_classes), torch.nan)
    for number in range(min(FOLDS, len(classes))):
        inside = torch.from_numpy(fold == number)
        # one of two classes may have a single image, and a classifier needs two classes
        if len(labels[~inside].unique()) < 2 <= len(labels.unique()):
            continue
        fitted = fit_linear(
            features[~inside],
            labels[~inside],
            features[inside],
            labels[inside],
            num_classes,
            strengths=(STRENGTH,),  # only one: the held-out labels choose nothing
            device=device,
        )
        probabilities[inside] = fitted(features[inside]).softmax(1)
    images = np.bincount(classes, minlength=num_classes)
    probabilities[torch.from_numpy(images[classes] < 2)] = torch.nan
    return probabilities


def rank_suspects(
    labels: Int64[np.ndarray, " N"],
    predicted: Int64[np.ndarray, " N"],
    probability: Float64[np.ndarray, " N"],
    label_probability: Float64[np.ndarray, " N"],
) -> Int64[np.ndarray, " S"]:
    """Return the images whose labels are probably wrong, the least probable label first.

    The classes whose images are confused are counted as in the confident joint of the paper: an
    image counts if another class than its label is predicted with at least the probability that
    images with that label have of it on average. Of each class as many images are suspected, those
    with the least probable labels ("prune by class", Sec. 4).

    >>> labels, predicted = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
    >>> rank_suspects(labels, predicted, np.array([0.9, 0.8, 0.7, 0.8]),
    ...               np.array([0.9, 0.2, 0.7, 0.8])).tolist()
    [1]

    Args:
        labels: class numbers (N,).
        predicted: most probable classes (N,).
        probability: probability of the predicted classes (N,), in [0, 1].
        label_probability: of the labels (N,), in [0, 1]; images with NaN are left out.
    """
    known = np.isfinite(label_probability) & np.isfinite(probability)
    size = int(max(labels.max(initial=0), predicted.max(initial=0))) + 1
    images = np.bincount(labels[known], minlength=size)
    sums = np.bincount(labels[known], weights=label_probability[known], minlength=size)
    # a class without images has no threshold, and no image is suspected to belong to it
    threshold = np.where(images > 0, sums / np.maximum(images, 1), np.inf)
    differs = known & (predicted != labels)
    is_confused = differs & (probability >= threshold[predicted])
    confused = np.bincount(labels[is_confused], minlength=size)
    candidates = np.flatnonzero(differs)
    # sorted by class, then by the label's probability, to take the first ones of each class
    order = candidates[np.lexsort((label_probability[candidates], labels[candidates]))]
    of_class = labels[order]
    rank = np.arange(len(order)) - np.searchsorted(of_class, of_class)
    suspects = np.sort(order[rank < confused[of_class]])
    return suspects[np.argsort(label_probability[suspects], kind="stable")]

"""Suspected wrong labels: confident learning on out-of-fold probabilities.

Northcutt, Jiang and Chuang, "Confident Learning" (arXiv 1911.00068).
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitkit.evaluation.features.linear_classifier import fit_linear
from vitkit.randomness import hash64

FOLDS = 5
STRENGTH = 1e-2
"""L2 penalty of the classifiers; 0.1 and 0.0001 find as many wrong labels of Fashion-MNIST."""


def out_of_fold_probabilities(
    features: Float[Tensor, "N E"],
    labels: Int64[Tensor, "N"],
    num_classes: int,
    *,
    folds: int = FOLDS,
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
        folds: number of classifiers.
        device: where to compute.

    Returns:
        (N, K) float32 on the CPU. An image that is the only one of its class has NaN, as no
        classifier can know it, and so has a fold where all other images are of one class.

    Raises:
        DataError: all images are of one class.
    """
    classes = labels.numpy()
    fold = _stratified_folds(classes, folds)
    probabilities = torch.full((len(labels), num_classes), torch.nan)
    for number in range(min(folds, int(fold.max(initial=-1)) + 1)):
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


def _stratified_folds(classes: Int64[np.ndarray, " N"], folds: int) -> Int64[np.ndarray, " N"]:
    """Return the fold of each image (N,): within a class, by a hash of the index."""
    order = np.lexsort((hash64(0, np.arange(len(classes), dtype=np.uint64)), classes))
    fold = np.empty(len(classes), np.int64)
    # in this order the images of a class are adjacent
    fold[order] = np.arange(len(classes)) % folds
    return fold


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

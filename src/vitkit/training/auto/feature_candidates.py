"""Candidates without training of a backbone: nearest neighbours, and a linear head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vitkit.evaluation.evaluation_loop import predict_batches
from vitkit.evaluation.features.extract import extract_features
from vitkit.evaluation.features.knn import knn
from vitkit.evaluation.features.linear_classifier import LBFGS_ITERATIONS
from vitkit.models.vit import ViT
from vitkit.training.auto.candidate_time import seconds_per_image
from vitkit.training.auto.context import SearchContext
from vitkit.training.auto.results import CandidateResult
from vitkit.training.optimization.precision import wait_for
from vitkit.training.setup.initial_weights import make_model


@dataclass
class NeighbourCandidate:
    """k-NN on features of pretrained weights, or on pixels if there are none.

    Attributes:
        context: context of the search.
        name: name of the candidate.
        leaves_weights: False: it is a baseline.
    """

    context: SearchContext
    name: str = "neighbours"
    leaves_weights: bool = False

    @cached_property
    def _model(self) -> ViT:
        plan = self.context.plan
        return make_model(plan.spec, plan.weights, plan.config, plan.device).eval()

    def _forward(self, images: Tensor) -> Tensor:
        if self.context.pretrained is not None:  # features, not logits
            return self._model.pooled(self._model.forward_features(images))
        return images.flatten(1)

    def minimum_seconds(self) -> float:
        """Measure the time to compute the features of all images."""
        context = self.context
        count = len(context.train) + len(context.val)
        return count * seconds_per_image(self._forward, context.plan, context.clock)

    def run(self, folder: Path, seconds: float) -> CandidateResult:
        """Evaluate k-NN; cached features are reused by the linear head. Writes no weights."""
        context = self.context
        started = context.clock()
        train, train_labels = self._features("train")
        val, val_labels = self._features("val")
        votes = knn(train, train_labels, val, context.plan.spec.num_classes)
        correct = (votes.argmax(1) == val_labels).numpy()
        description = "20 nearest by " + ("features" if context.pretrained else "pixels")
        return CandidateResult(self.name, description, 0, correct, None, context.clock() - started)

    def _features(self, split: str) -> tuple[Float[Tensor, "N E"], Int64[Tensor, "N"]]:
        """Return the features or the pixels of a split, and its labels."""
        context, plan = self.context, self.context.plan
        if context.pretrained is not None:
            return extract_features(
                self._model,
                plan.dataset,
                split,
                plan.preprocess,
                device=plan.device,
                workers=plan.workers,
                log=context.log,
            )
        pixels = list[Tensor]()
        labels = list[Tensor]()
        for batch_pixels, batch_labels in predict_batches(
            self._forward,
            plan.dataset.splits[split],
            plan.preprocess,
            device=plan.device,
            workers=plan.workers,
        ):
            pixels.append(batch_pixels)
            labels.append(batch_labels)
        # A copy: what is computed in inference mode cannot be used outside of it.
        return torch.cat([part.cpu() for part in pixels]).clone(), torch.cat(labels)


@dataclass
class LinearCandidate:
    """A linear head on the same features.

    Attributes:
        context: context of the search.
        name: name of the candidate.
        leaves_weights: True.
    """

    context: SearchContext
    name: str = "linear"
    leaves_weights: bool = True

    def minimum_seconds(self) -> float:
        """Measure the time to fit it with one penalty; the features are cached already."""
        context, spec = self.context, self.context.plan.spec
        # Random features: the time does not depend on their values.
        inputs = torch.randn(len(context.train), spec.width, device=context.plan.device)
        # one gradient of the whole batch is what an iteration of L-BFGS costs
        weight = torch.zeros(spec.num_classes, spec.width, device=inputs.device).requires_grad_()
        targets = torch.zeros(len(inputs), dtype=torch.long, device=inputs.device)
        started = context.clock()
        F.cross_entropy(F.linear(inputs, weight), targets).backward()
        wait_for(context.plan.device)
        return context.setup_seconds + (context.clock() - started) * LBFGS_ITERATIONS

    def run(self, folder: Path, seconds: float) -> CandidateResult:
        """Fit the head, as `--probe linear` does."""
        context = self.context
        started = context.clock()
        layer = {"pretrained": context.pretrained, "probe": "linear", "output": str(folder)}
        # Both settings have no effect on a probe.
        result = context.start_run(context.config(layer, balance=False, compile=False))
        spec = context.plan.spec
        trained = spec.num_classes * (spec.width + 1)
        description = "linear head on features"
        return context.evaluate(self.name, description, result.best, started, trained)

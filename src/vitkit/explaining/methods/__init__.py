"""The methods of explanation by name: the API, the command line and reports offer these.

A new method is a file in this package, with a function of the file's name, and a line of `METHODS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vitkit.explaining.method import Method

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Method(
                "attention",
                "attention of the readout to the patches in one layer",
                "An Image is Worth 16x16 Words (arXiv 2010.11929), Fig. 6",
                options=("layer", "head", "query"),
                unit="share of attention",
            ),
            Method(
                "rollout",
                "attention of all layers multiplied, blind to the class",
                "Quantifying Attention Flow in Transformers (arXiv 2005.00928)",
                options=("discard_ratio", "head_fusion"),
                unit="share of attention",
            ),
            Method(
                "gradient-rollout",
                "attention of all layers, weighted by its gradient",
                "Generic Attention-model Explainability (arXiv 2103.15679)",
                by_class=True,
                options=("gradients",),
                unit="relevance",
            ),
            Method(
                "grad-cam",
                "channels of one layer, weighted by their mean gradient",
                "Grad-CAM (arXiv 1610.02391)",
                by_class=True,
                options=("layer",),
                unit="weighted activation",
            ),
            Method(
                "similarity",
                "cosine of the class token, or of one patch, and each patch",
                "DINOv2 (arXiv 2304.07193)",
                options=("layer", "query"),
                unit="cosine similarity",
            ),
            Method(
                "pca",
                "principal components of the patch features as colours",
                "DINOv2 (arXiv 2304.07193), Fig. 1",
                options=("layer",),
                colours=True,
            ),
            Method(
                "legrad",
                "reaction of the class's score to the attention of each layer",
                "LeGrad (arXiv 2404.03214)",
                by_class=True,
                options=("gradients",),
                unit="gradient of the score",
            ),
            Method(
                "libragrad",
                "share of each patch in the class's logit",
                "LibraGrad (arXiv 2411.16760)",
                by_class=True,
                unit="share of the logit",
            ),
            Method(
                "integrated-gradients",
                "gradient of the pixels along the way from a grey image",
                "Axiomatic Attribution for Deep Networks (arXiv 1703.01365)",
                by_class=True,
                options=("steps",),
                unit="change of the logit",
            ),
            Method(
                "occlusion",
                "fall of the class's logit without each patch",
                "Visualizing and Understanding Convolutional Networks (arXiv 1311.2901)",
                by_class=True,
                by_passes=True,
                options=("window",),
                unit="fall of the logit",
            ),
        )
    }
)
"""Methods of explanation by name."""

DEFAULTS = ("libragrad", "rollout", "attention")
"""Default methods: the first that has the options which were set, and supports the
model. LibraGrad is the most faithful one on the models of `docs/benchmarks.md`; rollout the best of
those that need no class; attention is the map of a layer and a head."""

"""The methods of explanation by name: the API, the command line and reports offer these.

A new method is a function in a file of this package, and a line of `METHODS`. A method is known
before its file, and torch with it, is imported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from vitkit import errors, messages

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    ExplainFunction: TypeAlias = Callable[..., Float[Tensor, "B gh gw *colours"]]
    """(model, images (B, C, H, W), *, classes (B,) where `by_class`, **options) -> (B, gh, gw)."""


@dataclass(frozen=True)
class Method:
    """One method of explanation. Its function is imported at its first use, and torch with it.

    Attributes:
        name: as the user writes it; the function has the name with underscores.
        file: the file of this package that has the function.
        summary: what the map shows, in a few words without a full stop.
        source: the paper, with its number at arXiv.
        by_class: whether the map depends on the class; the function then takes `classes`, (B,)
            class numbers.
        options: further keywords of the function, such as `layer`.
        colours: whether a patch has three values (red, green, blue) instead of one.
        unit: unit of the values, for the colour bar, such as `share of attention`.
    """

    name: str
    file: str
    summary: str
    source: str
    by_class: bool = False
    options: tuple[str, ...] = ()
    colours: bool = False
    unit: str = "importance"

    @property
    def compute(self) -> ExplainFunction:
        """The function: (model, images (B, C, H, W), ...) -> a value for each patch (B, gh, gw).

        A larger value means more important. The model runs in eval mode, gets no gradients, and
        keeps its mode.
        """
        module = import_module(f"{__name__}.{self.file}")
        function: ExplainFunction = getattr(module, self.name.replace("-", "_"))
        return function


def whole_number(value: object) -> int | None:
    """Return a whole number, NumPy's too, as an `int`; None for any other value, also for True."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


_ALL = (
    Method(
        "attention",
        "attention",
        "attention of the readout to the patches in one layer",
        "An Image is Worth 16x16 Words (arXiv 2010.11929), Fig. 6",
        options=("layer", "head", "query"),
        unit="share of attention",
    ),
    Method(
        "rollout",
        "attention",
        "attention of all layers multiplied, blind to the class",
        "Quantifying Attention Flow in Transformers (arXiv 2005.00928)",
        options=("discard_ratio", "head_fusion"),
        unit="share of attention",
    ),
    Method(
        "gradient-rollout",
        "gradients",
        "attention of all layers, weighted by its gradient",
        "Generic Attention-model Explainability (arXiv 2103.15679)",
        by_class=True,
        options=("gradients",),
        unit="relevance",
    ),
    Method(
        "grad-cam",
        "gradients",
        "channels of one layer, weighted by their mean gradient",
        "Grad-CAM (arXiv 1610.02391)",
        by_class=True,
        options=("layer",),
        unit="weighted activation",
    ),
    Method(
        "similarity",
        "features",
        "cosine of the class token, or of one patch, and each patch",
        "DINOv2 (arXiv 2304.07193)",
        options=("layer", "query"),
        unit="cosine similarity",
    ),
    Method(
        "pca",
        "features",
        "principal components of the patch features as colours",
        "DINOv2 (arXiv 2304.07193), Fig. 1",
        options=("layer",),
        colours=True,
    ),
    Method(
        "legrad",
        "gradients",
        "reaction of the class's score to the attention of each layer",
        "LeGrad (arXiv 2404.03214)",
        by_class=True,
        options=("gradients",),
        unit="gradient of the score",
    ),
    Method(
        "libragrad",
        "gradients",
        "share of each patch in the class's logit",
        "LibraGrad (arXiv 2411.16760)",
        by_class=True,
        unit="share of the logit",
    ),
    Method(
        "integrated-gradients",
        "gradients",
        "gradient of the pixels along the way from a grey image",
        "Axiomatic Attribution for Deep Networks (arXiv 1703.01365)",
        by_class=True,
        options=("steps",),
        unit="change of the logit",
    ),
    Method(
        "occlusion",
        "occlusion",
        "fall of the class's logit without each patch",
        "Visualizing and Understanding Convolutional Networks (arXiv 1311.2901)",
        by_class=True,
        options=("window",),
        unit="fall of the logit",
    ),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
"""Methods of explanation by name."""

DEFAULTS = ("libragrad", "rollout", "attention")
"""Default methods: the first that has the options which were set, and supports the
model. LibraGrad is the most faithful one on the models of `docs/benchmarks.md`; rollout the best of
those that need no class; attention is the map of a layer and a head."""


_SCRIPT = "examples/research/sanity_checks_of_maps.py has the other tests of maps"
MOVED = {"truth": "is called faithfulness", "parts": _SCRIPT, "mosaics": _SCRIPT, "labels": _SCRIPT}
"""Keyword that was one of `explain` or of a report -> where it went."""


def choose_method(
    name: str | None, options: Mapping[str, object], *, has_head: bool = True
) -> tuple[Method, tuple[str, ...]]:
    """Return a method by its name, or the default, and lines on why it is not the usual default.

    The default is the first of `DEFAULTS` that has the options which were set; on a model without a
    head the first of them that needs no class.

    Args:
        name: name of the method; None for the default.
        options: options of the method; those that are None were not set.
        has_head: whether the model has classes.

    Raises:
        SettingError: another name; the message lists the methods.
    """
    if name is not None:
        # one name, and no list of names
        if not isinstance(name, str) or name not in METHODS:
            near = messages.did_you_mean(str(name), METHODS)
            listed = ", ".join(METHODS)
            raise errors.SettingError(f"method {name!r} does not exist{near}; methods are {listed}")
        return METHODS[name], ()
    wanted = {option for option, value in options.items() if value is not None}
    usual = [METHODS[other] for other in DEFAULTS]
    fitting = [method for method in usual if wanted <= set(method.options)] or usual
    carried = [method for method in fitting if has_head or not method.by_class] or fitting
    chosen = carried[0]
    if chosen is fitting[0]:
        return chosen, ()
    return chosen, (
        f"{chosen.name} instead of {fitting[0].name}: this model has no head, and so no class",
    )


def method_options(method: Method, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that were set, without those that are None; whole numbers as `int`.

    Raises:
        SettingError: one that the method does not have; the message names the methods that do.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        if name not in method.options:
            having = [other.name for other in METHODS.values() if name in other.options]
            expected = f"its options: {', '.join(method.options) or 'none'}"
            if having:
                expected = f"methods with it: {', '.join(having)}"
            expected = MOVED.get(name, f"{method.name} has no such option; {expected}")
            raise errors.SettingError.about(name, value, expected)
        # JSON has no numbers of NumPy
        number = whole_number(value)
        chosen[name] = value if number is None else number
    return chosen

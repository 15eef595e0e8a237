"""Integrated gradients of the pixels, by captum."""

from __future__ import annotations

from einops import reduce
from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.errors import MissingExtraError, SettingError
from vitkit.explaining.class_scores import at_least_float32, check_classes, gradients_in_eval_mode
from vitkit.explaining.method import whole_number
from vitkit.explaining.methods import METHODS
from vitkit.models.vit import ViT
from vitkit.shapes import Images

IMAGES_AT_ONCE = 16
"""Images per pass with gradients, so that memory does not grow with `steps`."""


def integrated_gradients(
    model: ViT, images: Images, *, classes: Int64[Tensor, " B"], steps: int = 50
) -> Float[Tensor, "B gh gw"]:
    """Return the integrated gradients of the class's logit, summed over each patch's pixels.

    The gradient is integrated on the straight line from a baseline to the image, times their
    difference ("Axiomatic Attribution for Deep Networks", arXiv 1703.01365, Eq. 1), by captum's
    Gauss-Legendre quadrature. The baseline is 0 after normalisation: the dataset's mean colour.
    The sum over all patches approaches the logit of the image minus that of the baseline.

    Args:
        model: in any mode; it runs in eval mode, gets no gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.
        classes: (B,) class numbers.
        steps: points on the line, 1 or more.

    Returns:
        (B, gh, gw), in units of the logit.

    Raises:
        MissingExtraError: captum is not installed.
        SettingError: a model without a head, a class that it does not have, or steps below 1.
        ShapeError: images that do not fit the model.
    """
    check_classes(model, classes, METHODS)
    count = whole_number(steps)
    if count is None or count < 1:
        raise SettingError.about("steps", steps, "must be a whole number, 1 or more")
    rows, columns = model.patch_embed.grid(images)
    # imported here: an optional dependency
    try:
        from captum.attr import IntegratedGradients
    except ImportError:
        raise MissingExtraError(
            "integrated-gradients needs captum; install it: pip install 'vitkit[explain]'"
        ) from None
    with gradients_in_eval_mode(model):
        pixels = IntegratedGradients(model).attribute(
            images,
            baselines=0.0,
            target=classes.to(images.device),
            n_steps=count,
            internal_batch_size=max(len(images), IMAGES_AT_ONCE),
        )
    pixels = at_least_float32(pixels.detach())
    return reduce(pixels, "B C (gh P) (gw Q) -> B gh gw", "sum", gh=rows, gw=columns)

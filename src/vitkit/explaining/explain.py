"""Explain one image: from pixels to a heat map over them, by any method."""

from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8

from vitkit import errors, messages
from vitkit.data.images.preprocess import preprocess_images, viewport
from vitkit.explaining.explanation import Explanation, heatmap_over
from vitkit.explaining.faithfulness import (
    Faithfulness,
    References,
    is_cheap,
    measure_faithfulness,
    references,
)
from vitkit.explaining.methods import METHODS, Method, choose_method, method_options, whole_number
from vitkit.explaining.methods.class_scores import check_finite
from vitkit.models.layers import eval_mode
from vitkit.weights.checkpoint import Checkpoint


def find_class(checkpoint: Checkpoint, wanted: str | int) -> int:
    """Return the number of a class.

    Args:
        checkpoint: the model with its class names.
        wanted: its name, or its number from 0.

    Raises:
        SettingError: a class that does not exist; the message has the nearest name.
    """
    count = checkpoint.model.spec.num_classes
    names = checkpoint.classes or tuple(map(str, range(count)))
    if isinstance(wanted, str) and wanted in names:
        return names.index(wanted)
    # "7" is a number only where no class has that name
    is_digits = isinstance(wanted, str) and wanted.isdecimal()
    number = int(wanted) if is_digits else whole_number(wanted)
    if number is not None and 0 <= number < count:
        return number
    if count == 0:
        expected = "this model has no head, so it has no classes; leave the class out"
    elif checkpoint.classes:
        near = messages.did_you_mean(str(wanted), names)
        expected = f"is not a class of this model{near}; classes are {messages.quote_list(names)}"
    else:
        expected = f"is not a class of this model; classes are 0 to {count - 1}"
    raise errors.SettingError.about("class_name", wanted, expected)


class ImageExplainer:
    """One image, preprocessed and predicted once, for any number of methods.

    Args:
        checkpoint: the model, on its device, and its preprocessing.
        pixels: (H, W, 3) uint8 RGB.
        class_name: the class to explain, by its name or number; default the predicted class.
        faithfulness: measure that of each map; default: only where it takes about a second, by
            `is_cheap`. A model without a head has none, and neither have maps of colours.

    Raises:
        SettingError: a class that does not exist.
        CheckpointError: logits that are not finite.

    Attributes:
        images: the image as the model gets it, (1, C, h, w), on its device and of its dtype.
        classes: number of the class to explain (1,), on the same device; None without a head.
        measured: method -> the faithfulness of its map, as `explain` measured it; None if not.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        pixels: UInt8[np.ndarray, "H W 3"],
        class_name: str | int | None = None,
        faithfulness: bool | None = None,
    ) -> None:
        self.checkpoint, self.pixels, self._faithfulness = checkpoint, pixels, faithfulness
        number = None if class_name is None else find_class(checkpoint, class_name)
        like = next(checkpoint.model.parameters())
        self.images = preprocess_images([pixels], checkpoint.preprocess).to(like)
        self.classes: torch.Tensor | None = None
        self.measured: dict[str, Faithfulness | None] = {}
        self._explained: dict[str, Any] = {}
        if checkpoint.model.spec.num_classes:
            self._predict(number)

    def explain(self, method: str | None = None, **options: object) -> Explanation:
        """Compute the heat map of one method.

        Args:
            method: a name of `METHODS`; default as `choose_method` has it, with a note where the
                model cannot carry the usual one.
            **options: of the method; those that are None are left to it.

        Raises:
            SettingError: a method or an option that does not exist, or a method that needs a class
                where the model has none.
        """
        chosen, notes = choose_method(method, options, has_head=self.classes is not None)
        set_options = method_options(chosen, options)
        arguments: dict[str, object] = {}
        if chosen.by_class:
            if self.classes is None:
                others = [other.name for other in METHODS.values() if not other.by_class]
                raise errors.SettingError(
                    f"{chosen.name} explains a class, and this model has no head; "
                    f"{messages.plural(len(others), 'method')} without a class: {', '.join(others)}"
                )
            arguments["classes"] = self.classes
        # (gh, gw), a value for each patch, or (gh, gw, 3)
        model = self.checkpoint.model
        (values,) = chosen.compute(model, self.images, **arguments, **set_options)
        # the defaults are written once, in the signature of the method
        parameters = signature(chosen.compute).parameters
        every = {name: parameters[name].default for name in chosen.options if name in parameters}
        every.update(set_options)
        layer = every.get("layer")
        if isinstance(layer, int) and layer < 0:
            every["layer"] = layer + model.spec.depth
        grid = values.detach().float().cpu().numpy()
        found = self.measured[chosen.name] = self._measure(chosen, grid)
        size = (self.pixels.shape[0], self.pixels.shape[1])
        # with a crop or a letterbox, the map is placed on the part that the model saw
        view = viewport(size, self.checkpoint.preprocess)
        return Explanation(
            self.pixels,
            heatmap_over(grid, size, view),
            method=chosen.name,
            grid=grid,
            viewport=view,
            options=every,
            notes=notes,
            faithfulness=found,
            **self._explained,
        )

    @cached_property
    def reference(self) -> References:
        """The areas with which the maps of all methods are compared; measured at the first use."""
        assert self.classes is not None
        return references(self.checkpoint.model, self.images, self.classes)

    def _measure(
        self, method: Method, grid: Float[np.ndarray, "gh gw *colours"]
    ) -> Faithfulness | None:
        model, wanted = self.checkpoint.model, self._faithfulness
        if wanted is None:
            wanted = is_cheap(model, self.images)
        if not wanted or self.classes is None or method.colours or not np.isfinite(grid).all():
            return None
        grids = torch.from_numpy(grid).unsqueeze(0)
        (found,) = measure_faithfulness(
            model, self.images, grids, self.classes, reference=self.reference
        )
        return found

    def _predict(self, number: int | None) -> None:
        """Predict the image, and store the class to explain: the given one, or the predicted."""
        model = self.checkpoint.model
        with eval_mode(model), torch.inference_mode():
            logits: Float[torch.Tensor, " K"] = check_finite(model(self.images))[0].float().cpu()
        probabilities = (logits / self.checkpoint.temperature).softmax(0)
        # by the logits, as several probabilities may be rounded to 0 or 1
        predicted = int(logits.argmax())
        number = predicted if number is None else number
        names = self.checkpoint.classes or tuple(map(str, range(len(logits))))
        self.classes = torch.tensor([number], device=self.images.device)
        self._explained = {
            "class_number": number,
            "label": names[number],
            "probability": float(probabilities[number]),
            "predicted": names[predicted],
            "predicted_probability": float(probabilities[predicted]),
        }

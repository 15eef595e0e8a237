"""The first batch of a run as a figure, without a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitkit.data.sources.open import DataSource
from vitkit.errors import SettingError
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.monitoring.augmented_grid import fed_labels, fed_pixels
from vitkit.training.setup.build_step import make_transform
from vitkit.training.setup.call import settings_of_python_call
from vitkit.training.setup.make_plan import make_plan

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure


def draw_first_batch(
    data: DataSource, settings: Mapping[str, Any], max_images: int
) -> NotebookFigure:
    """Draw the first images that a run would feed to its model, with their labels.

    Args:
        data: as for `vitkit.train`.
        settings: the keywords of `vitkit.train`, `recipe` among them.
        max_images: images to draw, of those in the first batch.

    Raises:
        UserError: wrong settings or data.
    """
    with settings_of_python_call(data, settings) as config:
        return _draw(config, max_images)


def _draw(config: TrainConfig, max_images: int) -> NotebookFigure:
    # imported here: matplotlib takes half a second
    from vitkit.plots.images import draw_images

    if max_images < 1:
        raise SettingError.about("max_images", max_images, "must be 1 or more")
    for name in ("auto", "probe"):
        if getattr(config, name):
            raise SettingError(
                f"show_batch draws the augmented images of a single run; leave out {name}"
            )
    plan = make_plan(config)
    # with several micro-batches, images are mixed within each
    batch = next(plan.steps[0].parts(config.grad_accum_steps))
    fed = make_transform(plan)(batch, step=0)
    pixels = fed_pixels(fed, plan.preprocess, max_images)
    captions = []
    for labels in fed_labels(fed, batch, plan.dataset.classes)[:max_images]:
        caption = []
        for label in labels:
            # only a mixed image has several labels, each with its share
            share = f" ({label.share})" if label.share else ""
            caption.append(f"{label.name}{share}")
        captions.append(caption)
    return draw_images([*pixels], captions, f"{plan.dataset.name}: first training batch")

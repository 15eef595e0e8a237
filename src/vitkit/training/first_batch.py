"""The first batch of a run as a figure, without a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitkit.data.augmentation.pipeline import ModelInputs
from vitkit.data.sources.open import DataSource
from vitkit.errors import SettingError
from vitkit.messages import plural
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.monitoring.figures import fed_labels, fed_pixels
from vitkit.training.plan import make_plan, make_transform
from vitkit.training.resume import settings_of_python_call

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
        return draw_batch(config, max_images)


def draw_batch(config: TrainConfig, max_images: int) -> NotebookFigure:
    """Draw the first images of a run with its labels; the title has the model's values.

    Args:
        config: the settings of the run.
        max_images: images to draw, of those in the first batch.

    Raises:
        UserError: wrong settings or data.
    """
    # imported here: matplotlib takes half a second
    from vitkit.plots.figure import grid_of_images

    if max_images < 1:
        raise SettingError.about("max_images", max_images, "must be 1 or more")
    for name in ("auto", "probe"):
        if getattr(config, name):
            raise SettingError(
                f"--show-batch draws the augmented images of a single run; leave out --{name}"
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
            # only an image of two mixed classes has several labels, each with its share
            share = f" ({label.share})" if label.share else ""
            caption.append(f"{label.name}{share}")
        captions.append(caption)
    title = f"{plan.dataset.name}: {_describe(fed, len(pixels), config.grad_accum_steps)}"
    return grid_of_images([*pixels], captions, title)


def _describe(fed: ModelInputs, drawn: int, parts: int) -> str:
    """Describe a batch in two lines: its images, and the numbers that the model gets.

    Args:
        fed: the batch, or the first of its parts.
        drawn: number of images in the figure.
        parts: micro-batches of a batch.
    """
    name = "first training batch" if parts == 1 else f"first training batch, part 1 of {parts}"
    count, channels, height, width = fed.images.shape
    images = plural(count, "image")
    if drawn < count:
        images = f"{drawn:,} of {images}"
    values = fed.images
    return (
        f"{name}, {images}\n{channels} x {height} x {width}, values "
        f"{values.min():.2f} to {values.max():.2f}, mean {values.mean():.2f}, "
        f"standard deviation {values.std(correction=0):.2f}"
    )

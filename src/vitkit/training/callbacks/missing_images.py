"""What is said and done when the images of a run are no longer what they were, or do not come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vitkit.errors import DataError, ImageError, LoaderError

if TYPE_CHECKING:
    from vitkit.training.trainer import Trainer

SKIPPING = "--bad-images skip"


def other_data(trainer: Trainer, what: str) -> DataError:
    """Return the error that says what of the data is not as when the run began."""
    or_without = ""
    if _can_skip(trainer):
        or_without = f"go on without those that are gone by adding {SKIPPING}, "
    return DataError(
        f"{trainer.plan.config.data}: the {what} are not those the run "
        f"{trainer.run_folder.root} began with; bring them back, {or_without}or start afresh"
    )


@contextmanager
def saved_when_images_fail(trainer: Trainer) -> Iterator[None]:
    """Save before an `ImageError` or a `LoaderError` leaves the block, and say in it how to go on.

    Raises:
        Interrupted: instead of a `LoaderError`, where a signal ended the wait for the images.
    """
    try:
        yield
    except ImageError as error:
        saved = ", and all is saved" if trainer.save_between_steps() else ""
        go_on = trainer.how_to_go_on()
        without = f"; or without it, by adding {SKIPPING}" if _can_skip(trainer) else ""
        raise ImageError(
            error.name,
            error.reason,
            f"{error.detail}; the run stopped at step {trainer.progress.step}{saved}: bring the "
            f"file back and {go_on}{without}",
        ) from error
    except LoaderError as error:
        trainer.save_between_steps()
        if trainer.stops_alone():
            trainer.interrupt(trainer.stop.signum or 0)
        raise LoaderError(f"{error}; {trainer.how_to_go_on()}") from None


def _can_skip(trainer: Trainer) -> bool:
    """Tell whether the run can go on without images: it has their list, and no teacher.

    A teacher has not seen those that would take their places.
    """
    return trainer.run_folder.images.exists() and trainer.plan.teacher is None

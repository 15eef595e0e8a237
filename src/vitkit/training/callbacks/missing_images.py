"""Images of a run that changed, cannot be read, or do not arrive: save, and say how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vitkit.errors import DataError, ImageError, LoaderError
from vitkit.training.build import Run
from vitkit.training.callbacks.save import Save
from vitkit.training.callbacks.stop import interrupted

SKIPPING = "--bad-images skip"


def other_data(run: Run, what: str) -> DataError:
    """Build the error that names what of the data is not as when the run began."""
    or_without = ""
    if _can_skip(run):
        or_without = f"go on without those that are gone by adding {SKIPPING}, "
    return DataError(
        f"{run.plan.config.data}: the {what} are not those the run "
        f"{run.folder.root} began with; bring them back, {or_without}or start afresh"
    )


@contextmanager
def saved_when_images_fail(run: Run, save: Save) -> Iterator[None]:
    """Save before an `ImageError` or a `LoaderError` leaves the block, and say in it how to go on.

    Raises:
        Interrupted: instead of a `LoaderError`, where a signal ended the wait for the images.
    """
    try:
        yield
    except ImageError as error:
        saved = ", and all is saved" if save.save_between_steps() else ""
        go_on = run.how_to_go_on()
        without = f"; or without it, by adding {SKIPPING}" if _can_skip(run) else ""
        raise ImageError(
            error.name,
            error.reason,
            f"{error.detail}; the run stopped at step {run.progress.step}{saved}: bring the "
            f"file back and {go_on}{without}",
        ) from error
    except LoaderError as error:
        save.save_between_steps()
        if run.stops_alone():
            raise interrupted(run, run.stop.signum or 0) from None
        raise LoaderError(f"{error}; {run.how_to_go_on()}") from None


def _can_skip(run: Run) -> bool:
    """Tell whether the run can go on without images: it has their list, and no teacher.

    A teacher has not seen those that would take their places.
    """
    return run.folder.images.exists() and run.plan.teacher is None

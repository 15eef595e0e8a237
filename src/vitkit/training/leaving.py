"""What is said and done when the images of a run are no longer what they were."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vitkit.errors import DataError, ImageError

if TYPE_CHECKING:
    from vitkit.training.loop import Trainer

SKIPPING = "--bad-images skip"


def other_data(trainer: Trainer, what: str) -> DataError:
    """Return the error that says what of the data is not as when the run began."""
    root = trainer.run_folder.root
    or_without = ""
    if trainer.run_folder.images.exists():
        or_without = f"go on without those that are gone by adding {SKIPPING}, "
    return DataError(
        f"{trainer.plan.config.data}: the {what} are not those the run "
        f"{root} began with; bring them back, {or_without}or start afresh"
    )


@contextmanager
def saved_when_images_fail(trainer: Trainer) -> Iterator[None]:
    """Save before an `ImageError` leaves the block, and say in it how to go on."""
    try:
        yield
    except ImageError as error:
        saved = trainer.save_between_steps()
        resume = f"vitkit train --resume {shlex.quote(str(trainer.run_folder.root))}"
        raise ImageError(
            error.name,
            error.reason,
            f"{error.detail}; the run stopped at step {trainer.progress.step}"
            f"{', and all is saved' if saved else ''}: bring the file back and go on with: "
            f"{resume}; or go on without it: {resume} {SKIPPING}",
        ) from error

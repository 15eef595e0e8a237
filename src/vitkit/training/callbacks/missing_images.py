"""Images that cannot be read or do not arrive: save the run, and tell how to resume it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vitkit.errors import DataError, ImageError, LoaderError, UserCodeError
from vitkit.training.callbacks.save import Save
from vitkit.training.run import Run


@contextmanager
def saved_when_images_fail(run: Run, save: Save) -> Iterator[None]:
    """Save before an error of images or of a user's code leaves the block; add how to go on.

    Raises:
        Interrupted: instead of a `LoaderError`, where a signal ended the wait for the images.
    """
    try:
        yield
    except ImageError as error:
        saved = ", everything is saved" if save.save_between_steps() else ""
        go_on = run.how_to_resume()
        skip = "; or, to continue without it, add --bad-images skip" if run.can_skip_images else ""
        raise ImageError(
            error.name,
            error.reason,
            f"{error.detail}; the run stopped at step {run.progress.step}{saved}: restore the "
            f"file and {go_on}{skip}",
        ) from error
    except (DataError, UserCodeError) as error:
        is_saved = save.save_between_steps()
        how = "everything is saved" if is_saved else run.folder.last_state_hint()
        raise type(error)(
            f"{error}; the run stopped at step {run.progress.step}, {how}: mend it and "
            f"{run.how_to_resume()}"
        ) from error.__cause__
    except LoaderError as error:
        save.save_between_steps()
        if run.stops_alone():
            raise run.interrupted(run.stop.signum or 0) from None
        raise LoaderError(f"{error}; {run.how_to_resume()}") from None

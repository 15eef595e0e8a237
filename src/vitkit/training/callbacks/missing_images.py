"""Images that cannot be read or do not arrive: save the run, and tell how to resume it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vitkit.errors import DataError, ImageError, LoaderError, UserCodeError
from vitkit.training.callbacks.save import Save
from vitkit.training.run import Run


@contextmanager
def saved_when_images_fail(run: Run, save: Save) -> Iterator[None]:
    """Save the run before an error of images or user code leaves the block; add how to resume.

    Raises:
        ImageError, DataError, UserCodeError, LoaderError: the error, with the command to resume.
        Interrupted: instead of a `LoaderError`, where a signal ended the wait for the images.
    """
    try:
        yield
    except ImageError as error:
        mend = f"restore the file and {run.how_to_resume()}"
        if run.can_skip_images:
            mend += "; or, to continue without it, add --bad-images skip"
        detail = f"{error.detail}; {_save_and_describe(run, save)}: {mend}"
        raise ImageError(error.name, error.reason, detail) from error
    except (DataError, UserCodeError) as error:
        mend = f"fix it and {run.how_to_resume()}"
        # the cause has the traceback of the user's own code
        raise type(error)(f"{error}; {_save_and_describe(run, save)}: {mend}") from error.__cause__
    except LoaderError as error:
        save.save_between_steps()
        if run.stops_alone():
            raise run.interrupted(run.stop.signum or 0) from None
        raise LoaderError(f"{error}; {run.how_to_resume()}") from None


def _save_and_describe(run: Run, save: Save) -> str:
    """Save the steps that are not saved yet; return the step at which the run stopped."""
    saved = "everything is saved"
    if not save.save_between_steps():  # one of several processes
        saved = run.folder.last_state_hint()
    return f"the run stopped at step {run.progress.step}, {saved}"

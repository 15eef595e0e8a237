"""The error tree: exit codes, hints, and that errors cross process borders."""

import pickle
import signal

from vitkit import errors
from vitkit.errors import exit_code


def test_every_error_has_the_exit_code_of_its_branch():
    branches = {
        errors.UserError: 2, errors.SpecError: 2, errors.ShapeError: 2, errors.SettingError: 2,
        errors.DataError: 2, errors.CheckpointError: 2, errors.OutputError: 2,
        errors.DeviceError: 2, errors.MissingExtraError: 2, errors.NonFiniteError: 3,
        errors.VitkitError: 1,
    }  # fmt: skip
    for kind, code in branches.items():
        assert exit_code(kind("x")) == code
    assert exit_code(errors.ImageError("a.jpg", "empty", "0 bytes")) == 2
    assert exit_code(errors.Interrupted(signal.SIGINT, "x")) == 130
    assert exit_code(errors.Interrupted(signal.SIGTERM, "x")) == 143


def test_errors_survive_pickling_between_processes():
    error = errors.ImageError("a.jpg", "truncated", "ends after 3 bytes")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason, again.name) == (str(error), "truncated", "a.jpg")
    again = pickle.loads(pickle.dumps(errors.Interrupted(signal.SIGTERM, "stopped\nat step 3")))
    assert (str(again), again.name) == ("stopped at step 3", "SIGTERM")
    assert exit_code(again) == 143

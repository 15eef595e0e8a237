"""A loader process that is killed: what there is is saved, and the run resumes from it."""

import multiprocessing
import os
import signal
from collections.abc import Callable

import pytest
from training.faulty import On, on, stopping_at
from training.starts import bits, train

from vitkit import Interrupted, LoaderError

ASKED = {"workers": 1, "spec": {"image_size": 8, "patch_size": 4, "in_channels": 1, "width": 16,
                                "depth": 1, "num_heads": 2, "mlp_width": 32}}  # fmt: skip


def killing() -> Callable[[], On]:
    """Kill the loader process after the second step."""
    others = set(multiprocessing.active_children())

    def after_step(trainer, result):
        if trainer.progress.step == 2:
            (loader,) = set(multiprocessing.active_children()) - others
            os.kill(loader.pid, signal.SIGKILL)

    return on(after_step=after_step)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> str:
    return bits(train(tmp_path_factory.mktemp("straight") / "run", **ASKED | {"workers": 0}).last)


def test_a_run_whose_loader_is_killed_goes_on_with_the_same_bits(straight, tmp_path):
    message = r"exit code -9.*; resume with: vitkit train --resume .*run$"
    with pytest.raises(LoaderError, match=message):
        train(tmp_path / "run", killing(), **ASKED)
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] != []
    assert bits(train(tmp_path / "run", resume=str(tmp_path / "run")).last) == straight


def test_a_run_that_stops_leaves_no_loader_process(tmp_path):
    """At once, though the error with its frames is kept; the collector comes later or never."""
    before = set(multiprocessing.active_children())
    with pytest.raises(Interrupted) as kept:
        train(tmp_path / "run", stopping_at(2), **ASKED)
    assert kept.value.__traceback__ is not None
    assert set(multiprocessing.active_children()) == before

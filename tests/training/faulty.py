"""Callbacks that disturb or watch a run."""

import os
import signal
import sys
from collections.abc import Callable

from vitkit import Callback


class On(Callback):
    """Calls a function at an event, such as `before_step=lambda trainer, batch: ...`."""

    def __init__(self, **functions: Callable[..., object]) -> None:
        vars(self).update(functions)


def on(**functions: Callable[..., object]) -> Callable[[], On]:
    """Return what `train` builds the callback with."""
    return lambda: On(**functions)


class Faulty(Callback):
    """In one process of several: VITKIT_TEST_FAULT is `KIND RANK STEP`."""

    def before_step(self, trainer, batch):
        kind, rank, step = os.environ["VITKIT_TEST_FAULT"].split()
        world = trainer.training_step.world
        if trainer.progress.step == int(step) and world.rank == int(rank):
            if kind == "exit":
                sys.exit(0)
            if kind == "exception":
                raise ValueError("something unforeseen")
            os.kill(os.getpid(), signal.Signals[kind])


def at(step: int, do: Callable[..., object]) -> Callable[[], On]:
    """Call a function with the trainer before a step, counted from 0."""

    def before_step(trainer, batch):
        if trainer.progress.step == step:
            do(trainer)

    return on(before_step=before_step)


def stopping_at(step: int) -> Callable[[], On]:
    """Send a SIGTERM right after a step, counted from 1."""

    def after_step(trainer, result):
        if trainer.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on(after_step=after_step)

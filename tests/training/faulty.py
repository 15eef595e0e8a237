"""Loops to which something happens."""

from __future__ import annotations

import os
import signal
import sys

from vitkit.training.trainer import Trainer


class Faulty(Trainer):
    """In one process of several: VITKIT_TEST_FAULT is `KIND RANK STEP`."""

    def _step(self, engine, batch):
        kind, rank, step = os.environ["VITKIT_TEST_FAULT"].split()
        if self.progress.step == int(step) and self.world.rank == int(rank):
            if kind == "exit":
                sys.exit(0)
            if kind == "exception":
                raise ValueError("something unforeseen")
            os.kill(os.getpid(), signal.Signals[kind])
        return super()._step(engine, batch)


def stopping_at(step: int) -> type[Trainer]:
    """A loop that a SIGTERM reaches in the middle of a step."""

    class Stopping(Trainer):
        def _step(self, engine, batch):
            loss = super()._step(engine, batch)
            if self.progress.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss

    return Stopping

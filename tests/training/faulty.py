"""A loop to which something happens in one process: VITKIT_TEST_FAULT is `KIND RANK STEP`."""

from __future__ import annotations

import os
import signal
import sys

from vitkit.training.loop import Trainer


class Faulty(Trainer):
    def _step(self, engine, batch):
        kind, rank, step = os.environ["VITKIT_TEST_FAULT"].split()
        if self.progress.step == int(step) and self.world.rank == int(rank):
            if kind == "exit":
                sys.exit(0)
            if kind == "exception":
                raise ValueError("something unforeseen")
            os.kill(os.getpid(), signal.Signals[kind])
        return super()._step(engine, batch)

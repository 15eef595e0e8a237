"""One process of a launched run to which something happens: `faulty.py KIND RANK STEP FOLDER`."""

from __future__ import annotations

import os
import signal
import sys

from vitkit.training import session
from vitkit.training.launch import serve
from vitkit.training.loop import Trainer


class Faulty(Trainer):
    def _step(self, engine, batch):
        kind, rank, step = sys.argv[1:4]
        if self.progress.step == int(step) and self.world.rank == int(rank):
            if kind == "exit":
                sys.exit(0)
            if kind == "exception":
                raise ValueError("something unforeseen")
            os.kill(os.getpid(), signal.Signals[kind])
        return super()._step(engine, batch)


if __name__ == "__main__":
    sys.exit(serve(sys.argv, lambda config: session.train(config, trainer=Faulty)))

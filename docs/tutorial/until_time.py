"""A callback that fits a training into a given time: the learning rate follows the clock.

    MINUTES=40 vitkit train DATA ... --callbacks until_time:UntilTime --no-test

The rate rises during the first twentieth of the time, then falls by a cosine, and the run ends when
the time is over, also in the middle of an epoch. So a busy machine makes fewer steps, but the rate
is always low at the end. Two runs never have exactly the same steps.
"""

from __future__ import annotations

import math
import os
import time

import vitkit
from vitkit.training.step import StepResult
from vitkit.training.trainer import Trainer

WARMUP = 0.05


class UntilTime(vitkit.Callback):
    """Sets the learning rate by the part of the time that is over; ends the run with it."""

    def on_start(self, trainer: Trainer) -> None:
        """Start the clock, and take the schedule's place."""
        self.seconds = 60 * float(os.environ["MINUTES"])
        self.start = time.monotonic()
        # the highest rate of the schedule that the settings ask for
        steps = range(trainer.last_step)
        self.peak = max(trainer.schedule(step) for step in steps)
        self.last: tuple[int, float] = (-1, 0.0)
        trainer.schedule = self.rate

    def rate(self, step: int) -> float:
        """Return the rate of a step; asked twice for one step, it answers the same."""
        if step != self.last[0]:
            part = min(1.0, (time.monotonic() - self.start) / self.seconds)
            cosine = (1 + math.cos(math.pi * (part - WARMUP) / (1 - WARMUP))) / 2
            self.last = step, self.peak * (part / WARMUP if part < WARMUP else cosine)
        return self.last[1]

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """End the run when the time is over."""
        if time.monotonic() - self.start >= self.seconds:
            trainer.end(f"{self.seconds / 60:g} minutes")

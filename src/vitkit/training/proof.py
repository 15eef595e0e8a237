"""A proof on the user's own data that a killed run goes on with the same bits.

Two short runs with the same settings, each a process of its own: one straight, one that SIGKILLs
itself in the middle and is resumed. What decides the next step is hashed at the end of both.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ignite.engine import Engine

from vitkit.data.loader import Batch
from vitkit.errors import VitkitError
from vitkit.training import session
from vitkit.training.checkpointing import newest_state, run_hash
from vitkit.training.config import TrainConfig, layered
from vitkit.training.loop import Trainer

STEPS, SAVED_EVERY, KILLED_AT = 20, 4, 11
"""The run's length, how often it is saved, and the step it is killed in, in optimizer steps."""


@dataclass(frozen=True)
class Proof:
    """Two runs' hashes over model, optimizer, averages and counters.

    Attributes:
        straight: of the run that nothing happened to.
        resumed: of the one that was killed and resumed.
        steps: how long both are.
        killed_at: the step in which the second one was killed.
    """

    straight: str
    resumed: str
    steps: int
    killed_at: int

    @property
    def holds(self) -> bool:
        """Whether they are the same."""
        return self.straight == self.resumed

    def __str__(self) -> str:
        verdict = "the same bits" if self.holds else "NOT the same bits"
        return (
            f"{self.straight}  {self.steps} steps straight\n"
            f"{self.resumed}  killed (SIGKILL) in step {self.killed_at} and resumed\n"
            f"{verdict}"
        )


def prove_resume(config: TrainConfig) -> Proof:
    """Run twice, once with a kill in between.

    Args:
        config: the settings of the run that is to be trusted; `epochs` and the schedule stay, the
            runs end after `STEPS` steps. Nothing is written but in a temporary folder.

    Raises:
        VitkitError: one of the processes failed; its last line.
    """
    short = config.to_json() | {"max_steps": STEPS, "save_every": SAVED_EVERY, "resume": None,
                                "overwrite": False, "recipe": None, "quiet": True,
                                "find_lr": False, "find_batch_size": False,
                                "devices": 1}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        straight, killed = Path(place) / "straight", Path(place) / "killed"
        _child(short | {"output": str(straight)})
        _child(short | {"output": str(killed)}, kill=True)
        _child(short | {"output": str(killed), "resume": str(killed)})
        hashes = [run_hash(newest_state(run / "state")[0]) for run in (straight, killed)]
    return Proof(hashes[0], hashes[1], STEPS, KILLED_AT)


def _child(settings: dict[str, object], *, kill: bool = False) -> None:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "vitkit.training.proof", json.dumps(settings)]
    done = subprocess.run(
        [*command, *(["kill"] if kill else [])], capture_output=True, text=True, check=False
    )
    expected = -signal.SIGKILL if kill else 0
    if done.returncode != expected:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise VitkitError(
            f"the proof's run ended with {done.returncode}, expected {expected}: {last}"
        )


class _Killed(Trainer):
    """Ends as if the power failed."""

    def _step(self, engine: Engine, batch: Batch) -> float:
        if self.progress.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._step(engine, batch)


def _main(text: str, kill: bool) -> None:
    settings = json.loads(text)
    config = TrainConfig(**layered(session.resumed_settings(settings["resume"], None), settings))
    session.train(config, trainer=_Killed if kill else Trainer)


if __name__ == "__main__":
    _main(sys.argv[1], "kill" in sys.argv[2:])

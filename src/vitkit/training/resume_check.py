"""`--prove-resume`: a killed and resumed run ends with the bits of an uninterrupted one.

Two short runs with the same settings, each a process of its own: one uninterrupted, one that
SIGKILLs itself in the middle and is resumed. The state that decides the next step is hashed at
the end of both.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from vitkit.data.loading.loader import Batch
from vitkit.errors import SettingError, VitkitError
from vitkit.training import plan, recipes, resume
from vitkit.training.config import contradictions, merging
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.state.state_folder import newest_state, run_hash
from vitkit.training.train import train
from vitkit.training.trainer import Callback, Trainer

STEPS = 20
"""Steps of both runs, or fewer if the user's run has fewer."""
DECIDED = ("amp", "attention_kernel", "threads", "compile")
"""Settings that the first run decides for the other one too."""


@dataclass(frozen=True)
class Proof:
    """The hashes of two runs over model, optimizer, averages and counters.

    Attributes:
        straight: hash of the uninterrupted run.
        resumed: hash of the one that was killed and resumed.
        steps: how long both are.
        killed_at: the step in which the second one was killed.
    """

    straight: str
    resumed: str
    steps: int
    killed_at: int

    @property
    def is_exact(self) -> bool:
        """True if both hashes are the same."""
        return self.straight == self.resumed

    def __str__(self) -> str:
        verdict = "NOT the same bits"
        if self.is_exact:
            verdict = "the same bits"
        return (
            f"{self.straight}  {self.steps} steps without a stop\n{self.resumed}  killed "
            f"(SIGKILL) in step {self.killed_at} and resumed\n{verdict}"
        )


def prove_resume(config: TrainConfig) -> Proof:
    """Run twice, once with a kill in between.

    Args:
        config: the settings of the run that is to be trusted; `epochs` and the schedule stay, the
            runs end after `STEPS` steps. Nothing is written but in a temporary folder.

    Raises:
        UserError: what is wrong with the settings or the data; a run of one step, or of none.
        VitkitError: one of the processes failed; its last line.
    """
    # as in the runs below, which have no trackers
    config = contradictions.resolve_defaults(config, recipes.recipe_settings(config.recipe))[0]
    config = replace(config, logger=())
    steps = 0 if config.probe else min(STEPS, plan.make_plan(config).total_steps)
    if steps < 2:
        raise SettingError(
            "--prove-resume needs at least 2 training steps; raise --epochs, or leave out --probe"
        )
    # several states before the kill, which comes between two of them
    every, killed_at = max(1, steps // 5), steps * 11 // 20
    # all settings of the recipe are in `config` already
    short = config.to_json() | dict.fromkeys(("resume", "recipe"))
    short |= {"overwrite": False, "max_steps": steps, "save_every": every}
    short |= {"quiet": True, "devices": 1}
    with tempfile.TemporaryDirectory() as place:
        straight, killed = Path(place) / "straight", Path(place) / "killed"
        _child(short | {"output": str(straight)})
        decided = merging.read_yaml(straight / "config.yaml")
        # the other run must not decide them again
        short |= {name: decided[name] for name in DECIDED}
        _child(short | {"output": str(killed)}, killed_at)
        _child(short | {"output": str(killed), "resume": str(killed)})
        hashes = [run_hash(newest_state(run / "state")[0]) for run in (straight, killed)]
    return Proof(hashes[0], hashes[1], steps, killed_at)


def _child(settings: dict[str, object], killed_at: int = -1) -> None:
    """Run in a child process, which kills itself before the given step."""
    command = [sys.executable, "-m", "vitkit.training.resume_check"]
    command += [json.dumps(settings), str(killed_at)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = 0 if killed_at < 0 else -signal.SIGKILL
    if done.returncode != expected:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise VitkitError(
            f"the run of --prove-resume ended with exit code {done.returncode}, expected "
            f"{expected}: {last}"
        )


class KillBeforeStep(Callback):
    """Ends the process as a power failure would, before the step in its arguments."""

    def before_step(self, trainer: Trainer, batch: Batch) -> None:
        """Kill this process where it is its turn."""
        if trainer.progress.step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    train(
        TrainConfig(**merging.layered(resume.resumed_settings(asked["resume"], None), asked)),
        [KillBeforeStep],
    )

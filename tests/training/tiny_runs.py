"""A run small enough to be killed fifty times: everything that has a state is switched on."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

import vitkit
from vitkit import Callback
from vitkit.training import train
from vitkit.training.config.merging import layered
from vitkit.training.recipes import recipe_settings
from vitkit.training.state.state_folder import newest_state, read_manifest, run_hash, write_manifest

TINY = {
    "recipe": "digits", "epochs": 3, "warmup_epochs": 1.0, "amp": "off", "batch_size": 128,
    "grad_accum_steps": 2, "model_ema": True, "save_every": 5, "quiet": True, "device": "cpu",
    "threads": 1, "plots": False, "report": False,
    "spec": {"depth": 1, "width": 32, "patch_size": 4, "mlp_dropout": 0.1, "drop_path": 0.1},
}  # fmt: skip
QUICK: dict[str, Any] = {
    "quiet": True, "amp": "off", "device": "cpu", "threads": 1, "workers": 0, "plots": False,
    "report": False, "log_examples": False, "log_histograms": False,
}  # fmt: skip
"""What other small runs leave out."""
STEPS = 30
"""Of the whole run; 10 an epoch."""


def trained(
    settings: Mapping[str, object], callback: Callable[[], Callback] | None = None
) -> vitkit.TrainResult:
    """A run with one more callback, which is no setting of the run."""
    return train.train(config_of(settings), [callback] if callback else [])


def config_of(settings: Mapping[str, object]) -> vitkit.TrainConfig:
    return vitkit.TrainConfig(**layered(recipe_settings(settings.get("recipe")), settings))


def run(
    output: Path, callback: Callable[[], Callback] | None = None, **settings: object
) -> vitkit.TrainResult:
    return trained({"data": "digits", "output": str(output)} | TINY | settings, callback)


def settings_of(output: Path) -> dict[str, Any]:
    """The settings in the config.yaml of a run."""
    return YAML(typ="safe", pure=True).load(output / "config.yaml")


def last_state(output: Path) -> Path:
    """The newest intact state of a run."""
    return newest_state(output / "state")[0]


def edit_manifest(state: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a state, and seal it again."""
    manifest = read_manifest(state)
    change(manifest)
    write_manifest(state, manifest)


def counters(state: Path) -> dict[str, Any]:
    """The counters that a state has."""
    return read_manifest(state)["values"]["progress"]


def end_of(output: Path) -> str:
    """The hash of what a run ended with."""
    return run_hash(last_state(output))


def command(output: Path, **settings: object) -> list[str]:
    """The same run from the command line."""
    words = ["train", "digits", "--output", str(output)]
    for name, value in (TINY | settings).items():
        flag = f"--{name.replace('_', '-')}"
        if name == "spec":
            words += [f"--spec.{field}={number}" for field, number in TINY["spec"].items()]
        elif value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    return words

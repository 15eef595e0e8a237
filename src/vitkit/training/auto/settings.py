"""The user's settings for `--auto`: those that every candidate gets, and those refused."""

from __future__ import annotations

from vitkit.distributed import has_rank
from vitkit.errors import SettingError
from vitkit.messages import flag_name
from vitkit.training.config.field_types import Settings
from vitkit.training.config.meaning import fields_where
from vitkit.training.config.train_config import TrainConfig


def shared_settings(config: TrainConfig) -> Settings:
    """Return the user's settings for all candidates.

    Raises:
        SettingError: a setting is set that the search decides, or there are several processes.
    """
    if config.resume is not None:
        raise SettingError(
            "--auto takes no --resume, as every search starts afresh; to resume one candidate: "
            "vitkit train --resume RUN/CANDIDATE, without --auto"
        )
    if config.recipe is not None:
        raise SettingError(
            f"--auto chooses the settings that a recipe has; leave out --recipe {config.recipe}, "
            "or train without --auto"
        )
    given = config.to_json()
    defaults = TrainConfig(data=config.data).to_json()
    changed = {name for name in given if given[name] != defaults[name]}
    refused = fields_where(TrainConfig, with_auto="refused")
    decided = [name for name in refused if name in changed]
    # With weights, `model` selects published ones; from scratch, the search chooses the size.
    if config.model is not None and config.pretrained is None:
        decided.append("model")
    if decided:
        flags = ", ".join(map(flag_name, decided))
        pronoun = "it" if len(decided) == 1 else "them"
        raise SettingError(
            f"--auto chooses {flags} itself; leave {pronoun} out, or train without --auto"
        )
    # processes that measure times of their own would not decide alike
    if has_rank():
        raise SettingError("--auto runs in one process; start it without torchrun")
    passed_on = fields_where(TrainConfig, with_auto="passed on")
    return {name: given[name] for name in passed_on if name in changed or name == "data"}

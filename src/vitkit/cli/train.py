"""`vitkit train DATA`: every field of `TrainConfig` is a flag."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import tyro

from vitkit.cli.arguments import as_flags, fill_value, take_fields
from vitkit.errors import SettingError, VitkitError
from vitkit.frozen import field_names
from vitkit.training.config.field_types import Settings
from vitkit.training.config.merging import layered
from vitkit.training.config.setting_names import refused_flag
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.recipes import recipe_settings

DESCRIPTION = """Train a Vision Transformer on your images.

DATA is an image folder (train/<class>/*.jpg with val/ and test/, or <class>/*.jpg), a CSV file of
path,label, a Parquet file or a folder of them, tar shards as 'wds:shards-{0000..0099}.tar' (in
quotes, or the shell expands it), a dataset of the Hub as hf://owner/name, or one of digits, mnist,
fashion-mnist, cifar10, cifar100.

Settings come from the defaults, then from --recipe, then from flags; later ones win. Any field of
the model is a flag --spec.FIELD VALUE, such as --spec.patch-size 4.

With --auto, k-NN, a linear probe and fine-tuning of --pretrained weights (or, without weights, a
suitably small ViT from scratch) are tried within --budget, until the next one brings no significant
gain. With --prove-resume, nothing is trained: one run is killed and resumed, another one is not,
and both must end with the same bits."""

BASE_FLAGS = {
    "recipe": ("--recipe", "-c", "--config"),
    "model": ("--model",),
    "resume": ("--resume",),
    "output": ("--output", "--output-dir"),
}
"""Flags that decide which settings the others change, by all their names."""


def run(arguments: list[str]) -> None:
    """Parse the settings in their order of precedence and train."""
    prove = "--prove-resume" in arguments
    rest, spec = take_fields([word for word in arguments if word != "--prove-resume"])
    for flag in ("--cache", "--pretrained", "--finetune"):
        rest = fill_value(rest, flag, "auto")
    rest = fill_value(rest, "--grad-checkpointing", "block")
    given = {name: _peek(rest, flags) for name, flags in BASE_FLAGS.items()}
    # the recipe and the stopped run decide the defaults that --help shows
    recipe = recipe_settings(given["recipe"])
    stored: Settings = {}
    if given["resume"] is not None:
        # imported here and in _begin: --help and mistyped flags do not wait for torch
        from vitkit.training.resume import resumed_settings

        stored = resumed_settings(given["resume"], given["output"], recipe)
    data = str(stored.get("data", ""))
    flags = rest
    if rest and not rest[0].startswith("-"):
        data, *flags = rest
    if not data and not {"-h", "--help"} & set(rest):
        raise SettingError("DATA is missing; name it first: vitkit train DATA [flags]")
    shards = [word for word in flags if word.startswith("wds:") and word.endswith(".tar")]
    if data.startswith("wds:") and shards:
        raise SettingError(
            f"the shell expanded the name of the shards to {len(shards) + 1:,} names; put it in "
            "quotes: 'wds:shards-{0000..0099}.tar'"
        )
    refusal = refused_flag(flags, TrainConfig)
    if refusal is not None:
        raise SettingError(refusal)
    config = _configured(data, flags, spec, (stored, recipe), given)
    with as_flags(*spec, group="spec."):
        _begin(config, prove=prove)


def _configured(
    data: str,
    flags: list[str],
    spec: Mapping[str, Any],
    layers: tuple[Settings, Settings],
    given: Mapping[str, str | None],
) -> TrainConfig:
    """Merge all settings: defaults < `layers` (the stopped run's, the recipe's) < flags."""
    settings: Settings = {"data": data, "spec": spec}
    if given["model"] is not None:
        settings["model"] = given["model"]
    # the flags' defaults: what the settings are without them
    base = TrainConfig(**layered(*layers, settings))
    with as_flags(*field_names(TrainConfig)):
        config = tyro.cli(
            TrainConfig, default=base, args=flags, prog="vitkit train DATA", description=DESCRIPTION
        )
    for name in field_names(TrainConfig):
        value = getattr(config, name)
        if value != getattr(base, name):
            settings[name] = value
    # a base flag in a spelling that only tyro understands came too late to decide
    for name, flags_of_name in BASE_FLAGS.items():
        if name in settings and settings[name] != given[name]:
            flag = flags_of_name[0]
            raise SettingError(
                f"{flag} decides the defaults of other flags, so it must be written in full: "
                f"{flag} {settings[name]}"
            )
    return TrainConfig(**layered(*layers, settings))


def _begin(config: TrainConfig, *, prove: bool) -> None:
    """Prove that runs resume exactly, search candidates, or train."""
    if prove and config.auto:
        raise SettingError("--prove-resume tests a single run; leave out --auto")
    if prove and config.devices > 1:
        raise SettingError(
            f"--prove-resume runs in one process; leave out --devices {config.devices}"
        )
    if prove:
        from vitkit.training.resume_check import prove_resume

        proof = prove_resume(config)
        sys.stdout.write(f"{proof}\n")
        if not proof.is_exact:
            raise VitkitError("the resumed run did not end with the same bits; please report it")
    elif config.auto:
        from vitkit.training.auto.auto import run_search

        run_search(config)
    else:
        from vitkit.training.train import train

        train(config)


def _peek(arguments: list[str], flags: tuple[str, ...]) -> str | None:
    """Return the last value of a flag by any of its names, before the others are parsed."""
    last = None
    for argument, next_argument in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") in flags:
            last = value if equals else next_argument
        elif argument[:2] in flags:  # -cNAME
            last = argument[2:]
    return last

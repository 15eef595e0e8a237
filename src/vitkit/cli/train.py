"""`vitkit train DATA`: every field of `TrainConfig` is a flag."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from vitkit.cli.arguments import Argument, Command, Group, describe_settings
from vitkit.cli.output import flags, print_results
from vitkit.cli.parsing import HELP, SPEC, Words, as_flags, read_flags, take_fields, wants_help
from vitkit.errors import SettingError, VitkitError
from vitkit.io.atomic import write_bytes
from vitkit.io.results import check_outputs, png_result
from vitkit.training.config.meaning import Settings
from vitkit.training.config.merging import layered
from vitkit.training.config.train_config import SECTIONS, TrainConfig
from vitkit.training.recipes import RECIPES, recipe_settings

if TYPE_CHECKING:
    from vitkit.training.run import TrainResult

# The figure of the first training batch, `vitkit train --show-batch`, in the working folder.

BATCH_FIGURE = "show-batch.png"
"""The file of `--show-batch`, in the working folder."""
BATCH_WRITER = "vitkit train --show-batch"
BATCH_FILE = png_result("a figure of a training batch", BATCH_WRITER)
MOST_SHOWN = 64
"""Images of a batch in the figure."""


def _write_batch_figure(config: TrainConfig) -> None:
    """Draw the first training batch in the working folder, and print where it is."""
    # imported here, as those below: --help and wrong settings wait for none of them
    from vitkit.api import draw_batch
    from vitkit.cli.images import files_of_data

    path = Path(BATCH_FIGURE)
    inputs = files_of_data(config.data, path, BATCH_FILE, data_root=config.data_root)
    check_outputs(
        [path], BATCH_FILE, inputs=inputs, overwrite=config.overwrite, flag="--show-batch"
    )
    from vitkit.plots.figure import SCREEN_DPI, encode_png

    figure = draw_batch(config, MOST_SHOWN)
    write_bytes(path, encode_png(figure, software=BATCH_WRITER, dpi=SCREEN_DPI))
    lines = figure.texts[0].get_text().split("\n")
    print_results(*lines, f"images: {path.absolute()}")


DESCRIPTION = (
    "Train a Vision Transformer on your images.",
    "Settings come from the defaults, then from --recipe, then from flags; later ones win.",
    "With --auto, k-NN, a linear probe and fine-tuning of --pretrained weights (or, without "
    "weights, a suitably small ViT from scratch) are tried within --budget, until the next one "
    "brings no significant gain.",
    f"Recipes: {', '.join(RECIPES)}.",
)
DATA = Argument(
    name="data",
    metavar="DATA",
    required=True,
    help="An image folder (train/<class>/*.jpg with val/ and test/, or <class>/*.jpg), a CSV file "
    "of path,label, a Parquet file or a folder of them, tar shards as 'wds:shards-{0000..0099}.tar'"
    " (in quotes, or the shell expands it), a dataset of the Hub as hf://owner/name, or one of "
    "digits, mnist, fashion-mnist, cifar10, cifar100. A resumed run has its own.",
)
FIELDS = replace(SPEC, help="Any field of the model, such as --spec.patch-size 4.")
PROVE_RESUME = Argument(
    name="prove_resume",
    flags=("--prove-resume",),
    kind=bool,
    default=False,
    help="Train nothing: one run is killed and resumed, another one is not, and both must end with "
    "the same bits.",
)
SHOW_BATCH = Argument(
    name="show_batch",
    flags=("--show-batch",),
    kind=bool,
    default=False,
    help=f"Train nothing: draw the first training batch, augmented as the model gets it, in "
    f"{BATCH_FIGURE}.",
)
COMMON = (
    "data",
    "data_root",
    "model",
    "img_size",
    "pretrained",
    "recipe",
    "output",
    "resume",
    "auto",
    "budget",
    "epochs",
    "batch_size",
    "lr",
    "opt",
    "weight_decay",
    "aa",
    "mixup",
    "freeze",
    "patience",
    "device",
    "devices",
    "workers",
    "seed",
    SHOW_BATCH.name,
)
"""Arguments of the short help: those that beginners need, and that tutorials of other programs
begin with."""
OF_THE_VERB = (PROVE_RESUME.name, SHOW_BATCH.name)
"""Flags that are not settings of a run."""
EXAMPLES = (
    "vitkit train photos  # a folder with one folder of images per class",
    "vitkit train photos --show-batch  # look at the images that it will train on",
    "vitkit train photos --auto --budget 10m  # try several ways, within ten minutes",
    "vitkit train digits --recipe digits --epochs 20  # a recipe, and one change to it",
    "vitkit train --resume runs/photos-vit-1  # continue a stopped run",
)


def describe(arguments: Sequence[str] = ()) -> Command:
    """Describe the verb; the recipe in the arguments decides the defaults of the help."""
    base = TrainConfig(data="")
    if wants_help(arguments):
        words = [word for word in arguments if word not in HELP]
        read = read_flags(_command(base), words)
        base = TrainConfig(**layered(recipe_settings(read.last("recipe")), {"data": ""}))
    return _command(base)


def _command(base: TrainConfig) -> Command:
    groups = [Group(title="arguments", arguments=(DATA,))]
    extra = {"model": (FIELDS,), "run": (PROVE_RESUME, SHOW_BATCH)}
    for group in describe_settings(SECTIONS, base):
        arguments = (*group.arguments, *extra.get(group.title, ()))
        groups.append(Group(title=group.title, arguments=arguments))
    return Command(
        verb="train",
        description=DESCRIPTION,
        groups=tuple(groups),
        examples=EXAMPLES,
        common=COMMON,
    )


def run(arguments: list[str]) -> None:
    """Merge the settings in their order of precedence and train."""
    words = read_flags(describe(), arguments)
    recipe = recipe_settings(words.last("recipe"))
    stored: Settings = {}
    resume = words.last("resume")
    if resume is not None:
        # imported here and in _begin: --help and mistyped flags do not wait for torch
        from vitkit.training.resume import resumed_settings

        stored = resumed_settings(resume, words.last("output"), recipe)
    words_of_run, spec = take_fields(words.flag_words(*OF_THE_VERB))
    data = _data(words, stored)
    config = _configured(data, words_of_run, spec, (stored, recipe), words)
    show, prove = words.last("show_batch") == "True", words.last("prove_resume") == "True"
    if show and prove:
        raise SettingError("--show-batch and --prove-resume cannot be combined")
    with as_flags(*spec, group="spec."):
        if show:
            _write_batch_figure(config)
        else:
            _begin(config, prove=prove)


def _data(words: Words, stored: Settings) -> str:
    """Return DATA, or the data of the stopped run.

    Raises:
        SettingError: it is not given, or more than once.
    """
    first, *others = words.positionals or [str(stored.get("data", ""))]
    if first.startswith("wds:") and any(name.endswith(".tar") for name in others):
        raise SettingError(
            f"the shell expanded the name of the shards to {len(others) + 1:,} names; put it in "
            "quotes: 'wds:shards-{0000..0099}.tar'"
        )
    if others:
        raise SettingError(
            f"{others[0]!r} is one argument too many; expected: vitkit train DATA [flags]"
        )
    if not first:
        raise SettingError("DATA is missing; expected: vitkit train DATA [flags]")
    return first


def _configured(
    data: str,
    flags: list[str],
    spec: Mapping[str, Any],
    layers: tuple[Settings, Settings],
    words: Words,
) -> TrainConfig:
    """Merge all settings: defaults < `layers` (the stopped run's, the recipe's) < flags."""
    settings: Settings = {"data": data, "spec": spec}
    # fields of a spec belong to a model
    if words.last("model") is not None:
        settings["model"] = words.last("model")
    # the defaults of the flags: the settings without them
    base = TrainConfig(**layered(*layers, settings))
    with as_flags(*(field.name for field in fields(TrainConfig))):
        config = tyro.cli(TrainConfig, default=base, args=flags, prog="vitkit train")
    for name in words.values:
        if name not in ("spec", *OF_THE_VERB):
            settings[name] = getattr(config, name)
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
    else:
        from vitkit.api import train_and_report

        _print_end(config, *train_and_report(config))


def _print_end(config: TrainConfig, result: TrainResult, report: Path | None) -> None:
    """Print where the results are, and commands that use the weights."""
    if config.quiet:
        return
    then: list[Sequence[str | Path]] = []
    is_usable = result.best.exists()  # a k-NN probe leaves no weights
    scores = [split for split, found in result.metrics.items() if found]
    if is_usable and scores and "test" not in scores:
        relabel = config.relabel
        copy = result.run / "relabel.csv"
        if relabel is not None and copy.is_file():
            relabel = str(copy)  # the user's file may have been changed since
        given = flags(data_root=config.data_root, relabel=relabel)
        then.append(("eval", result.run, config.data, *given))
    if is_usable and Path(config.data).is_dir():
        then.append(("predict", result.run, config.data))
    elif is_usable:
        then.append(("explain", result.run, "--model"))
    lines = [f"results: {result.run}"]
    if report is not None:
        lines.append(f"report: {report}")
    print_results(*lines, then=then)

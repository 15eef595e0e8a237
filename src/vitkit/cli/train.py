"""`vitkit train DATA`: every field of `TrainConfig` is a flag."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.cli import arguments, output
from vitkit.errors import SettingError, VitkitError
from vitkit.io import atomic, results
from vitkit.training.config import meaning, merging
from vitkit.training.config.train_config import SECTIONS, TrainConfig
from vitkit.training.recipes import RECIPES, recipe_settings

if TYPE_CHECKING:
    from vitkit.training.run import TrainResult

# The figure of the first training batch, `vitkit train --show-batch`, in the working folder.

BATCH_FIGURE = "show-batch.png"
"""The file of `--show-batch`, in the working folder."""
MOST_SHOWN = 64
"""Images of a batch in the figure."""


def _write_batch_figure(config: TrainConfig) -> None:
    """Draw the first training batch in the working folder, and print where it is."""
    # imported here, as those below: --help and wrong settings wait for none of them
    from vitkit.api import draw_batch
    from vitkit.cli.images import files_of_data

    path = Path(BATCH_FIGURE)
    inputs = files_of_data(config.data, path, data_root=config.data_root)
    results.check_outputs([path], inputs=inputs, overwrite=config.overwrite, flag="--show-batch")
    from vitkit.plots.figure import SCREEN_DPI, encode_png

    figure = draw_batch(config, MOST_SHOWN)
    atomic.write_bytes(path, encode_png(figure, dpi=SCREEN_DPI))
    lines = figure.texts[0].get_text().split("\n")
    output.print_results(*lines, f"images: {path.absolute()}")


DESCRIPTION = (
    "Train a Vision Transformer on your images.",
    "Settings come from the defaults, then from --recipe, then from flags; later ones win.",
    "With --auto, k-NN, a linear probe and fine-tuning of --pretrained weights (or, without "
    "weights, a suitably small ViT from scratch) are tried within --budget, until the next one "
    "brings no significant gain.",
    f"Recipes: {', '.join(RECIPES)}.",
)
DATA = arguments.Argument(
    name="data",
    metavar="DATA",
    required=True,
    help="An image folder (train/<class>/*.jpg with val/ and test/, or <class>/*.jpg), a CSV file "
    "of path,label, a Parquet file or a folder of them, tar shards as 'wds:shards-{0000..0099}.tar'"
    " (in quotes, or the shell expands it), a dataset of the Hub as hf://owner/name, or one of "
    "digits, mnist, fashion-mnist, cifar10, cifar100. A resumed run has its own.",
)
OF_THE_VERB = {
    "prove_resume": "Train nothing: one run is killed and resumed, another one is not, and both "
    "must end with the same bits.",
    "show_batch": "Train nothing: draw the first training batch, augmented as the model gets it, "
    f"in {BATCH_FIGURE}.",
}
"""Flags that are not settings of a run, with their help."""
NO_FLAGS = ("data", "start")
"""Settings that are not flags: the positional argument, and what a run writes for itself."""
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
    "show_batch",
)
"""Arguments of the short help: those that beginners need, and that tutorials of other programs
begin with."""
EXAMPLES = (
    "vitkit train photos  # a folder with one folder of images per class",
    "vitkit train photos --show-batch  # look at the images that it will train on",
    "vitkit train photos --auto --budget 10m  # try several ways, within ten minutes",
    "vitkit train digits --recipe digits --epochs 20  # a recipe, and one change to it",
    "vitkit train --resume runs/photos-vit-1  # continue a stopped run",
)


def describe(words: Sequence[str] = ()) -> arguments.Command:
    """Describe the verb; the recipe in the words decides the defaults of the help."""
    command = _command(TrainConfig(data=""))
    if not arguments.wants_help(words):
        return command
    given = arguments.parse(
        command, (word for word in words if word not in arguments.HELP), complete=False
    )
    recipe = recipe_settings(given.get("recipe"))
    return _command(TrainConfig(**merging.layered(recipe, {"data": ""})))


def _command(defaults: TrainConfig) -> arguments.Command:
    groups = {"arguments": (DATA,), **arguments.describe_settings(SECTIONS, defaults, NO_FLAGS)}
    for name, text in OF_THE_VERB.items():
        flag = f"--{name.replace('_', '-')}"
        groups["run"] += (
            arguments.Argument(name=name, flags=(flag,), kind=bool, default=False, help=text),
        )
    return arguments.Command(
        verb="train",
        function=train_command,
        description=DESCRIPTION,
        groups=groups,
        examples=EXAMPLES,
        common=COMMON,
    )


def train_command(*, prove_resume: bool = False, show_batch: bool = False, **settings: Any) -> None:
    """Merge the settings, defaults < those of the stopped run < recipe < flags, and train.

    Args:
        prove_resume: only prove that runs resume exactly.
        show_batch: only draw the first batch.
        **settings: fields of `TrainConfig` that were given as flags.
    """
    recipe = recipe_settings(settings.get("recipe"))
    stored: meaning.Settings = {}
    if "resume" in settings:
        # imported here and below: --help and mistyped flags do not wait for torch
        from vitkit.training.resume import resumed_settings

        stored = resumed_settings(settings["resume"], settings.get("output"), recipe)
    config = TrainConfig(**merging.layered(stored, recipe, settings))
    if show_batch and prove_resume:
        raise SettingError("--show-batch and --prove-resume cannot be combined")
    if show_batch:
        _write_batch_figure(config)
    elif prove_resume:
        _prove(config)
    else:
        from vitkit.api import train_and_report

        _print_end(config, *train_and_report(config))


def _prove(config: TrainConfig) -> None:
    """Prove that runs of a configuration resume exactly."""
    if config.auto:
        raise SettingError("--prove-resume tests a single run; leave out --auto")
    if config.devices > 1:
        raise SettingError(
            f"--prove-resume runs in one process; leave out --devices {config.devices}"
        )
    from vitkit.training.resume_check import prove_resume

    proof = prove_resume(config)
    sys.stdout.write(f"{proof}\n")
    if not proof.is_exact:
        raise VitkitError("the resumed run did not end with the same bits; please report it")


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
        given = output.flags(data_root=config.data_root, relabel=relabel)
        then.append(("eval", result.run, config.data, *given))
    if is_usable and Path(config.data).is_dir():
        then.append(("predict", result.run, config.data))
    elif is_usable:
        then.append(("explain", result.run, "--model"))
    lines = [f"results: {result.run}"]
    if report is not None:
        lines.append(f"report: {report}")
    output.print_results(*lines, then=then)

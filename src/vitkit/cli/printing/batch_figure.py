"""The figure of the first training batch, `vitkit train --show-batch`, in the working folder."""

from __future__ import annotations

from pathlib import Path

from vitkit.cli.printing.next_steps import print_results
from vitkit.io.atomic import write_bytes
from vitkit.io.results import check_outputs, png_result
from vitkit.training.config.train_config import TrainConfig

BATCH_FIGURE = "show-batch.png"
"""The file of `--show-batch`, in the working folder."""
BATCH_WRITER = "vitkit train --show-batch"
BATCH_FILE = png_result("a figure of a training batch", BATCH_WRITER)
MOST_SHOWN = 64
"""Images of a batch in the figure."""


def write_batch_figure(config: TrainConfig) -> None:
    """Draw the first training batch in the working folder, and print where it is.

    Args:
        config: the settings of the run, which is not begun.

    Raises:
        UserError: wrong settings or data, or a file of that name that is no earlier figure.
    """
    # imported here, as those below: --help and wrong settings wait for none of them
    from vitkit.cli.parsing.images import files_of_data

    path = Path(BATCH_FIGURE)
    inputs = files_of_data(config.data, path, BATCH_FILE, data_root=config.data_root)
    check_outputs(
        [path], BATCH_FILE, inputs=inputs, overwrite=config.overwrite, flag="--show-batch"
    )
    from vitkit.plots.figure import SCREEN_DPI, encode_png
    from vitkit.training.setup.first_batch import draw_batch

    figure = draw_batch(config, MOST_SHOWN)
    write_bytes(path, encode_png(figure, software=BATCH_WRITER, dpi=SCREEN_DPI))
    lines = figure.axes[0].get_title(loc="left").split("\n")
    print_results(*lines, f"images: {path.absolute()}")

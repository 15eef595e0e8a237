"""`vitkit explain CHECKPOINT [IMAGES...] --model`: what a model has learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.cli.parsing.images import StreamedImages, files_of_checkpoint
from vitkit.cli.printing.next_steps import flags, print_results
from vitkit.errors import SettingError
from vitkit.messages import plural

if TYPE_CHECKING:
    from vitkit.prediction.image_list import ImageList


def draw_what_was_learned(
    checkpoint: str,
    images: ImageList | None,
    output: str,
    overwrite: bool,
    device: str,
    strict: bool,
) -> None:
    """Draw what a model has learned; other arguments as for `explain_command`.

    Args:
        checkpoint: its path.
        images: to measure attention on; None draws what the weights alone show.
        output: folder of the files.
        overwrite: replace files that are no earlier results, too.
        device: of the model.
        strict: stop at the first image that cannot be used.
    """
    # imported here: wrong paths do not wait for torch
    from vitkit.explaining.model.explanation import check_model_files, output_files
    from vitkit.prediction.model_measurement import CheckpointMeasurement

    inputs = files_of_checkpoint(checkpoint)
    check_model_files(
        output_files(Path(output)), overwrite=overwrite, inputs=inputs, flag="--output"
    )
    measurement = CheckpointMeasurement(checkpoint, device=device)
    usable = None if images is None else StreamedImages(images, strict=strict, outputs={})
    if usable is not None:
        for _ in usable.with_outputs(measurement.add(usable)):
            pass  # the numbers are sums, which grow with each image
    explanation = measurement.result()
    files = explanation.save(output, overwrite=overwrite)
    lines = [
        *explanation.lines(),
        f"{plural(len(files), 'file')} in {output}, {files[0].name} first",
    ]
    then = []
    if usable is None:
        then = [("explain", checkpoint, "IMAGES", "--model", *flags(output=output))]
    print_results(*lines, then=then)
    if usable is not None:
        usable.refuse_broken()


def refuse_without_effect(given: Mapping[str, object]) -> None:
    """Raise `SettingError` for flags of single images beside --model, which has no use for them.

    Args:
        given: flag -> its value, or whether it was given.
    """
    for name, value in given.items():
        if value not in (None, ()) and value is not False:  # layer 0 is equal to False
            raise SettingError(f"--{name} has no effect with --model; leave one of them out")

"""`vitkit explain CHECKPOINT [IMAGES...] --model`: what a model has learned."""

from __future__ import annotations

from pathlib import Path

from vitkit.cli.images import (
    StreamedImages,
    files_of_checkpoint,
    find_arguments,
    refuse_images_first,
)
from vitkit.cli.printing.next_steps import flags, print_results
from vitkit.errors import SettingError
from vitkit.messages import plural


def draw_what_was_learned(
    checkpoint: str,
    images: tuple[str, ...],
    output: str,
    overwrite: bool,
    device: str,
    strict: bool,
) -> None:
    """Draw what a model has learned; arguments as for `explain_command`."""
    refuse_images_first("explain", checkpoint, "--model IMAGES")
    found = find_arguments(images) if images else None
    # imported here: wrong paths do not wait for torch
    from vitkit.explaining.model.explanation import check_model_files, output_files
    from vitkit.prediction.model_measurement import CheckpointMeasurement

    inputs = files_of_checkpoint(checkpoint)
    check_model_files(
        output_files(Path(output)), overwrite=overwrite, inputs=inputs, flag="--output"
    )
    measurement = CheckpointMeasurement(checkpoint, device=device)
    usable = None if found is None else StreamedImages(found, strict=strict, outputs={})
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


def refuse_without_effect(method: str, format: str, **others: object) -> None:
    """Raise `SettingError` for flags of single images beside --model, which has no use for them."""
    given = {"method": method != "attention", "format": format != "png"} | others
    for name, value in given.items():
        if value not in (None, False, ()):
            raise SettingError(f"--{name} has no effect with --model; leave one of them out")

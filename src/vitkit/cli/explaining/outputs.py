"""Where `vitkit explain` writes: a folder, or the one file that --output names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.cli.explaining.options import ALL
from vitkit.data.images.file_types import IMAGE_ENDINGS
from vitkit.errors import SettingError
from vitkit.messages import plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vitkit.explaining.files import ExplanationFiles, Figures
    from vitkit.prediction.image_list import ImageList

FILES = (".png", ".svg", ".gif")
"""Endings of a file that one explanation can be written to."""


def is_file(output: str) -> bool:
    """Return True if --output names a file, not a folder.

    Raises:
        SettingError: a file of another kind than an explanation can have.
    """
    path = Path(output)
    ending = path.suffix.lower()
    if path.is_dir() or ending not in (*FILES, *IMAGE_ENDINGS, ".pdf"):
        return False
    if ending not in FILES:
        raise SettingError(
            f"--output {output}: expected a folder, or one file that ends in {', '.join(FILES)}"
        )
    return True


def check_one_file(
    output: str, method: str | None, format: str, count: int | None, extras: Mapping[str, bool]
) -> None:
    """Raise `SettingError` where one file cannot hold all that is written.

    Args:
        output: as --output names it.
        method: of the maps, or `all`; None for the default one.
        format: as --format names it.
        count: of the images; None where their paths come one by one.
        extras: flag -> whether it was given, of those that write further files.
    """
    reason = ""
    if method == ALL:
        reason = "--method all writes several"
    elif count is None:
        reason = "the paths of - may be several"
    elif count != 1:
        reason = f"{plural(count, 'image')} need several"
    for flag, is_given in extras.items():
        if is_given and not reason:
            reason = f"--{flag} writes another"
    if reason:
        raise SettingError(f"--output {output} is one file, and {reason}; name a folder")
    if format == "svg" and not output.lower().endswith(".svg"):
        raise SettingError(
            f"--output {output} does not end in .svg; leave --format svg out, or change the ending"
        )


def explanation_files(
    output: str, method: str | None, options: Mapping[str, object], figures: Figures
) -> ExplanationFiles:
    """Return the files to write, not checked yet.

    Args:
        output: as --output names it.
        method: of the maps, or `all`; None for the default one.
        options: of the method, or of the methods that have them.
        figures: of each image in a folder.
    """
    # imported here: --help and wrong paths do not wait for torch
    from vitkit.explaining.files import EveryMethod, OneFile, OneMethod

    if is_file(output):
        return OneFile(Path(output), method, options)
    if method == ALL:
        return EveryMethod(options, folder=Path(output), figures=figures)
    return OneMethod(method, options, folder=Path(output), figures=figures)


def check_files(
    files: ExplanationFiles, images: ImageList, inputs: list[Path], *, overwrite: bool
) -> None:
    """Raise `OutputError` if a file must not be written; of a stream the images are not known yet.

    Args:
        files: to write.
        images: those that will be explained.
        inputs: further files that the command reads.
        overwrite: replace other files, not only earlier explanations.
    """
    from vitkit.explaining.files import ImageName

    named = []
    if images.total is not None:
        named = [ImageName(image.name, image.place) for image in images]
        inputs = [*inputs, *images.files()]
    files.check(named, inputs, overwrite=overwrite)

"""`vitkit predict CHECKPOINT IMAGES...`, and `vitkit embed CHECKPOINT IMAGES... --out FILE`."""

from __future__ import annotations

import csv as csv_format
import json as json_format
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from vitkit.cli.images import (
    StreamedImages,
    engine_options,
    files_of_checkpoint,
    find_arguments,
    refuse_images_first,
)
from vitkit.cli.output import flags, print_now, suggest
from vitkit.engines.registry import EngineChoice, PrecisionChoice
from vitkit.exporting.artefact import opens_artefact
from vitkit.io import atomic, results
from vitkit.messages import escape, format_table, percent, plural, terminal_width
from vitkit.prediction.features_file import write_features
from vitkit.process import uncollected_imports

if TYPE_CHECKING:
    from vitkit.prediction.images import FoundImage, ImageList
    from vitkit.prediction.labels import RightAnswers
    from vitkit.prediction.predictor import Prediction

Write: TypeAlias = "Callable[[FoundImage, Prediction], object]"
CSV_HEADER = ("image", "rank", "label", "probability")

EXAMPLES = (
    "vitkit predict runs/photos-vit-1 cat.jpg  # the five most probable classes",
    "vitkit predict runs/photos-vit-1 'photos/**/*.jpg' --csv all.csv --top-k 1",
    "vitkit predict model.safetensors mnist --split test --json  # a dataset, for a program",
    "vitkit embed runs/photos-vit-1 photos --out features.npz  # all images of a folder",
    "vitkit embed runs/photos-vit-1 mnist --split test --out test.npz  # with labels",
    "vitkit embed model.safetensors 'photos/*.png' --out png.npz  # quoted patterns",
)


def predict_command(
    checkpoint: str,
    images: tuple[str, ...],
    *,
    top_k: int = 5,
    device: str = "auto",
    batch_size: int = 64,
    engine: EngineChoice = "auto",
    precision: PrecisionChoice = "float32",
    calibrate: str | None = None,
    json: bool = False,
    csv: str | None = None,
    save_images: str | None = None,
    split: str | None = None,
    data_root: str | None = None,
    overwrite: bool = False,
    strict: bool = False,
    allow_partial: bool = False,
    trust_code: bool = False,
) -> None:
    """Classify images with a checkpoint, most probable class first.

    Each is printed as soon as its batch is computed. One that cannot be used is named on stderr and
    left out, and the exit code is 2. Of a dataset, the right predictions are counted at the end.

    Args:
        checkpoint: a run folder, a checkpoint of any known format, or an exported model.
        images: files, folders, quoted patterns ('photos/**/*.png'), http(s) addresses, - (paths
            on the standard input), or datasets (list.csv, x.parquet, 'wds:*.tar', mnist).
        top_k: number of classes to show.
        device: cpu, cuda, mps or auto.
        batch_size: images per batch.
        engine: what runs the model; auto: the fastest here, by trials.
        precision: float32, bfloat16 or int8; auto: the fastest with the same predictions.
        calibrate: DATA for int8, such as the training data; its test split is not used.
        json: print JSON.
        csv: write this .csv file; without --json, nothing is printed then.
        save_images: write each image with its predicted classes as a PNG file in this folder.
        split: train, val or test: only this split of datasets and of folders with class folders.
        data_root: folder of the named datasets, or the folder that the paths of a CSV begin at.
        overwrite: let --csv and --save-images replace existing files that are not inputs.
        strict: stop at the first image that is missing or cannot be used, and write no CSV.
        allow_partial: leave out unknown tensors, initialise missing ones at random; list both.
        trust_code: open an exported .pt2 model, which can run code that is in it.
    """
    refuse_images_first("predict", checkpoint, "IMAGES")
    table = None if csv is None else Path(csv)
    folder = None if save_images is None else Path(save_images)
    inputs = [*map(Path, images), *files_of_checkpoint(checkpoint)]
    if table is not None:  # by the names alone: opening a large dataset takes time
        results.check_outputs([table], (".csv",), inputs=inputs, overwrite=overwrite, flag="--csv")
    found = find_arguments(images, split=split, data_root=data_root, strict=strict)
    if folder is not None:
        _check_drawings(folder, found, inputs, overwrite)
    plain = (engine, precision, calibrate) == ("auto", "float32", None)
    plain = plain and device in ("auto", "cpu") and not allow_partial
    exported = opens_artefact(checkpoint, plain=plain, trust_code=trust_code)
    options = engine_options(engine, precision, calibrate, data_root, found.total)
    with uncollected_imports():
        from vitkit.prediction.labels import RightAnswers, match_labels
        from vitkit.prediction.predictor import Predictor
        from vitkit.weights.load import load

    if exported:
        predictor = Predictor(checkpoint, batch_size=batch_size, trust_code=trust_code)
        described: Any = cast("Any", predictor.forward).description
    else:
        described = load(checkpoint, strict=not allow_partial)
        predictor = Predictor.from_checkpoint(
            described, engine=options, device=device, batch_size=batch_size
        )
    answers = RightAnswers(match_labels(described, found.classes))
    usable = StreamedImages(found, strict=strict)
    predictions = usable.with_outputs(predictor.stream(usable, top_k))
    with _writers(table, folder, found, answers, json=json) as writers:
        for image, prediction in predictions:
            answers.add(image, prediction.label)
            for write in writers:
                write(image, prediction)
    _end(answers, plural(usable.count - usable.broken, "image"), table, folder)
    if usable.labelled and len(images) == 1:
        suggest(("eval", checkpoint, *images, *flags(split=split, data_root=data_root)))
    elif os.path.isfile(usable.first):
        suggest(("explain", checkpoint, usable.first))
    usable.refuse_broken()


def _check_drawings(folder: Path, found: ImageList, inputs: list[Path], overwrite: bool) -> None:
    """Refuse drawings that would replace a file, before any is made."""
    places = results.ResultPlaces(folder, ".png")
    paths = (places.path(image.place) for image in found)
    inputs = [*inputs, *found.files()]
    results.check_outputs(paths, inputs=inputs, overwrite=overwrite, flag="--save-images")


def _end(answers: RightAnswers, written: str, table: Path | None, folder: Path | None) -> None:
    """Print the score on labelled images and what was written; stdout is for results only."""
    lines = answers.lines()
    if table is not None:
        lines.append(f"wrote {escape(table)}: {written}")
    if folder is not None:
        lines.append(f"wrote {written} to {escape(folder)}")
    sys.stderr.writelines(f"{line}\n" for line in lines)


# Writers of predictions: each gets an image with its prediction as soon as it is computed.


@contextmanager
def _writers(
    table: Path | None,
    folder: Path | None,
    images: ImageList,
    answers: RightAnswers,
    *,
    json: bool,
) -> Iterator[list[Write]]:
    """Yield the writers of the table, the drawings and what is printed."""
    # files are completed even if nobody reads stdout
    put = partial(print_now, keeps_running=table is not None or folder is not None)
    with ExitStack() as stack:
        writers: list[Write] = []
        if table is not None:
            writers.append(stack.enter_context(_csv(table, bool(images.classes))))
        if json:
            writers.append(stack.enter_context(_json(put)))
        elif table is None:
            writers.append(partial(_print, put, terminal_width()))
        if folder is not None:
            writers.append(_drawer(folder, answers))
        yield writers


@contextmanager
def _csv(path: Path, has_labels: bool) -> Iterator[Write]:
    """Write a CSV file row by row; it is renamed into place at the end."""
    with (
        atomic.replacing(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv_format.writer(file, lineterminator="\n")
        writer.writerow([*CSV_HEADER, *(["true_label"] if has_labels else [])])

        def write(image: FoundImage, prediction: Prediction) -> None:
            true_label = [image.label] if has_labels else []
            for rank, (label, probability) in enumerate(prediction.top, 1):
                row = [escape(image.name), rank, label, f"{probability:.6f}", *true_label]
                writer.writerow(row)

        yield write
        file.flush()  # before `replacing` renames it


@contextmanager
def _json(put: Callable[[str], object]) -> Iterator[Write]:
    """Print a JSON list, an entry at a time.

    Names of files are exact: a byte that is not UTF-8 is a lone surrogate, as for `os.fsencode`.
    """
    separator = "[\n  "

    def write(image: FoundImage, prediction: Prediction) -> None:
        nonlocal separator
        row: dict[str, Any] = {
            "image": image.name,
            "label": prediction.label,
            "probability": prediction.probability,
            "top": [{"label": label, "probability": p} for label, p in prediction.top],
        }
        if image.label:
            row["true_label"] = image.label
        put(separator + json_format.dumps(row, indent=2).replace("\n", "\n  "))
        separator = ",\n  "

    yield write
    put("\n]\n")


EIGHTHS = ("", *"▏▎▍▌▋▊▉")
"""The last character of a bar, which is filled by so many eighths."""


def _print(
    put: Callable[[str], object], width: int | None, image: FoundImage, prediction: Prediction
) -> None:
    """Print an image, and a row with a bar for each of its classes; for programs, in one line."""
    if width is None:
        classes = ", ".join(f"{escape(label)} {p:.3f}" for label, p in prediction.top)
        put(f"{escape(image.name)}: {classes}\n")
        return
    rows = []
    for rank, (label, probability) in enumerate(prediction.top):
        number = percent(probability)
        if rank and number == percent(0.0):
            break
        rows.append([f"  {escape(label)}", number, _bar(probability, width // 5)])
    put(f"{escape(image.name)}\n{format_table(rows, width, right=[1])}")


def _bar(share: float, width: int) -> str:
    """Return a bar as long as the share is large; it may be NaN."""
    if not math.isfinite(share):
        return ""
    whole, eighths = divmod(round(share * width * 8), 8)
    return "█" * whole + EIGHTHS[eighths]


def _drawer(folder: Path, answers: RightAnswers) -> Write:
    """Write a drawing of each image into a folder."""
    from vitkit.prediction.drawing import draw_prediction, save_drawing

    places = results.ResultPlaces(folder, ".png")

    def write(image: FoundImage, prediction: Prediction) -> None:
        path = places.path(image.place)
        is_right = answers.is_right(image, prediction.label)
        drawing = draw_prediction(
            image.read(), prediction, true_label=image.label, is_right=is_right
        )
        save_drawing(path, drawing)

    return write


def embed_command(
    checkpoint: str,
    images: tuple[str, ...],
    *,
    out: str,
    device: str = "auto",
    batch_size: int = 64,
    engine: EngineChoice = "auto",
    precision: PrecisionChoice = "float32",
    calibrate: str | None = None,
    split: str | None = None,
    data_root: str | None = None,
    overwrite: bool = False,
    strict: bool = False,
) -> None:
    """Write the pooled features of images as arrays `features` (N, D) and `images` (N,).

    Images of a dataset also have their class names in the array `labels` (N,). An image that is
    missing or cannot be used is named on stderr and left out; the others are written, and the exit
    code is 2 at the end.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        images: files, folders, quoted patterns ('photos/**/*.png'), http(s) addresses, - (reads
            paths from the standard input), or datasets (list.csv, x.parquet, 'wds:*.tar', mnist).
        out: the .npz file to write.
        device: cpu, cuda, mps or auto.
        batch_size: images per batch.
        engine: what runs the model; auto: the fastest here, by trials.
        precision: float32, bfloat16 or int8; auto: the fastest with the same predictions.
        calibrate: DATA for int8, such as the training data; its test split is not used.
        split: train, val or test: only this split of datasets and of folders with class folders.
        data_root: folder of the named datasets, or the folder that the paths of a CSV begin at.
        overwrite: replace an existing file that is not an input.
        strict: stop at the first image that is missing or cannot be used, and write nothing.
    """
    path = Path(out)
    refuse_images_first("embed", checkpoint, "IMAGES")
    # by the names alone: opening a large dataset takes time
    named = [*map(Path, images), *files_of_checkpoint(checkpoint)]
    results.check_outputs([path], (".npz",), inputs=named, overwrite=overwrite, flag="--out")
    found = find_arguments(images, split=split, data_root=data_root, strict=strict)
    options = engine_options(engine, precision, calibrate, data_root, found.total)
    with uncollected_imports():
        from vitkit.prediction.predictor import feature_predictor
        from vitkit.weights.load import load

    predictor = feature_predictor(
        load(checkpoint), device=device, batch_size=batch_size, options=options
    )
    usable = StreamedImages(found, strict=strict)
    features = usable.with_outputs(predictor.outputs(usable))
    count, width = write_features(path, features, has_labels=bool(found.classes))
    size = f"{plural(count, 'image')} x {plural(width, 'feature')}"
    sys.stdout.write(f"wrote {escape(path)}: {size}\n")
    usable.refuse_broken()

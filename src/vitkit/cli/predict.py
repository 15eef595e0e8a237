"""`vitkit predict CHECKPOINT IMAGES...`."""

from __future__ import annotations

import csv as csv_format
import itertools
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from tyro.conf import Positional

from vitkit.cli.images import (
    StreamedImages,
    files_of_checkpoint,
    find_arguments,
    refuse_images_first,
)
from vitkit.cli.output import Write, flags, print_json, print_table
from vitkit.cli.parsing import EngineChoice, EngineFlags, PrecisionChoice, PredictorFlags, as_flags
from vitkit.io.atomic import replacing
from vitkit.io.results import ResultPlaces, check_new_files, check_outputs, csv_result
from vitkit.messages import escape, plural

if TYPE_CHECKING:
    from vitkit.prediction.image_list import ImageList
    from vitkit.prediction.images import FoundImage
    from vitkit.prediction.labels import RightAnswers
    from vitkit.prediction.predictor import Prediction, Predictor

CSV_HEADER = ("image", "rank", "label", "probability")
LABELLED_HEADER = (*CSV_HEADER, "true_label")
CSV_FILE = csv_result("a table of predictions", CSV_HEADER, LABELLED_HEADER)


EXAMPLES = (
    "vitkit predict runs/photos-vit-1 cat.jpg  # the five most probable classes",
    "vitkit predict runs/photos-vit-1 'photos/**/*.jpg' --csv all.csv --top-k 1",
    "vitkit predict model.safetensors mnist --split test --json  # a dataset, for a program",
)


def predict_command(
    checkpoint: Positional[str],
    images: Positional[tuple[str, ...]],
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
        engine: auto, torch, compile, openvino or onnxruntime; auto: the fastest here, by trials.
        precision: float32, bfloat16 or int8; auto: the fastest with the same predictions.
        calibrate: DATA for int8, such as the training data; its test split is not used.
        json: print JSON.
        csv: write this .csv file; without --json, nothing is printed then.
        save_images: write each image with its predicted classes as a PNG file in this folder.
        split: train, val or test: only this split of datasets and of folders with class folders.
        data_root: folder of the named datasets, or the folder that the paths of a CSV begin at.
        overwrite: let --csv and --save-images replace any existing file that is not an input.
        strict: stop at the first image that is missing or cannot be used, and write no CSV.
        allow_partial: leave out unknown tensors, initialise missing ones at random; list both.
        trust_code: open an exported .pt2 model, which can run code that is in it.
    """
    refuse_images_first("predict", checkpoint, "IMAGES")
    outputs = _Outputs(csv, save_images, as_json=json, overwrite=overwrite)
    named = [*map(Path, images), *files_of_checkpoint(checkpoint)]
    outputs.check_table(named)  # by the names alone: opening a large dataset takes time
    found = find_arguments(images, split=split, data_root=data_root, strict=strict)
    outputs.check(found, named)
    choice = EngineFlags(engine, precision, calibrate, data_root)
    opening = PredictorFlags(choice, device, batch_size, allow_partial, trust_code)
    predictor, labels = opening.open(checkpoint, found)
    usable = StreamedImages(found, strict=strict, outputs={"--csv": outputs.table})
    outputs.write(usable.with_outputs(predictor.stream(usable, top_k)), predictor, labels, found)
    outputs.print_next([checkpoint, *images], flags(split=split, data_root=data_root))
    usable.refuse_broken()


def run(arguments: list[str]) -> None:
    """Parse the arguments and predict."""
    with as_flags("batch_size", "top_k", "split"):
        tyro.cli(predict_command, args=arguments, prog="vitkit predict")


@contextmanager
def _csv(path: Path, has_labels: bool) -> Iterator[Write]:
    """Write a CSV file row by row; it is renamed into place at the end."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv_format.writer(file, lineterminator="\n")
        writer.writerow(LABELLED_HEADER if has_labels else CSV_HEADER)

        def write(image: FoundImage, prediction: Prediction) -> None:
            true_label = [image.label] if has_labels else []
            for rank, (label, probability) in enumerate(prediction.top, 1):
                row = [escape(image.name), rank, label, f"{probability:.6f}", *true_label]
                writer.writerow(row)

        yield write
        file.flush()  # before `replacing` renames it


class _Drawings:
    """Drawings of predictions in a folder; they replace nothing without `overwrite`.

    Args:
        folder: where they are written.
        images: the images that will be drawn.
        inputs: further files that the command reads.
        overwrite: replace existing files that are not inputs. Of a stream the inputs are not known
            yet, so that only earlier drawings are replaced.

    Raises:
        OutputError: one of the files exists, or the folder cannot be written.
    """

    def __init__(
        self, folder: Path, images: ImageList, inputs: Iterable[Path], *, overwrite: bool
    ) -> None:
        self.folder = folder
        self._places = ResultPlaces(folder, ".png")
        self._overwrite = overwrite
        self._is_stream = images.total is None
        if not self._is_stream:
            places = ResultPlaces(folder, ".png")
            check_new_files(
                (places.path(image.place) for image in images),
                inputs=itertools.chain(inputs, images.files()),
                overwrite=overwrite,
                flag="--save-images",
            )

    def save(self, answers: RightAnswers, image: FoundImage, prediction: Prediction) -> None:
        """Draw an image and write the drawing."""
        from vitkit.prediction.drawing import DRAWING_FILE, draw_prediction, save_drawing

        path = self._places.path(image.place)
        may_replace = self._overwrite and (not self._is_stream or DRAWING_FILE.is_result(path))
        # again: the paths of a stream were unknown, and the file may exist by now
        if not may_replace:
            check_new_files([path], inputs=(), overwrite=False, flag="--save-images")
        drawing = draw_prediction(
            image.read(),
            prediction,
            true_label=image.label,
            is_right=answers.is_right(image, prediction.label),
        )
        save_drawing(path, drawing)


class _Outputs:
    """All that the command writes and prints.

    Args:
        csv: path of the table, if any.
        save_images: folder of the drawings, if any.
        as_json: print JSON instead of lines.
        overwrite: replace existing files that are not inputs.

    Attributes:
        table: the path of the table, if any.
    """

    def __init__(
        self, csv: str | None, save_images: str | None, *, as_json: bool, overwrite: bool
    ) -> None:
        self.table = None if csv is None else Path(csv)
        self._folder = None if save_images is None else Path(save_images)
        self._as_json = as_json
        self._overwrite = overwrite
        self._drawings: _Drawings | None = None
        self._example = ""
        self._counted_right = False

    def check_table(self, inputs: Iterable[Path]) -> None:
        """Raise `OutputError` if the table must not be written."""
        if self.table is not None:
            check_outputs(
                [self.table], CSV_FILE, inputs=inputs, overwrite=self._overwrite, flag="--csv"
            )

    def check(self, images: ImageList, inputs: Sequence[Path]) -> None:
        """Raise `OutputError` if a result of these images must not be written.

        Args:
            images: the images that will be predicted.
            inputs: further files that the command reads.
        """
        self.check_table(itertools.chain(inputs, images.files()))
        if self._folder is not None:
            self._drawings = _Drawings(self._folder, images, inputs, overwrite=self._overwrite)

    def write(
        self,
        predictions: Iterable[tuple[FoundImage, Prediction]],
        predictor: Predictor,
        labels: dict[str, str],
        images: ImageList,
    ) -> None:
        """Write predictions as they come; then print, on stderr, what was right and written.

        Args:
            predictions: predictions of the images that can be used.
            predictor: predictor that made them.
            labels: class of the dataset -> label of a prediction.
            images: the images.
        """
        from vitkit.prediction.labels import RightAnswers

        answers = RightAnswers(labels)
        count = 0
        with self._writers(answers, predictor.classes, images) as writers:
            for image, prediction in predictions:
                count += 1
                answers.add(image, prediction.label)
                for write in writers:
                    write(image, prediction)
                if not self._example and os.path.isfile(image.name):
                    self._example = image.name
        lines = answers.lines()
        self._counted_right = bool(lines)
        written = plural(count, "image")
        if self.table is not None:
            lines.append(f"wrote {escape(self.table)}: {written}")
        if self._folder is not None:
            lines.append(f"wrote {written} to {escape(self._folder)}")
        # stdout is for results only
        sys.stderr.writelines(f"{line}\n" for line in lines)

    @contextmanager
    def _writers(
        self, answers: RightAnswers, classes: tuple[str, ...], images: ImageList
    ) -> Iterator[list[Write]]:
        # files are completed even if nobody reads stdout
        keeps_running = self.table is not None or self._folder is not None
        with ExitStack() as stack:
            writers: list[Write] = []
            if self.table is not None:
                writers.append(stack.enter_context(_csv(self.table, bool(images.classes))))
            if self._as_json:
                writers.append(stack.enter_context(print_json(keeps_running=keeps_running)))
            if not writers:
                table = print_table(images, classes, keeps_running=keeps_running)
                writers.append(stack.enter_context(table))
            if self._drawings is not None:
                writers.append(partial(self._drawings.save, answers))
            yield writers

    def print_next(self, arguments: Sequence[str], choice: Sequence[str]) -> None:
        """Print the command that could come next, on a terminal.

        Args:
            arguments: the checkpoint and the images, as they were named.
            choice: flags that chose the images of a dataset.
        """
        if not sys.stderr.isatty():
            return
        command = ["explain", arguments[0], self._example]
        if self._counted_right and len(arguments) == 2:
            command = ["eval", *arguments, *choice]
        if all(command):
            sys.stderr.write(f"next: vitkit {escape(shlex.join(command))}\n")

"""The images of `vitkit explain`, one after the other: explained, written and printed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from vitkit.cli.explaining.registers import MOST_IMAGES, Registers
from vitkit.cli.parsing.images import StreamedImages
from vitkit.cli.printing.predictions import print_now
from vitkit.errors import ImageError
from vitkit.explaining.choice import choose_method
from vitkit.explaining.explain import ImageExplainer
from vitkit.explaining.explanation import Explanation
from vitkit.explaining.files import ExplanationFiles, ImageName
from vitkit.explaining.truth_of_images import TruthOfImages
from vitkit.messages import escape, percent
from vitkit.models.vit import ViT
from vitkit.prediction.images import FoundImage
from vitkit.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Reports:
    """Files about all images together; None where they are not wanted.

    Attributes:
        truth: how far the maps may be trusted.
        registers: what test-time registers change.
    """

    truth: Path | None = None
    registers: Path | None = None


class ExplainedImages:
    """Explanations of images, which are written and printed one by one.

    Args:
        checkpoint: the model, on its device.
        images: to explain.
        files: to write.
        reports: files about all images.
        class_name: the class to explain; None for the predicted one of each image.
        passes: as for `ImageExplainer`.

    Attributes:
        example: name of the first image that was explained; empty before.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        images: StreamedImages,
        files: ExplanationFiles,
        reports: Reports,
        class_name: str | None,
        passes: ViT | None = None,
    ) -> None:
        self.checkpoint, self.images, self.files = checkpoint, images, files
        self.reports, self.class_name = reports, class_name
        self._passes = passes
        self.example = ""
        self._truth: TruthOfImages | None = None
        self._registers: Registers | None = None

    def write(self, methods: Sequence[str | None], options: Mapping[str, object]) -> None:
        """Explain the images; write their files and the reports; print a line for each image.

        Args:
            methods: names of the methods; None for the default one.
            options: of the methods, each of which takes those that it has.

        Raises:
            ImageError, DataError: as `StreamedImages.with_outputs`.
            SettingError, OutputError: as `ExplanationFiles.save`.
        """
        has_head = self.checkpoint.model.spec.num_classes > 0
        for method in methods:
            for note in choose_method(method, options, has_head=has_head)[1]:
                sys.stderr.write(f"vitkit: {note}\n")
        if self.reports.truth is not None:
            self._truth = TruthOfImages(self.checkpoint, methods, options)
        for image, (explanation, path) in self.images.with_outputs(self._explained()):
            self.example = self.example or image.name
            _print_line(image, explanation, path)
            if len(methods) == 1 and explanation.truth is not None:  # the page has it
                _print(f"  {explanation.truth.line}")
        for name, reason in self.files.refused.items():
            sys.stderr.write(f"vitkit: {name} is left out: {reason}\n")
        if self._truth is not None and self.reports.truth is not None and self._truth.count:
            with self._with_registers():
                for line in self._truth.lines(self.files.refused):
                    _print(line)
            self._truth.write(self.reports.truth)
        if self._registers is not None and self.reports.registers is not None:
            self._registers.write(self.reports.registers)

    def _explained(self) -> Iterator[tuple[Explanation, Path] | ImageError]:
        """Yield the explanation of each image and the place of its files, or the error instead."""
        images = iter(self.images)
        if self.reports.registers is not None:
            first = [*itertools.islice(images, MOST_IMAGES)]
            images = itertools.chain(first, images)
            self._registers = Registers(self.checkpoint, first)
            _print(self._registers.line)
        for image in images:
            try:
                pixels = image.read()
            except ImageError as error:
                yield error
                continue
            notes = self._registers.note(image.name, pixels) if self._registers else ()
            truth = None if self._truth is None else True
            with self._with_registers():
                explainer = ImageExplainer(
                    self.checkpoint,
                    pixels,
                    self.class_name,
                    truth,
                    notes=notes,
                    passes=self._passes,
                )
                name = ImageName(image.name, image.place)
                saved = self.files.save(name, explainer, known=self.images.total is not None)
                if self._truth is not None:
                    self._truth.add(image.name, explainer)
            yield saved

    def _with_registers(self) -> AbstractContextManager[None]:
        return nullcontext() if self._registers is None else self._registers.active()


def _print_line(image: FoundImage, explanation: Explanation, path: Path) -> None:
    prediction = ""
    if explanation.label:
        prediction = f"{escape(explanation.label)} {percent(explanation.probability)} "
    _print(f"{escape(image.name)}: {prediction}-> {escape(path)}")


def _print(line: str) -> None:
    """Print at once; all files are written even if the reader of stdout has exited."""
    print_now(f"{line}\n", keeps_running=True)

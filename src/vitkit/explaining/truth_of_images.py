"""The truth of methods over the images of one command: gathered image by image, then measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from vitkit.errors import SettingError
from vitkit.explaining.choice import choose_method
from vitkit.explaining.explain import ImageExplainer
from vitkit.explaining.truth.deletion import ReferenceAreas, join_references
from vitkit.explaining.truth.maps import MapMaker, require_head
from vitkit.explaining.truth.measure import measure_truth
from vitkit.explaining.truth.other_removals import covered_references
from vitkit.explaining.truth.report import TruthReport, agreement_of_methods
from vitkit.io.atomic import write_bytes
from vitkit.io.results import check_outputs, json_result
from vitkit.shapes import Images
from vitkit.weights.checkpoint import Checkpoint

MOST_IMAGES = 200
"""Images that are kept in memory for the parts that need all of them; the first ones."""
TRUTH_NAME = "truth.json"
TRUTH_FILE = json_result("a truth report", ["checkpoint", "images", "methods", "tau_of_methods"])


def truth_file(folder: Path, inputs: Sequence[Path], *, overwrite: bool) -> Path:
    """Return the path of the truth report in a folder.

    Args:
        folder: of the explanations.
        inputs: files that are never replaced.
        overwrite: replace another file, not only an earlier truth report.

    Raises:
        OutputError: a file that must not be written.
    """
    path = folder / TRUTH_NAME
    check_outputs([path], TRUTH_FILE, inputs=inputs, overwrite=overwrite, flag="--output")
    return path


class TruthOfImages:
    """The images of a command, for the parts of the truth score that need many of them.

    Args:
        checkpoint: the model, on its device.
        methods: names of methods, None for the default one; those whose maps are colours are left
            out if there are several.
        options: of the methods, each of which takes those that it has.

    Raises:
        SettingError: a model without a head, or a single method whose maps are colours.
    """

    def __init__(
        self, checkpoint: Checkpoint, methods: Sequence[str | None], options: Mapping[str, Any]
    ) -> None:
        require_head(checkpoint.model)
        self.checkpoint = checkpoint
        self.reports: dict[str, TruthReport] = {}
        self._makers: list[MapMaker] = []
        for name in methods:
            method, _ = choose_method(name, options)
            own = {key: value for key, value in options.items() if key in method.options}
            # `MapMaker` refuses a single method of colours by name.
            if len(methods) == 1 or not method.colours:
                self._makers.append(MapMaker(method, own))
        self._names: list[str] = []
        self._images: list[Images] = []
        self._classes: list[Int64[Tensor, " 1"]] = []
        self._references: list[ReferenceAreas] = []

    @property
    def count(self) -> int:
        """The number of images that are kept."""
        return len(self._names)

    def add(self, name: str, explainer: ImageExplainer) -> None:
        """Keep an image with the class that is explained, up to 200 images."""
        if len(self._names) < MOST_IMAGES and explainer.classes is not None:
            self._names.append(name)
            # Preprocessed: a few hundred kilobytes an image, whatever the size of its file.
            self._images.append(explainer.images)
            self._classes.append(explainer.classes.cpu())
            self._references.append(explainer.reference)

    def lines(self, refused: Mapping[str, str]) -> Iterator[str]:
        """Measure each method, and yield the lines that say how far its maps may be trusted.

        Args:
            refused: methods that the model cannot carry; they are left out.
        """
        images, classes = torch.cat(self._images), torch.cat(self._classes)
        covered = covered_references(self.checkpoint.model, images, classes)
        for maker in self._makers:
            name = maker.method.name
            if name in refused:
                continue
            try:
                report = self.reports[name] = measure_truth(
                    maker.method,
                    self.checkpoint.model,
                    images,
                    classes=classes,
                    options=maker.options,
                    preprocess=self.checkpoint.preprocess,
                    reference=join_references(self._references),
                    covered=covered,
                )
            except SettingError as error:  # such as maps that are not finite
                yield f"{name}: not measured: {error}"
                continue
            yield f"{name}: {report.lines[0]}"
            for line in report.lines[1:]:
                yield f"  {line}"
        if len(self.reports) > 1:
            words = [
                f"{name.replace('_', ' and ')} {tau:.2f}"
                for name, tau in agreement_of_methods(self.reports.values()).items()
                if tau is not None
            ]
            yield (
                f"Kendall's tau between two ways of removing patches, over {len(self.reports)} "
                f"methods ranked by deletion: {', '.join(words) or 'not measurable'}"
            )

    def write(self, path: Path) -> None:
        """Write what `lines` measured as JSON: the images, and each method's report."""
        reports = {name: report.as_json() for name, report in self.reports.items()}
        document = {
            "checkpoint": str(self.checkpoint.path),
            "images": self._names,
            "methods": reports,
            "tau_of_methods": agreement_of_methods(self.reports.values()),
        }
        write_bytes(path, (json.dumps(document, indent=1) + "\n").encode())

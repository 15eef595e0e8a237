"""`ModelExplanation`: what a model has learned, measured on batches of images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.errors import CheckpointError, SettingError
from vitkit.explaining.methods.attention import attention
from vitkit.explaining.model_statistics import (
    Artefacts,
    DepthMeasurement,
    DepthStatistics,
    Filters,
    PositionSimilarity,
    batch_size_for,
    count_artefacts,
    first_layer_filters,
    patch_norms,
    position_similarity,
)
from vitkit.io.atomic import write_bytes
from vitkit.io.results import check_outputs, json_result, png_result, svg_result
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.plots.html import html_image, html_text
from vitkit.shapes import Images

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure
    from vitkit.plots.model import ModelPanel


# `ModelExplanation`: the numbers and the figures of what a model has learned.

WRITER = "vitkit explain --model"
"""Text in the files of a model's explanation that names their writer."""
PANELS = ("filters", "positions", "distance", "entropy", "similarity", "norms")
"""Names of the panels, and of their files."""
SHEET = "sheet"
NUMBERS = "numbers.json"
KEYS = ("model", "images", "filters", "positions", "depth", "artefacts", "notes")
"""Keys of that file."""


@dataclass(frozen=True)
class ModelExplanation:
    """The things that a model has learned: filters, positions, and attention over depth.

    Attributes:
        name: name of the model, for captions.
        filters: principal components of the first-layer filters.
        positions: cosine similarity of the positions of all patches.
        depth: attention distance and entropy, and token similarity of each layer; `None` where no
            images were given.
        artefacts: patch tokens of high norm; `None` where no images were given.
    """

    name: str
    filters: Filters
    positions: PositionSimilarity
    depth: DepthStatistics | None = None
    artefacts: Artefacts | None = None

    @property
    def images(self) -> int:
        """The number of images that were measured."""
        return 0 if self.depth is None else self.depth.images

    @property
    def caption(self) -> str:
        """The name of the model, the number of images, and what the figures do not show."""
        parts = [self.name]
        if self.depth is not None:
            parts.append(plural(self.images, "image"))
        return "; ".join(parts)

    @property
    def panels(self) -> tuple[str, ...]:
        """The names of the figures that can be drawn, of `PANELS`."""
        return tuple(panel.name for panel in self._panels())

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each figure that cannot be drawn, and why."""
        notes = [self.filters.missing, self.positions.missing]
        if self.depth is None:
            notes.append("Attention over depth is measured on images, and none were given.")
        return tuple(note for note in notes if note)

    def plot(self, panel: str | None = None) -> NotebookFigure:
        """Draw one figure, or the sheet of all of them.

        Args:
            panel: a name of `panels`, such as `filters` or `distance`; default the sheet.

        Returns:
            A matplotlib Figure, with a caption of the model's name and the number of images.

        Raises:
            SettingError: another panel, or one that this model does not have.
        """
        # imported here: the numbers need no matplotlib
        from vitkit.plots.model import draw_model_panels

        panels = list(self._panels())
        if not panels:
            raise SettingError(f"nothing to draw: {' '.join(self.notes)}")
        if panel is None:
            return draw_model_panels(panels, self.caption)
        chosen = [each for each in panels if each.name == panel]
        if not chosen:
            expected = f"must be one of {', '.join(each.name for each in panels)}"
            if panel in PANELS:  # a panel that this model or these images do not have
                expected += f". {' '.join(self.notes)}"
            raise SettingError.about("panel", panel, expected)
        return draw_model_panels(chosen, f"{self.caption}{self._detail(panel)}")

    def save(self, folder: str | Path, *, overwrite: bool = False) -> tuple[Path, ...]:
        """Write each figure and the sheet as PNG and SVG, and the numbers as JSON.

        Args:
            folder: made if it does not exist. Earlier results of the same names are replaced.
            overwrite: replace files of these names that are no earlier results, too.

        Returns:
            The files: the sheet's first, then those of each panel, `numbers.json` last.

        Raises:
            OutputError: a file that is no earlier result, or a folder that cannot be written.
            SettingError: a model without any figure, as its `notes` say.
        """
        from vitkit.plots.figure import encode_png, encode_svg

        files = output_files(Path(folder), self.panels)
        check_model_files(files, overwrite=overwrite)
        for name in (SHEET, *self.panels):
            figure = self.plot(None if name == SHEET else name)
            write_bytes(Path(folder) / f"{name}.png", encode_png(figure, WRITER))
            write_bytes(Path(folder) / f"{name}.svg", encode_svg(figure, WRITER))
        # JSON has no NaN: better an error here than a file that no other program reads.
        text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        write_bytes(Path(folder) / NUMBERS, text.encode())
        return files

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values, without filters and position maps."""
        depth, artefacts = self.depth, self.artefacts
        return {
            "model": self.name,
            "images": self.images,
            "filters": {
                "layer": self.filters.layer,
                "variance_shares": self.filters.shares.tolist(),
            },
            "positions": self.positions.kind,
            "depth": None if depth is None else _depth_values(depth),
            "artefacts": None if artefacts is None else _artefact_values(artefacts),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Return the main numbers in sentences, one per line."""
        lines = []
        if len(self.filters.shares):
            count = plural(len(self.filters.shares), "component")
            share = 100 * self.filters.shares.sum()
            lines.append(
                f"filters: {count} have {share:.0f} % of the variance ({self.filters.layer})"
            )
        if self.depth is not None:
            distance, entropy = self.depth.distance.mean(axis=1), self.depth.relative_entropy
            lines.append(
                f"attention distance: {distance[0]:.1f} pixels in the first block, "
                f"{distance[-1]:.1f} in the last, {self.depth.uniform_distance:.1f} if equal to all"
            )
            lines.append(
                f"attention entropy: {entropy[0].mean():.2f} of its largest value in the first "
                f"block, {entropy[-1].mean():.2f} in the last"
            )
        if self.artefacts is not None:
            lines.append(f"norms: {self.artefacts}")
        return [*lines, *self.notes]

    def _panels(self) -> Iterator[ModelPanel]:
        """Yield the panels that this model has."""
        from vitkit.plots.model import (
            ModelPanel,
            draw_distance,
            draw_entropy,
            draw_filters,
            draw_norms,
            draw_positions,
            draw_similarity,
        )

        components, cosine = self.filters.components, self.positions.cosine
        depth, artefacts = self.depth, self.artefacts
        if components.size:
            yield ModelPanel("filters", lambda axes: draw_filters(axes, components))
        if cosine.size:
            yield ModelPanel("positions", lambda axes: draw_positions(axes, cosine))
        if depth is not None:
            yield ModelPanel(
                "distance", lambda axes: draw_distance(axes, depth.distance, depth.uniform_distance)
            )
            yield ModelPanel(
                "entropy", lambda axes: draw_entropy(axes, depth.entropy, depth.largest_entropy)
            )
            similarity = (depth.similarity, depth.similarity_spread, depth.token)
            yield ModelPanel("similarity", lambda axes: draw_similarity(axes, *similarity))
        if artefacts is not None:
            norms = artefacts.norms.ravel()
            yield ModelPanel("norms", lambda axes: draw_norms(axes, norms, artefacts.threshold))

    def _detail(self, panel: str) -> str:
        """Return the part of a figure's caption that follows model and images."""
        from vitkit.plots.model import shown_positions

        if panel == "filters":
            share = 100 * self.filters.shares.sum()
            return f"; {self.filters.layer}, {share:.0f} % of the variance"
        if panel == "positions":
            rows, columns = self.positions.cosine.shape[:2]
            shown = shown_positions((rows, columns))
            part = f", {shown} of {rows * columns} patches" if shown < rows * columns else ""
            return f"; {self.positions.kind}{part}"
        return ""

    def _repr_png_(self) -> bytes:
        png: bytes = self.plot()._repr_png_()
        return png

    def _repr_html_(self) -> str:
        """Return the sheet and the main numbers, for a notebook."""
        figure = self.plot()
        image = html_image(figure._repr_png_(), self.caption, float(figure.get_size_inches()[0]))
        text = "".join(f"<div>{html_text(line)}</div>" for line in self.lines())
        return f"{image}{text}"


def _depth_values(depth: DepthStatistics) -> dict[str, Any]:
    """Return the numbers of each block as JSON values, with their units."""
    return {
        "attention_distance_pixels": depth.distance.tolist(),
        "uniform_attention_distance_pixels": depth.uniform_distance,
        "attention_entropy_nats": depth.entropy.tolist(),
        "relative_attention_entropy": depth.relative_entropy.tolist(),
        "compared_token": depth.token,
        "similarity_with_last_layer": depth.similarity.tolist(),
        "similarity_standard_deviation": depth.similarity_spread.tolist(),
    }


def _artefact_values(artefacts: Artefacts) -> dict[str, Any]:
    """Return the counts of high-norm patch tokens as JSON values."""
    return {
        "patch_tokens": artefacts.high.size,
        "high_norm": artefacts.count,
        "threshold": artefacts.threshold,
        "share_of_attention": artefacts.attention,
    }


def output_files(folder: Path, panels: tuple[str, ...] = PANELS) -> tuple[Path, ...]:
    """Return the files that `ModelExplanation.save` writes for these panels."""
    figures = [folder / f"{name}{end}" for name in (SHEET, *panels) for end in (".png", ".svg")]
    return (*figures, folder / NUMBERS)


def check_model_files(
    files: Sequence[Path], *, overwrite: bool, inputs: Sequence[Path] = (), flag: str = "folder"
) -> None:
    """Check that the files of a model's explanation may be written.

    Args:
        files: as `output_files` returns them.
        overwrite: replace files that are no earlier results, too.
        inputs: files that are never replaced.
        flag: flag that named the folder.

    Raises:
        OutputError: a file that is no earlier result, or a folder that cannot be written.
    """
    kinds = (
        png_result("an explanation", WRITER),
        svg_result("an explanation", WRITER),
        json_result("an explanation", KEYS),
    )
    for kind in kinds:
        matching = [path for path in files if path.suffix == kind.ending]
        check_outputs(matching, kind, inputs=inputs, overwrite=overwrite, flag=flag)


# Measurement of what a model has learned, on batches of images.


class ModelMeasurement:
    """All numbers of a `ModelExplanation`, from batches of images of one size.

    Args:
        model: any ViT.
    """

    def __init__(self, model: ViT) -> None:
        self.model = model
        self._depth = DepthMeasurement(model)
        self._norms: list[Float[Tensor, "B gh gw"]] = []
        self._attention: list[Float[Tensor, "B gh gw"]] = []

    def batch_size(self, image_size: tuple[int, int]) -> int:
        """Return how many images of a size (H, W) fit into one batch."""
        rows, columns = self.model.spec.patch_size
        return batch_size_for(self.model, (image_size[0] // rows, image_size[1] // columns))

    def add(self, images: Images) -> Float[Tensor, "B 1"]:
        """Measure a batch.

        Args:
            images: (B, C, H, W) normalised; they are moved to the model's device and dtype.

        Returns:
            The largest norm of a patch token of each image, (B, 1).

        Raises:
            CheckpointError: tokens that are not finite.
        """
        images = images.to(next(self.model.parameters()))
        tokens = self._depth.add(images)
        grid = self.model.patch_embed.grid(images)
        norms = patch_norms(self.model, tokens, grid).cpu()
        if not torch.isfinite(norms).all():
            raise CheckpointError(
                "the model's tokens are not finite (NaN or infinity), so they cannot be measured; "
                "check its weights, or use the model in float32"
            )
        self._norms.append(norms)
        self._attention.append(attention(self.model, images).cpu())
        return norms.flatten(1).amax(dim=1, keepdim=True)

    def result(self, name: str) -> ModelExplanation:
        """Return the numbers, of the weights and of the images so far.

        Args:
            name: name of the model, for captions.
        """
        filters, positions = first_layer_filters(self.model), position_similarity(self.model)
        if not self._norms:
            return ModelExplanation(name, filters, positions)
        artefacts = count_artefacts(torch.cat(self._norms), torch.cat(self._attention))
        return ModelExplanation(name, filters, positions, self._depth.result(), artefacts)

"""Things that a model has learned: numbers, their figures and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float64

from vitkit import errors, messages
from vitkit.io import atomic, results
from vitkit.plots.html import html_image, html_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitkit.plots.figure import NotebookFigure

WRITER = "vitkit explain --model"
"""Text in the files of a model's explanation that names their writer."""
PANELS = ("filters", "positions", "distance")
"""Names of the panels, and of their files."""


@dataclass(frozen=True)
class Filters:
    """Principal components of the filters that a model applies to pixels first.

    Attributes:
        components: (n, P, Q, C), each of length 1, the one of the largest variance first; P and Q
            are the filter's height and width in pixels, C is 1 for grey images and 3 for RGB.
        shares: (n,) share of the variance of each, in [0, 1].
        layer: the layer whose filters these are, in words.
        missing: why there are none, as a sentence; else empty.
    """

    components: Float64[np.ndarray, "n P Q C"]
    shares: Float64[np.ndarray, " n"]
    layer: str = "patch embedding"
    missing: str = ""


@dataclass(frozen=True)
class PositionSimilarity:
    """Cosine similarity of the position embedding of each patch with that of every other.

    Attributes:
        cosine: (gh, gw, gh, gw) in [-1, 1]; at [i, j] the map of the patch in row i and column j.
        kind: kind of the positions, in words.
        missing: why there is none, as a sentence; else empty.
    """

    cosine: Float64[np.ndarray, "gh gw gh gw"]
    kind: str
    missing: str = ""


@dataclass(frozen=True)
class DepthStatistics:
    """Means over images of attention, for each of L blocks and k heads.

    Attributes:
        images: how many were measured.
        distance: (L, k) mean attention distance, in pixels of the model's input.
        uniform_distance: the distance of a head that attends to all patches equally, in pixels.
        entropy: (L, k) mean attention entropy, in nats.
        largest_entropy: log T, the entropy of a head that attends to all T tokens equally.
    """

    images: int
    distance: Float64[np.ndarray, "L k"]
    uniform_distance: float
    entropy: Float64[np.ndarray, "L k"]
    largest_entropy: float

    @property
    def relative_entropy(self) -> Float64[np.ndarray, "L k"]:
        """The entropy as a share of its largest value, log T: (L, k) in [0, 1]."""
        return self.entropy / (self.largest_entropy or 1.0)  # 0 of a single token


@dataclass(frozen=True)
class Artefacts:
    """High-norm patch tokens of a model on some images.

    "Vision Transformers Need Registers" (arXiv 2309.16588), Sec. 2: large models without registers
    write a few background patches with norms far above the others, and keep no local information
    there.

    Attributes:
        high: (B, gh, gw), True for each patch of high norm.
        norms: (B, gh, gw) norms of the last block's patch outputs, before the last norm.
        threshold: a norm above it is high.
        attention: share of the readout's attention to patches that goes to those of high norm, mean
            over images, in [0, 1].
    """

    high: Bool[np.ndarray, "B gh gw"]
    norms: Float64[np.ndarray, "B gh gw"]
    threshold: float
    attention: float

    @property
    def count(self) -> int:
        """The number of high-norm patches in all images."""
        return int(self.high.sum())

    @property
    def share(self) -> float:
        """The share of all patches that have a high norm, in [0, 1]."""
        return self.count / self.high.size

    def __str__(self) -> str:
        """Return one line: how many patches, their norms, and their share of the attention."""
        patches = f"{self.count:,} of {messages.plural(self.high.size, 'patch token')}"
        line = f"{patches} ({100 * self.share:.1f} %) have a norm above {self.threshold:.3g}"
        if not self.count:
            return line
        return (
            f"{line} (largest {self.norms.max():.3g}, median {np.median(self.norms):.3g}) and get "
            f"{100 * self.attention:.1f} % of the attention to patches"
        )


@dataclass(frozen=True)
class ModelExplanation:
    """The things that a model has learned: filters, positions, and attention over depth.

    Attributes:
        name: name of the model, for captions.
        filters: principal components of the first-layer filters.
        positions: cosine similarity of the positions of all patches.
        depth: attention distance and entropy of each head; `None` where no images were given.
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
        if self.depth is None:
            return 0
        return self.depth.images

    @property
    def caption(self) -> str:
        """The name of the model, and the number of images."""
        if self.images:
            return f"{self.name}; {messages.plural(self.images, 'image')}"
        return self.name

    @property
    def panels(self) -> tuple[str, ...]:
        """The names of the figures that can be drawn, of `PANELS`."""
        return tuple(self._panels())

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
        from vitkit.plots.curves import draw_sheet, shown_positions

        panels, caption = self._panels(), self.caption
        if panel not in panels and (panel or not panels):
            expected = f"must be one of {', '.join(panels) or 'no panels'}"
            raise errors.SettingError.about("panel", panel, ". ".join([expected, *self.notes]))
        if panel is None:
            return draw_sheet([*panels.values()], caption)
        if panel == "filters":
            share = 100 * self.filters.shares.sum()
            caption += f"; {self.filters.layer}, {share:.0f} % of the variance"
        elif panel == "positions":
            caption += f"; {self.positions.kind}"
            rows, columns = self.positions.cosine.shape[:2]
            shown = len(shown_positions(rows)) * len(shown_positions(columns))
            if shown < rows * columns:
                caption += f", {shown} of {rows * columns} patches"
        return draw_sheet([panels[panel]], caption)

    def _panels(self) -> dict[str, Callable[[Axes], None]]:
        """Return the panels that this model has, by name."""
        from vitkit.plots import curves

        components, cosine, depth = self.filters.components, self.positions.cosine, self.depth
        panels: dict[str, Callable[[Axes], None]] = {}
        if components.size:
            panels["filters"] = partial(curves.draw_filters, components=components)
        if cosine.size:
            panels["positions"] = partial(curves.draw_positions, cosine=cosine)
        if depth is not None:
            panels["distance"] = partial(
                curves.draw_distance, distance=depth.distance, uniform=depth.uniform_distance
            )
        return panels

    def save(self, folder: str | Path, *, overwrite: bool = False) -> tuple[Path, ...]:
        """Write each figure and the sheet as PNG and SVG, and the numbers as JSON.

        Args:
            folder: made if it does not exist.
            overwrite: replace existing files of these names.

        Returns:
            The files: the sheet's first, then those of each panel, `numbers.json` last.

        Raises:
            OutputError: an existing file, or a folder that cannot be written.
            SettingError: a model without any figure, as its `notes` say.
        """
        from vitkit.plots.figure import encode_png, encode_svg

        files = check_model_files(Path(folder), self.panels, overwrite=overwrite)
        for png, svg in zip(files[:-1:2], files[1::2], strict=True):
            figure = self.plot(None if png is files[0] else png.stem)
            atomic.write_bytes(png, encode_png(figure, WRITER))
            atomic.write_bytes(svg, encode_svg(figure, WRITER))
        # JSON has no NaN: better an error here than a file that no other program reads
        atomic.write_bytes(
            files[-1], json.dumps(self.to_json(), indent=1, allow_nan=False).encode()
        )
        return files

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values, without filters and position maps."""
        depth, found = self.depth, self.artefacts
        return {
            "model": self.name,
            "images": self.images,
            "filters": {
                "layer": self.filters.layer,
                "variance_shares": self.filters.shares.tolist(),
            },
            "positions": self.positions.kind,
            "depth": depth
            and {
                "attention_distance_pixels": depth.distance.tolist(),
                "uniform_attention_distance_pixels": depth.uniform_distance,
                "attention_entropy_nats": depth.entropy.tolist(),
                "relative_attention_entropy": depth.relative_entropy.tolist(),
            },
            "artefacts": found
            and {
                "patch_tokens": found.high.size,
                "high_norm": found.count,
                "threshold": found.threshold,
                "share_of_attention": found.attention,
            },
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Return the main numbers in sentences, one per line."""
        lines, shares, depth = [], self.filters.shares, self.depth
        if len(shares):
            count = messages.plural(len(shares), "component")
            whole = f"{100 * shares.sum():.0f} % of the variance ({self.filters.layer})"
            lines.append(f"filters: {count} have {whole}")
        if depth is not None:
            distance, entropy = depth.distance.mean(axis=1), depth.relative_entropy
            lines.append(
                f"attention distance: {distance[0]:.1f} pixels in the first block, "
                f"{distance[-1]:.1f} in the last, {depth.uniform_distance:.1f} if equal to all"
            )
            lines.append(
                f"attention entropy: {entropy[0].mean():.2f} of its largest value in the first "
                f"block, {entropy[-1].mean():.2f} in the last"
            )
        if self.artefacts is not None:
            lines.append(f"norms: {self.artefacts}")
        return [*lines, *self.notes]

    def _repr_png_(self) -> bytes:
        return self.plot()._repr_png_()

    def _repr_html_(self) -> str:
        """Return the sheet and the main numbers, for a notebook."""
        image = html_image(self.plot(), self.caption)
        return image + "".join(f"<div>{html_text(line)}</div>" for line in self.lines())


def check_model_files(
    folder: Path,
    panels: Sequence[str] = PANELS,
    *,
    overwrite: bool,
    inputs: Sequence[Path] = (),
    flag: str = "folder",
) -> tuple[Path, ...]:
    """Return the files that `ModelExplanation.save` writes, once they may be written.

    Args:
        folder: where they are.
        panels: names of the figures, beside the sheet.
        overwrite: replace existing files that are not inputs.
        inputs: files that are never replaced.
        flag: flag that named the folder.

    Raises:
        OutputError: an existing file, or a folder that cannot be written.
    """
    figures = [folder / f"{name}{end}" for name in ("sheet", *panels) for end in (".png", ".svg")]
    files = (*figures, folder / "numbers.json")
    results.check_outputs(files, inputs=inputs, overwrite=overwrite, flag=flag)
    return files

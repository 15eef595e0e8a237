"""`ExportReport`: what was exported, and how it compares with torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.exporting.files.description import ArtefactDescription
from vitkit.exporting.script import script_without_vitkit
from vitkit.messages import plural


@dataclass(frozen=True)
class ExportReport:
    """An exported model that has passed the gate.

    `print` shows it as lines of text.

    Attributes:
        path: path of the artefact.
        files: all files that were written.
        description: description that is inside the artefact.
        figures: figures of the comparison with torch, as in `OUT.json`.
    """

    path: Path
    files: tuple[Path, ...]
    description: ArtefactDescription
    figures: dict[str, Any]

    @property
    def script(self) -> str:
        """A Python script that runs the artefact without vitkit."""
        return script_without_vitkit(self.description, self.path)

    def __str__(self) -> str:
        return "\n".join([*self._lines(), *map(str, self.files)])

    def _lines(self) -> list[str]:
        figures = self.figures
        lines = [
            f"logits: differ from torch's by {figures['largest_logit_difference']:.2g} at most, "
            f"{figures['relative_logit_error']:.2g} of their spread",
            f"same class: {figures['agreement']:.2%} of {plural(figures['images'], 'image')}",
        ]
        if "torch" in figures:
            before, after = figures["torch"]["top1"], figures["exported"]["top1"]
            lines.append(
                f"top-1 on {figures['split']} of {figures['data']}: {after:.2%}, by torch "
                f"{before:.2%}"
            )
        else:
            lines.append("accuracy: not checked on generated images; name yours with --data")
        if figures["int8_layers"]:
            executed = sum(figures["int8_layers"].values())
            lines.append(f"int8: {plural(executed, 'layer')} executed in int8")
            used = figures["calibration"]
            lines.append(
                f"calibrated on {plural(used['images'], 'image')} of {used['split']} of "
                f"{used['data']}; {used['left_out']:,} left out, which the check has, too"
            )
        latency = figures["latency"]
        other = "torch" if latency["baseline"] == "torch" else "the same runtime in float32"
        lines.append(
            f"latency of one image: {latency['exported_ms']:.2f} ms, by {other} "
            f"{latency['baseline_ms']:.2f} ms"
        )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "path": str(self.path),
            "files": [str(file) for file in self.files],
            "figures": self.figures,
            "script": self.script,
        }

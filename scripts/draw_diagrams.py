"""Write the drawings of the tutorial as SVG files: `python scripts/draw_diagrams.py FOLDER`.

The site draws them itself; the files are for slides and posters.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "docs/_extensions"))

from drawings import DRAWINGS, svg


def main() -> int:
    """Write them; return 2 where no folder is given."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in DRAWINGS:
        (folder / f"{name}.svg").write_text(svg(name), encoding="utf-8")
        print(folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())

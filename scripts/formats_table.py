"""Write docs/formats.md from the formats themselves: `python scripts/formats_table.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from weights.cells import document  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "formats.md").write_text(document(), encoding="utf-8")

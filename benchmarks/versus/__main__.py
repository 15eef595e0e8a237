"""`python benchmarks/versus MODEL [flags]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # Python puts this folder itself there

from versus.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

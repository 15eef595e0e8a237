"""Write scikit-learn's digits as the two IDX files that the package ships."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from vitkit.data.sources.benchmarks import DIGITS_FOLDER, write_idx


def main() -> None:
    """Write images (1797, 8, 8), values 0 to 16, and labels (1797,), 0 to 9, uint8."""
    digits = load_digits()
    write_idx(DIGITS_FOLDER / "images.idx.gz", digits.images.astype(np.uint8))
    write_idx(DIGITS_FOLDER / "labels.idx.gz", digits.target.astype(np.uint8))


if __name__ == "__main__":
    main()

"""Names of run folders: runs/DATA-MODEL-N by default, and FOLDER.old-N of renamed ones."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

from vitkit.training.config.sections.model import DEFAULT_MODEL
from vitkit.training.config.train_config import TrainConfig, leaves_model_open


def next_numbered(config: TrainConfig) -> Path:
    """Create runs/DATA-MODEL-N with the first free N."""
    model = config.model
    if model is None and config.pretrained:
        model = "pretrained"
    elif model is None:
        # a model chosen from the data has no name
        model = "vit" if leaves_model_open(config) else DEFAULT_MODEL
    number = 1
    while True:
        root = Path("runs") / f"{_file_name(config.data)}-{_file_name(model)}-{number}"
        try:
            root.mkdir(parents=True)
        except FileExistsError:  # perhaps created by a process started at the same moment
            number += 1
        else:
            return root


def _file_name(name: str) -> str:
    """Turn the name of data or of a model into a part of a file name."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name).strip("-.") or "data"


def first_free(resolved: Path) -> Path:
    """Return FOLDER.old-N with the first free N."""
    paths = (resolved.with_name(f"{resolved.name}.old-{number}") for number in count(1))
    return next(path for path in paths if not path.exists())

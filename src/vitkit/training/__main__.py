"""`python -m vitkit.training FOLDER`: one process of a run that `--devices N` started."""

import sys
from pathlib import Path

from vitkit.process import keep_freed_memory
from vitkit.training.launch import serve
from vitkit.training.train import train

if __name__ == "__main__":
    keep_freed_memory()  # in each process: the launcher's own setting is not inherited
    sys.exit(serve(Path(sys.argv[1]), train))

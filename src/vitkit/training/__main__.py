"""`python -m vitkit.training FOLDER`: one process of a run that `--devices N` started."""

import sys

from vitkit.training.launch import serve
from vitkit.training.session import train

if __name__ == "__main__":
    sys.exit(serve(sys.argv, train))

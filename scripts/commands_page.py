"""Write docs/commands.md from the help of every verb: `python scripts/commands_page.py`."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

from vitkit import cli

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
WIDTH = 88
INTRODUCTION = """# Commands

The help of every verb, as `vitkit VERB --help-all` prints it (`vitkit train --help` is shorter:
the flags used most). Exit codes: 0 done; 2 something in the
command, the settings or the data is wrong; 3 the loss is not finite; 130 or 143 stopped by a signal
after saving; 1 an error in vitkit. With `--debug` an error shows its traceback.

`scripts/commands_page.py` writes this page.
"""


def page() -> str:
    """Return the whole page."""
    verbs = (f"\n## vitkit {verb}\n\n```text\n{help_of(verb)}\n```\n" for verb in cli.VERBS)
    return f"{INTRODUCTION}{''.join(verbs)}"


def help_of(verb: str) -> str:
    """Return what `vitkit VERB --help-all` prints, for `WIDTH` columns."""
    stream = io.StringIO()
    columns = patch.dict(os.environ, COLUMNS=str(WIDTH))
    with columns, redirect_stdout(stream), suppress(SystemExit):
        cli.run([verb, "--help-all"])
    lines = (line.rstrip() for line in stream.getvalue().strip().splitlines())
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

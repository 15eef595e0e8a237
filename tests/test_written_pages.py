"""Pages of docs/ that scripts write from the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import vitkit

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("script", ["settings_page", "commands_page"])
def test_a_page_is_what_its_script_writes(script):
    found = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))
    assert found["page"]() == found["PAGE"].read_text(encoding="utf-8"), (
        f"run scripts/{script}.py: {found['PAGE'].name} is not what it writes"
    )


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto\w+:: vitkit\.(\w+)", page, flags=re.MULTILINE)
    assert sorted(named) == sorted(vitkit.__all__)

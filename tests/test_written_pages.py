"""Pages of docs/ that scripts write from the code."""

import inspect
import re
import runpy
from pathlib import Path

import pytest

import vitkit

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("script", ["settings_page", "commands_page", "names_page"])
def test_a_page_is_what_its_script_writes(script, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    found = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))
    assert found["page"]() == found["PAGE"].read_text(encoding="utf-8"), (
        f"run scripts/{script}.py: {found['PAGE'].name} is not what it writes"
    )


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto\w+:: vitkit\.(\w+)", page, flags=re.MULTILINE)
    assert sorted(named) == sorted(vitkit.__all__)


PUBLIC_CLASSES = [name for name in vitkit.__all__ if inspect.isclass(getattr(vitkit, name))]
METHODS = (classmethod, staticmethod, property)


@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_the_reference_has_or_excludes_every_public_method(name):
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^\.\. auto\w+:: vitkit\.{name}\n((?: {{3}}.*\n)*)", page, flags=re.MULTILINE
    )
    assert found is not None
    options = found[1]
    named = set(re.findall(r"\w+", options))
    public = {
        key
        for key, value in vars(getattr(vitkit, name)).items()
        if (inspect.isfunction(value) or isinstance(value, METHODS))
        and (key == "__call__" or not key.startswith("_"))
        and inspect.getdoc(value)
    }
    if re.search(r":members:$", options, flags=re.MULTILINE):
        public &= {"__call__"}
    assert public <= named

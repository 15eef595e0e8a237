"""`TrainSettings`, the typed keywords of `vitkit.train`, agrees with `TrainConfig`."""

import dataclasses
import runpy
import subprocess
import sys
from pathlib import Path

import vitkit

ROOT = Path(vitkit.__file__).parents[2]


def test_the_keywords_are_those_of_the_settings():
    keywords = set(vitkit.TrainSettings.__annotations__)
    fields = {field.name for field in dataclasses.fields(vitkit.TrainConfig)}
    # parameters of their own, and a fact that a run writes for itself
    assert keywords | {"data", "recipe", "start"} == fields
    assert not keywords & {"data", "recipe", "start"}
    assert not vitkit.TrainSettings.__total__


def test_names_types_and_descriptions_are_what_the_script_writes():
    found = runpy.run_path(str(ROOT / "scripts" / "train_settings.py"))
    assert found["page"]() == found["PAGE"].read_text(encoding="utf-8"), (
        "run scripts/train_settings.py: src/vitkit/train_settings.py is not what it writes"
    )


def test_they_are_imported_without_any_library():
    code = (
        "import sys, vitkit; vitkit.TrainSettings; "
        "print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

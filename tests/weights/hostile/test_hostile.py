"""Hostile files of weights: a line that names the file, no code run, no more memory than they have.

Every file is opened in a process of its own under an audit hook; see `watch.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weights.hostile import archives, documents, pickles, safetensors_files
from weights.hostile.watch import Case

TESTS = Path(__file__).parents[2]
DOORS = ("load", "inspect", "command")
TRUSTED = ("trusted load", "trusted inspect")
GROWTH = 300_000_000


def put(folder: Path, cases: Mapping[str, Case]) -> dict[str, Path]:
    """The files of each case in a folder of its own; the path of the one to open."""
    places = {}
    for number, (name, case) in enumerate(cases.items()):
        place = folder / f"case-{number:03}"
        place.mkdir()
        for file, content in case.files.items():
            (place / file).write_bytes(content)
        places[name] = place / next(iter(case.files))
    return places


def watched(places: Mapping[str, Path], doors: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What each file did; whole files are opened first, so that all modules are imported."""
    folder = next(iter(places.values())).parent.parent
    whole = {"w.safetensors": safetensors_files.whole(), "w.npz": archives.with_array("x", None),
             "own.safetensors": safetensors_files.own(), "w.pth": pickles.plain()}  # fmt: skip
    if doors == ("unsafe",):
        whole = {"w.pth": whole["w.pth"]}
    for name, content in whole.items():
        (folder / name).write_bytes(content)
    lines = [("", str(folder / name)) for name in whole]
    lines += [(name, str(path)) for name, path in places.items()]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "weights.hostile.watch", *doors],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stderr == ""
    return {found["case"]: found for found in map(json.loads, result.stdout.splitlines())}


def faults(cases: Mapping[str, Case], path: Path, found: dict[str, Any]) -> list[str]:
    """What is wrong with how one file was met; nothing, if all is well."""
    case = cases[found["case"]]
    if "died" in found:
        return [f"died of {found['died']}"]
    wrong = [f"event {event}" for event in found["events"]]
    size = sum(len(content) for content in case.files.values())
    if found["growth"] > 2 * size + GROWTH:
        wrong.append(f"grew by {found['growth']:,} bytes for {size:,}")
    for door, (kind, said) in found["outcomes"].items():
        reads_numbers = "load" in door
        if kind == "accepted" and (case.accepted or (case.unseen and not reads_numbers)):
            continue
        line = said.removesuffix("\n") if door == "command" else said
        if kind != "refused":
            wrong.append(f"{door}: {kind} {said[:300]}")
        elif not line.isprintable() or str(path.parent) not in line or len(line) > 2100:
            wrong.append(f"{door}: no line that names the file: {line[:300]!r}")
        elif (reads_numbers or not case.unseen) and not re.search(case.said, line):
            wrong.append(f"{door}: says {line[:300]!r}, not {case.said!r}")
    return wrong


def all_well(cases: Mapping[str, Case], folder: Path, doors: tuple[str, ...]) -> None:
    places = put(folder, cases)
    results = watched(places, doors)
    assert list(results) == list(cases)
    wrong = {name: found for name, result in results.items()
             if (found := faults(cases, places[name], result))}  # fmt: skip
    assert not wrong, "\n".join(f"{name}: {'; '.join(lines)}" for name, lines in wrong.items())


def test_safetensors_files(tmp_path):
    groups = (safetensors_files.containers(), safetensors_files.oddities(),
              safetensors_files.mismatches(), safetensors_files.descriptions())  # fmt: skip
    cases = {name: case for group in groups for name, case in group.items()}
    assert len(cases) == sum(map(len, groups)) >= 38
    all_well(cases, tmp_path, DOORS)


def test_archives(tmp_path):
    cases = {**archives.broken(), **archives.mismatches()}
    all_well(cases, tmp_path, DOORS)


def test_documents(tmp_path):
    all_well(documents.cases(), tmp_path, DOORS)


def test_pickles_are_refused_without_trust(tmp_path):
    canaries = tmp_path / "canaries"
    canaries.mkdir()
    every, renamed = pickles.cases(canaries), pickles.codes(canaries)
    assert len(every) >= 25
    cases = {n: case._replace(said="a pickle, which can run code") for n, case in every.items()}
    cases |= {
        f"{name}, renamed": Case({"w.safetensors": content}, "not a whole safetensors file")
        for name, content in renamed.items()
    }
    all_well(cases, tmp_path, ("load",))
    assert not list(canaries.iterdir())


def test_pickles_run_no_code_with_trust(tmp_path):
    canaries = tmp_path / "canaries"
    canaries.mkdir()
    all_well(pickles.cases(canaries), tmp_path, TRUSTED)
    assert not list(canaries.iterdir())


def test_the_watch_sees_what_a_careless_reader_lets_happen(tmp_path):
    canaries = tmp_path / "canaries"
    canaries.mkdir()
    names = pickles.codes(canaries)
    cases = {name: case for name, case in pickles.cases(canaries).items() if name in names}
    results = watched(put(tmp_path, cases), ("unsafe",))
    unseen = [name for name, found in results.items() if not found.get("events")]
    assert not unseen
    assert {place.name for place in canaries.iterdir()} == set(names)


def test_the_command_says_it_too(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(safetensors_files.whole()[:-1])
    result = subprocess.run(
        [sys.executable, "-m", "vitkit", "inspect", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"vitkit: {path}: not a whole safetensors file")
    assert result.stderr.count("\n") == 1

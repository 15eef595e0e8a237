"""Hostile files of weights: a line that names the file, no code run, no more memory than they have.

Every file is opened in a process of its own under an audit hook; see `watch.py`. They are forks of
one process for all the tests, because importing torch takes longest.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from weights.hostile import archives, documents, pickles, safetensors_files
from weights.hostile.watch import Case

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


class Watch:
    """The process that watches; what it writes on stderr is kept in a file."""

    def __init__(self, folder: Path, whole: Mapping[str, bytes], doors: tuple[str, ...]) -> None:
        self.complaints = folder / "stderr.txt"
        with self.complaints.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "weights.hostile.watch"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                     "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        for name, content in whole.items():
            (folder / name).write_bytes(content)
            self.ask("", folder / name, doors)

    def ask(self, case: str, path: Path, doors: tuple[str, ...]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([case, str(path), doors]) + "\n")
        self.process.stdin.flush()

    def outcomes(
        self, places: Mapping[str, Path], doors: tuple[str, ...]
    ) -> dict[str, dict[str, Any]]:
        """What each file did."""
        results = {}
        for name, path in places.items():
            self.ask(name, path, doors)
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, self.complaints.read_text()[-2000:]
            results[name] = json.loads(line)
        assert self.complaints.read_text() == ""
        return results

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """All modules are imported once it has opened whole files of each kind."""
    whole = {"w.safetensors": safetensors_files.whole(), "w.npz": archives.with_array("x", None),
             "own.safetensors": safetensors_files.own(), "w.pth": pickles.plain()}  # fmt: skip
    watch = Watch(tmp_path_factory.mktemp("watch"), whole, DOORS + TRUSTED)
    yield watch
    watch.end()


@pytest.fixture
def unsafe_watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """One of its own, so that nothing an unsafe reader does counts as harmless to the others."""
    watch = Watch(tmp_path_factory.mktemp("unsafe"), {"w.pth": pickles.plain()}, ("unsafe",))
    yield watch
    watch.end()


def faults(cases: Mapping[str, Case], path: Path, found: dict[str, Any]) -> list[str]:
    """What is wrong with how one file was met; nothing, if all is well."""
    case = cases[found["case"]]
    if "died" in found:
        return [f"died of {found['died']}"]
    wrong = [f"event {event}" for event in found["events"]]
    size = sum(len(content) for content in case.files.values())
    if found["growth"] > 2 * size + GROWTH:
        wrong.append(f"grew by {found['growth']:,} bytes for {size:,}")
    for door, (kind, message) in found["outcomes"].items():
        reads_numbers = "load" in door
        if kind == "accepted" and (case.accepted or (case.unseen and not reads_numbers)):
            continue
        line = message.removesuffix("\n") if door == "command" else message
        if kind != "refused":
            wrong.append(f"{door}: {kind} {message[:300]}")
        elif not line.isprintable() or str(path.parent) not in line or len(line) > 2100:
            wrong.append(f"{door}: no line that names the file: {line[:300]!r}")
        elif (reads_numbers or not case.unseen) and not re.search(case.message, line):
            wrong.append(f"{door}: says {line[:300]!r}, not {case.message!r}")
    return wrong


def all_well(watch: Watch, cases: Mapping[str, Case], folder: Path, doors: tuple[str, ...]) -> None:
    places = put(folder, cases)
    results = watch.outcomes(places, doors)
    assert list(results) == list(cases)
    wrong = {name: found for name, result in results.items()
             if (found := faults(cases, places[name], result))}  # fmt: skip
    assert not wrong, "\n".join(f"{name}: {'; '.join(lines)}" for name, lines in wrong.items())


def test_safetensors_files(watch, tmp_path):
    groups = (safetensors_files.containers(), safetensors_files.oddities(),
              safetensors_files.mismatches(), safetensors_files.descriptions())  # fmt: skip
    cases = {name: case for group in groups for name, case in group.items()}
    assert len(cases) == sum(map(len, groups)) >= 38
    all_well(watch, cases, tmp_path, DOORS)


def test_archives(watch, tmp_path):
    cases = {**archives.broken(), **archives.mismatches()}
    all_well(watch, cases, tmp_path, DOORS)


def test_documents(watch, tmp_path):
    all_well(watch, documents.cases(), tmp_path, DOORS)


def test_pickles_are_refused_without_trust(watch, tmp_path):
    canaries = tmp_path / "canaries"
    canaries.mkdir()
    every, renamed = pickles.cases(canaries), pickles.codes(canaries)
    assert len(every) >= 25
    cases = {n: case._replace(message="is a pickle, and loading") for n, case in every.items()}
    cases |= {
        f"{name}, renamed": Case({"w.safetensors": content}, "not a (complete )?safetensors file")
        for name, content in renamed.items()
    }
    all_well(watch, cases, tmp_path, ("load",))
    assert not list(canaries.iterdir())


def test_pickles_run_no_code_with_trust(watch, tmp_path):
    canaries = tmp_path / "canaries"
    canaries.mkdir()
    all_well(watch, pickles.cases(canaries), tmp_path, TRUSTED)
    assert not list(canaries.iterdir())


def test_the_watch_sees_what_a_careless_reader_lets_happen(unsafe_watch, tmp_path):
    canaries = tmp_path / "canaries"
    canaries.mkdir()
    names = pickles.codes(canaries)
    cases = {name: case for name, case in pickles.cases(canaries).items() if name in names}
    results = unsafe_watch.outcomes(put(tmp_path, cases), ("unsafe",))
    unseen = [name for name, found in results.items() if not found.get("events")]
    assert not unseen
    assert {place.name for place in canaries.iterdir()} == set(names)

"""Mistakes on the command line, one a row of mistakes.tsv: each ends with one line that helps."""

import os
import re
import shlex
from pathlib import Path

import pytest
from cli.mistake_material import FAST, make_material

from vitkit import cli

TABLE = Path(__file__).with_suffix("").with_name("mistakes.tsv")


def rows() -> list[list[str]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        make_material(root)
    return root


def names_in(root: Path) -> list[str]:
    return sorted(
        f"{place}/{one}" for place, *both in os.walk(root) for one in (*both[0], *both[1])
    )


@pytest.mark.parametrize(("command", "code", "pattern"), rows(), ids=lambda cell: cell[:60])
def test_a_mistake_ends_with_one_line(command, code, pattern, material, monkeypatch, capsys):
    monkeypatch.chdir(material)
    before = names_in(material)
    assert cli.run(shlex.split(command.replace("FAST", FAST))) == int(code)
    message = capsys.readouterr().err
    assert message.startswith("vitkit: ")
    assert message.count("\n") == 1
    assert "Traceback" not in message
    assert re.search(pattern, message)
    assert names_in(material) == before, "it leaves nothing behind"


def test_there_are_200_of_them():
    commands = [command for command, *_ in rows()]
    assert len(set(commands)) == len(commands) >= 200

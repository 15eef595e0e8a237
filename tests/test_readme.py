"""The README's Python and commands run one after the other; only training is made shorter."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from vitkit import cli

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(600)
def test_the_readme_s_sessions_run(tmp_path, monkeypatch, capsys):
    text = (ROOT / "README.md").read_text()
    sessions = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    shorter = sessions.replace('recipe="digits", output', 'recipe="digits", epochs=8, output')
    shorter = shorter.replace("> 0.95", "> 0.5")
    assert shorter.count("epochs=8") == 1
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest(shorter, {}, "README.md", "README.md", 0)
    runner = doctest.DocTestRunner(verbose=False)
    failures: list[str] = []
    results = runner.run(test, out=failures.append)
    assert results.attempted >= 14
    assert results.failed == 0, "".join(failures)
    commands = [shlex.split(line) for line in re.findall(r"^\$ vitkit (.+)", text, re.MULTILINE)]
    assert [words[0] for words in commands] == ["train", "eval", "predict", "explain"]
    commands[0] += ["--epochs", "3", "--quiet"]
    assert [cli.run(words) for words in commands] == [0] * 4  # in the same folder, right after
    out = capsys.readouterr().out
    assert re.search(r"^docs/images/seven\.png: \d \d+\.\d % -> explanations/", out, re.MULTILINE)


DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS = "docs|tests|benchmarks|examples|scripts|src"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_file_a_document_names_is_there(document):
    text = document.read_text(encoding="utf-8")
    for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+|\w+/[\w/]+\.py)`", text):
        # modules may be named without src/vitkit
        assert any((root / name).exists() for root in (ROOT, ROOT / "src" / "vitkit")), name

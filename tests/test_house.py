"""Limits that can be counted, calls that no module may make, and one class for each equation."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from torch import nn

import vitkit
import vitkit.models

PACKAGE = Path(vitkit.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_model_is_read_in_one_sitting():
    assert sum(lines(path) for path in (PACKAGE / "models").glob("*.py")) < 2150


LONGER = {"engines/choose.py": 607}
"""Files of more than 600 lines."""


def test_files_and_functions_are_short():
    for path in FILES:
        assert lines(path) <= LONGER.get(str(path.relative_to(PACKAGE)), 600), path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                first = node.body[0]
                documented = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
                assert node.end_lineno - node.lineno - documented < 60, f"{path}: {node.name}"


DANGEROUS = re.compile(
    r"\btorch\.load\(|\bu?n?pickle\.|import pickle|allow_pickle=True|yaml\.(unsafe_)?load\(|"
    r"(?<![.\w])(eval|exec|compile)\(|shell=True|\bos\.system\(|extractall\(|weights_only=False"
)
"""Calls that read or run what somebody else wrote; `READER` makes one, restricted by torch."""
READER = Path("weights/pickles.py")
ANSWERS = (Path("process.py"), Path("training/launch.py"))
"""Files that read the answers of processes that vitkit has started itself."""


def dangers(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()
            if DANGEROUS.search(line)]  # fmt: skip


def test_one_file_alone_reads_pickles_and_none_runs_text():
    found = {path.relative_to(PACKAGE): dangers(path) for path in FILES}
    assert found.pop(READER) == ["content = torch.load("]
    assert all("pickle" in line for inside in ANSWERS for line in found.pop(inside))
    assert {inside: lines for inside, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    ["torch.load(path)", "import pickle", "pickle.loads(x)", "np.load(x, allow_pickle=True)",
     "yaml.load(x)", "eval(text)", "exec(text)", "run(x, shell=True)", "tar.extractall()"],
)  # fmt: skip
def test_every_dangerous_call_is_found(line, tmp_path):
    (tmp_path / "made.py").write_text(f"made = {line}\nmodel.eval()\n", encoding="utf-8")
    assert len(dangers(tmp_path / "made.py")) == 1


def claims() -> dict[str, list[str]]:
    """Equation number -> classes of `models` whose docstring says that they are it."""
    found: dict[str, list[str]] = {}
    for module in pkgutil.iter_modules(vitkit.models.__path__, "vitkit.models."):
        for name, made in vars(importlib.import_module(module.name)).items():
            if (
                inspect.isclass(made)
                and issubclass(made, nn.Module)
                and (made.__module__ == module.name)
            ):
                text = made.__doc__ or ""
                numbers = re.findall(r"^Eq\. (\d):|  Eq\. (\d)$", text, flags=re.MULTILINE)
                for first, second in numbers:
                    found.setdefault(first or second, []).append(name)
    return found


def test_each_equation_has_one_class():
    assert claims() == {"1": ["Embedding"], "2": ["EncoderBlock"], "3": ["EncoderBlock"],
                        "4": ["Readout"]}  # fmt: skip

"""The limits of the structure, measured by `scripts/measure_code.py`."""

import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from long_files import LONGEST
from PIL import Image
from torch.nn import functional

import vitkit
from vitkit import TrainConfig
from vitkit.models.attention import KERNELS
from vitkit.training.config.meaning import meanings

ROOT = Path(vitkit.__file__).parent
sys.path.insert(0, str(ROOT.parents[1] / "scripts"))

from measure_code import Code, figures, strays  # noqa: E402

LARGEST = {
    "files": 215, "lines": 51_000, "tokens of code": 265_000, "imports, % of lines of code": 9.5,
    "raise statements": 620, "longest line": 100,
}  # fmt: skip
"""What a reader can hold in the head."""
LARGEST_CLOSURES = {
    "training.trainer": 35, "training.step": 34, "data.loading.loader": 14,
    "weights.checkpoint": 21,
}  # fmt: skip
"""Modules that importing one of these may bring along, itself included."""
SHARED_NAMES = {"describe", "run", "train"}
"""Public names that two modules have: the verbs' protocol, and a function beside its inner one."""
MOST_IMPORTS = {
    "training.plan": 33, "training.train": 27, "training.auto": 24, "training.run": 21,
    "cli.explain": 21,
}  # fmt: skip
"""Modules that wire others together; any other imports at most 20 of ours."""


@pytest.fixture(scope="module")
def code() -> Code:
    return Code(ROOT)


@pytest.fixture(scope="module")
def found(code) -> dict[str, object]:
    return dict(figures(code))


@pytest.mark.parametrize("name", LARGEST)
def test_the_code_stays_small(found, name):
    assert found[name] <= LARGEST[name]


def test_a_folder_has_at_most_twenty_modules(code):
    assert {str(folder): count for folder, count in code.folders.items() if count > 20} == {}


def test_a_module_imports_few_of_ours(code):
    imports = {name.removeprefix("vitkit."): len(found) for name, found in code.imports.items()}
    del imports["vitkit"]  # the public names
    assert {
        name: count for name, count in imports.items() if count > MOST_IMPORTS.get(name, 20)
    } == {}


@pytest.mark.parametrize("name", LARGEST_CLOSURES)
def test_little_comes_with_what_is_read_alone(code, name):
    assert len(code.behind(f"vitkit.{name}")) <= LARGEST_CLOSURES[name]


@pytest.mark.parametrize("name", ["weights.load", "prediction.predictor"])
def test_reading_a_checkpoint_imports_no_writer(code, name):
    behind = code.behind(f"vitkit.{name}")
    assert "vitkit.weights.recognise_format" in behind
    assert not {"vitkit.weights.publish", "vitkit.weights.write"} & behind


def test_the_longest_chain_of_imports(code):
    assert len(code.longest_chain) <= 28


def test_public_names_are_unique(code):
    twice = {name for name, where in code.public_names.items() if len(where) > 1}
    assert twice <= SHARED_NAMES


def test_docstrings_are_sentences_in_words_of_the_field(code):
    assert strays(code) == []


def test_the_formatter_is_rarely_switched_off(code):
    assert code.count("# fmt: skip") <= 22


def test_lines_are_not_bought_by_density(found):
    assert 41 <= found["all three per 1,000 lines of code"] <= 50
    assert 32 <= found["words a public docstring"] <= 39.5


TRACED = """
import inspect, os, sys, torch, vitkit
from vitkit.cli import run
ROOT = os.path.dirname(vitkit.__file__)
entered = set()
def trace(frame, event, argument):
    path = frame.f_code.co_filename
    if path.startswith(ROOT) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function
        entered.add(path)
"""
FIRST_STEP = (
    TRACED
    + """
class Stop(BaseException): ...
def stop(*given, **settings):
    raise Stop
torch.optim.Optimizer.__init__ = stop
sys.settrace(trace)
try:
    run(["train", "digits", "--lr", "0.001", "--epochs", "1"])
except Stop:
    sys.settrace(None)
print(len(entered), sum(name.startswith("vitkit") for name in sys.modules))
"""
)
LOADED = (
    TRACED
    + """
load = vitkit.load  # with its imports
sys.settrace(trace)
load("model.safetensors")
sys.settrace(None)
print(len(entered))
"""
)
BROUGHT = """
import sys
from vitkit.cli import run
assert run(["predict", "model.safetensors", "image.png", "--engine", "torch"]) == 0
print(sum(name.startswith("vitkit") for name in sys.modules))
"""


def in_child(code: str, folder: Path) -> list[int]:
    """Run code in a folder and return the numbers in its last line."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.splitlines()[-1].split()]


def test_the_way_to_the_first_step_is_short(tmp_path):
    entered, modules = in_child(FIRST_STEP, tmp_path)
    assert entered <= 60
    assert modules <= 140


def save_model(folder: Path) -> None:
    model = vitkit.create_model("vit_tiny_patch16_224", depth=1, num_classes=2, image_size=32)
    vitkit.save(folder / "model.safetensors", model, classes=["a", "b"],
                preprocess=vitkit.Preprocess(image_size=32))  # fmt: skip


def test_the_way_to_a_loaded_model_is_short(tmp_path):
    save_model(tmp_path)
    (entered,) = in_child(LOADED, tmp_path)
    assert entered <= 12


def test_a_prediction_brings_few_modules(tmp_path):
    save_model(tmp_path)
    Image.new("RGB", (32, 32)).save(tmp_path / "image.png")
    (modules,) = in_child(BROUGHT, tmp_path)
    assert modules <= 90


def test_every_setting_has_its_facts():
    facts = meanings(TrainConfig)
    assert set(facts) == set(TrainConfig(data="digits").to_json())
    assert all(fact is not None for fact in facts.values())


def test_long_test_files_are_there():
    names = {path.stem for path in Path(__file__).parent.rglob("test_*.py")}
    assert names.issuperset(LONGEST)


def test_a_step_is_read_in_eight_frames(tmp_path, monkeypatch):
    """From `train.py` to the attention kernel."""
    found: list[list[str]] = []

    def kernel(*inputs: object) -> object:
        stack = [frame for frame, _ in traceback.walk_stack(sys._getframe())]  # the innermost first
        ours = [
            f.f_code for f in reversed(stack) if Path(f.f_code.co_filename).is_relative_to(ROOT)
        ]
        found.append([f"{Path(code.co_filename).name}:{code.co_name}" for code in ours])
        return functional.scaled_dot_product_attention(*inputs)

    monkeypatch.setitem(KERNELS, "fused", kernel)
    vitkit.train(
        "digits", recipe="digits", max_steps=1, attention_kernel="fused", amp="off",
        output=tmp_path / "run", quiet=True, report=False, plots=False,
    )  # fmt: skip
    step = next(frames for frames in found if "trainer.py:run" in frames)
    own = step[step.index("trainer.py:run") :]
    assert own[-1] == "attention.py:forward"
    assert len(own) <= 8, own

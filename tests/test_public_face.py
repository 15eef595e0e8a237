"""The public names, that importing is silent and light, and that the floors hold."""

import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import vitkit
from vitkit import cli

PUBLIC = [
    "MLP", "Artefacts", "Callback", "Checkpoint", "CheckpointError", "Comparison",
    "ConversionReport", "CrossAttention", "DataError", "Dataset", "DeviceError",
    "DistillWrapper", "Encoder", "EncoderBlock", "EngineOptions", "Evaluation", "Explanation",
    "ExportReport", "Faithfulness", "FaithfulnessReport", "FeatureMaps", "Features",
    "ImageError", "Inspection", "Interrupted", "LearningCurves", "LoaderError",
    "MissingExtraError", "ModelExplanation", "MultiHeadSelfAttention", "NonFiniteError",
    "Objective", "OutputError", "PatchEmbedding", "Prediction", "Predictor", "Preprocess",
    "Record", "SettingError", "ShapeError", "SpecError", "TrainConfig", "TrainResult",
    "TrainSettings", "Trainer", "TrainingStep", "Transformer", "UserCodeError", "UserError",
    "ViT", "ViTSpec", "VitkitError", "adapt", "check", "checkpoint_gradients", "compare",
    "convert", "create_model", "embed", "evaluate", "explain", "explain_model", "export",
    "faithfulness_report", "find_artefacts", "find_images", "formats", "freeze", "inspect",
    "list_models", "load", "open_dataset", "optimized", "parameter_groups",
    "plot_attention_sheet", "plot_explanations", "report", "resized", "save",
    "scaled_dot_product_attention", "show_batch", "summary", "train", "training_transform",
]  # fmt: skip


def test_the_public_names_are_these():
    assert sorted(vitkit.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(vitkit))
    for name in PUBLIC:
        assert getattr(vitkit, name).__doc__, name
    assert len(dir(vitkit)) == len(set(dir(vitkit)))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = vitkit.trian


def test_no_submodule_hides_a_public_function():
    """Importing `vitkit.x` sets the attribute `x`: no room may bear a public function's name."""
    for module in pkgutil.walk_packages(vitkit.__path__, "vitkit."):
        importlib.import_module(module.name)
    for name in PUBLIC:
        assert callable(getattr(vitkit, name)), name


def in_child(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def test_importing_is_silent_and_brings_no_heavy_library():
    code = (
        "import sys, vitkit, vitkit.models.presets\n"
        "vitkit.load\n"
        "heavy = {'matplotlib', 'tensorboard', 'kornia', 'torchvision',\n"
        "         'huggingface_hub', 'torch._dynamo'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert in_child(code) == "[]\n"
    assert in_child("import sys, vitkit; print('torch' in sys.modules)") == "False\n"


FORKING = """
import importlib, io, json, os, sys, warnings

warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # of fork
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    arguments, modules = json.loads(line)
    before = sorted({*modules} & {*sys.modules})
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        from vitkit.cli import run

        sys.stdout = sys.stderr = io.StringIO()
        try:
            code = run(arguments)
        except SystemExit as end:  # --help ends so
            code = end.code
        os.write(into, json.dumps([code, sorted({*modules} & {*sys.modules}), before]).encode())
        os._exit(0)
    os.close(into)
    with open(out) as pipe:
        print(pipe.read(), flush=True)
    os.waitpid(child, 0)
"""


class Fresh:
    """A process that has imported a few modules alone, and runs each command in a fork of itself.

    A fork has what a new process would have after these imports, which take longest.
    """

    def __init__(self, *modules: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", FORKING, *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def imported(self, arguments: list[str], *modules: str) -> tuple[int, list[str]]:
        """Run one command; return its exit code and which of these modules it has imported."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([arguments, modules]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line.strip():
            raise AssertionError(self.process.communicate()[1])
        exit_code, names, before = json.loads(line)
        assert before == [], "imported by the modules that every command may have"
        return exit_code, names

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def without_torch() -> Iterator[Fresh]:
    """Commands in forks of a process that knows how to read a command line, and no torch."""
    fresh = Fresh("vitkit.cli", "pydantic", "rich")
    yield fresh
    fresh.end()


@pytest.fixture(scope="module")
def with_torch() -> Iterator[Fresh]:
    fresh = Fresh("vitkit.cli", "pydantic", "rich", "torch")
    yield fresh
    fresh.end()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--help"], 0), (["models"], 0), (["models", "vit_tiny*", "--pretrained"], 0),
     (["models", "no-such-model"], 2), (["no-such-verb"], 2), (["predict"], 2),
     (["predict", "model.safetensors", "no-such.png"], 2),
     (["embed", "model.safetensors", "no-such.png", "--out", "f.npz"], 2),
     (["check", "no-such-folder"], 2), (["summary", "no-such-model"], 2),
     (["train", "digits", "--epochs", "0"], 2), (["train", "digits", "--learning-rate", "1"], 2),
     (["help"], 0), (["completion", "bash"], 0), (["eval", "model.safetensors"], 2),
     (["explain", "model.safetensors", "no-such.png"], 2),
     (["convert", "model.safetensors", "out", "--to", "tim"], 2),
     *[([verb, "--help"], 0) for verb in cli.VERBS]],
)  # fmt: skip
def test_what_needs_no_tensor_needs_no_torch(without_torch, arguments, expected):
    assert without_torch.imported(arguments, "torch") == (expected, [])


@pytest.mark.parametrize("verb", ["predict", "embed", "explain", "eval", "inspect", "convert"])
def test_an_error_of_the_user_waits_for_no_library_that_it_does_not_need(with_torch, verb):
    arguments = {
        "embed": ["--out", "features.npz"],
        "convert": ["--to", "timm"],
        "inspect": [],
    }.get(verb, [])
    operand = {"inspect": [], "eval": ["digits"], "convert": ["out"]}.get(verb, [__file__])
    heavy = ("torch._dynamo", "kornia", "matplotlib", "tensorboard", "torchvision")
    command = [verb, "no-such.safetensors", *operand, *arguments]
    assert with_torch.imported(command, *heavy) == (2, [])


def test_a_wrong_folder_of_images_does_not_wait_for_the_training_loop(with_torch):
    heavy = ("torch._dynamo", "kornia", "matplotlib", "torchvision")
    assert with_torch.imported(["train", "no-such-folder"], *heavy) == (2, [])

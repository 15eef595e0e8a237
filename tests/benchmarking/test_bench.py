"""`vitkit bench` on a tiny model: equal logits first, then the table, the JSON and the figure."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_checkpoint import save_noisy

from vitkit import cli
from vitkit.benchmarking.contender_process.matrix_peak import matrix_peak
from vitkit.benchmarking.contender_process.worker import ContenderProcess, answer_request
from vitkit.benchmarking.contenders import PEERS, choose_contenders
from vitkit.benchmarking.plot import draw_benchmark
from vitkit.benchmarking.processes import ContenderError, Worker
from vitkit.benchmarking.result import BenchmarkResult, BenchmarkRow, TaskResult
from vitkit.benchmarking.table import format_tables
from vitkit.errors import MissingExtraError, SettingError
from vitkit.plots.figure import encode_png

QUICK = ["--engines", "torch", "--rounds", "2", "--seconds", "0.01", "--threads", "1",
         "--batch-size", "2"]  # fmt: skip


class InThisProcess:
    """A contender without a process of its own, whose start would take seconds."""

    def __init__(self, threads: int) -> None:
        self.threads, self.process = threads, ContenderProcess()

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **request: object) -> dict:
        if do == "peak":
            peak = {"float32": 1e13, "bfloat16": 2e13}[request["precision"]]
            return {"products": {"torch": peak, "numpy": 1e12}}
        sent = json.loads(json.dumps({"do": do, **request}))
        reply = json.loads(json.dumps(answer_request(self.process, sent)))
        if "refused" in reply:
            raise ContenderError(reply["refused"])
        return reply

    def close(self) -> None:
        pass


class EngineThatEnds(InThisProcess):
    """The same, but the engine `torch` ends in its second turn."""

    def ask(self, do: str, **request: object) -> dict:
        if do == "build":
            self.left = 1 if request["kind"] == "engine" else 1_000
        elif do == "run":
            self.left -= 1
            if self.left < 0:
                raise ContenderError("its process was ended by SIGSEGV")
        return super().ask(do, **request)


class BusyAtFirst(InThisProcess):
    """The same, but other programs run while the peak is measured for the first time."""

    asked = 0

    def ask(self, do: str, **request: object) -> dict:
        reply = super().ask(do, **request)
        if do == "peak":
            BusyAtFirst.asked += 1
            if BusyAtFirst.asked == 1:
                return {"products": {"torch": 5e12, "numpy": 2e12}}
        return reply


def benched(*words: str, worker: type[InThisProcess] = InThisProcess) -> dict:
    """Run the command, with all contenders in this process, and return its JSON."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitkit.benchmarking.measure.Worker", worker)
        patch.setattr("sys.stdout", io.StringIO())
        quick = QUICK[2:] if "--engines" in words else QUICK
        assert cli.run(["bench", *words, *quick, "--json"]) == 0
        text = sys.stdout.getvalue()
    torch.set_flush_denormal(False)
    return json.loads(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A checkpoint with biases of query, key and value, which vit-pytorch lacks."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    return save_noisy(path, [*"abcdef"], std=0.3, image_size=16)


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    """The JSON of a benchmark of a checkpoint, and its figure."""
    plot = tmp_path_factory.mktemp("figures") / "new" / "speed.png"
    against = ("torchvision", "torchvision:bfloat16", "vit-pytorch")
    return benched(model, "--against", *against, "--plot", str(plot)), plot


def test_the_json_has_all_contenders_in_both_tasks(measured):
    document, _ = measured
    assert [task["task"] for task in document["tasks"]] == ["inference", "latency"]
    for task, images in zip(document["tasks"], (2, 1), strict=True):
        names = [row["contender"] for row in task["rows"]]
        assert names == ["torchvision", "torchvision bfloat16", "vitkit torch",
                         "torchvision, again"]  # fmt: skip
        assert task["batch_size"] == images
        half = task["rows"].pop(1)
        # far from float32, and equal within the bound of its own precision
        assert half["precision"] == "bfloat16"
        assert half["logits"]["difference"] > 1e-4 * max(1, half["logits"]["scale"])
        assert half["logits"]["cosine"] > 0.999
        peaks = document["matrix_peaks"]
        speed = half["images_per_second"][0] * task["operations_per_image"]
        assert half["share_of_peak"] == pytest.approx(speed / peaks["bfloat16"])
        for row in task["rows"]:
            assert row["precision"] == "float32"
            assert len(row["seconds"]) == 4  # two turns in each of two rounds
            value, low, high = row["images_per_second"]
            assert value == pytest.approx(images / np.median(row["seconds"]))
            assert low <= value <= high
            assert row["logits"]["difference"] <= 1e-4 * max(1, row["logits"]["scale"])
            assert 50 < row["peak_mb"] < 5_000
            assert 0 < row["share_of_peak"] < 1
        assert task["rows"][0]["faster"][0] == 1.0
        base, own = (np.median(row["seconds"]) for row in task["rows"][:2])
        assert task["rows"][1]["faster"][0] == pytest.approx(base / own)
    assert document["machine"]["versions"]["torchvision"]
    for precision, products in document["matrix_products"].items():
        assert document["matrix_peaks"][precision] == max(products.values())
    assert document["settings"]["threads"] == 1


def test_a_contender_with_other_logits_is_named_and_not_timed(measured):
    document, _ = measured
    for task in document["tasks"]:
        reason = task["not_timed"]["vit-pytorch"]
        assert re.match(r"not equal: its logits differ by .*; at most .* is expected", reason)
        assert "cannot store: " in reason
        assert "qkv_bias" in reason


def test_the_figure_is_written_and_not_blank(measured):
    _, plot = measured
    pixels = np.asarray(Image.open(plot).convert("RGB"))
    assert min(pixels.shape[:2]) > 300
    blue = np.array([0x00, 0x72, 0xB2])
    assert (pixels == blue).all(-1).sum() > 1_000  # vitkit's bars
    assert (pixels == 255).all(-1).mean() > 0.5


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict:
    """The JSON of training steps and loaders, of a model that was trained with random rates."""
    rates = ("position_dropout", "patch_dropout", "attention_dropout", "projection_dropout",
             "mlp_dropout", "head_dropout", "drop_path")  # fmt: skip
    path = tmp_path_factory.mktemp("random") / "model.safetensors"
    model = save_noisy(path, [*"abcdef"], std=0.3, image_size=16, **dict.fromkeys(rates, 0.5))
    loading = "vitkit.benchmarking.contender_process.image_loading"
    words = ["--against", "torchvision", "--tasks", "training", "loader"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{loading}.FEWEST_PHOTOGRAPHS", 8)
        return benched(model, *words, "--engines", "torch", "optimized", worker=BusyAtFirst)


def test_training_steps_and_loaders_are_compared_too(trained):
    training, loader = trained["tasks"]
    for task, own in ((training, "vitkit torch"), (loader, "vitkit")):
        names = [row["contender"] for row in task["rows"]]
        assert names == ["torchvision", own, "torchvision, again"]
    # with random rates the first loss would differ
    assert training["not_timed"] == {"vitkit optimized": "does not train; torch and compile do"}
    assert not loader["not_timed"]
    assert training["operations_per_image"] > 0
    assert training["rows"][1]["logits"]["difference"] < 1e-3
    assert loader["rows"][1]["logits"] is None


def test_the_larger_peak_of_before_and_after_the_tasks_counts(trained):
    assert trained["matrix_products"] == {"float32": {"torch": 1e13, "numpy": 2e12}}


def test_a_plot_of_nothing_is_not_written(model, tmp_path, capsys):
    plot = tmp_path / "speed.png"
    words = ["--against", "none", "--tasks", "training", "--engines", "optimized"]
    document = benched(model, *words, "--plot", str(plot))
    assert not document["tasks"][0]["rows"]
    assert f"no plot is written to {plot}, as nothing was measured\n" in capsys.readouterr().err
    assert not plot.exists()


def test_a_model_of_the_first_paper_is_that_of_vit_pytorch_and_one_that_ends_is_named():
    small = {"image_size": 16, "patch_size": 8, "width": 24, "depth": 2, "num_heads": 3,
             "mlp_width": 32}  # fmt: skip
    words = [f"--spec.{name.replace('_', '-')}={value}" for name, value in small.items()]
    words += ["--spec.num-classes=5", "--against", "vit-pytorch", "--tasks", "latency"]
    document = benched("vit_tiny_patch16_224", *words, worker=EngineThatEnds)
    (task,) = document["tasks"]
    assert [row["contender"] for row in task["rows"]] == ["vit-pytorch", "vit-pytorch, again"]
    assert task["not_timed"] == {"vitkit torch": "its process was ended by SIGSEGV"}
    assert "without the two norms" in task["rows"][0]["library"]


def test_products_of_matrices_are_measured(monkeypatch):
    peaks = "vitkit.benchmarking.contender_process.matrix_peak"
    monkeypatch.setattr(f"{peaks}.find_spec", lambda name: None)
    monkeypatch.setattr(f"{peaks}.SECONDS", 0.0)
    for precision, libraries in (("float32", {"torch", "numpy"}), ("bfloat16", {"torch"})):
        found = matrix_peak(precision, 1, sides=[64, 128])
        assert set(found) == libraries
        assert all(1e8 < speed < 1e14 for speed in found.values())


def made_row(name: str, seconds: float, *, precision: str = "float32") -> BenchmarkRow:
    turns = tuple(seconds * factor for factor in (0.99, 1.0, 1.01) * 4)
    ours = name.startswith("vitkit")
    return BenchmarkRow(name, ours, precision, f"{name} 1.0", turns, 8, None, 500.0, 1.0, 1.0)


def made_result(
    *rows: BenchmarkRow, again: BenchmarkRow | None = None, load: float = 0.1
) -> BenchmarkResult:
    task = TaskResult("inference", 8, rows, again, {"openvino": "ended by SIGILL"}, 35e9)
    settings = {"precision": "float32", "threads": 2, "rounds": 6}
    machine = {"processor": "A processor with a long name, 2 cores", "load_before": load}
    return BenchmarkResult("vit_base_patch16_224", settings, machine,
                           {"float32": {"torch": 400e9}, "bfloat16": {"torch": 800e9}}, (task,),
                           {"vit-pytorch": "not installed (pip install vit-pytorch)"})  # fmt: skip


def test_the_table_has_ratios_share_of_the_peak_noise_and_what_is_missing():
    result = made_result(made_row("timm", 2.0), made_row("vitkit onnxruntime", 1.0),
                         again=made_row("timm, again", 2.0))  # fmt: skip
    text = format_tables(result)
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"timm +4\.00 +1\.00 +\[.*\] +35 % +500", text)
    assert re.search(r"vitkit onnxruntime +8\.00 +2\.00 +\[1\.9\d, 2\.0\d\] +70 % +500", text)
    assert "timm beside itself: 1.00 x [0.99, 1.01]\n" in text
    folded = " ".join(text.split())
    assert "vitkit onnxruntime beside the fastest other, timm: 2.00 x [" in folded
    assert "] (both chosen by these times)" in folded
    assert "above 100 %" not in text
    note = "\n  MB: of the whole process, with conversion and earlier batches\n"
    assert note not in text
    latency = replace(result.tasks[0], task="latency", batch_size=1)
    assert note in format_tables(replace(result, tasks=(latency,)))
    assert "openvino: not timed: ended by SIGILL" in text
    assert "left out: vit-pytorch: not installed (pip install vit-pytorch)" in text
    assert "(x: times as fast as timm)" in text
    assert "busy" not in text
    slower = made_result(made_row("timm", 2.0), again=made_row("timm, again", 3.0), load=0.7)
    assert "the machine was not steady" in format_tables(slower)
    assert "the machine was busy: its load" in format_tables(slower)


def test_the_table_has_80_columns_with_the_longest_names_and_their_own_peaks(monkeypatch):
    monkeypatch.setattr("vitkit.benchmarking.contenders.find_spec", lambda name: True)
    words = [f"{name}:{one}" for name in PEERS for one in PEERS[name].precisions]
    own = ["optimized", "optimized:bfloat16", "compile", "openvino:int8", "onnxruntime:float32"]
    lineup = choose_contenders(words, own, "bfloat16")
    others = choose_contenders(["none"], own[1:2], "float32").contenders
    rows = [made_row(one.name, 0.0013, precision=one.precision)
            for one in (*others, *lineup.contenders)]  # fmt: skip
    lines = format_tables(made_result(*rows, again=made_row("again", 0.1))).splitlines()
    assert max(map(len, lines)) <= 80
    assert "(x: times as fast as vitkit optimized bfloat16)" in " ".join(lines)
    assert "  a share above 100 %: the peak was measured while" in "\n".join(lines)
    shares = {line[:28].strip(): line.split()[-3:-1] for line in lines if " 500" in line}
    assert [shares[name] for name in ("timm float32", "timm", "openvino int8")] == [
        ["53846", "%"], ["26923", "%"], ["1.01]", "-"]]  # fmt: skip


def test_the_figure_has_the_fastest_on_top():
    figure = draw_benchmark(made_result(made_row("timm", 2.0), made_row("vitkit torch", 1.0)))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["timm", "vitkit torch"]
    assert [text.get_text() for text in axes.texts] == [
        "4.00",
        "8.00 (2.00\N{MULTIPLICATION SIGN})",
    ]
    width = figure.get_size_inches()[0]
    assert width < 3.7  # inches: a column of a paper
    assert encode_png(figure).startswith(b"\x89PNG")


def test_a_process_that_ends_or_hangs_is_an_error_in_one_line(monkeypatch):
    with Worker(1) as worker:
        assert worker.ask("memory")["peak_mb"] > 1
        with pytest.raises(ContenderError, match="KeyError: 'nothing'"):
            worker.ask("nothing")
        worker._process.send_signal(signal.SIGKILL)
        with pytest.raises(ContenderError, match="ended by SIGKILL"):
            worker.ask("memory")
    monkeypatch.setattr("vitkit.benchmarking.processes.LONGEST_TURN", 0.25)
    with Worker(1) as worker:
        worker._process.send_signal(signal.SIGSTOP)
        for _ in range(2):  # and the reason stays the same
            with pytest.raises(ContenderError, match=r"no answer to 'run' in .* and was ended"):
                worker.ask("run", seconds=0.25)


def test_contenders_that_are_not_asked_for_are_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr("vitkit.benchmarking.contenders.find_spec",
                        lambda name: None if name == "vit_pytorch" else True)  # fmt: skip
    lineup = choose_contenders([], ["torch"], "bfloat16")
    names = [contender.name for contender in lineup.contenders]
    assert names[:2] == ["timm float32", "timm"]  # other precisions have a base in float32
    assert names[-1] == "vitkit torch"
    assert lineup.left_out == {"vit-pytorch": "not installed (pip install vit-pytorch)",
                               "onnxruntime": "has no bfloat16"}  # fmt: skip
    with pytest.raises(MissingExtraError, match="pip install vit-pytorch"):
        choose_contenders(["lucidrains"], ["torch"], "float32")
    with pytest.raises(SettingError, match="onnxruntime has only float32, not bfloat16"):
        choose_contenders(["onnxruntime"], ["torch"], "bfloat16")
    twice = ["torch:float32", "openvino:int8", "torch", "openvino"]
    alone = choose_contenders(["none"], twice, "float32").contenders
    assert [(one.name, one.precision) for one in alone] == [
        ("vitkit torch", "float32"),
        ("vitkit openvino int8", "int8"),
        ("vitkit openvino", "float32"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "tim"], r"--against tim: .* \(did you mean 'timm'\?\); it is one of"),
        (["--engines", "opnvino"], r"--engines opnvino: .* \(did you mean 'openvino'\?\)"),
        (
            ["--against", "timm:flot32"],
            r"--against timm:flot32: .* must be one of float32, bfloat16, int8 .*'float32'",
        ),
        (["--engines", "torch:"], "--engines torch:: the precision after the colon must be one"),
        (["--engines", "torch:int8"], "--engines: vitkit torch int8 has only float32, bfloat16"),
        (["--precision", "int8", "--against", "timm"], "--against: timm .* pass NAME:float32"),
        (["--tasks", "trainig"], r"--tasks trainig: must be one of .* 'training'"),
        (["--precision", "float16"], "--precision float16: must be one of float32"),
        (["--batch-size", "0"], "--batch-size 0: must be 1 or more"),
        (["--threads", "0"], "--threads 0: must be 1 or more"),
        (["--rounds", "1"], "--rounds 1: must be 2 or more, as an interval needs at least 2"),
        (["--against", "none", "timm"], "--against none timm: none stands alone; leave out none"),
        (["--seconds", "0"], "--seconds 0.0: must be above 0"),
        (["--img-size", "0"], "--img-size 0: must be 1 or more"),
        (["--plot", "/proc/speed.png"], "cannot write /proc/speed.png"),
        (["--plot", "speed.pdf"], "--plot speed.pdf: expected a name that ends in .png"),
        (["--tasks", "training", "--precision", "int8"], "--tasks training has no int8"),
        (["--spec.num-classes", "0"], "without a head has no logits"),
        (["--spec.wdith", "3"], "wdith"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(words, message, monkeypatch, capsys):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert cli.run(["bench", "vit_tiny_patch16_224", *words]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert len(error.splitlines()) == 1


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_engines_and_runtimes_run_in_processes_of_their_own(model, capsys):
    words = ["--against", "timm", "onnxruntime", "openvino", "openvino:int8", "--rounds", "2",
             "--seconds", "0.05", "--threads", "1"]  # fmt: skip
    assert cli.run(["bench", model, *words, "--json"]) == 0
    task = json.loads(capsys.readouterr().out)["tasks"][0]
    assert task["not_timed"] == {}
    assert {row["contender"] for row in task["rows"]} == {
        "timm", "onnxruntime", "openvino", "openvino int8", "timm, again", "vitkit torch",
        "vitkit optimized", "vitkit compile", "vitkit openvino", "vitkit onnxruntime"}  # fmt: skip


def test_the_help_names_every_contender(capsys):
    assert cli.run(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in PEERS:
        assert f" {name}" in text

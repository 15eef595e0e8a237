"""`vitkit bench MODEL|CHECKPOINT`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from tyro.conf import Positional, Suppress

from vitkit.cli.bench.measuring import WRITER, measure_model, model_fields, print_benchmark
from vitkit.cli.parsing.command import Command, describe_function
from vitkit.cli.parsing.fields import SPEC, as_flags, take_fields
from vitkit.cli.parsing.images import files_of_checkpoint
from vitkit.cli.parsing.words import read_words
from vitkit.io.results import check_outputs, png_result

FIELDS = replace(
    SPEC,
    help="a field of a model by its name, such as --spec.depth 4; a checkpoint keeps its own, but "
    "for fields that its file does not state.",
)
PLOT = png_result("a plot of a benchmark", WRITER)

EXAMPLES = (
    "vitkit bench vit_small_patch16_224  # all engines and all libraries that are installed",
    "vitkit bench runs/photos-vit-1 --against timm openvino --plot speed.png",
    "vitkit bench ViT-B/16 --against timm:float32 --engines openvino:int8 openvino",
    "vitkit bench vit_tiny_patch16_224 --tasks training loader --against timm",
)


def bench_command(
    model: Positional[str],
    *,
    against: tuple[str, ...] = (),
    engines: tuple[str, ...] = (),
    tasks: tuple[str, ...] = (),
    precision: str = "float32",
    batch_size: int = 8,
    threads: int | None = None,
    rounds: int = 7,
    seconds: float = 0.5,
    img_size: int | None = None,
    json: bool = False,
    plot: Path | None = None,
    overwrite: bool = False,
    spec: Suppress[dict[str, Any] | None] = None,
) -> None:
    """Compare the speed of a model with other libraries: same weights, same logits, same threads.

    Each contender has a process of its own. One with other logits than ours is named and not timed,
    as is one that crashes or hangs. The others take turns, in an order drawn for each round, and in
    reverse. A ratio is that of medians, with a 95 % bootstrap interval; the first contender,
    compared with itself, shows the noise. All run on the processor; for GPUs: benchmarks/gpu.sh.

    Args:
        model: a model's name (untrained weights), or a checkpoint of any known format.
        against: timm, transformers, torchvision, vit-pytorch, timm-compiled, onnxruntime and
            openvino (the bare runtimes, on timm's model), each also as NAME:PRECISION, or none;
            default timm:float32 and all that are installed. The first is the base of the ratios.
        engines: torch, optimized, compile, openvino, onnxruntime; default all that are installed.
        tasks: inference, latency (one image at a time), training and loader; default the first two.
        precision: float32, bfloat16 or int8; a name may have its own, as in openvino:int8.
        batch_size: images of a batch.
        threads: of the processor; default the cores that may be used.
        rounds: number of rounds, 2 or more; a contender has two turns in each.
        seconds: of a turn, at least.
        img_size: image size in pixels of a model by its name; a checkpoint keeps its own.
        json: print JSON, with the times of all turns, the machine and the versions.
        plot: write a figure to this .png file.
        overwrite: let --plot replace any existing file; default: only an earlier plot.
        spec: fields of `ViTSpec`.
    """
    # imported here: --help and wrong names do not wait for torch
    from vitkit.benchmarking.contenders import choose_contenders
    from vitkit.benchmarking.settings import benchmark_settings

    settings = benchmark_settings(
        precision=precision,
        batch_size=batch_size,
        threads=threads,
        rounds=rounds,
        seconds=seconds,
        tasks=tasks,
    )
    lineup = choose_contenders(against, engines, precision)
    fields = model_fields(spec, img_size)
    if plot is not None:
        files = files_of_checkpoint(model)
        check_outputs([plot], PLOT, inputs=files, overwrite=overwrite, flag="--plot")
    print_benchmark(measure_model(model, fields, lineup, settings), plot, as_json=json)


def describe(_: Sequence[str] = ()) -> Command:
    """Describe the verb."""
    return describe_function("bench", bench_command, examples=EXAMPLES, extra=[FIELDS])


def run(arguments: list[str]) -> None:
    """Parse the arguments and measure."""
    rest, spec = take_fields(read_words(describe(), arguments).ordered)
    flags = ("precision", "batch_size", "threads", "rounds", "seconds", "tasks", "img_size")
    with as_flags(*flags):
        tyro.cli(partial(bench_command, spec=spec), args=rest, prog="vitkit bench")

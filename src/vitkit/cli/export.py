"""`vitkit export CHECKPOINT OUT --to FORMAT`."""

import json as json_text
import sys
from typing import Any, Literal

from vitkit import messages, process
from vitkit.cli.images import refuse_images_first
from vitkit.cli.output import print_results

# listed here, since importing the formats imports their runtimes
ExportFormat = Literal["onnx", "openvino", "torch", "aoti"]
ExportPrecision = Literal["float32", "bfloat16", "float16"]


EXAMPLES = (
    "vitkit export runs/photos-vit-1 photos.onnx --to onnx --data photos",
    "vitkit export runs/photos-vit-1 photos.onnx --to onnx --with-preprocessing  # takes pixels",
    "vitkit export runs/photos-vit-1 a.xml --to openvino --int8 --calibrate photos",
)


def export_command(
    checkpoint: str,
    out: str,
    *,
    to: ExportFormat,
    data: str | None = None,
    split: str | None = None,
    data_root: str | None = None,
    with_preprocessing: bool = False,
    precision: ExportPrecision = "float32",
    int8: bool = False,
    calibrate: str | None = None,
    opset: int | None = None,
    max_drop: float = 0.5,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Write a checkpoint for another runtime; keep the result only if it is as good as torch.

    The file is run in a child process: its logits are compared with torch's, its accuracy on your
    images with that of vitkit eval. One that is worse than the bounds is refused, and nothing is
    left. A script without vitkit is printed.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        out: a file that ends in .onnx, .xml (OpenVINO; a .bin is written beside it) or .pt2.
        to: onnx, openvino, torch (an exported program) or aoti (machine code for this CPU).
        data: labelled images to check it on, as for train; without them, accuracy is not checked.
        split: split of the data; default val, or test if there is no val.
        data_root: the folder of named datasets; for a CSV the folder of its paths.
        with_preprocessing: resize in the graph: uint8 images of any size in, probabilities out.
        precision: precision of the numbers; OpenVINO stores float16 and computes in float32.
        int8: quantise the linear layers of the blocks, with --to openvino and --calibrate.
        calibrate: images to measure the ranges of activations on, as for train; 300 are used.
        opset: version of the operators of ONNX; default 20.
        max_drop: points of a hundred that top-1 may fall.
        overwrite: replace existing files.
        json: print JSON.
    """
    refuse_images_first("export", checkpoint, "OUT")
    # imported here: --help does not wait for torch
    with process.uncollected_imports():
        from vitkit.exporting.export import export

    images = {"data": data, "split": split, "data_root": data_root, "calibrate": calibrate}
    graph = {"precision": precision, "int8": int8, "with_preprocessing": with_preprocessing}
    rest = {"max_drop": max_drop, "opset": opset, "overwrite": overwrite}
    others: dict[str, Any] = {**images, **graph, **rest}
    report = export(checkpoint, out, to=to, **others)
    if json:
        sys.stdout.write(json_text.dumps(report.to_json(), indent=2) + "\n")
        return
    sys.stdout.write(messages.fold(f"{report}\n", messages.terminal_width()))
    sys.stdout.write(f"\nwithout vitkit:\n\n{report.script}")
    print_results(then=[("inspect", out)])

"""`vitkit convert FILE OUT --to FORMAT`, and `vitkit inspect FILE`."""

import json as json_text
import sys
from pathlib import Path
from typing import Any, Literal

from vitkit import messages, process
from vitkit.cli.output import flags, print_results, suggest
from vitkit.exporting.artefact import is_artefact

# listed here, since importing the formats imports torch
FormatName = Literal[
    "vitkit",
    "timm",
    "huggingface",
    "torchvision",
    "google",
    "jeonsworld",
    "deit",
    "dinov2",
    "lucidrains",
]
EXAMPLES = (
    "vitkit convert runs/photos-vit-1 for-timm --to timm  # a folder that timm loads",
    "vitkit convert ViT-B_16.npz vit-b16 --to huggingface  # Google's file for transformers",
    "vitkit convert net.pth net.safetensors --to vitkit --trust-pickle  # away from pickle",
    "vitkit inspect model.safetensors  # library, model, preprocessing, and how each is known",
    "vitkit inspect ViT-B_16.npz --json  # the same for a program",
    "vitkit inspect net.pth --trust-pickle --spec.num-heads 6  # state what the file does not",
)


def convert_command(
    file: str,
    out: str,
    *,
    to: FormatName,
    model: str | None = None,
    allow_lossy: bool = False,
    trust_pickle: bool = False,
    allow_partial: bool = False,
    json: bool = False,
    spec: dict[str, Any] | None = None,
    adapt: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint in another format, report every change, and verify the result.

    The library that defines the format runs the written file; if it cannot, the report says why.

    Args:
        file: weights of any known format, or a folder with them.
        out: a folder, or a file with the ending of the format; nothing is overwritten.
        to: the format to write.
        model: name of the model, for fields that the file does not state.
        allow_lossy: also make changes that approximate or lose part of the model.
        trust_pickle: load .pth, .pt and .bin files, with torch's weights_only=True.
        allow_partial: accept weights with unknown or missing tensors: leave out the unknown
            ones, initialise the missing ones at random, and list both.
        json: print JSON.
        spec: a field of the model that the file does not state, such as --spec.num-heads 6.
        adapt: change the model before it is written, by one of the fields image-size, patch-size,
            resampling, in-channels, mean, std, fit, num-classes, classes, such as
            --adapt.image-size 384 or --adapt.classes '[cat, dog]'.
    """
    # imported here: --help does not wait for torch
    with process.uncollected_imports():
        from vitkit.weights.convert import convert as convert_file

    report = convert_file(
        file,
        out,
        to=to,
        model=model,
        allow_lossy=allow_lossy,
        trust_pickle=trust_pickle,
        strict=not allow_partial,
        adapt=adapt or {},
        **(spec or {}),
    )
    if json:
        sys.stdout.write(json_text.dumps(report.to_json(), indent=2) + "\n")
        return
    sys.stdout.write(messages.fold(f"{report}\n", messages.terminal_width()))
    print_results(then=[("inspect", out)])


def inspect_command(
    file: str,
    *,
    model: str | None = None,
    json: bool = False,
    trust_pickle: bool = False,
    spec: dict[str, Any] | None = None,
) -> None:
    """Identify a weights file: which library wrote it, its model, and how each field is known.

    Args:
        file: weights of any known format, a folder with them, or an exported model; nothing of an
            exported model is run.
        model: name of the model, for fields that the file does not state.
        json: print JSON.
        trust_pickle: load .pth, .pt and .bin files, with torch's weights_only=True.
        spec: a field of the model that the file does not state, such as --spec.num-heads 6.
    """
    if is_artefact(file):
        _print_exported(Path(file), json=json)
        return
    # imported here: --help does not wait for torch
    with process.uncollected_imports():
        from vitkit.weights.inspection import inspect as inspect_file

    inspection = inspect_file(file, model=model, trust_pickle=trust_pickle, **(spec or {}))
    if json:
        sys.stdout.write(json_text.dumps(inspection.to_json(), indent=2) + "\n")
        return
    sys.stdout.write(messages.fold(f"{inspection}\n", messages.terminal_width()))
    stated = flags(model=model, trust_pickle=trust_pickle)
    for name, value in (spec or {}).items():
        stated += [f"--spec.{name.replace('_', '-')}", str(value)]
    # the other verbs take only a file
    then = ("convert", file, "model.safetensors", "--to", "vitkit") if stated else ("summary", file)
    suggest((*then, *stated))


def _print_exported(path: Path, *, json: bool) -> None:
    """Print the description that is inside an exported model."""
    from vitkit.exporting.files import read_artefact_description

    description = read_artefact_description(path)
    if json:
        sys.stdout.write(f"{description.to_text()}\n")
        return
    lines = "".join(f"{line}\n" for line in description.lines())
    sys.stdout.write(messages.fold(lines, messages.terminal_width()))

"""Measure the faithfulness of each method of explanation, and its sanity checks, on trained models.

    python benchmarks/explanations.py CHECKPOINT... [--data DATA] [--images 200] [--methods NAME...]

For each checkpoint (a run folder or a file) and each method: the normalised deletion and insertion
scores, SaCo, the correlation with a model whose upper half is random, pointing in mosaics of four
classes, stability, deletion by grey and by blurred patches, and the one-sided p-value of a paired
permutation test that the method's deletion curve lies below that of attention, rollout and grad-cam
on the same images. The images are drawn from the test split, or the validation split where there is
none. A method that cannot carry the model is named with its message. `gradient-rollout-plain` and
`legrad-plain` are the published forms of these methods. `--confidence 0.9` keeps the images that
the model recognises with at least this probability, as the localisation metric of CoDA Networks
(arXiv 2104.00032) takes the images recognised with most confidence for its mosaics. The script
prints the results and writes them to benchmarks/results; it does not pass or fail.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo import processor, write_results

import vitkit
from vitkit.data.images.preprocess import preprocess_images
from vitkit.errors import SettingError
from vitkit.evaluation.evaluate import (
    choose_split,
    open_as_in_training,
    stored_object,
    with_labels_of,
)
from vitkit.explaining.faithfulness import (
    FaithfulnessReport,
    measure_faithfulness,
    paired_permutation,
    references,
)
from vitkit.explaining.methods import METHODS
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load

sys.path.append(str(Path(__file__).parent.parent / "examples" / "research"))
checks = import_module("sanity_checks_of_maps")

CHECKS = ("weights", "class", "stability", "fit", "removal")
PLAIN = {f"{name}-plain": name for name in ("gradient-rollout", "legrad")}
"""Names of the published forms -> method, whose default is another."""
YARDSTICKS = ("attention", "rollout", "grad-cam")
"""Methods that a good one should beat."""


def draw_images(
    checkpoint: Checkpoint, args: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return images (B, C, H, W), class numbers (B,) and the name of the split."""
    settings = stored_object(checkpoint, "recipe")
    data = args.data or settings.get("data")
    if data is None:
        raise SystemExit(f"{checkpoint.path} does not name its data; name them with --data")
    root = args.data_root or settings.get("data_root")
    dataset = open_as_in_training(checkpoint, str(data), root, None)
    name = choose_split(dataset, args.split)
    split = with_labels_of(checkpoint, dataset, name)
    numbers = np.random.default_rng(args.seed).permutation(len(split))[: args.images]
    pixels = [split.read(int(number)) for number in numbers]
    images = preprocess_images(pixels, checkpoint.preprocess)
    return images, torch.from_numpy(split.labels[numbers]), name


def measure(checkpoint: Checkpoint, args: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured of all methods on one model, with their p-values."""
    images, labels, split = draw_images(checkpoint, args)
    model = checkpoint.model.eval()
    logits = predict(model, images)
    accuracy = float((logits.argmax(1) == labels).double().mean())
    if args.confidence:
        own = logits.softmax(1).gather(1, labels[:, None])[:, 0]
        sure = own >= args.confidence
        images, labels, logits = images[sure], labels[sure], logits[sure]
    classes = logits.argmax(1)
    start = time.perf_counter()
    reference = references(model, images, classes, seed=args.seed)
    covered = None
    if "removal" in args.checks:
        covered = checks.covered_references(model, images, classes)
    found: dict[str, Any] = {
        "split": split,
        "images": len(images),
        "top1": accuracy,
        "seconds_of_reference": time.perf_counter() - start,
        "methods": {},
    }
    if "fit" in args.checks:
        found["accuracy_with_patches_dropped"] = checks.model_fit(model, images, labels)
    print(f"{checkpoint.path}: {len(images)} images of {split}, top-1 {accuracy:.4f}", flush=True)
    reports: dict[str, FaithfulnessReport] = {}
    for name in args.methods:
        start = time.perf_counter()
        method = METHODS[PLAIN.get(name, name)]
        options = {"gradients": "plain"} if name in PLAIN else {}
        maps = checks.maps_of(method, **options)
        try:
            grids = maps(model, images, classes)
        except SettingError as error:
            found["methods"][name] = {"refused": str(error)}
            print(f"  {name}: {error}", flush=True)
            continue
        scores = measure_faithfulness(
            model, images, grids, classes, seed=args.seed, reference=reference
        )
        reports[name] = FaithfulnessReport(name, options, tuple(scores))
        row = reports[name].as_json()
        del row["scores"]  # a row for each image: too long for a results file
        row["saco"] = float(np.nanmedian(checks.saco(model, images, grids, classes)))
        if covered is not None:
            row |= deletion_of_covered(
                reports[name], checks.covered_deletion(model, images, grids, classes, covered)
            )
        row |= sanity(maps, checkpoint, images, classes, labels, args)
        found["methods"][name] = row | {"seconds": time.perf_counter() - start}
        print(f"  {name:22}{reports[name].line}", flush=True)
    for name, measured in reports.items():
        found["methods"][name]["p_beats"] = beats(name, measured, reports)
    if covered is not None:
        found["tau_of_methods"] = agreement([found["methods"][name] for name in reports])
    print_table(found["methods"])
    print(f"Kendall's tau of the methods ranked by deletion: {found.get('tau_of_methods')}\n")
    return found


def predict(model: vitkit.ViT, images: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, K), 32 images at a time."""
    with torch.inference_mode():
        return torch.cat([model(part) for part in images.split(32)])


def sanity(
    maps: Any,
    checkpoint: Checkpoint,
    images: torch.Tensor,
    classes: torch.Tensor,
    labels: torch.Tensor,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return the checks of a method that were asked for."""
    model, found = checkpoint.model, dict[str, Any]()
    if "weights" in args.checks:
        found["weights_matter"] = checks.weights_matter(maps, model, images, classes)
    if "class" in args.checks:
        # in a mosaic of images that the model mistakes, no map could be right
        known = classes == labels
        found["class_matters"] = checks.class_matters(
            maps, model, images[known], classes[known], args.mosaics, args.seed
        )
    if "stability" in args.checks:
        preprocess = checkpoint.preprocess
        found["stability"] = checks.stability(maps, model, images, classes, preprocess)
    return found


def deletion_of_covered(
    report: FaithfulnessReport, covered: dict[str, np.ndarray]
) -> dict[str, float]:
    """Return the medians by dropped, grey and blurred patches of the same images, and their tau."""
    by_removal = {"dropped": np.array([score.deletion for score in report.scores], float)}
    by_removal["dropped"] = by_removal["dropped"][: checks.COVERED]
    by_removal |= covered
    found = {f"deletion_{name}": float(np.nanmedian(of)) for name, of in by_removal.items()}
    for name, of in covered.items():
        found[f"tau_dropped_{name}"] = checks.kendall_tau(by_removal["dropped"], of)
    return found


def agreement(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return Kendall's tau between the methods ranked by two ways of removing patches."""
    medians = {
        name: np.array([row[f"deletion_{name}"] for row in rows])
        for name in ("dropped", "grey", "blur")
    }
    return {
        f"{first}_{second}": checks.kendall_tau(medians[first], medians[second])
        for first, second in (("dropped", "grey"), ("dropped", "blur"), ("grey", "blur"))
    }


def beats(
    name: str, report: FaithfulnessReport, reports: dict[str, FaithfulnessReport]
) -> dict[str, float]:
    """Return, for each yardstick, p that the method's deletion areas are not below its own."""
    found = {}
    for other in YARDSTICKS:
        if other in reports and other != name:
            pairs = zip(reports[other].scores, report.scores, strict=True)
            gains = [theirs.deletion_area - ours.deletion_area for theirs, ours in pairs]
            found[other] = paired_permutation(gains)
    return found


def print_table(methods: dict[str, Any]) -> None:
    """Print one row for each method that was measured, the best deletion first."""
    rows = [(name, row) for name, row in methods.items() if "refused" not in row]
    rows.sort(key=lambda item: -(item[1]["deletion"] or -1))
    heads = [f"p < {name}" for name in YARDSTICKS]
    columns = ("method", "deletion", "grey", "blur", "insertion", "SaCo", "random top", "pointing",
               "positive", *heads)  # fmt: skip
    print("\n| " + " | ".join(columns) + " |")
    print("| --- " * len(columns) + "|")
    for name, row in rows:
        mosaics = row.get("class_matters") or {}
        values = [row["deletion"], row.get("deletion_grey"), row.get("deletion_blur")]
        values += [row["insertion"], row["saco"], row.get("weights_matter")]
        values += [mosaics.get("pointing"), mosaics.get("positive")]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        for yardstick in YARDSTICKS:
            p = row["p_beats"].get(yardstick)
            cells.append("-" if p is None else f"{p:.4f}")
        print("| " + " | ".join([name, *cells]) + " |")
    print(flush=True)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--data", help="default: what the model was trained on")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--split", help="default: test, else val")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--confidence", type=float, default=0.0, help="least probability, 0 to 1")
    parser.add_argument("--mosaics", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    measurable = [name for name, method in METHODS.items() if not method.colours] + [*PLAIN]
    parser.add_argument("--methods", nargs="+", choices=measurable, default=measurable)
    parser.add_argument("--checks", nargs="*", choices=CHECKS, default=CHECKS)
    parser.add_argument("--output", type=Path, help="default: today's file in benchmarks/results")
    args = parser.parse_args()
    models = {path.name: measure(load(path), args) for path in args.checkpoints}
    results = {"processor": processor(), "date": str(date.today()), "seed": args.seed}
    write_results("explanations-", results | {"models": models}, args.output)


if __name__ == "__main__":
    main()

"""Run each recipe with several seeds, and write its reference result.

    python benchmarks/recipes.py digits fashion-mnist [--seeds 0 1 2] [--data-root DIR]
                                 [--keep FOLDER] [-- FLAGS]

Every run is `vitkit train NAME --recipe NAME --seed S` in its own process, one after the other. The
reference result is written to benchmarks/results/reference-NAME.json, and all measurements to
another file there. The runs are removed, or kept as FOLDER/NAME-SEED. Flags after -- go to every
run; then no reference result is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import mean

from demo import HERE, processor, run, write_results

from vitkit.data.datasets.splitting import with_validation
from vitkit.data.sources.open import open_dataset
from vitkit.training.config.merging import layered, read_yaml
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.recipes import recipe_settings

REFERENCE_RESULTS = HERE / "results"
DATA = {"cifar10-small": "cifar10"}
"""Recipe -> its data, if the recipe has another name."""
PLACES = ("data", "data_root", "output", "resume", "overwrite", "seed")
"""Settings that are not part of a recipe."""


SHOWN = ("seed", "test", "seconds", "peak_mb")


def measured(recipe: str, seed: int, left: Path, flags: list[str]) -> dict[str, object]:
    """Run a recipe; return scores, curve, settings, time and memory."""
    seconds, memory, _ = run(
        sys.executable, "-m", "vitkit", "train", DATA.get(recipe, recipe), "--recipe", recipe,
        "--seed", str(seed), "--output", str(left), *flags,
    )  # fmt: skip
    rows = [json.loads(line) for line in (left / "metrics.jsonl").read_text().splitlines()]
    settings = read_yaml(left / "config.yaml")
    epochs = [row for row in rows if row["kind"] == "epoch"]
    (test,) = [row for row in rows if row["kind"] == "test"]
    return {
        "seed": seed,
        "test": test["test_top1"],
        "seconds": seconds,
        "peak_mb": memory,
        "curve": [row["val_top1"] for row in epochs],
        "settings": {name: value for name, value in settings.items() if name not in PLACES},
    }


def reference_result(recipe: str, runs: list[dict[str, object]], images: int) -> dict[str, object]:
    """Return what the reference result keeps of the runs."""
    curves = zip(*(made["curve"] for made in runs), strict=True)
    seconds = [made["seconds"] for made in runs]
    return {
        "recipe": recipe,
        "command": f"vitkit train {DATA.get(recipe, recipe)} --recipe {recipe}",
        "hardware": processor(),
        "date": date.today().isoformat(),
        "seconds": [round(min(seconds), 1), round(max(seconds), 1)],
        "images": images,
        "test": [made["test"] for made in runs],
        "curve": [[round(min(column), 4), round(max(column), 4)] for column in curves],
        "settings": runs[0]["settings"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data-root")
    parser.add_argument("--keep")
    words = sys.argv[1:]
    own, flags = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    args = parser.parse_args(own)
    where = [] if args.data_root is None else ["--data-root", args.data_root]
    for recipe in args.recipes:
        runs = []
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                left = Path(args.keep or folder) / f"{recipe}-{seed}"
                runs.append(measured(recipe, seed, left, [*where, *flags]))
            shown = {key: runs[-1][key] for key in SHOWN}
            print(f"  {recipe}: {shown}", flush=True)
        scores = [float(str(made["test"])) for made in runs]
        print(f"{recipe}: mean {mean(scores):.4f}, {min(scores):.4f} to {max(scores):.4f}")
        shown_runs = [{key: made[key] for key in SHOWN} for made in runs]
        write_results("recipes-", {recipe: shown_runs})
        if not flags:
            kept = reference_result(recipe, runs, images=_images(recipe, args.data_root))
            lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(kept[key])}" for key in kept)
            (REFERENCE_RESULTS / f"reference-{recipe}.json").write_text(f"{{\n{lines}\n}}\n")


def _images(recipe: str, root: str | None) -> int:
    """Return the number of training images of a run."""
    config = TrainConfig(**layered({"data": DATA.get(recipe, recipe)}, recipe_settings(recipe)))
    dataset = open_dataset(config.data, data_root=root)
    return len(with_validation(dataset, config.val_fraction).splits["train"])


if __name__ == "__main__":
    main()

"""Measure whole trainings with their curves: notebook E's MNIST model, and two recipes.

The notebook's model and the corrected one are compared twice: with the notebook's learning rate,
and with rates that are chosen for each of the two.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import notebook_mnist
import numpy as np
import torch
from experiment import Experiment, Numbers, Options
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import stratified_split, with_validation
from vitkit.data.images.preprocess import fit
from vitkit.data.sources.open import open_dataset
from vitkit.spec import Preprocess
from vitkit.training.config.merging import layered, read_yaml
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.recipes import recipe_settings

KEPT = ("epoch", "train_loss", "val_top1", "val_loss", "seconds")
ELSEWHERE = ("data_root", "output", "overwrite", "resume", "seed", "threads", "amp", "quiet",
             "attention_kernel", "workers", "log_examples", "log_histograms")  # fmt: skip
"""Settings that may differ from the recipe's: paths, the seed, and auto-tuned settings."""


def notebook(options: Options) -> Numbers:
    """Train the notebook's model; score it after each epoch on the recipe's validation split."""
    return _small(notebook_mnist.NotebookViT, notebook_mnist.loss_of, options)


def corrected(options: Options) -> Numbers:
    """Train the same model without the mistakes, with the same optimizer."""
    return _small(notebook_mnist.corrected, F.cross_entropy, options)


def _small(
    make: Callable[[], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    options: Options,
) -> Numbers:
    """Train a model with the notebook's loop, once for each seed."""
    name = "digits" if options.quick else "mnist"
    dataset = with_validation(open_dataset(name, data_root=options.data_root), 0.1)
    train, validation, test = (
        _tensors(dataset.splits[part]) for part in ("train", "val", "test")
    )
    passes, runs = 1 if options.quick else notebook_mnist.EPOCHS, []
    for seed in options.seeds:
        torch.manual_seed(seed)
        model, epochs = make(), []
        for row in notebook_mnist.train(
            model, *train, loss=loss, epochs=passes, seed=seed
        ):
            epochs.append(
                row | {"val_top1": notebook_mnist.accuracy(model, *validation)}
            )
        print(f"seed {seed}: {epochs[-1]}", flush=True)
        runs.append({
            "seed": seed,
            "seconds": epochs[-1]["seconds"],
            "test_top1": notebook_mnist.accuracy(model, *test),
            "epochs": epochs,
        })  # fmt: skip
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "images": len(train[0]),
        "runs": runs,
    }


Small = dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor]]]
SMALL: Small = {
    "notebook": (notebook_mnist.NotebookViT, notebook_mnist.loss_of),
    "corrected": (notebook_mnist.corrected, F.cross_entropy),
}
"""The two models, each with its loss."""


def _notebook_with_usual_norms() -> nn.Module:
    model = notebook_mnist.NotebookViT()
    model.norm1, model.norm2 = (nn.LayerNorm(notebook_mnist.WIDTH) for _ in range(2))
    return model


def _corrected_with_joint_norms() -> nn.Module:
    model = notebook_mnist.corrected()
    shape = (notebook_mnist.GRID**2 + 1, notebook_mnist.WIDTH)
    for block in model.blocks:
        block.norm1, block.norm2 = nn.LayerNorm(shape), nn.LayerNorm(shape)
    return model


NORMS: Small = {
    "notebook, usual norms": (_notebook_with_usual_norms, notebook_mnist.loss_of),
    "corrected, joint norms": (_corrected_with_joint_norms, F.cross_entropy),
}
"""The two models with their norms exchanged."""
RATES, RATE_IMAGES, RATE_EPOCHS = (0.01, 0.003, 0.001), 15_000, 3


def fashion_rates(options: Options) -> Numbers:
    """Compare both models on Fashion-MNIST, each with its best rate of three."""
    return _rates("fashion-mnist", options)


def mnist_rates(options: Options) -> Numbers:
    """Compare both models on MNIST, each with its best rate of three."""
    return _rates("mnist", options)


def mnist_norms(options: Options) -> Numbers:
    """Compare both models on MNIST with their norms exchanged."""
    return _rates("mnist", options, NORMS)


def _rates(
    name: str,
    options: Options,
    models_of: Small = SMALL,
) -> Numbers:
    """Train both models with three rates; test each with the rate that validates best.

    The rate is chosen by the mean accuracy of the seeds on the recipe's validation split. Only the
    models of the chosen rate see the test split.
    """
    count, passes = (200, 1) if options.quick else (RATE_IMAGES, RATE_EPOCHS)
    dataset = with_validation(
        open_dataset("digits" if options.quick else name, data_root=options.data_root),
        0.1,
    )
    whole = dataset.splits["train"]
    share = count / len(whole)
    _, taken = stratified_split(whole.labels, (1 - share, share), seed=0)
    train = _tensors(whole.subset(taken))
    validation, test = (_tensors(dataset.splits[part]) for part in ("val", "test"))
    rows, chosen, scores = [], {}, {}
    for label, (make, loss) in models_of.items():
        models: dict[tuple[float, int], nn.Module] = {}
        for rate in RATES:
            for seed in options.seeds:
                torch.manual_seed(seed)
                models[rate, seed] = model = make()
                *_, last = notebook_mnist.train(
                    model, *train, loss=loss, epochs=passes, rate=rate, seed=seed
                )
                found = notebook_mnist.accuracy(model, *validation)
                rows.append(
                    {
                        "model": label,
                        "lr": rate,
                        "seed": seed,
                        "val_top1": found,
                        **last,
                    }
                )
                print(f"{name}: {rows[-1]}", flush=True)
        own = [row for row in rows if row["model"] == label]
        chosen[label] = max(
            RATES,
            key=lambda rate: mean(row["val_top1"] for row in own if row["lr"] == rate),
        )
        scores[label] = [
            notebook_mnist.accuracy(models[chosen[label], seed], *test)
            for seed in options.seeds
        ]
    return {
        "data": name,
        "images": len(train[0]),
        "epochs": passes,
        "validated_on": len(validation[0]),
        "tested_on": len(test[0]),
        "rates": chosen,
        "test_top1": scores,
        "rows": rows,
    }


def mnist(options: Options) -> Numbers:
    """Run `vitkit train mnist --recipe mnist`."""
    return _recipe("mnist", "mnist", options)


def cifar10(options: Options) -> Numbers:
    """Run `vitkit train cifar10 --recipe cifar10-small --epochs 12`, half of the epochs."""
    return _recipe("cifar10", "cifar10-small", options, epochs=12)


def _recipe(
    data: str, recipe: str, options: Options, epochs: int | None = None
) -> Numbers:
    """Return curves and test scores of a recipe: one process per seed, or a finished run."""
    if options.run is not None:
        run = _read(Path(options.run), data, recipe, epochs)
        return {"recipe": recipe, "seeds": [run["seed"]], "runs": [run]}
    runs = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "run"
            _train(
                "digits" if options.quick else data,
                recipe,
                seed,
                output,
                options,
                epochs,
            )
            runs.append(_read(output, None if options.quick else data, recipe, epochs))
        print(f"{data}, seed {seed}: {runs[-1]['epochs'][-1]}, test {runs[-1]['test_top1']:.4f}",
              flush=True)  # fmt: skip
    return {"recipe": recipe, "runs": runs}


def _train(
    data: str,
    recipe: str,
    seed: int,
    output: Path,
    options: Options,
    epochs: int | None,
) -> None:
    words = [
        sys.executable,
        "-m",
        "vitkit",
        "train",
        data,
        "--recipe",
        recipe,
        "--quiet",
    ]
    words += ["--seed", str(seed), "--output", str(output)]
    words += [] if options.data_root is None else ["--data-root", options.data_root]
    words += (
        ["--epochs", "1", "--amp", "bfloat16"] if options.quick else _epochs(epochs)
    )
    if subprocess.run(words, check=False).returncode:
        raise SystemExit(f"{' '.join(words)} failed")


def _epochs(epochs: int | None) -> list[str]:
    """Return the flags for a number of epochs other than the recipe's."""
    return [] if epochs is None else ["--epochs", str(epochs)]


def _read(run: Path, data: str | None, recipe: str, epochs: int | None) -> Numbers:
    """Read a finished run; with `data`, check that its settings are those of the recipe."""
    settings = read_yaml(run / "config.yaml")
    if data is not None:
        changed = {"data": data, "recipe": recipe} | (
            {} if epochs is None else {"epochs": epochs}
        )
        expected = TrainConfig(**layered(recipe_settings(recipe), changed)).to_json()
        actual = TrainConfig(**settings).to_json()
        other = [
            key
            for key in expected
            if key not in ELSEWHERE and expected[key] != actual[key]
        ]
        if other:
            raise SystemExit(
                f"{run} is not a run of {recipe} on {data}: it differs in {', '.join(other)}"
            )
    rows = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    (test,) = [row for row in rows if row["kind"] == "test"]
    rows = [{key: row[key] for key in KEPT} for row in rows if row["kind"] == "epoch"]
    return {
        "command": " ".join(
            [
                "vitkit train",
                settings["data"],
                "--recipe",
                recipe,
                *_epochs(epochs),
                "--seed",
                str(settings["seed"]),
            ]
        ),
        "seed": settings["seed"],
        "threads": settings["threads"],
        "amp": settings["amp"],
        "attention_kernel": settings["attention_kernel"],
        "seconds": rows[-1]["seconds"],
        "test_top1": test["test_top1"],
        "epochs": rows,
    }


def _tensors(split: Split) -> tuple[Tensor, Tensor]:
    """Return all images (N, 1, 28, 28) in [0, 1], and their labels."""
    grey = Preprocess(image_size=28, mean=(0.0,), std=(1.0,), fit="squash")
    pixels = np.stack([fit(split.read(index), grey) for index in range(len(split))])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    return images.contiguous(), torch.from_numpy(split.labels)


EXPERIMENTS = {
    "mnist-notebook": Experiment(
        notebook, "notebook E's model on MNIST", seeds=(0, 1, 2)
    ),
    "mnist-mended": Experiment(
        corrected, "the same model without its mistakes", seeds=(0, 1, 2)
    ),
    "fashion-rates": Experiment(
        fashion_rates, "both on Fashion-MNIST, each with its own learning rate"
    ),
    "mnist-rates": Experiment(mnist_rates, "the same on MNIST"),
    "mnist-norms": Experiment(mnist_norms, "the same with the norms exchanged"),
    "mnist": Experiment(mnist, "the curve of --recipe mnist", seeds=(0,)),
    "cifar10": Experiment(
        cifar10, "the curve of --recipe cifar10-small --epochs 12", seeds=(0,)
    ),
}

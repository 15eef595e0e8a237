"""Read the run of notebook B's CIFAR-10 model of 8.47 M parameters, as long as it was trained.

    MINUTES=41 vitkit train cifar10 --recipe cifar10-small --model vit_cifar_patch4_32 \\
        --batch-size 128 --epochs 4 --no-test --callbacks until_time:UntilTime --output RUN
    vitkit eval RUN/weights/last.safetensors cifar10 --split test --json > RUN/test.json
    python docs/tutorial/measure.py cifar10-8m --run RUN
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from experiment import Experiment, Numbers, Options

from vitkit.training.config.merging import read_yaml

HERE = Path(__file__).resolve().parent
MINUTES = 41
KEPT = ("top1", "top1_low", "top1_high", "images", "confusion")


def cifar10_8m(options: Options) -> Numbers:
    """Return the curve and the test score of the finished run."""
    if options.run is None:
        with tempfile.TemporaryDirectory() as folder:
            return _read(_train(Path(folder) / "run", options))
    return _read(Path(options.run))


def _train(run: Path, options: Options) -> Path:
    """Make the run; it ends when its time is over."""
    vitkit = [sys.executable, "-m", "vitkit"]
    data = [] if options.data_root is None else ["--data-root", options.data_root]
    words = (
        "--recipe cifar10-small --model vit_cifar_patch4_32 --batch-size 128 --epochs 4"
    )
    words += " --no-test --quiet --log-interval 20 --callbacks until_time:UntilTime"
    environment = os.environ | {
        "MINUTES": "1" if options.quick else str(MINUTES),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    training = [
        *vitkit,
        "train",
        "cifar10",
        *words.split(),
        "--output",
        str(run),
        *data,
    ]
    subprocess.run(training, check=True, env=environment)
    weights = str(run / "weights" / "last.safetensors")
    testing = [*vitkit, "eval", weights, "cifar10", "--split", "test", "--json", *data]
    with (run / "test.json").open("w") as file:
        subprocess.run(testing, check=True, stdout=file)
    return run


def _read(run: Path) -> Numbers:
    settings = read_yaml(run / "config.yaml")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if row["kind"] == "step"]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    (started,) = [
        line
        for line in (run / "train.log").read_text().splitlines()
        if " model: " in line
    ]
    test = json.loads((run / "test.json").read_text())
    last = max(int(path.name.split("-")[1]) for path in (run / "state").glob("step-*"))
    return {
        "model": settings["model"],
        "about": started.split(" model: ")[1],
        "commands": [line.strip() for line in (__doc__ or "").splitlines()[2:6]],
        "batch_size": settings["batch_size"],
        "threads": settings["threads"],
        "amp": settings["amp"],
        "minutes": MINUTES,
        "steps": last,
        "images": last * settings["batch_size"],
        "test": {key: test[key] for key in KEPT},
        "epochs": [
            {
                key: row[key]
                for key in ("epoch", "step", "train_loss", "val_top1", "seconds")
            }
            for row in epochs
        ],
        "losses": [
            {key: row[key] for key in ("step", "train_loss", "lr")} for row in steps
        ],
    }


EXPERIMENTS = {
    "cifar10-8m": Experiment(
        cifar10_8m, "the run of the 8.47 M model, read by --run RUN", seeds=(0,)
    ),
}

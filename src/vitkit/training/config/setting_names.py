"""What a setting is called elsewhere: by other programs, by a flag's second name, in camel case."""

from __future__ import annotations

import re
from typing import Any, get_type_hints

from vitkit.frozen import field_names

CALLED_HERE = {
    "lr": "learning_rate base_lr max_lr learning",
    "epochs": "num_epochs n_epochs max_epochs num_train_epochs",
    "batch_size": "batch bs train_batch_size per_device_train_batch_size",
    "grad_accum_steps": "gradient_accumulation_steps accumulate_grad_batches grad_accumulation",
    "opt": "optimizer optim",
    "sched": "scheduler lr_scheduler lr_scheduler_type schedule",
    "warmup_epochs": "warmup",
    "clip_grad": "max_grad_norm gradient_clip_val grad_clip gradient_clipping",
    "amp": "precision mixed_precision fp16 bf16 half",
    "workers": "num_workers dataloader_num_workers",
    "img_size": "image_size imgsz input_size resolution",
    "drop_path": "drop_path_rate stochastic_depth",
    "mixup": "mixup_alpha",
    "cutmix": "cutmix_alpha",
    "aa": "auto_augment autoaugment randaugment augment",
    "reprob": "random_erasing erasing",
    "model_ema": "ema",
    "model_ema_decay": "ema_decay",
    "patience": "early_stopping early_stopping_patience",
    "pretrained": "weights init init_checkpoint",
    "devices": "gpus num_gpus ngpus nproc_per_node",
    "val_fraction": "val_split validation_split",
    "log_interval": "log_every logging_steps",
    "grad_checkpointing": "gradient_checkpointing",
}
"""What other programs call our settings."""


def our_name(word: str, settings: type[Any]) -> str | None:
    """The setting that is meant by `word`, whatever its case, dashes and underscores; or `None`.

    >>> from vitkit.training.config.train_config import TrainConfig
    >>> our_name("learning-rate", TrainConfig), our_name("BatchSize", TrainConfig)
    ('lr', 'batch_size')
    """
    ours = {_plain(name): name for name in field_names(settings)}
    theirs = {_plain(word): name for name, words in CALLED_HERE.items() for word in words.split()}
    return (theirs | second_names(settings) | ours).get(_plain(word))


def second_names(settings: type[Any]) -> dict[str, str]:
    """Every second name of a flag, in small letters without dashes -> the setting."""
    hints = get_type_hints(settings, include_extras=True)
    return {
        _plain(alias): name
        for name, hint in hints.items()
        for told in getattr(hint, "__metadata__", ())
        for alias in getattr(told, "aliases", None) or ()
    }


def refused_flag(arguments: list[str], settings: type[Any]) -> str | None:
    """What to say of the first flag that has its name from another program; `None` for no such one.

    Flags that nobody knows are for the parser, which names the nearest ones.
    """
    flags = {_plain(name) for name in field_names(settings)} | set(second_names(settings))
    for word in arguments:
        name = word.partition("=")[0]
        if not name.startswith("--") or _plain(name) in flags:
            continue
        if (ours := our_name(name, settings)) is not None:
            return f"there is no flag {name}; did you mean --{ours.replace('_', '-')}?"
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())

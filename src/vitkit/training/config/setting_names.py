"""Other names of a setting: those of other programs, second names of a flag, camel case."""

from __future__ import annotations

import re
from typing import Any, get_type_hints

from vitkit.frozen import field_names

FOREIGN_NAMES = {
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
"""Setting -> its names in other programs."""


def our_name(word: str, settings: type[Any]) -> str | None:
    """Return the setting that `word` means, in any case, with dashes or underscores; or `None`.

    >>> from vitkit.training.config.train_config import TrainConfig
    >>> our_name("learning-rate", TrainConfig), our_name("BatchSize", TrainConfig)
    ('lr', 'batch_size')
    """
    by_name = {}
    for setting, words in FOREIGN_NAMES.items():
        for foreign_name in words.split():
            by_name[_letters(foreign_name)] = setting
    # vitkit's own names come last, as they win over foreign ones
    by_name |= second_names(settings)
    for setting in field_names(settings):
        by_name[_letters(setting)] = setting
    return by_name.get(_letters(word))


def second_names(settings: type[Any]) -> dict[str, str]:
    """Return every second name of a flag, in small letters without dashes -> its setting."""
    hints = get_type_hints(settings, include_extras=True)
    by_alias = {}
    for name, hint in hints.items():
        for metadata in getattr(hint, "__metadata__", ()):
            for alias in getattr(metadata, "aliases", None) or ():
                by_alias[_letters(alias)] = name
    return by_alias


def refused_flag(arguments: list[str], settings: type[Any]) -> str | None:
    """Return a message on the first flag that has its name from another program, else `None`.

    Flags with any other unknown name are left to the parser, which names the nearest ones.
    """
    # all flags of our own, without dashes
    flags = set(second_names(settings))
    for name in field_names(settings):
        flags.add(_letters(name))
    for argument in arguments:
        flag = argument.partition("=")[0]
        if not flag.startswith("--") or _letters(flag) in flags:
            continue
        setting = our_name(flag, settings)
        if setting is not None:
            return f"there is no flag {flag} (did you mean --{setting.replace('_', '-')}?)"
    return None


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in small letters."""
    return re.sub(r"[^a-z0-9]", "", name.lower())

"""Recipes that start from pretrained weights or learn from a teacher."""

from __future__ import annotations

from vitkit.training.config.field_types import Settings
from vitkit.training.recipes.imagenet import deit


def finetune() -> Settings:
    """Return settings to fine-tune a pretrained model on your own images.

    Paper: layer-wise decay as in BEiT (arXiv 2106.08254) and MAE (arXiv 2111.06377).
    Command: `vitkit train images/ --recipe finetune --pretrained WEIGHTS`
    Expected: depends on the weights; docs/benchmarks.md has what was measured.
    """
    return {
        "epochs": 20,
        "batch_size": 64,
        "lr": 5e-4,
        "min_lr": 1e-6,
        # the first layers have the most general features, and change least
        "layer_decay": 0.75,
        "weight_decay": 0.05,
        "warmup_epochs": 2.0,
        "drop_path": 0.1,
    }


def finetune_sgd() -> Settings:
    """Return settings to fine-tune as in the ViT paper, at a higher resolution.

    Paper: "An Image is Worth 16x16 Words" (arXiv 2010.11929), App. B.1.1: batch 512, cosine, no
    decay, gradients clipped at 1, 384 px.
    Command: `vitkit train images/ --recipe finetune-sgd --pretrained WEIGHTS --img-size 384`
    Expected: B/16 from ImageNet-21k: 98.95 % on CIFAR-10 (its Table 5); try rates 1e-3 to 3e-2.
    """
    return {
        "epochs": 10,
        "batch_size": 512,
        "opt": "sgd",
        # within the rates that the paper tries
        "lr": 1e-2,
        "min_lr": 0.0,
        "weight_decay": 0.0,
        "clip_grad": 1.0,
        "warmup_epochs": 0.5,
        "label_smoothing": 0.0,
    }


def linear_probe() -> Settings:
    """Return settings for a linear classifier on features that are computed once.

    Paper: logistic regression on frozen features, as in CLIP (arXiv 2103.00020, App. A.3).
    Command: `vitkit train images/ --recipe linear-probe --pretrained WEIGHTS`
    Expected: depends on the weights; minutes on two cores for thousands of images.
    """
    return {"probe": "linear"}


def distil() -> Settings:
    """Return settings for a DeiT-Ti that learns from a teacher through its distillation token.

    Paper: DeiT (arXiv 2012.12877), Eq. 3: hard labels of the teacher, half of the loss.
    Command: `vitkit train images/ --recipe distil --teacher WEIGHTS`
    Expected: on ImageNet-1k 74.5 % instead of 72.2 % (its Table 3), with a RegNetY-16GF.
    """
    return deit() | {
        "model": "deit_tiny_distilled_patch16_224",
        "distill": "hard",
        "distill_alpha": 0.5,
    }

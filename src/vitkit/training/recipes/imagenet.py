"""Recipes of papers for ImageNet-1k, from scratch, on several GPUs.

None of them was run to its end here: each quotes the score and the time that its paper or its
authors' repository reports. `--max-steps 20` shows that one runs on your machine.
"""

from __future__ import annotations

from vitkit.training.config.field_types import Settings

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def vit_paper() -> Settings:
    """Return settings for ViT-B/16 on ImageNet-1k, as in the first ViT paper.

    Paper: "An Image is Worth 16x16 Words" (arXiv 2010.11929), Table 3: 300 epochs, batch 4096,
    Adam 3e-3, decay 0.3, 10,000 steps of warm-up, dropout 0.1, cosine decay of the rate.
    Command: `vitkit train imagenet/ --recipe vit-paper`
    Expected: 77.9 % top-1, fine-tuned at 384 px (its Table 5).
    """
    return {
        "model": "vit_base_patch16_224",
        "spec": {
            "position_dropout": 0.1,
            "projection_dropout": 0.1,
            "mlp_dropout": 0.1,
        },
        "epochs": 300,
        "batch_size": 4096,
        "lr": 3e-3,
        "min_lr": 0.0,
        # 10,000 steps of 4,096 of the 1,281,167 images
        "warmup_epochs": 32.0,
        "opt": "adam",
        "weight_decay": 0.3,
        "clip_grad": 1.0,
        "label_smoothing": 0.0,
        # the Inception crop of the authors' code
        "crop_scale": 0.05,
    }


def vit_paper_decay01() -> Settings:
    """Return `vit_paper` with weight decay 0.1, which most reimplementations quote.

    Paper: "An Image is Worth 16x16 Words" (arXiv 2010.11929), Sec. 4.1, on pre-training: Adam,
    decay 0.1; the rate is that of its Table 3 for ImageNet, which has a decay of 0.3.
    Command: `vitkit train imagenet/ --recipe vit-paper-decay01`
    Expected: no score was published for this pair.
    """
    return vit_paper() | {"weight_decay": 0.1}


def deit() -> Settings:
    """Return settings for DeiT-S on ImageNet-1k.

    Paper: "Training data-efficient image transformers" (arXiv 2012.12877), Table 9.
    Command: `vitkit train imagenet/ --recipe deit`
    Expected: 79.9 % top-1 (Ti 72.2, B 81.8); B takes 53 hours on 8 V100 (its Sec. 6).
    """
    return {
        "model": "deit_small_patch16_224",
        "epochs": 300,
        "batch_size": 1024,
        "lr": 1e-3,
        "min_lr": 1e-5,
        "warmup_epochs": 5.0,
        "weight_decay": 0.05,
        # its Table 9 clips no gradients
        "clip_grad": None,
        "drop_path": 0.1,
        "label_smoothing": 0.1,
        "crop_scale": 0.08,
        # 224 of 256 pixels
        "crop_ratio": 0.875,
        "aa": "rand-m9-mstd0.5-inc1",
        "mixup": 0.8,
        "cutmix": 1.0,
        "reprob": 0.25,
        "repeated_aug": 3,
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
    }


def deit3() -> Settings:
    """Return settings for DeiT III-S on ImageNet-1k.

    Paper: "DeiT III: Revenge of the ViT" (arXiv 2204.07118), with the numbers of its repository
    (README_revenge.md). Its fused LAMB clips the gradient's norm at 1 by itself, of a loss that is
    the mean over 1,000 classes; of the sum, which `bce` is here, that is 1,000.
    Command: `vitkit train imagenet/ --recipe deit3`
    Expected: 81.4 % top-1 after 800 epochs (B 83.8, L 84.9).
    """
    return {
        "model": "deit3_small_patch16_224",
        "epochs": 800,
        "batch_size": 2048,
        "opt": "lamb",
        "lr": 4e-3,
        "min_lr": 1e-5,
        "warmup_epochs": 5.0,
        "weight_decay": 0.05,
        "loss": "bce",
        "bce_threshold": 0.0,
        "clip_grad": 1000.0,
        "label_smoothing": 0.0,
        "drop_path": 0.05,
        "crop_scale": 0.08,
        "crop_ratio": 1.0,
        "aa": "3",
        "color_jitter": 0.3,
        "mixup": 0.8,
        "cutmix": 1.0,
        "repeated_aug": 3,
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
    }


def plain_vit_s16_90ep() -> Settings:
    """Return settings for a simple ViT-S/16 baseline on ImageNet-1k, in 90 epochs.

    Paper: "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580). Its decay of 1e-4 is not
    multiplied by the rate; divided by the peak rate it is the 0.1 here, as in `augreg`.
    Command: `vitkit train imagenet/ --recipe plain-vit-s16-90ep`
    Expected: 76.5 % top-1 in 6 to 7 hours on TPUv3-8 (80.0 after 300 epochs).
    """
    return {
        "model": "vit_small_patch16_224",
        "spec": {
            "class_token": False,
            "pooling": "mean",
            "positions": "sincos_2d",
        },
        "epochs": 90,
        "batch_size": 1024,
        "opt": "adam",
        "lr": 1e-3,
        "min_lr": 0.0,
        "warmup_epochs": 8.0,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "label_smoothing": 0.0,
        "crop_scale": 0.05,
        "aa": "rand-m10-n2-p1",
        "mixup": 0.2,
    }


def augreg() -> Settings:
    """Return settings for ViT-S/16 on ImageNet-1k with AugReg's "medium2".

    Paper: "How to train your ViT?" (arXiv 2106.10270), Sec. 3; big_vision's vit_i1k.py.
    Command: `vitkit train imagenet/ --recipe augreg`
    Expected: 80 % top-1 or so after 300 epochs (its Figure 4).
    """
    return {
        "model": "vit_small_patch16_224",
        # -log 1000: each class begins with a probability of 1 in 1,000
        "spec": {"head_bias": -6.9},
        "epochs": 300,
        "opt": "adam",
        "batch_size": 4096,
        "lr": 1e-3,
        "min_lr": 0.0,
        "warmup_epochs": 32.0,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "loss": "bce",
        "label_smoothing": 0.0,
        "crop_scale": 0.05,
        "aa": "rand-m15-n2-p1-mmax15",
        "mixup": 0.5,
    }

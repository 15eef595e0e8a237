"""The cells of docs/formats.md: how each kind of model is converted to each format."""

from typing import Any

from weights.round_trips import noisy

import vitkit
from vitkit import CheckpointError
from vitkit.models.presets import preset
from vitkit.weights.write import FORMATS, prepare_files

KINDS = {
    "ViT": "vit_base_patch16_224", "ViT, mean of patches": "vit_base_patch16_gap_224",
    "DeiT distilled": "deit_base_distilled_patch16_224", "DeiT III": "deit3_base_patch16_224",
    "DINOv2": "vit_base_patch14_dinov2", "DINOv2 with registers": "vit_base_patch14_reg4_dinov2",
    "DINOv2 giant (SwiGLU)": "vit_giant_patch14_dinov2", "DINOv3": "vit_base_patch16_dinov3",
    "CLIP": "vit_base_patch16_clip_224", "SigLIP (MAP)": "vit_base_patch16_siglip_224",
    "FlexiViT": "flexivit_base", "hybrid R26": "vit_small_r26_s32_224",
}  # fmt: skip
"""Row of the table -> a preset of that kind, which is then made smaller."""
SMALL: dict[str, Any] = {"width": 128, "depth": 2, "num_heads": 2, "mlp_width": 256}
HOW = {"kept": "exact", "folded": "folded", "approximated": "lossy", "lost": "lossy"}


def small(name: str) -> vitkit.ViT:
    whole = preset(name)
    patch = whole.patch_size
    size = (2 * patch[0], 2 * patch[1])
    classes = 5 if whole.num_classes else 0
    return noisy(whole.replace(**SMALL, image_size=size, num_classes=classes))


def cell(model: vitkit.ViT, name: str) -> tuple[str, str]:
    """Return `exact`, `folded`, `lossy` or `no`, and the reason."""
    preprocess = vitkit.Preprocess(image_size=model.spec.image_size)
    try:
        _, fitted = prepare_files(vitkit.Checkpoint(model, preprocess, ()), name, allow_lossy=True)
    except CheckpointError as error:
        return "no", str(error).partition(f"as {name}: ")[2]
    kinds = [step.kind for step in fitted.steps]
    worst = next((kind for kind in ("lost", "approximated", "folded") if kind in kinds), "kept")
    return HOW[worst], "; ".join(step.text for step in fitted.steps)


def document() -> str:
    """Return the page as Markdown."""
    heads = list(FORMATS)
    lines = [
        "# Checkpoint formats", "",
        "Each format has one table of tensor names, used for reading and for writing",
        "(`src/vitkit/weights/formats/`). The cells show what `vitkit convert` does with a model",
        "of each kind (row) in each format (column):", "",
        "- *exact*: the same numbers under other names;",
        "- *folded*: other numbers that compute the same function;",
        "- *lossy*: the function changes; only with `--allow-lossy`;",
        "- *no*: the format cannot hold the model.", "",
        "Numbers refer to the list below the table, which names the change or the reason.",
        "`scripts/formats_table.py` writes this page, and a test checks it.",
        "", f"| model | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}",
    ]  # fmt: skip
    reasons: list[str] = []
    for kind, name in KINDS.items():
        model, cells = small(name), []
        for form in FORMATS:
            how, why = cell(model, form)
            if why and why not in reasons:
                reasons.append(why)
            cells.append(f"{how} {reasons.index(why) + 1}" if why else how)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {why}" for number, why in enumerate(reasons, 1)), ""]
    return "\n".join(lines)

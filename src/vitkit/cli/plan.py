"""`vitkit plan MODEL|CHECKPOINT`."""

import json as json_text
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from vitkit import errors, messages, other_names, planning
from vitkit.models.presets import preset, table
from vitkit.planning import GPUName, OptimizerName
from vitkit.spec import ViTSpec
from vitkit.training.config.meaning import Aliases

EXAMPLES = (
    "vitkit plan vit_base_patch16_224 --gpus 8 --gpu h200 --batch-size 2048",
    "vitkit plan ViT-L/16 --gpu rtx4090 --batch-size 64 --img-size 384  # does it fit?",
    "vitkit plan vit_tiny_patch16_224 --gpu this  # the GPU of this machine",
)


def plan_command(
    model: str,
    *,
    gpus: Annotated[int, Aliases(("--devices",))] = 1,
    gpu: GPUName = "h100",
    batch_size: Annotated[int | None, Aliases(("--batch", "-b"))] = None,
    epochs: int = 300,
    images: int = 1_281_167,
    img_size: int | None = None,
    amp: Literal["auto", "off", "bfloat16", "float16"] = "auto",
    opt: OptimizerName = "adamw",
    model_ema: bool = False,
    compile: bool = False,
    json: bool = False,
    spec: dict[str, Any] | None = None,
) -> None:
    """Estimate operations, memory, speed and days of a training before it is started.

    The formulas, their sources and how far they agree with measurements are in docs/scaling.md.

    Args:
        model: a model's name, or a checkpoint of any known format.
        gpus: number of GPUs.
        gpu: kind of GPU; `this` is the first GPU of this machine.
        batch_size: images of a step on all GPUs; default 256 for each.
        epochs: passes over the images.
        images: images of the training split; the default is that of ImageNet-1k.
        img_size: image size in pixels; default the model's own.
        amp: mixed precision, as for train; auto uses it on every GPU.
        opt: optimizer.
        model_ema: keep an average of the weights.
        compile: with a compiled step, a share that was measured on an H100.
        json: print JSON.
        spec: Any field of the model, such as --spec.patch-size 4.
    """
    settings = {name: value for name, value in locals().items() if name != "json"}
    plan = _plan(Namespace(**settings))
    if json:
        sys.stdout.write(f"{json_text.dumps(plan, indent=2)}\n")
        return
    for line in _text(plan):
        sys.stdout.write(f"{messages.fold(line, messages.terminal_width())}\n")


def _plan(asked: Namespace) -> dict[str, Any]:
    """Return what is printed: the settings, the model, and each way to run the training."""
    gpu = planning.find_gpu(asked.gpu)
    if asked.batch_size is None:
        asked.batch_size = asked.gpus * 256
    _check_numbers(asked)
    if asked.amp == "bfloat16" != gpu.amp:
        raise errors.SettingError(
            f"--amp bfloat16: {asked.gpu} has none; pass --amp float16 or off"
        )
    if asked.amp == "auto":
        asked.amp = gpu.amp
    spec = _spec_of(asked.model, asked.img_size, asked.spec or {})
    run = planning.Training(
        spec=spec,
        opt=asked.opt,
        mixed=asked.amp != "off",
        model_ema=asked.model_ema,
        compiled=asked.compile,
        gpus=asked.gpus,
    )
    runs = [run, replace(run, recompute=True)]
    if asked.gpus > 1 and asked.opt != "muon":  # Muon needs whole matrices, which FSDP splits
        runs += [replace(one, shards=asked.gpus) for one in runs]
    seen = asked.epochs * asked.images
    return vars(asked) | {
        "gpu": gpu.name,
        "available_bytes": gpu.gigabytes * 1e9 - planning.SPARE,
        "image_size": spec.image_size,
        "tokens": spec.num_patches + spec.num_prefix_tokens,
        "parameters": planning.count_parameters(spec).total,
        "forward_flops": planning.forward_flops(spec)._asdict(),
        "ways": [planning.estimate(one, gpu, asked.batch_size, seen) for one in runs],
    }


def _check_numbers(asked: Namespace) -> None:
    """Refuse a schedule without a whole number of images for each GPU."""
    for name in ("gpus", "batch_size", "epochs", "images", "img_size"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise errors.SettingError(f"{messages.flag_name(name)} {value}: must be 1 or more")
    most = min(asked.batch_size, asked.images)
    nearest = most // asked.gpus * asked.gpus
    if asked.batch_size != nearest:
        cure = f"--batch-size {nearest}" if nearest else f"--gpus {most}"
        raise errors.SettingError(
            f"--batch-size {asked.batch_size}: must be divisible by --gpus {asked.gpus}, and at "
            f"most --images {asked.images}; pass {cure}"
        )


def _spec_of(model: str, img_size: int | None, fields: dict[str, Any]) -> ViTSpec:
    """Return the spec of a name or a checkpoint, whose weights are not read."""
    if img_size is not None:
        fields = fields | {"image_size": img_size}
    model = model if os.path.exists(model) else other_names.usual_name(model, table())
    # timm's names of models have neither a dot nor a slash
    if os.path.exists(model) or Path(model).suffix or "/" in model:
        from vitkit.weights.inspection import inspect

        spec = inspect(model).spec.replace(**fields)
    else:
        spec = preset(model, **fields)
    if spec.stem in ("resnet", "backbone"):
        raise errors.SettingError(
            f"the stem {spec.stem!r} has a network before the patches, which the formulas of a "
            "plan leave out; pass a model with the stem convolution, linear or normed_linear"
        )
    return spec


def _text(plan: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a plan: the settings, and a table with a column for each way."""
    (height, width), parts = plan["image_size"], plan["forward_flops"]
    yield f"{plan['model']}: {plan['parameters'] / 1e6:,.2f} M parameters"
    yield f"an image: {height} x {width} pixels, {plan['tokens']:,} tokens"
    shares = ", ".join(f"{part} {flops / 1e9:,.3f}" for part, flops in parts.items())
    yield f"GFLOP of an image, forward: {sum(parts.values()) / 1e9:,.3f} ({shares})"
    each = plan["batch_size"] // plan["gpus"]
    yield f"{plan['gpus']} x {plan['gpu']}, {each:,} images on each in a step"
    yield f"{plan['amp'].replace('off', 'float32')}, {plan['opt']}"
    yield ""
    columns = [_column(way, plan) for way in plan["ways"]]
    for label in columns[0]:
        yield f"{label:24}" + "".join(f"{column[label]:>12}" for column in columns)
    yield ""
    yield (
        "For more images in a step than the largest batch pass --grad-accum-steps to train. Speed "
        "is by shares of the data sheet that an H100 reached; small steps may take half or twice "
        "as long. Exchanges between GPUs are not counted; see docs/scaling.md."
    )


def _column(way: dict[str, Any], plan: dict[str, Any]) -> dict[str, str]:
    """Return a column of the table: label -> cell."""
    memory = {f"{part}, GB": f"{size / 1e9:,.2f}" for part, size in way["memory"].items()}
    fits = way["memory"]["peak"] <= plan["available_bytes"]
    return {
        "parallel": way["parallel"] if plan["gpus"] > 1 else "-",
        "checkpointing": "block" if way["recompute"] else "-",
        "GFLOP of an image": f"{way['training_flops'] / 1e9:,.3f}",
        **memory,
        f"fits in {plan['available_bytes'] / 1e9:,.0f} GB": "yes" if fits else "no",
        "largest batch": f"{way['largest_batch']:,}",
        "ms of a step": f"{way['step']['total'] * 1e3:,.1f}",
        "images/s": messages.short_number(way["images_per_second"]),
        f"hours, {plan['epochs']:,} epochs": messages.short_number(24 * way["days"]),
        "days": messages.short_number(way["days"]),
    }

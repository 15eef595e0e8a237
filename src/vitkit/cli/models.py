"""`vitkit models [PATTERN]`, and `vitkit summary MODEL|CHECKPOINT`."""

import os
import sys
from pathlib import Path

from vitkit import errors, messages, other_names
from vitkit.cli.output import Words, flags, suggest
from vitkit.models.presets import preset, table
from vitkit.weights.catalogue import catalogue, list_models

EXAMPLES = (
    "vitkit models  # all models",
    "vitkit models 'vit_small*'  # those of one size",
    "vitkit models 'vit_small*' --pretrained  # their published weights",
    "vitkit models --pretrained --licence permissive  # Apache-2.0 and MIT",
    "vitkit summary vit_tiny_patch16_224  # equal blocks are one row",
    "vitkit summary vit_tiny_patch16_224 --depth 1 --img-size 384  # shorter, at another size",
    "vitkit summary runs/photos-vit-1  # the model of a run",
)


def models_command(
    pattern: str = "*", *, pretrained: bool = False, licence: str | None = None
) -> None:
    """List the models: name, parameters, image size in pixels, family.

    Args:
        pattern: names to list, with shell wildcards, such as 'vit_base*'.
        pretrained: list the published checkpoints instead: name, classes, licence, source, address.
        licence: with --pretrained, only those under this licence, such as mit, or of this kind:
            permissive (Apache-2.0 or MIT), non-commercial, "own terms" or "not stated".
    """
    if licence is not None:
        _check_licence(licence, pretrained=pretrained)
    pattern = other_names.usual_name(pattern, table())
    rows = _checkpoints(pattern, licence) if pretrained else _presets(pattern)
    if not rows:
        words = "checkpoint's name" if pretrained else "model's name"
        under = f" under the licence {licence!r}" if licence else ""
        listing = "vitkit models"
        if pretrained:
            listing = "vitkit models --pretrained"
        raise errors.SettingError(f"no {words} matches {pattern!r}{under}; `{listing}` lists all")
    sys.stdout.write(messages.format_table(rows, messages.terminal_width()))
    first = rows[0][0]
    if pretrained:
        entry = catalogue()[first]
        suggest(("inspect", entry.address, *flags(trust_pickle=entry.pickle)))
    else:
        suggest(("summary", first), *listing_weights(first))


def listing_weights(model: str) -> list[Words]:
    """Return the command that lists the published weights of a model; none if there are none."""
    if list_models(model, pretrained=True):
        return [("models", model, "--pretrained")]
    return []


def _presets(pattern: str) -> list[list[str]]:
    rows = []
    entries = table()
    for name in list_models(pattern):
        size = "x".join(map(str, preset(name).image_size))
        millions = entries[name].parameters / 1e6
        rows.append([name, f"{millions:>8.2f} M", size, entries[name].family])
    return rows


def _check_licence(licence: str, *, pretrained: bool) -> None:
    """Raise `SettingError` for a licence that no published checkpoint has."""
    if not pretrained:
        raise errors.SettingError("--licence is for published weights; add --pretrained")
    known = {entry.terms for entry in catalogue().values()}
    names = sorted({entry.licence for entry in catalogue().values()} - {""})
    if licence not in known and licence not in names:
        raise errors.SettingError(
            f"--licence {licence}: expected a kind ({', '.join(sorted(known))}) or a licence "
            f"({', '.join(names)})"
        )


def _checkpoints(pattern: str, licence: str | None) -> list[list[str]]:
    rows = []
    # a pattern may name checkpoints or their architecture
    listed = set(list_models(pattern, pretrained=True))
    for name, entry in catalogue().items():
        if name in listed and licence in (None, entry.licence, entry.terms):
            stated = entry.licence or "not stated"
            rows.append([name, f"{entry.classes:>6}", stated, entry.source, entry.address])
    return rows


PLAIN_WIDTH = 140
"""Columns where the output is not a terminal, so that nothing is cut."""
FULL_TABLE_WIDTH = 120
"""Columns that the table needs with all its columns."""


def summary_command(model: str, *, depth: int = 3, img_size: int | None = None) -> None:
    """Print the layer table of a model: shapes, parameters, multiply-adds and memory.

    Args:
        model: a model's name, or a checkpoint of any known format.
        depth: levels of nested modules to show; 0 shows the whole model alone.
        img_size: image size in pixels; default the model's own.
    """
    if depth < 0:
        raise errors.SettingError.about("depth", depth, "must be 0 or more")
    if img_size is not None and img_size < 1:
        raise errors.SettingError.about("img_size", img_size, "must be 1 or more")
    model = model if os.path.exists(model) else other_names.usual_name(model, table())
    # timm's names of models have neither a dot nor a slash
    is_file = os.path.exists(model) or bool(Path(model).suffix) or "/" in model
    if not is_file:
        preset(model)  # a name that does not exist is refused before torch is imported
    import torch
    from rich.console import Console

    from vitkit.layer_table import summary
    from vitkit.models.vit import ViT
    from vitkit.weights.load import load

    if is_file:
        vit = load(model).model
    else:
        with torch.device("meta"):  # shapes suffice
            vit = ViT(preset(model))
    spec = vit.spec
    size = spec.image_size if img_size is None else (img_size, img_size)
    layers = summary(vit, (1, spec.in_channels, *size))
    # a file or a pipe gets the columns of a narrow terminal, too, and cells of any length
    width = messages.terminal_width()
    console = Console(highlight=False, width=width or PLAIN_WIDTH)
    with console.capture() as captured:
        console.print(layers.render(depth, narrow=(width or 0) < FULL_TABLE_WIDTH))
    sys.stdout.write(captured.get())
    if is_file:
        suggest(("inspect", model))
    else:
        suggest(*listing_weights(model))

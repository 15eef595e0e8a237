"""`vitkit models [PATTERN]`."""

from __future__ import annotations

import sys

import tyro
from tyro.conf import Positional

from vitkit.cli.output import Words, align, flags, suggest, terminal_width
from vitkit.errors import SettingError
from vitkit.models.presets import preset, table
from vitkit.other_names import usual_name
from vitkit.weights.catalogue import catalogue, list_models

EXAMPLES = (
    "vitkit models  # all models",
    "vitkit models 'vit_small*'  # those of one size",
    "vitkit models 'vit_small*' --pretrained  # their published weights",
    "vitkit models --pretrained --licence permissive  # Apache-2.0 and MIT",
)


def models_command(
    pattern: Positional[str] = "*", *, pretrained: bool = False, licence: str | None = None
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
    pattern = usual_name(pattern, table())
    rows = _checkpoints(pattern, licence) if pretrained else _presets(pattern)
    if not rows:
        raise _nothing_found(pattern, licence, pretrained=pretrained)
    sys.stdout.write(align(rows, terminal_width()))
    first = rows[0][0]
    if pretrained:
        entry = catalogue()[first]
        suggest(("inspect", entry.address, *flags(trust_pickle=entry.pickle)))
    else:
        suggest(("summary", first), *listing_weights(first))


def run(arguments: list[str]) -> None:
    """Parse the arguments and list."""
    tyro.cli(models_command, args=arguments, prog="vitkit models")


def listing_weights(model: str) -> list[Words]:
    """Return the command that lists the published weights of a model; none if there are none."""
    return [("models", model, "--pretrained")] if list_models(model, pretrained=True) else []


def _nothing_found(pattern: str, licence: str | None, *, pretrained: bool) -> SettingError:
    if licence is not None:
        return SettingError(f"no checkpoint matches {pattern!r} under the licence {licence!r}")
    if pretrained:
        return SettingError(
            f"no checkpoint's name matches {pattern!r}; `vitkit models --pretrained` lists all"
        )
    return SettingError(f"no model's name matches {pattern!r}; `vitkit models` lists all")


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
        raise SettingError("--licence is for published weights; add --pretrained")
    known = {entry.terms for entry in catalogue().values()}
    names = sorted({entry.licence for entry in catalogue().values()} - {""})
    if licence not in known and licence not in names:
        raise SettingError(
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

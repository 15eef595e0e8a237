"""Named models: the lines of `presets.toml`, whose sizes, families and figures are data.

A name that timm knows, such as `vit_base_patch16_224`, means what timm computes by that name.
"""

import functools
import tomllib
from importlib import resources
from typing import Any, NamedTuple

from vitkit.errors import SettingError
from vitkit.messages import did_you_mean
from vitkit.other_names import usual_name
from vitkit.spec import ViTSpec

SIZE_FIELDS = ("width", "depth", "num_heads", "mlp_width")


class PresetEntry(NamedTuple):
    """A line of the table.

    Attributes:
        fields: fields of `ViTSpec` that differ from its defaults, and all of its sizes.
        parameters: number of the model's parameters.
        family: the heading of its section.
        source: the paper or repository of the model.
    """

    fields: dict[str, Any]
    parameters: int
    family: str
    source: str


@functools.cache
def table() -> dict[str, PresetEntry]:
    """Return every named model, in the order of the file, which is read at the first call."""
    text = resources.files("vitkit.models").joinpath("presets.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    entries: dict[str, PresetEntry] = {}
    for family in data["families"].values():
        for name, (size, patch, pixels, parameters, *further) in family["models"].items():
            assert name not in entries, f"presets.toml has {name} twice"
            fields = dict(zip(SIZE_FIELDS, data["sizes"][size], strict=True))
            fields |= {"patch_size": patch, "image_size": pixels} | family.get("spec", {})
            for more in further:  # fields of this line alone
                fields |= more
            entries[name] = PresetEntry(fields, parameters, family["title"], family["source"])
    return entries


def preset(name: str, **overrides: Any) -> ViTSpec:
    """Return the spec of a named model (also as `ViT-B/16`), with `ViTSpec` fields overridden.

    Raises:
        SettingError: no model of that name; the nearest three are named, the usual sizes first.
        SpecError: an unknown field, or a spec that cannot exist.
    """
    name = usual_name(name, entries := table())
    if name not in entries:
        usual_first = sorted(entries, key=lambda entry: "16_224" not in entry)
        near = did_you_mean(name, usual_first, count=3, contained=True)
        raise SettingError(f"there is no model {name!r}{near}; `vitkit models` lists all")
    return ViTSpec(**entries[name].fields | overrides)

"""Find the ViT among the tensors of a file, behind prefixes that wrappers add to names.

Data parallelism, compilation and averaging wrap a model; Lightning modules and own classes hold it
as a part. Then all its tensors have names with one common prefix. Tensors outside of that prefix
are not read, and are listed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from vitkit.errors import CheckpointError
from vitkit.messages import plural
from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import Fitted, Format, State, Step
from vitkit.weights.formats.key_table import few, is_integer
from vitkit.weights.tensor_file import Source

WHOLE_PREFIXES = ("module.", "_orig_mod.", "backbone.")
"""Prefixes that all names of a file may have; they are removed before a format is looked for."""
INNER_PARTS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts that compiling or sharding single blocks of a model puts into the middle of names."""
MOST_PREFIX_PARTS = 5
"""Most parts of a prefix, as in `model.module.student.vit.`."""
FEWEST_TENSORS = 8
"""Least tensors of a ViT; a single block has more."""
PREFERRED = {"base_encoder.": "momentum_encoder."}
"""Of two models in one file, the one to take -> the other: MoCo v3 evaluates its base encoder."""
UNSUPPORTED = {
    "clip": "*clip*",
    "clip_vision_model": "*clip*",
    "siglip": "*siglip*",
    "siglip_vision_model": "*siglip*",
    "siglip2": "*siglip*",
    "siglip2_vision_model": "*siglip*",
    "dinov3_vit": "*dinov3*",
    "ijepa": "*ijepa*",
}
"""`model_type` of transformers -> pattern of the catalogue's names for such models."""


class FoundModel(NamedTuple):
    """A model in a file.

    Attributes:
        form: the format of its names.
        source: its tensors, without the prefix.
        prefix: removed from the names; empty where there was none.
        outside: the names of the other tensors, which are not read.
    """

    form: Format
    source: Source
    prefix: str = ""
    outside: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line on the tensors that are not read, if there are any."""
        if not self.outside:
            return ()
        parts = Counter(name.partition(".")[0] for name in self.outside)
        shown = [f"{part} ({plural(count, 'tensor')})" for part, count in parts.items()]
        return (f"left out, as it is outside of {self.prefix!r}: {few(shown, most=10)}",)


def find_model(source: Source, forms: Iterable[Format]) -> FoundModel | None:
    """Find the model in a file, and its format.

    Args:
        source: the open file.
        forms: formats in the order in which they are tried.

    Returns:
        The model with the names of its format; None for no model.

    Raises:
        CheckpointError: several models, of which none is preferred.
    """
    forms = tuple(forms)
    source = _without_inner_parts(_without_whole_prefix(source))
    form = _format_of(source, forms)
    if form is not None:
        return FoundModel(form, source)
    # No prefix that all names have: the model is one part of several.
    models: dict[str, FoundModel] = {}
    for prefix, names in _groups(source).items():
        if any(prefix.startswith(shorter) for shorter in models):
            continue  # a part of a model already found
        inner = source.renamed({name: name[len(prefix) :] for name in names})
        form = _format_of(inner, forms)
        if form is not None:
            models[prefix] = _part_of(source, prefix, names, form)
    # Of an encoder and its EMA in one file, the one that is evaluated is kept.
    for prefix in list(models):
        for preferred, other in PREFERRED.items():
            if prefix.endswith(preferred):
                models.pop(prefix.removesuffix(preferred) + other, None)
    if len(models) > 1:
        first = next(iter(models))
        raise CheckpointError(
            f"{source.header.path}: contains {len(models)} models, under {few(list(models))}; "
            f"keep the tensors of one, such as those whose names start with {first!r}"
        )
    return next(iter(models.values()), None)


def unknown_format(source: Source, known: Iterable[str]) -> CheckpointError:
    """Return the error for a file in which no model was found."""
    header = source.header
    kind = None
    if "config" in header.documents:
        kind = header.documents["config"].get("model_type")
    if isinstance(kind, str) and kind in UNSUPPORTED:
        return CheckpointError(
            f"{header.path}: model_type {kind!r} of transformers is not supported; for such "
            f"models in timm's format see `vitkit models --pretrained '{UNSUPPORTED[kind]}'`"
        )
    names = ", ".join(list(source)[:3])
    if len(source) > 3:
        names += ", ..."
    stated = ""
    if isinstance(kind, str):  # a document may hold anything
        stated = f"; config.json has model_type {kind!r}"
    return CheckpointError(
        f"{header.path}: {plural(len(source), 'tensor')} ({names}) in no known format{stated}; "
        f"known formats are vitkit, {', '.join(known)}"
    )


def plain_head(source: Source, root: str, target: str) -> Source:
    """Rename the one linear layer under `root` to `target`.

    Its name differs where a container such as `nn.Sequential(nn.Dropout(), nn.Linear(768, 3))`
    replaced the head. A head of more than one layer stays as it is.

    Args:
        source: the open file.
        root: start of all names of the head, such as `heads.`.
        target: the name of the layer in the format, such as `heads.head`.
    """
    names = {name for name in source if name.startswith(root)}
    weight = next((name for name in names if name.endswith(".weight")), None)
    if weight is None:
        return source
    layer = weight.removesuffix(".weight")
    is_matrix = len(source.header.shapes.get(f"{layer}.weight", ())) == 2
    # Only the root itself, or numbered members of a Sequential in its place: heads.1, head.0.2
    in_container = re.sub(r"(\.\d+)+$", "", layer) in (root.rstrip("."), target)
    is_single = names <= {f"{layer}.weight", f"{layer}.bias"}
    if layer == target or not (in_container and is_matrix and is_single):
        return source
    note = f"the head is read from {layer}"
    if re.search(r"\.[1-9]\d*$", layer):
        note += "; the layers before it have no tensors and are assumed to be dropout"

    def rename(name: str) -> str:
        return name.replace(layer, target, 1) if name in names else name

    return source.renamed_by(rename, note)


def _format_of(source: Source, forms: Sequence[Format]) -> Format | None:
    for form in forms:
        if form.detect(source.header):
            return form
    return None


def _without_whole_prefix(source: Source) -> Source:
    """Remove prefixes that all names have, one after the other."""
    for _ in range(MOST_PREFIX_PARTS):  # a forged name may repeat one a million times
        prefix = next((p for p in WHOLE_PREFIXES if all(n.startswith(p) for n in source)), None)
        if prefix is None or not source:
            break
        names = {name: name.removeprefix(prefix) for name in source}
        source = source.renamed(names, f"prefix {prefix!r} removed")
    return source


def _without_inner_parts(source: Source) -> Source:
    """Remove the wrappers of single blocks, unless two names would become one."""
    for part in INNER_PARTS:
        wrapped = [name for name in source if part in name]
        names = {name: name.replace(part, "") for name in source}
        if wrapped and len(set(names.values())) == len(names):
            source = source.renamed(names, f"{part!r} removed from {len(wrapped)} names")
    return source


def _groups(source: Source) -> Mapping[str, list[str]]:
    """Return prefix -> its names, for prefixes that a model may have; short ones first."""
    groups: dict[str, list[str]] = {}
    for name in source:
        prefix = ""
        # "a.b.c.weight" is a member of the groups "a.", "a.b." and "a.b.c.".
        for part in name.split(".")[:-1][:MOST_PREFIX_PARTS]:
            prefix += f"{part}."
            groups.setdefault(prefix, []).append(name)
    large = {prefix: names for prefix, names in groups.items() if len(names) >= FEWEST_TENSORS}
    return dict(sorted(large.items(), key=lambda group: group[0].count(".")))


def _part_of(source: Source, prefix: str, names: Sequence[str], form: Format) -> FoundModel:
    """Return the model whose names have this prefix."""
    inside: dict[str, str] = {}
    for name in names:
        inner_name = name.removeprefix(prefix)
        # The head of MoCo's encoder is for its own training.
        if not (prefix.endswith("base_encoder.") and inner_name.startswith("head.")):
            inside[name] = inner_name
    outside: list[str] = []
    counters: list[str] = []
    for name in source:
        if name in inside:
            continue
        if is_integer(source.header.dtypes[name]):
            counters.append(name)
        else:
            outside.append(name)
    notes = [f"prefix {prefix!r} removed"]
    if counters:
        notes.append(f"whole numbers, not weights, left out: {few(counters)}")
    return FoundModel(form, source.renamed(inside, *notes), prefix, tuple(outside))


# Exact changes that depend on a model's values, not only on its spec; see `Format.settle`.


def double_class_head(state: State) -> tuple[State, Step]:
    """Turn a model that reads its class head alone into the mean of two heads.

    The mean of twice the class head and zero is the class head.
    """
    changed = dict(state)
    # mean(2 h, 0) = h for the logits h of the class head.
    for kind in ("weight", "bias"):
        changed[f"head.{kind}"] = 2 * state[f"head.{kind}"]
        changed[f"head_dist.{kind}"] = torch.zeros_like(state[f"head_dist.{kind}"])
    return changed, Step("folded", "distilled_readout: twice the class head beside one of zeros")


def fold_unread_head(fitted: Fitted) -> Fitted:
    """Fold away a distillation head that the model does not read.

    For classes that hold one head, or the mean of two: a model that reads its class head alone,
    beside another that is not zero, becomes the mean of two heads.
    """
    spec, state, steps = fitted
    if spec.distilled_readout != "cls" or not spec.num_classes:
        return fitted
    if not any(state[f"head_dist.{kind}"].any() for kind in ("weight", "bias")):
        return fitted
    changed, step = double_class_head(state)
    return Fitted(spec.replace(distilled_readout="mean"), changed, [*steps, step])


def fold_register_positions(fitted: Fitted) -> Fitted:
    """Add the position rows of registers to the registers, and set those rows to zero.

    For position tables without rows for registers.
    """
    spec, state, steps = fitted
    if not (spec.num_registers and spec.position_rows and spec.positions_cover_prefix):
        return fitted
    # Token + position is all that the blocks see, so the sum may be split in another way.
    rows = _register_rows(spec)
    if not state["pos_embed"][:, rows].any():
        return fitted
    positions = state["pos_embed"].clone()
    registers = state["reg_token"] + positions[:, rows]
    positions[:, rows] = 0
    step = Step("folded", "pos_embed: the rows of the registers added to the registers")
    changed = {**state, "pos_embed": positions, "reg_token": registers}
    return Fitted(spec, changed, [*steps, step])


def _register_rows(spec: ViTSpec) -> slice:
    """Return the rows of registers in a table that starts with the prefix tokens."""
    return slice(1 + spec.distillation_token, spec.num_prefix_tokens)

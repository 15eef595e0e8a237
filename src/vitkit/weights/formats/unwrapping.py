"""Find the ViT among the tensors of a file, behind prefixes that wrappers add to names.

Data parallelism, compilation and averaging wrap a model; Lightning modules and own classes hold it
as a part. Then all its tensors have names with one common prefix. Tensors outside of that prefix
are not read, and are listed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vitkit.errors import CheckpointError
from vitkit.messages import few, plural
from vitkit.weights.files import Source
from vitkit.weights.formats.format import Format
from vitkit.weights.formats.keys import is_integer

INNER_PARTS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts that compiling or sharding single blocks of a model puts into the middle of names."""
MOST_PREFIX_PARTS = 5
"""Most parts of a prefix, as in `model.module.student.vit.`."""
FEWEST_TENSORS = 8
"""Least tensors of a ViT; a single block has more."""
PREFERRED = {"base_encoder.": "momentum_encoder."}
"""Of two models in one file, the one to take -> the other: MoCo v3 evaluates its base encoder."""
UNSUPPORTED = re.compile("clip|siglip|dinov3|ijepa")
"""Start of a `model_type` of transformers that is not read, and part of the catalogue's names."""


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
        count = plural(len(self.outside), "tensor")
        line = f"{count} left out, outside of {self.prefix!r}: {few(self.outside)}"
        if self.outside:
            return (line,)
        return ()


def find_model(source: Source, forms: Mapping[str, Format]) -> FoundModel:
    """Find the model in a file, and its format.

    Args:
        source: the open file.
        forms: formats by name, in the order in which they are tried.

    Raises:
        CheckpointError: no model, or several of which none is preferred.
    """
    source = _without_inner_parts(source)
    # With the names as they are; else behind a prefix of all names, or of one part of several.
    models: dict[str, FoundModel] = {}
    for prefix, names in _groups(source).items():
        if any(prefix.startswith(shorter) for shorter in models):
            continue  # a part of a model already found
        inner = source.renamed({name: name[len(prefix) :] for name in names})
        for form in forms.values():
            if form.detect(inner.header):
                models[prefix] = _part_of(source, prefix, names, form)
                break
    # Of an encoder and its EMA in one file, the one that is evaluated is kept.
    for prefix in list(models):
        for preferred, other in PREFERRED.items():
            if prefix.endswith(preferred):
                models.pop(prefix.removesuffix(preferred) + other, None)
    if len(models) == 1:
        return next(iter(models.values()))
    problem = _no_model(source, forms)
    if models:
        problem = (
            f"contains {len(models)} models, under {few(list(models))}; keep the tensors of one, "
            f"such as those whose names start with {next(iter(models))!r}"
        )
    raise CheckpointError(f"{source.header.path}: {problem}")


def _no_model(source: Source, known: Iterable[str]) -> str:
    """Describe a file in which no model was found."""
    # A document may hold anything.
    kind = str(source.header.documents.get("config", {}).get("model_type") or "")
    family = UNSUPPORTED.match(kind)
    if family:
        return (
            f"model_type {kind!r} of transformers is not supported; for such models in timm's "
            f"format see `vitkit models --pretrained '*{family[0]}*'`"
        )
    stated = f"; config.json has model_type {kind!r}" if kind else ""
    return (
        f"{plural(len(source), 'tensor')} ({few(list(source), 3)}) in no known format{stated}; "
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
    pattern = rf"((?:{re.escape(root)}|{re.escape(target)}\.)(?:\d+\.)*)(weight|bias)"
    # Only the root itself, or numbered members of a Sequential in its place: heads.1, head.0.2
    names = {n: re.fullmatch(pattern, n) for n in source if n.startswith(root)}
    layers = {match[1] if match else "" for match in names.values()}
    layer = layers.pop() if len(layers) == 1 else ""
    is_matrix = len(source.header.shapes.get(f"{layer}weight", ())) == 2
    if not is_matrix or layer == f"{target}.":
        return source
    note = f"the head is read from {layer[:-1]}"
    if re.search(r"\.[1-9]\d*\.$", layer):
        note += "; the layers before it have no tensors and are assumed to be dropout"

    def rename(name: str) -> str:
        if name in names:
            return f"{target}.{name.removeprefix(layer)}"
        return name

    return source.renamed_by(rename, note)


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
    groups: dict[str, list[str]] = {"": list(source)}
    for name in source:
        prefix = ""
        # "a.b.c.weight" is a member of the groups "a.", "a.b." and "a.b.c.".
        for part in name.split(".")[:-1][:MOST_PREFIX_PARTS]:
            prefix += f"{part}."
            groups.setdefault(prefix, []).append(name)
    ordered = sorted(groups.items(), key=lambda group: group[0].count("."))
    return {
        prefix: names for prefix, names in ordered if len(names) >= FEWEST_TENSORS or not prefix
    }


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
    notes = [f"prefix {prefix!r} removed"] if prefix else []
    if counters:
        notes.append(f"whole numbers, not weights, left out: {few(counters)}")
    return FoundModel(form, source.renamed(inside, *notes), prefix, tuple(outside))

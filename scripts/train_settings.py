"""Write the types of the keywords of `vitkit.train`: `python scripts/train_settings.py`.

`src/vitkit/train_settings.py` has a `TypedDict` with every field of `TrainConfig`,
its type and its description, so that an editor completes and checks the keywords of
`vitkit.train`. A test compares the file with what this script writes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vitkit.training.config.train_config import SECTIONS, not_of_the_kind

PAGE = Path(__file__).parents[1] / "src" / "vitkit" / "train_settings.py"
PARAMETERS = ("data", "recipe")
"""Parameters of `vitkit.train` with names of their own."""
INTERNAL = ("start",)
"""Settings that a run writes for itself."""
OBJECTS = {
    "data_root": "str | Path | None",
    "cache": "str | Path | None",
    "relabel": "str | Path | None",
    "output": "str | Path | None",
    "resume": "str | Path | None",
    "pretrained": "str | Path | bool | None",
    "aa": "str | int | None",
    "spec": "Mapping[str, Any]",
    "loss": "str | Callable[[Tensor, Tensor], Tensor]",
    "transform": "str | Callable[[Any], Any] | None",
    "metrics": "Sequence[str | Callable[[Tensor, Tensor], Any]]",
    "callbacks": "Sequence[str | Callback | Callable[[], Callback]]",
    "teacher": "str | Path | Module | Callable[[], Module] | None",
}
"""Settings that accept more in Python than config.yaml can hold."""
HEADER = '''"""`TrainSettings`: keywords of `vitkit.train` with their types, for editors.

Written by `scripts/train_settings.py` from `TrainConfig`; not to be edited by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from vitkit.training.trainer import Callback


class TrainSettings(TypedDict, total=False):
    """Every setting of a run, by the keyword that `vitkit.train` takes; all of them are optional.

    The names are those of the flags of `vitkit train` and of config.yaml.
    """

'''


def docs(section: type[Any]) -> dict[str, str]:
    """Return field -> the docstring below it, of one section of `TrainConfig`."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert isinstance(after, ast.Expr), node.target.id
            assert isinstance(after.value, ast.Constant), node.target.id
            found[node.target.id] = inspect.cleandoc(str(after.value.value))
    return found


def written(hint: Any) -> str:
    """Return a type as text; tuples become sequences, as a list is accepted, too."""
    if hint is None or hint is type(None):
        return "None"
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(written(part) for part in arguments))
    if origin is Literal:
        return f"Literal[{', '.join(repr(value).replace(chr(39), chr(34)) for value in arguments)}]"
    if origin is tuple:
        parts = dict.fromkeys(written(part) for part in arguments if part is not Ellipsis)
        return f"Sequence[{' | '.join(parts)}]"
    if hasattr(hint, "__metadata__"):
        return written(hint.__origin__)
    return str(hint.__name__)


def page() -> str:
    """Return the text of the file."""
    lines = [HEADER]
    for section in SECTIONS:
        hints, texts = get_type_hints(section), docs(section)
        for name, text in texts.items():
            if name in (*PARAMETERS, *INTERNAL):
                continue
            body = textwrap.indent(text.replace("\\", "\\\\"), "    ").lstrip()
            lines.append(f"    {name}: {OBJECTS.get(name) or written(hints[name])}\n")
            lines.append(f'    """{body}"""\n')
    names = "".join(f"    {name!r},\n" for name in not_of_the_kind()).replace("'", '"')
    lines.append(f"\n\nNOT_OF_THE_KIND = (\n{names})\n")
    lines.append('"""Settings that repeats of a run (other seeds) may differ in."""\n')
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

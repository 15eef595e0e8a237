"""vitkit: plain Vision Transformers, from a folder of images to a model you can look into.

Public names are imported at their first use, so that `import vitkit` takes no time. The stub beside
this file, `__init__.pyi`, lists them with their modules.
"""

from importlib import import_module
from pathlib import Path

_HOMES: dict[str, str] = {}
"""Public name -> the module that defines it."""
for _line in Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines():
    if _line.startswith("from vitkit."):
        _, _module, _, _name, *_ = _line.split()
        _HOMES[_name] = _module

__version__: str
__all__ = sorted(_HOMES)  # noqa: PLE0605 - read from the stub


def __getattr__(name: str) -> object:
    """Import a public name from its module at its first use (PEP 562)."""
    if name == "__version__":
        # reading it takes longer than all other imports of the command line
        value = import_module("importlib.metadata").version("vitkit")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        names = import_module("vitkit.other_names")
        hint = names.GONE.get(name, "")
        if name in names.CLASSES:
            hint = f"; write vitkit.{names.CLASSES[name]}"
        elif name in names.MOVED:
            hint = f"; it is in {names.MOVED[name]} now"
        raise AttributeError(f"module 'vitkit' has no attribute {name!r}{hint}")
    globals()[name] = value  # so that this function is called once for each name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

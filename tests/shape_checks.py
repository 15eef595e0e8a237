"""Check shapes and types at run time in some of the calls of every function of vitkit.

A check costs far more than a call: a short training run calls 30,000 functions, always with the
same shapes, and would take three times as long if all were checked. So in each test the first
call of a function is checked, and then its 4th, 16th, 64th and so on.

Functions without arrays are checked by beartype alone, which takes a tenth of the time.

jaxtyping has an import hook of its own, pytest's option `--jaxtyping-packages`, that checks every
call. Besides, it leaves no use for the bytecode that is stored of whatever vitkit imports, so that
importing vitkit takes five times as long.
"""

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import beartype
from beartype.roar import BeartypeDecorHintException
from jaxtyping import AbstractArray, jaxtyped

CHECKED = frozenset(4**power for power in range(25))
"""The calls of a function that are checked, by their number in a test, from 1."""
DECORATOR = "check_shapes"
made: dict[int, int] = {}
"""How often each function, by the id of its code, was called in the test that is running."""


def has_arrays(hint: Any) -> bool:
    """Return whether a type names the axes of an array, itself or in one of its parts."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(has_arrays, get_args(hint)))


def with_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function all calls of which are checked."""
    try:
        # beartype makes a generator of its own around one, which ends later than the function's
        is_plain = not inspect.isgeneratorfunction(function)
        if is_plain and not any(map(has_arrays, get_type_hints(function).values())):
            return beartype(function)
    except (NameError, BeartypeDecorHintException):
        pass  # a name that only type checkers import, or the parameters of another function
    return jaxtyped(function, typechecker=beartype)


def check_shapes(function: Any) -> Any:
    """Return a function, or a dataclass, some calls of which are checked."""
    if isinstance(function, type):
        if dataclasses.is_dataclass(function):
            function.__init__ = check_shapes(function.__init__)
        return function
    if "Source" in function.__annotations__.values():
        return function  # beartype would read a tensor of the file, which may be no weight
    checked: list[Callable[..., Any]] = []  # built at the first call
    code = id(function.__code__)  # a hash of the code itself goes over its names and values

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        made[code] = number = made.get(code, 0) + 1
        if number not in CHECKED or jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if not checked:
            checked.append(with_checks(function))
        return checked[0](*args, **kwargs)

    return call


class Decorating(ast.NodeTransformer):
    """Decorate every function below its own decorators, and every class above them."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list.append(ast.copy_location(ast.Name(DECORATOR, ast.Load()), node))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list.insert(0, ast.copy_location(ast.Name(DECORATOR, ast.Load()), node))
        return node


class CheckedLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Return the decorated module's code; it is not stored."""
        path = self.get_filename(fullname)
        tree = Decorating().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[DECORATOR] = check_shapes
        super().exec_module(module)


class CheckedFinder(MetaPathFinder):
    """Find the modules of vitkit as usual, and load them with checks."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "vitkit":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = CheckedLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Check what is imported of vitkit from now on."""
    assert "vitkit" not in sys.modules
    sys.meta_path.insert(0, CheckedFinder())

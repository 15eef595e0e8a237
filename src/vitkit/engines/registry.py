"""The engines by name: the packages that each needs, and the precisions that it has."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias

from vitkit import errors, messages

PRECISIONS = ("float32", "bfloat16", "int8")
CPU_PRECISIONS = ("int8",)
"""Precisions of CPU engines only."""
QUANTISERS = ("nncf",)
"""Packages that int8 needs besides those of the engine."""
EXTRA = "vitkit[export]"
"""The extra that has the packages of all engines."""
USUAL_COMPILERS = {"darwin": "clang++", "win32": "cl"}
"""Platform -> the C++ compiler that torch's inductor calls there; g++ on all others."""


@dataclass(frozen=True)
class EngineKind:
    """An engine that may be installed.

    Attributes:
        name: by which users choose it.
        builder: the function that makes it, as `module:function` of this package.
        packages: packages that it needs besides torch.
        precisions: precisions that it can compute in.
        gain: its measured gain over torch on processors, for messages.
        cpu_only: True if it runs on the processor alone.
        compiles: True if it needs a C++ compiler, and takes minutes for a model.
    """

    name: str
    builder: str
    packages: tuple[str, ...]
    precisions: tuple[str, ...]
    gain: str = ""
    cpu_only: bool = True
    compiles: bool = False

    def missing(self, precision: str = "float32") -> list[str]:
        """Return the packages that a precision needs and are not installed; none is imported."""
        packages = self.packages + (QUANTISERS if precision == "int8" else ())
        return [name for name in packages if find_spec(name) is None]


ONNX = ("onnxruntime", "onnx", "onnxscript")
KINDS = (
    EngineKind("torch", "engine:build_eager", (), PRECISIONS[:2], cpu_only=False),
    EngineKind(
        "compile", "engine:build_compiled", (), PRECISIONS[:2], cpu_only=False, compiles=True
    ),
    EngineKind(
        "openvino",
        "openvino_engine:build_openvino",
        ("openvino",),
        PRECISIONS,
        "1.0 to 2.4 times as fast as torch, by the CPU",
    ),
    EngineKind(
        "onnxruntime",
        "onnxruntime_engine:build_onnxruntime",
        ONNX,
        PRECISIONS[:1],
        "1.1 to 2.0 times as fast as torch, by the CPU",
    ),
)
ENGINES = {kind.name: kind for kind in KINDS}
"""Name -> engine; the first one is the model itself."""
CHOICES = ("auto", *ENGINES)
PRECISION_CHOICES = ("auto", *PRECISIONS)
if TYPE_CHECKING:
    EngineChoice: TypeAlias = str
    PrecisionChoice: TypeAlias = str
else:  # the words of the flags `--engine` and `--precision`
    EngineChoice, PrecisionChoice = Literal[CHOICES], Literal[PRECISION_CHOICES]


def compiler_name() -> str:
    """Return the C++ compiler of torch's inductor: `$CXX`, else the usual one of the platform."""
    return os.environ.get("CXX") or USUAL_COMPILERS.get(sys.platform, "g++")


def has_compiler() -> bool:
    """Return True if that compiler is installed; it is not run."""
    return shutil.which(compiler_name()) is not None


def refuse_no_compiler(what: str, instead: str) -> None:
    """Raise `MissingExtraError` if that compiler is not installed.

    Args:
        what: the flag or the engine that needs it.
        instead: flags with which it is not needed.
    """
    if not has_compiler():
        raise errors.MissingExtraError(
            f"{what} needs a C++ compiler, and {compiler_name()} is not on the PATH; install it, "
            f"name another one in the variable CXX, or pass {instead}"
        )


def check_engine(engine: str, precision: str, calibration: object = None) -> None:
    """Refuse an engine or a precision that does not exist, or not together.

    Args:
        engine: a name of `ENGINES`, or `auto`.
        precision: a name of `PRECISIONS`, or `auto`.
        calibration: images, without which there is no int8.

    Raises:
        SettingError: the message names the wrong value.
    """
    values = (("engine", engine, CHOICES), ("precision", precision, PRECISION_CHOICES))
    for noun, value, known in values:
        if value not in known:
            raise errors.SettingError(
                f"{noun} {value!r} does not exist{messages.did_you_mean(value, known)}; "
                f"{noun}s are {', '.join(known)}"
            )
    able = ["auto", *(name for name, kind in ENGINES.items() if precision in kind.precisions)]
    if precision != "auto" and engine not in able:
        raise errors.SettingError(
            f"engine {engine} has no precision {precision}; {' or '.join(able[1:])} has it"
        )
    if precision == "int8" and calibration is None:
        raise errors.SettingError(
            "precision int8 needs images to calibrate with; pass --calibrate DATA (calibrate=), "
            "such as the training data"
        )


def refuse_not_installed(engine: str, precision: str = "float32") -> None:
    """Raise `MissingExtraError` if packages of an engine in a precision are not installed."""
    kind = ENGINES[engine]
    if missing := kind.missing(precision):
        raise errors.MissingExtraError(
            f"engine {engine} needs {messages.plural(len(missing), 'package')} not installed here "
            f"({', '.join(missing)}): pip install '{EXTRA}'; it is {kind.gain}"
        )


VARIABLES = {"ORT_DISABLE_TELEMETRY": "1"}
"""Read by a runtime when it is imported."""
REPORTERS = ("openvino_telemetry",)
"""Packages that only report; the runtimes work without them."""


def quiet_imports() -> None:
    """Switch off the telemetry of the runtimes, before they are imported.

    A process that has imported a runtime before has decided for itself; nothing changes there.
    """
    os.environ.update(VARIABLES)
    for name in REPORTERS:
        # None makes `import name` fail, as if it were not installed
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]


def import_runtime(name: str) -> ModuleType:
    """Import a module of a runtime, with the telemetry switched off.

    Raises:
        MissingExtraError: it is not installed, or broken.
    """
    quiet_imports()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        raise errors.MissingExtraError(
            f"{name} cannot be imported ({reason}); install it with: pip install '{EXTRA}'"
        ) from None

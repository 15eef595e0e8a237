"""The engines by name: the packages that each needs, and the precisions that it has."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, get_args

from vitkit.errors import MissingExtraError, SettingError
from vitkit.messages import did_you_mean, plural

EngineName = Literal["torch", "compile", "openvino", "onnxruntime"]
Precision = Literal["float32", "bfloat16", "int8"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
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
    """

    name: EngineName
    builder: str
    packages: tuple[str, ...]
    precisions: tuple[str, ...]
    gain: str
    cpu_only: bool

    def missing(self, precision: str = "float32") -> tuple[str, ...]:
        """Return the packages that a precision needs and are not installed; none is imported."""
        packages = self.packages
        if precision == "int8":
            packages += QUANTISERS
        return tuple(name for name in packages if find_spec(name) is None)


ONNX = ("onnxruntime", "onnx", "onnxscript")
KINDS = (
    EngineKind("torch", "torch_engines:build_eager", (), PRECISIONS[:2], "", cpu_only=False),
    EngineKind("compile", "torch_engines:build_compiled", (), PRECISIONS[:2], "", cpu_only=False),
    EngineKind(
        "openvino",
        "runtimes:build_openvino",
        ("openvino",),
        PRECISIONS,
        "1.0 to 2.4 times as fast as torch, by the CPU",
        cpu_only=True,
    ),
    EngineKind(
        "onnxruntime",
        "runtimes:build_onnxruntime",
        ONNX,
        PRECISIONS[:1],
        "1.1 to 2.0 times as fast as torch, by the CPU",
        cpu_only=True,
    ),
)
ENGINES: dict[str, EngineKind] = {kind.name: kind for kind in KINDS}
"""Name -> engine."""
CHOICES = ("auto", *ENGINES)
PRECISION_CHOICES = ("auto", *PRECISIONS)


def compiler_name() -> str:
    """Return the C++ compiler of torch's inductor: `$CXX`, else the usual one of the platform."""
    return os.environ.get("CXX") or USUAL_COMPILERS.get(sys.platform, "g++")


def has_compiler() -> bool:
    """Return True if that compiler is installed; it is not run."""
    return shutil.which(compiler_name()) is not None


def check_engine(engine: str, precision: str) -> None:
    """Raise `SettingError` for an engine or a precision that does not exist, or not together.

    Args:
        engine: a name of `ENGINES`, or `auto`.
        precision: a name of `PRECISIONS`, or `auto`.
    """
    values = (("engine", engine, CHOICES), ("precision", precision, PRECISION_CHOICES))
    for noun, value, known in values:
        if value not in known:
            raise SettingError(
                f"{noun} {value!r} does not exist{did_you_mean(value, known)}; "
                f"{noun}s are {', '.join(known)}"
            )
    if engine == "auto" or precision == "auto":
        return
    able = [name for name, kind in ENGINES.items() if precision in kind.precisions]
    if engine not in able:
        raise SettingError(
            f"engine {engine} has no precision {precision}; {' or '.join(able)} has it"
        )


def refuse_not_installed(engine: str, precision: str = "float32") -> None:
    """Raise `MissingExtraError` if packages of an engine in a precision are not installed."""
    kind = ENGINES[engine]
    missing = kind.missing(precision)
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"engine {engine} needs {plural(len(missing), 'package')} that {verb} not installed "
            f"({', '.join(missing)}): pip install '{EXTRA}'; it is {kind.gain}"
        )


def refuse_uncalibrated(precision: str, images: object) -> None:
    """Raise `SettingError` for int8 without calibration images."""
    if precision == "int8" and images is None:
        raise SettingError(
            "precision int8 needs images to calibrate with; pass --calibrate DATA (calibrate=), "
            "such as the training data"
        )


VARIABLES = {"ORT_DISABLE_TELEMETRY": "1"}
"""Read by ONNX Runtime when it is imported."""
REPORTERS = ("openvino_telemetry",)
"""Packages that only report; OpenVINO and NNCF work without them."""


def quiet_imports() -> None:
    """Switch off the telemetry of ONNX Runtime, OpenVINO and NNCF, before they are imported.

    A process that has imported a runtime before has decided for itself; nothing changes there.
    """
    os.environ.update(VARIABLES)
    for name in REPORTERS:
        # None makes `import name` fail, as if it were not installed
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]


def import_runtime(name: str) -> ModuleType:
    """Import a runtime, such as `openvino` or `onnxruntime`, with its telemetry switched off.

    Args:
        name: name of the module.

    Raises:
        ImportError: it is not installed, or broken.
    """
    quiet_imports()
    return importlib.import_module(name)

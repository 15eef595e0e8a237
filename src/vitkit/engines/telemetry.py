"""Import runtimes with their telemetry switched off.

ONNX Runtime's wheels for Linux send events from version 1.29 on, unless `ORT_DISABLE_TELEMETRY` is
set before the first import. OpenVINO and NNCF report through the package `openvino_telemetry`, and
do without it where it cannot be imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

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

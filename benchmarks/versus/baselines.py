"""The libraries that are compared, by name: the baselines, and vitkit's own engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

from vitkit.engines.registry import ONNX, PRECISIONS, QUANTISERS
from vitkit.errors import SettingError
from vitkit.messages import did_you_mean

OPTIMIZED = "optimized"
"""`vitkit.optimized`: the model itself, folded and with the fastest kernels."""
NONE = "none"
"""The word for a benchmark of vitkit alone."""


@dataclass(frozen=True)
class Library:
    """One way to run the model: another library, a bare runtime, or an engine of vitkit."""

    name: str
    kind: Literal["engine", "library", "runtime"]
    source: str  # the engine, the format whose library reads the weights, or the runtime
    modules: tuple[str, ...] = ()  # that must be importable
    precisions: tuple[str, ...] = ("float32", "bfloat16")  # that it has
    compiled: bool = False
    precision: str = "float32"

    def problem(self) -> str:
        """Return why it cannot run here, in one line; empty if it can. Nothing is imported."""
        if self.precision not in self.precisions:
            return f"has only {', '.join(self.precisions)}, not {self.precision}"
        modules = self.modules + (QUANTISERS if self.precision == "int8" else ())
        missing = [name.replace("_", "-") for name in modules if find_spec(name) is None]
        return f"not installed: pip install {' '.join(missing)}" if missing else ""


BASELINES = {
    one.name: one
    for one in (
        Library("timm", "library", "timm", ("timm",)),
        Library("transformers", "library", "huggingface", ("transformers",)),
        Library("torchvision", "library", "torchvision", ("torchvision",)),
        Library("vit-pytorch", "library", "vit-pytorch", ("vit_pytorch",)),
        Library("timm-compiled", "library", "timm", ("timm",), compiled=True),
        Library("onnxruntime", "runtime", "onnxruntime", ONNX, ("float32",)),
        Library("openvino", "runtime", "openvino", ("openvino",), PRECISIONS),
    )
}
"""Name on the command line -> baseline; ratios are relative to the first one that is compared."""
OWN = {
    "torch": Library("vitkit torch", "engine", "torch"),
    OPTIMIZED: Library("vitkit optimized", "engine", OPTIMIZED),
    "compile": Library("vitkit compile", "engine", "compile", compiled=True),
    "openvino": Library("vitkit openvino", "engine", "openvino", ("openvino",), PRECISIONS),
    "onnxruntime": Library("vitkit onnxruntime", "engine", "onnxruntime", ONNX, ("float32",)),
}
"""Name on the command line -> vitkit's own way."""


def choose(
    against: Sequence[str], engines: Sequence[str], precision: str
) -> tuple[list[Library], dict[str, str]]:
    """Return the libraries by their names, the baselines first, and why others are left out.

    A name may be NAME:PRECISION. No names stand for all that are installed, with the first baseline
    in float32 before them.

    Raises:
        SettingError: a name or a precision that does not exist, or a named library that cannot run.
    """
    baselines = against or [f"{next(iter(BASELINES))}:float32", *BASELINES]
    words = [("--against", word, BASELINES, against) for word in baselines if word != NONE]
    words += [("--engines", word, OWN, engines) for word in engines or OWN]
    chosen: dict[str, Library] = {}
    left_out: dict[str, str] = {}
    for flag, word, known, asked in words:
        one = _named(flag, word, known, precision)
        problem = one.problem()
        if problem and asked:
            raise SettingError(f"{flag} {word}: {problem}")
        if problem:
            left_out[one.name] = problem
        else:
            chosen[one.name] = one
    return list(chosen.values()), left_out


def _named(flag: str, word: str, known: dict[str, Library], precision: str) -> Library:
    """Return the library of a word NAME or NAME:PRECISION."""
    name, _, own = word.partition(":")
    own = own or precision
    if name not in known or own not in PRECISIONS:
        near = did_you_mean(name, known)
        raise SettingError(
            f"{flag} {word}: must be one of {', '.join(known)}, or NAME:PRECISION with one of "
            f"{', '.join(PRECISIONS)}{near}"
        )
    shown = known[name].name if own == precision else f"{known[name].name} {own}"
    return replace(known[name], name=shown, precision=own)

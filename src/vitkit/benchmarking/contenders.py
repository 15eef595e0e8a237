"""The contenders of a benchmark by name: vitkit's engines, other libraries, and bare runtimes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from vitkit.engines.registry import ENGINES, PRECISIONS
from vitkit.errors import MissingExtraError, SettingError
from vitkit.messages import did_you_mean

Kind = Literal["engine", "library", "runtime"]
OTHER_PRECISIONS = ("float32", "bfloat16")
"""Precisions that the models of other libraries can be cast to."""


@dataclass(frozen=True)
class Contender:
    """One way to run the model.

    Attributes:
        name: in tables, such as `vitkit openvino`.
        kind: an engine of vitkit, the model class of another library, or a runtime's own converter
            and session without vitkit's engine.
        source: the engine, the format whose library reads the weights, or the runtime.
        modules: that must be importable.
        install: arguments of `pip install` for them.
        precisions: that it has.
        compiled: by `torch.compile`.
    """

    name: str
    kind: Kind
    source: str
    modules: tuple[str, ...] = ()
    install: str = ""
    precisions: tuple[str, ...] = OTHER_PRECISIONS
    compiled: bool = False

    @property
    def is_ours(self) -> bool:
        """True for vitkit's engines."""
        return self.kind == "engine"

    def missing(self) -> tuple[str, ...]:
        """Return the modules that are not installed; nothing is imported."""
        return tuple(name for name in self.modules if find_spec(name) is None)

    def again(self) -> Contender:
        """Return the same contender under another name, to be compared with itself."""
        return replace(self, name=f"{self.name}, again")

    def to_json(self) -> dict[str, Any]:
        """Return what a worker process needs to know of it."""
        return {"kind": self.kind, "source": self.source, "compiled": self.compiled}


OPENVINO_INSTALL, ONNX_INSTALL = "openvino", "onnxruntime onnx onnxscript"
PEERS: dict[str, Contender] = {
    peer.name: peer
    for peer in (
        Contender("timm", "library", "timm", ("timm",), "timm"),
        Contender("transformers", "library", "huggingface", ("transformers",), "transformers"),
        Contender("torchvision", "library", "torchvision", ("torchvision",), "torchvision"),
        Contender("vit-pytorch", "library", "lucidrains", ("vit_pytorch",), "vit-pytorch"),
        Contender("timm-compiled", "library", "timm", ("timm",), "timm", compiled=True),
        Contender(
            "onnxruntime",
            "runtime",
            "onnxruntime",
            ("onnxruntime", "onnx", "onnxscript"),
            ONNX_INSTALL,
            ("float32",),
        ),
        Contender("openvino", "runtime", "openvino", ("openvino",), OPENVINO_INSTALL, PRECISIONS),
    )
}
"""Name on the command line -> contender that is not vitkit's; the first one is the base."""
OTHER_PEER_NAMES = {
    "huggingface": "transformers",
    "lucidrains": "vit-pytorch",
    "vit_pytorch": "vit-pytorch",
    "ort": "onnxruntime",
}
"""Other names of peers -> those of `PEERS`."""
OPTIMIZED = "optimized"
"""`vitkit.optimized`: the model itself, folded and with the fastest kernels."""
OWN_CHOICES = ("torch", OPTIMIZED, *(name for name in ENGINES if name != "torch"))
"""vitkit's contenders: plain, optimized, and the other engines."""
NO_PEERS = "none"
"""The word for a benchmark of vitkit alone."""


@dataclass(frozen=True)
class Lineup:
    """The contenders of a benchmark, the base first, and those that are left out.

    Attributes:
        contenders: to be measured.
        left_out: name -> reason, in one line.
    """

    contenders: tuple[Contender, ...]
    left_out: dict[str, str]


def choose_contenders(against: Sequence[str], engines: Sequence[str], precision: str) -> Lineup:
    """Choose the contenders by their names.

    Args:
        against: names of `PEERS`; empty for all that are installed, `none` for none.
        engines: names of `OWN_CHOICES`; empty for all that are installed.
        precision: one of float32, bfloat16 and int8.

    Raises:
        SettingError: a name that does not exist, or a precision that a named one lacks.
        MissingExtraError: a named contender whose packages are not installed.
    """
    left_out: dict[str, str] = {}
    peers: list[Contender] = []
    if list(against) != [NO_PEERS]:
        named = [_peer(name) for name in against]
        peers = _usable(named or PEERS.values(), precision, bool(named), left_out)
    chosen = [_engine(name) for name in engines or OWN_CHOICES]
    ours = _usable(chosen, precision, bool(engines), left_out)
    if not ours:
        raise SettingError(f"no engine here computes in {precision}; pass --engines torch")
    return Lineup((*peers, *ours), left_out)


def _peer(name: str) -> Contender:
    found = PEERS.get(OTHER_PEER_NAMES.get(name, name))
    if found is None:
        known = [*PEERS, NO_PEERS]
        raise SettingError(
            f"--against {name}: there is no such contender{did_you_mean(name, known)}; it is one "
            f"of {', '.join(known)}"
        )
    return found


def _engine(name: str) -> Contender:
    if name == OPTIMIZED:
        return Contender(f"vitkit {name}", "engine", name)
    if name not in ENGINES:
        near = did_you_mean(name, OWN_CHOICES)
        raise SettingError(
            f"--engines {name}: there is no such engine{near}; it is one of "
            f"{', '.join(OWN_CHOICES)}"
        )
    kind = ENGINES[name]
    return Contender(
        f"vitkit {name}",
        "engine",
        name,
        kind.packages,
        " ".join(kind.packages),
        kind.precisions,
        compiled=name == "compile",
    )


def _usable(
    contenders: Iterable[Contender], precision: str, named: bool, left_out: dict[str, str]
) -> list[Contender]:
    """Return the contenders that can run here, and note the others unless they were named.

    Raises:
        SettingError: a named contender does not have the precision.
        MissingExtraError: a named contender is not installed.
    """
    usable: list[Contender] = []
    for contender in contenders:
        missing = contender.missing()
        if precision not in contender.precisions:
            able = ", ".join(contender.precisions)
            problem: Exception = SettingError(
                f"{contender.name} has no {precision}, only {able}; leave it out, or pass "
                "another --precision"
            )
            left_out[contender.name] = f"has no {precision}"
        elif missing:
            problem = MissingExtraError(
                f"{contender.name} needs {', '.join(missing)}: pip install {contender.install}"
            )
            left_out[contender.name] = f"not installed (pip install {contender.install})"
        else:
            usable.append(contender)
            continue
        if named:
            raise problem
    return usable

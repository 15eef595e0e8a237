"""The contenders of a benchmark by name: vitkit's engines, other libraries, and bare runtimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from vitkit.engines.registry import ENGINES, ONNX, PRECISIONS, QUANTISERS
from vitkit.errors import MissingExtraError, SettingError
from vitkit.messages import did_you_mean

Kind = Literal["engine", "library", "runtime"]
OTHER_PRECISIONS = ("float32", "bfloat16")
"""Precisions that the models of other libraries can be cast to."""


@dataclass(frozen=True)
class Contender:
    """One way to run the model.

    Attributes:
        name: in tables, such as `vitkit openvino`, with the precision where that differs from the
            one of the benchmark, as in `timm float32`.
        kind: an engine of vitkit, the model class of another library, or a runtime's own converter
            and session without vitkit's engine.
        source: the engine, the format whose library reads the weights, or the runtime.
        modules: that must be importable.
        precisions: that it has.
        compiled: by `torch.compile`.
        precision: that it computes in.
        is_again: the base once more, to be compared with itself.
    """

    name: str
    kind: Kind
    source: str
    modules: tuple[str, ...] = ()
    precisions: tuple[str, ...] = OTHER_PRECISIONS
    compiled: bool = False
    precision: str = "float32"
    is_again: bool = False

    @property
    def is_ours(self) -> bool:
        """True for vitkit's engines."""
        return self.kind == "engine"

    def missing(self) -> tuple[str, ...]:
        """Return the modules that are not installed; nothing is imported."""
        modules = self.modules
        if self.precision == "int8":
            modules += QUANTISERS
        return tuple(name for name in modules if find_spec(name) is None)

    def again(self) -> Contender:
        """Return the same contender under another name, to be compared with itself."""
        return replace(self, name=f"{self.name}, again", is_again=True)

    def to_json(self) -> dict[str, Any]:
        """Return what a worker process needs to know of it."""
        return {
            "kind": self.kind,
            "source": self.source,
            "compiled": self.compiled,
            "precision": self.precision,
        }


PEERS: dict[str, Contender] = {
    peer.name: peer
    for peer in (
        Contender("timm", "library", "timm", ("timm",)),
        Contender("transformers", "library", "huggingface", ("transformers",)),
        Contender("torchvision", "library", "torchvision", ("torchvision",)),
        Contender("vit-pytorch", "library", "lucidrains", ("vit_pytorch",)),
        Contender("timm-compiled", "library", "timm", ("timm",), compiled=True),
        Contender("onnxruntime", "runtime", "onnxruntime", ONNX, ("float32",)),
        Contender("openvino", "runtime", "openvino", ("openvino",), PRECISIONS),
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

    A name may carry a precision of its own, as in `timm:float32`; one that is named twice takes
    part once.

    Args:
        against: names of `PEERS`; `none` for none; empty for all that are installed, with the first
            one in float32 as the base.
        engines: names of `OWN_CHOICES`; empty for all that are installed.
        precision: one of float32, bfloat16 and int8, for names without one.

    Raises:
        SettingError: a name or a precision that does not exist, a precision that a named
            contender lacks, or `none` beside names.
        MissingExtraError: a named contender whose packages are not installed.
    """
    if NO_PEERS in against and len(against) > 1:
        raise SettingError(
            f"--against {' '.join(against)}: {NO_PEERS} stands alone; leave out {NO_PEERS}, or the "
            "other names"
        )
    left_out: dict[str, str] = {}
    peers: list[Contender] = []
    if list(against) != [NO_PEERS]:
        words = against or [f"{next(iter(PEERS))}:float32", *PEERS]
        found = [_contender("--against", word, _peer, precision) for word in words]
        peers = _usable(found, bool(against), left_out)
    found = [_contender("--engines", word, _engine, precision) for word in engines or OWN_CHOICES]
    ours = _usable(found, bool(engines), left_out)
    if not ours:
        raise SettingError(
            f"no installed engine computes in {precision}; pass another --precision, or --engines "
            "torch:float32"
        )
    return Lineup((*peers, *ours), left_out)


def _contender(flag: str, word: str, find: Callable[[str], Contender], precision: str) -> Contender:
    """Return the contender of a word NAME or NAME:PRECISION of a flag.

    Raises:
        SettingError: no such name or precision.
    """
    name, colon, own = word.partition(":")
    found = find(name)
    if colon and own not in PRECISIONS:
        raise SettingError(
            f"{flag} {word}: the precision after the colon must be one of "
            f"{', '.join(PRECISIONS)}{did_you_mean(own, PRECISIONS)}"
        )
    own = own or precision
    shown = found.name if own == precision else f"{found.name} {own}"
    return replace(found, name=shown, precision=own)


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
        kind.precisions,
        compiled=name == "compile",
    )


def _usable(
    contenders: Sequence[Contender], named: bool, left_out: dict[str, str]
) -> list[Contender]:
    """Return the contenders that can run here, each once, and note the others unless named.

    Raises:
        SettingError: a named contender does not have the precision.
        MissingExtraError: a named contender is not installed.
    """
    usable: list[Contender] = []
    for contender in dict.fromkeys(contenders):
        missing = [name.replace("_", "-") for name in contender.missing()]
        if contender.precision not in contender.precisions:
            flag = "--engines" if contender.is_ours else "--against"
            problem: Exception = SettingError(
                f"{flag}: {contender.name} has only {', '.join(contender.precisions)}, not "
                f"{contender.precision}; leave it out, or pass NAME:{contender.precisions[0]}"
            )
            left_out[contender.name] = f"has no {contender.precision}"
        elif missing:
            install = f"pip install {' '.join(missing)}"
            problem = MissingExtraError(f"{contender.name} is not installed: {install}")
            left_out[contender.name] = f"not installed ({install})"
        else:
            usable.append(contender)
            continue
        if named:
            raise problem
    return usable

"""The endings of exported models' names."""

from __future__ import annotations

from os import PathLike, fspath

from vitkit.errors import SettingError

ENDINGS = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2", "aoti": ".pt2"}
"""Format -> ending of the file's name."""


def is_artefact(path: str | PathLike[str]) -> bool:
    """Return True for a name that ends like an exported model's."""
    return fspath(path).lower().endswith(tuple(ENDINGS.values()))


def engine_refused(path: str | PathLike[str]) -> SettingError:
    """Return the error for engine flags, which do not apply to an exported model."""
    return SettingError(
        f"{fspath(path)} is an exported model, which has its runtime and precision and runs on the "
        "CPU; leave out --engine, --precision, --calibrate and --device"
    )


def refuse_needless_trust(model: object, *, trust_code: bool) -> None:
    """Raise `SettingError` for `--trust-code` with a file that runs no code.

    Args:
        model: a path; anything else has been opened already.
        trust_code: the flag.
    """
    if not trust_code or not isinstance(model, str | PathLike):
        return
    if not fspath(model).lower().endswith(ENDINGS["torch"]):
        raise SettingError(
            f"--trust-code has no effect: {fspath(model)} is not a .pt2 file and runs no code; "
            "leave it out"
        )

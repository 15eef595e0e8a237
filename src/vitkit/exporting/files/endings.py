"""The endings of exported models' names."""

from __future__ import annotations

from os import PathLike, fspath

ENDINGS = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2", "aoti": ".pt2"}
"""Format -> ending of the file's name."""


def is_artefact(path: str | PathLike[str]) -> bool:
    """Return True for a name that ends like an exported model's."""
    return fspath(path).lower().endswith(tuple(ENDINGS.values()))


def may_hold_code(path: str | PathLike[str]) -> bool:
    """Return True for a name that ends like an exported model of torch, whose file can run code."""
    return fspath(path).lower().endswith(ENDINGS["torch"])

"""The parity tests' own tools: the import that fails in one line, and the key map."""

from __future__ import annotations

import sys

import pytest
import torch
from peers import peer, renamed

BROKEN = {
    "absent": (None, "ModuleNotFoundError: No module named 'absent'"),
    "locked": ("raise RuntimeError('wants torch 1.4,\\n  found 2.13')",
               "RuntimeError: wants torch 1.4, found 2.13"),
    "silent": ("raise ImportError", "ImportError: no message"),
    "hollow": ("", "AttributeError: module 'hollow' has no attribute 'ViT'"),
    "warned": ("import warnings; warnings.warn('old', DeprecationWarning)",
               "DeprecationWarning: old"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_peer_that_cannot_be_imported_fails_in_one_line(name, tmp_path, monkeypatch):
    source, reason = BROKEN[name]
    if source is not None:
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(pytest.fail.Exception) as failure:
        peer(name, "ViT")
    sys.modules.pop(name, None)
    message = str(failure.value)
    assert "\n" not in message
    assert message == (
        f"{name} cannot be imported ({reason}); the parity tests need it: "
        "pip install -c constraints.txt -e '.[parity]'"
    )


def test_a_peer_gives_the_module_one_name_or_some():
    import json

    assert peer("json") is json
    assert peer("json", "dumps") is json.dumps
    assert peer("json", "dumps", "loads") == [json.dumps, json.loads]


def test_the_key_map_is_whole_and_keeps_the_number_of_the_block():
    weights = {"blocks.12.attn.proj.bias": torch.arange(2.0), "pos_embed": torch.ones(1)}
    table = {"blocks.*.attn.proj": "layer.*.out", "pos_embed": "places"}
    made = renamed(weights, table)
    assert set(made) == {"places", "layer.12.out.bias"}
    with pytest.raises(KeyError):
        renamed(weights | {"cls_token": torch.ones(1)}, table)
    with pytest.raises(AssertionError, match="two of our keys"):
        renamed(weights, table | {"pos_embed": "layer.12.out.bias"})

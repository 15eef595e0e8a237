"""Words for messages: hints for what was mistyped."""

from __future__ import annotations

from pathlib import Path

from vitkit import messages


def test_hints_name_the_nearest_word_and_the_nearest_folder(tmp_path: Path):
    assert messages.did_you_mean("wdith", ["width", "depth"]) == "; did you mean 'width'?"
    assert messages.did_you_mean("qqqq", ["width"]) == ""
    for name in "abcdefghij":
        (tmp_path / name).mkdir()
    hint = messages.nearest_parent(tmp_path / "no" / "such")
    assert str(tmp_path) in hint
    assert "a/, b/" in hint
    assert "and 2 more" in hint

"""Words for messages: hints for what was mistyped."""

from pathlib import Path

from vitkit import messages


def test_hints_name_the_nearest_word_and_the_nearest_folder(tmp_path: Path):
    assert messages.did_you_mean("wdith", ["width", "depth"]) == " (did you mean 'width'?)"
    assert messages.did_you_mean("qqqq", ["width"]) == ""
    for name in ("photos", "photos2", "zebra", ".phots"):
        (tmp_path / name).mkdir()
    nearest = f"the nearest folder that exists is {tmp_path}"
    assert (
        messages.nearest_parent(tmp_path / "Phots" / "a") == f"{nearest}, with: photos/, photos2/"
    )
    assert messages.nearest_parent(tmp_path / "zzzz") == nearest

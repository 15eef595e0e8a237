"""Names of results that follow from the names of their inputs."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from tiny_checkpoint import save_tiny

from vitkit import cli


def test_a_long_name_is_cut_between_two_letters(tmp_path: Path):
    # a letter of three bytes, so that the limit of 200 bytes is inside one
    image = tmp_path / "images" / f"a{'写' * 80}.jpg"
    image.parent.mkdir()
    Image.new("L", (8, 8), 99).save(image)
    checkpoint = save_tiny(tmp_path / "tiny.safetensors", ["0", "1"])
    words = ["explain", checkpoint, str(image), "--output", str(tmp_path / "out")]
    assert cli.run(words) == 0
    written = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert written
    assert all(name.startswith(f"a{'写' * 66}") for name in written)
    "".join(written).encode("utf-8")  # raises where a letter was cut

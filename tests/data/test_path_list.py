"""Packed paths are the paths that were packed, and a folder's come in the order of their parts."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from image_files import save

from vitkit.data.datasets.path_list import Paths
from vitkit.data.sources.image_folder import open_folder

NAMES = ["a/1.jpg", "", "b c/ü.jpg", os.fsdecode(b"latin-\xff.jpg"), "/other/2.jpg"]


def test_packed_paths_are_the_paths() -> None:
    paths = Paths(NAMES, Path("/root"))
    expected = [Path("/root") / name for name in NAMES]
    assert [*paths] == expected
    assert [paths[index] for index in (-1, 0, 3)] == [expected[4], expected[0], expected[3]]
    assert [*paths.take(np.array([3, 0, 3]))] == [expected[3], expected[0], expected[3]]
    assert len(paths) == len(paths.take(np.arange(5))) == 5
    assert paths == Paths(expected)
    assert paths != Paths(expected[::-1])


def test_a_folder_is_in_the_order_of_the_parts_of_its_paths(tmp_path: Path) -> None:
    names = ["x", "sub/x", "sub-1", "sub/deep/x", "sub/deep-1", "Sub", "sub 1"]
    for label in ("a", "b"):
        for seed, name in enumerate(names):
            save(tmp_path / "train" / label / f"{name}.png", seed)
    paths = [*open_folder(tmp_path).splits["train"].paths]
    assert paths == sorted(paths, key=lambda path: path.parts)
    assert len(paths) == 2 * len(names)

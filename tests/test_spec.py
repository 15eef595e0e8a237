"""`ViTSpec` and `Preprocess`: what they refuse, and that they survive JSON."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vitkit
from vitkit import SpecError


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"image_size": 250}, "250 (H) is not divisible by patch_size 16; .*: 240 or 256"),
     ({"image_size": (224, 230)}, "230 (W) is not divisible .*: 224 or 240"),
     ({"image_size": 8}, "the nearest sizes that are: 16"),
     ({"width": 510}, "width 510 is not divisible by num_heads 12; use 10 or 15 heads"),
     ({"depth": 0}, "depth = 0: must be 1 or more"),
     ({"dept": 3}, "no field 'dept' .did you mean 'depth'"), ({"zzzzzz": 3}, "no field 'zzzzzz'$"),
     ({"drop_path": 1.0}, "drop_path = 1.0: must be below 1"),
     ({"in_channels": 4}, "in_channels = 4"), ({"activation": "gelo"}, "activation = 'gelo'"),
     ({"class_token": False}, "pooling 'cls' needs class_token=True"),
     ({"norm_eps": float("nan")}, "norm_eps = nan: .*finite"),
     ({"width": True}, "width = True: must be a whole number"),
     ({"num_heads": "12"}, "num_heads = '12': must be a whole number"),
     ({"depth": 0, "width": 0}, r"\(and 1 more\)"),
     ({"image_size": [1, 2, 3]}, r"image_size = \[1, 2, 3\]: must be a whole number, or two"),
     ({"image_size": []}, r"image_size = \[\]: must be a whole number, or two"),
     ({"patch_size": "big"}, "patch_size = 'big': must be a whole number, or two: height and"),
     ({"image_size": (32, 1.5)}, "image_size = 1.5: must be a whole number")],
)  # fmt: skip
def test_an_impossible_spec_is_refused_with_the_numbers(fields, message):
    with pytest.raises(SpecError, match=message.replace("(H)", r"\(H\)").replace("(W)", r"\(W\)")):
        vitkit.ViTSpec(**fields)


def test_numpys_integers_are_sizes_too():
    assert vitkit.ViTSpec(image_size=np.int64(32), patch_size=np.int32(8)).grid == (4, 4)


def test_a_head_width_of_its_own_frees_the_number_of_heads():
    spec = vitkit.ViTSpec(width=512, num_heads=6, head_width=85)
    assert spec.attention_width == 510


@given(
    grid=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    patch=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    heads=st.integers(1, 8),
    head_width=st.integers(1, 64),
    rate=st.floats(0, 0.99),
    token=st.booleans(),
)
def test_any_spec_survives_json_bit_for_bit(grid, patch, heads, head_width, rate, token):
    spec = vitkit.ViTSpec(
        image_size=(grid[0] * patch[0], grid[1] * patch[1]),
        patch_size=patch,
        width=heads * head_width,
        num_heads=heads,
        drop_path=rate,
        class_token=token,
        pooling="cls" if token else "mean",
    )
    again = vitkit.ViTSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.grid == grid


def test_one_number_means_a_square_and_specs_are_frozen():
    spec = vitkit.ViTSpec(image_size=32, patch_size=8)
    assert (spec.image_size, spec.patch_size, spec.num_patches) == ((32, 32), (8, 8), 16)
    with pytest.raises(AttributeError):
        spec.width = 3
    assert spec.replace(depth=3).depth == 3
    with pytest.raises(SpecError, match="did you mean 'depth'"):
        spec.replace(dpth=3)


def test_preprocess_refuses_what_no_image_can_become():
    with pytest.raises(SpecError, match="mean has 1 channels and std has 3"):
        vitkit.Preprocess(mean=(0.5,))
    with pytest.raises(SpecError, match="must be positive"):
        vitkit.Preprocess(std=(0.5, 0.0, 0.5))
    with pytest.raises(SpecError, match="crop_ratio"):
        vitkit.Preprocess(crop_ratio=1.5)
    grey = vitkit.Preprocess(image_size=28, mean=(0.1,), std=(0.3,), fit="squash")
    assert grey.channels == 1
    assert vitkit.Preprocess.from_json(json.loads(json.dumps(grey.to_json()))) == grey


def test_a_preprocess_works_where_nothing_else_is_imported():
    """As in a process that a loader has spawned, and that has read it from a pickle."""
    program = (
        "import numpy as np; from vitkit.spec import Preprocess;"
        "print(*Preprocess(image_size=4)(np.zeros((9, 9, 3), np.uint8)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"3 4 4\n"

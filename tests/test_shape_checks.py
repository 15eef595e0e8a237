"""The checks of shapes are on while the tests run."""

from __future__ import annotations

import pytest
import shape_checks
import torch
from jaxtyping import TypeCheckError

from vitkit.models.attention import scaled_dot_product_attention


def test_a_wrong_shape_is_refused_in_the_calls_that_are_checked():
    keys = torch.zeros(1, 2, 3, 4)
    checked = [number for number in range(1, 40) if shape_checks.is_checked(number)]
    assert checked == [1, 2, 3, 4, 8, 16, 32]
    for number in range(1, 9):
        if number in checked:
            with pytest.raises(TypeCheckError):
                scaled_dot_product_attention(keys[0], keys, keys)
        else:
            scaled_dot_product_attention(keys, keys, keys)

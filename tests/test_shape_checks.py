"""The checks of shapes are on while the tests run."""

import pytest
import shape_checks
import torch
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError

from vitkit import scaled_dot_product_attention
from vitkit.evaluation.intervals import wilson_interval


def test_a_wrong_shape_is_refused_in_the_calls_that_are_checked():
    keys = torch.zeros(1, 2, 3, 4)
    checked = [number for number in range(1, 40) if number in shape_checks.CHECKED]
    assert checked == [1, 4, 16]
    for number in range(1, 6):
        if number in checked:
            with pytest.raises(TypeCheckError):
                scaled_dot_product_attention(keys[0], keys, keys)
        else:
            scaled_dot_product_attention(keys, keys, keys)


def test_a_wrong_type_is_refused_where_there_are_no_arrays():
    with pytest.raises(BeartypeCallHintParamViolation):
        wilson_interval("3", 4)

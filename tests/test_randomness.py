"""Random numbers as functions of their keys: golden values, uniformity, independence."""

import numpy as np
import pytest

from vitkit.randomness import as_uniform, hash64, integer_hash, permutation, uniform


def test_golden_values_that_must_never_change() -> None:
    assert int(hash64()) == 0
    assert int(hash64(1, 2, 3)) == 0x6AE515C1C0AC7E37
    assert int(hash64(2, 1)) == 0xE06DD043328BD285
    assert int(hash64(-1)) == 0xE4D971771B652C20
    assert float(uniform(7, 8)) == 0.22914191268287798
    assert permutation(0, 0, 8).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]
    assert permutation(0, 1, 8).tolist() == [7, 0, 1, 6, 3, 4, 5, 2]


def test_a_plain_restatement_agrees() -> None:
    def restated(*keys: int) -> int:
        state, whole = 0, 2**64 - 1
        for key in keys:
            state = (state + 0x9E3779B97F4A7C15 + key) & whole
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & whole
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & whole
            state ^= state >> 31
        return state

    for keys in [(0,), (5, 6), (2**64 - 1, 2**63), (-3, 10**30, 0, 1)]:
        assert int(hash64(*keys)) == restated(*keys)


def test_arrays_broadcast_and_agree_with_single_keys() -> None:
    rows, columns = np.arange(3)[:, None], np.arange(4)[None, :]
    grid = hash64(9, rows, columns)
    assert grid.shape == (3, 4)
    assert grid.dtype == np.uint64
    assert grid[2, 1] == hash64(9, 2, 1)
    assert hash64(np.int64(-1)) == hash64(-1) == hash64(np.uint64(2**64 - 1))


def test_keys_are_not_interchangeable() -> None:
    numbers = np.arange(300)
    table = hash64(numbers[:, None], numbers[None, :])
    assert len(np.unique(table)) == table.size
    assert hash64(1, 2) != hash64(2, 1)
    assert hash64(1) != hash64(1, 0) != hash64(0, 1)


def test_only_integers_are_keys() -> None:
    with pytest.raises(TypeError, match="float64"):
        hash64(1, np.array([0.5]))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_numbers_are_uniform_along_every_key(axis: int) -> None:
    count, bins = 100_000, 100
    keys: list[int | np.ndarray] = [3, 4, 5]
    keys[axis] = np.arange(count)
    numbers = uniform(*keys)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    observed = np.bincount((numbers * bins).astype(int), minlength=bins)
    chi_square = ((observed - count / bins) ** 2 / (count / bins)).sum()
    assert 50 < chi_square < 160  # 99 degrees of freedom: 99 +- 4.3 standard deviations
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015


def test_one_half_is_as_likely_in_every_bit() -> None:
    bits = (hash64(11, np.arange(20_000))[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    np.testing.assert_allclose(bits.mean(axis=0), 0.5, atol=0.02)


def test_a_permutation_is_one_and_depends_on_seed_and_epoch() -> None:
    orders = {
        (seed, epoch): tuple(permutation(seed, epoch, 50)) for seed in (0, 1) for epoch in (0, 1, 2)
    }
    assert len(set(orders.values())) == 6
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert permutation(0, 2, 50).tolist() == list(orders[0, 2])
    assert permutation(0, 0, 0).shape == (0,)
    assert permutation(0, 0, 5).dtype == np.int64


def test_every_place_is_reached_equally_often() -> None:
    places = np.array([permutation(0, epoch, 10).argsort()[0] for epoch in range(3000)])
    np.testing.assert_allclose(np.bincount(places, minlength=10), 300, atol=75)


def test_nothing_else_is_read_or_changed() -> None:
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    first = permutation(5, 6, 100)
    np.random.seed(1)
    np.testing.assert_array_equal(permutation(5, 6, 100), first)
    np.random.seed(0)
    np.testing.assert_array_equal(np.random.get_state()[1], state)


def test_plain_integers_give_the_floats_of_arrays():
    for key in range(50):
        assert as_uniform(integer_hash(7, key)) == uniform(7, np.array([key]))[0] == uniform(7, key)

from __future__ import annotations

import numpy as np

from tests.model.sampling.oracle import chi_square_deviate
from tokenmill.model.sampling.draws import keys_of, mix, uniforms


def grid(rng: np.random.Generator, num_seeds: int = 400, num_positions: int = 500) -> np.ndarray:
    """Draws of neighbouring seeds (rows) at neighbouring positions (columns), from random corners of the key space."""
    seeds = int(rng.integers(-(2**62), 2**62)) + np.arange(num_seeds)
    positions = int(rng.integers(0, 2**20)) + np.arange(num_positions)
    draws = uniforms(keys_of(np.repeat(seeds, num_positions))[0], np.tile(positions, num_seeds))
    return draws.reshape(num_seeds, num_positions)


def test_draws_lie_in_the_unit_interval_and_depend_only_on_the_key(rng):
    seeds = rng.integers(-(2**63), 2**63 - 1, size=1000)
    positions = rng.integers(0, 2**31, size=1000)
    draws = uniforms(keys_of(seeds)[0], positions)
    assert draws.dtype == np.float64
    assert (draws >= 0.0).all()
    assert (draws < 1.0).all()
    order = rng.permutation(1000)
    np.testing.assert_array_equal(uniforms(keys_of(seeds[order])[0], positions[order]), draws[order])
    assert uniforms(keys_of(seeds[:1])[0], positions[:1])[0] == draws[0]


def test_a_negative_seed_is_its_twos_complement():
    position = np.array([7])
    minus_one, one = keys_of(np.array([-1])), keys_of(np.array([1]))
    largest = keys_of(np.array([2**64 - 1], dtype=np.uint64))
    assert (uniforms(minus_one, position) == uniforms(largest, position)).all()
    assert (uniforms(minus_one, position) != uniforms(one, position)).all()


def test_the_hash_is_splitmix64():
    # Published first outputs of SplitMix64 with state 1234567 (the test vector of several implementations).
    gamma = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + gamma * n) % 2**64 for n in range(1, 4)], dtype=np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_draws_are_uniform(rng):
    draws = grid(rng)
    for part in (draws, draws[:, :1], draws[:1], (draws * 2**20) % 1.0):
        counts = np.bincount((part.ravel() * 64).astype(np.int64), minlength=64)
        assert abs(chi_square_deviate(counts, np.full(64, 1 / 64))) < 5.5


def test_neighbouring_positions_and_seeds_are_independent(rng):
    draws = grid(rng)
    for lag in (1, 2, 3, 7, 64):
        for first, second in (
            (draws[:, :-lag], draws[:, lag:]),
            (draws[:-lag], draws[lag:]),
            (draws[:-lag, :-lag], draws[lag:, lag:]),
        ):
            correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
            assert abs(correlation) * np.sqrt(first.size) < 5.5
            cells = (first.ravel() * 8).astype(np.int64) * 8 + (second.ravel() * 8).astype(np.int64)
            assert abs(chi_square_deviate(np.bincount(cells, minlength=64), np.full(64, 1 / 64))) < 5.5


def test_streams_are_independent(rng):
    seeds, positions = np.arange(50_000), np.full(50_000, 3)
    first, second = uniforms(keys_of(seeds), positions)
    assert (first != second).all()
    assert abs(np.corrcoef(first, second)[0, 1]) * np.sqrt(50_000) < 5.5


def test_no_two_keys_of_a_batch_share_a_draw(rng):
    draws = grid(rng)
    assert len(np.unique(draws)) == draws.size

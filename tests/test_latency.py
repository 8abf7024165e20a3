"""Trees of messages and barriers: by hand, by drawing, and by convolving."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lowcomm.cost.latency import blocking, levels, pair_seconds, sigma_of, tree_mean, tree_over_pairs, tree_samples


def test_equation_7_is_what_is_drawn() -> None:
    rng = np.random.default_rng(0)
    for mu, sigma in ((0.0, 0.2), (0.5, 1.0), (1.0, 0.7)):
        drawn = rng.lognormal(mu, sigma, (4_000_000, 2)).max(1).mean()
        assert pair_seconds(mu, sigma) == pytest.approx(drawn, rel=0.005)
    assert pair_seconds(0.7, 0.0) == pytest.approx(math.exp(0.7))


def test_sigma_of_a_ratio() -> None:
    x = np.random.default_rng(0).lognormal(0.0, sigma_of(0.8), 4_000_000)
    assert x.std() / x.mean() == pytest.approx(0.8, rel=0.01)


@pytest.mark.parametrize("workers", [2, 4, 64, 1024])
def test_without_variance_a_tree_takes_log2_of_its_workers(workers: int) -> None:
    assert tree_over_pairs(workers, 0.0) == math.log2(workers)
    assert tree_samples(workers, 0.0, 3).tolist() == [math.log2(workers)] * 3


@pytest.mark.parametrize(("workers", "samples"), [(2, 400_000), (16, 200_000), (256, 20_000)])
@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.5])
def test_convolved_and_drawn_trees_agree(workers: int, samples: int, ratio: float) -> None:
    sigma = sigma_of(ratio)
    drawn = tree_samples(workers, sigma, samples)
    error = drawn.std() / math.sqrt(samples)
    assert 4 * error < 0.02 * drawn.mean()
    assert tree_mean(workers, sigma) == pytest.approx(drawn.mean(), abs=4 * error + 0.002 * drawn.mean())
    if workers == 2:
        assert tree_mean(2, sigma) == pytest.approx(pair_seconds(-(sigma**2) / 2, sigma), rel=1e-3)


@pytest.mark.parametrize("workers", [0, 1, 3, 1000])
def test_trees_are_full(workers: int) -> None:
    with pytest.raises(ValueError, match=f"{workers} workers do not fill a binary tree"):
        levels(workers)


def test_a_barrier_by_hand() -> None:
    """Two workers: with a barrier, or as a pair, each round takes its slower worker; without spread nothing is lost."""
    both = [blocking(2, [1, 3], outer_steps=5, mu=0.3, sigma=0.8, group=g) for g in (None, 2)]
    assert np.array_equal(*both)
    draws = np.random.default_rng(0)
    rounds = [np.cumsum(draws.lognormal(0.3, 0.8, (2, 3)), axis=1)[:, [0, 2]].max(0) for _ in range(5)]
    assert both[0] == pytest.approx(sum(rounds))
    assert blocking(8, [4], outer_steps=3, mu=1.0, sigma=0.0, group=None) == pytest.approx(12 * math.e)


def test_pairs_are_done_before_everybody_waits_for_everybody() -> None:
    steps = [1, 10, 100]
    everybody, pairs = (blocking(64, steps, outer_steps=40, mu=1.0, sigma=0.7, group=g) for g in (None, 2))
    assert (pairs < everybody).all()
    assert (np.diff(everybody / pairs) < 0).all()  # the fewer inner steps, the more a barrier costs


def test_rounds_have_steps() -> None:
    with pytest.raises(ValueError, match="inner_steps must be at least 1, got 0"):
        blocking(2, [0, 1], outer_steps=1, mu=0.0, sigma=1.0, group=None)

"""NoLoCo's theory: which settings hold replicas together, simulated and in closed form; Theorem 1."""

from __future__ import annotations

import numpy as np
import pytest

from lowcomm.contraction import contraction_bound, differing
from lowcomm.noloco import Quadratic, driven_bounds, growth, idle_growth, paper_bounds, second_moments


def test_bounds_by_hand() -> None:
    """Pairs: 2 (1 - alpha^2). A group of all: 2 (1 + alpha), as of any heavy ball."""
    assert contraction_bound(0.5, 2) == 1.5
    assert contraction_bound(0.5, 2, 64) == 1.5
    assert contraction_bound(0.5, 8, 8) == 3.0
    assert contraction_bound(0.0, 4) == 2.0
    assert contraction_bound(0.5, 4) == pytest.approx(2 * 0.75 / (1 + 0.5 * (1 - 1.5)))
    assert paper_bounds(0.5, 2) == (0.5, 1.5)
    assert differing(2, 2) == 1
    assert differing(2, 4) == pytest.approx(2 / 3)
    assert differing(2) == 0.5
    assert differing(2, 5) == 0.75  # a pair and three


@pytest.mark.parametrize("group", [2, 3, 4, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.9])
def test_the_bound_is_where_second_moments_begin_to_grow(momentum: float, group: int) -> None:
    bound, q = contraction_bound(momentum, group), differing(group)
    for pull, grows in ((0.999 * bound, False), (1.001 * bound, True)):
        assert (growth(second_moments(momentum, pull, q)) > 1) == grows


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.7])
def test_idle_pairs_drift_apart_from_the_bound_on(momentum: float) -> None:
    """Simulated with 512 replicas, to 2 % of 2 (1 - alpha^2)."""
    bound = 2 * (1 - momentum**2)
    assert idle_growth(momentum, 0.98 * bound, 2) < 1
    assert idle_growth(momentum, 1.02 * bound, 2) > 1


@pytest.mark.parametrize("group", [2, 4])
def test_idle_growth_is_the_largest_eigenvalue(group: int) -> None:
    for momentum, pull in ((0.5, 0.2), (0.5, 0.7), (0.5, 1.4), (0.3, 1.9), (0.8, 0.5)):
        expected = growth(second_moments(momentum, pull, differing(group, 512)))
        assert idle_growth(momentum, pull, group) == pytest.approx(expected, rel=0.01)


def test_idle_pairs_come_together_with_any_small_pull() -> None:
    """Eq. 74 asks for gamma > alpha; with a tenth of that replicas come together too, only slower."""
    assert idle_growth(0.5, 0.05, 2) < 0.995


def test_driven_pairs_have_other_bounds() -> None:
    """Replicas that reach their optimum each round: at alpha = 0.9 too small a pull will not hold them."""
    assert driven_bounds(0.5, 0.7, 2) == (pytest.approx(0.001), pytest.approx(2.429, abs=0.005))
    low, high = driven_bounds(0.9, 0.7, 2)
    assert (low, high) == (pytest.approx(0.15, abs=0.01), pytest.approx(1.49, abs=0.01))
    problem = Quadratic(curvature=1.0, noise=1.0, inner_lr=0.9, inner_steps=5)
    outer = {"momentum": 0.9, "lr": 0.7, "group": 2, "replicas": 512, "turns": 300, "weights": 4}
    for pull, grows in ((0.9 * low, True), (1.1 * low, False), (0.95 * high, False), (1.05 * high, True)):
        spread = problem.simulate(pull=pull, **outer).std(1).mean(1)
        assert (spread[-1] > 2 * spread[30:60].mean()) == grows


@pytest.mark.parametrize(("group", "replicas"), [(2, 4), (2, 16), (4, 16), (16, 16)])
def test_variances_on_the_quadratic_are_the_closed_form(group: int, replicas: int) -> None:
    problem = Quadratic(curvature=1.0, noise=4.0, inner_lr=0.1, inner_steps=5)
    outer = {"momentum": 0.5, "lr": 0.7, "pull": 0.7, "group": group, "replicas": replicas}
    of_mean, apart = problem.stationary(**outer)
    phi = problem.simulate(**outer, turns=400, weights=400)[100:]
    means = phi.mean(1, keepdims=True)
    assert np.square(means).mean() == pytest.approx(of_mean, rel=0.05)
    assert np.square(phi - means).mean() == pytest.approx(apart, rel=0.05, abs=1e-12)
    assert (apart < 1e-12) == (group == replicas)


def test_the_mean_goes_to_the_optimum() -> None:
    """Theorem 1: E phi -> 0, from a start of 1."""
    problem = Quadratic(curvature=1.0, noise=0.01, inner_lr=0.1, inner_steps=5)
    phi = problem.simulate(momentum=0.5, lr=0.7, pull=0.7, group=2, replicas=8, turns=60, weights=200)
    assert phi[0].mean() == 1
    assert abs(phi[-1].mean()) < 1e-3


def test_the_spread_goes_with_the_square_of_the_inner_learning_rate() -> None:
    """Theorem 1 says so of the variance; so it is of the spread, where inner steps leave most of phi (small H lr).

    The variance of the mean over replicas is proportional to the learning rate itself there.
    """
    outer = {"momentum": 0.5, "lr": 0.7, "pull": 0.7, "group": 2, "replicas": 8}
    small, double = (Quadratic(1.0, 1.0, omega, 5).stationary(**outer) for omega in (0.0005, 0.001))
    assert double[1] / small[1] == pytest.approx(4, rel=0.01)
    assert double[0] / small[0] == pytest.approx(2, rel=0.01)


def test_what_grows_without_end_has_no_variance() -> None:
    with pytest.raises(ValueError, match="no stationary variance: second moments grow by"):
        Quadratic(1.0, 1.0, 0.01, 5).stationary(momentum=0.5, lr=0.7, pull=1.6, group=2, replicas=512)
    with pytest.raises(ValueError, match="inner_lr x curvature = 2 must be above 0 and at most 1"):
        Quadratic(2.0, 1.0, 1.0, 5)

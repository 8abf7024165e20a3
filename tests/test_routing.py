"""Groups and routes: drawn alike everywhere, fair, and as the seed says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lowcomm.methods.peers import RandomGroup
from lowcomm.methods.routing import fixed_route, groups, random_route


@pytest.mark.parametrize(("replicas", "size"), [(2, 2), (4, 2), (5, 2), (7, 2), (7, 3), (7, 4), (8, 4), (9, 9)])
def test_groups_cover_all_replicas_once_and_leave_nobody_alone(replicas: int, size: int) -> None:
    for turn in range(20):
        found = groups(3, (0, turn), replicas, size)
        assert sorted(itertools.chain(*found)) == list(range(replicas))
        assert len(found) == replicas // size
        assert min(map(len, found)) >= size
        assert max(map(len, found)) - min(map(len, found)) <= 1
        for replica in range(replicas):
            assert RandomGroup(size, 3).members((0, turn), replicas, replica) in found


def test_odd_replicas_by_hand() -> None:
    """Five replicas in pairs are one pair and one group of three; seven in groups of four are one group."""
    assert sorted(map(len, groups(0, (0, 0), 5, 2))) == [2, 3]
    assert groups(0, (0, 0), 7, 4) == [list(range(7))]


def test_groups_depend_on_the_turn_and_on_the_seed_alone() -> None:
    drawn = [groups(1, (0, t), 8, 2) for t in range(50)]
    assert drawn == [groups(1, (0, t), 8, 2) for t in range(50)]
    assert len({str(g) for g in drawn}) > 30
    assert drawn != [groups(2, (0, t), 8, 2) for t in range(50)]
    assert drawn != [groups(1, (1, t), 8, 2) for t in range(50)]  # another fragment


def test_every_pair_meets_as_often_as_any_other() -> None:
    met = np.zeros((6, 6))
    for turn in range(3000):
        for a, b in groups(0, (0, turn), 6, 2):
            met[a, b] += 1
    pairs = met[np.triu_indices(6, 1)]
    assert pairs.sum() == 9000
    assert np.abs(pairs / 600 - 1).max() < 0.2  # 600 +- 22 each


@pytest.mark.parametrize(("replicas", "size", "kinds"), [(4, 2, 2), (8, 4, 2), (8, 4, 4), (10, 4, 2), (12, 4, 4)])
def test_each_group_holds_as_many_of_each_kind(replicas: int, size: int, kinds: int) -> None:
    """Each slice has its owners in each group; pairs of unlike kinds meet as often as any other, most() is the most."""
    met, turns = np.zeros((replicas, replicas)), 2000
    largest = 0
    for turn in range(turns):
        found = groups(5, (0, turn), replicas, size, kinds)
        assert sorted(itertools.chain(*found)) == list(range(replicas))
        for group in found:
            counts = [sum(r % kinds == kind for r in group) for kind in range(kinds)]
            assert min(counts) == max(counts) >= size // kinds
            assert group == RandomGroup(size, 5, kinds).members((0, turn), replicas, group[-1])
            largest = max(largest, len(group))
            for a, b in itertools.combinations(group, 2):
                met[a, b] += 1
    assert largest == RandomGroup(size, 5, kinds).most(replicas)
    unlike = [met[a, b] for a, b in itertools.combinations(range(replicas), 2) if a % kinds != b % kinds]
    assert min(unlike) > 0.85 * max(unlike) > 0


@pytest.mark.parametrize("kinds", [1, 2, 4])
def test_groups_are_of_those_who_are_there(kinds: int) -> None:
    """Whoever is gone is in no group, nobody is left alone, and where all are there nothing is drawn otherwise."""
    draw = np.random.default_rng(0)
    for turn in range(200):
        present = sorted(draw.choice(16, draw.integers(1, 17), replace=False).tolist())
        found = groups(5, (0, turn), 16, 4, kinds, present=present)
        assert sorted(itertools.chain(*found)) == present
        assert len(found) == max(1, len(present) // 4)
        assert all(found)
        if kinds == 1 and len(present) >= 4:
            assert min(map(len, found)) >= 4
        assert groups(5, (0, turn), 16, 4, kinds, present=range(16)) == groups(5, (0, turn), 16, 4, kinds)


def test_kinds_that_cannot_be_in_each_group_are_refused() -> None:
    with pytest.raises(ValueError, match="4 kinds must divide groups of 2, and 8 replicas"):
        groups(0, (0, 0), 8, 2, 4)


@pytest.mark.parametrize(("size", "replicas"), [(0, 4), (5, 4)])
def test_groups_of_an_impossible_size_are_refused(size: int, replicas: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {size} among {replicas} replicas"):
        groups(0, (0, 0), replicas, size)


def test_a_route_is_a_permutation_at_each_boundary_and_can_be_walked_back() -> None:
    seen = set()
    for step, micro_batch in itertools.product(range(1, 20), range(2)):
        route = random_route(7, step, micro_batch, 3, 4)
        assert route == random_route(7, step, micro_batch, 3, 4)
        for hop in route.hops:
            assert sorted(hop) == [0, 1, 2, 3]
        for replica in range(4):
            middle = route.after(0, replica)
            assert route.before(1, middle) == replica
            assert route.origin(2, route.after(1, middle)) == replica
        seen.add(route.hops)
    assert len(seen) > 30
    assert random_route(7, 1, 0, 3, 1) == fixed_route(3, 1)

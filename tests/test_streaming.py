"""Streaming DiLoCo: fragments and turns."""

from __future__ import annotations

import itertools

import pytest

from lowcomm.streaming import Schedule, layer_fragments


@pytest.mark.parametrize("pattern", ["sequential", "strided"])
@pytest.mark.parametrize(("layers", "size"), [(1, 1), (4, 1), (4, 2), (7, 3), (24, 3), (108, 3), (5, 9)])
def test_fragments_are_disjoint_and_cover_the_layers(pattern: str, layers: int, size: int) -> None:
    fragments = layer_fragments(layers, size, pattern)
    assert sorted(itertools.chain(*fragments)) == list(range(layers))
    assert len(fragments) == -(-layers // size)
    assert max(map(len, fragments)) <= size
    assert min(map(len, fragments)) >= 1


def test_patterns_are_those_of_figure_2() -> None:
    assert layer_fragments(6, 2, "sequential") == ((0, 1), (2, 3), (4, 5))
    assert layer_fragments(6, 2, "strided") == ((0, 3), (1, 4), (2, 5))


def test_turns_are_those_that_the_paper_names() -> None:
    two = Schedule(2, 100)
    assert [t for t in range(1, 351) if two.turns(t)] == [100, 150, 200, 250, 300, 350]
    assert [two.turns(t) for t in (50, 100, 150, 200)] == [[], [0], [1], [0]]
    for layers, every in ((24, 11), (48, 5), (108, 2)):  # and the embedding
        schedule = Schedule(len(layer_fragments(layers, 3, "strided")) + 1, 100)
        assert schedule.offset(1) == every
        for p in range(schedule.fragments):
            assert [t for t in range(1, 400) if p in schedule.turns(t)] == [
                schedule.offset(p) + h for h in (100, 200, 300) if schedule.offset(p) + h < 400
            ]


def test_more_fragments_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="5 fragments cannot take turns in rounds of 4 steps"):
        Schedule(5, 4)

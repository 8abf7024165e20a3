"""Who meets whom, drawn by every rank alike from a shared seed: groups of replicas and routes through stages.

Nothing is communicated: a draw is a pure function of the seed and of what it is for, so a resumed run draws the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_GROUPS, _ROUTES, _SLICES = 1, 2, 3


@functools.lru_cache(maxsize=256)  # each replica asks
def _permutation(count: int, *key: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(key).permutation(count).tolist())


def groups(
    seed: int,
    key: tuple[int, ...],
    replicas: int,
    size: int,
    kinds: int = 1,
    *,
    present: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the replicas in random groups of at least `size` (NoLoCo, section 3.2), each in ascending order.

    There are replicas // size groups, as equal as they can be: where `size` does not divide, some hold one more (or
    several, where there are few groups), so that nobody is left alone. `key` names the fragment and the turn that the
    groups are of.

    Replica r is of kind r mod `kinds` (the slice that it trains, say), and each group holds as many of one kind as of
    any other, or nearly where `size` does not divide.

    `present`: the replicas that are there, in ascending order, where some are not; the groups are then of these, and
    fewer of them than `size` are one group. Raises ValueError where `size` is not from 1 to `replicas`, or where
    `kinds` does not divide both.
    """
    if not 1 <= size <= replicas:
        raise ValueError(f"groups of {size} among {replicas} replicas: the size must be between 1 and the replicas")
    if size % kinds or replicas % kinds:
        raise ValueError(f"{kinds} kinds must divide groups of {size}, and {replicas} replicas")
    there = range(replicas) if present is None else present
    count = max(1, len(there) // size)
    found: list[list[int]] = [[] for _ in range(count)]
    for kind in range(kinds):
        some = [r for r in there if r % kinds == kind]
        order = _permutation(len(some), seed, _GROUPS, *key, *([kind] if kinds > 1 else []))
        for g, group in enumerate(found):
            group += [some[i] for i in order[len(some) * g // count : len(some) * (g + 1) // count]]
    return [sorted(group) for group in found]


@dataclass(frozen=True)
class Route:
    """A way through the stages: replica i of stage s hands on to replica `hops[s][i]` of stage s + 1."""

    hops: tuple[tuple[int, ...], ...]

    def after(self, stage: int, replica: int) -> int:
        """Return the replica of the next stage to which `replica` of `stage` sends activations.

        Their gradients come back from it.
        """
        return self.hops[stage][replica]

    def before(self, stage: int, replica: int) -> int:
        """Return the replica of the stage before from which `replica` of `stage` receives activations."""
        return self.hops[stage - 1].index(replica)

    def origin(self, stage: int, replica: int) -> int:
        """Return the replica of the first stage whose tokens come by at `replica` of `stage`."""
        for s in range(stage, 0, -1):
            replica = self.before(s, replica)
        return replica


def fixed_route(stages: int, replicas: int) -> Route:
    """Return the route on which every replica hands on to its own next stage."""
    return Route((tuple(range(replicas)),) * (stages - 1))


def random_route(seed: int, step: int, micro_batch: int, stages: int, replicas: int) -> Route:
    """Return a route with a random permutation of the replicas at each boundary (NoLoCo, section 3.1).

    So every replica has as much to do as any other.
    """
    return Route(tuple(tuple(_permutation(replicas, seed, _ROUTES, step, micro_batch, b)) for b in range(stages - 1)))


def random_slice(seed: int, step: int, replica: int, own: int, slices: int) -> int:
    """Draw a slice other than `own`, for a replica at a step (Partial Parameter Updates, appendix D)."""
    return next(i for i in _permutation(slices, seed, _SLICES, step, replica) if i != own)

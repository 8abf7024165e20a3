"""Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512): what is exchanged together, and when.

A model of L layers is cut into fragments of a few layers each (section 2.2), and what belongs to no layer makes one
more (inferred: Figure 17 names an embedding fragment). Fragment p takes its turn at the steps t with

    (t - t_p) mod H = 0,  t >= H + t_p,  t_p = p floor(H / P)

so fragment p trains H + t_p steps before its first exchange. With two fragments and H = 100 the first is sent at 100,
200, ..., the second at 150, 250, ... (section 2.2). The spacing is inferred from the appendix: with 8, 16 and 36
fragments of layers, and one of the embedding, it gives the turns every 11, 5 and 2 steps that are printed there. What
was sent at t is applied at t + tau (Algorithm 2, lines 10 to 12).

Algorithm 2 prints the outer gradient as theta_m(t - H) - theta_m(t) and applies it to theta_m(t - tau - H), both of
replica m. With overlap or mixing these differ between replicas, and their outer parameters would drift apart; section
2.3 speaks of the previously synchronised fragment. So both are the copy last agreed here (inferred; with tau = 0 and
alpha = 0 the two readings are one).

    symbol  name here                symbol  name here
    H       `sync_every_steps`       P       `fragments`
    t_p     `offset`                 tau     `overlap_steps`

`plan.Plan` says which parameters a fragment holds, and what it sends.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Pattern = Literal["sequential", "strided"]

_NUMBERED = re.compile(r"^(?:(.*?)\.)?(\d+)\.")


def layer_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the number of the layer that each parameter belongs to, by name; parameters of no layer are left out.

    Layers are the members of the module list (or any numbered container, as in "model.layers.3.mlp.up.weight") that
    holds most values, and have the numbers that stand in their names.
    """
    places = {name: found.groups() for name in shapes if (found := _NUMBERED.match(name))}
    held: dict[str | None, int] = defaultdict(int)
    for name, (container, _) in places.items():
        held[container] += math.prod(shapes[name])
    if not held:
        return {}
    largest = max(held, key=held.__getitem__)
    return {name: int(number) for name, (container, number) in places.items() if container == largest}


def layer_fragments(layers: int, layers_per_fragment: int, pattern: Pattern) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each fragment (Figure 2), from 0: neighbours, or every P-th where the pattern is strided.

    A fragment holds at most `layers_per_fragment` layers, and each layer is in one fragment. Raises ValueError where
    either number is below 1.
    """
    if layers_per_fragment < 1 or layers < 1:
        raise ValueError(f"{layers_per_fragment} layers per fragment of {layers} layers: both must be at least 1")
    count = -(-layers // layers_per_fragment)
    if pattern == "strided":
        return tuple(tuple(range(p, layers, count)) for p in range(count))
    return tuple(
        tuple(range(p * layers_per_fragment, min(layers, (p + 1) * layers_per_fragment))) for p in range(count)
    )


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return `count` groups of the indices of `sizes`, ascending, such that the groups' sums are about equal.

    The sizes, the largest first, each join the group with the least sum. Decoupled DiLoCo (arXiv:2604.21428) balances
    its fragments, so that no turn is longer than another. The largest sum is at most 4/3 of the least possible one
    (Graham, 1969).
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = sums.index(min(sums))
        groups[least].append(place)
        sums[least] += sizes[place]
    return [sorted(group) for group in groups]


@dataclass(frozen=True)
class Schedule:
    """The turns of P fragments in rounds of H steps; steps count from 1. Raises ValueError unless 1 <= P <= H."""

    fragments: int
    sync_every_steps: int

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.sync_every_steps:
            raise ValueError(
                f"{self.fragments} fragments cannot take turns in rounds of {self.sync_every_steps} steps:"
                " there must be at least one, and a step for each"
            )

    def offset(self, fragment: int) -> int:
        """Return t_p, the number of steps by which a fragment's turns lie behind those of fragment 0."""
        return fragment * (self.sync_every_steps // self.fragments)

    def turns(self, step: int) -> list[int]:
        """Return the fragments that are sent after `step`, in ascending order."""
        h = self.sync_every_steps
        past = [step - self.offset(p) for p in range(self.fragments)]
        return [p for p, t in enumerate(past) if t >= h and t % h == 0]

    def turns_of(self, fragment: int, steps: int) -> int:
        """Return the number of turns of a fragment in a run of `steps`."""
        return max(0, steps - self.offset(fragment)) // self.sync_every_steps

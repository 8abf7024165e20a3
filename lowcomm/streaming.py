"""Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512): what is exchanged together, and when.

A model of L layers is cut into fragments of a few layers each (section 2.2), and what belongs to no layer makes one
more (inferred: Figure 17 names an embedding fragment). Fragment p takes its turn at the steps t with

    (t - t_p) mod H = 0,  t >= H + t_p,  t_p = p floor(H / P)

so each trains H steps before its first exchange. With two fragments and H = 100 the first is sent at 100, 200, ...,
the second at 150, 250, ... (section 2.2). The spacing is inferred from the appendix: with 8, 16 and 36 fragments of
layers, and one of the embedding, it gives the turns every 11, 5 and 2 steps that are printed there. What was sent at t
is applied at t + tau (Algorithm 2, lines 10 to 12).

Algorithm 2 prints the outer gradient as theta_m(t - H) - theta_m(t) and applies it to theta_m(t - tau - H), both of
replica m. With overlap or mixing these differ between replicas, and their outer parameters would drift apart; section
2.3 speaks of the previously synchronised fragment. So both are the copy last agreed here (inferred; with tau = 0 and
alpha = 0 the two readings are one).

    symbol  name here                symbol  name here
    H       `sync_every_steps`       P       `fragments`
    t_p     `offset`                 tau     `overlap_steps`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pattern = Literal["sequential", "strided"]


def layer_fragments(layers: int, layers_per_fragment: int, pattern: Pattern) -> tuple[tuple[int, ...], ...]:
    """Layers of each fragment (Figure 2): neighbours, or every P-th.

    A fragment holds at most `layers_per_fragment` layers; all layers are covered once.
    """
    if layers_per_fragment < 1 or layers < 1:
        raise ValueError(f"{layers_per_fragment} layers a fragment of {layers} layers: both must be at least 1")
    count = fragment_count(pattern, layers, layers_per_fragment, rest=False)
    if pattern == "strided":
        return tuple(tuple(range(p, layers, count)) for p in range(count))
    return tuple(
        tuple(range(p * layers_per_fragment, min(layers, (p + 1) * layers_per_fragment))) for p in range(count)
    )


def fragment_count(fragments: str, layers: int, layers_per_fragment: int, slices: int = 1, *, rest: bool = True) -> int:
    """Fragments of a model, or stage, of so many layers: as `parameter_fragments` makes them.

    `rest`: it has parameters that belong to no layer.
    """
    if fragments == "whole":
        return 1
    if fragments == "slices":
        return slices + 1
    return -(-layers // layers_per_fragment) + rest


def parameter_fragments(names: list[str], fragments: str, layers_per_fragment: int) -> list[list[str]]:
    """Parameter names of each fragment: "whole", or layers in a `Pattern` and, last, what belongs to no layer, if any.

    A parameter of layer i is named "blocks.i...."; the others are the embedding, the final norm and the head. Of a
    pipeline's stage, the layers are its own. With "slices", those of slice i end in "[i]", and the last fragment is
    what is in none (Partial Parameter Updates, appendix A.1).
    """
    if fragments == "whole":
        return [names]
    if fragments == "slices":
        ends = sorted({n[n.index("[") :] for n in names if "[" in n}, key=lambda end: int(end[1:-1]))
        return [[n for n in names if n.endswith(end)] for end in ends] + [[n for n in names if "[" not in n]]
    layer_of = {n: int(n.split(".")[1]) for n in names if n.startswith("blocks.")}
    layers = sorted(set(layer_of.values()))
    groups = [{layers[i] for i in group} for group in layer_fragments(len(layers), layers_per_fragment, fragments)]
    found = [[n for n in names if layer_of.get(n) in group] for group in groups]
    rest = [n for n in names if n not in layer_of]
    return [*found, rest] if rest else found


@dataclass(frozen=True)
class Schedule:
    """Turns of P fragments in rounds of H steps; steps count from 1. Raises ValueError when P > H."""

    fragments: int
    sync_every_steps: int

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.sync_every_steps:
            raise ValueError(
                f"{self.fragments} fragments cannot take turns in rounds of {self.sync_every_steps} steps:"
                " there must be at least one, and a step for each"
            )

    def offset(self, fragment: int) -> int:
        """t_p of a fragment, in steps."""
        return fragment * (self.sync_every_steps // self.fragments)

    def turns(self, step: int) -> list[int]:
        """Fragments sent after `step`."""
        h = self.sync_every_steps
        past = [step - self.offset(p) for p in range(self.fragments)]
        return [p for p, t in enumerate(past) if t >= h and t % h == 0]

    def turns_of(self, fragment: int, steps: int) -> int:
        """Turns of a fragment in a run of `steps`."""
        return max(0, steps - self.offset(fragment)) // self.sync_every_steps

"""One simulator for every clock in the four papers.

Work is done by resources (a processor, a link), each of which serves its nodes in the order in which they are
added:

    begin = max(resource free, end of every node it waits for)
    end   = begin + seconds

Because the order is given, one pass is exact and needs no queue of events; and because nothing branches on a time,
times may be arrays, one entry per bandwidth or random draw: a sweep is one pass too.

`train_steps` is the simulator of Streaming DiLoCo (section 3.1, Figure 3). A step of L layers is L forward nodes, L
backward nodes for parameters and L - 1 for activations (the first layer needs none), all of equal length, and a
reduction for every layer whose turn it is: 4 L - 1 nodes in data-parallel training. A layer is reduced as soon as its
gradient, or in a local method its last update, is there, in backward order, one after the other over one link; its
next forward pass tau steps later waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowcomm.comm.shares import Encoding, encoded_mean_bytes, encoded_mean_in_shares, ring_seconds
from lowcomm.methods.streaming import Pattern, Schedule, layer_fragments

Seconds = NDArray[np.float64] | float


@dataclass(frozen=True)
class Node:
    """Work on a resource from `begin` to `end` (seconds)."""

    resource: Any
    label: Any
    begin: Seconds
    end: Seconds


class Timeline:
    """The resources of a simulation, and when each is free; times are in seconds.

    With `keep`, `nodes` holds all work in the order in which it was added; else it is None.
    """

    def __init__(self, *, keep: bool = False):
        self._free: dict[Any, Seconds] = defaultdict(float)
        self.nodes: list[Node] | None = [] if keep else None

    def add(self, resource: Any, seconds: Seconds, after: Iterable[Seconds] = (), label: Any = None) -> Seconds:
        """Queue `seconds` of work on `resource`, to begin after the times `after`, and return when it ends."""
        begin = self._free[resource]
        for end in after:  # numbers are many times faster than arrays of one
            are_numbers = isinstance(begin, float) and isinstance(end, float)
            begin = max(begin, end) if are_numbers else np.maximum(begin, end)
        end = self._free[resource] = begin + seconds
        if self.nodes is not None:
            self.nodes.append(Node(resource, label, begin, end))
        return end

    def free(self, resource: Any) -> Seconds:
        """Return when `resource` has done all of its work; 0 where it has none."""
        return self._free[resource]


@dataclass(frozen=True)
class Workload:
    """The training of a model of equal layers, as the simulator sees it."""

    layers: int
    parameters: float
    step_seconds: float  # of computing alone

    def __post_init__(self) -> None:
        if self.layers < 1 or self.step_seconds <= 0 or self.parameters < 0:
            raise ValueError(f"{self} needs a layer, a positive step_seconds and no negative parameters")


@dataclass(frozen=True)
class Exchange:
    """The exchanges of a method: which layers are sent together, and how often.

    Layers in no fragment are never sent; a fragment may be empty (the embedding's). `bits_per_parameter` is what a ring
    moves of each parameter, in both of its phases. With a `codec`, what `World` sends is counted instead: encoded
    values gathered or reduced in shares (`comm.shares.encoded_mean_bytes`). For two replicas both are the same; more
    send more than a ring would.
    """

    fragments: tuple[tuple[int, ...], ...]
    sync_every_steps: int  # H
    overlap_steps: int = 0  # tau
    bits_per_parameter: float = 16.0
    codec: Encoding | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_steps < self.sync_every_steps:
            raise ValueError(
                f"overlap_steps = {self.overlap_steps} must be at least 0 and below sync_every_steps ="
                f" {self.sync_every_steps}: a fragment is back before it is sent again"
            )
        layers = [layer for fragment in self.fragments for layer in fragment]
        if len(set(layers)) != len(layers):
            raise ValueError(f"fragments {self.fragments} share a layer")

    def reduction(self, numel: float, replicas: int, bits_per_second: Seconds, latency_s: float = 0.0) -> Seconds:
        """Return the seconds that it takes to reduce `numel` parameters over `replicas`; 0.0 for one replica."""
        if self.codec is None:
            return ring_seconds(numel * self.bits_per_parameter / 8, replicas, bits_per_second, latency_s)
        if replicas == 1:
            return 0.0
        phases = 2 if encoded_mean_in_shares(round(numel), self.codec, replicas) else 1
        nbytes = encoded_mean_bytes(round(numel), self.codec, replicas)
        return 8 * nbytes / bits_per_second + phases * latency_s


def data_parallel(layers: int, **kwargs: float) -> Exchange:
    """Return the exchange of data-parallel training: the gradients of all layers, after every step."""
    return Exchange((tuple(range(layers)),), 1, **kwargs)


def diloco(layers: int, sync_every_steps: int, **kwargs: float) -> Exchange:
    """Return the exchange of DiLoCo: all layers, every `sync_every_steps` (H) steps."""
    return Exchange((tuple(range(layers)),), sync_every_steps, **kwargs)


def streaming(
    layers: int, sync_every_steps: int, *, layers_per_fragment: int, pattern: Pattern = "strided", **kwargs: float
) -> Exchange:
    """Return the exchange of Streaming DiLoCo: fragments of layers, in turn.

    The embedding takes its turn too, but is no layer: its time is not counted.
    """
    return Exchange((*layer_fragments(layers, layers_per_fragment, pattern), ()), sync_every_steps, **kwargs)


def train_steps(
    timeline: Timeline,
    work: Workload,
    exchange: Exchange,
    steps: Iterable[int],
    reduction: Seconds,
) -> list[Seconds]:
    """Put training steps (numbered from 1) on resources "compute" and "link", and return when each step began.

    `reduction`: seconds to reduce one layer. Labels are (kind, step, layer), kinds "forward", "activations",
    "parameters" and "reduce". Raises ValueError where a fragment holds a layer that the model does not have.
    """
    schedule = Schedule(len(exchange.fragments), exchange.sync_every_steps)
    if (last := max((max(f, default=0) for f in exchange.fragments), default=0)) >= work.layers:
        raise ValueError(f"a fragment holds layer {last}, the model has {work.layers}")
    node = work.step_seconds / (3 * work.layers - 1)
    arriving: dict[int, tuple[int, Seconds]] = {}  # layer: the first step that waits, and for when
    began = []
    for step in steps:
        for layer in range(work.layers):
            waits = [arriving.pop(layer)[1]] if layer in arriving and arriving[layer][0] <= step else []
            end = timeline.add("compute", node, waits, ("forward", step, layer))
            if layer == 0:
                began.append(end - node)
        turn = {layer for p in schedule.turns(step) for layer in exchange.fragments[p]}
        for layer in reversed(range(work.layers)):
            if layer:
                timeline.add("compute", node, (), ("activations", step, layer))
            ready = timeline.add("compute", node, (), ("parameters", step, layer))
            if layer in turn:
                there = timeline.add("link", reduction, [ready], ("reduce", step, layer))
                arriving[layer] = (step + 1 + exchange.overlap_steps, there)
    return began


def compute_utilisation(
    work: Workload,
    exchange: Exchange,
    gbit_per_s: ArrayLike,
    *,
    replicas: int = 2,
    latency_s: float = 0.0,
    rounds: int = 2,
) -> NDArray[np.float64]:
    """Return the share of time that is spent computing once training has settled, for each bandwidth.

    After a span of at least 30 steps, in whole rounds of H, the time of `rounds` further such spans is compared with
    that of their computing. Raises ValueError where `replicas` is below 1.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    bits_per_second = np.asarray(gbit_per_s, dtype=np.float64) * 1e9
    a_layer = work.parameters / work.layers
    reduction = np.zeros_like(bits_per_second) + exchange.reduction(a_layer, replicas, bits_per_second, latency_s)
    length = exchange.sync_every_steps * -(-30 // exchange.sync_every_steps)
    first = 2 * exchange.sync_every_steps
    began = train_steps(Timeline(), work, exchange, range(first, first + (rounds + 1) * length + 1), reduction)
    return rounds * length * work.step_seconds / (began[-1] - began[length])


def bandwidth_needed(utilisation: NDArray[np.float64], gbit_per_s: NDArray[np.float64], level: float) -> float:
    """Return the lowest of the bandwidths, in ascending order, at which utilisation reaches `level`.

    It is infinite where none does.
    """
    reached = utilisation >= level
    return float(gbit_per_s[np.argmax(reached)]) if reached.any() else float("inf")


@dataclass(frozen=True)
class Stages:
    """A pipeline as the simulator sees it: the seconds of one micro-batch, for each stage and for each boundary.

    Boundary b lies between stages b and b + 1, and has a wire of its own each way. Times may be arrays.
    """

    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    activations: tuple[Seconds, ...]  # of each boundary, on the wire
    gradients: tuple[Seconds, ...]
    latency: tuple[Seconds, ...]  # of each boundary, one way

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if len(self.backward) != stages or not stages:
            raise ValueError(f"{stages} forward and {len(self.backward)} backward times: one for each stage")
        for name in ("activations", "gradients", "latency"):
            if (count := len(getattr(self, name))) != stages - 1:
                raise ValueError(f"{count} {name} for {stages} stages: one for each of {stages - 1} boundaries")


def gpipe_step(p: Stages, micro_batches: int, *, overlap: bool = True) -> Seconds:
    """Return the seconds of a training step in GPipe's order: all micro-batches forward, then all backward.

    Without `overlap` a stage stands still while it sends. With S equal stages, M micro-batches and free wires a step
    takes (M + S - 1) (forward + backward).
    """
    timeline = Timeline()
    stages, ends = len(p.forward), []

    def carry(way: str, b: int, stage: int, m: int, seconds: Seconds, ready: Seconds) -> Seconds:
        left = timeline.add((way, b), seconds, [ready], (way, m))
        if not overlap:
            timeline.add(("stage", stage), 0.0, [left], ("sending", m))
        return left + p.latency[b]

    for m in range(micro_batches):
        there: Seconds = 0.0
        for s in range(stages):
            done = timeline.add(("stage", s), p.forward[s], [there], ("forward", m))
            if s < stages - 1:
                there = carry("forward", s, s, m, p.activations[s], done)
    for m in range(micro_batches):
        there = 0.0
        for s in reversed(range(stages)):
            done = timeline.add(("stage", s), p.backward[s], [there], ("backward", m))
            if s:
                there = carry("backward", s - 1, s, m, p.gradients[s - 1], done)
        ends.append(timeline.free(("stage", 0)))
    return ends[-1]


def decode_seconds(p: Stages, groups: int, back: Seconds, *, tokens: int = 64) -> Seconds:
    """Return the seconds per token of pipelined inference, once it has settled.

    `groups` groups of sequences go round the stages. `forward` and `activations` are those of one group's token; `back`
    are the seconds that its token takes from the last stage to the first. `tokens` are timed after as many others.
    """
    timeline, there, ends = Timeline(), [0.0] * groups, []
    for _ in range(2 * tokens):
        for g in range(groups):
            for s, seconds in enumerate(p.forward):
                there[g] = timeline.add(("stage", s), seconds, [there[g]])
                if s < len(p.forward) - 1:
                    there[g] = timeline.add(("forward", s), p.activations[s], [there[g]]) + p.latency[s]
            there[g] = there[g] + back
        ends.append(there[-1])
    return (ends[-1] - ends[tokens - 1]) / tokens

"""A recorded run at another link: the simulator fed with traces.

A rank's trace (`wire.Span`) says when it handed each verb to the wire and when it stood still for it. What lies between
is computing, and is kept; what the wire takes is worked out anew, with the link of `wire`:

    finished = max(wire free, all members have submitted) + phases * latency + 8 S / rate

where S are the bytes that the rank sent in the verb, or those that it took, if more. A phase is one swap of messages: a
mean is two, of shares and of their sums. A message from one rank to another leaves its sender free, and arrives at

    arrival = max(sender's wire free, submitted) + 8 S / rate + latency

With `tcp`, 8 S / rate becomes what TCP and gloo make of it (`lowcomm.cost.tcp`), phase by phase.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowcomm.comm.wire import Span
from lowcomm.cost.simulate import Seconds, Timeline
from lowcomm.cost.tcp import Connection

#: Purposes of what a run sends besides training.
BESIDES = ("evaluation", "summary", "analysis")


@dataclass(frozen=True)
class Replay:
    """The seconds from the first event of the traces to the last, and the share of them that ranks spend computing.

    `utilisation` is the mean over ranks. Both are arrays where the link's rate is one.
    """

    seconds: NDArray[np.float64]
    utilisation: NDArray[np.float64]


def read_traces(times: Path) -> list[list[Span]]:
    """Return the traces that a run with `comm.trace` left in its folder for times, in rank order.

    Raises ValueError where there is none.
    """
    paths = sorted(times.glob("trace-*.jsonl"), key=lambda path: (len(path.name), path.name))  # ranks of 1,000 and more
    if not paths:
        raise ValueError(f"no trace in {times}: train with comm.trace = true")
    return [[_span(json.loads(line)) for line in path.read_text().splitlines()] for path in paths]


def _span(row: dict[str, Any]) -> Span:
    return Span(**row | {"ranks": tuple(row["ranks"])})


def window(traces: Sequence[Sequence[Span]], first: int, last: int) -> list[list[Span]]:
    """Return the spans of the training steps from `first` to `last`, both included, without evaluation and the like.

    What is only waited for after `last` is sent, but nobody waits for it: its `entered_wait` is infinite.
    """
    found = []
    for trace in traces:
        end = min((s.submitted for s in trace if s.step > last), default=math.inf)
        kept = [s for s in trace if first <= s.step <= last and s.purpose not in BESIDES]
        found.append([dataclasses.replace(s, entered_wait=math.inf) if s.entered_wait > end else s for s in kept])
    return found


def _key(span: Span) -> tuple[str, str, tuple[int, ...]]:
    """Return a key of a verb that all ranks that take part in it share, and no other verb has."""
    return span.axis, span.verb, span.ranks


def recorded(traces: Sequence[Sequence[Span]]) -> Replay:
    """Return the time and the utilisation that the traces themselves record, without waits after a `window`."""
    begin = min(s.submitted for t in traces for s in t)
    end = max(s.left_wait if s.entered_wait < math.inf else s.submitted for t in traces for s in t)
    waited = [sum(map(_waited, t)) for t in traces]
    return Replay(np.asarray(end - begin), np.asarray(1 - np.mean(waited) / (end - begin)))


def hidden(traces: Sequence[Sequence[Span]], purpose: str) -> float:
    """Return the share of the time of a purpose's transfers in which no rank waited for them.

    It is 1.0 where there were none.
    """
    spans = [s for t in traces for s in t if s.purpose == purpose]
    took = sum(s.finished - s.submitted for s in spans)
    return 1 - sum(map(_waited, spans)) / took if took else 1.0


def _waited(span: Span) -> float:
    return span.left_wait - span.entered_wait if span.entered_wait < math.inf else 0.0


def _program(trace: Sequence[Span], begin: float) -> list[tuple[float, str, Span]]:
    """Return what a rank did from `begin` on, in order, as (seconds of computing before, "submit" or "wait", span)."""
    events = [(s.submitted, 0, "submit", s) for s in trace]
    events += [(s.entered_wait, 1, "wait", s) for s in trace if s.entered_wait < math.inf]
    events.sort(key=lambda e: e[:2])
    program, now = [], begin
    for at, _, what, span in events:
        program.append((max(0.0, at - now), what, span))
        now = max(now, span.left_wait if what == "wait" else at)
    return program


def replay(
    traces: Sequence[Sequence[Span]],
    gbit_per_s: ArrayLike,
    *,
    latency_s: float = 0.0,
    slowdown: Sequence[float] | None = None,
    tcp: bool = False,
) -> Replay:
    """Return the time and the utilisation that the run of these traces would have over other links.

    Control traffic (the world axis) stays free, as it was.

    Args:
        traces: of all ranks, in rank order.
        gbit_per_s: the rate of a rank's wire on each axis; infinity is free. May be an array.
        latency_s: of a message, one way.
        slowdown: factors on each rank's computing, for stragglers (None: 1).
        tcp: what is sent has TCP's headers, begins slowly where nothing was sent for a while, and waits for its
            receiver's word. Traces should begin with the run then, as connections do.

    Raises ValueError where traces do not fit together, or slowdowns are not one for each rank.
    """
    rate = np.asarray(gbit_per_s, dtype=np.float64) * 1e9
    slow = [1.0] * len(traces) if slowdown is None else list(slowdown)
    if len(slow) != len(traces):
        raise ValueError(f"{len(slow)} slowdowns for {len(traces)} ranks")
    members: dict[tuple, dict[int, Span]] = {}
    for rank, trace in enumerate(traces):
        for s in trace:
            if rank in (known := members.setdefault(_key(s), {})):
                raise ValueError(
                    f"rank {rank} has more than one {s.verb!r} on axis {s.axis}: these are traces of several runs"
                )
            known[rank] = s
    begin = min(s.submitted for t in traces for s in t)
    programs = [_program(t, begin) for t in traces]
    timeline, wires = Timeline(), _Wires(rate, latency_s, tcp=tcp)
    now: list[Seconds] = [np.zeros_like(rate) for _ in traces]
    waited: list[Seconds] = [np.zeros_like(rate) for _ in traces]
    submitted: dict[tuple, dict[int, Seconds]] = {key: {} for key in members}
    finished: dict[tuple, Seconds] = {}
    at = [0] * len(traces)
    while any(at[r] < len(programs[r]) for r in range(len(traces))):
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                seconds, what, span = program[at[rank]]
                key = _key(span)
                if what == "wait" and (*key, rank) not in finished:
                    break
                now[rank] = now[rank] + seconds * slow[rank]
                if what == "submit" and span.verb.startswith("message"):
                    if span.nbytes:  # of its sender; when its receiver began to expect it decides nothing
                        begin_at = np.maximum(timeline.free((span.axis, rank)), now[rank])
                        takes = wires.message(span, span.nbytes, begin_at)
                        left = timeline.add((span.axis, rank), takes, [now[rank]])
                        finished |= {(*key, r): now[rank] if r == rank else left + latency_s for r in members[key]}
                elif what == "submit":
                    submitted[key][rank] = now[rank]
                    if len(submitted[key]) == len(members[key]):
                        for r, at_rank in wires.finished(timeline, members[key], submitted[key]).items():
                            finished[(*key, r)] = at_rank
                else:
                    there = np.maximum(now[rank], finished[(*key, rank)])
                    waited[rank] = waited[rank] + (there - now[rank])
                    now[rank] = there
                at[rank] += 1
                moved = True
        if not moved:
            stuck = {
                rank: program[at[rank]][2].verb for rank, program in enumerate(programs) if at[rank] < len(program)
            }
            raise ValueError(f"the traces wait for each other: {stuck}")
    seconds = np.max(now, axis=0)
    return Replay(seconds, 1 - np.mean(waited, axis=0) / seconds)


class _Wires:
    """The wires of all ranks over a link, which say for how long each verb occupies them."""

    def __init__(self, rate: NDArray[np.float64], latency_s: float, *, tcp: bool):
        self.rate, self.latency_s, self.tcp = rate, latency_s, tcp
        self._connections: dict[tuple, Connection] = {}

    def message(self, span: Span, nbytes: float, begin: Seconds) -> Seconds:
        """Return for how many seconds bytes that leave together at `begin`, to all peers, occupy the rank's wire."""
        if not self.tcp or not nbytes:
            return 8 * nbytes / self.rate
        return self._connection(span).seconds(nbytes, self.rate, self.latency_s, begin)

    def _connection(self, span: Span) -> Connection:
        """Return the connections of the span's rank to its peers, the same ones on every axis."""
        peers = tuple(r for r in span.ranks if r != span.rank)
        return self._connections.setdefault((span.rank, peers), Connection(len(peers)))  # whatever the axis, as gloo's

    def finished(self, timeline: Timeline, spans: dict[int, Span], submitted: dict[int, Seconds]) -> dict[int, Seconds]:
        """Return, by rank, the time at which a verb that all of its ranks have submitted has arrived there."""
        if any(s.axis == "world" for s in spans.values()):
            return {
                r: timeline.add((s.axis, r), np.zeros_like(self.rate), submitted.values()) for r, s in spans.items()
            }
        if self.tcp:
            found = self._with_words(timeline, spans, submitted)
            return {r: timeline.add((s.axis, r), 0.0, [found[r]]) for r, s in spans.items()}
        return {
            r: timeline.add((s.axis, r), s.phases * self.latency_s + 8 * _most(s) / self.rate, submitted.values())
            for r, s in spans.items()
        }

    def _with_words(
        self, timeline: Timeline, spans: dict[int, Span], submitted: dict[int, Seconds]
    ) -> dict[int, Seconds]:
        """Return the same over TCP: the first phase waits a latency for the receivers' word, later phases do not."""
        done: dict[int, Seconds] = {}
        for r, s in spans.items():
            self._connection(s).resume(self.latency_s, submitted[r])
            others = [at for p, at in submitted.items() if p != r]
            begin = functools.reduce(np.maximum, others, submitted[r] + self.latency_s)
            begin = np.maximum(begin, timeline.free((s.axis, r)))
            done[r] = begin + self.message(s, _most(s) / s.phases, begin) + self.latency_s
        for _ in range(1, max(s.phases for s in spans.values())):
            before = dict(done)
            for r, s in spans.items():
                begin = functools.reduce(np.maximum, [at for p, at in before.items() if p != r])
                there = begin + self.message(s, _most(s) / s.phases, begin) + self.latency_s
                done[r] = np.maximum(before[r], there)
        return done


def _most(span: Span) -> int:
    """Return the bytes that a rank sends in a verb, or those that it takes, whichever are more."""
    return max(span.nbytes, span.taken)

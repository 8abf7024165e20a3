"""The cost of a wire: the byte ledger, the link model, the two clocks and the trace.

A link has a rate and a latency, and each rank has one per axis, full duplex. A message of S
bytes leaves when its sender's side is free, and arrives

    begin   = max(sent, egress free)                      at the sender
    arrival = max(begin + latency, ingress free) + 8 S / rate   at the receiver

so simultaneous messages share a rank's rate both ways. In real time the receiver sleeps until
`arrival`; in virtual time nobody sleeps and each rank's clock is moved there instead.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Rate in bits per second (0: unlimited) and latency in seconds of a rank's wire on one axis."""

    bits_per_second: float = 0.0
    latency_s: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Time that `nbytes` occupy the wire."""
        return 8 * nbytes / self.bits_per_second if self.bits_per_second else 0.0


class Ledger:
    """Bytes this rank sent, by axis, purpose and step. Payloads only, as packed; framing is not billed.

    Threads that send bill to one ledger, while another may read it.
    """

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._lock = threading.Lock()

    def bill(self, axis: str, purpose: str, step: int, nbytes: int) -> None:
        if nbytes:
            with self._lock:
                self._bytes[axis, purpose][step] += nbytes

    def _read(self) -> list[tuple[str, str, dict[int, int]]]:
        """Return (axis, purpose, bytes by step) of all that has been billed until now."""
        with self._lock:
            return [(axis, purpose, dict(steps)) for (axis, purpose), steps in self._bytes.items()]

    def total(self, axis: str | None = None, purpose: str | None = None) -> int:
        """Bytes sent, over all axes or purposes where none is named."""
        return sum(sum(steps.values()) for a, p, steps in self._read() if axis in (None, a) and purpose in (None, p))

    def by_purpose(self) -> dict[str, int]:
        """{"axis/purpose": bytes}, sorted."""
        told = {(a, p): sum(steps.values()) for a, p, steps in self._read()}
        return {f"{a}/{p}": nbytes for (a, p), nbytes in sorted(told.items())}

    def peak_step_bytes(self, axis: str) -> int:
        """Most bytes sent along an axis in any one step, analysis and evaluation apart."""
        steps: dict[int, int] = defaultdict(int)
        for a, purpose, entry in self._read():
            if a == axis and purpose not in ("analysis", "evaluation"):
                for step, nbytes in entry.items():
                    steps[step] += nbytes
        return max(steps.values(), default=0)

    def state(self) -> list[list]:
        """Plain lists for a checkpoint."""
        return [[a, p, sorted(steps.items())] for a, p, steps in self._read()]

    def load(self, state: list[list]) -> None:
        with self._lock:
            self._bytes.clear()
        for axis, purpose, steps in state:
            for step, nbytes in steps:
                self.bill(axis, purpose, step, nbytes)


class RealClock:
    """Seconds of the machine's monotonic clock, which ranks on one machine share."""

    is_virtual = False

    def __init__(self) -> None:
        self._earlier = 0.0  # seconds of the run before a resume
        self._origin = time.monotonic()

    def now(self) -> float:
        return time.monotonic()

    def elapsed(self) -> float:
        """Seconds of this run, those before a resume included."""
        return self._earlier + self.now() - self._origin

    def start(self, earlier: float = 0.0) -> None:
        self._earlier, self._origin = earlier, self.now()

    @property
    def started(self) -> float:
        """The instant of `start`."""
        return self._origin

    def sleep_until(self, instant: float) -> None:
        if instant > (now := self.now()):
            time.sleep(instant - now)

    def settle(self, entered: float, finished: float) -> None:
        """Real time passed by itself."""


class VirtualClock(RealClock):
    """The rank's own time: its computing runs at real speed, its waiting takes what the link says."""

    is_virtual = True

    def __init__(self) -> None:
        self._lag = time.monotonic()
        super().__init__()
        self._origin = self.now()

    def now(self) -> float:
        return time.monotonic() - self._lag

    def sleep_until(self, instant: float) -> None:
        """Nothing waits in virtual time."""

    def settle(self, entered: float, finished: float) -> None:
        """A wait begun at `entered` for something that `finished` then: go to the later of the two."""
        self._lag = time.monotonic() - max(entered, finished)


@dataclass(frozen=True)
class Span:
    """One verb in a rank's life, on the rank's clock (seconds)."""

    rank: int
    axis: str
    verb: str
    purpose: str
    step: int
    ranks: tuple[int, ...]  # that take part
    nbytes: int  # sent
    taken: int  # bytes
    phases: int  # swaps of messages, one after the other
    submitted: float  # handed to the wire
    finished: float  # all of it arrived
    entered_wait: float  # the rank began to need it
    left_wait: float  # ... and went on


class Trace:
    """Spans of one rank. Computing is what lies between `left_wait` and the next `submitted` or `entered_wait`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def utilisation(self, begin: float, end: float) -> float:
        """Share of the time from `begin` to `end`, on the rank's clock, in which it did not wait for the wire."""
        waits = (min(s.left_wait, end) - max(s.entered_wait, begin) for s in self.spans)
        return 1 - sum(w for w in waits if w > 0) / (end - begin) if end > begin else 1.0

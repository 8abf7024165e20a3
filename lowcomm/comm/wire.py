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
    """The rate in bits per second (0: unlimited) and the latency in seconds of a rank's wire on one axis."""

    bits_per_second: float = 0.0
    latency_s: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Return for how many seconds `nbytes` occupy the wire, without the latency."""
        return 8 * nbytes / self.bits_per_second if self.bits_per_second else 0.0


class Ledger:
    """The bytes that this rank has sent, by axis, purpose and step. Payloads are billed as packed, headers are not.

    Several threads may bill to one ledger while another reads it.
    """

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._lock = threading.Lock()

    def bill(self, axis: str, purpose: str, step: int, nbytes: int) -> None:
        """Add `nbytes` to what was sent along an axis for a purpose at a step."""
        if nbytes:
            with self._lock:
                self._bytes[axis, purpose][step] += nbytes

    def _read(self) -> list[tuple[str, str, dict[int, int]]]:
        """Return a copy of all that has been billed until now, as rows (axis, purpose, {step: bytes})."""
        with self._lock:
            return [(axis, purpose, dict(steps)) for (axis, purpose), steps in self._bytes.items()]

    def total(self, axis: str | None = None, purpose: str | None = None) -> int:
        """Return the bytes sent along an axis for a purpose; where one is None, along all axes or for all purposes."""
        return sum(sum(steps.values()) for a, p, steps in self._read() if axis in (None, a) and purpose in (None, p))

    def by_purpose(self) -> dict[str, int]:
        """Return the bytes sent as {"axis/purpose": bytes}, sorted by axis and purpose."""
        told = {(a, p): sum(steps.values()) for a, p, steps in self._read()}
        return {f"{a}/{p}": nbytes for (a, p), nbytes in sorted(told.items())}

    def peak_step_bytes(self, axis: str) -> int:
        """Return the most bytes that any one step sent along an axis, not counting analysis and evaluation."""
        steps: dict[int, int] = defaultdict(int)
        for a, purpose, entry in self._read():
            if a == axis and purpose not in ("analysis", "evaluation"):
                for step, nbytes in entry.items():
                    steps[step] += nbytes
        return max(steps.values(), default=0)

    def state(self) -> list[list]:
        """Return all that has been billed as plain lists [axis, purpose, [(step, bytes), ...]], for a checkpoint."""
        return [[a, p, sorted(steps.items())] for a, p, steps in self._read()]

    def load(self, state: list[list]) -> None:
        """Replace all that has been billed by what `state` has returned."""
        with self._lock:
            self._bytes.clear()
        for axis, purpose, steps in state:
            for step, nbytes in steps:
                self.bill(axis, purpose, step, nbytes)


class RealClock:
    """A clock in seconds of the machine's monotonic clock, which all ranks on one machine share."""

    is_virtual = False

    def __init__(self) -> None:
        self._earlier = 0.0  # seconds of the run before a resume
        self._origin = time.monotonic()

    def now(self) -> float:
        """Return the instant that the clock shows, in seconds from an arbitrary origin."""
        return time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds that this run has taken, those before a resume included."""
        return self._earlier + self.now() - self._origin

    def start(self, earlier: float = 0.0) -> None:
        """Count `elapsed` from now on; `earlier` are the seconds that the run had taken before a resume."""
        self._earlier, self._origin = earlier, self.now()

    @property
    def started(self) -> float:
        """The instant of the last `start`, or of the clock's creation before the first."""
        return self._origin

    def sleep_until(self, instant: float) -> None:
        """Sleep until the clock shows an instant, if that has not passed."""
        if instant > (now := self.now()):
            time.sleep(instant - now)

    def settle(self, entered: float, finished: float) -> None:
        """Account for a wait that began at `entered` for something that was there at `finished`.

        Do nothing in real time, which has passed by itself.
        """


class VirtualClock(RealClock):
    """A clock of the rank's own time, in which computing takes its real time and waiting what the link model says."""

    is_virtual = True

    def __init__(self) -> None:
        self._lag = time.monotonic()
        super().__init__()
        self._origin = self.now()

    def now(self) -> float:
        return time.monotonic() - self._lag

    def sleep_until(self, instant: float) -> None:
        """Return at once, as nobody sleeps in virtual time; `settle` moves the clock instead."""

    def settle(self, entered: float, finished: float) -> None:
        """Account for a wait, as in `RealClock`, by setting the clock to the later of `entered` and `finished`."""
        self._lag = time.monotonic() - max(entered, finished)


@dataclass(frozen=True)
class Span:
    """The record of one verb on one rank; times are in seconds on the rank's clock."""

    rank: int
    axis: str
    verb: str
    purpose: str
    step: int  # of training, when the verb was submitted
    ranks: tuple[int, ...]  # that take part
    nbytes: int  # sent
    taken: int  # bytes received
    phases: int  # swaps of messages, one after the other
    submitted: float  # when the verb was handed to the wire
    finished: float  # when it was complete on this rank, with all that it receives
    entered_wait: float  # when the rank began to wait for it
    left_wait: float  # ... and when it went on


class Trace:
    """The spans of the verbs that one rank has waited for, in that order.

    The rank computes between a `left_wait` and the next `submitted` or `entered_wait`.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def utilisation(self, begin: float, end: float) -> float:
        """Return the share of the time from `begin` to `end` in which the rank did not wait for the wire.

        begin, end: in seconds on the rank's clock. The share is 1 where no time lies between them.
        """
        waits = (min(s.left_wait, end) - max(s.entered_wait, begin) for s in self.spans)
        return 1 - sum(w for w in waits if w > 0) / (end - begin) if end > begin else 1.0

"""The effect of TCP and gloo on a link: headers, a window that opens step by step, and a word that is waited for.

A sender may have a window of bytes on their way that nobody has acknowledged. It begins with ten segments (RFC 6928),
and doubles with every round trip in which it was full (slow start, RFC 5681), until it is what the link holds in a
round trip, rate x RTT. Before that the link stands still for

    RTT - window / rate

in each of them. After a pause of longer than the retransmission time-out (RTT + 0.2 s on Linux) the window is halved,
once for each time-out in the pause, down to what it began with (RFC 2861; net.ipv4.tcp_slow_start_after_idle). Training
with few exchanges is made of pauses, so over a long way its messages begin slowly again and again.

Gloo sends a payload when its receiver has said that there is a place for it. That word goes over the same connection
and ends a pause, which so lasts from what a rank has sent last, on any axis, until it enters the next verb. Ranks that
enter a verb together say so then, and wait one latency for that word, once in a verb: the places of its later phases,
and of messages of a pipeline, are made known ahead (`Transport.expect`).

Left out: losses, and what a queue adds to the round trip. Other congestion controls open their windows by other rules.

    symbol  name here        value
    IW      `INITIAL`        10 segments of 1,448 bytes: 1,500 less IP's and TCP's 52
    f       `FRAMING`        1,514 bytes on an Ethernet for 1,448
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowcomm.cost.simulate import Seconds

#: Bytes of a segment's payload, of its IP and TCP headers (with time stamps), and of its Ethernet header.
SEGMENT, HEADERS, ETHERNET = 1448, 52, 14
INITIAL = 10 * SEGMENT
FRAMING = (SEGMENT + HEADERS + ETHERNET) / SEGMENT
#: What the time-out is at least beyond the round trip.
LEAST_TIMEOUT_S = 0.2


@dataclass
class Connection:
    """The sending side of a connection, or of `count` connections that are used at once, whose windows add up.

    Attributes: `window`, the bytes that may be on their way; `ended`, when something was last sent, in seconds. They
    may be arrays, with one entry for each rate.
    """

    count: int = 1
    window: Seconds = 0.0
    ended: Seconds = 0.0

    def seconds(self, nbytes: float, rate: Seconds, latency_s: float, begin: Seconds) -> Seconds:
        """Return for how many seconds from `begin` the link is occupied until `nbytes` have left, at `rate` bits/s.

        The latency until the last of them has arrived is not counted. `window` and `ended` are brought up to date.
        """
        self.resume(latency_s, begin)
        window, rtt = self.window, 2 * latency_s
        held = rate * rtt / 8 if rtt else 0.0
        stalled, sent = np.zeros(np.broadcast(rate, begin).shape), 0.0
        while np.any(opens := (sent + window < nbytes) & (window < held)):
            stalled = stalled + np.where(opens, rtt - 8 * window / rate, 0.0)
            sent = sent + np.where(opens, window, 0.0)
            window = np.where(opens, 2 * window, window)
        took = stalled + FRAMING * 8 * nbytes / rate
        self.window, self.ended = window, begin + took
        return took

    def resume(self, latency_s: float, at: Seconds) -> None:
        """End a pause at the time `at`, in seconds, as whatever is sent does, even a word.

        The window becomes what the pause has left of it.
        """
        pauses = np.floor((at - self.ended) / (2 * latency_s + LEAST_TIMEOUT_S))
        self.window = np.maximum(self.count * float(INITIAL), self.window / 2.0 ** np.clip(pauses, 0, 60))
        self.ended = np.maximum(self.ended, at)

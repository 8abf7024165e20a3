"""One axis of the grid: it carries verbs out in order, on threads of its own.

A verb is submitted with its body to a lane of the axis; the lane's thread runs bodies one after the other and the
caller gets a Handle. Inside a body, `Op.swap` moves tensors: it names them, bills them, and keeps the link's time.

A rank that waits must not hold up what others wait for, so there is a lane for each sort of traffic; all lanes of
an axis share its link.

    main      verbs of the whole axis, or of a group, in the order in which all members call them
    ahead     the same verbs for values that are sent before they are needed, called in an order of their own
    out, in   messages from one rank to another
"""

from __future__ import annotations

import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lowcomm.comm.transport import CommError, Consume, Expected, Header
from lowcomm.comm.wire import Link, Span

if TYPE_CHECKING:
    from lowcomm.comm.world import World

Lane = Literal["main", "ahead", "out", "in"]
#: The purpose of messages by which ranks agree on what they do; the ledger does not count them.
UNBILLED = "agreement"
#: The transport's channel for each (axis, lane); "out" and "in" share one, as they are the two ends of a message.
CHANNELS = {
    (axis, lane): 3 * i + kind
    for i, axis in enumerate(("replica", "stage", "route", "world"))
    for lane, kind in (("main", 0), ("ahead", 1), ("out", 2), ("in", 2))
}


class Handle:
    """A handle on a verb that is under way; `wait()` gives its result."""

    def __init__(self, world: World, future: Future, op: Op | None):
        self._world, self._future, self._op = world, future, op

    def wait(self) -> Any:
        """Wait until the verb is complete on this rank, and return its result. Raises CommError where it failed."""
        clock = self._world.clock
        entered = clock.now()
        value = self._future.result()
        if self._op is not None and self._op.left is not None:
            torch.cuda.current_stream(self._world.device).wait_event(self._op.left)
            _used_here(value)
        if self._op is not None:
            clock.settle(entered, self._op.finished)
            self._op.record(entered, clock.now())
            self._op = None
        return value


def _used_here(value: Any) -> None:
    """Tell the allocator that the current stream uses those tensors in `value` that are on a GPU.

    value: a tensor, a list or tuple of them, or anything else, which is left alone.
    """
    for x in value if isinstance(value, list | tuple) else [value]:
        if isinstance(x, Tensor) and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))


class Op:
    """One verb that is under way: it names its messages, bills them to the ledger and keeps the link's time.

    Attributes: `ranks` that take part; `step` of training when it was submitted; `nbytes` sent and `taken` so far, in
    bytes; `phases`, the number of swaps so far; `submitted` and `finished`, in seconds on the rank's clock.
    """

    def __init__(self, axis: AxisState, lane: Lane, verb: str, purpose: str, agreed: str, ranks: tuple[int, ...]):
        self.axis, self.lane, self.verb, self.purpose = axis, lane, verb, purpose
        self.world = axis.world
        self.step = self.world.step
        self.ranks = ranks
        self.name = f"{verb} of {agreed} for {purpose!r}"
        self.submitted = self.finished = self.world.clock.now()
        self.nbytes = self.taken = self.phases = 0
        self.handed = self._mark()  # on a GPU: the caller's stream up to here, which the wire's stream awaits
        self.left: torch.cuda.Event | None = None  # and the other way round

    def _mark(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.axis.device).record_event() if self.axis.device.type == "cuda" else None

    def carry_out(self, body: Callable[[Op], Any]) -> Any:
        """Run the verb's body on the lane's thread, after the work that the caller has queued on its GPU.

        Return what the body returns.
        """
        if self.handed is not None:
            torch.cuda.current_stream(self.axis.device).wait_event(self.handed)
        value = body(self)
        self.left = self._mark()
        return value

    def _now(self) -> float:
        clock = self.world.clock
        return self.finished if clock.is_virtual else clock.now()

    def swap(
        self,
        out: Sequence[tuple[int, Tensor]],
        into: Sequence[tuple[int, Tensor | None]],
        *,
        buffered: bool = False,
        agreed: bool = False,
        consume: Consume | None = None,
        expected: Expected | None = None,
    ) -> list[Tensor]:
        """Send the tensors of `out` and receive those of `into`, which are returned in that order.

        Both name peers by their index on the axis. A received tensor is written into its buffer; where that is None, it
        is made in the shape, dtype and place that the header states. Raises CommError where a header does not fit.

        `agreed`: an earlier swap of this verb has compared headers with the same ranks, so none need travel,
        unless to tell a link's clock when the sender began. `buffered`, `consume`: as for `Transport.swap`.
        `expected`: what `expect`, or `AxisState.expect`, has returned for this swap.
        """
        _used_here([x for _, x in (*out, *into)])
        axis, link, ranks = self.axis, self.axis.link, self.axis.ranks
        self.phases += 1
        timed = axis.is_timed
        bare = agreed and not timed
        outgoing, taken = [], []
        for dst, x in out:
            nbytes = x.numel() * x.element_size()
            with axis.lock:
                begin = max(self._now(), axis.egress_free)
                axis.egress_free = begin + link.seconds(nbytes)
                if self.purpose != UNBILLED:
                    self.world.ledger.bill(axis.name, self.purpose, self.step, nbytes)
            self.nbytes += nbytes
            outgoing.append((ranks[dst], Header(self.name, tuple(x.shape), str(x.dtype), x.device.type, begin), x))

        def accept(src: int, buffer: Tensor | None) -> Callable[[Header | None], Tensor]:
            def check(header: Header | None) -> Tensor:
                if header is None:
                    taken.append(buffer)
                    return buffer
                if header.op != self.name:
                    raise CommError(f"rank {ranks[src]} is in {header.op}")
                dtype = getattr(torch, header.dtype.removeprefix("torch."), None)
                if not isinstance(dtype, torch.dtype):
                    raise CommError(f"rank {ranks[src]} sent values of type {header.dtype}, which is none of torch's")
                if header.device not in ("cpu", axis.device.type):
                    raise CommError(
                        f"rank {ranks[src]} sent from device {header.device}, and this rank has {axis.device.type}"
                    )
                if not math.isfinite(header.begin):
                    raise CommError(f"rank {ranks[src]} sent at {header.begin} s, which is no time")
                x = buffer
                if x is None:
                    x = torch.empty(header.shape, dtype=dtype, device=axis.device if header.device != "cpu" else "cpu")
                if tuple(x.shape) != header.shape or x.dtype != dtype:
                    raise CommError(
                        f"rank {ranks[src]} sent {header.dtype}{list(header.shape)}, expected {x.dtype}{list(x.shape)}"
                    )
                if timed:
                    with axis.lock:
                        begin = max(header.begin + link.latency_s, axis.ingress_free)
                        axis.ingress_free = begin + link.seconds(x.numel() * x.element_size())
                        self.finished = max(self.finished, axis.ingress_free)
                taken.append(x)
                return x

            return check

        self.world.transport.swap(
            CHANNELS[axis.name, self.lane],
            outgoing,
            [(ranks[src], x, accept(src, x)) for src, x in into],
            buffered=buffered,
            bare=bare,
            consume=consume,
            direct=self.is_direct,
            expected=expected,
        )
        self.taken += sum(x.numel() * x.element_size() for x in taken)
        self.world.clock.sleep_until(self.finished)
        return taken

    @property
    def is_direct(self) -> bool:
        """Tell whether every rank of the World takes part, so that a swap is `direct` (`Transport.swap`)."""
        axis = self.axis
        return self.lane == "main" and axis.name == "replica" and axis.size == self.world.size == len(self.ranks)

    def expect(self, into: Sequence[tuple[int, Tensor]]) -> Expected | None:
        """Begin to receive what this verb's last swap, an `agreed` one, receives, while earlier swaps are under way.

        into: as for `swap`. Return what that swap takes as `expected`; None where the axis is timed.
        """
        axis = self.axis
        if axis.is_timed:
            return None
        places = [(axis.ranks[src], x) for src, x in into]
        return self.world.transport.expect(CHANNELS[axis.name, self.lane], places, bare=True, direct=self.is_direct)

    def record(self, entered: float, left: float) -> None:
        """Append this verb to the trace, if there is one.

        entered, left: when the caller began to wait for it and when it went on, in seconds on the rank's clock.
        """
        if self.world.trace is not None:
            self.world.trace.spans.append(
                Span(
                    self.world.rank,
                    self.axis.name,
                    self.verb,
                    self.purpose,
                    self.step,
                    self.ranks,
                    self.nbytes,
                    self.taken,
                    self.phases,
                    self.submitted,
                    self.finished,
                    entered,
                    left,
                )
            )


class _LaneThread:
    """A daemon thread that carries out tasks one after the other, on a GPU stream of its own where there is a GPU."""

    def __init__(self, name: str, device: torch.device):
        self.device = device
        self.free_at = float("-inf")
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))  # so that computing goes on while this one waits
        while (task := self._tasks.get()) is not None:
            task()
            del task  # and with it the tensors of the verb

    def put(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def stop(self) -> None:
        """Finish the queued tasks and end the thread: one that outlives the interpreter aborts the process."""
        self._tasks.put(None)
        self._thread.join()


class AxisState:
    """One axis of the grid as this rank sees it: the ranks on its line, their link, and the lanes.

    Attributes: `ranks` of the axis in order; `index` of this rank among them, from 0; `size`, how many they are.
    """

    def __init__(self, world: World, name: str, ranks: list[int], link: Link):
        self.world, self.name, self.ranks, self.link = world, name, ranks, link
        self.index, self.size = ranks.index(world.rank), len(ranks)
        self.device = world.device
        self.egress_free = self.ingress_free = float("-inf")
        self._of_any_shape: dict[int, int] = defaultdict(int)  # by index: messages that are awaited so
        self.lock = threading.Lock()  # of the three above, which lanes share
        self.group = None  # process group, for native reductions only
        self._counts: dict[Any, int] = defaultdict(int)
        self._lanes: dict[Lane, _LaneThread] = {}

    @property
    def is_timed(self) -> bool:
        """Tell whether each message carries its sender's time, as a link or a virtual clock needs it."""
        return self.link != Link() or self.world.clock.is_virtual

    def expect(self, source: int, like: Tensor | None) -> Expected:
        """Begin to receive the next message from index `source`, and return what its swap takes as `expected`.

        like: the buffer that it goes to; None where it may have any shape. While a message of any shape is awaited
        from there, which might have the same shape, only the header is received early, and the payload in its turn.
        """
        with self.lock:
            early = None if self._of_any_shape[source] else like
            self._of_any_shape[source] += like is None
        return self.world.transport.expect(CHANNELS[self.name, "in"], [(self.ranks[source], early)])

    def came(self, source: int, like: Tensor | None) -> None:
        """Note that a message has come which `expect` was called for, with the same arguments."""
        with self.lock:
            self._of_any_shape[source] -= like is None

    def number(self, of: Any) -> int:
        """Count one more call of the kind `of`, and return how many there were before it."""
        self._counts[of] += 1
        return self._counts[of] - 1

    def submit(
        self,
        verb: str,
        purpose: str,
        agreed: str,
        body: Callable[[Op], Any],
        *,
        members: Sequence[int],
        lane: Lane = "main",
    ) -> Handle:
        """Queue `body` on a lane and return a Handle on its result.

        members: those that take part, as indices on the axis. All of them must give the same `verb`, which is numbered,
        `purpose` and `agreed`, the shape and dtype for example: messages carry these words, and a member that receives
        others fails with CommError. If the body fails, the transport is aborted, so that other ranks learn of it.
        """
        op = Op(self, lane, verb, purpose, agreed, tuple(sorted(self.ranks[i] for i in members)))
        future: Future = Future()
        if lane not in self._lanes:
            self._lanes[lane] = _LaneThread(f"{self.name}-{lane}-{self.world.rank}", self.device)
        thread = self._lanes[lane]

        def task() -> None:
            op.finished = max(op.finished, thread.free_at)
            try:
                value = op.carry_out(body)
                if not self.world.clock.is_virtual:
                    op.finished = self.world.clock.now()
                thread.free_at = op.finished
            except Exception as error:  # whatever it is, the caller and the peers must hear of it
                where = f"rank {self.world.rank} ({self.name} {self.index} of {self.size}), step {op.step}, {op.name}"
                lost = CommError(f"{where}: {error}")
                self.world.transport.abort(str(lost))
                future.set_exception(lost)
            else:
                future.set_result(value)

        thread.put(task)
        return Handle(self.world, future, op)

    def stop(self) -> None:
        """Finish the verbs that are queued, and end the thread of every lane."""
        for thread in self._lanes.values():
            thread.stop()
        self._lanes.clear()


def rotation(members: list[int], index: int) -> tuple[list[int], list[int]]:
    """Return the members that `index` sends to and those that it takes from, each in the order to do so.

    The next neighbour comes first, so that no two members send to the same one at once.
    """
    at, n = members.index(index), len(members)
    return [members[(at + k) % n] for k in range(1, n)], [members[(at - k) % n] for k in range(1, n)]

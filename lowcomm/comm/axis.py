"""One axis of the grid: verbs on their way, in order, on threads of their own.

A verb is submitted with its body to a lane of the axis; the lane's thread runs bodies one after the other and the
caller gets a Handle. Inside a body, `Op.swap` moves tensors: it names them, bills them, and keeps the link's time.

A rank that waits must not hold up what others wait for, so there is a lane for each sort of traffic; all lanes of
an axis share its link.

    main      verbs of the whole axis, or of a group, in the order that all members call them
    ahead     the same of what is sent before it is needed, and called in an order of its own
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
#: The purpose of messages by which ranks settle what they do, which the ledger does not count.
UNBILLED = "agreement"
#: The transport's channel of each axis and lane; a message leaves by "out" and comes in by "in".
CHANNELS = {
    (axis, lane): 3 * i + kind
    for i, axis in enumerate(("replica", "stage", "route", "world"))
    for lane, kind in (("main", 0), ("ahead", 1), ("out", 2), ("in", 2))
}


class Handle:
    """A verb under way."""

    def __init__(self, world: World, future: Future, op: Op | None):
        self._world, self._future, self._op = world, future, op

    def wait(self) -> Any:
        """The verb's result. Raises CommError if it failed."""
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
    """Tell the allocator that the current stream uses GPU tensors that another one made."""
    for x in value if isinstance(value, list | tuple) else [value]:
        if isinstance(x, Tensor) and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))


class Op:
    """One verb on its way: names, clock and bill of its messages."""

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
        """On the wire's thread: run the verb's body, in order with the work that the caller queued on its GPU."""
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
        """Send and take along the axis (indices on it); a None buffer is made as the header says.

        `agreed`: an earlier swap of this verb has compared headers with the same ranks, so none need travel,
        unless to tell a link's clock when the sender began. `buffered`, `consume`: see `Transport.swap`.
        `expected`: what `expect`, or `AxisState.expect`, has begun to take.
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
        """Tell whether every rank takes part, as `Transport.swap` wants to know."""
        axis = self.axis
        return self.lane == "main" and axis.name == "replica" and axis.size == self.world.size == len(self.ranks)

    def expect(self, into: Sequence[tuple[int, Tensor]]) -> Expected | None:
        """Begin to take what the last swap of this verb takes, an `agreed` one, while those before are under way."""
        axis = self.axis
        if axis.is_timed:
            return None
        places = [(axis.ranks[src], x) for src, x in into]
        return self.world.transport.expect(CHANNELS[axis.name, self.lane], places, bare=True, direct=self.is_direct)

    def record(self, entered: float, left: float) -> None:
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
    """Carries out what it is given, in order."""

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
        """Finish what is queued and end the thread: one that outlives the interpreter aborts the process."""
        self._tasks.put(None)
        self._thread.join()


class AxisState:
    """This rank's line of the grid along one axis, its link, and its lanes."""

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
        """Tell whether senders' clocks travel with what they send, as the link's time needs them."""
        return self.link != Link() or self.world.clock.is_virtual

    def expect(self, source: int, like: Tensor | None) -> Expected:
        """Begin to take the next message from an index of the axis.

        Its payload waits for its turn where one of any shape is awaited before it, which might be shaped alike.
        """
        with self.lock:
            early = None if self._of_any_shape[source] else like
            self._of_any_shape[source] += like is None
        return self.world.transport.expect(CHANNELS[self.name, "in"], [(self.ranks[source], early)])

    def came(self, source: int, like: Tensor | None) -> None:
        """A message that `expect` was told of has come."""
        with self.lock:
            self._of_any_shape[source] -= like is None

    def number(self, of: Any) -> int:
        """How many there were of a kind before this one."""
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
        """Queue `body`; `verb`, numbered, and `agreed` are what all members (indices on the axis) must say alike."""
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
        """Finish what is queued on every lane."""
        for thread in self._lanes.values():
            thread.stop()
        self._lanes.clear()


def rotation(members: list[int], index: int) -> tuple[list[int], list[int]]:
    """Return the members to send to and those to take from, in order: next neighbour first, so that no wire is wanted
    twice at once.
    """
    at, n = members.index(index), len(members)
    return [members[(at + k) % n] for k in range(1, n)], [members[(at - k) % n] for k in range(1, n)]

"""World: one rank's view of all ranks, and the verbs by which they communicate.

Training code is the same on every rank and is handed a World. Ranks form a grid
`arange(ranks).view(stages, replicas)`; a verb names an axis of it ("replica", "stage" or
"world"), its purpose, and bills the bytes it sends. Each verb has an asynchronous form: threads of the
axis carry it out in order (`axis`) while the caller computes. "route" is the axis of messages between any two
ranks, as a pipeline sends them whose replicas change partners. Each axis has a link of its own.
`processes.ProcessTransport` says which of torchrun's processes has which rank.

    mean, sum        every rank gets the reduction, in rank order, for the bytes of a ring
    encoded_mean     the same, of values in a codec's encoding
    reduce_scatter   each rank gets the sum of its share
    exchange         each member of a group gives its tensor to every other
    send, recv       one tensor, one way
    broadcast        one rank's tensor to all
    barrier          nobody goes on before everybody has come

A reduction is computed in rank order, each rank summing its own share of the values (exchange
shares, sum, share the sums), so both transports add in the same order and runs agree bit for bit.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor

from lowcomm.codecs import Codec
from lowcomm.comm.axis import UNBILLED, AxisState, Handle, Lane, Op, rotation
from lowcomm.comm.config import CommConfig
from lowcomm.comm.encoded import EncodedMean, Reduce, weighted_mean
from lowcomm.comm.shares import Section, mean_bytes, shares
from lowcomm.comm.transport import Transport
from lowcomm.comm.wire import Ledger, Link, RealClock, Trace, VirtualClock
from lowcomm.settings import ConfigError, build, first_difference

Axis = Literal["replica", "stage", "route", "world"]
_SUMMED = (torch.float32, torch.float64, torch.int32, torch.int64)


class World:
    """All ranks as one of them sees them, and the verbs by which they communicate.

    Args:
        transport: carries the messages, between processes or threads.
        replicas, stages: the sides of the grid; their product must be the number of ranks.
        comm: the settings of the communication: links, clock, reduction, trace.
        device: this rank's device; tensors that it sends are there or on the CPU.

    Attributes: `rank`, `replica` and `stage`, this rank's place, from 0; `size`, `replicas` and `stages`, how many of
    each there are; `step`, set by the trainer, to which the ledger bills; `ledger`; `clock`; `trace`, None where none
    is recorded; `transport`; `device`.

    Raises ConfigError where the ranks do not form the grid, and for settings that do not go together.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        replicas: int,
        stages: int = 1,
        comm: CommConfig | None = None,
        device: torch.device | str = "cpu",
    ):
        comm = build(CommConfig, asdict(comm or CommConfig()), "comm")  # refuses a value that is not of its kind
        if replicas * stages != transport.size:
            raise ConfigError(
                f"{transport.size} ranks cannot form {replicas} replicas x {stages} stages;"
                f" start {replicas * stages} ranks or change replicas"
            )
        if comm.reduction == "native" and transport.in_one_process:
            raise ConfigError(
                "comm.reduction = native needs processes (torchrun); threads have no backend of their own"
            )
        link = Link(comm.link_mbit_per_s * 1e6, comm.link_latency_ms * 1e-3)
        if comm.reduction == "native" and (link != Link() or comm.clock == "virtual"):
            raise ConfigError("comm.reduction = native knows no link and no virtual clock: the backend moves the bytes")
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.replicas, self.stages = replicas, stages
        self.stage, self.replica = divmod(self.rank, replicas)
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.step = 0
        self.ledger = Ledger()
        self.clock = VirtualClock() if comm.clock == "virtual" else RealClock()
        self.trace = Trace() if comm.trace else None
        self.reduction = comm.reduction
        grid = torch.arange(self.size).view(stages, replicas)
        self._axes = {
            "replica": AxisState(self, "replica", grid[self.stage].tolist(), link),
            "stage": AxisState(self, "stage", grid[:, self.replica].tolist(), link),
            "route": AxisState(self, "route", list(range(self.size)), link),
            "world": AxisState(self, "world", list(range(self.size)), Link()),  # control: no link is modelled
        }
        if comm.reduction == "native":
            for row in grid.tolist():
                group = transport.group(row)
                if self.rank in row:
                    self._axes["replica"].group = group

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, replica {self.replica}, stage {self.stage})"

    # Reductions

    def sum_async(self, x: Tensor, *, purpose: str, axis: Axis = "replica") -> Handle:
        """Replace contiguous `x` by its sum over the axis; leave `x` alone until `wait()`, which returns it.

        Raises TypeError for dtypes other than float32, float64, int32 and int64.
        """
        return self._reduce(x, "sum", purpose, axis)

    def mean_async(self, x: Tensor, *, purpose: str, axis: Axis = "replica") -> Handle:
        """Replace contiguous `x` by its mean over the axis; leave `x` alone until `wait()`, which returns it.

        Raises TypeError for dtypes other than float32 and float64.
        """
        if not x.is_floating_point():
            raise TypeError(f"a mean of {x.dtype} is not of that type; convert to float32, or sum")
        return self._reduce(x, "mean", purpose, axis)

    def _reduce(self, x: Tensor, verb: Literal["sum", "mean"], purpose: str, axis: Axis) -> Handle:
        state = self._axes[axis]
        self._check_summable(x)
        if state.size == 1:
            return self.done(x)
        if state.group is not None:
            named = self._named(state, f"native {verb}")
            return state.submit(
                named, purpose, _like(x), lambda op: self._native(op, x, verb), members=range(state.size)
            )
        flat = x.view(-1)

        def body(op: Op) -> Tensor:
            begin_end = shares(flat.numel(), state.size)
            to, source = rotation(list(range(state.size)), state.index)
            sums = [(i, flat[slice(*begin_end[i])]) for i in source]
            expected = op.expect(sums)  # none comes before its sender has what is there now
            own = self._reduce_share(op, flat, verb)
            op.swap([(i, own) for i in to], sums, agreed=True, expected=expected)
            return x

        named = self._named(state, verb)
        return state.submit(named, purpose, _like(x), body, members=range(state.size))

    def encoded_mean_async(
        self,
        x: Tensor,
        codec: Codec,
        *,
        purpose: str,
        seed: int = 0,
        axis: Axis = "replica",
        group: Sequence[int] | None = None,
        sections: Sequence[Section] | None = None,
        ahead: bool = False,
        packed: Sequence[Tensor] | None = None,
        reduce: Reduce = weighted_mean,
    ) -> Handle:
        """Replace flat fp32 `x` by the mean of decode(encode(x)) over the axis.

        Leave `x` alone until `wait()`, which returns it. Each value is encoded once, by its owner, and summed in fp32
        in rank order. Encoded values are gathered, or reduced in shares whose sums travel as fp32, whichever sends
        fewer bytes; the result is the same bit for bit.

        With a `group` (indices on the axis) the mean is over its members, who alone take part. With `sections`, in the
        order of `x`, each is the mean over those of its owners (indices on the axis) who are members, zero where there
        are none; all members get all of it, and nobody sends what it does not own. `ahead`: whether the mean is sent
        before it is needed; then it holds up no other verb, and waits for none.
        `packed`: what `encoded` has made of `x` already. `reduce`: the reduction in the place of the mean, the same on
        all ranks. Both are as for `EncodedMean`. Raises TypeError where `x` is not flat fp32.
        """
        if x.dtype != torch.float32 or x.dim() != 1:
            raise TypeError(f"encoded means are of flat float32 tensors, got {_like(x)}")
        _check_contiguous(x)
        state = self._axes[axis]
        members = sorted(self._members(state, group))
        sections = sections or [(x.numel(), members)]
        mean = EncodedMean(x, codec, seed, sections, members, state.index, packed=packed, reduce=reduce)
        if len(members) == 1:
            return self.done(mean.alone())
        lane: Lane = "ahead" if ahead else "main"
        named = self._named(state, "encoded mean", members, lane)
        agreed = f"{_like(x)} in {codec.name}, {_digest([(n, sorted(owners)) for n, owners in sections])}"
        return state.submit(named, purpose, agreed, mean.over, members=members, lane=lane)

    def reduce_scatter(self, x: Tensor, *, purpose: str, axis: Axis = "replica") -> Tensor:
        """Return the sum over the axis of this rank's share (`shares.shares`) of the values of contiguous `x`.

        The sum is flat and takes the place of the share in `x`, the rest of which is scratch afterwards. Raises
        TypeError for dtypes other than float32, float64, int32 and int64.
        """
        state = self._axes[axis]
        self._check_summable(x)
        if state.size == 1:
            return x.view(-1)
        flat = x.view(-1)
        named = self._named(state, "reduce_scatter")
        return state.submit(
            named, purpose, _like(x), lambda op: self._reduce_share(op, flat, "sum"), members=range(state.size)
        ).wait()

    def _reduce_share(self, op: Op, flat: Tensor, verb: Literal["sum", "mean"]) -> Tensor:
        """Exchange shares, reduce this rank's in rank order in its place in `flat`, and return it, a view of `flat`."""
        state = op.axis
        begin_end = shares(flat.numel(), state.size)
        own = flat[slice(*begin_end[state.index])]
        to, source = rotation(list(range(state.size)), state.index)

        def add(begin: int, end: int, parts: list[Tensor]) -> None:
            mine = own[begin:end]
            part_of = dict(zip(source, parts, strict=True)) | {state.index: mine}
            total = part_of[0]
            for i in range(1, state.size):
                # In rank order; the running sum moves into its place as soon as the old values there are used up.
                total = torch.add(total, part_of[i], out=mine if i >= state.index else total)
            if verb == "mean":
                mine.div_(state.size)

        op.swap([(i, flat[slice(*begin_end[i])]) for i in to], [(i, own) for i in source], consume=add)
        return own

    def _native(self, op: Op, x: Tensor, verb: str) -> Tensor:
        state = op.axis
        nbytes = mean_bytes(x.numel(), x.element_size(), state.size, state.index)  # nominal: a ring's
        self.ledger.bill(state.name, op.purpose, op.step, nbytes)
        op.nbytes, op.phases = nbytes, 2
        self.transport.all_reduce(x, state.group)
        return x.div_(state.size) if verb == "mean" else x

    # Moving tensors

    def exchange_async(
        self, x: Tensor, *, purpose: str, axis: Axis = "replica", group: Sequence[int] | None = None
    ) -> Handle:
        """Give contiguous `x` to every member of `group` (indices on the axis; by default all) and take theirs.

        `wait()` returns a list in the order of the group, with `x` itself at this rank's place. Shapes may differ
        between members, dtypes may not. Raises ValueError where `group` lacks this rank, repeats a member or names an
        index that is not on the axis.
        """
        _check_contiguous(x)
        state = self._axes[axis]
        members = self._members(state, group)
        if len(members) == 1:
            return self.done([x])
        to, source = rotation(members, state.index)

        def body(op: Op) -> list[Tensor]:
            taken = op.swap([(i, x) for i in to], [(i, None) for i in source])
            part_of = dict(zip(source, taken, strict=True)) | {state.index: x}
            return [part_of[i] for i in members]

        return state.submit(self._named(state, "exchange", members), purpose, str(x.dtype), body, members=members)

    def send_async(self, x: Tensor, to: int, *, purpose: str, axis: Axis = "stage") -> Handle:
        """Send contiguous `x` to index `to` of the axis; the tensor may change as soon as `wait()` returns.

        Raises ValueError where `to` is this rank's own index or none of the axis.
        """
        _check_contiguous(x)
        state = self._towards(to, axis)
        return state.submit(
            self._message(state, state.index, to),
            purpose,
            "a tensor",
            lambda op: op.swap([(to, x)], [], buffered=True) and None,
            members=(state.index, to),
            lane="out",
        )

    def recv_async(self, source: int, *, purpose: str, axis: Axis = "stage", like: Tensor | None = None) -> Handle:
        """Receive the next tensor from index `source` of the axis; `wait()` returns it.

        `like`: the tensor to overwrite and return, whose shape and dtype the message must have; by default a new one.
        Raises ValueError where `source` is this rank's own index or none of the axis.
        """
        if like is not None:
            _check_contiguous(like)
        state = self._towards(source, axis)
        expected = state.expect(source, like)  # now, so that messages that follow each other need not wait for that

        def body(op: Op) -> Tensor:
            (taken,) = op.swap([], [(source, like)], expected=expected)
            state.came(source, like)
            return taken

        return state.submit(
            self._message(state, source, state.index),
            purpose,
            "a tensor",
            body,
            members=(source, state.index),
            lane="in",
        )

    @staticmethod
    def _message(state: AxisState, source: int, to: int) -> str:
        return f"message #{state.number((source, to))} {source} to {to}"

    @staticmethod
    def _members(state: AxisState, group: Sequence[int] | None) -> list[int]:
        members = list(range(state.size)) if group is None else list(group)
        if (
            state.index not in members
            or len(set(members)) != len(members)
            or not set(members) <= set(range(state.size))
        ):
            raise ValueError(
                f"group {members} must name each member once, hold this rank's index {state.index} and be of axis"
                f" {state.name!r} of size {state.size}"
            )
        return members

    @staticmethod
    def _named(state: AxisState, verb: str, members: list[int] | None = None, lane: Lane = "main") -> str:
        """Return the name by which members call a verb, numbered so that ranks that are out of step find out."""
        among = ""
        if members is not None and len(members) < state.size:
            among = f" among {len(members)}, {_digest(members)}"
        return f"{verb}{'' if lane == 'main' else ' ahead'} #{state.number((lane, among))}{among}"

    def _towards(self, index: int, axis: Axis) -> AxisState:
        state = self._axes[axis]
        if not 0 <= index < state.size or index == state.index:
            raise ValueError(
                f"index {index} of axis {axis!r} is no peer of index {state.index}: the axis has size {state.size}"
            )
        return state

    def broadcast(self, x: Tensor, *, purpose: str, axis: Axis = "replica", root: int = 0) -> Tensor:
        """Overwrite contiguous `x` with that of index `root` of the axis, and return it.

        The root sends to each rank itself, which is meant for small tensors. Raises ValueError where `root` is not on
        the axis.
        """
        _check_contiguous(x)
        state = self._axes[axis]
        if not 0 <= root < state.size:
            raise ValueError(f"root {root} is not on axis {axis!r} of size {state.size}")
        if state.size == 1:
            return x
        others = [i for i in range(state.size) if i != root]

        def body(op: Op) -> Tensor:
            if state.index == root:
                op.swap([(i, x) for i in others], [])
            else:
                op.swap([], [(root, x)])
            return x

        named = self._named(state, "broadcast")
        return state.submit(named, purpose, f"{_like(x)} from {root}", body, members=range(state.size)).wait()

    def barrier(self, *, axis: Axis = "world") -> None:
        """Return once every rank of the axis has called it."""
        self.exchange(torch.empty(0, dtype=torch.uint8, device=self.device), purpose="barrier", axis=axis)

    def tell(self, value: Any, *, axis: Axis = "world") -> list[Any]:
        """Give a value that JSON can hold to every rank of the axis, and return a list of all ranks' values, in order.

        It is for what ranks settle before and beside training; like the headers of messages, it is not billed.
        """
        packed = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        told = self.exchange(packed, purpose=UNBILLED, axis=axis)
        return [json.loads(x.numpy().tobytes()) for x in told]

    def agree(self, settings: Mapping[str, Any], *, axis: Axis = "world") -> None:
        """Check that all ranks of the axis have the same settings, given by name as values that JSON can hold.

        Raises ConfigError on every rank where they differ, with the first setting that differs from the first rank's.
        """
        everyone = dict(zip(self._axes[axis].ranks, self.tell(dict(settings), axis=axis), strict=True))
        first = next(iter(everyone))
        for rank, theirs in everyone.items():
            if differs := first_difference(everyone[first], theirs, f"on rank {first}", f"on rank {rank}"):
                raise ConfigError(f"ranks were started differently: {differs}")

    # Synchronous forms

    def sum(self, x: Tensor, *, purpose: str, axis: Axis = "replica") -> Tensor:
        """Call `sum_async`, wait for it and return `x`."""
        return self.sum_async(x, purpose=purpose, axis=axis).wait()

    def mean(self, x: Tensor, *, purpose: str, axis: Axis = "replica") -> Tensor:
        """Call `mean_async`, wait for it and return `x`."""
        return self.mean_async(x, purpose=purpose, axis=axis).wait()

    def exchange(
        self, x: Tensor, *, purpose: str, axis: Axis = "replica", group: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Call `exchange_async`, wait for it and return the list of tensors."""
        return self.exchange_async(x, purpose=purpose, axis=axis, group=group).wait()

    def send(self, x: Tensor, to: int, *, purpose: str, axis: Axis = "stage") -> None:
        """Call `send_async` and wait until `x` is handed over, which may be before it has arrived."""
        self.send_async(x, to, purpose=purpose, axis=axis).wait()

    def recv(self, source: int, *, purpose: str, axis: Axis = "stage", like: Tensor | None = None) -> Tensor:
        """Call `recv_async`, wait for it and return the tensor."""
        return self.recv_async(source, purpose=purpose, axis=axis, like=like).wait()

    def close(self) -> None:
        """Leave the World as `leave` does, and close the transport."""
        self.leave()
        self.transport.close()

    def leave(self) -> None:
        """Wait for all ranks to leave, and finish the verbs that are under way.

        The transport then may serve another World.
        """
        if self.size > 1:
            self.barrier()
        self.stop()

    def stop(self) -> None:
        """Finish the verbs that are queued and end this rank's threads, without a barrier, as after an abort."""
        for axis in self._axes.values():
            axis.stop()

    def _check_summable(self, x: Tensor) -> None:
        if x.dtype not in _SUMMED:
            raise TypeError(f"{x.dtype} loses bits when summed; convert to float32 or use a codec")
        _check_contiguous(x)

    def done(self, value: Any) -> Handle:
        """Return a Handle whose `wait()` returns `value` at once."""
        future: Future = Future()
        future.set_result(value)
        return Handle(self, future, None)


def _check_contiguous(x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"what travels must be contiguous, got a tensor of strides {x.stride()}")


def _digest(value: Any) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


def _like(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"

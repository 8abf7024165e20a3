"""Ranks as processes under torchrun. No other module sends tensors through torch.distributed itself."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import math
import os
import queue
import socket
import struct
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lowcomm.comm.notes import Notes
from lowcomm.comm.transport import HEADER_BYTES, CommError, Consume, Expected, Header, Incoming, Outgoing
from lowcomm.comm.worker import Worker
from lowcomm.settings import ConfigError

log = logging.getLogger("lowcomm")

#: A payload that is consumed as it comes is cut into pieces of this size, and this many of them are on their way
#: from each peer: small enough that a piece is summed while it is still in the cache.
PIECE_BYTES, PIECES_AHEAD = 2 << 20, 4
#: The store answers in less than a thousandth of this where all is well.
_ANSWERED_WITHIN_S = 5.0
#: A connection that is refused is tried again for so many seconds beyond its time-out; one that is made and on which
#: nothing is said would be waited for much longer.
_TRIED_AGAIN_S = 5.0
#: Seconds between two looks at whether all ranks have started.
_LOOK_S = 0.01


def elastic_store(address: str, *, hosts: bool = False, timeout_s: float = 30.0) -> Notes:
    """Return the store through which elastic replicas agree on who takes part (`lowcomm.ElasticUpdates`).

    Args:
        address: "host:port" of the store, on a machine that stays (`lowcomm store PORT` there keeps one).
        hosts: whether this process keeps the store, which then ends with it; port 0 then is any that is free.
        timeout_s: how long a connection to the store may take to be made, in seconds. An answer is waited for as long,
            but for no more than five seconds.

    Raises ConfigError where `address` is not of that form or the store cannot be kept on its port, and CommError where
    no store answers there.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address
    if not colon or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(f"{address!r} is no address of a store: HOST:PORT is wanted, as head:29400")

    def connected(port: int, *, hosts: bool, timeout_s: float) -> dist.TCPStore:
        timeout = datetime.timedelta(seconds=timeout_s)
        return dist.TCPStore(host, port, is_master=hosts, wait_for_workers=False, timeout=timeout)

    worker = Worker("connect")
    try:
        asked = worker.submit(lambda: connected(int(port), hosts=hosts, timeout_s=timeout_s))
        found = asked.result(timeout_s + _TRIED_AGAIN_S)
    except (RuntimeError, TimeoutError) as error:
        why = str(error).partition("\n")[0] or f"it does not answer within {timeout_s:g} s"
        if hosts:
            raise ConfigError(f"no store of elastic replicas can be kept on port {port}: {why}") from None
        raise CommError(f"no store of elastic replicas at {address}: {why} (lowcomm store {port} starts one)") from None
    finally:
        worker.end(wait=False)
    within_s = min(timeout_s, _ANSWERED_WITHIN_S)
    return Notes(
        found,
        within_s,
        port=found.port,
        here=host if _is_loopback(host) else _address_for_others(host, found.port),
        connect=None if hosts else lambda: connected(found.port, hosts=False, timeout_s=within_s),
    )


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the network by which it reaches another. (Nothing is sent.)"""
    family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _address_for_others(host: str, port: int) -> str:
    """Return this machine's address towards another, by which others reach it too, or one of the loopback.

    It is one of the loopback where the machine is on no network.

    A machine's own name may stand for its loopback, as Debian has it; then it is the address on the way to anywhere.
    """
    address = "127.0.0.1"
    for there in (host, "192.0.2.1", "2001:db8::1"):
        with contextlib.suppress(OSError):
            if _is_loopback(address):
                address = _address_towards(there, port)
    return address


def _interface_towards(host: str, port: int) -> str:
    """Return the name of the interface that has this machine's address towards another; "" where it is not found."""
    ask, address = 0x8915, _address_for_others(host, port)  # SIOCGIFADDR, as Linux has it
    if _is_loopback(address):
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), ask, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def _of_this_start(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """Return the part of a store that belongs to this start of all ranks, in which they find each other.

    torchrun keeps its store for as long as it runs, and starts ranks again when one has failed; the addresses that an
    earlier start has left there are nobody's. So each rank writes a name that no other start has, the first calls the
    names that it finds, and when all have answered to one call, they use the part that has the first rank's name.
    Raises CommError where that takes longer than `timeout_s`.
    """
    me, until = uuid.uuid4().hex, time.monotonic() + timeout_s

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    said = -math.inf
    while time.monotonic() < until:
        if time.monotonic() > said + 1 and read(f"start/{rank}") != me:  # also where an earlier start's word came late
            store.set(f"start/{rank}", me)
            said = time.monotonic()
        if rank == 0:
            call = " ".join(read(f"start/{r}") or "-" for r in range(size))
            if call != read("start/call"):
                store.set("start/call", call)
            if all(read(f"start/answer/{name}") == call for name in call.split()[1:]):
                store.set("start/all", call)
        elif (call := read("start/call")).split()[rank : rank + 1] == [me]:
            store.set(f"start/answer/{me}", call)
        if (names := read("start/all").split())[rank : rank + 1] == [me]:
            return dist.PrefixStore(f"start/{names[0]}", store)
        time.sleep(_LOOK_S)
    call = read("start/call")
    if call.split()[rank : rank + 1] != [me]:
        raise CommError(f"rank {rank} has waited for rank 0, which has not started in {timeout_s:g} s")
    answered = [r for r, name in enumerate(call.split()) if name != "-" and read(f"start/answer/{name}") == call]
    there = sorted({0, *answered})
    raise CommError(f"of {size} ranks only {there} have started in {timeout_s:g} s")


def _place(store: dist.Store, started_as: int, size: int, stages: int) -> int:
    """Return the rank, in the World's grid, of the process to which torchrun has given a number.

    Raises ConfigError on every rank where they were started with unlike numbers of stages.
    """
    store.set(f"stages/{started_as}", str(stages))
    told = [int(number) for number in store.multi_get([f"stages/{i}" for i in range(size)])]
    if other := next((i for i, number in enumerate(told) if number != told[0]), None):
        raise ConfigError(f"ranks were started differently: {told[0]} stages on rank 0, {told[other]} on rank {other}")
    if size % stages:
        return started_as  # which the World refuses
    replica, stage = divmod(started_as, stages)
    return stage * (size // stages) + replica


def _own_gpu() -> str:
    """Return the name, like no other's, of the GPU that this process would use; "" where it sees none."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return str(torch.cuda.get_device_properties(local).uuid) if local < torch.cuda.device_count() else ""


def _all_have_gpus(store: dist.Store, started_as: int, size: int, *, needed: bool) -> bool:
    """Tell whether each rank has a GPU of its own, as NCCL needs; the result is the same on every rank.

    Ranks tell each other which GPU they would use: how many a process sees does not say, as some launchers show each
    process its own alone. Raises CommError on every rank where that is `needed` and not so.
    """
    store.set(f"gpu/{started_as}", _own_gpu())
    names = [name.decode() for name in store.multi_get([f"gpu/{i}" for i in range(size)])]
    if not all(names):
        why = f"rank {names.index('')} of {size} has none"
    elif shared := next((i for i, name in enumerate(names) if name in names[:i]), 0):
        why = f"ranks {names.index(names[shared])} and {shared} of {size} share one"
    else:
        return True
    if needed:
        raise CommError(f"comm.backend = nccl needs a GPU for each rank: {why}; use gloo to share GPUs or the CPU")
    if any(names) and started_as == 0:
        log.warning("messages go through the CPU (gloo), as not each rank has a GPU of its own: %s", why)
    return False


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _tag(channel: int, payload: Tensor, bare: bool) -> int:
    """Return the tag of a payload, which depends on its channel, dtype and shape.

    gloo ends the process when a payload is longer than its buffer, so ranks that disagree must miss each other's
    payloads and meet in the headers, whose tag is the channel alone. A bare payload, which may be expected while others
    are on their way, has a tag of its own.
    """
    return 1 << 30 | zlib.crc32(f"{channel} {payload.dtype} {tuple(payload.shape)} {bare}".encode()) >> 2


class ProcessTransport:
    """The transport of ranks that are processes under torchrun: gloo on the CPU, NCCL between GPUs.

    With gloo a tensor on a GPU is staged through the CPU, so several ranks may share one GPU. With NCCL too, the
    messages between two ranks and the verbs of groups go through the CPU: NCCL carries out the calls of a rank in one
    order, and the order of these differs from rank to rank.

    torchrun numbers the processes of a machine one after the other. With `stages` these are the stages of one replica,
    and then those of the next, as activations cross between stages at each step: slow links lie between replicas.

    Attributes: `uses_nccl`, whether NCCL is used, the same on every rank; `timeout`, for which a peer is waited for.

    Raises CommError where this process is not under torchrun or has a process group already, where the ranks do not
    find each other in `timeout_s` seconds, and where `backend` is "nccl" and not each rank has a GPU of its own;
    ConfigError where ranks were started with unlike numbers of stages.
    """

    in_one_process = False

    def __init__(self, backend: str, timeout_s: float, stages: int = 1):
        missing = [k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
        if missing:
            raise CommError(f"not under torchrun: {', '.join(missing)} not set")
        if dist.is_initialized():
            raise CommError("this process has a process group already: make one World, before any other group")
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        self.timeout = datetime.timedelta(seconds=timeout_s)
        if local < int(os.environ["WORLD_SIZE"]) and "GLOO_SOCKET_IFNAME" not in os.environ:
            # Else gloo tells others the address to which this machine's name resolves, which may be 127.0.0.1.
            name = _interface_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            os.environ |= {"GLOO_SOCKET_IFNAME": name} if name else {}
        try:
            store, started_as, self.size = next(iter(dist.rendezvous("env://", timeout=self.timeout)))
        except RuntimeError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise CommError(f"the ranks' store at {where} cannot be had: {str(error).splitlines()[0]}") from None
        store.set_timeout(self.timeout)
        store = _of_this_start(store, started_as, self.size, timeout_s)
        self.uses_nccl = backend != "gloo" and _all_have_gpus(store, started_as, self.size, needed=backend == "nccl")
        self.rank = _place(store, started_as, self.size, stages)
        # Of a connection of its own: notes are read while other calls block.
        self._notes = Notes(store.clone(), min(timeout_s, _ANSWERED_WITHIN_S))
        if self.uses_nccl:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.uses_nccl else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
        )
        #: Buffered sends that may be under way, None at the end: (work, the tensor that it reads, destination).
        self._posted: queue.SimpleQueue[tuple[dist.Work, Tensor, int] | None] = queue.SimpleQueue()
        self._reaper = threading.Thread(target=self._reap, name="sent", daemon=True)
        self._lost: CommError | None = None  # the first of them that failed
        self._reaper.start()
        self._pieces: dict[tuple[int, int], Tensor] = {}  # (channel, sources) -> room for the pieces on their way

    def _wait(self, work: dist.Work, what: str) -> None:
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            reason = self.read("abort")
            raise CommError(f"{what}: {reason or str(error).splitlines()[0]}") from None

    def _post(self, dst: int, tensor: Tensor, tag: int) -> dist.Work:
        try:
            return dist.isend(tensor, dst, tag=tag)
        except RuntimeError as error:
            raise CommError(f"sending to rank {dst}: {self.read('abort') or str(error).splitlines()[0]}") from None

    def _expect(self, src: int, tensor: Tensor, tag: int) -> dist.Work:
        try:
            return dist.irecv(tensor, src, tag=tag)
        except RuntimeError as error:
            raise CommError(f"waiting for rank {src}: {self.read('abort') or str(error).splitlines()[0]}") from None

    def swap(
        self,
        channel: int,
        out: list[Outgoing],
        into: list[Incoming],
        *,
        buffered: bool = False,
        bare: bool = False,
        consume: Consume | None = None,
        direct: bool = False,
        expected: Expected | None = None,
    ) -> None:
        nccl = self.uses_nccl and direct
        on_gpu = any(x.is_cuda for x in [*(x for _, _, x in out), *(x for _, x, _ in into if x is not None)])
        in_pieces = consume is not None and not on_gpu
        if expected is None:
            places = [(src, None if in_pieces else x) for src, x, _ in into]
            expected = self.expect(channel, places, bare=bare, direct=direct)
        headers, header_works, early = expected
        pieces = self._take_pieces(channel, [src for src, _, _ in into], into[0][1]) if in_pieces else iter(())
        sends = []
        for dst, header, payload in out:
            if not bare:
                packed = header.pack()
                sends.append((self._post(dst, packed, channel), packed, dst))
            if payload.numel() and not (nccl and payload.is_cuda):
                wire = _bytes_of(payload.cpu() if payload.is_cuda else payload.clone() if buffered else payload)
                for piece in wire.split(PIECE_BYTES) if in_pieces else [wire]:
                    sends.append((self._post(dst, piece, _tag(channel, payload, bare)), piece, dst))
        arriving = []
        for i, (src, _, accept) in enumerate(into):
            if not bare:
                self._wait(header_works[i], f"waiting for rank {src}")
            buffer = accept(None if bare else Header.unpack(headers[i]))
            if consume and on_gpu:
                buffer = torch.empty_like(buffer)
            if early[i] is None and not in_pieces:
                early[i] = self._place(channel, src, buffer, bare, nccl)
            arriving.append((src, buffer, early[i]))
        for begin, end, parts in pieces:
            consume(begin, end, parts)
        for src, buffer, payload in arriving:
            if payload:
                work, wire = payload
                self._wait(work, f"waiting for rank {src}")
                if wire.device != buffer.device:
                    buffer.copy_(wire)
        if nccl:
            self._swap_on_gpus([(d, x) for d, _, x in out], [(src, x) for src, x, _ in arriving])
        if consume and on_gpu:
            consume(0, arriving[0][1].numel(), [x for _, x, _ in arriving])
        for send in sends:
            if buffered:
                self._posted.put(send)
            else:
                self._wait(send[0], f"sending to rank {send[2]}")
        if self._lost is not None:
            raise self._lost

    def expect(
        self, channel: int, into: list[tuple[int, Tensor | None]], *, bare: bool = False, direct: bool = False
    ) -> Expected:
        headers = [torch.empty(0 if bare else HEADER_BYTES, dtype=torch.uint8) for _ in into]
        works = [] if bare else [self._expect(src, h, channel) for (src, _), h in zip(into, headers, strict=True)]
        nccl = self.uses_nccl and direct
        return headers, works, [None if x is None else self._place(channel, src, x, bare, nccl) for src, x in into]

    def _place(
        self, channel: int, src: int, buffer: Tensor, bare: bool, nccl: bool
    ) -> tuple[dist.Work, Tensor] | tuple[()]:
        """Begin to receive a payload into the CPU's memory.

        Return the work to wait for and the tensor that it fills; () for an empty payload and for one that NCCL carries.
        """
        if not buffer.numel() or (nccl and buffer.is_cuda):
            return ()
        wire = torch.empty_like(buffer, device="cpu") if buffer.is_cuda else buffer
        return self._expect(src, _bytes_of(wire), _tag(channel, buffer, bare)), wire

    def _reap(self) -> None:
        """Wait, on a thread, for each buffered send, so that its tensor is freed as soon as it is taken."""
        while (send := self._posted.get()) is not None:
            try:
                self._wait(send[0], f"sending to rank {send[2]}")
            except CommError as error:
                self._lost = self._lost or error
            del send

    def _take_pieces(self, channel: int, sources: list[int], like: Tensor) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Begin to receive payloads shaped as `like`, one per source, in pieces.

        Return an iterator over (begin, end, the values [begin, end) of each payload), which waits for each piece; the
        values hold until the next step of the iterator.
        """
        key = channel, len(sources)
        if key not in self._pieces:
            self._pieces[key] = torch.empty(PIECES_AHEAD, len(sources), PIECE_BYTES, dtype=torch.uint8)
        values = PIECE_BYTES // like.element_size()
        spans = [(b, min(b + values, like.numel())) for b in range(0, like.numel(), values)]

        def room(k: int) -> Tensor:
            begin, end = spans[k]
            return self._pieces[key][k % PIECES_AHEAD, :, : (end - begin) * like.element_size()]

        def expect(k: int) -> list[dist.Work]:
            tag = _tag(channel, like, bare=False)
            return [self._expect(src, x, tag) for src, x in zip(sources, room(k), strict=True)]

        coming = deque(expect(k) for k in range(min(PIECES_AHEAD, len(spans))))  # now, not when the first is asked for

        def pieces() -> Iterator[tuple[int, int, list[Tensor]]]:
            for k, (begin, end) in enumerate(spans):
                for src, work in zip(sources, coming.popleft(), strict=True):
                    self._wait(work, f"waiting for rank {src}")
                yield begin, end, [x.view(like.dtype) for x in room(k)]
                if k + PIECES_AHEAD < len(spans):
                    coming.append(expect(k + PIECES_AHEAD))

        return pieces()

    def _swap_on_gpus(self, out: list[tuple[int, Tensor]], into: list[tuple[int, Tensor]]) -> None:
        # One group, because NCCL's sends and receives between a pair block each other otherwise.
        calls = [dist.P2POp(dist.isend, x, dst) for dst, x in out if x.is_cuda and x.numel()]
        calls += [dist.P2POp(dist.irecv, x, src) for src, x in into if x.is_cuda and x.numel()]
        for work in dist.batch_isend_irecv(calls) if calls else []:
            self._wait(work, "swapping between GPUs")

    def all_reduce(self, x: Tensor, group: dist.ProcessGroup) -> None:
        """Replace `x` by its sum over a group, by the backend's own reduction and in its order.

        Raises CommError where that fails.
        """
        staged = x if self.uses_nccl or not x.is_cuda else x.cpu()
        self._wait(dist.all_reduce(staged, group=group, async_op=True), "native reduction")
        if staged is not x:
            x.copy_(staged)

    def group(self, ranks: list[int]) -> dist.ProcessGroup:
        """Return a new process group of `ranks`; every rank must make the same groups in the same order."""
        return dist.new_group(ranks, timeout=self.timeout)

    def note(self, key: str, value: str) -> None:
        self._notes.write(key, value)

    def read(self, key: str) -> str | None:
        return self._notes.read(key)

    def abort(self, reason: str) -> None:
        self.note("abort", reason)

    def close(self) -> None:
        self._posted.put(None)
        self._reaper.join()
        dist.destroy_process_group()
        if self._lost is not None:
            raise self._lost

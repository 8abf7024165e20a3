"""Two ways for ranks to swap tensors: processes (torch.distributed) and threads.

This is the only module that touches torch.distributed's communication. Both transports offer
one primitive, `swap`: post some messages, then take some. A message is a header (what the sender
believes it is doing, and when it began) and a payload, so ranks that disagree find out by name
before any byte lands in the wrong place.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

HEADER_BYTES = 512
#: A payload that is consumed as it comes is cut into pieces of this size, and this many of them are on their way
#: from each peer: small enough that a piece is summed while it is still in the cache.
PIECE_BYTES, PIECES_AHEAD = 2 << 20, 4


class CommError(RuntimeError):
    """Ranks disagree, or one is gone. The message names the ranks, the verb and the purpose."""


@dataclass(frozen=True)
class Header:
    """What travels before a payload."""

    op: str  # verb, purpose and sequence number, with the shape and dtype all must agree on
    shape: tuple[int, ...]  # of this payload
    dtype: str
    device: str  # "cpu" or "cuda": where the sender had it, and where a receiver without a buffer puts it
    begin: float  # when its first bit left, on the sender's clock

    def pack(self) -> Tensor:
        raw = json.dumps([self.op, self.shape, self.dtype, self.device, self.begin]).encode()
        if len(raw) > HEADER_BYTES:
            raise ValueError(f"header of {len(raw)} bytes is longer than {HEADER_BYTES}: {raw!r}")
        return torch.frombuffer(bytearray(raw.ljust(HEADER_BYTES)), dtype=torch.uint8)

    @staticmethod
    def unpack(packed: Tensor) -> Header:
        op, shape, *rest = json.loads(packed.numpy().tobytes().rstrip())
        return Header(op, tuple(shape), *rest)


Outgoing = tuple[int, Header, Tensor]  # destination rank, header, contiguous payload
#: Source rank, the buffer if its shape is known beforehand, and header (None: bare) -> buffer (or CommError).
Incoming = tuple[int, Tensor | None, Callable[[Header | None], Tensor]]
#: (begin, end, the values [begin, end) of each incoming payload, in the order of `into`); may overwrite them.
Consume = Callable[[int, int, list[Tensor]], None]


class Transport(Protocol):
    """What World needs of a transport."""

    rank: int
    size: int

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
    ) -> None:
        """Post `out`, fill `into`.

        Buffered: return before the receivers took `out`. Bare (all ranks or none): payloads of known shape,
        without headers.
        Direct (all ranks or none): every rank takes part, and no other swap is under way that is direct too, so that a
        backend that carries out all in one order may take GPU tensors as they are.
        Consume (all ranks or none): payloads, all of one size, are handed over piece by piece and not kept;
        the buffers of `into` only say their shape.
        """

    def note(self, key: str, value: str) -> None:
        """Leave a short note that every rank can read, also while others compute."""

    def read(self, key: str) -> str | None:
        """A note, or None; never blocks."""

    def abort(self, reason: str) -> None:
        """Tell all ranks why this one gives up."""

    def close(self) -> None: ...


class ThreadHub:
    """Mailboxes, notes and the reason of an abort, shared by the ranks of one process."""

    def __init__(self, size: int, timeout_s: float):
        self.size, self.timeout_s = size, timeout_s
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue] = {}
        self._notes: dict[str, str] = {}
        self._lock = threading.Lock()
        self.aborted = ""

    def box(self, src: int, dst: int, channel: int) -> queue.SimpleQueue:
        with self._lock:
            return self._boxes.setdefault((src, dst, channel), queue.SimpleQueue())

    def note(self, key: str, value: str) -> None:
        self._notes[key] = value

    def read(self, key: str) -> str | None:
        return self._notes.get(key)

    def abort(self, reason: str) -> None:
        with self._lock:
            self.aborted = self.aborted or reason
            boxes = list(self._boxes.values())
        for box in boxes:  # wake everyone who waits
            box.put(None)


class ThreadTransport:
    """Ranks as threads of one process: for a notebook cell, a test, many replicas on one GPU."""

    def __init__(self, hub: ThreadHub, rank: int):
        self.hub, self.rank, self.size = hub, rank, hub.size

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
    ) -> None:
        taken = []
        for dst, header, payload in out:
            # A copy, because the sender may change its tensor before the receiver looks.
            copy = payload.clone()
            made = torch.cuda.current_stream(copy.device).record_event() if copy.is_cuda else None
            self.hub.box(self.rank, dst, channel).put((header, copy, made))
        for src, _, accept in into:
            box = self.hub.box(src, self.rank, channel)  # before the check: an abort wakes the boxes it finds
            if self.hub.aborted:
                raise CommError(self.hub.aborted)
            try:
                message = box.get(timeout=self.hub.timeout_s)
            except queue.Empty:
                raise CommError(f"no word from rank {src} in {self.hub.timeout_s:g} s") from None
            if message is None:
                raise CommError(self.hub.aborted)
            header, payload, made = message
            if made is not None:  # each rank's wire has a stream of its own
                stream = torch.cuda.current_stream(payload.device)
                stream.wait_event(made)
                payload.record_stream(stream)
            buffer = accept(None if bare else header)
            if consume:
                taken.append(payload)
            elif buffer.numel():
                buffer.copy_(payload.view(buffer.shape))
        if consume:
            consume(0, taken[0].numel(), taken)

    def note(self, key: str, value: str) -> None:
        self.hub.note(key, value)

    def read(self, key: str) -> str | None:
        return self.hub.read(key)

    def abort(self, reason: str) -> None:
        self.hub.abort(reason)

    def close(self) -> None: ...


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _tag(channel: int, payload: Tensor) -> int:
    """A payload's tag says its shape: gloo ends the process when a payload is longer than its buffer, so ranks
    that disagree must miss each other's payloads and meet in the headers, whose tag is the channel alone."""
    return 1 << 30 | zlib.crc32(f"{channel} {payload.dtype} {tuple(payload.shape)}".encode()) >> 2


class ProcessTransport:
    """Ranks as processes under torchrun: gloo on the CPU, NCCL between GPUs.

    With gloo a tensor on a GPU is staged through the CPU, so several ranks may share one GPU. So are messages and what
    groups do, with NCCL too: it carries out what a rank asks of it in one order, and theirs differs from rank to rank.
    """

    def __init__(self, backend: str, timeout_s: float):
        missing = [k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
        if missing:
            raise CommError(f"not under torchrun: {', '.join(missing)} not set")
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        gpus = torch.cuda.device_count()
        if backend == "nccl" and gpus < local:
            raise CommError(
                f"comm.backend = nccl needs a GPU for each rank: {local} ranks on this machine, {gpus} GPUs;"
                " use gloo to share GPUs or the CPU"
            )
        self.uses_nccl = backend == "nccl" or (backend == "auto" and gpus >= local)
        self.timeout = datetime.timedelta(seconds=timeout_s)
        store, self.rank, self.size = next(iter(dist.rendezvous("env://")))
        self._store = store.clone()  # its own connection: notes are read while other calls block
        if self.uses_nccl:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.uses_nccl else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
        )
        self._posted: deque = deque()  # buffered sends still under way: (work, tensors kept alive, dst)
        self._lock = threading.Lock()
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
    ) -> None:
        nccl = self.uses_nccl and direct
        on_gpu = any(x.is_cuda for x in [*(x for _, _, x in out), *(x for _, x, _ in into if x is not None)])
        in_pieces = consume is not None and not on_gpu

        def expect(src: int, buffer: Tensor) -> tuple[dist.Work, Tensor] | None:
            if in_pieces or not buffer.numel() or (nccl and buffer.is_cuda):
                return None
            wire = torch.empty_like(buffer, device="cpu") if buffer.is_cuda else buffer
            return self._expect(src, _bytes_of(wire), _tag(channel, buffer)), wire

        # A payload that finds its buffer waiting needs no round trip, so buffers of known shape are posted first.
        headers = [torch.empty(HEADER_BYTES, dtype=torch.uint8) for _ in into]
        header_works = [self._expect(src, h, channel) for (src, _, _), h in zip(into, headers, strict=True) if not bare]
        early = [None if x is None else expect(src, x) for src, x, _ in into]
        pieces = self._take_pieces(channel, [src for src, _, _ in into], into[0][1]) if in_pieces else iter([])
        next(pieces, None)
        sends = []
        for dst, header, payload in out:
            if not bare:
                packed = header.pack()
                sends.append((self._post(dst, packed, channel), packed, dst))
            if payload.numel() and not (nccl and payload.is_cuda):
                wire = _bytes_of(payload.cpu() if payload.is_cuda else payload.clone() if buffered else payload)
                for piece in wire.split(PIECE_BYTES) if in_pieces else [wire]:
                    sends.append((self._post(dst, piece, _tag(channel, payload)), piece, dst))
        arriving = []
        for i, (src, x, accept) in enumerate(into):
            if not bare:
                self._wait(header_works[i], f"waiting for rank {src}")
            buffer = accept(None if bare else Header.unpack(headers[i]))
            if consume and on_gpu:
                buffer = torch.empty_like(buffer)
            arriving.append((src, buffer, early[i] if x is not None else expect(src, buffer)))
        for begin, end, parts in pieces:
            consume(begin, end, parts)
        for src, buffer, payload in arriving:
            if payload is not None:
                work, wire = payload
                self._wait(work, f"waiting for rank {src}")
                if wire is not buffer:
                    buffer.copy_(wire)
        if nccl:
            self._swap_on_gpus([(d, x) for d, _, x in out], [(src, x) for src, x, _ in arriving])
        if consume and on_gpu:
            consume(0, arriving[0][1].numel(), [x for _, x, _ in arriving])
        if buffered:
            with self._lock:
                self._posted.extend(sends)
                late = [self._posted.popleft() for _ in range(len(self._posted) - 64)]
        else:
            late = sends
        for work, _, dst in late:
            self._wait(work, f"sending to rank {dst}")

    def _take_pieces(self, channel: int, sources: list[int], like: Tensor) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Expect payloads shaped as `like`; after the first `next`, yields their pieces as they come."""
        key = channel, len(sources)
        if key not in self._pieces:
            self._pieces[key] = torch.empty(PIECES_AHEAD, len(sources), PIECE_BYTES, dtype=torch.uint8)
        values = PIECE_BYTES // like.element_size()
        spans = [(b, min(b + values, like.numel())) for b in range(0, like.numel(), values)]

        def room(k: int) -> Tensor:
            begin, end = spans[k]
            return self._pieces[key][k % PIECES_AHEAD, :, : (end - begin) * like.element_size()]

        def expect(k: int) -> list[dist.Work]:
            tag = _tag(channel, like)
            return [self._expect(src, x, tag) for src, x in zip(sources, room(k), strict=True)]

        coming = deque(expect(k) for k in range(min(PIECES_AHEAD, len(spans))))
        yield 0, 0, []
        for k, (begin, end) in enumerate(spans):
            for src, work in zip(sources, coming.popleft(), strict=True):
                self._wait(work, f"waiting for rank {src}")
            yield begin, end, [x.view(like.dtype) for x in room(k)]
            if k + PIECES_AHEAD < len(spans):
                coming.append(expect(k + PIECES_AHEAD))

    def _swap_on_gpus(self, out: list[tuple[int, Tensor]], into: list[tuple[int, Tensor]]) -> None:
        # One group, because NCCL's sends and receives between a pair block each other otherwise.
        calls = [dist.P2POp(dist.isend, x, dst) for dst, x in out if x.is_cuda and x.numel()]
        calls += [dist.P2POp(dist.irecv, x, src) for src, x in into if x.is_cuda and x.numel()]
        for work in dist.batch_isend_irecv(calls) if calls else []:
            self._wait(work, "swapping between GPUs")

    def all_reduce(self, x: Tensor, group: dist.ProcessGroup) -> None:
        """The backend's own sum, in its own order."""
        staged = x if self.uses_nccl or not x.is_cuda else x.cpu()
        self._wait(dist.all_reduce(staged, group=group, async_op=True), "native reduction")
        if staged is not x:
            x.copy_(staged)

    def group(self, ranks: list[int]) -> dist.ProcessGroup:
        """A process group; every rank must ask for the same ones in the same order."""
        return dist.new_group(ranks)

    def note(self, key: str, value: str) -> None:
        self._store.set(f"lowcomm/{key}", value)

    def read(self, key: str) -> str | None:
        try:
            if self._store.check([f"lowcomm/{key}"]):
                return self._store.get(f"lowcomm/{key}").decode()
        except RuntimeError:  # the store's own process is gone
            pass
        return None

    def abort(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store's own process is gone
            self.note("abort", reason)

    def close(self) -> None:
        for work, _, dst in self._posted:
            self._wait(work, f"sending to rank {dst}")
        dist.destroy_process_group()

"""The interface by which ranks swap tensors; `threads` and `processes` carry it out.

Both offer one primitive, `swap`: post some messages, then take some. A message is a header (what the sender
believes it is doing, and when it began) and a payload, so ranks that disagree find out by name
before any byte lands in the wrong place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

HEADER_BYTES = 512


class CommError(RuntimeError):
    """Ranks disagree, or one is gone. The message names the ranks, the verb and the purpose."""


@dataclass(frozen=True)
class Header:
    """The header that travels before a payload."""

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


#: What a transport has begun to take, for the swap that takes it.
Expected = Any


class Transport(Protocol):
    """The transport that World needs.

    in_one_process: whether its ranks are threads that share a process, and with it autograd and module hooks.
    """

    rank: int
    size: int
    in_one_process: bool

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
        """Post `out`, fill `into`; `expected` is what `expect` gave for it.

        Buffered: return before the receivers took `out`. Bare (all ranks or none): payloads of known shape,
        without headers.
        Direct (all ranks or none): every rank takes part, and no other swap is under way that is direct too, so that a
        backend that carries out all in one order may take GPU tensors as they are.
        Consume (all ranks or none): payloads, all of one size, are handed over piece by piece and not kept;
        the buffers of `into` only say their shape.
        """

    def expect(
        self, channel: int, into: list[tuple[int, Tensor | None]], *, bare: bool = False, direct: bool = False
    ) -> Expected:
        """Begin to take what a later swap takes, from (rank, buffer): what finds its place comes without a round trip.

        Swaps of a channel are to expect in the order in which they take.
        """

    def note(self, key: str, value: str) -> None:
        """Leave a short note that every rank can read, also while others compute."""

    def read(self, key: str) -> str | None:
        """A note; None where there is none, or where what keeps notes does not answer in a few seconds."""

    def abort(self, reason: str) -> None:
        """Tell all ranks why this one gives up."""

    def close(self) -> None: ...

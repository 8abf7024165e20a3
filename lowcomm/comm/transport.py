"""The interface by which ranks swap tensors, which `threads` and `processes` implement.

Both offer one primitive, `swap`: send some messages, then receive some. A message is a header (what the sender
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
    """Raised where ranks disagree or one is gone. The message names the ranks, the verb and the purpose."""


@dataclass(frozen=True)
class Header:
    """The header of a message, which travels before its payload."""

    op: str  # verb, purpose and sequence number, with the shape and dtype that all must agree on
    shape: tuple[int, ...]  # of this payload
    dtype: str
    device: str  # "cpu" or "cuda": where the sender had the payload, and where a receiver without a buffer puts it
    begin: float  # when the payload's first bit left, in seconds on the sender's clock

    def pack(self) -> Tensor:
        """Return the header as JSON, uint8 [HEADER_BYTES], padded with spaces. Raises ValueError where it is longer."""
        raw = json.dumps([self.op, self.shape, self.dtype, self.device, self.begin]).encode()
        if len(raw) > HEADER_BYTES:
            raise ValueError(f"header of {len(raw)} bytes is longer than {HEADER_BYTES}: {raw!r}")
        return torch.frombuffer(bytearray(raw.ljust(HEADER_BYTES)), dtype=torch.uint8)

    @staticmethod
    def unpack(packed: Tensor) -> Header:
        """Return the header that `pack` has packed."""
        op, shape, *rest = json.loads(packed.numpy().tobytes().rstrip())
        return Header(op, tuple(shape), *rest)


Outgoing = tuple[int, Header, Tensor]  # destination rank, header, contiguous payload
#: Source rank; the buffer, None where the shape is not known beforehand; and a function that checks the header (None
#: for a bare message) and returns the buffer to write to, or raises CommError.
Incoming = tuple[int, Tensor | None, Callable[[Header | None], Tensor]]
#: Takes begin, end, and the values [begin, end) of each incoming payload, in the order of `into`; may overwrite them.
Consume = Callable[[int, int, list[Tensor]], None]


#: What `expect` returns for the swap that it has begun to receive for; each transport has a type of its own.
Expected = Any


class Transport(Protocol):
    """The transport that World needs, as one rank sees it: `rank` is this one, from 0, of `size`.

    in_one_process: whether its ranks are threads that share a process, and with it autograd and module hooks.
    `close` waits for buffered sends and ends the connections; it raises CommError where such a send has failed.
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
        """Send the messages of `out` on a channel and receive those of `into`. Raises CommError where a peer fails.

        buffered: return before the receivers have taken `out`, whose tensors may change then. bare (all ranks or none):
        payloads are of known shape and travel without headers. direct (all ranks or none): every rank takes part, and
        no other direct swap is under way, so that a backend that carries out all in one order may take GPU tensors as
        they are. consume (all ranks or none): called with the payloads, all of one size, piece by piece; they are not
        kept, and the buffers of `into` only state their shape. expected: what `expect` has returned for this swap.
        """

    def expect(
        self, channel: int, into: list[tuple[int, Tensor | None]], *, bare: bool = False, direct: bool = False
    ) -> Expected:
        """Begin to receive for a later swap, and return what that swap takes as `expected`.

        into: source rank and buffer of each message, None for one of unknown shape. A message whose buffer is there
        when it comes needs no round trip. On each channel, calls come in the order of the swaps that they are for.
        bare, direct: as of that swap.
        """

    def note(self, key: str, value: str) -> None:
        """Write a short note, which every rank can `read`, also while others compute."""

    def read(self, key: str) -> str | None:
        """Return a note; None where there is none, or where the store of notes does not answer in a few seconds."""

    def abort(self, reason: str) -> None:
        """Tell all ranks why this one gives up; the CommError of those who wait for it then states the reason."""

    def close(self) -> None: ...

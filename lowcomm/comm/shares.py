"""Which rank reduces which share of a mean, and how many bytes that sends: the closed forms of what the verbs do."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol


def shares(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Return the bounds [begin, end) of each rank's share of `numel` values.

    Shares are contiguous and in rank order, and their sizes differ by at most one.
    """
    bounds = [numel * r // ranks for r in range(ranks + 1)]
    return list(pairwise(bounds))


def mean_bytes(numel: int, itemsize: int, ranks: int, rank: int = 0) -> int:
    """Return the bytes that `rank` sends in one mean of `numel` values of `itemsize` bytes.

    It sends every other rank its share, then its own reduced share to all: numel + (ranks - 2) * share values. That is
    2 (G-1)/G of the payload where the number of ranks G divides it: the bytes of a ring.
    """
    if ranks == 1:
        return 0
    begin, end = shares(numel, ranks)[rank]
    return (numel + (ranks - 2) * (end - begin)) * itemsize


class Encoding(Protocol):
    """The part of a codec that states its sizes; `block` and `nbytes` are as in `codecs.Codec`."""

    block: int

    def nbytes(self, numel: int) -> int: ...


def block_shares(numel: int, block: int, ranks: int) -> list[tuple[int, int]]:
    """Return the bounds [begin, end) of each rank's share of `numel` values, cut at multiples of `block`."""
    return [(begin * block, min(end * block, numel)) for begin, end in shares(-(-numel // block), ranks)]


#: A run of the values that are averaged: how many there are, and which members own them, over whom their mean is.
Section = tuple[int, Sequence[int]]


def encoded_mean_in_shares(numel: int, codec: Encoding, ranks: int, owners: int | None = None) -> bool:
    """Tell whether a mean sends fewer bytes if each owner sums a share of the values and then shares the sum in fp32.

    With G ranks, O of them owners (default: all), and b bytes per value: gathered, each rank gets each owner's values,
    O (G - 1) b n bytes in all. In shares, each owner sends the other owners their shares, encoded, and then its own sum
    to every rank as fp32: ((O - 1) b + 4 (G - 1)) n. With O = G shares win from G = 9 at 4 bits; with O = 1, never.
    """
    owners = ranks if owners is None else owners
    if codec.block == 0 or owners == 0:
        return False
    encoded = sum(_encoded_shares(numel, codec, owners)[1])
    return (owners - 1) * encoded + 4 * (ranks - 1) * numel < owners * (ranks - 1) * codec.nbytes(numel)


@functools.lru_cache(maxsize=1024)  # each of many members asks
def _encoded_shares(numel: int, codec: Encoding, owners: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of values in each owner's share, and the number of bytes that each takes when encoded."""
    sizes = tuple(end - begin for begin, end in block_shares(numel, codec.block, owners))
    return sizes, tuple(codec.nbytes(size) for size in sizes)


def encoded_mean_bytes(numel: int, codec: Encoding, ranks: int, rank: int = 0) -> int:
    """Return the bytes that `rank` sends in one mean of `numel` encoded values, which all ranks own."""
    return owned_mean_bytes([(numel, range(ranks))], codec, ranks, rank)


def owned_mean_bytes(sections: Sequence[Section], codec: Encoding, ranks: int, rank: int = 0) -> int:
    """Return the bytes that `rank` sends in one mean of encoded values, each section's over its owners.

    Of n fp32 values in N sections of G/N owners each, (1 + 1/N - 2/G) 4 n; with zeros for what a rank does not own, in
    an ordinary mean, (2 - 2/G) 4 n.
    """
    if ranks == 1:
        return 0
    sent = 0
    for numel, owners in sections:
        if rank not in owners:
            continue
        if encoded_mean_in_shares(numel, codec, ranks, len(owners)):
            sizes, nbytes = _encoded_shares(numel, codec, len(owners))
            mine = list(owners).index(rank)
            sent += sum(nbytes) - nbytes[mine] + (ranks - 1) * 4 * sizes[mine]
        else:
            sent += (ranks - 1) * codec.nbytes(numel)
    return sent


def ring_seconds(payload_bytes: float, ranks: int, bits_per_second: Any, latency_s: float = 0.0) -> Any:
    """Return the seconds that a mean of S bytes over G ranks takes on a link of B bits per second.

    That is 2 (G-1)/G * 8 S / B, and two latencies, one per phase; 0 for one rank. B may be an array.
    """
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * 8 * payload_bytes / bits_per_second + 2 * latency_s

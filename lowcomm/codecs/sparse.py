"""Codecs that leave values out: the largest magnitudes, of all or of each chunk, or random ones.

The largest of each chunk are SparseLoCo's (Sarfi et al., 2025, arXiv:2508.15706): a place in a chunk of 4,096 values
takes 12 bits, and two more bits are enough for a value (`levels`) where error feedback makes up for what is lost. With
64 of each 4,096 that is 112 bytes for 16,384, 146 times fewer than fp32. The paper cuts matrices into tiles of 64 x 64;
here each parameter is cut as it lies (`by_parameter`), which is the same where `method.basis` puts such tiles one after
the other and a matrix' sides are multiples of 64. Of a vector as many values are sent as of a tile, in the public code
of each 64 of them. Of smaller tiles it keeps as many values as of a whole one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowcomm.codecs.bits import pack_bits, refuse_non_finite, unpack_bits, view_as
from lowcomm.codecs.cast import Cast
from lowcomm.codecs.codec import Codec
from lowcomm.codecs.levels import Levels

#: Values of a chunk.
CHUNK = 4096


def _kept(numel: int, keep: float) -> int:
    return min(numel, max(1, round(keep * numel)))


class TopK(Codec):
    """A codec that sends the share `keep` of the values that is largest in magnitude, as fp32, and their places.

    The places take a bit for every value or 4 bytes for each one kept, whichever is less.
    """

    names = ("topk",)
    sparse = True
    block = 0

    def __init__(self, keep: float):
        self.name, self.keep = f"topk {keep:g}", keep

    @classmethod
    def of(cls, name: str, keep: float) -> TopK:
        """Return the codec that sends the share `keep` of the values."""
        return cls(keep)

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        refuse_non_finite(x, x.abs())
        order = torch.sort(x.abs(), descending=True, stable=True).indices
        kept = order[: _kept(x.numel(), self.keep)].sort().values
        if self._as_bits(x.numel()):
            mask = torch.zeros(-(-x.numel() // 8) * 8, dtype=torch.uint8, device=x.device)
            mask[kept] = 1
            places = pack_bits(mask[:, None])
        else:
            places = kept.to(torch.int32).view(torch.uint8)
        return torch.cat([places, x[kept].view(torch.uint8)])

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        size = self.nbytes(numel) - 4 * _kept(numel, self.keep)
        if self._as_bits(numel):
            kept = unpack_bits(packed[:size], 1).view(-1)[:numel].nonzero()[:, 0]
        else:
            kept = view_as(packed[:size], torch.int32).long()
        x = torch.zeros(numel, device=packed.device)
        x[kept] = view_as(packed[size:], torch.float32)
        return x

    def _as_bits(self, numel: int) -> bool:
        return -(-numel // 8) < 4 * _kept(numel, self.keep)

    def nbytes(self, numel: int) -> int:
        count = _kept(numel, self.keep)
        return min(-(-numel // 8), 4 * count) + 4 * count


class ChunkTopK(Codec):
    """A codec that sends the values of largest magnitude of each chunk of `CHUNK`, with their places in 12 bits each.

    Of each chunk it sends equally many: as fp32 ("chunk_topk"), or as one of four levels of all values that are sent
    of a parameter, in 2 bits ("chunk_topk_2bit", `levels`). The last chunk may be shorter; it sends as many values, or
    all that it has.
    """

    names = ("chunk_topk", "chunk_topk_2bit")
    sparse = by_parameter = True
    block = 0

    def __init__(self, keep: float, *, two_bits: bool = False):
        self.name = f"{self.names[two_bits]} {keep:g}"
        self.values: Codec = Levels() if two_bits else Cast("fp32")
        self.each = max(1, round(keep * CHUNK))

    @classmethod
    def of(cls, name: str, keep: float) -> ChunkTopK:
        """Return the codec that sends the share `keep` of each chunk, as fp32 or, by its name, in 2 bits per value."""
        return cls(keep, two_bits=name == "chunk_topk_2bit")

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        refuse_non_finite(x, x.abs())
        full, rest = divmod(x.numel(), CHUNK)
        parts = x[: full * CHUNK].view(full, CHUNK), x[full * CHUNK :].view(1, rest)
        places = [_largest(part, self.each) for part in parts]
        kept = torch.cat([part.gather(1, at).view(-1) for part, at in zip(parts, places, strict=True)])
        at = torch.cat([at.view(-1) for at in places])
        return torch.cat([_pack_12_bits(at.to(torch.int32)), self.values.encode(kept)])

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        x, count = torch.zeros(numel, device=packed.device), self._count(numel)
        size = _nbytes_12_bits(count)
        chunk = torch.arange(count, device=packed.device) // self.each
        x[_unpack_12_bits(packed[:size], count) + CHUNK * chunk] = self.values.decode(packed[size:], count)
        return x

    def nbytes(self, numel: int) -> int:
        count = self._count(numel)
        return _nbytes_12_bits(count) + self.values.nbytes(count)

    def _count(self, numel: int) -> int:
        """Return how many of `numel` values are sent."""
        full, rest = divmod(numel, CHUNK)
        return full * self.each + min(self.each, rest)


def _largest(x: Tensor, count: int) -> Tensor:
    """Return the indices [k, count] of the largest magnitudes in each row of x [k, size], in ascending order.

    Where `size` is less than `count` they are [k, size].
    """
    return torch.sort(x.abs(), dim=1, descending=True, stable=True).indices[:, :count].sort(1).values


def _nbytes_12_bits(count: int) -> int:
    return 3 * -(-count // 2)


def _pack_12_bits(values: Tensor) -> Tensor:
    """Return whole numbers below 4,096, int32 [n], as bytes, uint8: two in three, the first in the lower 12 bits."""
    filled = torch.nn.functional.pad(values, (0, values.numel() % 2))
    pairs = filled.view(filled.numel() // 2, 2)
    both = pairs[:, 0] | pairs[:, 1] << 12
    return torch.stack([both & 255, both >> 8 & 255, both >> 16], 1).to(torch.uint8).view(-1)


def _unpack_12_bits(packed: Tensor, count: int) -> Tensor:
    """Return the numbers, int64 [count], that `_pack_12_bits` packed."""
    low, middle, high = packed.view(packed.numel() // 3, 3).long().unbind(1)
    both = low | middle << 8 | high << 16
    return torch.stack([both & 4095, both >> 12], 1).view(-1)[:count]


class RandomKeep(Codec):
    """A codec that sends values at random places as fp32, times `scale`, and of the places only their seed, in 8 bytes.

    "dropout" (FedDropout) sends the values as they are, "dare" (DARE) times 1 / keep, so that the sum is unbiased.
    """

    names = ("dropout", "dare")
    sparse = True
    block = 0

    def __init__(self, keep: float, scale: float = 1.0):
        self.name, self.keep, self.scale = f"random {keep:g} times {scale:g}", keep, scale
        self.amplifies = scale > 1

    @classmethod
    def of(cls, name: str, keep: float) -> RandomKeep:
        """Return the codec that sends the share `keep` of the values, times 1 / keep if `name` is "dare"."""
        return cls(keep, 1 / keep if name == "dare" else 1.0)

    def _places(self, numel: int, seed: int, device: torch.device) -> Tensor:
        order = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))
        return order[: _kept(numel, self.keep)].sort().values.to(device)

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        refuse_non_finite(x, x.abs() * self.scale)
        kept = x[self._places(x.numel(), seed, x.device)] * self.scale
        return torch.cat([torch.tensor([seed], device=x.device).view(torch.uint8), kept.view(torch.uint8)])

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        x = torch.zeros(numel, device=packed.device)
        seed = int(view_as(packed[:8], torch.int64))
        x[self._places(numel, seed, packed.device)] = view_as(packed[8:], torch.float32)
        return x

    def nbytes(self, numel: int) -> int:
        return 8 + 4 * _kept(numel, self.keep)

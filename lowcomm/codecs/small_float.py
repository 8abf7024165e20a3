"""Small floats of up to 8 bits, eXmY: a sign, X exponent bits and Y mantissa bits (exmy, arXiv:2405.13938).

A block of `BLOCK` values shares a scale, and codes are packed to the bit: E3M0, Streaming DiLoCo's, takes 4 bits per
value and 8 bits per block. On a GPU codes of 4 and 8 bits are fused kernels (`_kernels`) where Triton is installed, and
else the same operations as on the CPU.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from lowcomm.codecs.bits import BLOCK, NotFinite, Scratch, blocks, blocks_nbytes, pack, refuse_non_finite, unpack
from lowcomm.codecs.codec import Codec


class SmallFloat(Codec):
    """A codec to floats of a sign, `exponent` bits and `mantissa` bits, rounded to nearest, ties away from zero.

    A block's largest magnitude, rounded to the mantissa, has the largest exponent, which travels as one byte
    (biased by 127, and so large that every code is zero or a normal float). Relative to it the codes are

        code = 0 .. 2^Y - 1      code 2^(e_min - Y)                          subnormal, zero among them
        code = 2^Y ..            (1 + fraction) 2^(e_min + exponent code - 1)

    with e_min = 2 - 2^X, and the sign in the highest bit. So E3M0 holds 0 and 2^-6, ..., 2^-1, 1 of either sign.
    """

    names = tuple(f"e{e}m{m}" for e in range(2, 6) for m in range(8 - e))
    block = BLOCK

    @classmethod
    def of(cls, name: str, keep: float) -> SmallFloat:
        """Return the codec to the small float "eXmY"; `PowerOfTwo` where Y is 0."""
        exponent, mantissa = int(name[1]), int(name[3])
        return SmallFloat(exponent, mantissa) if mantissa else PowerOfTwo(exponent)

    def __init__(self, exponent: int, mantissa: int):
        if not 2 <= exponent <= 5 or not 0 <= mantissa <= 7 - exponent:
            raise ValueError(f"e{exponent}m{mantissa} needs 2 to 5 exponent bits and at most 8 bits in all")
        self.name = f"e{exponent}m{mantissa}"
        self.exponent, self.mantissa, self.bits = exponent, mantissa, 1 + exponent + mantissa
        self.e_min = 2 - 2**exponent
        self.least_scale = 2 - self.e_min + mantissa
        codes = torch.arange(2 ** (exponent + mantissa))
        fraction, power = codes % 2**mantissa, codes >> mantissa
        magnitudes = torch.where(
            power == 0,
            fraction * 2.0 ** (self.e_min - mantissa),
            (1 + fraction / 2**mantissa) * 2.0 ** (self.e_min + power - 1),
        )
        #: Value of every code, relative to the block's scale.
        self.values = torch.cat([magnitudes, -magnitudes])

    def _fused(self, device: torch.device) -> ModuleType | None:
        return _fused_kernels() if device.type == "cuda" and self.bits in (4, 8) else None

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        if fused := self._fused(x.device):
            packed = fused.encode(x, self.exponent, self.mantissa)
        else:
            packed = torch.empty(self.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
            scratch = Scratch(x.device)
            for values, scales, codes in blocks(x, packed, self.bits):
                self._encode(values, scales, codes, scratch)
        scales = packed[: -(-x.numel() // BLOCK)]
        if scales.numel() and scales.max() > 253:  # no scale to divide by: too large, infinite or NaN
            refuse_non_finite(x, x.abs())
            raise NotFinite(f"values up to {x.abs().max().item():g} are too large to scale")
        return packed

    def _encode(self, x: Tensor, scales: Tensor, packed: Tensor, scratch: Scratch) -> None:
        """Encode x [blocks, size] into `scales` [blocks] and `packed` [blocks, size * bits / 8], written in place."""
        m = self.mantissa
        half = 1 << (22 - m)  # of the last mantissa bit kept
        y = x.abs()
        top = ((y.amax(1).view(torch.int32) >> (22 - m)) + 1) >> (m + 1)  # biased exponent of the largest, rounded
        scales.copy_(top.clamp_(self.least_scale, 255))
        y.mul_(((254 - top) << 23).view(torch.float32)[:, None])  # times 2^-exponent: below 2
        y.view(torch.int32).bitwise_and_(-4096)  # bits that decide nothing, and would be rounded in the sum below
        # A float's bits count its values, so rounding is adding half and dropping bits. Below 2^e_min codes are
        # evenly spaced: as the bits of y + 2^e_min are. Of the two counts the larger is right in either range.
        offset = half - ((126 + self.e_min) << 23)
        code = y.view(torch.int32) + offset
        spaced = y.add_(2.0**self.e_min).view(torch.int32).add_(offset - (1 << 23))
        code = torch.maximum(code, spaced, out=code).bitwise_right_shift_(23 - m).to(torch.uint8)
        sign = torch.bitwise_right_shift(x.view(torch.int32), 32 - self.bits, out=spaced).to(torch.uint8)
        pack(code.bitwise_or_(sign.bitwise_and_(1 << (self.bits - 1))), packed, self.bits)

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        if fused := self._fused(packed.device):
            return fused.decode(packed, numel, self.exponent, self.mantissa)
        x = torch.empty(numel, device=packed.device)
        table, scratch = self._table(packed.device), Scratch(packed.device)
        for values, scales, codes in blocks(x, packed, self.bits):
            size = values.shape[1]
            code = codes if self.bits in (4, 8) else unpack(codes, size, self.bits)
            at = scratch.like(code, torch.int32).copy_(code).view(-1)
            odd = self.bits == 4 and size % 2 == 1
            found = values.new_empty(1, size + 1) if odd else values
            torch.index_select(table, 0, at, out=found.view(table.dtype).view(-1))
            torch.mul(found[:, :size], (scales.int() << 23).view(torch.float32)[:, None], out=values)
        return x

    def _table(self, device: torch.device) -> Tensor:
        """Return the value of every code as fp32; of 4 bits, those of every byte of two codes, both as one int64."""
        if self.bits != 4:
            return self.values.to(device)
        pairs = torch.stack([self.values.repeat(16), self.values.repeat_interleave(16)], 1)
        return pairs.view(torch.int64)[:, 0].contiguous().to(device)

    def nbytes(self, numel: int) -> int:
        return blocks_nbytes(numel, self.bits)


class PowerOfTwo(SmallFloat):
    """A codec to small floats without a mantissa, above all E3M0: the same codes in less time.

    It encodes in integers of 16 and 8 bits.
    """

    def __init__(self, exponent: int):
        super().__init__(exponent, 0)

    def _encode(self, x: Tensor, scales: Tensor, packed: Tensor, scratch: Scratch) -> None:
        whole = scratch.like(x, torch.int32, 0)
        high, q = scratch.like(x, torch.int16, 0), scratch.like(x, torch.int16, 1)
        code, steps = scratch.like(x, torch.uint8, 0), scratch.like(x, torch.uint8, 1)
        # q: twice the exponent, plus whether the mantissa is at least half. Rounded exponent: (q + 1) / 2.
        high.copy_(torch.bitwise_right_shift(x.view(torch.int32), 22, out=whole))
        torch.bitwise_and(high, 0x1FF, out=q)
        top = q.amax(1).add_(1).bitwise_right_shift_(1).clamp_(self.least_scale, 255)
        scales.copy_(top)
        # Half steps above the least code's lower bound, 2^(e_min - 1): 0 rounds to code 0, 1 to 3 to code 1, then
        # 4 and 5 to code 2 and so on.
        q.sub_(top.add_(self.e_min).mul_(2).sub_(3)[:, None]).clamp_(min=0)
        steps.copy_(q)
        torch.bitwise_right_shift(steps, 1, out=code)
        torch.maximum(code, steps.clamp_(max=1), out=code)
        sign = steps.copy_(high.bitwise_right_shift_(10 - self.bits)).bitwise_and_(1 << (self.bits - 1))
        pack(code.bitwise_or_(sign), packed, self.bits)


@functools.cache
def _fused_kernels() -> ModuleType | None:
    """Return the module of fused kernels, or None without Triton, which comes with torch's builds for GPUs."""
    try:
        from lowcomm.codecs import _kernels
    except ImportError:
        return None
    return _kernels

"""Encodings of what travels. A codec turns fp32 values into packed bytes and back.

    fp32, fp16, bf16   the dtype itself
    eXmY               a small float of 1 + X + Y bits: X exponent bits, Y mantissa bits (exmy, arXiv:2405.13938)
    int8               multiples of a step, -127 to 127
    sign               one bit: a block's mean magnitude, or minus it
    topk               the largest magnitudes (a share `keep` of the values)
    dropout            random values (FedDropout); the others become zero
    dare               random values, scaled by 1 / keep (DARE), so that the sum is unbiased

Small floats, int8 and signs share a scale among each block of `BLOCK` values and are packed to the bit: E3M0 takes 4
bits a value and 8 bits a block. Every code is finite; NaN and infinities are refused by name. On a GPU, small floats of
4 and 8 bits are fused kernels (`kernels`) where Triton is installed, and else the same operations as on the CPU.

To add a codec, write a class with `encode`, `decode` and `nbytes`, enter it in `make_codec`, and list its name in
`config.CODECS`; `method.codec` in params.yaml then accepts it.
"""

from __future__ import annotations

import functools
import re
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowcomm.bits import BLOCK, Scratch, aligned, blocks, blocks_nbytes, pack, refuse_non_finite, unpack, view_as
from lowcomm.config import CODECS
from lowcomm.settings import nearest
from lowcomm.sparse import RandomKeep, TopK


class Codec(Protocol):
    """fp32 [n] -> uint8 [nbytes(n)] and back.

    name: what members of a mean agree on.
    lossless: decode(encode(x)) equals x bit for bit.
    block: shares that begin at multiples of it may be encoded one by one, with the same values; 0 where they may not.
    """

    name: str
    lossless: bool
    block: int

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        """Packed bytes; `seed` decides random choices. Raises ValueError for NaN and infinities."""
        ...

    def decode(self, packed: Tensor, numel: int) -> Tensor: ...

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` encoded values."""
        ...


def message_seed(*key: int) -> int:
    """The seed, of 62 bits, of a message's random choices: `key` (whole numbers from 0) says which message it is."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 2)


class Cast:
    """Values cast to a floating dtype, rounded to nearest even. Infinities that the cast makes are refused."""

    block = 1

    def __init__(self, dtype: torch.dtype):
        self.name = str(dtype).removeprefix("torch.")
        self.dtype = dtype
        self.lossless = dtype == torch.float32

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        cast = x.to(self.dtype)
        if not cast.isfinite().all():
            refuse_non_finite(x, x.abs())
            raise ValueError(
                f"values up to {x.abs().max().item():g} do not fit {self.dtype}"
                f" (largest {torch.finfo(self.dtype).max:g})"
            )
        return cast.view(torch.uint8)

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        return view_as(packed, self.dtype).to(torch.float32)

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize


class SmallFloat:
    """Sign, `exponent` bits and `mantissa` bits, rounded to nearest, ties away from zero.

    A block's largest magnitude, rounded to the mantissa, has the largest exponent, which travels as one byte
    (biased by 127, and so large that every code is zero or a normal float). Relative to it the codes are

        code = 0 .. 2^Y - 1      code 2^(e_min - Y)                          subnormal, zero among them
        code = 2^Y ..            (1 + fraction) 2^(e_min + exponent code - 1)

    with e_min = 2 - 2^X, and the sign in the highest bit. So E3M0 holds 0 and 2^-6, ..., 2^-1, 1 of either sign.
    """

    lossless = False
    block = BLOCK

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
        return _kernels() if device.type == "cuda" and self.bits in (4, 8) else None

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
            raise ValueError(f"values up to {x.abs().max().item():g} are too large to scale")
        return packed

    def _encode(self, x: Tensor, scales: Tensor, packed: Tensor, scratch: Scratch) -> None:
        """x [blocks, size] -> scales [blocks], packed [blocks, size * bits / 8]."""
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
        """Value of every code as fp32; of 4 bits, of every byte of two codes, both floats as one int64."""
        if self.bits != 4:
            return self.values.to(device)
        pairs = torch.stack([self.values.repeat(16), self.values.repeat_interleave(16)], 1)
        return pairs.view(torch.int64)[:, 0].contiguous().to(device)

    def nbytes(self, numel: int) -> int:
        return blocks_nbytes(numel, self.bits)


class PowerOfTwo(SmallFloat):
    """A small float without mantissa, E3M0 above all: the same codes in less time, in integers of 16 and 8 bits."""

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


class Int8:
    """Multiples -127 to 127 of a step; the step is the block's largest magnitude over 127, as fp32."""

    name = "int8"
    lossless = False
    block = BLOCK

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        packed = torch.empty(self.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
        scratch = Scratch(x.device)
        for values, step, codes in blocks(x, packed, 8, torch.float32):
            y = torch.abs(values, out=scratch.like(values, torch.float32))
            torch.div(y.amax(1), 127, out=step)
            torch.div(values, step.where(step > 0, 1.0)[:, None], out=y)
            codes.view(torch.int8).copy_(y.round_().clamp_(-127, 127))
        steps = packed[: 4 * -(-x.numel() // BLOCK)].view(torch.float32)
        refuse_non_finite(x, steps)
        return packed

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        x, packed = torch.empty(numel, device=packed.device), aligned(packed)
        for values, step, codes in blocks(x, packed, 8, torch.float32):
            values.copy_(codes.view(torch.int8)).mul_(step[:, None])
        return x

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // BLOCK) + numel


class Sign:
    """A bit a value: plus or minus the block's mean magnitude, which is fp32 and the least squares fit (1-bit SGD)."""

    name = "sign"
    lossless = False
    block = BLOCK

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        packed = torch.empty(self.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
        for values, scale, codes in blocks(x, packed, 1, torch.float32):
            torch.mean(values.abs(), 1, out=scale)
            pack((values < 0).to(torch.uint8), codes, 1)
        refuse_non_finite(x, packed[: 4 * -(-x.numel() // BLOCK)].view(torch.float32))
        return packed

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        x, packed = torch.empty(numel, device=packed.device), aligned(packed)
        for values, scale, codes in blocks(x, packed, 1, torch.float32):
            values.copy_(unpack(codes, values.shape[1], 1)).mul_(-2).add_(1).mul_(scale[:, None])
        return x

    def nbytes(self, numel: int) -> int:
        return 4 * -(-numel // BLOCK) + -(-numel // 8)


def make_codec(name: str, keep: float = 1.0) -> Codec:
    """The codec of a name in `config.CODECS`; `keep` is the share of values that sparse ones send."""
    if name not in CODECS:
        raise ValueError(f"no codec named {name!r}{nearest(name, CODECS)}")
    if found := re.fullmatch(r"e(\d)m(\d)", name):
        exponent, mantissa = int(found[1]), int(found[2])
        return SmallFloat(exponent, mantissa) if mantissa else PowerOfTwo(exponent)
    return {
        "fp32": lambda: Cast(torch.float32),
        "fp16": lambda: Cast(torch.float16),
        "bf16": lambda: Cast(torch.bfloat16),
        "int8": Int8,
        "sign": Sign,
        "topk": lambda: TopK(keep),
        "dropout": lambda: RandomKeep(keep, 1.0),
        "dare": lambda: RandomKeep(keep, 1 / keep),
    }[name]()


@functools.cache
def _kernels() -> ModuleType | None:
    """`lowcomm.kernels` where Triton is installed: it comes with torch's builds for GPUs."""
    try:
        from lowcomm import kernels
    except ImportError:
        return None
    return kernels

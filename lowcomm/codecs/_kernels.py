"""Fused Triton kernels of `codecs.SmallFloat` for codes of 4 and 8 bits: the same bytes and values in one launch.

The packed bytes are a scale, one byte, for every block of 256 values, and then all codes. A byte holds one 8-bit code,
or two 4-bit codes, the first in the low nibble.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(256)
_HALF = tl.constexpr(128)
#: Blocks a program handles, and its warps: a warp holds a block.
_ROWS = 8
#: Fusing multiplication and addition changes no value here; Triton 3.9 warns where it is left open.
_OPTIONS = {"num_warps": _ROWS, "enable_fp_fusion": False}


def encode(x: Tensor, exponent: int, mantissa: int) -> Tensor:
    """Return the scales and the codes of x, fp32 [n], contiguous, as uint8 [blocks + ceil(n * bits / 8)].

    The caller must refuse scales above 253, to which no finite codes belong. Raises ValueError where codes have neither
    4 nor 8 bits.
    """
    bits, blocks = _bits(exponent, mantissa), triton.cdiv(x.numel(), _BLOCK.value)
    packed = torch.empty(blocks + triton.cdiv(x.numel() * bits, 8), dtype=torch.uint8, device=x.device)
    if blocks:
        with torch.cuda.device_of(x):
            grid = (triton.cdiv(blocks, _ROWS),)
            _encode[grid](x, packed, packed[blocks:], x.numel(), exponent, mantissa, _ROWS, **_OPTIONS)
    return packed


def decode(packed: Tensor, numel: int, exponent: int, mantissa: int) -> Tensor:
    """Return the values, fp32 [numel], that `packed`, contiguous and as `encode` makes it, stands for.

    Raises ValueError where codes have neither 4 nor 8 bits.
    """
    _bits(exponent, mantissa)
    x, blocks = torch.empty(numel, device=packed.device), triton.cdiv(numel, _BLOCK.value)
    if blocks:
        with torch.cuda.device_of(packed):
            grid = (triton.cdiv(blocks, _ROWS),)
            _decode[grid](packed, packed[blocks:], x, numel, exponent, mantissa, _ROWS, **_OPTIONS)
    return x


def _bits(exponent: int, mantissa: int) -> int:
    bits = 1 + exponent + mantissa
    if bits not in (4, 8):
        raise ValueError(f"e{exponent}m{mantissa} has codes of {bits} bits; the kernels pack 4 and 8")
    return bits


@triton.jit(do_not_specialize=["numel"])
def _encode(x, scales, codes, numel, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    if (tl.program_id(0) + 1).to(tl.int64) * ROWS * _BLOCK <= numel:  # no masks where all blocks are full
        _encode_rows(x, scales, codes, row, _BLOCK, EXPONENT, MANTISSA)
    else:
        _encode_rows(x, scales, codes, row, _size(row, numel), EXPONENT, MANTISSA)


@triton.jit(do_not_specialize=["numel"])
def _decode(scales, codes, x, numel, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    if (tl.program_id(0) + 1).to(tl.int64) * ROWS * _BLOCK <= numel:
        _decode_rows(scales, codes, x, row, _BLOCK, EXPONENT, MANTISSA)
    else:
        _decode_rows(scales, codes, x, row, _size(row, numel), EXPONENT, MANTISSA)


@triton.jit
def _size(row, numel):
    """Return the number of values in each block, 0 past the end: int32, in the shape of `row`."""
    return tl.minimum(tl.maximum(numel - row * _BLOCK, 0), _BLOCK).to(tl.int32)


@triton.jit
def _encode_rows(x, scales, codes, row, size, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Write the scales and the codes of the blocks numbered `row` [rows, 1], which have `size` values each."""
    BITS: tl.constexpr = 1 + EXPONENT + MANTISSA
    LEAST_SCALE: tl.constexpr = (1 << EXPONENT) + MANTISSA
    ROWS: tl.constexpr = row.shape[0]
    column = tl.arange(0, _BLOCK)[None, :]
    bits = tl.load(x + row * _BLOCK + column, mask=column < size, other=0.0).to(tl.int32, bitcast=True)
    # Bits order magnitudes, and put NaN above infinity.
    largest = tl.max(bits & 0x7FFFFFFF, axis=1, keep_dims=True)
    top = ((largest >> (22 - MANTISSA)) + 1) >> (MANTISSA + 1)  # biased exponent, rounded
    top = tl.minimum(tl.maximum(top, LEAST_SCALE), 255)
    tl.store(scales + row, top.to(tl.uint8), mask=size > 0)
    code = _codes(bits, top, EXPONENT, MANTISSA)
    if BITS == 4:
        low, high = tl.split(tl.reshape(code, [ROWS, _HALF, 2]))
        column = tl.arange(0, _HALF)[None, :]
        tl.store(codes + row * _HALF + column, (low | (high << 4)).to(tl.uint8), mask=column < (size + 1) // 2)
    else:
        tl.store(codes + row * _BLOCK + column, code.to(tl.uint8), mask=column < size)


@triton.jit
def _codes(bits, top, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the codes, int32 [rows, 256], that `SmallFloat._encode` makes of floats.

    The floats are given by their bits [rows, 256], the scales by their biased exponents `top` [rows, 1].

    Floats are scaled in their exponent bits, which no flushing of subnormals can touch: read as normal floats below
    2^-126, the subnormals have code 0, as they should, since the least code's lower bound is 2^-126 or more.
    """
    BITS: tl.constexpr = 1 + EXPONENT + MANTISSA
    E_MIN: tl.constexpr = 2 - (1 << EXPONENT)
    OFFSET: tl.constexpr = (1 << (22 - MANTISSA)) - ((126 + E_MIN) << 23)
    y = bits & 0x7FFFF000  # the magnitude, without bits that would be rounded in the sum below
    y = tl.maximum(y - ((top - 127) << 23), 0)
    spaced = (y.to(tl.float32, bitcast=True) + 2.0**E_MIN).to(tl.int32, bitcast=True) - (1 << 23)
    code = (tl.maximum(y, spaced) + OFFSET) >> (23 - MANTISSA)
    return code | ((bits >> (32 - BITS)) & (1 << (BITS - 1)))


@triton.jit
def _decode_rows(scales, codes, x, row, size, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Write the values of the blocks numbered `row` [rows, 1], which have `size` values each, into x."""
    BITS: tl.constexpr = 1 + EXPONENT + MANTISSA
    ROWS: tl.constexpr = row.shape[0]
    column = tl.arange(0, _BLOCK)[None, :]
    scale = tl.load(scales + row, mask=size > 0, other=0).to(tl.int32) << 23
    if BITS == 4:
        half = tl.arange(0, _HALF)[None, :]
        pairs = tl.load(codes + row * _HALF + half, mask=half < (size + 1) // 2, other=0).to(tl.int32)
        code = tl.reshape(tl.join(pairs, pairs >> 4), [ROWS, _BLOCK])
    else:
        code = tl.load(codes + row * _BLOCK + column, mask=column < size, other=0).to(tl.int32)
    tl.store(x + row * _BLOCK + column, _values(code, scale, EXPONENT, MANTISSA), mask=column < size)


@triton.jit
def _values(code, scale, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the values, fp32 [rows, 256], that `SmallFloat.decode` makes of codes.

    The codes [rows, 256] are in the low bits of int32; `scale` [rows, 1] has the bits of the scales, int32.
    """
    BITS: tl.constexpr = 1 + EXPONENT + MANTISSA
    E_MIN: tl.constexpr = 2 - (1 << EXPONENT)
    v = ((code & ((1 << (BITS - 1)) - 1)) << (23 - MANTISSA)) + ((126 + E_MIN) << 23)
    v = v.to(tl.float32, bitcast=True)
    v = tl.minimum(v, v * 2 - 2.0**E_MIN).to(tl.int32, bitcast=True) | ((code << (32 - BITS)) & -0x80000000)
    return v.to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)

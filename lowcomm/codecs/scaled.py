"""Codes that are multiples of a block's fp32 scale: int8, and one bit, the sign."""

from __future__ import annotations

import torch
from torch import Tensor

from lowcomm.codecs.bits import BLOCK, Scratch, aligned, blocks, blocks_nbytes, pack, refuse_non_finite, unpack
from lowcomm.codecs.codec import Codec


class Int8(Codec):
    """A codec that sends values as multiples of a step, -127 to 127, in one byte each.

    The step is the block's largest magnitude over 127, as fp32.
    """

    names = ("int8",)
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
        refuse_non_finite(x, 127 * steps)  # the largest value that is decoded
        return packed

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        x, packed = torch.empty(numel, device=packed.device), aligned(packed)
        for values, step, codes in blocks(x, packed, 8, torch.float32):
            values.copy_(codes.view(torch.int8)).mul_(step[:, None])
        return x

    def nbytes(self, numel: int) -> int:
        return blocks_nbytes(numel, 8, torch.float32)


class Sign(Codec):
    """A codec that sends one bit per value: plus or minus a scale (1-bit SGD).

    The scale is the block's mean magnitude, as fp32, which is the least squares fit.
    """

    names = ("sign",)
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
        return blocks_nbytes(numel, 1, torch.float32)

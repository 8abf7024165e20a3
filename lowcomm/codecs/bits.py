"""Values as bytes: codes of a few bits packed, in blocks that share a scale."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Values that share a scale.
BLOCK = 256
#: Blocks encoded at a time, so that scratch stays in the processor's cache.
_AT_ONCE = 1024


class Scratch:
    """Tensors to compute in, made once for many runs of blocks: making them anew costs as much as computing."""

    def __init__(self, device: torch.device):
        self.device = device
        self._made: dict[tuple, Tensor] = {}

    def like(self, x: Tensor, dtype: torch.dtype, number: int = 0) -> Tensor:
        """The tensor of a `number`, in the shape of `x`; what it holds is left over from before."""
        key = x.shape, dtype, number
        if key not in self._made:
            self._made[key] = torch.empty(x.shape, dtype=dtype, device=self.device)
        return self._made[key]


def packed_nbytes(size: int, bits: int) -> int:
    """Bytes of `size` codes: two codes of 4 bits share a byte, eight of other widths share `bits` bytes."""
    return size if bits == 8 else -(-size // 2) if bits == 4 else -(-size // 8) * bits


def blocks_nbytes(numel: int, bits: int, scale: torch.dtype = torch.uint8) -> int:
    """Bytes of `numel` codes in blocks, each with a scale of this dtype: what `blocks` cuts."""
    full, rest = divmod(numel, BLOCK)
    last = scale.itemsize + packed_nbytes(rest, bits) if rest else 0
    return full * (scale.itemsize + packed_nbytes(BLOCK, bits)) + last


def blocks(
    x: Tensor, packed: Tensor, bits: int, scale: torch.dtype = torch.uint8
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Runs of blocks: (values [k, size], scales [k], codes [k, bytes]), views of `x` and `packed`.

    In `packed` all scales come first, then all codes; the last block may be shorter.
    """
    full, rest = divmod(x.numel(), BLOCK)
    head = (full + (rest > 0)) * scale.itemsize
    scales, codes = packed[:head].view(scale), packed[head:]
    each = packed_nbytes(BLOCK, bits)
    at_once = _AT_ONCE if x.device.type == "cpu" else max(1, full)
    for begin in range(0, full, at_once):
        end = min(full, begin + at_once)
        yield (
            x[begin * BLOCK : end * BLOCK].view(-1, BLOCK),
            scales[begin:end],
            codes[begin * each : end * each].view(-1, each),
        )
    if rest:
        yield x[full * BLOCK :].view(1, rest), scales[full:], codes[full * each :].view(1, -1)


def pack(codes: Tensor, out: Tensor, bits: int) -> None:
    """codes [k, size] uint8 -> out [k, bytes]. Of two 4-bit codes the first is the low nibble."""
    if bits == 8:
        out.copy_(codes)
    elif bits == 4:
        if codes.shape[1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        pairs = codes.view(torch.int16)
        out.copy_((pairs >> 4).bitwise_or_(pairs))
    else:
        width = out.shape[1] // bits * 8
        filled = torch.nn.functional.pad(codes, (0, width - codes.shape[1]))
        shifts = torch.arange(bits, dtype=torch.uint8, device=codes.device)
        out.copy_(pack_bits((filled[..., None] >> shifts & 1).reshape(-1, 1)).view(out.shape))


def unpack(packed: Tensor, size: int, bits: int) -> Tensor:
    """The inverse of `pack` for widths other than 4 and 8, whose bytes can be looked up: codes [k, size] uint8."""
    ones = unpack_bits(packed.reshape(-1), bits).view(packed.shape[0], -1, bits)
    weights = 1 << torch.arange(bits, dtype=torch.uint8, device=packed.device)
    return (ones * weights).sum(2, dtype=torch.uint8)[:, :size]


def pack_bits(ones: Tensor) -> Tensor:
    """0 and 1 [8 n, 1] -> [n] bytes, the lowest bit first."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=ones.device)
    return (ones.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """[n] bytes -> 0 and 1 [8 n / bits, bits], the lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 1).view(-1, bits)


class NotFinite(ValueError):
    """Values that cannot be sent, as a run has diverged."""


def refuse_non_finite(x: Tensor, largest: Tensor) -> None:
    """Raise NotFinite for NaN and infinities; `largest`: the greatest magnitude of `x` [n], or a vector of such.

    Also where `largest` is a sum of finite values that is not.
    """
    if not torch.isfinite(largest).all():
        bad = (~torch.isfinite(x)).nonzero()
        if not len(bad):
            raise NotFinite(f"values up to {x.abs().max().item():g} are too large to scale")
        at = int(bad[0, 0])
        raise NotFinite(f"value {at} of {x.numel()} is {x[at].item()}; only finite values can be sent")


def aligned(packed: Tensor) -> Tensor:
    """Bytes that can be viewed as any dtype: a copy where they lie at an odd place of a longer message."""
    return packed.clone() if packed.storage_offset() % 8 else packed


def view_as(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as values of a dtype."""
    return aligned(packed).view(dtype)

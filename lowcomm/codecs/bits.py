"""The packing of codes of a few bits into bytes, in blocks of values that share a scale."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Values that share a scale.
BLOCK = 256
#: Blocks encoded at a time, so that scratch stays in the processor's cache.
_AT_ONCE = 1024


class Scratch:
    """Temporary tensors on a device, made once for many runs of blocks: making them anew costs as much as computing."""

    def __init__(self, device: torch.device):
        self.device = device
        self._made: dict[tuple, Tensor] = {}

    def like(self, x: Tensor, dtype: torch.dtype, number: int = 0) -> Tensor:
        """Return the tensor of this `number` and dtype in the shape of `x`, with values left over from earlier use."""
        key = x.shape, dtype, number
        if key not in self._made:
            self._made[key] = torch.empty(x.shape, dtype=dtype, device=self.device)
        return self._made[key]


def packed_nbytes(size: int, bits: int) -> int:
    """Return the number of bytes that `size` packed codes take.

    Two codes of 4 bits share a byte; eight codes of any other width share `bits` bytes.
    """
    return size if bits == 8 else -(-size // 2) if bits == 4 else -(-size // 8) * bits


def blocks_nbytes(numel: int, bits: int, scale: torch.dtype = torch.uint8) -> int:
    """Return the bytes of `numel` codes in blocks, each with a scale of the dtype `scale`: those that `blocks` cuts."""
    full, rest = divmod(numel, BLOCK)
    last = scale.itemsize + packed_nbytes(rest, bits) if rest else 0
    return full * (scale.itemsize + packed_nbytes(BLOCK, bits)) + last


def blocks(
    x: Tensor, packed: Tensor, bits: int, scale: torch.dtype = torch.uint8
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield runs of k blocks as (values [k, size], scales [k], codes [k, bytes]), views of `x` [n] and `packed`.

    In `packed` all scales, of the dtype `scale`, come first, then all codes. The last block may be shorter than `BLOCK`
    values; it is then a run of its own.
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
    """Pack the codes [k, size], uint8, of `bits` bits each into `out` [k, bytes], uint8, which is written in place.

    The first of two 4-bit codes is the low nibble of their byte.
    """
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
    """Return the codes [k, size], uint8, that `pack` packed in widths other than 4 and 8.

    Those two need no unpacking, as the values of a whole byte are looked up.
    """
    ones = unpack_bits(packed.reshape(-1), bits).view(packed.shape[0], -1, bits)
    weights = 1 << torch.arange(bits, dtype=torch.uint8, device=packed.device)
    return (ones * weights).sum(2, dtype=torch.uint8)[:, :size]


def pack_bits(ones: Tensor) -> Tensor:
    """Return the bits `ones` [8 n, 1], uint8 of 0 and 1, packed into bytes [n], uint8, the lowest bit first."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=ones.device)
    return (ones.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Return the bits of bytes [n], uint8, as uint8 of 0 and 1 [8 n / bits, bits], the lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 1).view(-1, bits)


class NotFinite(ValueError):
    """The error that is raised where values are NaN, infinite or too large to send, as when a run has diverged."""


def refuse_non_finite(x: Tensor, largest: Tensor) -> None:
    """Raise NotFinite where x [n] holds NaN or infinities, with the first of them and its index.

    largest: the largest magnitude of x, or a vector of magnitudes that cover all of x; only where it is not finite is x
    searched. NotFinite is also raised where all of x is finite, but `largest`, as a sum may be, is not.
    """
    if not torch.isfinite(largest).all():
        bad = (~torch.isfinite(x)).nonzero()
        if not len(bad):
            raise NotFinite(f"values up to {x.abs().max().item():g} are too large to scale")
        at = int(bad[0, 0])
        raise NotFinite(f"value {at} of {x.numel()} is {x[at].item()}; only finite values can be sent")


def aligned(packed: Tensor) -> Tensor:
    """Return bytes that can be viewed as any dtype: a copy where they begin at no multiple of 8 in a longer message."""
    return packed.clone() if packed.storage_offset() % 8 else packed


def view_as(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes viewed as values of `dtype`, wherever in a longer message they lie."""
    return aligned(packed).view(dtype)

"""Values as one of four levels of their parameter, in 2 bits: statistical quantisation.

It is what SparseLoCo (Sarfi et al., 2025, arXiv:2508.15706) makes of the values that it sends, and MuLoCo (Therien et
al., 2025, arXiv:2505.23725) of whole outer gradients, with error feedback (`method.error_feedback`) for what is lost.
Both public codes (tplr-y/CCLoco at 214aa7d, facebookresearch/MuLoCo at 15ee278) put values v into bins of 1.5 standard
deviations about their mean,

    bin = clamp(round((v - mean) / (1.5 sigma) + 2), 0, 3)

and let them stand for the mean of their bin. They do so parameter by parameter, and so is it here (`by_parameter`):
among larger ones, the values of a parameter would all be in the bins next to the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowcomm.codecs.bits import pack, packed_nbytes, refuse_non_finite, unpack, view_as
from lowcomm.codecs.codec import Codec

#: Bytes of the four levels.
_LEVELS_NBYTES = 16


class Levels(Codec):
    """A codec that sends each value as one of four levels, in 2 bits: 16 times fewer bytes than fp32.

    The four levels come first, as fp32; a message of several parameters has four of each.
    """

    names = ("levels",)
    by_parameter = True
    block = 0

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        if not x.numel():
            return x.view(torch.uint8)
        centred = x - (mean := x.mean())
        width = 1.5 * centred.square().sum().div(max(1, x.numel() - 1)).sqrt()
        bins = (centred / width.where(width > 0, 1.0) + 2).round_().clamp_(0, 3)
        # Sums that are the same each time, on a GPU too: a message is encoded more than once.
        sums = torch.stack([centred.where(bins == level, 0.0).sum() for level in range(4)])
        counts = torch.stack([(bins == level).sum() for level in range(4)])
        levels = sums / counts.clamp(min=1) + mean
        refuse_non_finite(x, torch.cat([levels, width[None]]))  # whose squares overflow before they do
        codes = torch.empty(packed_nbytes(x.numel(), 2), dtype=torch.uint8, device=x.device)
        pack(bins.to(torch.uint8)[None], codes[None], 2)
        return torch.cat([levels.view(torch.uint8), codes])

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        if not numel:
            return view_as(packed, torch.float32)
        levels = view_as(packed[:_LEVELS_NBYTES], torch.float32)
        return levels[unpack(packed[_LEVELS_NBYTES:][None], numel, 2)[0].long()]

    def nbytes(self, numel: int) -> int:
        return _LEVELS_NBYTES + packed_nbytes(numel, 2) if numel else 0

"""Codecs that leave values out: the largest magnitudes, or random ones, as fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from lowcomm.codecs.bits import pack_bits, refuse_non_finite, unpack_bits, view_as
from lowcomm.codecs.codec import Codec


def _kept(numel: int, keep: float) -> int:
    return min(numel, max(1, round(keep * numel)))


class TopK(Codec):
    """The `keep` largest magnitudes as fp32, with their places: a bit for every value, or 4 bytes for each one kept."""

    names = ("topk",)
    sparse = True
    block = 0

    def __init__(self, keep: float):
        self.name, self.keep = f"topk {keep:g}", keep

    @classmethod
    def of(cls, name: str, keep: float) -> TopK:
        """The codec that sends this share of the values."""
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


class RandomKeep(Codec):
    """Values at random places as fp32, times `scale`; only the seed of the places travels, in 8 bytes.

    "dropout" (FedDropout) sends them as they are, "dare" (DARE) times 1 / keep, so that the sum is unbiased.
    """

    names = ("dropout", "dare")
    sparse = True
    block = 0

    def __init__(self, keep: float, scale: float = 1.0):
        self.name, self.keep, self.scale = f"random {keep:g} times {scale:g}", keep, scale

    @classmethod
    def of(cls, name: str, keep: float) -> RandomKeep:
        """The codec that sends this share of the values, scaled or not."""
        return cls(keep, 1 / keep if name == "dare" else 1.0)

    def _places(self, numel: int, seed: int, device: torch.device) -> Tensor:
        order = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))
        return order[: _kept(numel, self.keep)].sort().values.to(device)

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        refuse_non_finite(x, x.abs())
        kept = x[self._places(x.numel(), seed, x.device)] * self.scale
        return torch.cat([torch.tensor([seed], device=x.device).view(torch.uint8), kept.view(torch.uint8)])

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        x = torch.zeros(numel, device=packed.device)
        seed = int(view_as(packed[:8], torch.int64))
        x[self._places(numel, seed, packed.device)] = view_as(packed[8:], torch.float32)
        return x

    def nbytes(self, numel: int) -> int:
        return 8 + 4 * _kept(numel, self.keep)

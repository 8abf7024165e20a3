"""Values cast to a floating dtype: fp32, which loses nothing, fp16 and bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from lowcomm.codecs.bits import NotFinite, refuse_non_finite, view_as
from lowcomm.codecs.codec import Codec

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Cast(Codec):
    """A codec that casts values to a floating dtype, rounded to nearest even.

    Values that the cast would make infinite are refused.
    """

    names = tuple(_DTYPES)
    block = 1

    def __init__(self, name: str):
        self.name, self.dtype = name, _DTYPES[name]
        self.lossless = self.dtype == torch.float32

    @classmethod
    def of(cls, name: str, keep: float) -> Cast:
        """Return the cast to the dtype of this name: fp32, fp16 or bf16."""
        return cls(name)

    def encode(self, x: Tensor, seed: int = 0) -> Tensor:
        cast = x.to(self.dtype)
        if not cast.isfinite().all():
            refuse_non_finite(x, x.abs())
            raise NotFinite(
                f"values up to {x.abs().max().item():g} do not fit {self.dtype}"
                f" (largest {torch.finfo(self.dtype).max:g})"
            )
        return cast.view(torch.uint8)

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        return view_as(packed, self.dtype).to(torch.float32)

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

"""Encodings of what travels. A codec turns fp32 values into packed bytes and back.

To add a codec, write a class with `encode` and `decode` here and enter it in `CODECS`;
`method.codec` in params.yaml then accepts its name (list it in `config.MethodConfig.codec`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """fp32 [n] -> uint8 [bytes] and back. `lossless`: decode(encode(x)) equals x bit for bit."""

    lossless: bool

    def encode(self, x: Tensor) -> Tensor: ...

    def decode(self, packed: Tensor, numel: int) -> Tensor: ...

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` encoded values."""
        ...


class Cast:
    """Values cast to a floating dtype, rounded to nearest even. Infinities that the cast makes are refused."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.lossless = dtype == torch.float32

    def encode(self, x: Tensor) -> Tensor:
        cast = x.to(self.dtype)
        if not cast.isfinite().all():
            worst = x.abs().max().item()
            raise ValueError(
                f"values up to {worst:g} do not fit {self.dtype} (largest {torch.finfo(self.dtype).max:g})"
            )
        return cast.view(torch.uint8)

    def decode(self, packed: Tensor, numel: int) -> Tensor:
        return packed.view(self.dtype).to(torch.float32)

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize


CODECS: dict[str, Codec] = {
    "fp32": Cast(torch.float32),
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
}

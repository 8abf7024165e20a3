"""What crosses the boundary of two stages of a pipeline: activations one way, their gradients the other.

    dense      x as it is
    subspace   (x - T_fixed[ids]) U, and the token ids, from which the next stage rebuilds x (Protocol Models, Eq. 8);
               of gradients g U (Eq. 9). Exact in fp32, for a model that keeps to the subspace: see `subspace`
    low_rank   P Q^T, the best approximation of rank r that two power iterations find; lossy

What is sent of x goes through a codec, which may be lossy too: sparse or quantised activations. With error feedback,
what a message could not say is added to what the next one of the same micro-batch is to say.

All of it is computed in fp32, whatever the rest of the step is in. A message is bytes: the encoded values, then token
ids in as few bytes each as hold the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowcomm.codecs import make_codec, message_seed
from lowcomm.config import BoundaryConfig
from lowcomm.model import Decoder


def id_bytes(vocab_size: int) -> int:
    """Bytes of a token id: as few as hold the vocabulary."""
    return max(1, -(-(vocab_size - 1).bit_length() // 8))


def pack_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Token ids (int64) as bytes, the lowest first, `id_bytes` each."""
    return ids.reshape(-1, 1).contiguous().view(torch.uint8)[:, : id_bytes(vocab_size)].reshape(-1)


def unpack_ids(packed: Tensor, vocab_size: int) -> Tensor:
    """The inverse of `pack_ids`: [n] int64."""
    each = packed.view(-1, id_bytes(vocab_size))
    whole = each.new_zeros(len(each), 8)
    whole[:, : each.shape[1]] = each
    return whole.view(torch.int64)[:, 0]


def low_rank(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """P [n, r] with orthonormal columns and Q [D, r] so that P Q^T is near x [n, D]: two power iterations.

    They begin from the same random columns each time. r is `rank`, or n or D where that is less.
    """
    generator, rank = torch.Generator().manual_seed(0), min(rank, *x.shape)
    q = torch.empty(x.shape[1], rank).normal_(generator=generator).to(x.device)
    for _ in range(2):
        p = torch.linalg.qr(x @ q).Q
        q = x.T @ p
    return p, q


def _in_fp32(method: Callable) -> Callable:
    """Of a `Boundary`: without autocast, which would round what must be rebuilt, and without gradients."""

    @functools.wraps(method)
    def call(self: Boundary, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch.autocast(self.model.cos_TH.device.type, enabled=False):
            return method(self, *args, **kwargs)

    return call


class Boundary:
    """What one rank sends and takes.

    Args:
        model: its stage; shapes, and the subspace where there is one.
        seed: of the codec's random choices.
    """

    def __init__(self, model: Decoder, boundary: BoundaryConfig, seed: int):
        self.model, self.kind, self.rank, self.seed = model, boundary.kind, boundary.rank, seed
        self.width, self.vocab_size = model.config.dim, model.config.vocab_size
        self.codec = make_codec(boundary.codec, boundary.codec_keep)
        self.feedback = boundary.error_feedback
        self.wants_ids = self.kind == "subspace"
        #: What messages so far could not say, by direction and micro-batch: of the values sent, or of x (low_rank).
        self.errors: dict[str, Tensor] = {}

    def numel(self, tokens: int) -> int:
        """Values in a message of so many tokens."""
        if self.kind == "low_rank":
            return min(self.rank, tokens, self.width) * (tokens + self.width)
        return tokens * (self.rank if self.kind == "subspace" else self.width)

    def activation_bytes(self, tokens: int) -> int:
        """Of a message of activations."""
        return self.codec.nbytes(self.numel(tokens)) + self.wants_ids * tokens * id_bytes(self.vocab_size)

    def gradient_bytes(self, tokens: int) -> int:
        """Of a message of gradients."""
        return self.codec.nbytes(self.numel(tokens))

    def _values(self, x: Tensor, ids: Tensor | None) -> Tensor:
        """What is sent of x [n, D], flat; of activations where there are ids."""
        if self.kind == "subspace":
            return ((x if ids is None else x - self.model.fixed_VD[ids]) @ self.model.basis_DR).flatten()
        if self.kind == "low_rank":
            return torch.cat([part.flatten() for part in low_rank(x, self.rank)])
        return x.flatten()

    def _rebuilt(self, values: Tensor, ids: Tensor | None, tokens: int) -> Tensor:
        """x [n, D] from its values."""
        if self.kind == "subspace":
            x = values.view(tokens, self.rank) @ self.model.basis_DR.T
            return x if ids is None else x.add_(self.model.fixed_VD[ids])
        if self.kind == "low_rank":
            rank = min(self.rank, tokens, self.width)
            p, q = values.split([tokens * rank, self.width * rank])
            return p.view(tokens, rank) @ q.view(self.width, rank).T
        return values.view(tokens, self.width)

    def _encoded(self, x: Tensor, ids: Tensor | None, turn: int, slot: str | None) -> Tensor:
        x = x.detach().reshape(-1, self.width).float()
        before = self.errors.get(slot, 0.0) if self.feedback and slot is not None else 0.0
        if self.kind == "low_rank":
            x = x + before
            wanted = values = self._values(x, ids)
        else:
            wanted = values = self._values(x, ids) + before
        if self.codec.lossless:
            packed = values.view(torch.uint8)
        else:
            packed = self.codec.encode(values, message_seed(self.seed, turn))
        if self.feedback and slot is not None:
            said = self.codec.decode(packed, values.numel())
            if self.kind == "low_rank":
                wanted, said = x, self._rebuilt(said, ids, len(x))
            self.errors[slot] = wanted - said
        return packed

    @_in_fp32
    def activations(self, x: Tensor, ids: Tensor | None, *, turn: int = 0, slot: int | None = None) -> Tensor:
        """The message of activations [B, T, D] of token ids [B, T], which only a subspace wants to know.

        `turn` decides a codec's random choices; `slot`, a micro-batch, has errors of its own (None: no feedback).
        """
        ids = ids.reshape(-1) if self.wants_ids else None
        packed = self._encoded(x, ids, 2 * turn, None if slot is None else f"activations/{slot}")
        return packed if ids is None else torch.cat([packed, pack_ids(ids, self.vocab_size)])

    @_in_fp32
    def read_activations(self, message: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Activations [B, T, D] and, where they travel, ids [B, T], from a message; `shape`: (B, T)."""
        tokens, ids = shape[0] * shape[1], None
        if self.wants_ids:
            size = self.codec.nbytes(self.numel(tokens))
            message, packed = message.split([size, message.numel() - size])
            ids = unpack_ids(packed, self.vocab_size)
        x = self._rebuilt(self.codec.decode(message, self.numel(tokens)), ids, tokens)
        return x.view(*shape, self.width), None if ids is None else ids.view(shape)

    @_in_fp32
    def gradients(self, g: Tensor, *, turn: int = 0, slot: int | None = None) -> Tensor:
        """The message of gradients [B, T, D]."""
        return self._encoded(g, None, 2 * turn + 1, None if slot is None else f"gradients/{slot}")

    @_in_fp32
    def read_gradients(self, message: Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Gradients [B, T, D] from a message; `shape`: (B, T)."""
        tokens = shape[0] * shape[1]
        x = self._rebuilt(self.codec.decode(message, self.numel(tokens)), None, tokens)
        return x.view(*shape, self.width).to(dtype)
